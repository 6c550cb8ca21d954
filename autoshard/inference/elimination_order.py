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
        return bool(entries.max() <= max_entries and entries.sum() - before.sum() <= BUDGETS.small_entries * len(sizes))

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
        dear = BUDGETS.small_entries * len(sizes)
        most = dear if cheap else max(dear, BUDGETS.joined_entries)
        found, failure = [], None
        try:
            found.append(_Greedy(self.pairs, sizes).by_weight(self.max_entries, most, False))
        except SearchLimitError as error:
            if cheap:
                raise
            failure = error
        if not found or found[0].entries > dear:
            by_fill = _Greedy(self.pairs, sizes).by_fill(self.max_entries, found[0].entries if found else BUDGETS.joined_entries)
            found += [] if by_fill is None else [by_fill]
        if not found and not conditioning:
            assert failure is not None, "an order by weight, or the reason why there is none"
            raise failure
        best = min(found, key=lambda each: each.entries) if found else _Greedy(self.pairs, sizes).by_weight(self.max_entries, None, True)
        return _Recorder(self.pairs, sizes, self.joins).recorded(best.steps)


class _Found(NamedTuple):
    """An order that was found.

    Attributes:
        steps: the variables, each with its neighbours by then; None in place of these where it is conditioned.
        entries: of all joined tables together.
    """

    steps: list[tuple[int, Scope | None]]
    entries: int


class _Greedy:
    """The remaining variables and their neighbours, while one order is made; those of a single label are neighbours of none."""

    def __init__(self, pairs: Sequence[Scope], sizes: list[int]):
        self.sizes = sizes
        self.neighbours: list[set[int]] = [set() for _ in sizes]
        for i, j in pairs:
            if sizes[i] > 1 and sizes[j] > 1:
                self.neighbours[i].add(j)
                self.neighbours[j].add(i)
        self.weights = [math.prod([sizes[other] for other in around], start=sizes[v]) for v, around in enumerate(self.neighbours)]
        self.steps: list[tuple[int, Scope | None]] = []

    def by_weight(self, max_entries: int, most: int | None, conditioning: bool) -> _Found:
        """The min-weight order, in which the variable of most neighbours is conditioned where tables would be too large, if that may be.

        Args:
            max_entries: the largest joined table allowed.
            most: the entries of all of them together that are allowed.

        Raises:
            SearchLimitError: the tables would be too large.
        """
        heap = [(weight, variable) for variable, weight in enumerate(self.weights)]
        heapq.heapify(heap)
        waiting = dict.fromkeys(range(len(self.sizes)))
        weights, push, pop, entries = self.weights, heapq.heappush, heapq.heappop, 0
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
                entries += weight
                changed, _ = self._eliminate(variable)
            elif conditioning:
                hub = max(waiting, key=lambda v: (len(self.neighbours[v]), self.sizes[v], -v))
                del waiting[hub]
                entries += self.sizes[hub]
                changed = self._condition(hub)
                if hub != variable:
                    changed.append(variable)
            else:
                raise SearchLimitError(
                    f"exact elimination keeps tables up to {max_entries:,} entries and met one of {weight:,} "
                    f"(induced width {len(self.neighbours[variable])}). Use searcher='recursive_programming', or a mesh of fewer axes."
                )
            if most is not None and entries > most:
                raise SearchLimitError(
                    f"this elimination adds up tables of {most:,} entries in all, at most, and met {entries:,} before its end. "
                    "Use searcher='recursive_programming', or a mesh of fewer axes."
                )
            for other in changed:
                push(heap, (weights[other], other))
        return _Found(self.steps, entries)

    def by_fill(self, max_entries: int, most: int) -> _Found | None:
        """The weighted min-fill order; None if a table, or all of them together, would be too large."""
        keys = [(self._fill(variable), self.weights[variable], variable) for variable in range(len(self.sizes))]
        heap, entries = list(keys), 0
        heapq.heapify(heap)
        while heap:
            key = heapq.heappop(heap)
            variable = key[-1]
            if key != keys[variable]:
                continue
            entries += self.weights[variable]
            if self.weights[variable] > max_entries or entries > most:
                return None
            keys[variable] = (-1, -1, -1)
            _, opened = self._eliminate(variable)
            # The fill of others changes where two of their neighbours share a table now that shared none.
            shared = (self.neighbours[one] & self.neighbours[other] for one, others in opened for other in others if one < other)
            for other in set(self.steps[-1][1] or ()).union(*shared):
                if (renewed := (self._fill(other), self.weights[other], other)) != keys[other]:
                    keys[other] = renewed
                    heapq.heappush(heap, renewed)
        return _Found(self.steps, entries)

    def _fill(self, variable: int) -> int:
        """The entries of all pairs of its neighbours that share no table."""
        around, sizes, twice = self.neighbours[variable], self.sizes, 0
        for one in around:
            apart = around - self.neighbours[one]
            if len(apart) > 1:  # than itself
                twice += sizes[one] * (sum([sizes[other] for other in apart]) - sizes[one])
        return twice // 2

    def _eliminate(self, variable: int) -> tuple[list[int], list[tuple[int, set[int]]]]:
        """Joins a variable's neighbours; gives those whose joined table has become smaller, and per neighbour those that are new to it."""
        neighbours, weights, sizes = self.neighbours, self.weights, self.sizes
        ahead, size = neighbours[variable], sizes[variable]
        self.steps.append((variable, tuple(sorted(ahead))))
        smaller, opened = [], []
        for other in ahead:
            theirs = neighbours[other]
            theirs.discard(variable)
            added = ahead - theirs
            added.discard(other)
            grown = math.prod([sizes[near] for near in added])
            weights[other] = weights[other] // size * grown
            if grown < size:
                smaller.append(other)
            if added:
                opened.append((other, added))
        for other, added in opened:
            neighbours[other] |= added
        return smaller, opened

    def _condition(self, variable: int) -> list[int]:
        """Fixes a variable, which then is a neighbour of none; gives those that it was one of."""
        self.steps.append((variable, None))
        around = sorted(self.neighbours[variable])
        for other in around:
            self.neighbours[other].discard(variable)
            self.weights[other] //= self.sizes[variable]
        return around


class _Recorder:
    """The tables of a model while an order's steps are recorded."""

    def __init__(self, pairs: Sequence[Scope], sizes: list[int], joins: dict[Join, int]):
        self.sizes = sizes
        self.joins = joins
        self.singles = frozenset(variable for variable, size in enumerate(sizes) if size == 1)
        folded = ((j,) if i in self.singles else (i,) if j in self.singles else (i, j) for i, j in pairs)
        self.scopes: list[Scope] = [*((variable,) for variable in range(len(sizes))), *folded]
        self.left = [True] * len(self.scopes)
        self.tables: list[list[int]] = [[] for _ in sizes]
        for table, scope in enumerate(self.scopes):
            for variable in scope:
                self.tables[variable].append(table)

    def recorded(self, order: Sequence[tuple[int, Scope | None]]) -> EliminationOrder:
        """The steps of an order."""
        steps = [self._conditioned(variable) if around is None else self._eliminated(variable, around) for variable, around in order]
        scopes = [(step.variable, *step.around) for step in steps]
        return EliminationOrder(
            steps=tuple(steps),
            sizes=self.sizes,
            singles=self.singles,
            n_tables=len(self.scopes),
            width=max(len(step.around) for step in steps),
            conditioned=sum(step.join < 0 for step in steps),
            scopes=np.fromiter(chain.from_iterable(scopes), dtype=np.int64),
            starts=np.cumsum([0, *map(len, scopes[:-1])]),
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

    def _eliminated(self, variable: int, around: Scope) -> Step:
        inputs = self._take(variable)
        place = (variable, *around).index
        axes = tuple([tuple(map(place, self.scopes[table])) for table in inputs])
        made = (self._add(around),) if around else ()
        join = self.joins.setdefault(axes, len(self.joins))
        return Step(variable, around, inputs, made, axes, join, _tables_at(inputs), itemgetter(*around) if around else _no_labels)

    def _conditioned(self, variable: int) -> Step:
        """A variable is fixed, which turns its pairs into unary tables of its neighbours."""
        inputs = self._take(variable)
        sides = tuple((self.scopes[table].index(variable),) for table in inputs)
        made = tuple(self._add(tuple(v for v in self.scopes[table] if v != variable)) for table in inputs)
        return Step(variable, (), inputs, made, sides, -1, _tables_at(inputs), _no_labels)


def _tables_at(numbers: tuple[int, ...]) -> Callable[[Sequence], Sequence]:
    """The function that takes some numbers' tables from all tables."""
    first, *others = numbers
    return itemgetter(first, *others) if others else itemgetter(slice(first, first + 1))


def _no_labels(sequence: Sequence) -> tuple:
    return ()
