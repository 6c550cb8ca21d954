"""Sharding propagation by least cost: a few tensors or ops are pinned, and all others follow with least redistribution.

*Variables.* Those of the problem (`autoshard.problem`). *Constraints.* Pins are honoured, whatever they cost; a mesh axis is used only
where a chain of reads, all sharded over it, leads back to a pinned tensor or op. *Objective.* The judge's: resharding,
reduction, and work that is not split. *Ties.* The label that splits, then the smallest.

*Steps*, for one mesh axis after another, in mesh order: (1) Breadth first from the pinned variables, each variable takes the label of least
cost given the neighbours that are decided by then; the search does not continue from one that leaves the axis unused. (2) The labels of all
reached variables are optimised together, by elimination (`autoshard.inference.elimination`). (3) Rounds over the axes, until none changes
anything. Steps 2 and 3 never raise the objective, and are exact in their axis; the whole is a heuristic.

Variables that no pin reaches stay replicated, and are reported; so are two pins that force reshards between their followers.

After the sharding propagation of MindSpore's auto parallel, which visits operators breadth first from the configured ones and minimises
redistribution alone; here costs are seconds on the links of the cluster, backward pass and optimizer included, and choices are revised.

Complexity: rounds x axes x variables x labels ** (induced width + 1).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.compilers.buffers import Buffer
from autoshard.errors import ShardingError
from autoshard.inference.elimination import Eliminator
from autoshard.inference.model import PairwiseModel
from autoshard.judge.evaluate import Judgement
from autoshard.memory_limit.lagrangian import fastest_within
from autoshard.problem import NO_HINTS, Hints, Label, Problem, Tables
from autoshard.progress import Progress, silent
from autoshard.search.pin_report import disagreements, unreached
from autoshard.search.searcher import Searcher, Solution

MOST_ROUNDS = 6  # over the mesh axes

Part = tuple[int, int] | int
"""The entry of a label for one mesh axis: the factor it splits and where it scatters, or the dimension it shards; -1 for none."""

Fixed = tuple[Mapping[int, Part], ...]
"""Per mesh axis, by variable: its label's part, or the factor alone, wherever that scatters. Parts that are not legal are ignored."""


@dataclass(frozen=True, slots=True)
class ShardingPropagation(Searcher):
    """The searcher that spreads pins.

    Attributes:
        max_rounds: the most rounds over the mesh axes.
        price_steps: the most memory prices that may be tried when the limit binds.
    """

    name: ClassVar[str] = "sharding_propagation"

    max_rounds: int = MOST_ROUNDS
    price_steps: int = 8

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The assignment that follows from the problem's pins; see the module.

        Raises:
            ShardingError: no pin shards anything.
            InfeasibleError: nothing that keeps the pins fits the memory limit.
        """
        fixed = tuple({} for _ in problem.mesh.axes)
        if not any(problem.pinned(axis) for axis in range(len(fixed))):
            raise ShardingError(
                "sharding_propagation starts from pins that shard something, and no pin shards anything. Pin a batch, as in "
                "pins={'batch*': P('data')}, some weights, or values inside the function by with_sharding_constraint; or use "
                "searcher='auto', which needs no pins."
            )
        started = time.perf_counter()
        run = PropagationSearch(problem, fixed, self.max_rounds, progress=progress)
        judgement, labels = fastest_within(problem, run.search, self.price_steps, hints=hints)
        return Solution(
            judgement=judgement,
            lower_bound_seconds=min(problem.compute_bound(), judgement.cost.objective_seconds),
            stats={"n_variables": problem.n_variables, "rounds": run.rounds, "search_seconds": time.perf_counter() - started},
            notes=(*disagreements(problem, labels, run.sources), *unreached(problem, run.sources)),
            hints=hints,
        )


@dataclass(slots=True)
class PropagationSearch:
    """The search for labels that follow from pins, and from fixed parts of labels.

    Attributes:
        problem: the program, its mesh and its pins.
        fixed: the fixed parts besides.
        max_rounds: the most rounds over the mesh axes.
        last_first: whether the last mesh axis is decided first, rather than the first one.
        sources: per mesh axis, by reached variable: the pinned variable that it follows.
        rounds: of all searches together.
        eliminate: keeps the eliminations of all axes and prices.
    """

    problem: Problem
    fixed: Fixed
    max_rounds: int = MOST_ROUNDS
    last_first: bool = False
    progress: Progress = silent
    sources: tuple[dict[int, int], ...] = ()
    rounds: int = 0
    eliminate: Eliminator = field(default_factory=lambda: Eliminator(BUDGETS.table_entries))

    def search(self, prices: Mapping[Buffer, float]) -> tuple[Judgement, list[Label]]:
        """The labels that follow under memory prices, and their judgement."""
        problem, n_axes = self.problem, len(self.problem.mesh.axes)
        labels = problem.start()
        self.sources = tuple(
            {variable: variable for variable in (*problem.pinned(axis), *(variable for variable, part in fixed.items() if _use(part) >= 0))}
            for axis, fixed in enumerate(self.fixed)
        )
        settled = [0] * n_axes  # per axis, how many changes there had been when it was settled
        changes = 1
        for number in range(self.max_rounds):
            self.rounds += 1
            for axis in reversed(range(n_axes)) if self.last_first else range(n_axes):
                if settled[axis] == changes:
                    continue
                self.progress(f"propagating {problem.mesh.names[axis]}", (number + axis / n_axes) / self.max_rounds)
                one = _OneAxis(problem.tables((axis,), labels, prices), axis, self.fixed[axis], self.sources[axis], self.eliminate)
                (one.decide if number == 0 else one.revise)()
                before, labels = labels, one.labels()
                changes += labels != before
                settled[axis] = changes
            problem.note(labels)
            if all(count == changes for count in settled):
                break
        return problem.evaluate(problem.assignment(labels)), labels


class _OneAxis:
    """The tables with one mesh axis free, and the present labels of the variables.

    Attributes:
        now: the position of each variable's label.
        near: per variable its neighbours, with the pair tables ``(n_neighbour, n)``.
        uses: per variable, whether each label uses the axis.
        kept: by variable with a fixed part, the positions of its labels that have it.
    """

    def __init__(self, tables: Tables, axis: int, fixed: Mapping[int, Part], sources: dict[int, int], eliminate: Eliminator):
        self.tables = tables
        self.eliminate = eliminate
        self.sources = sources
        self.now: list[int] = tables.incumbent.tolist()
        self.near: list[list[tuple[int, np.ndarray]]] = [[] for _ in tables.unary]
        for (i, j), table in tables.pairs.items():
            self.near[i].append((j, table.T))
            self.near[j].append((i, table))
        uses = {id(options): [_use(label[axis]) >= 0 for label in options] for options in {id(o): o for o in tables.labels}.values()}
        self.uses = [uses[id(options)] for options in tables.labels]
        self.kept: dict[int, np.ndarray] = {}
        for variable, part in fixed.items():
            allowed = np.flatnonzero([part in (label[axis], _use(label[axis])) for label in tables.labels[variable]])
            if len(allowed):
                self.kept[variable] = allowed
                if self.now[variable] not in allowed:  # before, other axes had made it illegal
                    self.now[variable] = int(allowed[tables.unary[variable][allowed].argmin()])

    def labels(self) -> list[Label]:
        return [options[k] for options, k in zip(self.tables.labels, self.now, strict=True)]

    def decide(self) -> None:
        """Decides breadth first from the sources, then revises."""
        decided = [len(options) == 1 for options in self.tables.labels]
        for variable, kept in self.kept.items():
            self.now[variable], decided[variable] = int(kept[self.tables.unary[variable][kept].argmin()]), len(kept) == 1
        queue = deque(self.sources)
        while queue:
            variable = queue.popleft()
            self.now[variable] = self._best(variable, decided)
            decided[variable] = True
            if self.uses[variable][self.now[variable]]:
                queue.extend(self._reach(variable))
        self.revise()

    def revise(self) -> None:
        """Optimises the labels of all reached variables together, until no more variables are reached."""
        n_reached = 0
        while n_reached < len(self.sources):
            n_reached = len(self.sources)
            self._solve()
            for variable in [variable for variable in self.sources if self.uses[variable][self.now[variable]]]:
                self._reach(variable)

    def _solve(self) -> None:
        """Sets the best labels of the reached variables, given those of all others; exact while the tables stay small."""
        alone = {label: np.array([label]) for label in set(self.now)}
        kept = [self.kept.get(variable) if variable in self.sources else alone[label] for variable, label in enumerate(self.now)]
        slices: dict[tuple[Any, ...], np.ndarray] = {}  # by identities: equal slices are one array, whose eliminations are not repeated

        def sliced(table: np.ndarray, *rows: np.ndarray | None) -> np.ndarray:
            key = id(table), *map(id, rows)
            if (part := slices.get(key)) is None:
                every = [range(n) if labels is None else labels for n, labels in zip(table.shape, rows, strict=True)]
                part = slices[key] = table[np.ix_(*every)]
            return part

        unary = [table if labels is None else sliced(table, labels) for table, labels in zip(self.tables.unary, kept, strict=True)]
        pairs = {}
        for (i, j), table in self.tables.pairs.items():
            first, last = kept[i], kept[j]
            pairs[i, j] = table if first is None and last is None else sliced(table, first, last)
        start = [k if labels is None else int(np.searchsorted(labels, k)) for k, labels in zip(self.now, kept, strict=True)]
        reached = PairwiseModel(unary, pairs)
        found = self.eliminate(reached, start, self.tables.sizes)
        if found.cost < reached.energy(start) * (1 - BUDGETS.rounding):
            self.now = [k if labels is None else int(labels[k]) for k, labels in zip(found.labels.tolist(), kept, strict=True)]

    def _reach(self, variable: int) -> list[int]:
        """Marks a variable's neighbours as reached; returns those that were not."""
        new = [other for other, _ in self.near[variable] if other not in self.sources]
        self.sources.update(dict.fromkeys(new, self.sources[variable]))
        return new

    def _best(self, variable: int, decided: Sequence[bool]) -> int:
        """The position of the label of least cost given the decided neighbours; of equal ones one that uses the axis."""
        cost = self.tables.unary[variable]
        if len(cost) == 1:
            return 0
        for other, rows in self.near[variable]:
            if decided[other]:
                cost = cost + rows[self.now[other]]
        if (kept := self.kept.get(variable)) is not None:
            return int(kept[cost[kept].argmin()])
        best = int(cost.argmin())
        if self.uses[variable][best]:
            return best
        enough = cost[best] + BUDGETS.rounding * abs(cost[best])
        return next((k for k, uses in enumerate(self.uses[variable]) if uses and cost[k] <= enough), best)


def _use(part: Part) -> int:
    """The factor or the dimension that a part of a label uses; -1 for none."""
    return part if isinstance(part, int) else part[0]
