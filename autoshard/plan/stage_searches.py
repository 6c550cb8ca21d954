"""Searches of pipelines: a number of stages that is given, and any."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from pathlib import Path
from typing import Any

from autoshard.budgets import BUDGETS
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import ProgramFacts, program_facts
from autoshard.errors import ClusterError, InfeasibleError, OutOfTime
from autoshard.explanation.searched import Searched
from autoshard.ir import Layout, Mesh
from autoshard.ir.remat import Remat
from autoshard.judge.model import CostModel
from autoshard.mesh_search.anytime import endings, timed
from autoshard.pipeline import Stage
from autoshard.pipeline.plan_search import Planning
from autoshard.pipeline.plans import FILL, Estimate, Plans
from autoshard.pipeline.plans import Asked as Wanted
from autoshard.plan.confirm import noted
from autoshard.plan.full_plan import DEEP_GAIN, DEEP_OPS, DEEP_SECONDS, Searches, fullest
from autoshard.plan.meshes import given_mesh, meshes_of, most_axes
from autoshard.plan.microbatching import Microbatches
from autoshard.plan.pipelining import USUAL, Pipeline, pipelined
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import RESERVE, Prepared, barely, cluster_of, limit_of, searched_on_meshes, traced_of
from autoshard.plan.recomputing import staged_remat
from autoshard.plan.user_pins import Asked, stage_pins, user_pins
from autoshard.problem import Problem
from autoshard.progress import Progress, part
from autoshard.recompute import Options, rematerialised
from autoshard.rules import rules_of
from autoshard.run.recorded import abstract_call
from autoshard.search import Searcher, Solution
from autoshard.search.integer_programming import LastResort
from autoshard.trace import Traced

RECOMPUTED = (0.5, 1.0)  # of the way from the least time to the least memory: what plans are compared with
LEAST_SAVED = 0.1  # of what is kept without recomputation: one that saves less is no plan of its own


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """The arguments of a call of `autoshard.search` that is for pipelines; those not listed here are as there.

    Attributes:
        schedule: None: the usual one, or where all is searched the fastest.
        ends: the exceptions that end a search early.
        seconds: how long to search; None: without a limit.
        recomputed: the recomputation that is tried first; None: none is.
    """

    fn: Callable
    args: tuple
    cluster: Cluster | str | Path | None
    searcher: Searcher
    mesh: Any
    asked: Asked
    memory_limit_bytes: float | None
    donate_argnums: int | Sequence[int]
    microbatches: Microbatches
    schedule: str | None
    remat: str | None
    ends: tuple[type[BaseException], ...]
    seconds: float | None
    progress: Progress
    recomputed: Remat | None = None

    @property
    def reserves(self) -> bool:
        """Whether some of the memory is left alone where anything fits without it."""
        return self.memory_limit_bytes is None

    @property
    def limit(self) -> float:
        """Bytes that a device may hold, without the reserve."""
        return self.whole_limit * (1 - RESERVE if self.reserves else 1)

    @property
    def whole_limit(self) -> float:
        """Bytes that a device may hold."""
        return limit_of(cluster_of(self.cluster), self.memory_limit_bytes)

    @property
    def number(self) -> int | None:
        """The number of microbatches; None for any."""
        return self.microbatches if isinstance(self.microbatches, int) else None


def in_stages(call: Call, n_stages: int, known: tuple[Traced, ProgramFacts, Mapping[str, float]] | None = None) -> Plan:
    """The best strategy as a pipeline of so many stages.

    Args:
        known: the traced step, its facts and what tracing took, where it was traced before.
    """
    cluster, searcher, asked = cluster_of(call.cluster), call.searcher, call.asked
    given = None if call.mesh is None or isinstance(call.mesh, int) else given_mesh(call.mesh)
    part_of, most = cluster.part(n_stages), most_axes(call.mesh, searcher)
    if given is not None and given.size != part_of.n_devices:
        raise ClusterError(
            f"with stages={n_stages} a mesh is that of each stage, on {part_of.n_devices} of the {cluster.n_devices} devices of "
            f"{cluster.name}; the mesh {given} has {given.size}. Use axis sizes whose product is {part_of.n_devices}."
        )
    axes = (*asked.axes, *(given.all_names if given else ()))
    traced, facts, spent = known or traced_of(call.fn, call.args, call.donate_argnums, axes, cluster, batch=asked.batch)
    whole = user_pins(asked, traced.graph, [()] * len(traced.graph.arguments), given is None)  # all stages have one mesh
    until = None if call.seconds is None else time.perf_counter() + call.seconds
    found: dict[tuple, Solution] = {}  # equal stages are searched once
    last, quick = LastResort(searcher.last_resort), searcher.without_last_resort()  # which all stages share

    def searched(
        stage: Stage, mesh: Mesh | None, fixed: Mapping[int, Layout], limit: float, progress: Progress, n_left: int
    ) -> tuple[Plan, Problem]:
        nonlocal until
        program = stage.traced
        facts = _facts_of(program, cluster)
        pins = replace(stage_pins(asked, stage, mesh is None), fixed=fixed)
        meshes, _ = meshes_of(part_of, whole, mesh, most, is_part=True)
        counts = {"trace_seconds": 0.0, "n_ops": len(program.graph.walk())}
        prepared = Prepared(program, facts, part_of, meshes, 0, pins, limit, counts)
        key = program.graph.fingerprint, program.graph.donated, tuple(pins.given.items()), pins.stacked, mesh, tuple(fixed.items()), limit
        if key in found:
            problem = prepared.problem(found[key].assignment.mesh, limit, ())
            solution = replace(found[key], judgement=problem.evaluate(found[key].assignment), stats={})
            return prepared.plan(problem.mesh, prepared.overlapped([solution], problem)[0], searcher), problem
        started = time.perf_counter()
        left = None if until is None else max(0.0, until - started) / n_left
        ends = call.ends if until is None else tuple({*call.ends, OutOfTime})
        limited = timed(progress, left)
        try:
            solution, problem = searched_on_meshes(prepared, quick, limited, ends, 1, None, limit, refused=last.refuse)
        except InfeasibleError:
            if (at_last := last.found(limited, None if left is None else max(0.0, started + left - time.perf_counter()))) is None:
                raise
            solution, problem = at_last
        finally:
            last.refused = []
        if solution.stats.get("ended_early") and (left is None or time.perf_counter() - started < left):
            until = time.perf_counter()  # Ctrl-C is for all stages: those that are left have their first answers
        found[key] = solution
        return prepared.plan(problem.mesh, prepared.overlapped([solution], problem)[0], searcher), problem

    def within(limit: float) -> Plan:
        pipeline = Pipeline(n_stages, call.schedule or USUAL, call.number, given, limit, call.ends)

        def attempt(again: Remat | None) -> Plan:
            program = rematerialised(traced, None if again is None else replace(again, mode=call.remat or ""))
            return pipelined(program, cluster, pipeline, searched, searcher, spent, call.progress)

        return staged_remat(attempt, call.remat, lambda: Options(traced, facts, cluster.device).all, call.recomputed)

    def finished(strategy: Plan) -> Plan:
        """The strategy with what questions about it need."""
        record, own = strategy.record, strategy._traced
        if call.memory_limit_bytes is not None:
            record = replace(record, stats={**record.stats, "memory_limit_bytes": call.memory_limit_bytes})
        known = Searched(facts) if own is traced else None
        return Plan(record, own, whole, abstract_call(call.fn, call.args), known, strategy.stages)

    try:
        return finished(within(call.limit))
    except InfeasibleError as error:
        if not call.reserves or (error.smallest_peak_bytes or math.inf) > call.whole_limit:
            raise
    return finished(noted(within(call.whole_limit), barely(call.whole_limit)))


def problems_on(asked: Asked, program: Traced, devices: Cluster, mesh: Mesh | None = None) -> list[Problem]:
    """The search problems of a program on some devices, without a memory limit: one a placement of a mesh, or of all meshes of two axes."""
    pins = user_pins(asked.among(program.graph.argument_paths), program.graph, [], mesh is None)
    facts = _facts_of(program, devices)
    found: list[Problem] = []
    for each in meshes_of(devices, pins, mesh, 2, is_part=True)[0]:
        alike = (other for other in found if other.mesh.sizes == each.sizes)  # shares most with this one
        found.append(Problem(facts, CostModel(devices, each), pins.on(each), None, next(chain(alike, found), None)))
    return found


def _facts_of(program: Traced, cluster: Cluster) -> ProgramFacts:
    """The facts of a program on some devices."""
    return program_facts(program.graph, rules_of(program.graph), compiler_of(cluster))


def _saving(program: Traced, facts: ProgramFacts, cluster: Cluster) -> list[Remat]:
    """The recomputations at `RECOMPUTED`, of those that save much; none where no one does."""
    options = Options(program, facts, cluster.device).all
    saving = [each for each in options if each.kept_bytes < (1 - LEAST_SAVED) * each.plain_bytes]
    return [saving[round(share * (len(saving) - 1))] for share in RECOMPUTED] if saving else []


def full(call: Call, whole: Callable[..., Plan], remat: str | None) -> Plan:
    """The best strategy with stages or without.

    Args:
        whole: searches without stages.
        remat: as in `autoshard.search`.
    """
    cluster, asked = cluster_of(call.cluster), call.asked
    traced, facts, spent = traced_of(call.fn, call.args, call.donate_argnums, asked.axes, cluster, batch=asked.batch)
    is_deep = len(traced.graph.walk()) > DEEP_OPS

    def alone(left: float | None) -> Plan:
        number = "auto" if call.microbatches == "fit" else call.microbatches
        again = "auto" if remat == "fit" else remat
        return whole(progress=part(call.progress, 0.0, 0.3), time_limit_seconds=left, microbatches=number, remat=again)

    @cache
    def again() -> list[Remat | None]:
        """The recomputations that plans may have, of the whole step; None for one like another."""
        chosen = [] if remat is None else _saving(traced, facts, cluster)
        return [None if each in chosen[:k] else each for k, each in enumerate(chosen)]

    def recomputing(number: int, program: Traced) -> Traced | None:
        own = again() if program is traced else _saving(program, _facts_of(program, cluster), cluster)
        chosen = own[number] if own else None
        return None if chosen is None else rematerialised(program, chosen)

    @cache
    def planning() -> Planning | None:
        schedules = tuple(FILL) if call.schedule is None else (call.schedule,)
        others = [] if remat in (None, "full") else [partial(recomputing, number) for number in range(len(RECOMPUTED))]
        program = rematerialised(traced, Options(traced, facts, cluster.device).full) if remat == "full" else traced
        wanted = Wanted(
            call.limit, schedules, None, call.number, others, ends=call.ends, least_gain=DEEP_GAIN if is_deep else BUDGETS.least_gain
        )
        return Planning.of(program, cluster, partial(problems_on, asked), wanted)

    def plans(*limits: Any) -> Plans | None:
        own = planning()
        return None if own is None else own.run(*limits)

    def staged(n_stages: int, like: Estimate | None, left: float | None) -> Plan:
        progress = part(call.progress, 0.6, 0.4)
        if left is None and is_deep:  # ends after some seconds of one core
            left, progress = math.inf, timed(progress, DEEP_SECONDS, time.thread_time)
        own = replace(call, ends=endings(left, KeyboardInterrupt in call.ends), seconds=left, progress=progress)
        if like is not None:
            own = replace(own, microbatches=like.candidate.n_microbatches, schedule=like.schedule, mesh=dict(like.mesh.shape))
            own = replace(own, recomputed=None if like.again is None else again()[like.again])
        return in_stages(own, n_stages, (traced, facts, spent))

    searches = Searches(alone, plans, staged, is_deep)
    return fullest(searches, cluster, call.seconds, call.progress, call.ends)
