"""One search over stages, devices, microbatches, schedules and shardings: the best strategy without stages, and the best pipeline.

The step without stages is searched first, as it is without ``plan``, in any number of microbatches and with any recomputation: no answer is
slower. Numbers of stages and of microbatches are then ranked by the costs of the step's layers (`autoshard.pipeline.plan_search`), and what
is promised to be faster is searched stage by stage as `search(stages=)` does. The answer is the fastest strategy by its own step time. A
lower bound of all plans is in its notes and in ``stats['plan_bound_seconds']``; that of the record is of its own mesh or stages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from autoshard.cluster import Cluster
from autoshard.errors import AutoshardError, ClusterError, InfeasibleError, PipelineError, SearchLimitError, ShardingError, TraceError
from autoshard.pipeline.plans import Candidate, Estimate, Plans
from autoshard.plan.forms import Form
from autoshard.plan.plan import Plan
from autoshard.progress import Progress, part
from autoshard.render import format_percent, format_seconds
from autoshard.strategy import Tried

TRIES = 2  # pipelines that are searched stage by stage
STAGES = (2, 4)  # that are tried for a step without equal layers
SHARE = 0.4  # of a time limit, for the comparison of plans, and for the search without stages
EXPLORING = 60.0  # seconds of one core in which plans are compared: not of the clock, so that other programs leave the answer as it is
DEEP_OPS = 10_000  # of a step of more the searches of pipelines end early
DEEP_GAIN = 0.05  # of such a step's seconds, that is worth the searches of a pipeline: they take minutes
LEAST_SECONDS = 1e-3  # of a search whose time is over: it has its first answer
DEEP_SECONDS = 60.0  # of one core, in which a pipeline of such a step is searched, without a time limit
REFUSED = (InfeasibleError, PipelineError, SearchLimitError, TraceError, ShardingError)


class Comparing(Protocol):
    """The comparison of plans, which goes on where it was left (`autoshard.pipeline.plan_search.Planning.run`)."""

    def __call__(self, progress: Progress, until: float, cpu_seconds: float, below: float, /) -> Plans | None: ...


class Whole(Protocol):
    """The search of the step without stages within some seconds, or None for no limit. The fastest comes first."""

    def __call__(self, seconds: float | None, /) -> Sequence[Plan]: ...


class StagedSearch(Protocol):
    """The search of a pipeline of a number of stages: as a plan says, or None for any; within some seconds, or None for no limit.

    The fastest comes first.
    """

    def __call__(self, n_stages: int, like: Estimate | None, seconds: float | None, /) -> Sequence[Plan]: ...


@dataclass(frozen=True, slots=True)
class Searches:
    """The searches that are compared.

    Attributes:
        whole: of the step without stages.
        plans: of numbers of stages and microbatches; None where the step has no equal layers.
        staged: of a pipeline.
        is_deep: whether the step has so many operations that the search of a pipeline ends after `DEEP_SECONDS`.
    """

    whole: Whole
    plans: Comparing
    staged: StagedSearch
    is_deep: bool = False


def fullest(
    searches: Searches,
    cluster: Cluster,
    limit_seconds: float | None,
    progress: Progress,
    ends: tuple[type[BaseException], ...] = (),
) -> list[Plan]:
    """The strategies of all searches, fastest first.

    Args:
        ends: the exceptions after which the best strategy so far is the answer, if there is one.

    Raises:
        InfeasibleError: nothing fits, with stages or without.
    """
    until = math.inf if limit_seconds is None else time.perf_counter() + limit_seconds
    found: list[Sequence[Plan]] = []
    failure: AutoshardError | None = None
    plans: Plans | None = None

    def left(most: float = math.inf) -> float | None:
        """Seconds that are left, ``most`` at most; None for no limit."""
        seconds = min(until - time.perf_counter(), most)
        return None if seconds == math.inf else max(seconds, LEAST_SECONDS)

    def keep(search: Callable[[float | None], Sequence[Plan]], seconds: float | None) -> None:
        """Searches; Ctrl-C is for the searches that are left, too, which then have no time."""
        nonlocal until
        started, computing = time.perf_counter(), time.thread_time()
        found.append(search(seconds))
        is_over = seconds is not None and time.perf_counter() - started >= seconds
        is_over = is_over or (searches.is_deep and time.thread_time() - computing >= DEEP_SECONDS)
        if found[-1][0].record.stats.get("ended_early") and not is_over:
            until = -math.inf

    def fastest() -> float:
        return min((each.cost.makespan_seconds for each, *_ in found), default=math.inf)

    try:
        try:
            keep(searches.whole, left(math.inf if limit_seconds is None else SHARE * limit_seconds))
        except REFUSED as error:
            failure = error
        exploring = until if limit_seconds is None else min(until, time.perf_counter() + SHARE * limit_seconds)
        plans = searches.plans(part(progress, 0.3, 0.3), exploring, EXPLORING, fastest())
        if plans is not None and plans.ended_early:
            until = -math.inf
        tried = 0
        for n_stages, like in _pipelines(plans, cluster):
            is_over = time.perf_counter() >= until
            if tried == TRIES or (found and is_over) or (like is not None and like.makespan_seconds >= fastest()):
                break
            try:
                keep(partial(searches.staged, n_stages, like), left())
                tried += 1
            except REFUSED as error:
                failure = failure or error
    except ends:
        if not found:
            raise
    if not found:
        assert failure is not None
        raise failure
    return _answer(found, plans)


def _pipelines(plans: Plans | None, cluster: Cluster) -> list[tuple[int, Estimate | None]]:
    """Numbers of stages to search with their plans, the most promising first; of equal numbers of microbatches the fastest schedule."""
    if plans is None:
        return [(n, None) for n in STAGES if _has_parts(cluster, n)]
    of_numbers: dict[Candidate, Estimate] = {}
    for each in plans.ranked:
        if each.candidate.n_stages > 1:
            of_numbers.setdefault(each.candidate, each)
    return [(each.candidate.n_stages, each) for each in of_numbers.values()]


def _has_parts(cluster: Cluster, n_stages: int) -> bool:
    try:
        cluster.part(n_stages)
    except ClusterError:
        return False
    return True


def _answer(searched: Sequence[Sequence[Plan]], plans: Plans | None) -> list[Plan]:
    """All of what was found, the fastest with what was compared, and a bound of it all, in its notes and counts."""
    best, *others = sorted((each for found in searched for each in found), key=lambda strategy: strategy.cost.makespan_seconds)
    found = sorted((first for first, *_ in searched), key=lambda strategy: strategy.cost.makespan_seconds)
    stats: dict[str, float] = {}
    note = f"plan='full' compared {', '.join(map(_named, found))}"
    if plans is not None:
        note += f"; of {len(plans.bounds)} numbers of stages and microbatches it estimated {plans.n_searched}"
        stats |= {"plans": len(plans.bounds), "plans_searched": plans.n_searched}
    if plans is not None and plans.bounds:
        makespan, objective = best.cost.makespan_seconds, best.cost.objective_seconds
        computing, bound = min(plans.computing_seconds, makespan), min(plans.bound_of_faster(makespan), objective)
        note += (
            f". No plan takes less than {format_seconds(computing)}, computing alone; none that may be faster takes less than "
            f"{format_seconds(bound)} without overlap (gap {format_percent(plans.gap_of(makespan, objective))})"
        )
        stats |= {"plan_computing_seconds": computing, "plan_bound_seconds": bound, "plan_gap": plans.gap_of(makespan, objective)}
    notes = (*best.record.assumptions, note)
    record = replace(best.record, assumptions=notes, stats={**best.record.stats, **stats}, trail=_trail(found, plans))
    return [best.with_record(record), *others]


def _trail(found: list[Plan], plans: Plans | None) -> tuple[Tried, ...]:
    """The forms that were compared: what was found, fastest first, then pipelines that were estimated alone."""
    best = found[0]
    taken = [Tried(_form(best), "taken", None, None, best.cost.makespan_seconds, best.cost.peak_bytes)]
    slower = [Tried(_form(each), "slower", None, None, each.cost.makespan_seconds, each.cost.peak_bytes) for each in found[1:]]
    whole = next((each.record.trail for each in found if each.record.pipeline is None), ())
    others = [each for each in whole if each.outcome != "taken"]
    known = {(len(each.record.pipeline.stages), each.microbatches) for each in found if each.record.pipeline is not None}
    ranked = () if plans is None else plans.ranked
    left = {each.candidate: each for each in reversed(ranked) if (each.candidate.n_stages, each.candidate.n_microbatches) not in known}
    pipelines = [each for each in reversed(left.values()) if each.candidate.n_stages > 1]
    cut = "not searched: others are estimated to be faster"
    return (*taken, *slower, *others, *(Tried(str(each.candidate), cut, each.makespan_seconds) for each in pipelines))


def _form(strategy: Plan) -> str:
    if (pipeline := strategy.record.pipeline) is not None:
        return str(Candidate(len(pipeline.stages), strategy.microbatches))
    return next((each.form for each in strategy.record.trail if each.outcome == "taken"), str(Form(strategy.microbatches)))


def _named(strategy: Plan) -> str:
    pipeline = strategy.record.pipeline
    what = "no stages" if pipeline is None else f"{len(pipeline.stages)} stages"
    n = strategy.microbatches
    return f"{what} in {n} microbatch{'es' * (n > 1)} ({format_seconds(strategy.cost.makespan_seconds)})"
