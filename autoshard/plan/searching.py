"""The search of a request: variants of the program, then pipelines or one program, then confirmation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from autoshard.compilers.corrections import NO_CORRECTIONS, Corrections
from autoshard.mesh_search.equality import simplest_first
from autoshard.pipeline.schedule import ONE_PROGRAM
from autoshard.plan.agreement import agreed, finalists_of_process_0
from autoshard.plan.asking import asked_of_compiler
from autoshard.plan.attempts import Attempts, Whole
from autoshard.plan.attention_notes import attention_notes
from autoshard.plan.confirm import noted
from autoshard.plan.corrections import as_compiled_before
from autoshard.plan.finalists import Board
from autoshard.plan.full_plan import REFUSED, STAGES, figures_of_plan, noted_if_equal
from autoshard.plan.full_search import full
from autoshard.plan.incumbent import Incumbent
from autoshard.plan.kept_corrections import keep_corrections, kept_corrections
from autoshard.plan.microbatching import Microbatches
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import MOST_OVERLAPPED, cluster_of, limit_of, prepare, traced_of
from autoshard.plan.request import LEAST_SECONDS, SEARCHING, Request
from autoshard.plan.rounds import Rounds
from autoshard.plan.stage_searches import Call, in_stages
from autoshard.plan.ticking import check_parts, fastest
from autoshard.plan.variants import fastest as fastest_variant
from autoshard.progress import Progress, part, silent
from autoshard.render import shown
from autoshard.rewrite import stays_whole
from autoshard.run.collecting import rarely_collecting
from autoshard.run.tracing import TracedOnce
from autoshard.trace import outside_mesh


@agreed
def answered(fn: Callable[..., Any], args: tuple[Any, ...], request: Request, progress: Progress | bool = silent) -> Plan:
    """The best strategy that a request's searcher finds; in several processes the one that process 0 finds."""
    with shown(progress) as callback, outside_mesh(keep_auto=True):
        once, started = fn if isinstance(fn, TracedOnce) else TracedOnce(fn), time.perf_counter()
        strategy, one = _answered(once, args, request, callback)
        if request.asks and request.confirm is None:
            left = None if request.seconds is None else max(request.seconds - (time.perf_counter() - started), 0.0)

            def again(within: float) -> Plan:
                return _answered(once, args, replace(request.within(left, None), memory_limit_bytes=within), callback)[0]

            limits = limit_of(cluster_of(request.cluster), request.memory_limit_bytes), request.memory_limit_bytes
            strategy = asked_of_compiler(strategy, one, args, *limits, left, callback, again)
        return _with_notes(strategy, request)


def _answered(once: TracedOnce, args: tuple, request: Request, progress: Progress) -> tuple[Plan, TracedOnce]:
    """The best strategy, and the variant of the program that it is for."""

    def searched(one: TracedOnce, seconds: float | None, progress: Progress, incumbent: Incumbent) -> Plan:
        return _searched(one, args, request.within(seconds, None), progress, incumbent)

    share = 1.0 if request.confirm is None else SEARCHING
    found = fastest_variant(once, args, request, searched, part(progress, 0.0, share))
    if isinstance(found, TracedOnce):
        return _searched(found, args, request, progress), found
    strategy, one = found
    if request.confirm is None:
        return strategy, one
    left = None if request.seconds is None else request.seconds * (1 - SEARCHING)
    return _searched(one, args, request.within(left, request.confirm), part(progress, share, 1 - share)), one


def _with_notes(strategy: Plan, request: Request) -> Plan:
    """The strategy with notes on dimensions that do not divide, and on plain attention."""
    if strategy.record.pipeline is not None or (known := strategy._known) is None:
        return strategy
    strategy = noted(strategy, *attention_notes(strategy, request.rewriting))
    return noted(strategy, *stays_whole(known.facts.graph, known.facts.rules, strategy.record.assignment, request.rewriting.padding))


def _searched(fn: TracedOnce, args: tuple, request: Request, progress: Progress, incumbent: Incumbent | None = None) -> Plan:
    """The best strategy of a program as it is, of which no rewrites are tried.

    Args:
        incumbent: what was found of other variants; outside pipelines what is no faster need not be found.

    Raises:
        NothingFasterError: nothing is.
    """
    how, until = request.confirm, math.inf
    devices = cluster_of(request.cluster)
    kept, notes = kept_corrections(devices)
    if how is None:
        found = finalists(fn, args, request, progress, 1, incumbent, replace(kept, generalises=True)).strategies[0]
        return noted(found, *notes, *as_compiled_before(found))

    def searched(within: float | None, corrections: Corrections, progress: Progress) -> Board | Plan:
        """The finalists within a limit, None for the user's; where Ctrl-C ended the search, the best."""
        nonlocal until
        seconds = request.searching_seconds if until == math.inf else max((until - time.perf_counter()) / 2, LEAST_SECONDS)
        limit = request.memory_limit_bytes if within is None else within
        own = replace(request.within(seconds, None), memory_limit_bytes=limit)
        found = finalists(fn, args, own, part(progress, 0.0, SEARCHING), how.finalists, corrections=corrections)
        strategies, finders, is_over = found.strategies, found.finders, found.is_over
        if how.by == "devices":
            strategies, finders, is_over = finalists_of_process_0(strategies, finders, is_over)
        if is_over:
            return noted(strategies[0], "not confirmed: the search was interrupted")
        if request.seconds is not None:
            until = min(until, found.started + request.seconds)
        return Board(
            strategies,
            finders=finders,
            fn=fn,
            args=args,
            memory_limit_bytes=request.memory_limit_bytes,
            until=None if request.seconds is None else until,
            progress=part(progress, SEARCHING, 1 - SEARCHING),
            together=how.by == "devices",
        )

    rounds = Rounds(searched, how, devices, limit_of(devices, request.memory_limit_bytes), kept)
    found = rounds.found(progress)
    return noted(found, *notes, *as_compiled_before(found), *keep_corrections(devices, rounds.learned))


@dataclass(frozen=True, slots=True)
class Finalists:
    """The best distinct strategies of a search, fastest first.

    Attributes:
        finders: per strategy the name of the searcher whose answer it is.
        started: when the search began, on `time.perf_counter`'s clock, tracing not included.
        is_over: whether it was interrupted.
    """

    strategies: Sequence[Plan]
    finders: Sequence[str]
    started: float
    is_over: bool


@rarely_collecting()
def finalists(
    fn: TracedOnce,
    args: tuple,
    request: Request,
    progress: Progress,
    wanted: int,
    incumbent: Incumbent | None = None,
    corrections: Corrections = NO_CORRECTIONS,
) -> Finalists:
    """The best strategies that a search of a request finds, of which nothing is confirmed and no variants are tried; ``wanted`` at most.

    Args:
        corrections: of predicted kernels of a step that is one program, by what was compiled.
    """
    if request.is_full and request.schedule in ONE_PROGRAM:
        return _any_stages(fn, args, request, progress, wanted, corrections)
    if not request.is_pipeline:
        return _of_one_program(fn, args, request, progress, wanted, incumbent, corrections)

    known = incumbent or Incumbent()

    def whole(request: Request, progress: Progress) -> Sequence[Plan]:
        return finalists(fn, args, request, progress, wanted, known, corrections).strategies

    started, call = time.perf_counter(), Call(fn, args, request, progress, cuts=request.cuts)
    found = full(call, whole, known) if request.stages is None else in_stages(call, request.stages)
    is_over = bool(found[0].record.stats.get("ended_early")) and not _timed_out(request, time.perf_counter() - started)
    return Finalists(found[:wanted], [each.record.searcher.name for each in found[:wanted]], started, is_over)


def _any_stages(fn: TracedOnce, args: tuple, request: Request, progress: Progress, wanted: int, corrections: Corrections) -> Finalists:
    """The best of the step without stages, and in a few numbers of stages of one program."""
    started, n = time.perf_counter(), cluster_of(request.cluster).n_devices
    asked = [request.every_form, *(replace(request, plan="sharding", stages=k) for k in STAGES if n % k == 0)]
    found, failure = list[tuple[Plan, str]](), None
    for k, each in enumerate(asked):
        left = None if request.seconds is None else max(request.seconds - time.perf_counter() + started, LEAST_SECONDS) / (len(asked) - k)
        try:
            own, here = replace(each, seconds=left), part(progress, k / len(asked), 1 / len(asked))
            one = _of_one_program(fn, args, own, here, wanted, None, corrections)
            found += zip(one.strategies, one.finders, strict=True)
        except REFUSED as error:
            failure = failure or error
    if not found:
        assert failure is not None
        raise failure
    error = cluster_of(request.cluster).device.pair_error
    strategies, finders = zip(*simplest_first(found, error, lambda each: figures_of_plan(each[0])), strict=True)
    return Finalists(noted_if_equal(strategies, error)[:wanted], finders[:wanted], started, False)


def _of_one_program(
    fn: TracedOnce, args: tuple, request: Request, progress: Progress, wanted: int, incumbent: Incumbent | None, corrections: Corrections
) -> Finalists:
    """The same of a step that is one program on all devices, whether it has stages or not."""
    chosen, number, n_stages, seconds = request.limited, request.microbatches, request.stages_of_one_program, request.seconds
    ask = partial(prepare, fn, args, replace(request, searcher=chosen), corrections=corrections)
    n_kept = MOST_OVERLAPPED if wanted == 1 and chosen.includes_baselines else wanted

    def attempts(number: Microbatches, seconds: float | None, progress: Progress, whole: Whole | None = None, rounds: int = 1) -> Attempts:
        same = request.remat, request.offload, request.mesh, request.start, request.memory_limit_bytes is None
        how = progress, request.ends, seconds, n_kept, whole, request.warm
        return Attempts(partial(ask, rounds=rounds), chosen, number, *same, *how, is_full=request.is_thorough)

    trail, known = (), math.inf
    if n_stages > 1:
        assert request.schedule is not None, "that of one program"
        devices = cluster_of(request.cluster)
        check_parts(devices, n_stages, number)
        traced, facts, _ = traced_of(fn, args, request.donate_argnums, request.axes, devices, batch=request.asked.batch)
        tried = partial(attempts, whole=(traced, facts))
        (prepared, solution, problem), started = fastest(tried, traced, n_stages, request.schedule, number, seconds, progress)
    else:
        one = attempts(number, seconds, progress)
        one.incumbent = incumbent or one.incumbent
        (prepared, solution, problem), started = one.found(), one.started
        trail, known = one.trail(prepared), one.incumbent.makespan_seconds
    solving, searching = solution.stats.get("search_seconds", 0.0), time.perf_counter() - started
    stats = {**solution.stats, "solve_seconds": solving, "search_seconds": searching}
    solutions = prepared.overlapped((solution, *solution.others), problem, wanted, known)
    strategies = [prepared.plan(each.assignment.mesh, replace(each, stats=stats), chosen, problem) for each in solutions]
    strategies = [each.with_record(replace(each.record, trail=trail)) for each in strategies]
    is_over = bool(solution.stats.get("ended_early")) and not _timed_out(request, searching)
    return Finalists(strategies, [each.finder or chosen.name for each in solutions], started, is_over)


def _timed_out(request: Request, seconds: float) -> bool:
    """Whether a search that took so long ended since its time was over."""
    return request.seconds is not None and seconds >= request.seconds
