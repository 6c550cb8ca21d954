"""The mixed-integer program of a problem, as HiGHS solves it: the local marginal polytope of labels, and rows of memory.

The searcher is in `autoshard.search.integer_programming`.
"""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.compilers.buffers import Peak
from autoshard.errors import SearchLimitError
from autoshard.inference.reparametrisation import Reparametrisation
from autoshard.problem import MemoryTables, Problem

SCALE = 1e4  # of an answer's cost in the model, since HiGHS's tolerances are absolute: 1e-6 and 1e-7
STATUS_INFEASIBLE = 2  # of scipy.optimize.milp
IN_PROCESS = 2000  # variables; HiGHS was seen to take less than a second for models of so many
CHILD = """
import pickle, sys
from scipy.optimize import milp
found = milp(**pickle.load(sys.stdin.buffer))
sys.stdout.buffer.write(pickle.dumps((found.status, found.x, found.mip_dual_bound)))
"""


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """A linear constraint: the sum of the chosen labels' coefficients is at most the limit.

    Attributes:
        coefficients: per variable ``(n,)``.
        limit: the most.
        pairs: coefficients of two variables' labels ``(n_i, n_j)``, ``i < j``.
    """

    coefficients: dict[int, np.ndarray]
    limit: float
    pairs: dict[tuple[int, int], np.ndarray] = field(default_factory=dict)

    def used(self, labels: Sequence[int] | np.ndarray) -> float:
        """The sum for the chosen positions of all variables' labels."""
        alone = sum(float(shares[labels[variable]]) for variable, shares in self.coefficients.items())
        return alone + sum(float(shares[labels[i], labels[j]]) for (i, j), shares in self.pairs.items())


def memory_rows(
    problem: Problem,
    sizes: Sequence[int],
    labels: np.ndarray,
    peak: Peak,
    limit: float,
    known: Mapping[tuple[int, int], float] = MappingProxyType({}),
) -> list[Row]:
    """Rows that these labels, whose peak is beyond the limit, violate, and that all labels within the limit satisfy.

    One row counts all values live at the peak, less the bytes that could be in fast memory under other labels. Another counts only what
    never is in fast memory: the program's arguments and results, and what is sent. Two more count what copies and partial results take
    under other labels too, where ops that run at the peak make them. Where these labels satisfy all, a row excludes them alone.

    Args:
        sizes: per variable the number of its labels.
        labels: the position of each variable's label.
        peak: theirs, as judged.
        limit: of memory, in bytes.
        known: bytes of values in other layouts, from other peaks.
    """
    times = problem.facts.lifetimes
    passed = {value for value, is_passed in zip(times.values, times.passed, strict=True) if is_passed}
    counted = (None, passed) if peak.spare_bytes else (None,)
    rows = [_row(problem, sizes, labels, peak, limit, only, made, known) for only in counted for made in (True, False)]
    if violated := [row for row in rows if row.used(labels) > row.limit + BUDGETS.rounding]:
        return violated
    others = {variable: np.arange(n) != labels[variable] for variable, n in enumerate(sizes) if n > 1}
    return [Row({variable: -other.astype(float) for variable, other in others.items()}, -1.0)]


def _row(
    problem: Problem,
    sizes: Sequence[int],
    labels: np.ndarray,
    peak: Peak,
    limit: float,
    only: Collection[int] | None,
    made: bool,
    known: Mapping[tuple[int, int], float],
) -> Row:
    """The row of what is live at a peak, in units of the limit.

    Args:
        only: the values that count, if not all do: such as are never in fast memory. Nor are copies and partial results, which are sent.
        made: whether what ops make as they run counts under all labels; else copies and partial results count under the present ones.
    """
    memory = problem.cached(MemoryTables)
    bytes_of, undecided = memory.least_bytes(peak, labels, only, known)
    coefficients = {variable: nbytes / limit for variable, nbytes in bytes_of.items()}
    room = (limit + (peak.spare_bytes if only is None else 0.0) - undecided) / limit
    pairs: dict[tuple[int, int], np.ndarray] = {}

    def add(variable: int, nbytes: np.ndarray) -> None:
        coefficients[variable] = coefficients.get(variable, 0.0) + nbytes / limit

    read = memory.copies_read(peak.moment, labels) if made else {}
    for source, target, nbytes in read.values():
        if source == target:
            add(source, np.diagonal(nbytes))
            continue
        key, table = ((source, target), nbytes) if source < target else ((target, source), nbytes.T)
        pairs[key] = pairs.get(key, 0.0) + table / limit
    for value, nbytes in peak.copies:  # a copy stays while the value and its readers keep their layouts
        if value in read:
            continue
        masks = memory.same_layout(value, labels)
        room += (len(masks) - 1) * nbytes / limit
        for variable, same in masks.items():
            add(variable, same * nbytes)
    running, stored = memory.running(peak.moment), dict(peak.partials)
    for op, variable in running.items():  # later a sum is kept for others, as their labels decide
        if made:
            add(variable, memory.partial_bytes(op))
        elif op in stored:
            add(variable, (np.arange(sizes[variable]) == labels[variable]) * stored[op])
    return Row(coefficients, room, pairs)


@dataclass(frozen=True, slots=True, eq=False)
class MilpResult:
    """The result of HiGHS: labels, None if it found none, and a lower bound of their cost, infinite where no labels satisfy the rows."""

    labels: np.ndarray | None
    bound: float


class Model:
    """The local marginal polytope of the labels and pairs whose reduced cost is at most the slack.

    Args:
        limited: whether rows will come, which may count bytes by the labels of pairs that cost no time.

    Attributes:
        kept: per variable the positions of the labels that are left.
        n_variables: of the model: indicators, and numbers of pairs.
    """

    def __init__(self, moved: Reparametrisation, slack: float, max_variables: int, limited: bool = False):
        self.bound: float = moved.bound
        self.kept = [np.flatnonzero(reduced <= slack) for reduced in moved.reduced]
        sizes = [len(labels) for labels in self.kept]
        self.offsets = np.concatenate(([0], np.cumsum(sizes)))
        self._costs = [table[labels] for table, labels in zip(moved.unary, self.kept, strict=True)]
        self._more: list[np.ndarray] = []
        self._entries: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
        self._numbers: dict[tuple[int, int], tuple[int, np.ndarray, np.ndarray]] = {}  # of pairs: the first one, and both labels of each
        self.n_variables = int(self.offsets[-1])
        n_rows = 0
        for (i, j), table in moved.pairs.items():
            part = table[np.ix_(self.kept[i], self.kept[j])]
            if sizes[i] == 1 or sizes[j] == 1:
                self._costs[i if sizes[j] == 1 else j] = self._costs[i if sizes[j] == 1 else j] + part.reshape(-1)
                continue
            least = moved.reduced[i] - table.min(axis=1), moved.reduced[j] - table.min(axis=0)
            beyond = part + least[0][self.kept[i]][:, None] + least[1][self.kept[j]]
            a, b = np.nonzero(beyond <= slack)
            if not limited and not part.any():  # it neither costs anything nor excludes a better answer
                continue
            self._numbers[i, j] = self.n_variables, self.kept[i][a], self.kept[j][b]
            n_rows = self._pair(i, j, a, b, part[a, b], n_rows)
            if self.n_variables > max_variables:
                raise SearchLimitError(
                    f"integer programming takes models of up to {max_variables:,} variables, and this one has more than "
                    f"{self.n_variables:,}. Use searcher='dynamic_programming' or 'recursive_programming'."
                )
        self._n_pair_rows = n_rows

    def _pair(self, i: int, j: int, a: np.ndarray, b: np.ndarray, costs: np.ndarray, n_rows: int) -> int:
        """Adds a pair's numbers and the rows that tie them to its variables' indicators; returns the number of rows."""
        columns = self.n_variables + np.arange(len(costs))
        self._more.append(costs)
        self.n_variables += len(costs)
        for variable, position in ((i, a), (j, b)):
            own = np.arange(len(self.kept[variable]))
            self._entries.append((n_rows + position, columns, np.ones(len(columns))))
            self._entries.append((n_rows + own, self.offsets[variable] + own, np.full(len(own), -1.0)))
            n_rows += len(own)
        return n_rows

    def solved(self, rows: Sequence[Row], time_limit_seconds: float, gap: float, max_nodes: int | None = None) -> MilpResult:
        """The result of HiGHS under memory rows."""
        from scipy import sparse
        from scipy.optimize import Bounds, LinearConstraint

        if not self.kept:
            return MilpResult(np.zeros(0, dtype=np.int64), self.bound)
        n, n_labels = self.n_variables, int(self.offsets[-1])
        costs = np.concatenate([*self._costs, *self._more]) if n else np.zeros(0)
        unit = SCALE / max(self.bound, float(np.max(costs, initial=0.0)) / SCALE, 1e-300)
        constant = np.array([self.bound * unit])  # a variable that is 1, so that gaps are relative to the whole sum
        which = np.repeat(np.arange(len(self.kept)), np.diff(self.offsets))
        one_label = sparse.csr_array((np.ones(n_labels), (which, np.arange(n_labels))), shape=(len(self.kept), n + 1))
        constraints = [LinearConstraint(one_label, 1.0, 1.0)]
        if self._entries:
            r, c, v = (np.concatenate([entry[k] for entry in self._entries]) for k in range(3))
            constraints.append(LinearConstraint(sparse.csr_array((v, (r, c)), shape=(self._n_pair_rows, n + 1)), 0.0, 0.0))
        for row in rows:
            line = np.zeros(n + 1)
            for variable, coefficients in row.coefficients.items():
                line[self.offsets[variable] : self.offsets[variable + 1]] = coefficients[self.kept[variable]]
            for (i, j), coefficients in row.pairs.items():
                if (i, j) in self._numbers:
                    first, a, b = self._numbers[i, j]
                    line[first : first + len(a)] += coefficients[a, b]
                    continue
                part = coefficients[np.ix_(self.kept[i], self.kept[j])]
                one = i if len(self.kept[j]) == 1 else j
                line[self.offsets[one] : self.offsets[one + 1]] += part.reshape(-1)
            constraints.append(LinearConstraint(sparse.csr_array(line[None, :]), -np.inf, row.limit))
        lower = np.zeros(n + 1)
        lower[n] = 1.0
        status, x, dual = _highs({
            "c": np.concatenate((costs * unit, constant)),
            "integrality": np.concatenate((np.ones(n_labels), np.zeros(n + 1 - n_labels))),
            "bounds": Bounds(lower, np.ones(n + 1)),  # pyright: ignore[reportArgumentType] (arrays, as documented)
            "constraints": constraints,
            "options": {"time_limit": time_limit_seconds, "mip_rel_gap": gap} | ({} if max_nodes is None else {"node_limit": max_nodes}),
        })  # fmt: skip
        if status == STATUS_INFEASIBLE:
            return MilpResult(None, math.inf)
        bound = self.bound if dual is None or not math.isfinite(dual) else dual / unit
        if x is None:
            return MilpResult(None, bound)
        shares = np.split(x[:n_labels], self.offsets[1:-1])
        return MilpResult(np.array([labels[share.argmax()] for labels, share in zip(self.kept, shares, strict=True)]), bound)


def _highs(model: dict) -> tuple[int, np.ndarray | None, float | None]:
    """Status, variables and dual bound, as `scipy.optimize.milp` gives them.

    HiGHS keeps the interpreter's lock, so that Ctrl-C would have no effect: large models are solved in a child process, which it ends.
    """
    if len(model["c"]) <= IN_PROCESS:
        from scipy.optimize import milp

        result = milp(**model)
        return result.status, result.x, result.mip_dual_bound
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True) as child:
        try:
            reply, _ = child.communicate(pickle.dumps(model))
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        raise SearchLimitError(
            f"integer programming solves in a child process, which ended with status {child.returncode} (out of memory?). "
            "Use searcher='dynamic_programming' or 'recursive_programming'."
        )
    return pickle.loads(reply)
