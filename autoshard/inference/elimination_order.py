"""Orders in which variables are eliminated: greedy, by the entries of the tables that elimination makes.

Min-weight eliminates the variable whose joined table is smallest. Where that takes many entries, weighted min-fill is tried as well: the
variable whose elimination joins neighbours that shared no table over the fewest entries. The order of fewer entries in all is taken.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.errors import SearchLimitError

Scope = tuple[int, ...]
"""The variables of a table, in the order of its axes."""

Join = tuple[tuple[int, ...], ...]
"""How tables are joined: per table, the axis of the joined one that each of its axes is."""


class Step(NamedTuple):
    """One variable eliminated, or conditioned: fixed at a label.

    Attributes:
        variable: its number.
        around: its neighbours by then; none where it is conditioned.
        inputs, made: the numbers of the tables that mention it, and of those that replace them.
        axes: how those are joined; where it is conditioned, its axis in each.
        join: a number for that; -1 where it is conditioned.
        tables, labels: take those of ``inputs`` from all tables, and those of ``around`` from all labels (an only one as a plain number).
    """

    variable: int
    around: Scope
    inputs: tuple[int, ...]
    made: tuple[int, ...]
    axes: Join
    join: int
    tables: Callable[[Sequence[np.ndarray]], Sequence[np.ndarray]]
    labels: Callable[[Sequence[int]], Scope | int]


@dataclass(frozen=True, slots=True, eq=False)
class EliminationOrder:
    """The steps of an elimination, for variables of any size.

    Attributes:
        steps: in order.
        sizes: the sizes it was made for.
        singles: the variables of a single label: their pairs count as unary tables of their neighbours.
        n_tables: the number of tables, those that steps make included.
        width, conditioned: as in `Elimination`.
        scopes, starts: the variables of all joined tables one after the other, and where each table's begin.
    """

    steps: tuple[Step, ...]
    sizes: list[int]
    singles: frozenset[int]
    n_tables: int
    width: int
    conditioned: int
    scopes: np.ndarray
    starts: np.ndarray

    def serves(self, sizes: list[int], max_entries: int) -> bool:
        """Whether a new order for these sizes would cost more to find than it could save."""
        if sizes == self.sizes:
            return True
        if self.conditioned or any(sizes[variable] > 1 for variable in self.singles):
            return False
        entries, before = self._entries(sizes), self._entries(self.sizes)
        return bool(entries.max() <= max_entries and entries.sum() - before.sum() <= BUDGETS.planning_entries * len(sizes))

    @property
    def entries(self) -> float:
        """The entries of all joined tables together."""
        return float(self._entries(self.sizes).sum())

    def _entries(self, sizes: list[int]) -> np.ndarray:
        """The entries of each step's joined table."""
        return np.multiply.reduceat(np.array(sizes, dtype=np.float64)[self.scopes], self.starts)


@dataclass(frozen=True, slots=True)
class Orderer:
    """Finds orders over the same pairs.

    Attributes:
        pairs: the pairs of variables that share tables.
        joins: numbers of ways to join tables, which all orders share.
        max_entries: the largest joined table allowed.
    """

    pairs: tuple[Scope, ...]
    joins: dict[Join, int]
    max_entries: int

    def best(self, sizes: list[int], conditioning: bool = False, cheap: bool = False) -> EliminationOrder:
        """The min-weight order, or that by fill where the former is dear and the latter takes fewer entries.

        Args:
            sizes: per variable the number of its labels.
            conditioning: whether variables may be fixed where nothing else keeps tables small enough.
            cheap: whether to refuse a dear min-weight order.

        Raises:
            SearchLimitError: the tables would be too large.
        """
        by_weight = None
        try:
            by_weight = _Greedy(self.pairs, sizes, self.joins).by_weight(self.max_entries, False)
            if by_weight.entries <= BUDGETS.dear_entries * len(sizes):
                return by_weight
            most = BUDGETS.dear_entries * len(sizes) if cheap else BUDGETS.joined_entries
            failure = SearchLimitError(
                f"this elimination adds up tables of {most:,} entries in all, at most, and met some of {by_weight.entries:,.0f}. "
                "Use searcher='recursive_programming', or a mesh of fewer axes."
            )
        except SearchLimitError as error:
            failure = error
        if cheap:
            raise failure
        orders = (by_weight, _Greedy(self.pairs, sizes, self.joins).by_fill(self.max_entries))
        if found := [order for order in orders if order is not None and order.entries <= BUDGETS.joined_entries]:
            return min(found, key=lambda order: order.entries)
        if not conditioning:
            raise failure
        return _Greedy(self.pairs, sizes, self.joins).by_weight(self.max_entries, True)


class _Greedy:
    """The remaining variables and their neighbours, while one order is made."""

    def __init__(self, pairs: Sequence[Scope], sizes: list[int], joins: dict[Join, int]):
        self.sizes = sizes
        self.joins = joins
        self.singles = frozenset(variable for variable, size in enumerate(sizes) if size == 1)
        folded = ((j,) if i in self.singles else (i,) if j in self.singles else (i, j) for i, j in pairs)
        self.scopes: list[Scope] = [*((variable,) for variable in range(len(sizes))), *folded]
        self.left = [True] * len(self.scopes)
        self.tables: list[list[int]] = [[] for _ in sizes]
        self.neighbours: list[set[int]] = [set() for _ in sizes]
        for table, scope in enumerate(self.scopes):
            for variable in scope:
                self.tables[variable].append(table)
            if len(scope) == 2:
                i, j = scope
                self.neighbours[i].add(j)
                self.neighbours[j].add(i)
        self.weights = [math.prod([sizes[other] for other in around], start=sizes[v]) for v, around in enumerate(self.neighbours)]
        self.steps: list[Step] = []

    def by_weight(self, max_entries: int, conditioning: bool) -> EliminationOrder:
        """The min-weight order, in which the variable of most neighbours is conditioned where tables would be too large, if that may be."""
        heap = [(weight, variable) for variable, weight in enumerate(self.weights)]
        heapq.heapify(heap)
        waiting = dict.fromkeys(range(len(self.sizes)))
        weights, push, pop = self.weights, heapq.heappush, heapq.heappop
        while heap:
            weight, variable = pop(heap)
            if variable not in waiting:
                continue
            if weight != weights[variable]:
                if weight < weights[variable]:  # it grew since, and comes later
                    push(heap, (weights[variable], variable))
                continue
            if weight <= max_entries:
                del waiting[variable]
                changed = self._eliminate(variable)
            elif conditioning:
                hub = max(waiting, key=lambda v: (len(self.neighbours[v]), self.sizes[v], -v))
                del waiting[hub]
                changed = self._condition(hub)
                if hub != variable:
                    changed.append(variable)
            else:
                raise SearchLimitError(
                    f"exact elimination keeps tables up to {max_entries:,} entries and met one of {weight:,} "
                    f"(induced width {len(self.neighbours[variable])}). Use searcher='recursive_programming', or a mesh of fewer axes."
                )
            for other in changed:
                push(heap, (weights[other], other))
        return self._order()

    def _order(self) -> EliminationOrder:
        """The recorded steps."""
        scopes = [(step.variable, *step.around) for step in self.steps]
        return EliminationOrder(
            steps=tuple(self.steps),
            sizes=self.sizes,
            singles=self.singles,
            n_tables=len(self.scopes),
            width=max(len(step.around) for step in self.steps),
            conditioned=sum(step.join < 0 for step in self.steps),
            scopes=np.fromiter(chain.from_iterable(scopes), dtype=np.int64),
            starts=np.cumsum([0, *map(len, scopes[:-1])]),
        )

    def by_fill(self, max_entries: int) -> EliminationOrder | None:
        """The weighted min-fill order; None if a table would be too large."""
        keys = [(self._fill(variable), self.weights[variable], variable) for variable in range(len(self.sizes))]
        heap = list(keys)
        heapq.heapify(heap)
        while heap:
            key = heapq.heappop(heap)
            variable = key[-1]
            if key != keys[variable]:
                continue
            if self.weights[variable] > max_entries:
                return None
            keys[variable] = (-1, -1, -1)
            self._eliminate(variable)
            around = self.steps[-1].around
            for other in sorted(set(around).union(*(self.neighbours[near] for near in around))):
                if (renewed := (self._fill(other), self.weights[other], other)) != keys[other]:
                    keys[other] = renewed
                    heapq.heappush(heap, renewed)
        return self._order()

    def _fill(self, variable: int) -> int:
        """The entries of all pairs of its neighbours that share no table."""
        around, sizes = sorted(self.neighbours[variable]), self.sizes
        return sum(
            sizes[one] * sizes[other]
            for number, one in enumerate(around)
            for other in around[number + 1 :]
            if other not in self.neighbours[one]
        )

    def _take(self, variable: int) -> tuple[int, ...]:
        """The remaining tables that mention the variable, marked as gone."""
        left = self.left
        taken = tuple([table for table in self.tables[variable] if left[table]])
        for table in taken:
            left[table] = False
        return taken

    def _add(self, scope: Scope) -> int:
        self.scopes.append(scope)
        self.left.append(True)
        for variable in scope:
            self.tables[variable].append(len(self.scopes) - 1)
        return len(self.scopes) - 1

    def _eliminate(self, variable: int) -> list[int]:
        """Records the step; returns the variables whose joined table has become smaller."""
        neighbours, weights, sizes, scopes = self.neighbours, self.weights, self.sizes, self.scopes
        inputs = self._take(variable)
        ahead = neighbours[variable]
        around = tuple(sorted(ahead))
        place = (variable, *around).index
        axes = tuple([tuple(map(place, scopes[table])) for table in inputs])
        made = (self._add(around),) if around else ()
        join = self.joins.setdefault(axes, len(self.joins))
        labels = itemgetter(*around) if around else _no_labels
        self.steps.append(Step(variable, around, inputs, made, axes, join, _tables_at(inputs), labels))
        smaller, size = [], sizes[variable]
        for other in around:
            theirs, before = neighbours[other], weights[other]
            fewer = len(theirs) - 1
            theirs |= ahead
            theirs -= {variable, other}
            weight = before // size if len(theirs) == fewer else math.prod([sizes[near] for near in theirs], start=sizes[other])
            if weight < before:
                smaller.append(other)
            weights[other] = weight
        return smaller

    def _condition(self, variable: int) -> list[int]:
        """Records that the variable is fixed, which turns its pairs into unary tables of its neighbours; returns those."""
        inputs = self._take(variable)
        sides = tuple((self.scopes[table].index(variable),) for table in inputs)
        made = tuple(self._add(tuple(v for v in self.scopes[table] if v != variable)) for table in inputs)
        self.steps.append(Step(variable, (), inputs, made, sides, -1, _tables_at(inputs), _no_labels))
        around = sorted(self.neighbours[variable])
        for other in around:
            self.neighbours[other].discard(variable)
            self.weights[other] //= self.sizes[variable]
        return around


def _tables_at(numbers: tuple[int, ...]) -> Callable[[Sequence], Sequence]:
    """The function that takes some numbers' tables from all tables."""
    first, *others = numbers
    return itemgetter(first, *others) if others else itemgetter(slice(first, first + 1))


def _no_labels(sequence: Sequence) -> tuple:
    return ()
