"""The search of a request: variants of the program, then pipelines or one program, then confirmation."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from autoshard.compilers.corrections import Corrections
from autoshard.plan.agreement import agreed, finalists_of_process_0
from autoshard.plan.asking import asked_once
from autoshard.plan.attempts import Attempts, Whole
from autoshard.plan.attention_notes import attention_notes
from autoshard.plan.confirm import noted
from autoshard.plan.corrections import as_compiled_before
from autoshard.plan.finalists import Board
from autoshard.plan.kept_corrections import keep_corrections, kept_corrections
from autoshard.plan.microbatching import Microbatches
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import MOST_OVERLAPPED, cluster_of, limit_of, prepare, traced_of
from autoshard.plan.request import SEARCHING, Request
from autoshard.plan.rounds import Rounds
from autoshard.plan.stage_searches import Call, full, in_stages
from autoshard.plan.ticking import check_parts, fastest
from autoshard.plan.variants import fastest as fastest_variant
from autoshard.progress import Progress, part, silent
from autoshard.render import shown
from autoshard.rewrite import stays_whole
from autoshard.run.collecting import rarely_collecting
from autoshard.run.tracing import TracedOnce
from autoshard.trace import outside_mesh


@agreed
def answered(fn: Callable, args: tuple, request: Request, progress: Progress | bool = silent) -> Plan:
    """The best strategy that a request's searcher finds; in several processes the one that process 0 finds."""
    with shown(progress) as callback, outside_mesh(keep_auto=True):
        once, started = fn if isinstance(fn, TracedOnce) else TracedOnce(fn), time.perf_counter()
        strategy, one = _answered(once, args, request, callback)
        if request.asks and request.confirm is None:
            left = None if request.seconds is None else max(request.seconds - (time.perf_counter() - started), 0.0)

            def again(within: float) -> Plan:
                return _answered(once, args, replace(request.within(left, None), memory_limit_bytes=within), callback)[0]

            limits = limit_of(cluster_of(request.cluster), request.memory_limit_bytes), request.memory_limit_bytes
            strategy = asked_once(strategy, one, args, *limits, left, callback, again)
        return _with_notes(strategy, request)


def _answered(once: TracedOnce, args: tuple, request: Request, progress: Progress) -> tuple[Plan, TracedOnce]:
    """The best strategy, and the variant of the program that it is for."""

    def searched(one: TracedOnce, seconds: float | None, progress: Progress, least: float) -> Plan:
        return _searched(one, args, request.within(seconds, None), progress, least)

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


def _searched(fn: TracedOnce, args: tuple, request: Request, progress: Progress, least: float = math.inf) -> Plan:
    """The best strategy of a program as it is, of which no rewrites are tried.

    Args:
        least: the objective of another variant, in seconds; outside pipelines what is no faster need not be found.

    Raises:
        NothingFasterError: nothing is.
    """
    chosen, how, number, n_stages = request.limited, request.confirm, request.microbatches, request.stages_of_one_program
    if request.is_pipeline:
        with rarely_collecting():
            call = Call(fn, args, request.cluster, chosen, request.mesh, request.asked, request.memory_limit_bytes, request.donate_argnums,
                        number, request.schedule, request.remat, request.ends, request.searching_seconds, progress)  # fmt: skip
            if request.stages is not None:
                return in_stages(call, request.stages)

            def whole(progress: Progress, time_limit_seconds: float | None, **given: Any) -> Plan:
                asked = replace(request.without_stages(), seconds=time_limit_seconds, **given)
                return _searched(fn, args, asked, progress)

            return full(call, whole, request.remat)
    with rarely_collecting():
        n_finalists, until = 1 if how is None else how.finalists, math.inf
        n_kept = MOST_OVERLAPPED if how is None and chosen.includes_baselines else n_finalists

        def searched(within: float | None, corrections: Corrections, progress: Progress) -> Board | Plan:
            """The finalists within a limit, None for the user's; the best alone where none is confirmed, or Ctrl-C ended the search."""
            nonlocal until
            limit = request.memory_limit_bytes if within is None else within
            seconds = request.searching_seconds if until == math.inf else max((until - time.perf_counter()) / 2, 0.0)
            own = part(progress, 0.0, 1.0 if how is None else SEARCHING)
            asked = partial(prepare, fn, args, request.cluster, chosen, request.mesh, request.asked, limit, request.donate_argnums,
                            corrections=corrections)  # fmt: skip

            def attempts(
                number: Microbatches, seconds: float | None, progress: Progress, whole: Whole | None = None, **divided: int
            ) -> Attempts:
                ask, reserves = partial(asked, **divided), limit is None
                same = request.remat, request.offload, request.mesh, request.start
                return Attempts(ask, chosen, number, *same, reserves, progress, request.ends, seconds, n_kept, whole)

            if n_stages > 1:
                assert request.schedule is not None, "that of one program"
                devices = cluster_of(request.cluster)
                check_parts(devices, n_stages, number)
                traced, facts, _ = traced_of(fn, args, request.donate_argnums, request.axes, devices, batch=request.asked.batch)
                tried = partial(attempts, whole=(traced, facts), stages=n_stages)
                trail = ()
                (prepared, solution, problem), started = fastest(tried, traced, n_stages, request.schedule, number, seconds, own)
            else:
                one = attempts(number, seconds, own)
                one.least = least
                (prepared, solution, problem), started = one.found(), one.started
                trail = one.trail(prepared)
            solving, searching = solution.stats.get("search_seconds", 0.0), time.perf_counter() - started
            stats = {**solution.stats, "solve_seconds": solving, "search_seconds": searching}
            solutions = prepared.overlapped((solution, *solution.others), problem, n_finalists)
            strategies = [prepared.plan(each.assignment.mesh, replace(each, stats=stats), chosen, problem) for each in solutions]
            strategies = [each.with_record(replace(each.record, trail=trail)) for each in strategies]
            if how is None:
                return strategies[0]
            finders = [each.finder or chosen.name for each in solutions]
            is_over = bool(solution.stats.get("ended_early")) and (seconds is None or searching < seconds)
            if how.by == "devices":
                strategies, finders, is_over = finalists_of_process_0(strategies, finders, is_over)
            if is_over:
                return noted(strategies[0], "not confirmed: the search was interrupted")
            if request.seconds is not None:
                until = min(until, started + request.seconds)
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

        devices = cluster_of(request.cluster)
        kept, notes = kept_corrections(devices)
        if how is None:
            found = searched(None, replace(kept, generalises=True), progress)
            assert isinstance(found, Plan)
            return noted(found, *notes, *as_compiled_before(found))
        rounds = Rounds(searched, how, devices, limit_of(devices, request.memory_limit_bytes), kept)
        found = rounds.found(progress)
        return noted(found, *notes, *as_compiled_before(found), *keep_corrections(devices, rounds.learned))
