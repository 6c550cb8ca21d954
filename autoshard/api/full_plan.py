"""One search over stages, devices, microbatches and shardings: the best strategy without stages, and the best pipeline.

The step without stages is searched first. Then numbers of stages and of microbatches are ranked by the costs of the step's layers
(`autoshard.pipeline.plan_search`), where they may be faster, and the first of them are searched stage by stage as `search(stages=)` does.
The answer is the fastest strategy by its own predicted step time. A lower bound of all of them is in
its notes and in ``stats['plan_bound_seconds']``; that of the record is of its own mesh or stages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from autoshard.api.strategy import Strategy
from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, ClusterError, InfeasibleError, PipelineError, SearchLimitError, ShardingError, TraceError
from autoshard.pipeline.plan_search import Plans
from autoshard.progress import Progress, part
from autoshard.render import format_percent, format_seconds

PLANS = ("sharding", "full")
TRIES = 2  # pipelines that are searched stage by stage
STAGES = (2, 4)  # that are tried for a step without equal layers
SHARE = 0.5  # of a time limit, for the search without stages
EXPLORING = 20.0  # seconds in which numbers of stages and microbatches are compared, without a time limit


@dataclass(frozen=True, slots=True)
class Searches:
    """The searches that are compared; each is given the seconds it may take, or None for no limit.

    Attributes:
        whole: of the step without stages.
        plans: of numbers of stages and microbatches, up to a time (`time.perf_counter`), that may take less than so many seconds a step;
            None where the step has no equal layers.
        staged: of a number of stages, and one of microbatches, or None for any.
    """

    whole: Callable[[float | None], Strategy]
    plans: Callable[[float, float, Progress], Plans | None]
    staged: Callable[[int, int | None, float | None], Strategy]


def checked_plan(plan: Any, stages: Any, mesh: Any) -> bool:
    """Whether all is searched.

    Raises:
        ShardingError: there is no such plan, or an option fixes what it searches.
    """
    if plan not in PLANS:
        raise ShardingError(f"plan is 'sharding' or 'full', got {plan!r}. Use 'full' to search pipelines too.")
    if plan == "full" and (stages is not None or (mesh is not None and not isinstance(mesh, int))):
        given = "stages" if stages is not None else "mesh"
        raise ShardingError(f"plan='full' searches numbers of stages and their meshes, got {given}=. Leave out {given}, or plan.")
    return plan == "full"


def fullest(
    searches: Searches,
    cluster: Cluster,
    limit_seconds: float | None,
    progress: Progress,
    ends: tuple[type[BaseException], ...] = (),
) -> Strategy:
    """The fastest strategy of all searches.

    Args:
        ends: the exceptions after which the best strategy so far is the answer, if there is one.

    Raises:
        InfeasibleError: nothing fits, with stages or without.
    """
    until = math.inf if limit_seconds is None else time.perf_counter() + limit_seconds
    found: list[Strategy] = []
    failure: AutoshardError | None = None
    plans: Plans | None = None
    try:
        found.append(searches.whole(None if limit_seconds is None else SHARE * limit_seconds))
    except (InfeasibleError, SearchLimitError, TraceError) as error:
        failure = error
    try:
        best_seconds = found[0].cost.makespan_seconds if found else math.inf
        exploring = min(time.perf_counter() + EXPLORING, until)
        plans = searches.plans(exploring, best_seconds, part(progress, 0.4, 0.3))
        tried = 0
        for n_stages, n_microbatches in _numbers(plans, best_seconds, cluster):
            left = until - time.perf_counter()
            if tried == TRIES or left <= 0:
                break
            try:
                found.append(searches.staged(n_stages, n_microbatches, None if math.isinf(left) else left))
                tried += 1
            except (InfeasibleError, PipelineError, SearchLimitError, TraceError, ShardingError) as error:
                failure = failure or error
    except ends:
        if not found:
            raise
    if not found:
        assert failure is not None
        raise failure
    return _answer(found, plans)


def _numbers(plans: Plans | None, best_seconds: float, cluster: Cluster) -> list[tuple[int, int | None]]:
    """The numbers of stages and of microbatches to search, the most promising first."""
    if plans is None:
        return [(n, None) for n in STAGES if _has_parts(cluster, n)]
    faster = [each.candidate for each in plans.ranked if each.makespan_seconds < best_seconds]
    return [(candidate.n_stages, candidate.n_microbatches) for candidate in faster]


def _has_parts(cluster: Cluster, n_stages: int) -> bool:
    try:
        cluster.part(n_stages)
    except ClusterError:
        return False
    return True


def _answer(found: list[Strategy], plans: Plans | None) -> Strategy:
    """The fastest, with what was compared, and a bound of it all, in its notes and counts."""
    found = sorted(found, key=lambda strategy: strategy.cost.makespan_seconds)
    best = found[0]
    stats: dict[str, float] = {}
    note = f"plan='full' compared {', '.join(map(_named, found))}"
    if plans is not None:
        note += f"; of {plans.n_candidates} numbers of stages and microbatches it estimated {plans.n_searched}"
        stats |= {"plans": plans.n_candidates, "plans_searched": plans.n_searched}
    bounds = [strategy.lower_bound_seconds for strategy in found if strategy.record.pipeline is None]
    if plans is not None and plans.n_candidates and bounds:
        bound = min(*bounds, plans.bound_seconds, best.cost.objective_seconds)
        objective = best.cost.objective_seconds
        gap = 1 - bound / objective if objective else 0.0
        note += f". Without overlap and memory limits none is below {format_seconds(bound)} (gap {format_percent(gap)})"
        stats["plan_bound_seconds"] = bound
    record = replace(best.record, assumptions=(*best.record.assumptions, note), stats={**best.record.stats, **stats})
    return Strategy(record, best._traced)


def _named(strategy: Strategy) -> str:
    pipeline = strategy.record.pipeline
    what = "no stages" if pipeline is None else f"{len(pipeline.stages)} stages"
    return f"{what} in {strategy.microbatches} microbatches ({format_seconds(strategy.cost.makespan_seconds)})"
