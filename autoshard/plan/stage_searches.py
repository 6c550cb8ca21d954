"""Searches of pipelines: a number of stages that is given, and any."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import ProgramFacts, program_facts
from autoshard.errors import InfeasibleError, OutOfTime, SearchLimitError
from autoshard.explanation.program import Searched
from autoshard.ir import Assignment, Layout, Mesh
from autoshard.ir.remat import Remat
from autoshard.ir.rewrites import Recompute
from autoshard.mesh_search.anytime import timed
from autoshard.pipeline.cuts import Cuts
from autoshard.pipeline.stages import Stage
from autoshard.plan.confirm import noted
from autoshard.plan.found_pipelines import USUAL
from autoshard.plan.meshes import check_covers, meshes_of, most_axes
from autoshard.plan.offloading import check_offload
from autoshard.plan.pipelining import pipelined
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import (
    RESERVE,
    Prepared,
    barely,
    batch_found,
    cluster_of,
    limit_of,
    pins_of,
    searched_on_meshes,
    traced_of,
)
from autoshard.plan.recomputing import recomputations, staged_remat
from autoshard.plan.refusals import or_refused
from autoshard.plan.request import Request
from autoshard.plan.stage_planner import Pipeline
from autoshard.plan.user_pins import UserPins, stage_pins
from autoshard.problem import Problem
from autoshard.progress import Progress
from autoshard.recompute import optimizer_state
from autoshard.rewrite import rewritten
from autoshard.rules import rules_of
from autoshard.run.recorded import abstract_call
from autoshard.search import Solution
from autoshard.search.integer_programming import LastResort
from autoshard.trace import Traced

FACTS = 64  # of stage programs, that a search keeps


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """A request for pipelines, and its program.

    Attributes:
        fn, args: the program.
        request: all that is asked for; its time is for this search alone, and nothing is confirmed in it.
        progress: a callback.
        recomputed: the recomputation that is tried first; None: none is.
        hosts: whether stages that do not fit otherwise have their optimizer state on hosts before others are recomputed.
        cuts: as in `Pipeline`.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    request: Request
    progress: Progress
    recomputed: Remat | None = None
    hosts: bool = False
    cuts: dict[tuple[Traced, int], Cuts] = field(default_factory=dict)

    @property
    def cluster(self) -> Cluster:
        """The devices."""
        return cluster_of(self.request.cluster)

    @property
    def reserves(self) -> bool:
        """Whether some of the memory is left alone where anything fits without it."""
        return self.request.memory_limit_bytes is None

    @property
    def limit(self) -> float:
        """Bytes that a device may hold, without the reserve."""
        return self.whole_limit * (1 - RESERVE if self.reserves else 1)

    @property
    def whole_limit(self) -> float:
        """Bytes that a device may hold."""
        return limit_of(self.cluster, self.request.memory_limit_bytes)

    @property
    def number(self) -> int | None:
        """The number of microbatches; None for any."""
        number = self.request.microbatches
        return number if isinstance(number, int) else None

    def traced(self) -> tuple[Traced, ProgramFacts, dict[str, float]]:
        """The step as it is traced, its facts and what that took."""
        asked = self.request
        return traced_of(self.fn, self.args, asked.donate_argnums, asked.axes, self.cluster, batch=asked.asked.batch)

    def pins(self, traced: Traced, facts: ProgramFacts, part: Cluster) -> UserPins:
        """The pins of the whole step, with the batch found where axes for it are given; all stages have one mesh, of a ``part``."""
        pins = pins_of(self.fn, self.args, self.request, traced)
        if not pins.asked.batch_axes:
            return pins
        meshes, _ = meshes_of(part, pins, self.request.given_mesh, 2, is_part=True)
        limit = limit_of(part, self.request.memory_limit_bytes)
        return batch_found(Prepared(traced, facts, part, meshes, 0, pins, limit, {})).pins


def in_stages(call: Call, n_stages: int, known: tuple[Traced, ProgramFacts, Mapping[str, float]] | None = None) -> list[Plan]:
    """The best strategies as a pipeline of so many stages, one for each number of microbatches, fastest first.

    Args:
        known: the traced step, its facts and what tracing took, where it was traced before.
    """
    return _StageSearches(call, n_stages, known or call.traced()).found()


class _StageSearches:
    """The searches of the stages of one pipeline.

    Attributes:
        parts: the devices of each stage.
        pins: of the whole step.
        given: the mesh that each stage has, where it is given.
        last: the searcher's last resort, which all stages share.
        known: by stage and what it is asked its solutions, each with the mesh and the layouts that were fixed: equal stages are searched
            once, and with a mesh and layouts that a solution has by itself not again.
        facts_of: by stage program its facts.
        until: on the clock, when the time is over; None: never.
    """

    def __init__(self, call: Call, n_stages: int, known: tuple[Traced, ProgramFacts, Mapping[str, float]]):
        self.call, self.n_stages, self.request = call, n_stages, call.request
        self.traced, self.facts, self.spent = known
        self.searcher = self.request.limited
        self.parts = call.cluster.stage_parts(n_stages)
        given = call.request.given_mesh
        if given is not None:
            check_covers(call.cluster, given, n_stages)
        self.given = given if given is not None and given.size == self.parts[0].n_devices else None
        self.pins = call.pins(self.traced, self.facts, self.parts[0])
        self.most = most_axes(self.request.mesh, self.searcher)
        self.last = LastResort(self.searcher.last_resort)
        self.known: dict[tuple, list[tuple[Mesh | None, Mapping[int, Layout], Solution]]] = {}
        self.facts_of = lru_cache(FACTS)(facts_of)
        self.until = None if self.request.seconds is None else time.perf_counter() + self.request.seconds

    def found(self) -> list[Plan]:
        """The best within the memory limit; within the reserve of it too, if it has one and nothing fits otherwise."""
        call = self.call
        try:
            return [self._finished(each) for each in self._within(call.limit)]
        except InfeasibleError as error:
            if not call.reserves or (error.smallest_peak_bytes or math.inf) > call.whole_limit:
                raise
        return [self._finished(noted(each, barely(call.whole_limit))) for each in self._within(call.whole_limit)]

    def _within(self, limit: float) -> list[Plan]:
        """The best within a limit: with optimizer state on devices, on hosts, or where memory binds whichever is faster."""
        offload, device = self.request.offload, self.call.cluster.device
        check_offload(offload, self.call.cluster, self.traced)
        state = optimizer_state(self.traced) if offload in ("optimizer", "auto") and device.host_bandwidth_bytes_per_second else ()
        if offload != "auto" or not state:
            return self._in_memory(limit, state)
        if self.call.hosts:
            return self._in_memory(limit, state, True)
        try:
            alone = self._in_memory(limit, ())
        except InfeasibleError as error:
            return or_refused(error, lambda: self._in_memory(limit, state, True), "with optimizer state in the memory of hosts")
        if alone[0].record.program.remat is None:  # memory does not bind
            return alone
        try:
            return min(alone, self._in_memory(limit, state, True), key=_seconds)
        except (InfeasibleError, SearchLimitError):
            return alone

    def _in_memory(self, limit: float, hosted: tuple[int, ...], by_stage: bool = False) -> list[Plan]:
        """The best within a limit, with some argument leaves in the memory of hosts: all of them, or of stages that do not fit without."""
        asked = self.request
        schedule, ends = asked.schedule or USUAL, asked.ends
        rest = self.given, limit, ends, asked.start, hosted, by_stage, asked.chunks, self.call.cuts
        pipeline = Pipeline(self.n_stages, schedule, self.call.number, *rest)

        def attempt(again: Remat | None) -> list[Plan]:
            own = Recompute.of(again and replace(again, mode=asked.remat or ""))
            program = rewritten(self.traced, (*self.traced.rewrites, *own))
            return pipelined(program, self.call.cluster, pipeline, self._searched, self.searcher, self.spent, self.call.progress)

        hosts = asked.offload == "activations" or (asked.offload == "auto" and bool(hosted))
        options = partial(recomputations, self.traced, self.facts, self.call.cluster, asked.remat, hosts)
        return staged_remat(attempt, asked.remat, options, _seconds, self.call.recomputed)

    def _searched(
        self,
        stage: Stage,
        devices: Cluster,
        mesh: Mesh | None,
        fixed: Mapping[int, Layout],
        limit: float,
        progress: Progress,
        n_left: int,
    ) -> tuple[Plan, Problem]:
        """As `StageSearch`."""
        pins = replace(of_step(self.pins, stage_pins(self.request.asked, stage, mesh is None)), fixed=fixed)
        wanted = mesh if mesh is not None else self.call.request.given_mesh
        meshes, _ = meshes_of(devices, self.pins, wanted, self.most, is_part=True)
        program = stage.traced
        counts = {"trace_seconds": 0.0, "n_ops": len(program.graph.walk())}
        prepared = Prepared(program, self.facts_of(program, devices), devices, meshes, 0, pins, limit, counts)
        graph = program.graph
        own = tuple(pins.kept.items()), tuple(pins.batch.items()), None if self.request.start is None else graph.argument_paths
        key = graph.fingerprint, graph.donated, tuple(pins.given.items()), *own, pins.stacked, limit, devices.name
        known = self.known.setdefault(key, [])
        solution = next((found for had, before, found in known if _answers(had, before, found.assignment, mesh, fixed)), None)
        if solution is not None:
            problem = prepared.problem(solution.assignment.mesh, limit, ())
            solution = replace(solution, judgement=problem.evaluate(solution.assignment), stats={})
        else:
            solution, problem = self._solved(prepared, self._start_of(stage), limit, progress, n_left)
            known.append((mesh, fixed, solution))
        return prepared.plan(problem.mesh, prepared.overlapped([solution], problem)[0], self.searcher), problem

    def _solved(self, prepared: Prepared, start: Plan | None, limit: float, progress: Progress, n_left: int) -> tuple[Solution, Problem]:
        """The best solution of a stage's program in its share of the time, by the last resort where nothing else finds one."""
        started, until = time.perf_counter(), self.until
        left = None if until is None else max(0.0, until - started) / n_left
        ends = self.request.ends if until is None else tuple({*self.request.ends, OutOfTime})
        limited, quick = timed(progress, left), self.searcher.without_last_resort()
        try:
            solution, problem = searched_on_meshes(prepared, quick, limited, ends, 1, start, limit, refused=self.last.refuse)
        except InfeasibleError:
            rest = None if left is None else max(0.0, started + left - time.perf_counter())
            if (at_last := self.last.found(limited, rest)) is None:
                raise
            solution, problem = at_last
        finally:
            self.last.refused = []
        if solution.stats.get("ended_early") and (left is None or time.perf_counter() - started < left):
            self.until = time.perf_counter()  # Ctrl-C is for all stages: those that are left have their first answers
        return solution, problem

    def _start_of(self, stage: Stage) -> Plan | None:
        """The earlier strategy of a stage: that of the same stage, or of the whole step, whose arguments have the same paths."""
        start = self.request.start
        paths, found = stage.traced.graph.argument_paths, () if start is None else start.stages
        return next((each for each in found if tuple(own.path for own in each.record.arguments) == paths), start)

    def _finished(self, strategy: Plan) -> Plan:
        """The strategy with what questions about it need."""
        record, own = strategy.record, strategy._traced
        if self.request.memory_limit_bytes is not None:
            record = replace(record, stats={**record.stats, "memory_limit_bytes": self.request.memory_limit_bytes})
        known = None
        if own is not None and own is self.traced:
            known = Searched(self.facts, cuts=self.call.cuts.get((own, record.program.microbatches)))
        return Plan(record, own, self.pins, abstract_call(self.call.fn, self.call.args), known, strategy.passes)


def _answers(had: Mesh | None, before: Mapping[int, Layout], found: Assignment, mesh: Mesh | None, fixed: Mapping[int, Layout]) -> bool:
    """Whether the best assignment on a mesh, or any, and with some layouts fixed, is the best one on another mesh, with other
    layouts fixed.

    It is if it has them, and was free to have all that may be had now.
    """
    if (had, before) == (mesh, fixed):
        return True
    is_freer = had is None or had == mesh
    has_mesh = mesh is None or found.mesh == mesh or replace(found.mesh, placement=None) == mesh
    return is_freer and has_mesh and before.items() <= fixed.items() and all(found.layout(value) == own for value, own in fixed.items())


def _seconds(found: Sequence[Plan]) -> float:
    """The predicted step time of the fastest."""
    return found[0].cost.makespan_seconds


def of_step(whole: UserPins, own: UserPins) -> UserPins:
    """The pins of a part of a step, with the shardings that arguments keep and the batch of the whole, by their paths."""
    places = {path: at for at, path in enumerate(whole.graph.argument_paths)}
    ours = {at: places[path] for at, path in enumerate(own.graph.argument_paths) if path in places}
    kept, batch = ({at: found[k] for at, k in ours.items() if k in found} for found in (whole.kept, whole.batch))
    return replace(own, kept=kept, batch=batch)


def facts_of(program: Traced, cluster: Cluster) -> ProgramFacts:
    """The facts of a program on some devices."""
    return program_facts(program.graph, rules_of(program.graph), compiler_of(cluster))
