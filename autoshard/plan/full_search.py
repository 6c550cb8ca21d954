"""The searches that ``plan="full"`` compares: of the step without stages, of pipelines by their layers, and of pipelines stage by stage."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import chain
from typing import Any

from autoshard.budgets import BUDGETS
from autoshard.cluster import Cluster
from autoshard.concurrency import thread_seconds
from autoshard.errors import TraceError
from autoshard.ir import Mesh
from autoshard.ir.remat import Remat
from autoshard.ir.rewrites import Offload, Recompute
from autoshard.judge.model import CostModel
from autoshard.mesh_search.anytime import timed
from autoshard.pipeline.estimates import has_parts
from autoshard.pipeline.plan_search import Planning
from autoshard.pipeline.plans import Asked as Wanted
from autoshard.pipeline.plans import Candidate, Estimate, Plans
from autoshard.plan.found_pipelines import USUAL
from autoshard.plan.full_plan import DEEP_GAIN, DEEP_OPS, STAGES_ALONE, Searches, fullest
from autoshard.plan.incumbent import Incumbent
from autoshard.plan.meshes import meshes_of
from autoshard.plan.pipelining import numbers_of_microbatches
from autoshard.plan.plan import Plan
from autoshard.plan.request import Request
from autoshard.plan.stage_searches import Call, facts_of, in_stages, of_step
from autoshard.plan.user_pins import UserPins, user_pins
from autoshard.problem import Problem
from autoshard.progress import Progress, part
from autoshard.recompute import Options, optimizer_state
from autoshard.rewrite import applied, rewritten
from autoshard.trace import Traced

RECOMPUTED = (0.5, 1.0)  # of the way from the least time to the least memory: what plans are compared with
LEAST_SAVED = 0.1  # of what is kept without recomputation: one that saves less is no plan of its own


def problems_on(whole: UserPins, given: Mesh | None, program: Traced, devices: Cluster) -> list[Problem]:
    """The search problems of a program on some devices, without a memory limit: one a placement of a mesh, or of all meshes of two axes.

    Args:
        whole: the pins of the step that it is a part of.
        given: the mesh of each part that the user gives.
    """
    pins = of_step(whole, user_pins(whole.asked.among(program.graph.argument_paths), program.graph, [], given is None))
    facts = facts_of(program, devices)
    found: list[Problem] = []
    for each in meshes_of(devices, pins, given, 2, is_part=True)[0]:
        alike = (other for other in found if other.mesh.sizes == each.sizes)  # shares most with this one
        found.append(Problem(facts, CostModel(devices, each), pins.on(each), None, next(chain(alike, found), None)))
    return found


def _saving(options: Sequence[Remat]) -> list[Remat]:
    """The recomputations at `RECOMPUTED`, and the one with most in the memory of hosts, of those that save much; none where no one does."""
    saving = [each for each in options if each.kept_bytes < (1 - LEAST_SAVED) * each.plain_bytes]
    hosted = [each for each in saving if each.hosted_bytes]
    again = [each for each in saving if not each.hosted_bytes]
    return [*(again[round(share * (len(again) - 1))] for share in RECOMPUTED if again), *hosted[-1:]]


def full(call: Call, whole: Callable[[Request, Progress], Sequence[Plan]], known: Incumbent) -> list[Plan]:
    """The best strategies with stages or without, fastest first.

    Args:
        whole: searches without stages.
        known: what was found of other variants of the program, which has to be beaten; it takes what is found here.
    """
    cluster, request = call.cluster, call.request
    traced, facts, spent = call.traced()
    is_deep, remat = len(traced.graph.walk()) > DEEP_OPS, request.remat
    given = call.request.given_mesh
    if given is not None and given.size < cluster.n_devices:  # it is that of each stage, of as many as there are such parts
        return in_stages(call, cluster.n_devices // given.size, (traced, facts, spent))
    pins = call.pins(traced, facts, cluster)

    def alone(left: float | None) -> Sequence[Plan]:
        return whole(replace(request.every_form, seconds=left), part(call.progress, 0.0, 0.3))

    offload = request.offload if cluster.device.host_bandwidth_bytes_per_second else None
    of_program = partial(Options, device=cluster.device, hosts=offload in ("activations", "auto"))

    @cache
    def options() -> Options:
        return of_program(traced, facts)

    @cache
    def again() -> list[Remat | None]:
        """The recomputations that plans may have, of the whole step; None for one like another."""
        chosen = [] if remat is None else _saving(options().all)
        return [None if each in chosen[:k] else each for k, each in enumerate(chosen)]

    def recomputing(number: int, program: Traced) -> Traced | None:
        own = again() if program is traced else _saving(of_program(program, facts_of(program, cluster)).all)
        chosen = own[number] if number < len(own) else None
        return None if chosen is None else applied(Recompute(chosen), program)

    def hosting(program: Traced) -> Traced | None:
        leaves = optimizer_state(program)
        return applied(Offload(leaves), program) if leaves else None

    @cache
    def planning() -> Planning | None:
        schedules = (request.schedule or USUAL,)
        others = [] if remat in (None, "full") else [partial(recomputing, number) for number in range(len(RECOMPUTED) + 1)]
        most = Recompute.of(options().full) if remat == "full" else ()
        program = rewritten(traced, (*traced.rewrites, *most))
        wanted = Wanted(
            call.limit, schedules, None, call.number, others, hosting if offload in ("optimizer", "auto") else None, ends=request.ends,
            least_gain=DEEP_GAIN if is_deep else BUDGETS.least_gain,
        )  # fmt: skip
        return Planning.of(program, cluster, partial(problems_on, pins, given), wanted)

    def plans(*limits: Any) -> Plans | None:
        own = planning()
        return None if own is None else own.run(*limits)

    def staged(like: Estimate | Candidate, core_seconds: float, left: float | None) -> Sequence[Plan]:
        progress = part(call.progress, 0.6, 0.4)
        if left is None:
            left, progress = math.inf, timed(progress, core_seconds, thread_seconds)
        numbers, hosts, again_of_it = like.candidate if isinstance(like, Estimate) else like, False, None
        own = replace(request, seconds=left, stages=numbers.n_stages, microbatches=numbers.n_microbatches, plan="sharding")
        if isinstance(like, Estimate):
            own = replace(own, schedule=like.schedule, mesh=dict(like.mesh.shape))
            parts = [(share, None if number is None else again()[number]) for share, number in like.parts]
            hosts, again_of_it = any(like.hosted), options().by_part(parts) if remat is not None else None
        like_it = replace(call, request=own, progress=progress, recomputed=again_of_it, hosts=hosts)
        return in_stages(like_it, numbers.n_stages, (traced, facts, spent))

    def in_stages_alone() -> list[Candidate]:
        numbers = [n for n in STAGES_ALONE if has_parts(cluster, n)]
        with suppress(TraceError):
            return [Candidate(n, k) for n in numbers for k in numbers_of_microbatches(traced, n, call.number)]
        return []

    searches = Searches(alone, plans, staged, in_stages_alone)
    return fullest(searches, cluster.device.pair_error, request.seconds, call.progress, request.ends, known)
