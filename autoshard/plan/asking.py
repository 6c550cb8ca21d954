"""The compiler's word on a plan near the memory limit, which is asked for once where nothing else was said of confirming.

It is compiled until memory is assigned, if a compiler for the cluster's accelerators is installed. Where it does not fit, the search is
repeated once, within the limit times predicted through compiled peak. A compiler that is missing, fails or takes too long changes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from autoshard.cluster import Cluster
from autoshard.errors import ClusterError, CompilerError, InfeasibleError, OutOfTime
from autoshard.plan.compiled_finalists import FinalistCompiler, finalist_compiler_of
from autoshard.plan.confirm import noted
from autoshard.plan.finalists import Board, needed_bytes
from autoshard.plan.kept_corrections import is_switched_off
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import RESERVE
from autoshard.progress import Progress
from autoshard.render import format_bytes, format_percent
from autoshard.strategy import Confirmation

NEAR = 0.8  # of the memory limit: few compiled peaks are more than a quarter above the predicted ones (docs/predictions.md)
MOST_SECONDS = 60.0  # of compiling


def asked_once(
    plan: Plan, fn: Callable, args: tuple, limit: float, user_limit: float | None, seconds: float | None, progress: Progress,
    again: Callable[[float], Plan],
) -> Plan:  # fmt: skip
    """The plan with what its compiler says of it; where it does not fit, the plan of another search, or this one where that finds none.

    Args:
        plan, fn, args: what was found, and its program.
        limit, user_limit: bytes of a device; those that the user gave, None where the device's count.
        seconds: what is left of a time limit; None: there is none.
        again: searches within other bytes of predicted peak.
    """
    judge = _compiler(plan, limit)
    if judge is None:
        return plan
    until = time.perf_counter() + min(MOST_SECONDS, MOST_SECONDS if seconds is None else seconds)
    board = Board([plan], [plan.record.searcher.name], fn, args, user_limit, until, progress)
    peak = plan.cost.peak_bytes
    why = f"{format_percent(peak / limit)} of the memory limit are taken, so {judge.name} was asked once"
    try:
        judge.decide(board)
    except (OutOfTime, KeyboardInterrupt) as error:
        ended = "its time was over" if isinstance(error, OutOfTime) else "it was interrupted"
        return noted(plan, f"{why}: {ended}, and the prediction stands")
    (found,) = board.found
    needs = "more than there is" if (needed := needed_bytes(found)) is None else format_bytes(needed)
    if found.outcome == "failed":
        return noted(plan, f"{why}: it failed, and the prediction stands ({found.reason})")
    if found.outcome != "does not fit":
        taken = replace(found, outcome="taken", measure=None, seconds=None)
        confirmed = plan.with_record(replace(plan.record, confirmation=Confirmation("compiler", judge.name, judge.version, (taken,))))
        return noted(confirmed, f"{why}: it fits, and needs {needs} where {format_bytes(peak)} were predicted")
    refused = f"{why}: the fastest plan needs {needs} where {format_bytes(peak)} were predicted"
    within = limit * min(peak / max(needed or limit, limit), 1.0) * (1 - RESERVE)
    try:
        other = again(within)
    except (InfeasibleError, OutOfTime):
        return noted(plan, f"{refused} and does not fit, and no other is predicted to need that much less")
    return noted(other, f"{refused}, and this one is within {format_bytes(within)} of predicted peak")


def _compiler(plan: Plan, limit: float) -> FinalistCompiler | None:
    """The compiler that is asked, until memory is assigned; None where the plan is not near the limit, or there is nobody to ask."""
    record = plan.record
    if record.pipeline is not None or record.confirmation is not None or record.cost.peak_bytes <= NEAR * limit or is_switched_off():
        return None
    try:
        judge = finalist_compiler_of(Cluster.from_dict(record.cluster))
    except (ClusterError, CompilerError):
        return None
    return replace(judge, clock_hertz=0.0) if judge.compiler.extra else None  # jaxlib's own for CPUs is asked by name alone
