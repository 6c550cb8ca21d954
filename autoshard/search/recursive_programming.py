"""Recursive programming: one mesh axis after another, slowest links first, each solved exactly for the whole program.

Model. With the other axes' labels fixed, each variable has one label for the free axis, and the objective is a sum of unary and pair tables
(`autoshard.problem`). One axis is minimised exactly, by elimination (`autoshard.inference.elimination`); its answer is a part of the next
axis's problem. Then sweeps: each axis is freed again, given all others, until no axis improves the objective. The objective never rises;
the whole is a coordinate descent, and its answer a heuristic.

*Repeated layers* have one label (`autoshard.reductions.symmetry`), and message passing keeps the tables of their eliminations small
(`autoshard.inference.reduced_cost_fixing`): each step is then within `Budgets.axis_tolerance` of its axis's minimum. The same is done where
tables would otherwise be too large.

*Memory.* Where the limit binds, the bytes alive at the peak get a price, and layers may differ (`autoshard.memory_limit.repair`).

*Meshes.* The axes here are a mesh's own. `autoshard.mesh_search.refinement` uses the same descent over their prime factors.

After the recursive programming of MindSpore's auto parallel, which splits greedily, op by op; here each split is solved for
the whole program, backward pass and optimizer included.

Complexity: axes x sweeps x (variables x labels ** (induced width + 1)).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.compilers.buffers import Buffer
from autoshard.errors import SearchLimitError
from autoshard.inference.elimination import Eliminator
from autoshard.inference.reduced_cost_fixing import ReducedCostFixing
from autoshard.judge.evaluate import Judgement
from autoshard.judge.model import CostModel
from autoshard.memory_limit.lagrangian import Fitted, fitted
from autoshard.memory_limit.repair import Answer
from autoshard.problem import NO_HINTS, Hints, Label, Problem, Tables
from autoshard.progress import Progress, silent
from autoshard.reductions import symmetry
from autoshard.search.low_memory_starts import low_memory_starts
from autoshard.search.searcher import Searcher, Solution


@dataclass(frozen=True, slots=True)
class RecursiveProgramming(Searcher):
    """The recursive-programming searcher.

    Attributes:
        max_sweeps: the most times that each axis is freed again.
        max_entries: the largest table of an elimination.
        price_steps: the most memory prices that may be tried when the limit binds.
    """

    name: ClassVar[str] = "recursive_programming"
    automatic: ClassVar[bool] = True
    uses_exposed_shares: ClassVar[bool] = True

    max_sweeps: int = 8
    max_entries: int = 1 << 20
    price_steps: int = 16

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The assignment found by sweeps over the mesh axes; see the module.

        Raises:
            InfeasibleError: no answer fits the memory limit; names the smallest peak found.
        """
        started = time.perf_counter()
        run, found = self._found(problem, progress, hints)
        return Solution(
            judgement=found.judgement,
            lower_bound_seconds=min(problem.compute_bound(), found.judgement.cost.objective_seconds),
            stats={
                "n_variables": problem.n_variables,
                "n_free_variables": run.n_free_variables,
                "induced_width": run.width,
                "sweeps": run.sweeps,
                "restrictions": run.fixing.restrictions if run.fixing else 0,
                "search_seconds": time.perf_counter() - started,
            },
            hints=replace(hints, price=found.price),
        )

    def _found(self, problem: Problem, progress: Progress, hints: Hints) -> tuple[Descent, Fitted]:
        """The best answer, and the run that found it."""
        fixing = ReducedCostFixing(self.max_entries, BUDGETS.table_sweeps, BUDGETS.tolerance, progress)
        if (small := symmetry.apply(problem)) is not None:
            run = Descent(self, small, progress, fixing, hints.start)
            return run, fitted(problem, run.descend, self.price_steps, low_memory_starts, hints=hints)
        run = Descent(self, problem, progress, start=hints.start)
        try:
            return run, fitted(problem, run.descend, self.price_steps, low_memory_starts, hints=hints)
        except SearchLimitError:
            run = Descent(self, problem, progress, fixing, hints.start)
            return run, fitted(problem, run.descend, self.price_steps, low_memory_starts, hints=hints)


class Descent:
    """Coordinate descents over one problem, with counts of their work.

    Attributes:
        start: labels, of the whole problem, from which one more descent begins; None: none does.
        judged: judgements by labels.
    """

    def __init__(
        self,
        searcher: RecursiveProgramming,
        problem: Problem,
        progress: Progress,
        fixing: ReducedCostFixing | None = None,
        start: Sequence[Label] | None = None,
    ):
        self.searcher = searcher
        self.problem = problem
        self.progress = progress
        self.eliminate: Eliminator = Eliminator(searcher.max_entries)
        self.fixing = fixing
        self.start = start
        self.judged: dict[tuple[Label, ...], Judgement] = {}
        self.n_free_variables = self.width = self.sweeps = 0

    def descend(self, prices: Mapping[Buffer, float]) -> Answer:
        """Labels of the whole problem that no single axis can improve: the better of descents from all replicated, and from the start."""
        problem = self.problem
        labels = self.settle(problem.start(), prices)
        if self.start is not None:
            other = self.settle(problem.project(self.start), prices)
            labels = min(labels, other, key=lambda found: problem.cost_of(found, prices))
        if (key := tuple(labels)) not in self.judged:  # other prices often have the same answer
            self.judged[key] = problem.evaluate(problem.assignment(labels))
        return self.judged[key], problem.invert(labels)

    def settle(self, labels: list[Label], prices: Mapping[Buffer, float]) -> list[Label]:
        """Labels that no single axis can improve, from given ones."""
        problem, searcher = self.problem, self.searcher
        axes = _slowest_first(problem.model)
        settled = 0  # axes in a row that could not be improved
        for sweep in range(1 + searcher.max_sweeps):
            for done, axis in enumerate(axes):
                self.progress(f"axis {problem.mesh.names[axis]}", (sweep + done / len(axes)) / (1 + searcher.max_sweeps))
                labels, gain = self._free(axis, labels, prices)
                settled = settled + 1 if gain <= 0.0 else 0
                if sweep and settled >= len(axes) - 1:  # and the axis before these is at its best for them
                    break
            problem.note(labels)
            self.sweeps += sweep > 0
            if settled >= len(axes) - 1:
                break
        return labels

    def _free(self, axis: int, labels: list[Label], prices: Mapping[Buffer, float]) -> tuple[list[Label], float]:
        """The best labels when one axis is free, and the seconds gained (0.0: nothing better than a rounding error)."""
        tables = self.problem.tables((axis,), labels, prices)
        self.n_free_variables: int = max(self.n_free_variables, sum(len(options) > 1 for options in tables.labels))
        found, cost = self._minimum(tables)
        chosen = tables.at(found)
        if chosen == labels:
            return labels, 0.0
        before = tables.energy(tables.incumbent)
        gain = before - cost
        kept = all(options[i] == label for options, i, label in zip(tables.labels, tables.incumbent, labels, strict=True))
        if kept and gain <= 1e-9 * abs(before):
            return labels, 0.0
        return chosen, max(gain, 0.0)

    def _minimum(self, tables: Tables) -> tuple[np.ndarray, float]:
        """The best labels and their cost: by elimination alone, or with the help of message passing."""
        if self.fixing is None:
            found = self.eliminate(tables)
            self.width = max(self.width, found.width)
            return found.labels, found.cost
        labels, _, _ = self.fixing.solve(tables)
        self.width: int = self.fixing.width
        cost, before = (tables.energy(one) for one in (labels, tables.incumbent))
        return (labels, cost) if cost < before else (tables.incumbent, before)


def _slowest_first(model: CostModel) -> list[int]:
    """The mesh axes, those of the slowest links first, and of equal ones the outermost."""
    seconds = [float(model.communication.seconds("all_gather", BUDGETS.probe_bytes, (axis,))) for axis in range(len(model.mesh.axes))]
    return sorted(range(len(seconds)), key=lambda axis: -seconds[axis])
