"""The compiler's word on a plan that may not fit, which is asked for where nothing else was said of confirming.

A plan may not fit where the interval of its peak reaches over the memory limit: from the predicted one to so many times that as compilers
were seen to need for programs of its kind (`Compiler.peak_error`). It is compiled until memory is assigned, if a compiler for the cluster's
accelerators is installed. Where it does not fit, the search is
repeated within the limit times predicted through compiled peak, and that plan is compiled, too, a few times at most. A compiler that is
missing, fails or takes too long changes nothing.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.base import PEAK_ERROR
from autoshard.errors import ClusterError, CompilerError, InfeasibleError, OutOfTime
from autoshard.plan.compiled_finalists import FinalistCompiler, finalist_compiler_of
from autoshard.plan.confirm import noted
from autoshard.plan.finalists import Board, needed_bytes
from autoshard.plan.kept_corrections import is_switched_off
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import within_less
from autoshard.plan.rounds import as_compiled
from autoshard.progress import Progress
from autoshard.render import format_bytes, format_percent
from autoshard.strategy import Confirmation

MOST_SECONDS = 60.0  # of compiling a plan
MOST_ASKED = 6  # plans


def asked_of_compiler(
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
    notes, ends = list[str](), math.inf if seconds is None else time.perf_counter() + seconds
    for number in range(MOST_ASKED):
        judge = _compiler(plan, 0.0 if number else limit / _peak_error(plan))
        if judge is None:
            break
        until = min(time.perf_counter() + MOST_SECONDS, ends)
        board = Board([plan], [plan.record.searcher.name], fn, args, user_limit, until, progress)
        answer = _answer(board, judge, limit)
        if isinstance(answer, Plan):
            return noted(answer, *notes)
        refused, within = answer
        try:
            other = again(within)
        except (InfeasibleError, OutOfTime):
            return noted(plan, *notes, f"{refused} and does not fit, and no other is predicted to need that much less")
        plan = other
        notes.append(f"{refused}, and this one is within {format_bytes(within)} of predicted peak")
    else:
        notes.append(f"none of {MOST_ASKED} plans fits as compiled, and the last one found was not compiled: set memory_limit_bytes lower")
    return noted(plan, *notes)


def _peak_error(plan: Plan) -> float:
    """The largest compiled peak of programs of a plan's kind, divided by the predicted one."""
    if plan._traced is None:
        return PEAK_ERROR
    return compiler_of(Cluster.from_dict(plan.record.cluster)).peak_error(plan._traced.graph)


def _answer(board: Board, judge: FinalistCompiler, limit: float) -> Plan | tuple[str, float]:
    """The one plan of a board with what the compiler says; where it does not fit, how in words, and the predicted peak to search within."""
    (plan,) = board.strategies
    peak = plan.cost.peak_bytes
    error = _peak_error(plan)
    known = f", and compiled peaks of such programs are up to {error:.2g} times the predicted ones" if error > PEAK_ERROR else ""
    why = f"{format_percent(peak / limit)} of the memory limit are taken{known}, so {judge.name} was asked"
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
        board.note(0, outcome="taken", measure=None, seconds=None)
        confirmation = Confirmation("compiler", judge.name, judge.version, (board.found[0],))
        record = replace(as_compiled(plan.record, board), confirmation=confirmation)
        return noted(plan.with_record(record), f"{why}: it fits, and needs {needs} where {format_bytes(peak)} were predicted")
    refused = f"{why}: the fastest plan needs {needs} where {format_bytes(peak)} were predicted"
    return refused, within_less(limit, peak, needed or limit)


def _compiler(plan: Plan, above: float) -> FinalistCompiler | None:
    """The compiler that is asked, until memory is assigned; None where the plan's peak is not above so many bytes, or there is none."""
    record = plan.record
    if record.pipeline is not None or record.confirmation is not None or record.cost.peak_bytes <= above or is_switched_off():
        return None
    try:
        judge = finalist_compiler_of(Cluster.from_dict(record.cluster))
    except (ClusterError, CompilerError):
        return None
    return replace(judge, clock=None) if judge.compiler.extra else None  # jaxlib's own for CPUs is asked by name alone
