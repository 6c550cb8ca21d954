"""Manual sharding: the user's specs of arguments, checked, and completed by sharding propagation.

*Constraints.* Every argument has the layout of its spec or its pin; one that neither mentions is replicated. State that the program returns
keeps its argument's layout. *Objective, variables, ties.* Those of sharding propagation (`autoshard.search.sharding_propagation`), which
completes the specs: operations and intermediates follow with least redistribution, and a mesh axis is used only where some spec's use of it
reaches. It runs twice, with the first mesh axis decided first and with the last; the judge decides.

`autoshard.evaluate` costs the same specs as Shardy's own propagation completes them, as plain `jax.jit` does. That follows the shardings of
operands whatever they cost, so the two differ where other collectives are cheaper, such as a reduce_scatter than an all_reduce.

Complexity: that of sharding propagation.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from autoshard.errors import ShardingError
from autoshard.ir import Layout, Spec, check_divides, spec_to_layout
from autoshard.ir.naming import matching
from autoshard.memory_limit.lagrangian import fastest_within
from autoshard.problem import NO_HINTS, Hints, Problem
from autoshard.progress import Progress, silent
from autoshard.search.pin_report import disagreements
from autoshard.search.searcher import Searcher, Solution
from autoshard.search.sharding_propagation import PropagationSearch


@dataclass(frozen=True, slots=True)
class Manual(Searcher):
    """The searcher that completes specs of arguments; the user's pins are kept as well.

    Attributes:
        in_specs: per argument path or shell-style pattern, a `PartitionSpec` or a tuple like one; the last match counts.
    """

    name: ClassVar[str] = "manual"

    in_specs: Mapping[str, Spec] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.in_specs, Mapping):
            raise ShardingError(
                f"Manual takes specs by argument path or pattern, as in {{'state.params*': P('data')}}, got {self.in_specs!r}. For specs "
                "in the structure of the arguments use autoshard.evaluate."
            )
        object.__setattr__(self, "in_specs", {path: tuple(spec) for path, spec in self.in_specs.items()})

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The assignment that completes the specs.

        Raises:
            ShardingError: a spec is illegal, or contradicts a pin.
            InfeasibleError: they do not fit the memory limit.
        """
        started = time.perf_counter()
        layouts = self._layouts(problem)
        homes = {problem.decisions.home[value][0]: layout for value, layout in layouts.items() if value in problem.decisions.home}
        fixed = tuple({variable: layout[axis] for variable, layout in homes.items()} for axis in range(len(problem.mesh.axes)))
        runs = [PropagationSearch(problem, fixed, last_first=order, progress=progress) for order in (False, True)]
        answers = [(*fastest_within(problem, run.search, steps=8, hints=hints), run) for run in runs]
        judgement, labels, run = min(answers, key=lambda answer: answer[0].cost.makespan_seconds)
        return Solution(
            judgement=judgement,
            lower_bound_seconds=min(problem.compute_bound(), judgement.cost.objective_seconds),
            stats={"n_variables": problem.n_variables, "rounds": run.rounds, "search_seconds": time.perf_counter() - started},
            notes=tuple(disagreements(problem, labels, run.sources)),
            hints=hints,
        )

    def _layouts(self, problem: Problem) -> dict[int, Layout]:
        """The layouts of the arguments that specs mention or no pin does."""
        graph, mesh = problem.graph, problem.mesh
        layouts: dict[int, Layout] = {value: (-1,) * len(mesh.axes) for value in graph.arguments if value not in problem.pins}
        for path, spec in self.in_specs.items():
            for position in matching(path, graph.argument_paths):
                value, what = graph.arguments[position], graph.argument_paths[position]
                layout = spec_to_layout(spec, mesh, graph.values[value].rank, what)
                check_divides(layout, graph.values[value].shape, mesh, what)
                if any(dim not in allowed for dim, allowed in zip(layout, problem.pins.get(value, ()), strict=False)):
                    raise ShardingError(f"a spec must agree with the pins, and {spec} contradicts the pin of {what}. Drop one of the two.")
                layouts[value] = layout
        return layouts
