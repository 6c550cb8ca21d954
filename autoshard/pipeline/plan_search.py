"""The search over stages, their devices, microbatches and shardings together.

*Candidates.* A number of stages, and one of microbatches, from four to 24 times as many where the batch has such divisors. Stages have
equal parts of the cluster, each of neighbours, and a stage's shardings are searched for the microbatch that it gets. *Costs.* Those of a
layer and of all else on a part of the cluster, from searches of the program with a few of its own layers
(`autoshard.pipeline.layer_costs`), first without a memory limit; where no division of the layers fits, again with less. *Objective.* The
makespan of the schedule with the best division of layers into stages (`autoshard.pipeline.layering`). *Ties.* Fewer stages, then fewer
microbatches.
*Method.* Branch and bound: the candidate of the least bound is searched next, until none is below the best makespan by a gain that is
worth it.

*Bounds.* Let ``T`` be a lower bound of all layers' work on one microbatch with the devices of one stage, overlap and memory aside. Some
stage does an ``S``-th of it at least, and the first microbatch passes all of them: the makespan without overlap is at least
``T (1 + (m - 1) / S)``. Before a search ``T`` is that of matrix products at the peak rate. A search proves a greater one, which holds for
other candidates too. *Smaller microbatches:* a ``k``-th of the examples takes at least ``T / k``, since the same sharding of ``k`` of them
together takes no more than ``k`` times as long. *More stages:* a ``k``-th of the devices takes at least ``T`` for a ``k``-th of the
examples, since all devices could do the same side by side. Bounds of programs with few layers are extended to all layers as costs are.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.errors import ClusterError, InfeasibleError, SearchLimitError
from autoshard.ir import Mesh
from autoshard.microbatch import divisors, microbatched
from autoshard.microbatch.plan import product_flops
from autoshard.pipeline.layer_costs import LayerCosts, costs_of, layer_costs, layer_share, with_less_memory
from autoshard.pipeline.layering import Layering, best_layering
from autoshard.pipeline.repeats import Layers, handed_on_bytes, layers_of, shortened
from autoshard.pipeline.schedule import PieceSeconds, has_schedule, schedule_of, simulate, stages_in_flight
from autoshard.problem import NO_HINTS, Hints, Problem
from autoshard.progress import Progress, silent
from autoshard.rules import rules_of
from autoshard.search import Solution
from autoshard.trace import Traced


class Search(Protocol):
    """The search of a program on some devices."""

    def __call__(
        self, traced: Traced, cluster: Cluster, limit_bytes: float, mesh: Mesh | None, like: Problem | None, hints: Hints
    ) -> tuple[Solution, Problem]:
        """The best solution, and its problem.

        Args:
            traced: the program.
            cluster: the devices.
            limit_bytes: that one may hold.
            mesh: the mesh; None for any.
            like: a problem of the same program on this mesh, which shares what it can; None: there is none.
            hints: of an earlier search.

        Raises:
            InfeasibleError: nothing fits.
        """
        ...


FEWER = 2  # layers of the shorter of two programs
MOST_MICROBATCHES = 24  # times the number of stages: the bubble is 4 % then
FIRST_MICROBATCHES = 4  # times the number of stages, the fewest that are tried: the bubble is 20 % then
TRIES = 3  # of searches with less memory
MARGIN = 0.95  # of the memory for which they are made: peaks of more layers are not quite in proportion
_NUMBER = re.compile(r"\d+")


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A number of stages, and one of microbatches."""

    n_stages: int
    n_microbatches: int

    def __str__(self) -> str:
        return f"{self.n_stages} stages, {self.n_microbatches} microbatches"

    def pace(self, n_microbatch_seconds: float) -> float:
        """The makespan of equal stages that take so many seconds together for one microbatch."""
        return n_microbatch_seconds * (1 + (self.n_microbatches - 1) / self.n_stages)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A candidate with its predicted costs.

    Attributes:
        candidate: the numbers.
        part: the devices of a stage.
        schedule: the schedule's name.
        layering: the layers of each stage.
        options: the plans that a stage may have.
        objective_seconds: the makespan without overlap, to compare with bounds.
    """

    candidate: Candidate
    part: Cluster
    schedule: str
    layering: Layering
    options: tuple[LayerCosts, ...]
    objective_seconds: float

    @property
    def makespan_seconds(self) -> float:
        """Of a step, as predicted."""
        return self.layering.makespan_seconds


@dataclass(frozen=True, slots=True)
class Plans:
    """What a search over candidates found.

    Attributes:
        ranked: what fits, fastest first.
        bound_seconds: a lower bound of the makespan of every candidate, without overlap.
        n_candidates, n_searched: how many there were, and how many were searched.
    """

    ranked: tuple[Estimate, ...]
    bound_seconds: float
    n_candidates: int
    n_searched: int

    @property
    def gap(self) -> float:
        """By how much of the bound the best makespan without overlap exceeds it; infinity where nothing fits."""
        least = min((found.objective_seconds for found in self.ranked), default=math.inf)
        return max(least / self.bound_seconds - 1.0, 0.0) if self.bound_seconds else math.inf


def search_plans(
    traced: Traced,
    cluster: Cluster,
    limit_bytes: float,
    search: Search,
    schedule: str = "1f1b",
    numbers_of_stages: Sequence[int] | None = None,
    until: float = math.inf,
    least_gain: float = 0.01,
    best_seconds: float = math.inf,
    n_microbatches: int | None = None,
    progress: Progress = silent,
) -> Plans | None:
    """The candidates of a step of equal layers, ranked; None where the program has no equal layers that can be taken apart.

    Args:
        traced: the whole step, not in microbatches.
        cluster: all devices.
        limit_bytes: that a device may hold.
        search: of a program on a part of the cluster.
        schedule: the schedule's name.
        numbers_of_stages: to try; by default all with which the cluster has equal parts.
        until: the time (`time.perf_counter`) at which the search ends with what it has.
        least_gain: of the makespan, that is worth a search.
        best_seconds: the makespan of a plan without stages; candidates that cannot be faster are not searched.
        n_microbatches: the only number of microbatches to try; None: several.
        progress: a callback.
    """
    layers = layers_of(traced.graph)
    if layers is None:
        return None
    fewer, more = (shortened(traced, layers, n) for n in (FEWER, FEWER + 1))
    if fewer is None or more is None:
        return None
    planning = _Planning(traced, layers, (fewer, more), cluster, limit_bytes, search, schedule, least_gain, best_seconds, n_microbatches)
    return planning.run(numbers_of_stages, until, progress)


class _Planning:
    """The state of one search.

    Attributes:
        programs: the step with a few of its layers, and with one more.
        bounds: per candidate the greatest lower bound known.
        found: per candidate that was searched its estimate; None where nothing fits.
    """

    def __init__(
        self,
        traced: Traced,
        layers: Layers,
        programs: tuple[Traced, Traced],
        cluster: Cluster,
        limit: float,
        search: Search,
        schedule: str,
        least_gain: float,
        best_seconds: float,
        n_microbatches: int | None,
    ):
        self.traced, self.layers, self.programs, self.cluster, self.limit = traced, layers, programs, cluster, limit
        self.search, self.schedule, self.least_gain = search, schedule, least_gain
        self.bounds: dict[Candidate, float] = {}
        self.found: dict[Candidate, Estimate | None] = {}
        self.patterns = {_NUMBER.sub("", path) for path in set(traced.graph.argument_paths) - set(programs[0].graph.argument_paths)}
        self.best_seconds, self.n_microbatches = best_seconds, n_microbatches
        self.price = 0.0  # seconds a byte at which a solution fitted
        self._flops: float | None = None
        self._micro: dict[int, tuple[Traced, ...]] = {}

    def run(self, numbers_of_stages: Sequence[int] | None, until: float, progress: Progress) -> Plans:
        self.bounds = {each: each.pace(self.product_seconds(each)) for each in self.candidates(numbers_of_stages)}
        n = len(self.bounds)
        while time.perf_counter() < until and (candidate := self.next()) is not None:
            progress(f"pipelines: {candidate}", min(len(self.found) / n, 1.0))
            self.found[candidate] = self.estimate(candidate)
        ranked = sorted(filter(None, self.found.values()), key=lambda found: (found.makespan_seconds, found.candidate))
        bounds = [bound for each, bound in self.bounds.items() if self.found.get(each, ...) is not None]
        least = min((found.objective_seconds for found in ranked), default=math.inf)
        return Plans(tuple(ranked), min(bounds, default=least), n, len(self.found))

    # -- candidates ---------------------------------------------------------------------------------------------------

    def candidates(self, numbers_of_stages: Sequence[int] | None) -> list[Candidate]:
        """Numbers of stages with which the cluster has equal parts, each with multiples of a first number of microbatches.

        That is the divisor of the batch next to a few times the stages: with fewer, more of the time is spent in filling and draining.
        """
        numbers, found = divisors(self.programs[0]), []
        if self.n_microbatches is not None:
            numbers = tuple(n for n in numbers if n == self.n_microbatches)
        for n_stages in numbers_of_stages or range(2, min(self.layers.count, self.cluster.n_devices) + 1):
            possible = [n for n in numbers if has_schedule(self.schedule, n_stages, n)]
            if not possible or not self.has_parts(n_stages):
                continue
            first = min(possible, key=lambda n: (abs(math.log(n / n_stages / FIRST_MICROBATCHES)), n))
            found += [Candidate(n_stages, n) for n in possible if n % first == 0 and n <= max(MOST_MICROBATCHES * n_stages, first)]
        return found

    def has_parts(self, n_stages: int) -> bool:
        """Whether the cluster has so many equal parts."""
        try:
            self.cluster.part(n_stages)
        except ClusterError:
            return False
        return True

    def next(self) -> Candidate | None:
        """The candidate to search, of those whose bound promises a gain.

        First of each number of stages the one with the fewest microbatches, whose bound holds for the others; then those with the least
        makespan if all of a number of stages used their devices as well as the best of them; every other time that of the least bound.
        """
        best = min((found.makespan_seconds for found in self.found.values() if found), default=math.inf)
        best = min(best, self.best_seconds)
        open_ones = [each for each, bound in self.bounds.items() if each not in self.found and bound < best * (1 - self.least_gain)]
        seen = {each.n_stages for each in self.found}
        new = [each for each in open_ones if each.n_stages not in seen]
        if new:
            return min(new)
        if len(self.found) % 2:
            return min(open_ones, key=lambda each: (self.bounds[each], each), default=None)
        return min(open_ones, key=lambda each: (self.guess(each), each), default=None)

    def guess(self, candidate: Candidate) -> float:
        """The makespan with the least seconds of a batch that was found with as many stages."""
        found = [each for each in self.found.values() if each and each.candidate.n_stages == candidate.n_stages]
        work = min((each.makespan_seconds / each.candidate.pace(1.0) * each.candidate.n_microbatches for each in found), default=math.inf)
        return candidate.pace(work / candidate.n_microbatches)

    # -- costs --------------------------------------------------------------------------------------------------------

    def product_seconds(self, candidate: Candidate) -> float:
        """A lower bound of one microbatch on the devices of one stage: its matrix products at the peak rate."""
        graph = self.traced.graph
        if self._flops is None:
            self._flops = product_flops(graph.ops, rules_of(graph), graph)
        rate = max(rate for _, rate in self.cluster.device.flops_per_second) * self.cluster.n_devices / candidate.n_stages
        return self._flops / candidate.n_microbatches / rate

    def estimate(self, candidate: Candidate) -> Estimate | None:
        """The candidate's best plan that fits."""
        n, part = candidate.n_microbatches, self.cluster.part(candidate.n_stages)
        fewer, more = self.in_microbatches(n)
        try:
            solution, problem = self.search(fewer, part, math.inf, None, None, NO_HINTS)
            first = costs_of(problem, solution, n)
            solution, problem = self.search(more, part, math.inf, problem.mesh, None, NO_HINTS)
        except (SearchLimitError, InfeasibleError):
            return None
        free = layer_costs(first, costs_of(problem, solution, n), FEWER)
        self.raise_bounds(candidate, free)
        alive = stages_in_flight(schedule_of(self.schedule, candidate.n_stages, n))
        options = [free]
        for attempt in range(TRIES + 1):
            layering = best_layering(options, self.layers.count, n, alive, self.limit, self.send_seconds(candidate))
            if layering is not None:
                return self.estimated(candidate, part, layering, options)
            if attempt == TRIES or free.ends.state_bytes + free.ends.residual_bytes > self.limit:
                return None
            limit = self.tighter(candidate, options[-1], 1 if not attempt else max(alive))
            try:
                solution, problem = self.search(more, part, limit, problem.mesh, problem, replace(solution.hints, price=self.price))
            except (InfeasibleError, SearchLimitError):
                return None
            self.price = solution.hints.price or self.price
            share = layer_share(problem, solution, n, self.is_layer)
            options.append(with_less_memory(free, costs_of(problem, solution, n), share, FEWER + 1))
        return None

    def tighter(self, candidate: Candidate, costs: LayerCosts, alive: int) -> float:
        """The memory limit of the program with more layers at which a stage would fit if all bytes of its layers shrank alike.

        Args:
            costs: those that do not fit.
            alive: how many microbatches the stage is to hold.
        """
        layers = -(-self.layers.count // candidate.n_stages)
        layer, rest = costs.layer, costs.ends.state_bytes + costs.ends.residual_bytes
        share = self.limit / max(layers * (layer.state_bytes + alive * layer.residual_bytes), 1.0)
        return rest + min(share, 1.0) * MARGIN * (FEWER + 1) * (layer.state_bytes + layer.residual_bytes)

    def is_layer(self, path: str) -> bool:
        """Whether an argument belongs to a layer: its path is that of one which a shorter program lacks, but for numbers."""
        return _NUMBER.sub("", path) in self.patterns

    def in_microbatches(self, n: int) -> tuple[Traced, ...]:
        """The two programs in so many microbatches."""
        if n not in self._micro:
            self._micro[n] = tuple(microbatched(program, n) for program in self.programs)
        return self._micro[n]

    def estimated(self, candidate: Candidate, part: Cluster, layering: Layering, options: Sequence[LayerCosts]) -> Estimate:
        """The candidate's estimate, with the makespan of its schedule: there a transfer may hold up both stages."""
        last = candidate.n_stages - 1
        stages = [
            options[option].of(k, float(stage == last))
            for stage, (option, k) in enumerate(zip(layering.options, layering.layers, strict=True))
        ]
        schedule, send = schedule_of(self.schedule, candidate.n_stages, candidate.n_microbatches), self.send_seconds(candidate)
        after = max(stage.after_seconds for stage in stages)

        def makespan(seconds: Sequence[float]) -> float:
            thirds = [each / 3 / schedule.n_chunks for each in seconds]  # two products of gradients for one forward
            pieces = [PieceSeconds(third, third, third) for third in thirds] * schedule.n_chunks
            return simulate(schedule, pieces, send).makespan_seconds + after

        predicted = makespan([stage.microbatch_seconds for stage in stages])
        objective = makespan([stage.objective_seconds for stage in stages])
        return Estimate(candidate, part, self.schedule, replace(layering, makespan_seconds=predicted), tuple(options), objective)

    def raise_bounds(self, candidate: Candidate, costs: LayerCosts) -> None:
        """Raises the bounds of this candidate and of those that it bounds."""
        seconds = costs.of(self.layers.count).bound_seconds
        for other in self.bounds:
            stages, rest = divmod(other.n_stages, candidate.n_stages)
            parts, remains = divmod(other.n_microbatches, candidate.n_microbatches * max(stages, 1))
            if stages and parts and not rest and not remains:
                self.bounds[other] = max(self.bounds[other], other.pace(seconds / parts))

    def send_seconds(self, candidate: Candidate) -> float:
        """One transfer of what a layer hands to the next, each device to its counterpart in the next stage."""
        if candidate.n_stages == 1:
            return 0.0
        n_devices = self.cluster.n_devices // candidate.n_stages
        mesh = Mesh((("stage", candidate.n_stages), ("device", n_devices)))
        nbytes = handed_on_bytes(self.layers) / candidate.n_microbatches / n_devices
        return Communication(self.cluster.links(mesh)).seconds("collective_permute", nbytes, (0,))
