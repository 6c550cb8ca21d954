"""Exact minimisation of a sum of small tables by variable elimination.

The problem: variables ``i`` with ``n_i`` labels, unary tables ``u_i`` of shape ``(n_i,)`` and pair tables ``p_ij`` of
shape ``(n_i, n_j)``; find the labels with the least ``sum u_i[x_i] + sum p_ij[x_i, x_j]``. Variables are eliminated one
by one (min-plus bucket elimination, Dechter 1999, "Bucket elimination: a unifying framework for reasoning"): the tables
that mention a variable are added up, minimised over it, and the result replaces them. The order is greedy: always the
variable whose combined table is smallest ("min-weight"). Exact; time and memory grow with the largest combined table,
``exp(induced width)``. Ties go to the smaller label, so results do not depend on hash seeds.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.errors import SearchLimitError

Pairs = Mapping[tuple[int, int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Elimination:
    """The outcome: the least cost, its labels, and what it took.

    Attributes:
        cost: the minimum, in the tables' unit.
        labels: shape ``(n_variables,)``, the label of each variable.
        width: neighbours of a variable at its elimination, at most (the induced width).
        conditioned: variables that were fixed at their incumbent label because a table would have been too large.
    """

    cost: float
    labels: np.ndarray
    width: int
    conditioned: int


def table_cost(unary: Sequence[np.ndarray], pairs: Pairs, labels: Sequence[int] | np.ndarray) -> float:
    """The sum of all tables at the given labels."""
    total = math.fsum(float(table[label]) for table, label in zip(unary, labels, strict=True))
    return total + math.fsum(float(table[labels[i], labels[j]]) for (i, j), table in pairs.items())


def eliminate(
    unary: Sequence[np.ndarray],
    pairs: Pairs,
    *,
    max_entries: int = 1 << 22,
    incumbent: Sequence[int] | np.ndarray | None = None,
) -> Elimination:
    """The minimiser of a sum of unary and pair tables.

    Args:
        unary: ``unary[i]: (n_i,) float64``.
        pairs: ``pairs[i, j]: (n_i, n_j) float64`` with ``i != j``.
        max_entries: the largest combined table allowed.
        incumbent: labels to fix variables at where a table would exceed ``max_entries``; the answer is then exact for
            the remaining variables and never worse than the incumbent.

    Raises:
        SearchLimitError: a table would exceed ``max_entries`` and there is no incumbent.
    """
    state = _State(unary, pairs)
    while state.heap:
        weight, variable, stamp = heapq.heappop(state.heap)
        if variable not in state.neighbours or stamp != state.stamps[variable]:
            continue
        if weight > max_entries:
            if incumbent is None:
                raise SearchLimitError(
                    f"exact elimination keeps tables up to {max_entries:,} entries and met one of {weight:,} "
                    f"(induced width {len(state.neighbours[variable])}). Use searcher='recursive_programming', or a mesh of fewer axes."
                )
            hub = max(state.neighbours, key=lambda v: (len(state.neighbours[v]), state.sizes[v], -v))
            state.condition(hub, int(incumbent[hub]))
            if hub != variable:
                state.push(variable)
        else:
            state.eliminate(variable)
    return state.trace_back()


class _State:
    """The tables that are left, and the record of what was eliminated."""

    def __init__(self, unary: Sequence[np.ndarray], pairs: Pairs):
        self.sizes = [len(table) for table in unary]
        self.unary = [np.array(table, dtype=np.float64) for table in unary]
        self.neighbours: dict[int, dict[int, None]] = {i: {} for i in range(len(unary))}
        self.factors: dict[int, dict[int, None]] = {i: {} for i in range(len(unary))}
        self.tables: dict[int, tuple[tuple[int, ...], np.ndarray]] = {}
        self.records: list[tuple[int, tuple[int, ...], np.ndarray]] = []
        self.constant = 0.0
        self.width = 0
        self.conditioned = 0
        self._names = 0
        for (i, j), table in pairs.items():
            if self.sizes[i] == 1:
                self.unary[j] = self.unary[j] + table[0]
            elif self.sizes[j] == 1:
                self.unary[i] = self.unary[i] + table[:, 0]
            else:
                self._add((i, j), table)
        self.stamps = [0] * len(unary)
        self.heap: list[tuple[int, int, int]] = []
        for i in range(len(unary)):
            self.push(i)

    def push(self, variable: int) -> None:
        self.stamps[variable] += 1
        weight = self.sizes[variable]
        for other in self.neighbours[variable]:
            weight *= self.sizes[other]
        heapq.heappush(self.heap, (weight, variable, self.stamps[variable]))

    def _add(self, scope: tuple[int, ...], table: np.ndarray) -> None:
        name = self._names
        self._names += 1
        self.tables[name] = (scope, table)
        for i in scope:
            self.factors[i][name] = None
            for j in scope:
                if i != j:
                    self.neighbours[i][j] = None

    def _take(self, variable: int) -> list[tuple[tuple[int, ...], np.ndarray]]:
        """Removes and returns the tables that mention the variable."""
        taken = []
        for name in self.factors.pop(variable):
            scope, table = self.tables.pop(name)
            taken.append((scope, table))
            for other in scope:
                if other != variable:
                    del self.factors[other][name]
        return taken

    def _forget(self, variable: int) -> tuple[int, ...]:
        around = tuple(sorted(self.neighbours.pop(variable)))
        for other in around:
            del self.neighbours[other][variable]
        return around

    def eliminate(self, variable: int) -> None:
        taken = self._take(variable)
        around = self._forget(variable)
        self.width = max(self.width, len(around))
        scope = (*around, variable)
        total = self.unary[variable].reshape((1,) * len(around) + (-1,))
        for factor_scope, table in taken:
            total = total + _aligned(factor_scope, table, scope)
        best = total.argmin(axis=-1)
        self.records.append((variable, around, best.astype(np.int16)))
        reduced = total.min(axis=-1)
        if not around:
            self.constant += float(reduced)
        elif len(around) == 1:
            self.unary[around[0]] = self.unary[around[0]] + reduced
            self.push(around[0])
        else:
            self._add(around, reduced)
            for other in around:
                self.push(other)

    def condition(self, variable: int, label: int) -> None:
        """Fixes a variable at a label and folds its tables into its neighbours."""
        self.conditioned += 1
        self.constant += float(self.unary[variable][label])
        self.records.append((variable, (), np.asarray(label, dtype=np.int16)))
        taken = self._take(variable)
        around = self._forget(variable)
        for scope, table in taken:
            rest = tuple(v for v in scope if v != variable)
            slab = np.take(table, label, axis=scope.index(variable))
            if len(rest) == 1:
                self.unary[rest[0]] = self.unary[rest[0]] + slab
            else:
                self._add(rest, slab)
        for other in around:
            self.push(other)

    def trace_back(self) -> Elimination:
        labels = np.zeros(len(self.sizes), dtype=np.int64)
        for variable, around, best in reversed(self.records):
            labels[variable] = best[tuple(labels[v] for v in around)]
        return Elimination(self.constant, labels, self.width, self.conditioned)


def _aligned(scope: tuple[int, ...], table: np.ndarray, target: tuple[int, ...]) -> np.ndarray:
    """The table transposed to the target's variable order, with size-1 axes for those it lacks."""
    order = sorted(range(len(scope)), key=lambda a: target.index(scope[a]))
    shape = [1] * len(target)
    for axis in order:
        shape[target.index(scope[axis])] = table.shape[axis]
    return table.transpose(order).reshape(shape)
