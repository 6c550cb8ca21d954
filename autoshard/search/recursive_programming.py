"""Recursive programming: one mesh axis after another, slowest links first, each solved exactly for the whole program.

Model. With the other axes' labels fixed, each node has one label for the free axis, and the objective is a sum of unary and pair tables
(`autoshard.problem`). One axis is minimised exactly, by elimination (`autoshard.search.elimination`); its answer is a part of the next
axis's problem. Then sweeps: each axis is freed again, given all others, until no axis improves the objective. The objective never rises;
the whole is a coordinate descent, and its answer a heuristic.

*Repeated layers* are folded (`autoshard.problem.folding`), and message passing keeps the tables of their eliminations small
(`autoshard.search.shells`): each step is then within `Budgets.axis_tolerance` of its axis's minimum. So it is where other tables would be
too large.
*Memory.* Where the limit binds the bytes alive at the peak get a price (`autoshard.search.memory`), and layers may differ.

*Meshes.* The axes here are a mesh's own. Those of prime size, of which a mesh with better axes is made, are `autoshard.search.splitting`'s.

After the recursive programming of MindSpore's auto parallel, which splits greedily, op by op; here each split is solved for
the whole program, backward pass and optimizer included.

Complexity: axes x sweeps x (nodes x labels ** (induced width + 1)).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from autoshard.errors import SearchLimitError
from autoshard.judge.model import CostModel
from autoshard.problem import BUDGETS, NO_HINTS, Hints, Label, Problem, Tables, folded
from autoshard.search.elimination import Eliminator, table_cost
from autoshard.search.frugal import frugal
from autoshard.search.memory import Fitted, Found, fitted
from autoshard.search.searcher import Progress, Searcher, Solution, silent
from autoshard.search.shells import Shells


@dataclass(frozen=True, slots=True)
class RecursiveProgramming(Searcher):
    """The recursive-programming searcher.

    Attributes:
        max_sweeps: how often each axis may be freed again.
        max_entries: the largest table of an elimination.
        price_steps: how many memory prices may be tried when the limit binds.
    """

    name: ClassVar[str] = "recursive_programming"
    automatic: ClassVar[bool] = True
    takes_shares: ClassVar[bool] = True

    max_sweeps: int = 8
    max_entries: int = 1 << 20
    price_steps: int = 16

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The assignment found by sweeps over the mesh axes; see the module."""
        started = time.perf_counter()
        run, found = self._found(problem, progress, hints)
        return Solution(
            judgement=found.judgement,
            lower_bound_seconds=min(problem.compute_bound(), found.judgement.cost.objective_seconds),
            stats={
                "n_nodes": problem.n_nodes,
                "n_variables": run.n_variables,
                "induced_width": run.width,
                "sweeps": run.sweeps,
                "shells": run.shells.shells if run.shells else 0,
                "search_seconds": time.perf_counter() - started,
            },
            hints=replace(hints, price=found.price),
        )

    def _found(self, problem: Problem, progress: Progress, hints: Hints) -> tuple[Descent, Fitted]:
        """The best answer, and the run that met it."""
        shells, limit = Shells(self.max_entries, BUDGETS.table_sweeps, BUDGETS.axis_tolerance, progress), problem.memory_limit_bytes
        if (small := folded(problem)) is not None:
            run = Descent(self, small, progress, shells, hints.start)
            judgement, labels = run.descend({})
            if limit is None or judgement.cost.peak_bytes <= limit:
                return run, Fitted(judgement, labels)
        run = Descent(self, problem, progress, start=hints.start)
        try:
            return run, fitted(problem, run.descend, self.price_steps, frugal, hints=hints)
        except SearchLimitError:
            run = Descent(self, small or problem, progress, shells, hints.start)
            return run, fitted(problem, run.descend, self.price_steps, frugal, hints=hints)


class Descent:
    """Descents over one problem, with what they took.

    Attributes:
        start: labels, of the whole problem, from where one begins besides; None where there are none.
    """

    def __init__(
        self,
        searcher: RecursiveProgramming,
        problem: Problem,
        progress: Progress,
        shells: Shells | None = None,
        start: Sequence[Label] | None = None,
    ):
        self.searcher = searcher
        self.problem = problem
        self.progress = progress
        self.eliminate = Eliminator(searcher.max_entries)
        self.shells = shells
        self.start = start
        self.n_variables = self.width = self.sweeps = 0

    def descend(self, prices: Mapping[int, float]) -> Found:
        """Labels, of the whole problem, that no single axis can improve, from everything replicated, and from the start."""
        problem = self.problem
        labels = self.settle(problem.start(), prices)
        if self.start is not None:
            other = self.settle(problem.fold(self.start), prices)
            labels = min(labels, other, key=lambda found: labels_cost(problem, found, prices))
        return problem.evaluate(problem.assignment(labels)), problem.unfold(labels)

    def settle(self, labels: list[Label], prices: Mapping[int, float]) -> list[Label]:
        """Labels that no single axis can improve, from given ones."""
        problem, searcher = self.problem, self.searcher
        axes = _slowest_first(problem.model)
        settled = 0  # axes in a row that could not be improved
        for sweep in range(1 + searcher.max_sweeps):
            for done, axis in enumerate(axes):
                self.progress(f"axis {problem.mesh.names[axis]}", (sweep + done / len(axes)) / (1 + searcher.max_sweeps))
                labels, gain = self._free(axis, labels, prices)
                settled = settled + 1 if gain <= 0.0 else 0
                if sweep and settled >= len(axes) - 1:  # and the one before these is the best for them
                    break
            problem.note(labels)
            self.sweeps += sweep > 0
            if settled >= len(axes) - 1:
                break
        return labels

    def _free(self, axis: int, labels: list[Label], prices: Mapping[int, float]) -> tuple[list[Label], float]:
        """The best labels when one axis is free, and the seconds gained (0.0: nothing better than a rounding error)."""
        tables = self.problem.tables((axis,), labels, prices)
        self.n_variables = max(self.n_variables, sum(len(options) > 1 for options in tables.labels))
        found, cost = self._minimum(tables)
        chosen = [options[label] for options, label in zip(tables.labels, found, strict=True)]
        if chosen == labels:
            return labels, 0.0
        before = table_cost(tables.unary, tables.pairs, tables.incumbent)
        gain = before - cost
        kept = all(options[i] == label for options, i, label in zip(tables.labels, tables.incumbent, labels, strict=True))
        if kept and gain <= 1e-9 * abs(before):
            return labels, 0.0
        return chosen, max(gain, 0.0)

    def _minimum(self, tables: Tables) -> tuple[np.ndarray, float]:
        """The best labels and their cost: by elimination alone, or with the help of message passing."""
        if self.shells is None:
            found = self.eliminate(tables.unary, tables.pairs)
            self.width = max(self.width, found.width)
            return found.labels, found.cost
        labels, _, _ = self.shells.solve(tables)
        self.width = self.shells.width
        cost, before = (table_cost(tables.unary, tables.pairs, one) for one in (labels, tables.incumbent))
        return (labels, cost) if cost < before else (tables.incumbent, before)


def _slowest_first(model: CostModel) -> list[int]:
    """The mesh axes, those of the slowest links first, and of equal ones the outermost."""
    seconds = [float(model.communication.seconds("all_gather", BUDGETS.probe_bytes, (axis,))) for axis in range(len(model.mesh.axes))]
    return sorted(range(len(seconds)), key=lambda axis: -seconds[axis])


def labels_cost(problem: Problem, labels: Sequence[Label], prices: Mapping[int, float] | None = None) -> float:
    """What labels cost; what no node decides is left out."""
    tables = problem.tables((), labels, prices)
    return table_cost(tables.unary, tables.pairs, tables.incumbent)
