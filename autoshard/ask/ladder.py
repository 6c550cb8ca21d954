"""Strategies under ever smaller memory limits, each found by a search of its own: of pipelines, recomputation and all else."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from autoshard.errors import InfeasibleError, OutOfTime
from autoshard.plan.plan import Plan
from autoshard.plan.request import Request
from autoshard.plan.searching import answered
from autoshard.progress import Progress, part
from autoshard.run.tracing import TracedOnce

DEEPEST = 1 / 16  # of the fastest strategy's peak: no less memory is asked for
CLOSE = 1.1  # ratio of two peaks between which no other is looked for
SEARCHES = 2  # for each strategy that there may be


def shares_tables(request: Request) -> bool:
    """Whether all strategies are of forms of a step that share the tables of one search: without recomputation, stages or rewrites."""
    plain, rewriting = Request(remat=None), request.rewriting
    names = "remat", "stages", "schedule", "plan", "confirm", "start"
    is_rewritten = (rewriting.kernels, rewriting.balance, rewriting.padding) != (None, None, False)
    return not is_rewritten and request.offload != "activations" and all(getattr(request, name) == getattr(plain, name) for name in names)


def ladder(fn: Callable[..., Any], args: tuple[Any, ...], request: Request, points: int, progress: Progress) -> tuple[list[Plan], str]:
    """Strategies by rising peak memory, none of which another one beats, and a note where the search ended early.

    Args:
        points: how many strategies there may be.

    Raises:
        InfeasibleError: nothing fits the request's own limit.
    """
    once, started, note = TracedOnce(fn), time.perf_counter(), ""
    met: list[Plan] = []
    most = SEARCHES * points

    def search(number: int, limit: float | None) -> Plan:
        left = None if request.seconds is None else request.seconds - (time.perf_counter() - started)
        if left is not None and left <= 0:
            raise OutOfTime("the time is over.")
        own = replace(request, memory_limit_bytes=limit, seconds=None if left is None else left / (most - number))
        return answered(once, args, own, part(progress, number / most, 1 / most))

    try:
        met.append(search(0, request.memory_limit_bytes))
        peak = met[0].cost.peak_bytes
        gaps = [(DEEPEST * peak, peak)]  # within which no limit was tried
        for number in range(1, most):
            below, above = max(gaps, key=lambda gap: gap[1] / gap[0])
            if len({plan.cost.peak_bytes for plan in met}) >= points or above < CLOSE * below:
                break
            limit = math.sqrt(below * above)
            gaps.remove((below, above))
            gaps.append((limit, above))
            with suppress(InfeasibleError):
                met.append(search(number, limit))
                if met[-1].cost.peak_bytes > below:
                    gaps.append((below, met[-1].cost.peak_bytes))
    except request.ends:
        if not met:
            raise
        note = "The search ended early: more time may find strategies between these."
    return _unbeaten(met), note


def _unbeaten(met: list[Plan]) -> list[Plan]:
    """Those that hold less than every faster one, by rising peak."""
    found: list[Plan] = []
    for plan in sorted(met, key=lambda plan: (plan.cost.makespan_seconds, plan.cost.peak_bytes)):
        if not found or plan.cost.peak_bytes < found[-1].cost.peak_bytes:
            found.append(plan)
    return found[::-1]
