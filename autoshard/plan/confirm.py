"""Which of a search's finalists is taken, once a compiler or devices have confirmed what each of them is."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax

from autoshard.cluster import Cluster
from autoshard.errors import ClusterError, CompilerError, InfeasibleError, OutOfTime, SearcherError
from autoshard.ir.rewrites import Recompute
from autoshard.plan.compiled_finalists import FinalistCompiler, finalist_compiler_of
from autoshard.plan.finalists import Board, in_words
from autoshard.plan.plan import Plan
from autoshard.plan.timed_finalists import FinalistDevices, devices_of
from autoshard.progress import silent
from autoshard.render import format_bytes
from autoshard.strategy import Confirmation, Record

BY = ("compiler", "devices")


@dataclass(frozen=True, slots=True)
class Confirm:
    """How a search is confirmed.

    Attributes:
        by: ``"compiler"`` or ``"devices"``.
        finalists: how many of the best distinct strategies are compiled or timed.

    >>> Confirm("compiler", finalists=5)
    Confirm(by='compiler', finalists=5)
    """

    by: str = "compiler"
    finalists: int = 3

    def __post_init__(self) -> None:
        if self.by not in BY:
            raise SearcherError(
                f"a search is confirmed by 'compiler' or 'devices', got {self.by!r}. Use confirm='compiler' where there are no devices."
            )
        if isinstance(self.finalists, bool) or not isinstance(self.finalists, int) or self.finalists < 1:
            raise SearcherError(f"finalists is a whole number from 1 up, got {self.finalists!r}. 3 are usual.")


def confirm_of(confirm: str | Confirm | bool | None) -> Confirm | None:
    """How to confirm, of what a user gives; None and False: the prediction decides.

    Raises:
        SearcherError: it is nothing of the kind.
    """
    if confirm is None or confirm is False:
        return None
    return confirm if isinstance(confirm, Confirm) else Confirm(confirm)  # pyright: ignore[reportArgumentType]


def confirmed(board: Board, how: Confirm) -> Plan:
    """The finalist of least time among those that fit, as compiled or timed, with the record of it.

    Where there is no such compiler or no such devices, where they fail on all finalists, or where the time is over before any is accepted,
    it is the first that was not refused, and its notes say why. Ctrl-C ends confirming alone: the search before it is not lost, but where
    processes time together.

    Raises:
        InfeasibleError: none fits; names the least that one needs.
    """
    try:
        judge = finalist_compiler_of(board.cluster) if how.by == "compiler" else devices_of(board.cluster)
    except (ClusterError, CompilerError) as error:
        return noted(board.strategies[0], f"not confirmed: {in_words(error)}")
    ended, started = "", time.perf_counter()
    try:
        judge.decide(board)
    except OutOfTime:
        ended = "the time was over"
    except KeyboardInterrupt:
        if board.together and jax.process_count() > 1:
            raise
        ended = "it was interrupted"
    board.ended = bool(ended)
    found = _taken(board, how, judge, ended) if board.accepted else _unconfirmed(board, judge, ended)
    stats = {**found.record.stats, "confirm_seconds": time.perf_counter() - started}
    return found.with_record(replace(found.record, stats=stats))


def confirmation_of(strategy: Plan, fn: Callable[..., Any], *args: Any) -> Confirmation:
    """What the compiler of a strategy's cluster makes of it, ahead of time and without devices; the strategy is the only finalist.

    Args:
        strategy: of this program, from a file too.
        fn, args: the program; arrays may be `jax.ShapeDtypeStruct`.

    Raises:
        ClusterError: no compiler compiles for such devices without them.
        CompilerError: it is not installed, it fails on the program, or the program does not fit the devices' memory.
    """
    record = strategy.record
    judge = finalist_compiler_of(Cluster.from_dict(record.cluster))
    board = Board([strategy], [record.searcher.name], fn, args, None, None, silent)
    judge.decide(board)
    [found] = board.found
    if found.outcome == "failed":
        raise CompilerError(f"a strategy is confirmed where {judge.name} compiles it, and it failed: {found.reason}")
    if found.outcome == "does not fit":
        needed = "more than there is" if found.needed_bytes is None else format_bytes(found.needed_bytes)
        raise CompilerError(
            f"a strategy is confirmed where it fits, and {judge.name} needs {needed} of {format_bytes(board.limit)} "
            f"a device; {format_bytes(record.cost.peak_bytes)} were predicted. Search with a lower memory_limit_bytes."
        )
    # Without a correction: where bytes and FLOPs are the predicted ones, it is the prediction again.
    return Confirmation("compiler", judge.name, judge.version, (replace(found, outcome="taken", measure=None, seconds=None),))


def with_confirmation_of(record: Record, earlier: Record) -> Record:
    """A record with the confirmation of an earlier one, where both are one plan; else unchanged.

    What a compiler makes of a plan does not depend on its predicted cost, so that a confirmation outlives changes of the cost model.
    """
    kept = earlier.confirmation
    if record.confirmation is not None or kept is None or len(kept.finalists) > 1 or plan_of(record) != plan_of(earlier):
        return record
    finalist = replace(kept.taken, found_by=record.searcher.name, predicted_seconds=record.cost.makespan_seconds)
    return replace(record, confirmation=replace(kept, finalists=(finalist,)))


def plan_of(record: Record) -> tuple[Any, ...]:
    """All of a record that its compiled program depends on."""
    rewrites = (
        Recompute(replace(each.remat, kept_bytes=0.0, plain_bytes=0.0, seconds=0.0)) if isinstance(each, Recompute) else each
        for each in record.program.rewrites
    )
    program = replace(record.program, rewrites=tuple(rewrites))
    decided = record.mesh, record.choices, record.layouts, record.copies, record.ahead, record.windows
    if record.pipeline is not None:
        decided = (*decided, record.pipeline.schedule, *(plan_of(stage.record) for stage in record.pipeline.stages))
    return program, record.cluster["name"], record.donate_argnums, decided


def _taken(board: Board, how: Confirm, judge: FinalistCompiler | FinalistDevices, ended: str) -> Plan:
    """The fastest of those that were accepted."""
    number = min(board.accepted, key=lambda each: (board.found[each].seconds or 0.0, each))
    board.note(number, outcome="taken")
    strategy = board.strategies[number]
    confirmation = Confirmation(how.by, judge.name, judge.version, tuple(board.found))
    notes = []
    if ended:
        reached, n = sum(each.outcome != "not reached" for each in board.found), len(board.found)
        all_compiled = f"all {n} finalists compiled, before those that are close were compared"
        how_far = f"{reached} of {n} finalists decided" if reached < n else all_compiled
        notes.append(f"confirming ended early, with {how_far}, since {ended}")
    return noted(strategy.with_record(replace(strategy.record, confirmation=confirmation)), *notes)


def _unconfirmed(board: Board, judge: FinalistCompiler | FinalistDevices, ended: str) -> Plan:
    """The first finalist that was not refused, with the reason why nobody confirms it.

    Raises:
        InfeasibleError: all were refused.
    """
    left = [number for number, each in enumerate(board.found) if each.outcome != "does not fit"]
    if not left:
        raise _refused(board, judge)
    failed = [each for each in board.found if each.outcome == "failed"]
    if ended:
        why = f"{ended} before {judge.name} had accepted a finalist"
    else:
        why = f"{judge.name} failed on {len(failed)} of {len(board.found)} finalists and accepted none"
    return noted(board.strategies[left[0]], f"not confirmed: {why}{f': {failed[0].reason}' if failed else ''}")


def _refused(board: Board, judge: FinalistCompiler | FinalistDevices) -> InfeasibleError:
    needs = [each.peak_bytes if board.exceeds(each.peak_bytes) else each.needed_bytes for each in board.found]
    least = min((need for need in needs if need is not None), default=math.inf)
    said = f", and the least that one needs is {format_bytes(least)}" if least < math.inf else ""
    return InfeasibleError(
        f"a strategy must fit {format_bytes(board.limit)} a device, and {judge.name} refuses all {len(board.found)} finalists{said}. "
        "Search with a lower memory_limit_bytes, which leaves the compiler more room, on more devices or with a smaller batch.",
        least if least < math.inf else None,
    )


def noted(strategy: Plan, *notes: str) -> Plan:
    """The strategy with notes that it did not have."""
    record = strategy.record
    return strategy.with_record(replace(record, assumptions=(*record.assumptions, *notes)))
