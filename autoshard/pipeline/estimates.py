"""Makespans of numbers of stages and microbatches, from the costs of a layer, with the best schedule and division of layers into stages."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.errors import ClusterError
from autoshard.ir import Mesh
from autoshard.microbatch import divisors
from autoshard.pipeline.layer_search import OnMesh, Option
from autoshard.pipeline.layering import best_layering
from autoshard.pipeline.plans import FILL, Asked, Candidate, Estimate, Layers
from autoshard.pipeline.schedule import pieces_in_flight
from autoshard.pipeline.scheduling import schedule_of
from autoshard.trace import Traced

MOST_MICROBATCHES = 64  # times the number of stages
FIRST_MICROBATCHES = 4  # times the number of stages, the fewest that are tried: the bubble is 20 % then


def has_parts(cluster: Cluster, n_stages: int) -> bool:
    """Whether a cluster has so many equal parts."""
    if cluster.n_devices % n_stages:
        return False
    try:
        cluster.part(n_stages)
    except ClusterError:
        return False
    return True


@dataclass(frozen=True, slots=True, eq=False)
class Estimator:
    """What is estimated of a step: its layers, on a cluster, as they are asked for."""

    layers: Layers
    cluster: Cluster
    asked: Asked

    def candidates(self, program: Traced) -> list[Candidate]:
        """Numbers of stages with which the cluster has equal parts, each with a first number of microbatches and its multiples by twos.

        The first is the divisor of the batch next to a few times the stages: with fewer, more of the time is spent in filling and draining.

        Args:
            program: the step, perhaps with fewer layers.
        """
        numbers, found = [1, *divisors(program)], []
        if self.asked.microbatches is not None:
            numbers = [n for n in numbers if n == self.asked.microbatches]
        for n_stages in self.asked.stages or range(1, min(self.layers.count, self.cluster.n_devices) + 1):
            possible = [n for n in numbers if n_stages == 1 or n > 1]
            if not possible or not self.schedules(Candidate(n_stages, possible[-1])) or not has_parts(self.cluster, n_stages):
                continue
            wanted = 1 if n_stages == 1 else FIRST_MICROBATCHES * n_stages
            first = min(possible, key=lambda n: (abs(math.log(n / wanted)), n))
            most = max(MOST_MICROBATCHES * n_stages, first)
            found += [Candidate(n_stages, n) for n in possible if n <= most and n % first == 0 and (n // first).bit_count() == 1]
        return found

    def best(self, candidate: Candidate, meshes: Sequence[OnMesh], options: Sequence[Option]) -> list[Estimate]:
        """The best plan of each schedule that fits, of stages that all have one mesh, and one of these options each.

        What is computed again, and whether optimizer state is on hosts, is a choice of each stage; of scanned layers, one of them all.
        """
        groups: dict[tuple, list[Option]] = {}
        for option in options:
            alike = (option.again, option.hosted) if self.layers.are_scanned else ()
            groups.setdefault((option.mesh, *alike), []).append(option)
        found = []
        for name in self.schedules(candidate):
            each = [self.estimate(candidate, name, meshes, group) for group in groups.values()]
            found.append(min(filter(None, each), key=lambda one: one.makespan_seconds, default=None))
        return [each for each in found if each is not None]

    def schedules(self, candidate: Candidate) -> list[str]:
        """Those that the candidate may have."""
        if candidate.n_stages == 1:
            return [self.asked.schedules[0]]
        chunks = {"interleaved": 2}
        return [
            name
            for name in self.asked.schedules
            if candidate.n_stages * chunks.get(name, 1) <= self.layers.count
        ]

    def in_flight(self, name: str, candidate: Candidate) -> tuple[int, ...]:
        """Per stage how many microbatches it keeps at most."""
        n = candidate.n_stages
        if name in ("1f1b", "auto"):  # what is found by itself has the order of 1F1B where there is no more memory
            return tuple(min(n - s, candidate.n_microbatches) for s in range(n))
        if name == "gpipe":
            return (candidate.n_microbatches,) * n
        alive, chunks = pieces_in_flight(schedule_of(name, n, min(candidate.n_microbatches, 4 * n))), 2 if name == "interleaved" else 1
        return tuple(-(-sum(alive[stage::n]) // chunks) for stage in range(n))

    def estimate(self, candidate: Candidate, name: str, meshes: Sequence[OnMesh], options: Sequence[Option]) -> Estimate | None:
        """The best plan under one schedule, on one mesh, with an option for each stage; None where nothing fits."""
        costs = [option.costs for option in options]
        alive, send, n = self.in_flight(name, candidate), self.send_seconds(candidate), candidate.n_microbatches
        fill = FILL[name]
        layering = best_layering(costs, self.layers.count, n, alive, self.asked.limit_bytes, send, fill)
        if layering is None:
            return None
        last = candidate.n_stages - 1
        stages = [costs[o].of(k, float(s == last)) for s, (o, k) in enumerate(zip(layering.options, layering.layers, strict=True))]
        times = [stage.objective_seconds for stage in stages]
        slowest = max(*times, send)
        objective = n * slowest + fill * (sum(times) - max(times)) + max(stage.once_seconds for stage in stages) + 2 * last * send
        mesh = meshes[options[0].mesh].problems[0].mesh
        chosen = [options[o] for o in layering.options]
        again, hosted = tuple(each.again for each in chosen), tuple(each.hosted for each in chosen)
        return Estimate(candidate, name, mesh, layering, tuple(costs), again, objective, hosted)

    def send_seconds(self, candidate: Candidate) -> float:
        """One transfer of what a layer hands to the next, each device to its counterpart in the next stage."""
        if candidate.n_stages == 1:
            return 0.0
        n_devices = self.cluster.n_devices // candidate.n_stages
        mesh = Mesh((("stage", candidate.n_stages), ("device", n_devices)))
        nbytes = self.layers.handed_on_bytes / candidate.n_microbatches / n_devices
        return Communication(self.cluster.links(mesh)).seconds("collective_permute", nbytes, (0,))
