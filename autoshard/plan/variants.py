"""The program as it is written, or rewritten: each variant is searched, and the fastest is kept."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.budgets import BUDGETS
from autoshard.errors import AutoshardError
from autoshard.ir import entry_axes
from autoshard.ir.rewrites import Padded, Rewrite
from autoshard.plan.agreement import everyones
from autoshard.plan.incumbent import Incumbent
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import cluster_of, whole_of
from autoshard.plan.request import LEAST_SECONDS, Request
from autoshard.progress import Progress, part
from autoshard.rewrite import PROPOSALS
from autoshard.run.tracing import TracedOnce

Found = Mapping[tuple[Rewrite, ...], "Plan | AutoshardError"]
"""By rewrites the plan of a variant, or why it has none."""

Search = Callable[[TracedOnce, float | None, Progress, Incumbent], Plan]
"""From a function, seconds to search it in, a progress callback, and what is known of other variants, to a strategy that is faster."""


def fastest(
    once: TracedOnce, args: tuple[Any, ...], request: Request, search: Search, progress: Progress
) -> tuple[Plan, TracedOnce] | TracedOnce:
    """The fastest variant's strategy and function; the function alone, not searched, where there is nothing to rewrite.

    Kinds of rewrites are chosen one after the other, each on top of those before it.

    Raises:
        AutoshardError: no variant has a strategy; that of the program as it is written.
    """
    until, seconds = None, request.searching_seconds
    chosen: tuple[Rewrite, ...] = once.rewrites
    found: dict[tuple[Rewrite, ...], Plan | AutoshardError] = {}
    incumbent, devices = Incumbent(), cluster_of(request.cluster).n_devices

    def proposals(kind: int, before: tuple[Rewrite, ...]) -> list[tuple[Rewrite, ...]]:
        traced = whole_of(once.rewritten(before), args, request.donate_argnums, request.axes, request.asked.batch)
        return [(*before, rewrite) for rewrite in PROPOSALS[kind](traced, cluster_of(request.cluster), request.rewriting)]

    def tried(rewrites: tuple[Rewrite, ...], share: float, start: float) -> None:
        left = None if until is None else max(LEAST_SECONDS, until - time.perf_counter()) * share
        try:
            found[rewrites] = search(once.rewritten(rewrites), left, part(progress, start, (1 - start) * share), incumbent)
        except AutoshardError as error:
            found[rewrites] = error

    for kind in range(len(PROPOSALS)):
        new = proposals(kind, chosen)
        if not new:
            continue
        if until is None and seconds is not None:  # from here on, since tracing does not count
            until = time.perf_counter() + seconds
        is_choice = not any(getattr(rewrites[-1], "required", False) for rewrites in new)
        among = [chosen, *new] if is_choice else new
        # Where the first is much faster, it is soon known that the one as it is written is not; and where that is, one of more work is not.
        ordered = sorted((*new, chosen), key=lambda rewrites: rewrites != chosen and _grows(rewrites[-1]))
        untried = [rewrites for rewrites in ordered if rewrites in among and rewrites not in found]
        for k, rewrites in enumerate(untried):
            if rewrites == chosen and any(_has_all_of(each, found, devices) for each in new):
                continue
            if found and until is not None and time.perf_counter() > until and any(isinstance(each, Plan) for each in found.values()):
                break
            tried(rewrites, 1 / (len(untried) - k), k / len(untried))
        chosen = _best(found, among)
    if not found:
        return once
    best = found[chosen]
    if isinstance(best, AutoshardError):
        raise best
    return best, once.rewritten(chosen)


def _has_all_of(rewrites: tuple[Rewrite, ...], found: Found, devices: int) -> bool:
    """Whether a variant can do all that the program without its last rewrite can, at hardly more work, and its plan makes use of it.

    A search of that program would find nothing that is faster by a gain that is worth it.
    """
    last, plan = rewrites[-1], found.get(rewrites)
    if not isinstance(last, Padded) or not isinstance(plan, Plan) or most_growth(last, devices) > BUDGETS.least_gain:
        return False
    sizes = dict(plan.record.mesh.axes)
    for argument, dim, extent in last.arguments:
        spec = plan.record.arguments[argument].spec
        parts = math.prod(sizes.get(axis, 1) for axis in entry_axes(spec[dim] if dim < len(spec) else None))
        if math.prod(size for size, _ in extent) % parts:
            return True
    return False


def _grows(rewrite: Rewrite) -> bool:
    """Whether it adds to the step's work."""
    return isinstance(rewrite, Padded) and sum(each.more_work for each in rewrite.dims) > BUDGETS.least_gain


def most_growth(padded: Padded, n_devices: int) -> float:
    """By what share of a step it is slower, at most, than the program without it in any of that one's shardings; infinity: unknown.

    An operation takes no longer than in proportion to its arrays, and what divided a dimension divides its padded size, too.
    """
    parts = [part for each in padded.dims for part in each.extent]
    if any(of % math.gcd(size, n_devices) for size, of in parts):
        return math.inf
    return math.prod(of / size for size, of in parts) - 1


def _best(found: Found, among: list[tuple[Rewrite, ...]]) -> tuple[Rewrite, ...]:
    """The variant of least predicted step time, on which all processes agree; the first where none has a strategy."""

    def seconds(k: int) -> float:
        each = found.get(among[k])
        return each.cost.makespan_seconds if isinstance(each, Plan) else float("inf")

    return among[everyones(min(range(len(among)), key=seconds))[0]]
