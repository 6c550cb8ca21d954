"""Searches of a step's layers on the devices of one stage: their costs on any mesh, at any price of bytes, and a bound of them all.

The step is given with two small numbers of its layers (`autoshard.pipeline.plans.Layers`). On every mesh the shorter one is solved; the
meshes that come near the best one, and the one of the least memory, are solved with both. *Prices.* A price on bytes leads to less memory
(`autoshard.memory_limit.lagrangian`): what a microbatch keeps pays once for each microbatch in flight. *Bound.* That of all layers is
extended from those of the two programs, as costs are: of seconds alone, or of seconds and of the bytes of all stages, which have a limit
(`autoshard.memory_limit.dual_bound`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from autoshard.concurrency import cores, thread_seconds, together
from autoshard.cost.record import Cost
from autoshard.errors import SearchLimitError, ShardingError
from autoshard.judge.evaluate import Judgement
from autoshard.memory_limit.lagrangian import alive_shares
from autoshard.memory_limit.repair import Answer
from autoshard.pipeline.layer_costs import LayerCosts, costs_of, kept_values, layer_costs
from autoshard.pipeline.micro import loop_of
from autoshard.problem import Problem
from autoshard.progress import Progress, silent
from autoshard.search import DynamicProgramming
from autoshard.trace import Traced

_Found = tuple[Answer, float]
NEAR = 1.15  # times the least seconds: meshes so near are solved with both programs, three at most
LEAN = 2  # meshes that are searched at prices
ROUNDS = 2  # of charging what is part of a peak


@dataclass(frozen=True, slots=True, eq=False)
class Option:
    """A way in which a stage's devices may compute layers.

    Attributes:
        mesh: the number of the mesh.
        costs: of a layer, and of all else.
        again: the number of the recomputation of its program; None: nothing is computed again.
        hosted: whether its optimizer state is in the memory of hosts.
    """

    mesh: int
    costs: LayerCosts
    again: int | None = None
    hosted: bool = False


@dataclass(slots=True, eq=False)
class OnMesh:
    """The two programs on one mesh.

    Attributes:
        problems: of the shorter and of the longer one.
        answers: without prices; of the longer one where it was solved.
        bounds: of the step's seconds, likewise.
        charged: what was part of a peak so far, of each program.
    """

    problems: tuple[Problem, Problem]
    answers: list[Answer] = field(default_factory=list)
    bounds: list[float] = field(default_factory=list)
    charged: tuple[set[Any], set[Any]] = field(default_factory=lambda: (set(), set()))


class LayerSearch:
    """The searches of one number of stages and of microbatches.

    Attributes:
        programs: the two programs, in microbatches.
        n_layers: of the whole step.
        numbers: layers of the two programs.
        again: the number of the programs' recomputation; None: nothing is computed again.
        hosted: whether their optimizer state is in the memory of hosts.
        meshes: per mesh what is known of it.
        free: the options without prices.
        lean: the meshes that are searched at prices.
        bound_seconds: a lower bound of the work of all layers, one after the other on these devices, a step.
        floor_seconds: the same of computing one microbatch.
        mesh_bounds: per mesh a lower bound of the shorter program's step.
    """

    def __init__(
        self,
        programs: Sequence[Traced],
        n_layers: int,
        problems: Sequence[Sequence[Problem]],
        searcher: DynamicProgramming,
        numbers: tuple[int, int],
        again: int | None = None,
        progress: Progress = silent,
        hosted: bool = False,
    ):
        self.programs, self.n_layers, self.searcher, self.numbers, self.again = programs, n_layers, searcher, numbers, again
        self.hosted = hosted
        self.progress = progress
        self.meshes: list[OnMesh] = [OnMesh(pair) for pair in zip(*problems, strict=True)]
        self.free: list[Option] = []
        self.lean: list[int] = []
        self.bound_seconds = self.floor_seconds = 0.0
        self.mesh_bounds = [0.0] * len(self.meshes)

    @property
    def n(self) -> int:
        """The number of microbatches."""
        return self.programs[0].microbatches

    def run(self, known: Sequence[float]) -> None:
        """Solves without prices; what an earlier call solved stays.

        Args:
            known: per mesh a lower bound of the shorter program's step; meshes that cannot be the best one are left out.
        """
        self.mesh_bounds, self.free = list(known), []
        least = math.inf
        order, at_once, seconds = sorted(range(len(self.meshes)), key=lambda k: (known[k], k)), cores(), 0.0
        for first in (0, *range(1, len(order), at_once)):  # one alone, which tells whether they take long, then some at the same time
            some = [k for k in order[first : first + (at_once if first else 1)] if known[k] < least]
            new, computed = [k for k in some if not self.meshes[k].answers], thread_seconds()
            answers = dict(zip(new, together([partial(self._answer, k, 0) for k in new], seconds=seconds), strict=True))
            seconds = max(seconds, thread_seconds() - computed)
            for k in some:
                if known[k] < least and self._solved(k, 0, answers):
                    least = min(least, self._first(k).objective_seconds)
                    self.mesh_bounds[k] = max(known[k], self.meshes[k].bounds[0])
        if math.isinf(least):
            raise SearchLimitError("no mesh of these devices can be searched for a few layers.")
        solved = [k for k, mesh in enumerate(self.meshes) if mesh.answers]
        near = [k for k in solved if self._first(k).objective_seconds <= NEAR * least]
        chosen: dict[tuple[int, ...], int] = {}  # of several placements of a mesh the first that is chosen
        for numbers, key in ((near, _objective), (near, _makespan), (solved, _peak)):
            k = min(numbers, key=lambda k: (key(self._first(k)), k))
            chosen.setdefault(self.meshes[k].problems[0].mesh.sizes, k)
        bounds = []
        for k in chosen.values():
            if self._solved(k, 1):
                mesh = self.meshes[k]
                costs = self._costs(k, [answer[0] for answer in mesh.answers])
                self.free.append(Option(k, costs, self.again, self.hosted))
                self.floor_seconds: float = costs.of(self.n_layers).floor_seconds
                bounds.append(self._extended(*mesh.bounds))
        self.bound_seconds: float = min(bounds, default=0.0)

    def priced(self, price: float, in_flight: int) -> list[Option]:
        """Options of less memory on the meshes that have some.

        Args:
            price: seconds a byte.
            in_flight: how many microbatches pay for what they keep.
        """
        found = []
        for k in self._lean(price, in_flight):
            if self._solved(k, 1):
                judgements = [self._priced(k, which, price, in_flight) for which in (0, 1)]
                found.append(Option(k, self._costs(k, judgements), self.again, self.hosted))
        return found

    def _lean(self, price: float, in_flight: int) -> list[int]:
        """The meshes that are worth a price: the best one without, and those that are the best ones at the first price asked for."""
        if not self.lean:
            solved = [k for k, mesh in enumerate(self.meshes) if mesh.answers]
            costs = {k: self._priced(k, 0, price, in_flight, 1).cost for k in solved}
            ranked = sorted(solved, key=lambda k: (costs[k].objective_seconds + price * costs[k].peak_bytes, k))
            by_sizes = {self.meshes[k].problems[0].mesh.sizes: k for k in reversed([self.free[0].mesh, *ranked])}
            self.lean = list(reversed(by_sizes.values()))[:LEAN]
        return self.lean

    def _priced(self, k: int, which: int, price: float, in_flight: int, rounds: int = ROUNDS) -> Judgement:
        """The best answer of a program on a mesh at a price of bytes, once more where its peak has what was not charged."""
        mesh = self.meshes[k]
        problem, charged, judgement = mesh.problems[which], mesh.charged[which], mesh.answers[which][0]
        kept = kept_values(problem.facts, None if self.n == 1 else loop_of(problem.graph, problem.facts.rules, self.n))
        shares = alive_shares(problem)
        charged.update(judgement.peak.charged)
        for _ in range(rounds):
            weights = shares | dict.fromkeys(charged, 1.0)
            prices = {value: price * weight * (in_flight if value in kept else 1) for value, weight in weights.items()}
            judgement = self.searcher.priced(problem, prices, {})[0][0]
            if charged.issuperset(judgement.peak.charged):
                break
            charged.update(judgement.peak.charged)
        return judgement

    def bound_within(self, limit_bytes: float, price: float, enough: float) -> float:
        """A lower bound as `bound_seconds`, where all stages together have no more bytes on a device each than a limit.

        Args:
            price: seconds a byte, at which the bytes beyond the limit are charged.
            enough: a bound that is not to be exceeded.
        """
        least = math.inf
        for k, mesh in enumerate(self.meshes):
            if not mesh.answers:
                continue  # no faster than the best one
            alone = self._scaled(k)
            if alone >= min(enough, least) or not self._solved(k, 1):
                least = min(least, alone)
                continue
            both = [self.searcher.priced_bound(problem, answer, price) for problem, answer in zip(mesh.problems, mesh.answers, strict=True)]
            least = min(least, max(alone, self._extended(*both) - price * limit_bytes))
        return max(least, self.bound_seconds)

    def _solved(self, k: int, which: int, known: Mapping[int, _Found | None] | None = None) -> bool:
        """Whether a program has an answer on a mesh; it is solved at the first call, unless its answer is known."""
        mesh = self.meshes[k]
        if len(mesh.answers) <= which:
            if (found := self._answer(k, which) if known is None else known[k]) is None:
                return False
            mesh.answers.append(found[0])
            mesh.bounds.append(found[1])
        return True

    def _answer(self, k: int, which: int, is_here: bool = True) -> _Found | None:
        """The answer of a program on a mesh, and its bound; None: there is none."""
        problem = self.meshes[k].problems[which]
        try:
            solution = self.searcher.solve(problem, self.progress)
        except (SearchLimitError, ShardingError):
            return None
        return (solution.judgement, problem.labels(solution.assignment)), solution.lower_bound_seconds

    def _costs(self, k: int, judgements: Sequence[Judgement]) -> LayerCosts:
        pairs = zip(self.meshes[k].problems, judgements, strict=True)
        fewer, more = (costs_of(problem, judgement, self.n) for problem, judgement in pairs)
        return layer_costs(fewer, more, *self.numbers)

    def _first(self, k: int) -> Cost:
        """The cost of the shorter program's answer without prices."""
        return self.meshes[k].answers[0][0].cost

    def _extended(self, fewer: float, more: float) -> float:
        """From bounds of two programs to that of all layers."""
        n_fewer, n_more = self.numbers
        return fewer + (self.n_layers - n_fewer) / (n_more - n_fewer) * (more - fewer)

    def _scaled(self, k: int) -> float:
        """The bound of all layers on a mesh: its own, or that of the shorter program in proportion to the best mesh's."""
        bounds = self.meshes[k].bounds
        if len(bounds) == 2:
            return self._extended(*bounds)
        best = min(self.meshes[option.mesh].bounds[0] for option in self.free)
        return self.bound_seconds * bounds[0] / best


def _objective(cost: Cost) -> float:
    return cost.objective_seconds


def _makespan(cost: Cost) -> float:
    return cost.makespan_seconds


def _peak(cost: Cost) -> float:
    return cost.peak_bytes
