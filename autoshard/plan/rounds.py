"""Searches of one request, each corrected by what was compiled before.

*Corrected.* What the kernels of a compiled schedule take beyond their prediction corrects the tables of the next search, which is then
exact on these kernels. The searches end where whatever is predicted to be faster than the best schedule has been compiled.
*Within less.* Where no finalist fits as compiled, or only some that are slower than one that does not by more than predictions are wrong,
the next search has the limit times predicted through compiled peak, of the finalist where that is least: nothing refused comes back.
*Above.* Where nothing is predicted to fit, the plan of the smallest peak is compiled if that is near the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autoshard.cluster import Cluster
from autoshard.compilers.corrections import NO_CORRECTIONS, Corrections
from autoshard.errors import ClusterError, CompilerError, InfeasibleError, SearchLimitError
from autoshard.plan.compiled_finalists import MARGIN, finalist_compiler_of
from autoshard.plan.confirm import Confirm, confirmed, noted, plan_of
from autoshard.plan.finalists import Board, needed_bytes
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import RESERVE, within_less
from autoshard.progress import Progress, part
from autoshard.render import format_bytes, format_seconds
from autoshard.strategy import Finalist, Record

MOST_ROUNDS = 5  # searches
MOST_COMPILATIONS = 6  # after which no search follows
FIRST = 0.9  # of the progress, the share of the first search; each that follows has as large a part of the rest
NEARLY = 1.25  # times the limit: a predicted peak that is compiled before it is refused; few are too high by more (docs/predictions.md)

Search = Callable[[float | None, Corrections, Progress], Board | Plan]
"""From a limit of the predicted peak, None for the user's own, and corrections to the finalists; or to one that is not to be confirmed."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The answer of one search, its finalists if they were compiled, and its limit of predicted peaks; None: the user's."""

    strategy: Plan
    board: Board | None
    within: float | None

    @property
    def seconds(self) -> float:
        """The step time, by which answers are compared: as scheduled, else as predicted."""
        found = self.strategy.confirmation
        known = found is not None and found.taken.measure == "scheduled"
        return found.seconds or 0.0 if found is not None and known else self.strategy.cost.makespan_seconds

    def beats(self, other: _Found | None) -> bool:
        """Whether it is the better answer: it is confirmed, and faster."""
        return other is None or (self.strategy.confirmation is not None and self.seconds < other.seconds)


@dataclass(eq=False)
class Rounds:
    """The searches of one confirmed search.

    Attributes:
        search: raises InfeasibleError where nothing is predicted to fit.
        how: the user's wish.
        cluster: the devices.
        limit: bytes that a device may hold, as compiled.
        kept: corrections of predicted kernels that were known before.
        boards: the finalists of each search, and what became of them.
        learned: corrections by what was compiled since.
    """

    search: Search
    how: Confirm
    cluster: Cluster
    limit: float
    kept: Corrections = NO_CORRECTIONS
    boards: list[Board] = field(default_factory=list, init=False)
    learned: Corrections = field(default=NO_CORRECTIONS, init=False)

    def found(self, progress: Progress) -> Plan:
        """The fastest strategy that is confirmed; one of the first search where nothing confirms it.

        Raises:
            InfeasibleError: no plan fits; says what those that were compiled need.
            SearchLimitError: the time was over before the first search had found any.
        """
        best: _Found | None = None
        failure: InfeasibleError | SearchLimitError | None = None
        within: float | None = None
        left = 1.0
        for _ in range(MOST_ROUNDS):
            own, n_before, left = part(progress, 1 - left, left * FIRST), len(self.boards), left * (1 - FIRST)
            try:
                found = self._tried(within, own, best)
                best = found if found is not None and found.beats(best) else best
            except (InfeasibleError, SearchLimitError) as error:
                failure = error
                if best is None and len(self.boards) == n_before:
                    best = self._above(error, within or self.limit, own)
            if len(self.boards) == n_before or self.boards[-1].ended or sum(each.compilations for each in self.boards) >= MOST_COMPILATIONS:
                break
            refused = _refused(self.boards[-1:]) if best is None or self._gives_up_much(best) else []
            if refused:
                within = min(within_less(self.limit, predicted, needed) for predicted, needed in refused)
                own(f"faster plans do not fit as compiled: searches again within {format_bytes(within)}", 1.0)
            elif not self.boards[-1].corrections:
                break
        if best is None:
            assert failure is not None
            raise failure if len(self.boards) < 2 else self._refusal()
        return self._recorded(best)

    def _tried(self, within: float | None, progress: Progress, best: _Found | None = None) -> _Found | None:
        """The answer of one search, compiled; None where all that is predicted to be faster than the best has been.

        Raises:
            InfeasibleError: nothing is predicted to fit; or nothing fits as compiled, and the finalists are in `boards`.
            SearchLimitError: the time was over.
        """
        board = self.search(within, self.kept.merged([self.learned]), progress)
        if isinstance(board, Plan):
            return _Found(board, None, within)
        if self.learned and best is not None:
            compiled = [plan_of(plan.record) for each in self.boards for plan in each.strategies]
            faster = [k for k, plan in enumerate(board.strategies) if plan.cost.makespan_seconds < best.seconds]
            board.keep([k for k in faster if plan_of(board.strategies[k].record) not in compiled][:1])
            if not board.strategies:
                return None
        self.boards.append(board)
        try:
            return _Found(confirmed(board, self.how), board, within)
        finally:
            self.learned = self.learned.merged([board.corrections])

    def _above(self, error: InfeasibleError | SearchLimitError, within: float, progress: Progress) -> _Found:
        """The plan of the smallest peak, if that is little above a limit which no plan is predicted to keep, and the compiler accepts it.

        Raises:
            InfeasibleError, SearchLimitError: it is not.
        """
        least = (error.smallest_peak_bytes if isinstance(error, InfeasibleError) else None) or math.inf
        known = min((each.cost.peak_bytes for board in self.boards for each in board.strategies), default=math.inf)
        found = None
        if least <= NEARLY * within and least < known and self._has_compiler():
            progress(f"the least peak is predicted to be {format_bytes(least)}: it is compiled before it is refused", 0.0)
            with suppress(InfeasibleError, SearchLimitError):
                found = self._tried(least * (1 + RESERVE), progress)  # at the least itself a search may miss the one plan that there is
        if found is None or found.strategy.confirmation is None:
            raise (self._refusal(f"Within {format_bytes(within)} of predicted peak: {error}") if _refused(self.boards) else error) from None
        return found

    def _has_compiler(self) -> bool:
        """Whether there is a compiler that can be asked."""
        try:
            return self.how.by == "compiler" and finalist_compiler_of(self.cluster) is not None
        except (ClusterError, CompilerError):
            return False

    def _gives_up_much(self, best: _Found) -> bool:
        """Whether a plan that does not fit is predicted to be faster than the best by more than predictions are wrong."""
        refused = [each.predicted_seconds for board in self.boards for each in board.found if each.outcome == "does not fit"]
        return min(refused, default=math.inf) * (1 + MARGIN) < best.strategy.cost.makespan_seconds

    def _recorded(self, best: _Found) -> Plan:
        """The strategy with the finalists and a note of each search, one on the limit of its own, if it has one, and the compiled cost."""
        strategy, confirmation = best.strategy, best.strategy.confirmation
        if confirmation is not None and len(self.boards) > 1:
            finalists = tuple(each for board in self.boards for each in _told(board, board is best.board))
            strategy = strategy.with_record(replace(strategy.record, confirmation=replace(confirmation, finalists=finalists)))
        if best.board is not None and self.how.by == "compiler" and confirmation is not None:
            strategy = strategy.with_record(as_compiled(strategy.record, best.board))
            strategy = noted(strategy, *(trail(n, board) for n, board in enumerate(self.boards, 1) if board.differences))
        if best.within is None:
            return strategy
        why = f"of what was compiled, {self._needs()}" if _refused(self.boards) else "nothing is predicted to fit that"
        limits = f"{format_bytes(best.within)} of predicted peak, where a device may hold {format_bytes(self.limit)}"
        return noted(strategy, f"searched within {limits}, since {why}")

    def _refusal(self, more: str = "Use more devices, or a smaller batch.") -> InfeasibleError:
        """The refusal with what the plans need that were compiled, and what else there is to say."""
        plans = f"the {len(_refused(self.boards))} that {finalist_compiler_of(self.cluster).name} compiled"
        text = f"a strategy must fit {format_bytes(self.limit)} a device, and of {plans} none does: {self._needs()}. {more}"
        return InfeasibleError(text, min(needed for _, needed in _refused(self.boards)))

    def _needs(self) -> str:
        """What the plan needs that needs least of those that do not fit."""
        needed, predicted = min((needed, predicted) for predicted, needed in _refused(self.boards))
        return f"the least that one needs is {format_bytes(needed)}, where {format_bytes(predicted)} were predicted"


def _told(board: Board, is_best: bool) -> list[Finalist]:
    """The finalists of one search, of which one is taken in the search of the best alone."""
    return [replace(each, outcome="slower") if each.outcome == "taken" and not is_best else each for each in board.found]


def _refused(boards: list[Board]) -> list[tuple[float, float]]:
    """Predicted peaks, and what they need, of the plans that do not fit as compiled, where that is known."""
    plans = [plan for board in boards for plan in zip(board.strategies, board.found, strict=True)]
    known = ((each.cost.peak_bytes, needed_bytes(found)) for each, found in plans if found.outcome == "does not fit")
    return [(predicted, needed) for predicted, needed in known if needed is not None]


def as_compiled(record: Record, board: Board) -> Record:
    """The record with the step time and the peak of memory that its compiler makes of it, as far as it says them."""
    number = next(k for k, each in enumerate(board.found) if each.outcome == "taken")
    taken, cost = board.found[number], record.cost
    if taken.peak_bytes:
        cost = replace(cost, peak_bytes=taken.peak_bytes, recomputation=None)
    if taken.measure == "scheduled" and taken.seconds:
        compute = sum(each.compiled_seconds for each in board.differences.get(number, ())) or cost.compute_seconds
        exposed = max(taken.seconds - compute, 0.0)
        sent = max(cost.communication_seconds, exposed)
        cost = replace(cost, makespan_seconds=taken.seconds, compute_seconds=min(compute, taken.seconds), communication_seconds=sent,
                       exposed_communication_seconds=exposed)  # fmt: skip
    return replace(record, cost=cost)


def trail(number: int, board: Board) -> str:
    """What a search and the compiler made of each other, in one line."""
    k = min(board.differences, key=lambda k: board.found[k].seconds or math.inf)
    found, each = board.differences[k], board.found[k]
    compiled, predicted = (sum(getattr(one, f"{side}_seconds") for one in found) for side in ("compiled", "predicted"))
    most = next((one for one in found if one.op is not None), None)
    where = f", most of all {most.op.primitive} at {most.op.origin} by {_signed(most.more_seconds)}" if most and most.op else ""
    times = f"{format_seconds(each.predicted_seconds)} were predicted and {format_seconds(each.seconds or 0.0)} are scheduled"
    kernels = f"its kernels differ by {_signed(compiled - predicted)}{where}"
    return f"search {number}: {board.compilations} compiled; of the fastest, on mesh {each.mesh}, {times}; {kernels}"


def _signed(seconds: float) -> str:
    return f"{'+' if seconds >= 0 else '-'}{format_seconds(abs(seconds))}"
