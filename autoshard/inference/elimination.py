"""Exact minimisation of a pairwise model by variable elimination.

Variables are eliminated one by one (min-plus bucket elimination, Dechter 1999, "Bucket elimination: a unifying framework for reasoning"):
the tables that mention a variable are added up and minimised over it, and the result replaces them. `autoshard.inference.elimination_order`
finds the order. Exact; time and memory grow with the largest joined table, ``exp(induced width)``. Ties go to the smaller label, so results
do not depend on hash seeds.

Equal layers have the very same tables: an elimination of the same arrays is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial, reduce

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.errors import SearchLimitError
from autoshard.inference.elimination_order import EliminationOrder, Join, Orderer, Scope, Step
from autoshard.inference.model import PairwiseModel

NO_TABLE = np.zeros((), dtype=np.int16)


@dataclass(frozen=True, slots=True)
class Elimination:
    """The minimum of a model, and what it took.

    Attributes:
        cost: the least energy.
        labels: ``(n_variables,)``, labels of that energy.
        width: the induced width: the most neighbours that a variable had at its elimination.
        conditioned: the number of variables fixed at their incumbent label because a table would have been too large.
    """

    cost: float
    labels: np.ndarray
    width: int
    conditioned: int


def eliminate(model: PairwiseModel, *, max_entries: int = 1 << 22, incumbent: Sequence[int] | np.ndarray | None = None) -> Elimination:
    """The minimum of a model.

    Args:
        max_entries: the largest joined table allowed.
        incumbent: labels ``(n_variables,)`` to fix variables at where a table would exceed ``max_entries``; the answer is then exact for
            the remaining variables and never worse than the incumbent.

    Raises:
        SearchLimitError: a table would exceed ``max_entries`` and there is no incumbent.
    """
    return Eliminator(max_entries)(model, incumbent)


class Eliminator:
    """Eliminations of similar models, which share orders over the same pairs and steps on the same tables.

    Attributes:
        max_entries: the largest joined table allowed.
    """

    def __init__(self, max_entries: int = 1 << 22):
        self.max_entries = max_entries
        self._orders: dict[tuple[Scope, ...], list[EliminationOrder]] = {}
        self._joins: dict[Join, int] = {}
        self._results: dict[tuple[int, ...], _Joined] = {}  # by the identities of their tables, which they keep alive
        self._kept_entries = 0

    def __call__(
        self,
        model: PairwiseModel,
        incumbent: Sequence[int] | np.ndarray | None = None,
        largest_sizes: list[int] | None = None,
        cheap: bool = False,
    ) -> Elimination:
        """The minimum of a model, as `eliminate`.

        Args:
            largest_sizes: per variable the most labels it has in eliminations to come; the order is made for those where it can be.
            cheap: whether to refuse, as too large, what takes more than `Budgets.small_entries` a variable in the min-weight order.
        """
        if not model.unary:
            return Elimination(0.0, np.zeros(0, dtype=np.int64), 0, 0)
        order = self._order(model, incumbent is not None, largest_sizes, cheap)
        labels = [0] * len(model.unary)
        constant, best = self._follow(order, self._tables(model, order.singles), incumbent)
        for step in reversed(order.steps):
            labels[step.variable] = best[step.variable](step.labels(labels))
        return Elimination(constant, np.array(labels, dtype=np.int64), order.width, order.conditioned)

    def _order(self, model: PairwiseModel, conditioning: bool, largest_sizes: list[int] | None, cheap: bool) -> EliminationOrder:
        """The order of an earlier elimination over these pairs where it serves, else a new one."""
        orderer = Orderer(tuple(model.pairs), self._joins, self.max_entries)
        known, sizes = self._orders.setdefault(orderer.pairs, []), model.sizes
        if not known and largest_sizes is not None:
            with suppress(SearchLimitError):
                known.append(orderer.best(largest_sizes))
        for order in known:
            if order.serves(sizes, self.max_entries) and (conditioning or not order.conditioned):
                return order
        known.append(orderer.best(sizes, conditioning, cheap))
        return known[-1]

    def _tables(self, model: PairwiseModel, singles: frozenset[int]) -> list[np.ndarray]:
        """The unary tables, then those of pairs: as vectors where one of the two variables has a single label."""
        tables = [np.asarray(table, dtype=np.float64) for table in model.unary]
        if not singles:
            return [*tables, *model.pairs.values()]
        for (i, j), table in model.pairs.items():
            tables.append(self._slice(table, 0, 0) if i in singles else self._slice(table, 1, 0) if j in singles else table)
        return tables

    def _follow(
        self, order: EliminationOrder, tables: list[np.ndarray], incumbent: Sequence[int] | np.ndarray | None
    ) -> tuple[float, list[Callable[[Scope | int], int]]]:
        """The least energy, and per variable the function from its neighbours' labels to its best label."""
        tables += [NO_TABLE] * (order.n_tables - len(tables))
        best: list[Callable[[Scope | int], int]] = [partial(_always, 0)] * len(order.sizes)
        constant, results = 0.0, self._results
        for step in order.steps:
            variable, inputs, taken = step.variable, step.inputs, step.tables(tables)
            if step.join < 0:
                assert incumbent is not None, "only with an incumbent is anything conditioned"
                label = int(incumbent[variable])
                best[variable] = partial(_always, label)
                for source, target, (side,) in zip(inputs, step.made, step.axes, strict=True):
                    tables[target], tables[source] = self._slice(tables[source], side, label), NO_TABLE
                constant += sum(float(tables[target]) for target in step.made if tables[target].ndim == 0)
                continue
            key = (step.join, *map(id, taken))
            if (found := results.get(key)) is None:
                found = self._minimised(key, step, taken)
            for source in inputs:
                tables[source] = NO_TABLE
            best[variable] = found.label
            if step.around:
                tables[step.made[0]] = found.least
            else:
                constant += float(found.least)
        return constant, best

    def _minimised(self, key: tuple[int, ...], step: Step, tables: Sequence[np.ndarray]) -> _Joined:
        """The sum of a step's tables, minimised over its variable."""
        n_axes = len(step.around) + 1
        joined = tuple([_aligned(table, axes, n_axes) for table, axes in zip(tables, step.axes, strict=True)])
        return self._remembered(key, _Joined(reduce(np.add, joined).min(axis=0), joined))

    def _slice(self, table: np.ndarray, side: int, label: int) -> np.ndarray:
        """The slice of a table at one label of one of its variables."""
        key = (-1, id(table), side, label)
        if (found := self._results.get(key)) is None:
            found = self._remembered(key, _Joined(np.take(table, label, axis=side), (table,)))
        return found.least

    def _remembered(self, key: tuple[int, ...], found: _Joined) -> _Joined:
        """The given result, kept while results are few enough; it holds its tables, so that their identities stay theirs."""
        self._kept_entries += found.least.size
        if self._kept_entries <= BUDGETS.kept_entries:
            self._results[key] = found
        return found


@dataclass(frozen=True, slots=True, eq=False)
class _Joined:
    """The result of a step.

    Best labels are computed when they are asked for, since few ever are.

    Attributes:
        least: the minimum over the step's variable, by the labels of its neighbours.
        tables: those that were added up, aligned: the first axis is that of the variable, the others those of its neighbours.
        found: best labels that were computed, by the neighbours' labels.
    """

    least: np.ndarray
    tables: tuple[np.ndarray, ...]
    found: dict[Scope | int, int] = field(default_factory=dict)

    def label(self, around: Scope | int) -> int:
        """The best label of the variable by those of its neighbours (an only neighbour's as a plain number)."""
        if (best := self.found.get(around)) is None:
            at = (around,) if isinstance(around, int) else around
            costs = [table[:, *(label if n > 1 else 0 for label, n in zip(at, table.shape[1:], strict=True))] for table in self.tables]
            best = self.found[around] = int(reduce(np.add, costs).argmin())
        return best


def _always(label: int, around: Scope | int) -> int:
    return label


def _aligned(table: np.ndarray, axes: tuple[int, ...], n_axes: int) -> np.ndarray:
    """The table with its axes in their places of a joined table, and axes of size 1 elsewhere."""
    order, index = _alignment(axes, n_axes)
    return table.transpose(order)[index]


@cache
def _alignment(axes: tuple[int, ...], n_axes: int) -> tuple[list[int], tuple[slice | None, ...]]:
    """The transposition of a table for a joined one, and the index that inserts the axes it lacks."""
    return sorted(range(len(axes)), key=axes.__getitem__), tuple(slice(None) if axis in axes else None for axis in range(n_axes))
