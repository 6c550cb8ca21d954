"""Integer programming: the optimum as proven by HiGHS, with the memory limit as constraints.

*Variables.* One indicator (0 or 1) a variable of the problem and label; one continuous number a pair of variables and of their labels.
*Constraints.* Each variable has one label; the numbers of a pair add up to the indicators of its variables, from either side (the local
marginal polytope: Wainwright and Jordan 2008, "Graphical models, exponential families, and variational inference", section 4.1).
*Memory.* A peak is a maximum over moments of the program. The model starts without memory rows; where the judge finds the answer's peak
above the limit, a row is added: the bytes, by label, of the values live there are at most the limit. Then the model is solved again
(Kelley 1960, "The cutting-plane method"). Copies in other layouts and partial sums that an op makes as it runs count under all labels of
the op and of what it reads; other copies while the value and all its readers keep their labels. *Objective.* The sum of unary and pair
tables: the judge's ``objective_seconds``. *Ties.* As HiGHS breaks them: equal models get equal answers.

*Warm start.* Message passing (`autoshard.inference.reparametrisation`) gives every label and every pair of labels a reduced cost: a lower
bound of the cost beyond the bound of any labelling with it. The model has the labels and pairs up to a slack, which is widened until the
answer is within it: no label outside is then part of a better one. The first incumbent is the answer of recursive programming.

*The certificate.* Every row follows from the limit: the values live at a moment of the program do not depend on the assignment, and a row
never counts more bytes than the judge does. So the dual bound of the model with rows bounds every
assignment within the limit, and the gap is honest where the limit binds; assignments above the limit may cost less.

Complexity: exponential in the worst case; on tables that message passing has made tight the relaxation is nearly integral.
"""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import ClassVar

import numpy as np
from scipy import sparse
from scipy.optimize import Bounds, LinearConstraint, milp

from autoshard.budgets import BUDGETS
from autoshard.compilers.buffer_assignment import Peak, peaks_above
from autoshard.errors import InfeasibleError, SearchLimitError
from autoshard.inference.reparametrisation import Reparametrisation, reparametrise
from autoshard.judge.evaluate import Judgement
from autoshard.problem import NO_HINTS, Hints, MemoryTables, Problem, Tables
from autoshard.progress import Progress, silent
from autoshard.render import format_bytes
from autoshard.search.recursive_programming import RecursiveProgramming
from autoshard.search.searcher import Searcher, Solution

SCALE = 1e4  # of an answer's cost in the model, since HiGHS's tolerances are absolute: 1e-6 and 1e-7
STATUS_INFEASIBLE = 2  # of scipy.optimize.milp
PEAKS = 4  # of one answer, that get rows at once
ROUND = 1000  # variables; HiGHS takes models under memory rows some tenths of a second, and one of four times as many four seconds
IN_PROCESS = 2000  # variables; HiGHS was seen to take less than a second for models of so many
CHILD = """
import pickle, sys
from scipy.optimize import milp
found = milp(**pickle.load(sys.stdin.buffer))
sys.stdout.buffer.write(pickle.dumps((found.status, found.x, found.mip_dual_bound)))
"""


@dataclass(frozen=True, slots=True)
class IntegerProgramming(Searcher):
    """The integer-programming searcher.

    Attributes:
        time_limit_seconds: of all HiGHS runs together; after it the best answer is returned with its gap. None: no limit.
        gap: the relative gap at which the search stops.
        max_problem_entries: the most entries of all pair tables together.
        max_variables: the most variables of a model.
        max_sweeps: the most sweeps of message passing.
        max_nodes: of branch and bound, in one model; None: as many as there is time for.
        max_rounds: the most models solved, of which each counts once for every `ROUND` variables begun; None: as many as there is time
            for. With both limits and no time limit, answers do not depend on the machine.
    """

    name: ClassVar[str] = "integer_programming"
    automatic: ClassVar[bool] = True

    time_limit_seconds: float | None = 60.0
    gap: float = 0.0
    max_problem_entries: int = 1 << 24
    max_variables: int = 1 << 20
    max_sweeps: int = 60
    max_nodes: int | None = None
    max_rounds: int | None = None

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The optimum within the memory limit, or the best found in time; see the module.

        Raises:
            SearchLimitError: the tables or the model would be too large, or no answer within the limit was found in time.
            InfeasibleError: nothing fits the memory limit.
        """
        return _Run(self, problem, progress, hints).solution()

    def limited(self, seconds: float) -> IntegerProgramming:
        """The searcher with a time limit of its own, since HiGHS calls no progress callback."""
        return replace(self, time_limit_seconds=seconds if self.time_limit_seconds is None else min(seconds, self.time_limit_seconds))


def first_that_fits(
    searcher: IntegerProgramming, problems: Sequence[Problem], progress: Progress = silent, hints: Hints = NO_HINTS
) -> tuple[Solution, Problem] | None:
    """The answer to the first of several problems that has one within its memory limit, and that problem; None: none was found.

    All share the searcher's rounds. No other searcher finds anything in them, so none is run for a first incumbent.
    """
    rounds = searcher.max_rounds
    for problem in problems:
        run = _Run(replace(searcher, max_rounds=rounds), problem, progress, hints)
        with suppress(InfeasibleError, SearchLimitError):
            return run.solution(starts=False), problem
        if rounds is not None and (rounds := rounds - run.rounds) <= 0:
            break
    return None


class _Run:
    """The models of one problem, and the best answer.

    Attributes:
        best: the incumbent; None: none is within the memory limit.
        smallest_peak: the smallest peak found, in bytes.
        rows: of memory.
        known: the bytes of values at peaks so far, by value and the number of its layout.
        rounds: the models solved, as `IntegerProgramming.max_rounds` counts them.
        n_variables: of the last one.
        until: the end of the time limit.
    """

    def __init__(self, searcher: IntegerProgramming, problem: Problem, progress: Progress, hints: Hints):
        self.searcher = searcher
        self.problem = problem
        self.progress = progress
        self.hints = hints
        self.started = time.perf_counter()
        self.best: Judgement | None = None
        self.smallest_peak = math.inf
        self.rows: list[Row] = []
        self.known: dict[tuple[int, int], float] = {}
        self.rounds = self.n_variables = 0
        self.until = math.inf

    def solution(self, starts: bool = True) -> Solution:
        """The best answer; ``starts``: whether the first incumbent is searched for."""
        problem = self.problem
        if starts:
            self._first_answer()
        tables = self._tables()
        moved = reparametrise(tables, max_sweeps=self.searcher.max_sweeps, progress=self.progress)
        bound = self._bound_by_widening(tables, moved, problem.fixed_seconds())
        if self.best is None:
            raise InfeasibleError(
                f"a strategy must fit {format_bytes(problem.memory_limit_bytes or 0.0)} a device, and on mesh {problem.mesh} none does: "
                f"the smallest peak found is {format_bytes(self.smallest_peak)}. "
                "Use more devices, a smaller batch, or a higher memory limit.",
                self.smallest_peak,
            )
        is_open = bound < self.best.cost.objective_seconds * (1 - self.searcher.gap) / (1 + BUDGETS.rounding)
        return Solution(
            judgement=self.best,
            lower_bound_seconds=min(bound, self.best.cost.objective_seconds),
            notes=self._late_notes() if is_open else (),
            stats={
                "n_variables": problem.n_variables,
                "n_program_variables": self.n_variables,
                "memory_rows": len(self.rows),
                "rounds": self.rounds,
                "search_seconds": time.perf_counter() - self.started,
            },
            hints=self.hints,
        )

    def _late_notes(self) -> tuple[str]:
        return (f"integer programming's {self._given()} before its bound reached its answer: a higher limit may close the gap",)

    def _first_answer(self) -> None:
        try:
            first = RecursiveProgramming().solve(self.problem, self.progress, self.hints)
        except InfeasibleError as error:
            self.smallest_peak = error.smallest_peak_bytes or math.inf
        else:
            self.best, self.hints = first.judgement, first.hints

    def _tables(self) -> Tables:
        problem, limit = self.problem, self.searcher.max_problem_entries
        axes = range(len(problem.mesh.axes))
        if (entries := problem.table_entries(axes, limit)) > limit:
            raise SearchLimitError(
                f"integer programming takes tables of up to {limit:,} entries, and on mesh {problem.mesh} this program has "
                f"more than {entries:,}. Use searcher='dynamic_programming', or 'recursive_programming' on meshes of many axes."
            )
        return problem.whole_tables()

    def _bound_by_widening(self, tables: Tables, moved: Reparametrisation, fixed: float) -> float:
        """The lower bound from models of ever more labels, until none outside can be part of a better answer, or the time is over."""
        seconds = self.searcher.time_limit_seconds
        self.until = math.inf if seconds is None else time.perf_counter() + seconds
        least = bound = fixed + moved.bound
        most = sum(float(table.max()) for table in (*moved.unary, *moved.pairs.values()))  # a slack with which the model has all labels
        slack = 0.0
        while True:
            enough = most if self.best is None else self.best.cost.objective_seconds - least
            slack = min(max(8 * slack, enough / 64 if self.best else least / 64), max(enough, 0.0)) + BUDGETS.rounding * least
            model = Model(moved, slack, self.searcher.max_variables, self.problem.memory_limit_bytes is not None)
            self.n_variables = model.n_variables
            bound = max(bound, min(self._bound_by_rows(tables, model, fixed), least + slack))
            objective = math.inf if self.best is None else self.best.cost.objective_seconds
            if objective <= bound / (1 - self.searcher.gap) * (1 + BUDGETS.rounding) or slack >= most or self._late():
                return bound

    def _bound_by_rows(self, tables: Tables, model: Model, fixed: float) -> float:
        """The lower bound of a model with ever more memory rows, until its answer is within the limit, or the time is over."""
        problem = self.problem
        bound = 0.0
        while True:
            left = max(self.until - time.perf_counter(), 0.0)
            given = self.searcher.time_limit_seconds
            self.progress("integer program", 0.0 if given is None else 1.0 - left / given)
            answer = model.solved(self.rows, max(left, 0.1), self.searcher.gap, self.searcher.max_nodes)
            self.rounds += 1 + model.n_variables // ROUND
            bound = max(bound, fixed + answer.bound)
            if answer.labels is None:
                return bound
            labels = [options[label] for options, label in zip(tables.labels, answer.labels, strict=True)]
            judgement = problem.evaluate(problem.assignment(labels))
            limit = problem.memory_limit_bytes
            self.smallest_peak = min(self.smallest_peak, judgement.cost.peak_bytes)
            if limit is None or judgement.cost.peak_bytes <= limit:
                if self.best is None or judgement.cost.objective_seconds < self.best.cost.objective_seconds:
                    self.best = judgement
                return bound
            memory, sizes = problem.cached(MemoryTables), [len(options) for options in tables.labels]
            for peak in self._peaks(judgement, limit):
                self.known |= memory.held_bytes(peak, answer.labels)
                self.rows += memory_rows(problem, sizes, answer.labels, peak, limit, self.known)
            if self._late():
                return bound

    def _peaks(self, judgement: Judgement, limit: float) -> list[Peak]:
        """The judged peak, and the fullest other moments beyond the limit."""
        facts, peak = self.problem.facts, judgement.peak
        others = peaks_above(facts, judgement.assignment, judgement.copies, judgement.partials, limit, PEAKS)
        return [peak, *(other for other in others if other.moment != peak.moment)]

    def _late(self) -> bool:
        """Whether the time is over, or as many models are solved as may be.

        Raises:
            SearchLimitError: so it is, and there is no answer.
        """
        if time.perf_counter() <= self.until and not self._all_solved():
            return False
        if self.best is None:
            raise SearchLimitError(
                f"integer programming's {self._given()}, and no strategy within the memory limit was found. "
                "Use a higher limit, or searcher='recursive_programming'."
            )
        return True

    def _all_solved(self) -> bool:
        return self.searcher.max_rounds is not None and self.rounds >= self.searcher.max_rounds

    def _given(self) -> str:
        """The limit that was reached, in words."""
        if self._all_solved():
            return f"{self.searcher.max_rounds} rounds of models were solved"
        if self.searcher.time_limit_seconds is None:
            return f"{self.searcher.max_nodes} nodes of a model were searched"
        return f"{self.searcher.time_limit_seconds:g} s were over"


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
        self.bound = moved.bound
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
