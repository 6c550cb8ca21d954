"""One search over stages, devices, microbatches, schedules and shardings: the best strategy without stages, and the best pipeline.

The step without stages is searched first, as it is without ``plan``, in any number of microbatches and with any recomputation: no answer is
slower. Numbers of stages and of microbatches are then ranked by the costs of the step's layers (`autoshard.pipeline.plan_search`), and what
is promised to be faster is searched stage by stage. So is at last what ``stages=2``, 4 or 8 alone would search, unless its bounds or its
estimates say that it is slower. The answer is the fastest strategy by its own step time. A lower bound of all plans is in its notes and in
``stats['plan_bound_seconds']``; that of the record is of its own mesh or stages.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain

from autoshard.concurrency import thread_seconds
from autoshard.errors import AutoshardError, ClusterError, InfeasibleError, PipelineError, SearchLimitError, ShardingError, TraceError
from autoshard.explanation.comparison import figures_of_record
from autoshard.mesh_search.equality import EQUAL, Figures, note_of_equal, simplest_first
from autoshard.pipeline.plans import Candidate, Estimate, Plans
from autoshard.plan.confirm import noted
from autoshard.plan.forms import Form
from autoshard.plan.incumbent import Incumbent
from autoshard.plan.plan import Plan
from autoshard.plan.request import LEAST_SECONDS
from autoshard.progress import Progress, part
from autoshard.render import format_percent, format_seconds
from autoshard.strategy import Tried

TRIES = 2  # pipelines that are searched stage by stage since they are estimated to be fastest
STAGES = (2, 4)  # of one program, that are compared
STAGES_ALONE = (2, 4, 8)  # of programs of their own, for which an answer is no slower than with that number of stages alone
SHARE = 0.4  # of a time limit, for the comparison of plans, and for the search without stages
DEEP_OPS = 10_000  # of a step of more pipelines have to promise more
DEEP_GAIN = 0.05  # of such a step's seconds, that is worth the searches of a pipeline: they take minutes
CORE_SECONDS = 60.0  # of one core, not of the clock, in which plans are compared, and in which a pipeline is searched without a limit
ALONE_SECONDS = 20.0  # of one core, in which what stages alone would search is searched, beside what is estimated to be fastest
REFUSED = (ClusterError, InfeasibleError, PipelineError, SearchLimitError, TraceError, ShardingError)


Comparing = Callable[[Progress, float, float, float], Plans | None]
"""The comparison of plans, which goes on where it was left (`autoshard.pipeline.plan_search.Planning.run`)."""

Whole = Callable[[float | None], Sequence[Plan]]
"""The search of the step without stages within some seconds, None for no limit; the fastest comes first."""

StagedSearch = Callable[[Estimate | Candidate, float, float | None], Sequence[Plan]]
"""The search of a pipeline, as a plan says or of a number of stages and of microbatches, within some seconds of one core, or within some of
the clock where these are given; the fastest comes first."""


@dataclass(frozen=True, slots=True)
class Searches:
    """The searches that are compared.

    Attributes:
        whole: of the step without stages.
        plans: of numbers of stages and microbatches; None where the step has no equal layers.
        staged: of a pipeline.
        alone: makes the numbers of stages and microbatches that are searched where stages alone are asked for.
    """

    whole: Whole
    plans: Comparing
    staged: StagedSearch
    alone: Callable[[], Sequence[Candidate]] = tuple


def fullest(
    searches: Searches,
    error: float,
    limit_seconds: float | None,
    progress: Progress,
    ends: tuple[type[BaseException], ...] = (),
    known: Incumbent | None = None,
) -> list[Plan]:
    """The strategies of all searches, fastest first.

    Args:
        error: the share by which predicted ratios of two plans' times are off.
        ends: the exceptions after which the best strategy so far is the answer, if there is one.
        known: what was found of other variants of the program, which has to be beaten; it takes what is found.

    Raises:
        InfeasibleError: nothing fits, with stages or without; or nothing is faster than what is known.
    """
    until = math.inf if limit_seconds is None else time.perf_counter() + limit_seconds
    search = _Searching(until, known or Incumbent())
    plans: Plans | None = None
    try:
        search.keep(searches.whole, math.inf if limit_seconds is None else SHARE * limit_seconds)
        exploring = search.until if limit_seconds is None else min(search.until, time.perf_counter() + SHARE * limit_seconds)
        if time.perf_counter() < exploring:
            plans = searches.plans(part(progress, 0.3, 0.3), exploring, CORE_SECONDS, search.fastest)
        if plans is not None and plans.ended_early:
            search.until = -math.inf
        for like in _pipelines(plans):
            if search.tried == TRIES or search.is_over or like.makespan_seconds >= search.fastest:
                break
            search.tried += search.keep(partial(searches.staged, like, CORE_SECONDS), computing_seconds=CORE_SECONDS)
        _as_alone(search, searches, plans)
    except ends:
        if not search.found:
            raise
    if not search.found:
        assert search.failure is not None
        raise search.failure
    return _answer(search.found, plans, error)


def _as_alone(search: _Searching, searches: Searches, plans: Plans | None) -> None:
    """Searches what stages alone would, of what may be faster than all that is found."""
    started, most = thread_seconds(), TRIES * CORE_SECONDS if plans is None else ALONE_SECONDS
    for each in searches.alone():
        left = most - (thread_seconds() - started)
        if search.is_over or left <= 0:
            break
        if plans is None or plans.promised(each) < search.fastest:
            search.keep(partial(searches.staged, each, left), computing_seconds=left)


@dataclass(slots=True)
class _Searching:
    """The searches so far.

    Attributes:
        until: when the time is over, on `time.perf_counter`'s clock; Ctrl-C is for the searches that are left, too, which have no time.
        known: what was found of this program and of its other variants.
        found: the strategies of each search.
        failure: the first refusal.
        tried: pipelines that were found.
    """

    until: float
    known: Incumbent
    found: list[Sequence[Plan]] = field(default_factory=list)
    failure: AutoshardError | None = None
    tried: int = 0

    @property
    def is_over(self) -> bool:
        """Whether something is found and the time is over."""
        return bool(self.found) and time.perf_counter() >= self.until

    @property
    def fastest(self) -> float:
        """The least step time, in seconds."""
        return min([self.known.makespan_seconds, *(each.cost.makespan_seconds for each, *_ in self.found)])

    def keep(self, search: Callable[[float | None], Sequence[Plan]], most: float = math.inf, computing_seconds: float = math.inf) -> bool:
        """Whether a search in the seconds that are left, ``most`` at most, finds anything, which is kept.

        Args:
            computing_seconds: of this thread, after which it ends by itself.
        """
        left = min(self.until - time.perf_counter(), most)
        seconds = None if left == math.inf else max(left, LEAST_SECONDS)
        started, computing = time.perf_counter(), thread_seconds()
        try:
            self.found.append(search(seconds))
            self.known.makespan_seconds = self.fastest
        except REFUSED as error:
            self.failure = self.failure or error
            return False
        is_over = seconds is not None and time.perf_counter() - started >= seconds
        is_over = is_over or thread_seconds() - computing >= computing_seconds
        if self.found[-1][0].record.stats.get("ended_early") and not is_over:
            self.until = -math.inf
        return True


def _pipelines(plans: Plans | None) -> list[Estimate]:
    """Plans of pipelines, the most promising first; of equal numbers of stages and microbatches the fastest schedule."""
    fastest: dict[Candidate, Estimate] = {}
    for each in () if plans is None else plans.ranked:
        if each.candidate.n_stages > 1:
            fastest.setdefault(each.candidate, each)
    return [*fastest.values()]


def figures_of_plan(plan: Plan) -> Figures:
    """The cost and the complexity of a plan with stages or without."""
    return figures_of_record(plan.record)


def noted_if_equal(ranked: Sequence[Plan], error: float) -> list[Plan]:
    """Plans as `simplest_first` has them, the first with a note if another is predicted to be faster."""
    first, *rest = ranked
    fastest = min(ranked, key=lambda plan: plan.cost.makespan_seconds)
    return [first if fastest is first else noted(first, note_of_equal(_form(fastest), fastest.cost, error)), *rest]


def _answer(searched: Sequence[Sequence[Plan]], plans: Plans | None, error: float) -> list[Plan]:
    """All of what was found, the best first with what was compared, and a bound of it all, in its notes and counts."""
    best, *others = noted_if_equal(simplest_first(chain(*searched), error, figures_of_plan), error)
    found = simplest_first((first for first, *_ in searched), error, figures_of_plan)
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
    best, least = found[0], found[0].cost.makespan_seconds
    taken = [Tried(_form(best), "taken", None, None, best.cost.makespan_seconds, best.cost.peak_bytes)]
    others = ((each, EQUAL if each.cost.makespan_seconds < least else "slower") for each in found[1:])
    slower = [Tried(_form(each), why, None, None, each.cost.makespan_seconds, each.cost.peak_bytes) for each, why in others]
    whole = next((each.record.trail for each in found if each.record.pipeline is None), ())
    others = [each for each in whole if each.outcome != "taken"]
    known = {(each.record.pipeline.n_parts, each.microbatches) for each in found if each.record.pipeline is not None}
    ranked = () if plans is None else plans.ranked
    left = {each.candidate: each for each in reversed(ranked) if (each.candidate.n_stages, each.candidate.n_microbatches) not in known}
    pipelines = [each for each in reversed(left.values()) if each.candidate.n_stages > 1]
    cut = "not searched: others are estimated to be faster"
    return (*taken, *slower, *others, *(Tried(str(each.candidate), cut, each.makespan_seconds) for each in pipelines))


def _form(strategy: Plan) -> str:
    if (pipeline := strategy.record.pipeline) is not None:
        return str(Candidate(pipeline.n_parts, strategy.microbatches))
    return next((each.form for each in strategy.record.trail if each.outcome == "taken"), str(Form(strategy.microbatches)))


def _named(strategy: Plan) -> str:
    pipeline = strategy.record.pipeline
    what = "no stages" if pipeline is None else f"{pipeline.n_parts} stages"
    n = strategy.microbatches
    return f"{what} in {n} microbatch{'es' * (n > 1)} ({format_seconds(strategy.cost.makespan_seconds)})"
