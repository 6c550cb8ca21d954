"""Exact minimisation of a sum of small tables by variable elimination.

The problem: variables ``i`` with ``n_i`` labels, unary tables ``u_i`` of shape ``(n_i,)`` and pair tables ``p_ij`` of
shape ``(n_i, n_j)``; find the labels with the least ``sum u_i[x_i] + sum p_ij[x_i, x_j]``. Variables are eliminated one
by one (min-plus bucket elimination, Dechter 1999, "Bucket elimination: a unifying framework for reasoning"): the tables
that mention a variable are added up, minimised over it, and the result replaces them. The order is greedy: always the
variable whose combined table is smallest ("min-weight"), or where that is dear the one that adds least to the pairs that are left
("weighted min-fill"), whichever takes fewer entries. Exact; time and memory grow with the largest combined table,
``exp(induced width)``. Ties go to the smaller label, so results do not depend on hash seeds.

Equal layers have the very same tables: a step on tables that were met together before is remembered, not repeated.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from itertools import chain
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from autoshard.errors import SearchLimitError
from autoshard.problem.budgets import BUDGETS

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
    at = np.asarray(labels).tolist()
    total = math.fsum([table.item(label) for table, label in zip(unary, at, strict=True)])
    return total + math.fsum([table.item(at[i], at[j]) for (i, j), table in pairs.items()])


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
    return Eliminator(max_entries)(unary, pairs, incumbent)


class Eliminator:
    """Eliminations that share what they have in common: the order between the same pairs, and steps on the same tables.

    Attributes:
        max_entries: the largest combined table allowed.
    """

    def __init__(self, max_entries: int = 1 << 22):
        self.max_entries = max_entries
        self._plans: dict[tuple[Scope, ...], list[_Plan]] = {}
        self._joins: dict[Join, int] = {}
        self._met: dict[tuple[int, ...], _Met] = {}
        self._kept = 0

    def __call__(
        self,
        unary: Sequence[np.ndarray],
        pairs: Pairs,
        incumbent: Sequence[int] | np.ndarray | None = None,
        most: list[int] | None = None,
        cheap: bool = False,
    ) -> Elimination:
        """As `eliminate`.

        Args:
            most: the most labels that variables have in eliminations to come; the order is made for those where it can be.
            cheap: whether an order by weights that is dear is a table too large, too.
        """
        if not unary:
            return Elimination(0.0, np.zeros(0, dtype=np.int64), 0, 0)
        sizes = [len(table) for table in unary]
        plan = self._plan(tuple(pairs), sizes, incumbent is not None, most, cheap)
        tables = [np.asarray(table, dtype=np.float64) for table in unary]
        if plan.singles:
            for (i, j), table in pairs.items():
                tables.append(self._slab(table, 0, 0) if i in plan.singles else self._slab(table, 1, 0) if j in plan.singles else table)
        else:
            tables += pairs.values()
        constant, best = self._follow(plan, tables, incumbent)
        labels = [0] * len(sizes)
        for step in reversed(plan.steps):
            labels[step.variable] = best[step.variable](step.labels(labels))
        return Elimination(constant, np.array(labels, dtype=np.int64), plan.width, plan.conditioned)

    def _plan(self, pairs: tuple[Scope, ...], sizes: list[int], conditioning: bool, most: list[int] | None, cheap: bool) -> _Plan:
        """The order of an earlier elimination over these pairs where it serves, else a new one."""
        known = self._plans.setdefault(pairs, [])
        if not known and most is not None:
            with suppress(SearchLimitError):
                known.append(self._planned(pairs, most))
        for plan in known:
            if plan.serves(sizes, self.max_entries) and (conditioning or not plan.conditioned):
                return plan
        known.append(self._planned(pairs, sizes, conditioning, cheap))
        return known[-1]

    def _planned(self, pairs: tuple[Scope, ...], sizes: list[int], conditioning: bool = False, cheap: bool = False) -> _Plan:
        """The order by weights, or that by fill where the former is dear and the latter better."""
        plan = None
        try:
            plan = _Planner(pairs, sizes, self._joins).plan(self.max_entries, False)
            if plan.entries <= BUDGETS.dear_entries * len(sizes):
                return plan
            most = BUDGETS.dear_entries * len(sizes) if cheap else BUDGETS.joined_entries
            failure = SearchLimitError(
                f"this elimination adds up tables of {most:,} entries in all, at most, and met some of {plan.entries:,.0f}. "
                "Use searcher='recursive_programming', or a mesh of fewer axes."
            )
        except SearchLimitError as error:
            failure = error
        if cheap:
            raise failure
        plans = (plan, _Planner(pairs, sizes, self._joins).plan_by_fill(self.max_entries))
        if found := [one for one in plans if one is not None and one.entries <= BUDGETS.joined_entries]:
            return min(found, key=lambda one: one.entries)
        if not conditioning:
            raise failure
        return _Planner(pairs, sizes, self._joins).plan(self.max_entries, True)

    def _follow(self, plan: _Plan, tables: list[np.ndarray], incumbent: Sequence[int] | np.ndarray | None):
        """The sum of what is left in the end, and per variable what gives its best label by those of the variables around it."""
        tables += [NOTHING] * (plan.n_tables - len(tables))
        best: list[Callable[[Scope | int], int]] = [partial(_always, 0)] * len(plan.sizes)
        constant, met = 0.0, self._met
        for step in plan.steps:
            variable, inputs, taken = step.variable, step.inputs, step.tables(tables)
            if step.join < 0:
                assert incumbent is not None, "only with an incumbent is anything conditioned"
                label = int(incumbent[variable])
                best[variable] = partial(_always, label)
                for source, target, (side,) in zip(inputs, step.made, step.axes, strict=True):
                    tables[target], tables[source] = self._slab(tables[source], side, label), NOTHING
                constant += sum(float(tables[target]) for target in step.made if tables[target].ndim == 0)
                continue
            key = (step.join, *map(id, taken))
            if (found := met.get(key)) is None:
                found = self._met_first(key, step, taken)
            for source in inputs:
                tables[source] = NOTHING
            best[variable] = found.label
            if step.around:
                tables[step.made[0]] = found.least
            else:
                constant += float(found.least)
        return constant, best

    def _met_first(self, key: tuple[int, ...], step: _Step, tables: Sequence[np.ndarray]) -> _Met:
        n_axes = len(step.around) + 1
        joined = tuple([_aligned(table, axes, n_axes) for table, axes in zip(tables, step.axes, strict=True)])
        return self._remembered(key, _Met(reduce(np.add, joined).min(axis=0), joined))

    def _slab(self, table: np.ndarray, side: int, label: int) -> np.ndarray:
        """What is left of a table when one variable has its label."""
        key = (-1, id(table), side, label)
        if (found := self._met.get(key)) is None:
            found = self._remembered(key, _Met(np.take(table, label, axis=side), (table,)))
        return found.least

    def _remembered(self, key: tuple[int, ...], found: _Met) -> _Met:
        """The same; holding its tables keeps their identities from being given to others."""
        self._kept += found.least.size
        if self._kept <= BUDGETS.kept_entries:
            self._met[key] = found
        return found


Scope = tuple[int, ...]
"""The variables of a table, in the order of its axes."""

Join = tuple[tuple[int, ...], ...]
"""How tables are joined: per table, which axis of the joined one each of its axes is."""

NOTHING = np.zeros((), dtype=np.int16)


@dataclass(frozen=True, slots=True, eq=False)
class _Met:
    """What a step left, and the tables it was made of, which are aligned: first the axis of the variable, then those of its neighbours.

    Only few of the best labels are ever asked for: those are found again.
    """

    least: np.ndarray
    joined: tuple[np.ndarray, ...]
    asked: dict[Scope | int, int] = field(default_factory=dict)

    def label(self, around: Scope | int) -> int:
        """The best label of the variable, by those of its neighbours (of one alone as it is)."""
        if (found := self.asked.get(around)) is None:
            at = (around,) if isinstance(around, int) else around
            costs = [table[:, *(label if n > 1 else 0 for label, n in zip(at, table.shape[1:], strict=True))] for table in self.joined]
            found = self.asked[around] = int(reduce(np.add, costs).argmin())
        return found


class _Step(NamedTuple):
    """A variable is eliminated, or conditioned.

    Attributes:
        variable: which.
        around: its neighbours by then; none where it is conditioned.
        inputs, made: the numbers of the tables that mention it, and of those that replace them.
        axes: how those are joined; where it is conditioned, its axis in each.
        join: a number for that; -1 where it is conditioned.
        tables, labels: take those of ``inputs`` from all tables, and those of ``around`` from all labels (one alone as it is).
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
class _Plan:
    """The order of an elimination, for variables of any size.

    Attributes:
        steps: in order.
        sizes: the sizes it was made for.
        singles: the variables of a single label, which are no decision: their pairs are folded into who stands next to them.
        n_tables: the tables that there are in all.
        width, conditioned: as in `Elimination`.
        scopes, starts: the variables of all joined tables one after the other, and where each begins.
    """

    steps: tuple[_Step, ...]
    sizes: list[int]
    singles: frozenset[int]
    n_tables: int
    width: int
    conditioned: int
    scopes: np.ndarray
    starts: np.ndarray

    def serves(self, sizes: list[int], max_entries: int) -> bool:
        """Whether another order for these sizes would cost more to find than it could save."""
        if sizes == self.sizes:
            return True
        if self.conditioned or any(sizes[variable] > 1 for variable in self.singles):
            return False
        entries, before = self._entries(sizes), self._entries(self.sizes)
        return bool(entries.max() <= max_entries and entries.sum() - before.sum() <= BUDGETS.planning_entries * len(sizes))

    @property
    def entries(self) -> float:
        """Of all joined tables together."""
        return float(self._entries(self.sizes).sum())

    def _entries(self, sizes: list[int]) -> np.ndarray:
        """How large the joined table of each step is."""
        return np.multiply.reduceat(np.array(sizes, dtype=np.float64)[self.scopes], self.starts)


class _Planner:
    """The variables that are left, and who stands next to whom."""

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
        self.steps: list[_Step] = []

    def plan(self, max_entries: int, conditioning: bool) -> _Plan:
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
        return self._planned()

    def _planned(self) -> _Plan:
        """The steps that were recorded."""
        scopes = [(step.variable, *step.around) for step in self.steps]
        return _Plan(
            steps=tuple(self.steps),
            sizes=self.sizes,
            singles=self.singles,
            n_tables=len(self.scopes),
            width=max(len(step.around) for step in self.steps),
            conditioned=sum(step.join < 0 for step in self.steps),
            scopes=np.fromiter(chain.from_iterable(scopes), dtype=np.int64),
            starts=np.cumsum([0, *map(len, scopes[:-1])]),
        )

    def plan_by_fill(self, max_entries: int) -> _Plan | None:
        """The order in which the variable comes next that makes neighbours of strangers over the fewest entries; None if too large."""
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
            for other in sorted(set(around).union(*(self.neighbours[met] for met in around))):
                if (renewed := (self._fill(other), self.weights[other], other)) != keys[other]:
                    keys[other] = renewed
                    heapq.heappush(heap, renewed)
        return self._planned()

    def _fill(self, variable: int) -> int:
        """The entries of the pairs of its neighbours that are none of each other's."""
        around, sizes = sorted(self.neighbours[variable]), self.sizes
        return sum(
            sizes[one] * sizes[other]
            for number, one in enumerate(around)
            for other in around[number + 1 :]
            if other not in self.neighbours[one]
        )

    def _take(self, variable: int) -> tuple[int, ...]:
        """The tables that mention the variable, which are then gone."""
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
        """Records the step; gives the variables whose combined table has become smaller."""
        neighbours, weights, sizes, scopes = self.neighbours, self.weights, self.sizes, self.scopes
        inputs = self._take(variable)
        ahead = neighbours[variable]
        around = tuple(sorted(ahead))
        place = (variable, *around).index
        axes = tuple([tuple(map(place, scopes[table])) for table in inputs])
        made = (self._add(around),) if around else ()
        join = self.joins.setdefault(axes, len(self.joins))
        labels = itemgetter(*around) if around else _nothing
        self.steps.append(_Step(variable, around, inputs, made, axes, join, _tables_at(inputs), labels))
        smaller, size = [], sizes[variable]
        for other in around:
            theirs, before = neighbours[other], weights[other]
            fewer = len(theirs) - 1
            theirs |= ahead
            theirs -= {variable, other}
            weight = before // size if len(theirs) == fewer else math.prod([sizes[met] for met in theirs], start=sizes[other])
            if weight < before:
                smaller.append(other)
            weights[other] = weight
        return smaller

    def _condition(self, variable: int) -> list[int]:
        """Records that the variable is fixed, which folds its tables into its neighbours; gives those."""
        inputs = self._take(variable)
        sides = tuple((self.scopes[table].index(variable),) for table in inputs)
        made = tuple(self._add(tuple(v for v in self.scopes[table] if v != variable)) for table in inputs)
        self.steps.append(_Step(variable, (), inputs, made, sides, -1, _tables_at(inputs), _nothing))
        around = sorted(self.neighbours[variable])
        for other in around:
            self.neighbours[other].discard(variable)
            self.weights[other] //= self.sizes[variable]
        return around


def _tables_at(numbers: tuple[int, ...]) -> Callable[[Sequence], Sequence]:
    """What takes those of some numbers from all tables."""
    first, *others = numbers
    return itemgetter(first, *others) if others else itemgetter(slice(first, first + 1))


def _always(label: int, around: Scope | int) -> int:
    return label


def _nothing(sequence: Sequence) -> tuple:
    return ()


def _aligned(table: np.ndarray, axes: tuple[int, ...], n_axes: int) -> np.ndarray:
    """The table with its axes where they are in a joined one, and of size 1 where it lacks them."""
    order, index = _alignment(axes, n_axes)
    return table.transpose(order)[index]


@cache
def _alignment(axes: tuple[int, ...], n_axes: int) -> tuple[list[int], tuple[slice | None, ...]]:
    """The order of a table's axes in a joined one, and where that has others."""
    return sorted(range(len(axes)), key=axes.__getitem__), tuple(slice(None) if axis in axes else None for axis in range(n_axes))
