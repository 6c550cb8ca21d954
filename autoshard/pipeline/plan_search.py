"""The search over stages, their devices, microbatches, recomputation, schedules and shardings together.

*Candidates.* A number of stages, one of them for none, and a number of microbatches. Stages have equal parts of the cluster, each of
neighbours, and a stage's shardings are searched for the microbatch that it gets. *Costs.* Those of a layer and of all else on a part of the
cluster, from searches of the program with a few of its own layers (`autoshard.pipeline.layer_search`), first without a memory limit; where
no division of the layers fits, at prices of bytes, and with recomputation. *Objective.* The makespan with the best schedule and division of
layers into stages (`autoshard.pipeline.layering`). *Ties.* Fewer stages, then fewer microbatches.
*Method.* Branch and bound: a candidate is searched while its bound is below the objective of the fastest plan found by a gain that is worth
it. At last the least bounds are raised, until they are near the least objective.

*Bounds.* Let ``P`` be a lower bound of the work of all layers on all microbatches with the devices of one stage, and ``f`` one of computing
one microbatch. Some stage does an ``S``-th of it at least, and the first microbatch passes the others as well: the makespan without overlap
is at least ``(P + (S - 1) fill f) / S``, where ``fill`` is that of the schedule with the smallest bubble. Before a search ``P`` is that of
computing alone: each operation is divided evenly over the devices, and nothing is communicated. That bounds the makespan with overlap, too:
candidates that cannot be faster than the fastest plan by a gain that is worth it are not searched. A search proves a greater ``P``, which
holds for other candidates as well. *Smaller microbatches:* of more of them ``P`` is no less, since the same sharding of ``k`` of them
together takes no more than ``k`` times as long. *More stages:* computing of as many examples a device takes no less on fewer devices, but
``P`` may: gradients are added up over fewer.
*Memory:* the bytes of all stages together are within ``S`` times the limit, which raises ``P`` by a Lagrangian dual bound, of all programs
that compute again what they do not keep as well; such a program is taken to take no less than the plain one. Bounds of programs with few
layers are extended to all layers as costs are.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress

from autoshard.cluster import Cluster
from autoshard.concurrency import thread_seconds
from autoshard.errors import InfeasibleError, SearchLimitError, ShardingError, TraceError
from autoshard.ir import Mesh
from autoshard.judge.model import CostModel
from autoshard.microbatch import in_loop
from autoshard.pipeline.estimates import Estimator
from autoshard.pipeline.layer_search import LayerSearch, Option
from autoshard.pipeline.plans import FILL, Asked, Bounds, Candidate, Estimate, Known, Layers, Plans, Problems, Recomputing, Shorter
from autoshard.pipeline.scanned import equal_layers_of
from autoshard.pipeline.scheduling import has_chunks
from autoshard.primitives import is_matrix
from autoshard.progress import Progress, silent
from autoshard.search import DynamicProgramming
from autoshard.trace import Traced

PRICE_FACTOR = 4.0  # between prices of bytes
FAR = 64.0  # times a price at which nothing fits, the one at which something would
HARDLY = 1.5  # times the memory: numbers of microbatches with which so much is needed are not tried
BOUND_PRICES = 3  # of bytes, at which a bound is looked for
NEAR_BOUND = 0.05  # of the least objective: bounds that are nearer are not raised
_SEARCHER = DynamicProgramming(second_opinion=False)
"""For programs of few layers, whose answers are estimates."""


def search_plans(traced: Traced, cluster: Cluster, problems: Problems, asked: Asked, progress: Progress = silent) -> Plans | None:
    """The candidates of a step of equal layers, ranked; None where the program has no equal layers that can be taken apart.

    Args:
        traced: the whole step, not in microbatches.
        cluster: all devices.
        problems: of a program on a part of the cluster.
    """
    planning = Planning.of(traced, cluster, problems, asked)
    return None if planning is None else planning.run(progress)


class _TimeIsOver(Exception):
    """The end of a search in the middle of a candidate's."""


class Planning:
    """The state of one search, which goes on where it was left: what is known of each candidate."""

    def __init__(self, traced: Traced, layers: Layers, shorter: Shorter, cluster: Cluster, problems: Problems, asked: Asked):
        self.traced, self.layers, self.cluster, self.problems, self.asked = traced, layers, cluster, problems, asked
        self.shorter, self.estimator = shorter, Estimator(layers, cluster, asked)
        self.again: list[tuple[int, Shorter]] | None = None  # recomputations, made when they are needed
        self.fill: float = min(0.0 if has_chunks(name, 2) else FILL[name] for name in asked.schedules)  # many chunks have hardly any
        self.price = 0.0  # seconds a byte at which something fitted
        self.until = self.until_cpu = self.below = math.inf
        self.known: dict[Candidate, Known] = {}
        alone: dict[int, tuple[float, float]] = {}
        candidates = self.estimator.candidates(shorter.programs[0])
        part = self.part(min(candidates).n_stages) if candidates else cluster
        self.plain = [problems(program, part) for program in shorter.programs if candidates]  # in one microbatch, on the largest part
        for each in candidates:
            if each.n_stages not in alone:
                alone[each.n_stages] = self.computing_seconds(each.n_stages)
            computing, products = alone[each.n_stages]
            self.known[each] = Known(computing, products / each.n_microbatches, computing)

    @classmethod
    def of(cls, traced: Traced, cluster: Cluster, problems: Problems, asked: Asked) -> Planning | None:
        """The search of a step; None where the program has no equal layers that can be taken apart."""
        layers = equal_layers_of(traced)
        shorter = None if layers is None else layers.shorter(traced)
        return None if layers is None or shorter is None else cls(traced, layers, shorter, cluster, problems, asked)

    def run(
        self,
        progress: Progress = silent,
        until: float = math.inf,
        cpu_seconds: float = math.inf,
        below: float = math.inf,
        n_stages: int | None = None,
    ) -> Plans:
        """What is known after some more searches.

        Args:
            progress: a callback.
            until: the time (`time.perf_counter`) at which they end.
            cpu_seconds: of this thread, after which they do so, too.
            below: seconds of a step's makespan, in which a plan has been found by other means: slower ones are not searched.
            n_stages: the only number of stages to search for now; None: all.
        """
        self.until, self.until_cpu = until, thread_seconds() + cpu_seconds
        self.below, ended_early = below, False
        try:
            with suppress(_TimeIsOver):
                self.explore(progress, n_stages)
        except self.asked.ends:
            ended_early = True
        ranked = sorted(self.found(), key=lambda found: (found.makespan_seconds, found.candidate, found.schedule))
        n_searched = sum(known.search is not None for known in self.known.values())
        return Plans(tuple(ranked), tuple(map(self.bounds, self.known)), n_searched, ended_early)

    def explore(self, progress: Progress, n_stages: int | None) -> None:
        """Searches candidates, and raises bounds, as long as there is time and something to gain."""
        while self.has_time() and (candidate := self.next(n_stages)) is not None:
            self.search(candidate, progress)
        while n_stages is None and self.has_time() and (candidate := self.loosest()) is not None:
            self.search(candidate, progress) if self.known[candidate].search is None else self.raise_bound(candidate)

    def has_time(self) -> bool:
        return time.perf_counter() < self.until and thread_seconds() < self.until_cpu

    def check_time(self, *_: object) -> None:
        """Ends a search of few layers where the time is over; this thread's seconds end what has not begun."""
        if time.perf_counter() >= self.until:
            raise _TimeIsOver

    def found(self) -> list[Estimate]:
        return [each for known in self.known.values() for each in known.found]

    def least(self) -> float:
        """The least objective found."""
        return min((found.objective_seconds for found in self.found()), default=math.inf)

    def fastest_objective(self) -> float:
        """The objective of the fastest plan found, which may exceed the least: another one's communication may be hidden as well."""
        best = min(self.found(), key=lambda found: found.makespan_seconds, default=None)
        return math.inf if best is None else best.objective_seconds

    def may_gain(self, candidate: Candidate, gain: float) -> bool:
        """Whether the candidate's computing alone leaves so much of the fastest plan's makespan to be gained."""
        fastest = min((found.makespan_seconds for found in self.found()), default=math.inf)
        return self.bounds(candidate).computing_seconds < min(fastest, self.below) * (1 - gain)

    # -- candidates ---------------------------------------------------------------------------------------------------

    def bound(self, candidate: Candidate) -> float:
        """A lower bound of the candidate's makespan without overlap."""
        return self.bounds(candidate).objective_seconds

    def bounds(self, candidate: Candidate) -> Bounds:
        """The lower bounds of the candidate's makespan."""
        known, n_stages = self.known[candidate], candidate.n_stages
        filling = (n_stages - 1) * self.fill * known.floor
        return Bounds((known.computing + filling) / n_stages, (known.work + filling) / n_stages, n_stages)

    def next(self, n_stages: int | None) -> Candidate | None:
        """The candidate to search, of those whose bounds promise a gain: the first of each number of stages, then that of the best guess.

        Of numbers of stages the least is first, then the one that is farthest from those that were searched and from the largest one.

        With ``n_stages`` only of so many. Where nothing fits so far with a number of stages, it is the one with the fewest microbatches.
        """
        gain = self.asked.least_gain
        enough = self.fastest_objective() * (1 - gain)
        new = [each for each, known in self.known.items() if known.search is None and not known.needs_less]
        open_ones = [each for each in new if n_stages in (None, each.n_stages) and self.bound(each) < enough and self.may_gain(each, gain)]
        chosen = []
        for number in {each.n_stages for each in open_ones}:
            own = [each for each in open_ones if each.n_stages == number]
            searched = [each for each, known in self.known.items() if each.n_stages == number and known.search is not None]
            if not searched:
                chosen.append((-self.distance(number), min(own)))
            elif not any(self.known[each].found for each in searched):  # the first that fits
                chosen.append((self.bound(min(own)), min(own)))
            else:
                chosen.append(min((self.guess(each), each) for each in own))
        guess, best = min(chosen, default=(math.inf, None))
        return best if guess < enough else None

    def distance(self, n_stages: int) -> float:
        """How many times a number of stages is apart from the next one that was searched, and one more."""
        searched = {each.n_stages for each, known in self.known.items() if known.search is not None}
        ends = searched and searched | {max(self.known).n_stages}
        return min((max(n_stages / n, n / n_stages) for n in ends), default=2 / n_stages) + 1.0

    def guess(self, candidate: Candidate) -> float:
        """The objective if the step takes as long as with another number of microbatches, but for the bubble."""
        bubble = self.fill * (candidate.n_stages - 1) / candidate.n_microbatches
        found = [each for each in self.found() if each.candidate.n_stages == candidate.n_stages]
        others = [
            each.objective_seconds / (1 + self.fill * (each.candidate.n_stages - 1) / each.candidate.n_microbatches) for each in found
        ]
        return max(min(others, default=0.0) * (1 + bubble), self.bound(candidate))

    def loosest(self) -> Candidate | None:
        """The candidate of the least bound, if that is to be raised and can be."""
        least, open_ones = self.least(), [each for each in self.known if self.may_gain(each, NEAR_BOUND)]
        if math.isinf(least) or not open_ones:
            return None
        candidate = min(open_ones, key=lambda each: (self.bound(each), each))
        known = self.known[candidate]
        return candidate if self.bound(candidate) < least * (1 - NEAR_BOUND) and not known.is_raised else None

    # -- costs --------------------------------------------------------------------------------------------------------

    def computing_seconds(self, n_stages: int) -> tuple[float, float]:
        """Lower bounds of computing a step with the devices of one stage: of all its operations, and of its matrix products."""
        part = self.part(n_stages)
        model = CostModel(part, Mesh((("device", part.n_devices),)))
        sums = []
        for problem in (each[0] for each in self.plain):
            seconds = [(op, op.trips * model.least_op_seconds(problem.facts, op)) for op in problem.graph.walk()]
            sums.append((sum(s for _, s in seconds), sum(s for op, s in seconds if is_matrix(op.primitive))))
        (fewer, fewer_products), (more, more_products) = sums
        times = (self.layers.count - self.shorter.numbers[0]) / (self.shorter.numbers[1] - self.shorter.numbers[0])
        return fewer + times * (more - fewer), fewer_products + times * (more_products - fewer_products)

    def part(self, n_stages: int) -> Cluster:
        """The devices of one stage."""
        return self.cluster.part(n_stages) if n_stages > 1 else self.cluster

    def search(self, candidate: Candidate, progress: Progress) -> None:
        """Finds the candidate's best plans, and what its costs say of others."""
        known, n = self.known[candidate], sum(each.search is not None for each in self.known.values())
        progress(f"pipelines: {candidate}", min(n / len(self.known), 1.0))
        try:
            search = self.searches(candidate, self.shorter)
            search.run(known.meshes or [0.0] * len(search.meshes))
        except (SearchLimitError, ShardingError, TraceError, InfeasibleError):
            known.is_raised = True  # nothing more is to be learned
            known.work = known.computing = math.inf
            return
        known.search = search
        self.tell_others(candidate, known.search)
        known.found = self.estimator.best(candidate, search.meshes, search.free)
        if not known.found and self.bound(candidate) < self.fastest_objective():
            self.search_less_memory(candidate, known)

    def searches(self, candidate: Candidate, shorter: Shorter, again: int | None = None, hosting: Recomputing | None = None) -> LayerSearch:
        """The searches of a candidate, of the step as it is, as it computes again or with its state on hosts, which are not run yet."""
        part, n = self.part(candidate.n_stages), candidate.n_microbatches
        if shorter is self.shorter and candidate == Candidate(1, 1) and hosting is None:
            looped, problems = list(shorter.programs), self.plain
        else:
            looped = [in_loop(program, n) if n > 1 else program for program in shorter.programs]
            looped = [(hosting(program) or program) if hosting else program for program in looped]
            problems = [self.problems(program, part) for program in looped]
        numbers = self.layers.count, problems, _SEARCHER, shorter.numbers
        return LayerSearch(looped, *numbers, again, self.check_time, hosting is not None)

    def search_less_memory(self, candidate: Candidate, known: Known) -> None:
        """Finds plans of less memory, where none without a price on bytes fits: with recomputation, and at a few prices.

        The price is one that is known, or two more, and one between. What computes most again is searched at prices, too.
        """
        own = known.search
        assert own is not None
        in_flight = max(max(self.estimator.in_flight(name, candidate)) for name in self.estimator.schedules(candidate))
        whole = own.free[0].costs.of(self.layers.count / candidate.n_stages)
        nbytes = whole.state_bytes + whole.other_bytes + in_flight * whole.kept_bytes
        known.price = self.price or candidate.n_microbatches * whole.objective_seconds / max(nbytes, 1.0)
        known.again = again = self.recomputed(candidate, own)
        options = [option for search in (own, *again) for option in search.free]
        if again:
            known.found = self.estimator.best(candidate, own.meshes, options)

        def fits(price: float) -> bool:
            for search in (own, *again[-1:]):
                options.extend(search.priced(price, in_flight))
            found = self.estimator.best(candidate, own.meshes, options)
            known.found = found or known.found
            return bool(found)

        price = known.price
        if fits(price):
            tried = price / PRICE_FACTOR
        else:
            known.price = price * FAR
            tried = price * FAR**0.5 if fits(known.price) else 0.0
        if tried and self.has_time():
            fits(tried)
            known.price = self.price = tried
        if not known.found:
            self.leave_out(candidate, options)

    def leave_out(self, candidate: Candidate, options: Sequence[Option]) -> None:
        """Leaves out numbers of microbatches that are hardly enough, where bytes shrink with the microbatch at most."""
        per_stage = -(-self.layers.count // candidate.n_stages)
        least = min(each.costs.peak_bytes(per_stage, 1, True) for each in options)
        for other, known in self.known.items():
            share = candidate.n_microbatches / other.n_microbatches
            if other.n_stages == candidate.n_stages and share < 1 and least * share > HARDLY * self.asked.limit_bytes:
                known.needs_less = True

    def recomputed(self, candidate: Candidate, plain: LayerSearch) -> list[LayerSearch]:
        """The searches of the programs that compute again, or have their state on hosts, without prices; the one of least memory is last.

        They are on the meshes on which the plain one was solved for good.
        """
        if self.again is None:
            self.again = list(self.shorter_again())
        found, hosting = [], self.asked.hosting
        hosted = [(None, self.shorter, hosting), *((*each, hosting) for each in self.again[-1:])] if hosting else []
        for number, shorter, on_hosts in (*((*each, None) for each in self.again), *hosted):
            with suppress(SearchLimitError, ShardingError, TraceError):
                search = self.searches(candidate, shorter, number, on_hosts)
                search.run([0.0 if len(mesh.answers) > 1 else math.inf for mesh in plain.meshes])
                found.append(search)
        return found

    def shorter_again(self) -> Iterator[tuple[int, Shorter]]:
        """Of each recomputation its number, and its program with two numbers of layers.

        Its first or last layer may differ from the others and so not be among the repetitions. Where no layers can be taken out of the
        program, it is made of the plain ones with few layers: they are cut into segments a little differently.
        """
        for number, recomputing in enumerate(self.asked.recomputing):
            if (program := recomputing(self.traced)) is None:
                continue
            layers = equal_layers_of(program)
            if layers is not None and layers.count <= self.layers.count and (shorter := layers.shorter(program)) is not None:
                fewer, more = (n + self.layers.count - layers.count for n in shorter.numbers)
                yield number, Shorter((fewer, more), shorter.programs)
                continue
            fewer, more = map(recomputing, self.shorter.programs)
            if fewer is not None and more is not None:
                yield number, Shorter(self.shorter.numbers, (fewer, more))

    def tell_others(self, candidate: Candidate, search: LayerSearch) -> None:
        """Raises the bounds of this candidate and of those that it bounds."""
        for other, known in self.known.items():
            stages, rest = divmod(other.n_stages, candidate.n_stages)
            parts, remains = divmod(other.n_microbatches, candidate.n_microbatches * max(stages, 1))
            if not stages or not parts or rest or remains:
                continue
            known.floor = max(known.floor, search.floor_seconds / parts)
            known.computing = max(known.computing, other.n_microbatches * known.floor)
            known.work = max(known.work, known.computing)
            if stages == 1:
                known.work = max(known.work, search.bound_seconds)
                known.meshes = [max(pair) for pair in zip(known.meshes or search.mesh_bounds, search.mesh_bounds, strict=True)]

    def raise_bound(self, candidate: Candidate) -> None:
        """Raises the bound of a candidate by the memory limit."""
        known = self.known[candidate]
        known.is_raised = True
        if known.search is None or not (price := known.price or self.price):
            return
        if known.again is None:
            known.again = self.recomputed(candidate, known.search)
        for search in known.again:
            search.run(known.meshes)
        enough = known.work * self.least() / max(self.bound(candidate), 1e-30)
        limit = candidate.n_stages * self.asked.limit_bytes
        for _ in range(BOUND_PRICES):  # the best one is not known, and the bound has one maximum over prices
            bound = min(search.bound_within(limit, price, enough) for search in (known.search, *known.again))
            is_past = known.search.bound_seconds < bound < known.work
            known.work = max(known.work, bound)
            if is_past or known.work >= enough:
                break
            price /= PRICE_FACTOR**2
