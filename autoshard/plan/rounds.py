"""Searches again with another limit of predicted peaks, where compiled peaks differ from predicted ones.

*Again.* Where no finalist fits as compiled, or only some that are slower than one that does not by more than predictions are wrong, the
next search has the limit times predicted through compiled peak, of the finalist where that is least: nothing that was refused comes back.
*Above.* Where nothing is predicted to fit, the plan of the smallest peak is compiled if that is near the limit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autoshard.cluster import Cluster
from autoshard.errors import ClusterError, CompilerError, InfeasibleError, SearchLimitError
from autoshard.plan.compiled_finalists import MARGIN, finalist_compiler_of
from autoshard.plan.confirm import Confirm, confirmed, noted
from autoshard.plan.finalists import Board
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import RESERVE
from autoshard.progress import Progress, part
from autoshard.render import format_bytes
from autoshard.strategy import Finalist

ROUNDS = ((0.0, 0.9), (0.9, 0.05), (0.95, 0.05))  # of each search where it begins and its share of the progress: most end with the first
NEARLY = 1.25  # times the limit: a predicted peak that is compiled before it is refused; few are too high by more (docs/predictions.md)

Search = Callable[[float | None, Progress], Board | Plan]
"""From a limit of the predicted peak, None for the user's own, to the finalists; or to a strategy that is not to be confirmed."""


@dataclass(frozen=True, slots=True)
class _Found:
    """The answer of one search, its finalists if they were compiled, and its limit of predicted peaks; None: the user's."""

    strategy: Plan
    board: Board | None
    within: float | None

    @property
    def seconds(self) -> float:
        """The predicted step time, by which answers are compared: compiled times of several searches may be of different kinds."""
        return self.strategy.cost.makespan_seconds


@dataclass(eq=False)
class Rounds:
    """The searches of one confirmed search.

    Attributes:
        search: raises InfeasibleError where nothing is predicted to fit.
        how: the user's wish.
        cluster: the devices.
        limit: bytes that a device may hold, as compiled.
        boards: the finalists of each search, and what became of them.
    """

    search: Search
    how: Confirm
    cluster: Cluster
    limit: float
    boards: list[Board] = field(default_factory=list, init=False)

    def found(self, progress: Progress) -> Plan:
        """The fastest strategy that is confirmed; one of the first search where nothing confirms it.

        Raises:
            InfeasibleError: no plan fits; says what those that were compiled need.
            SearchLimitError: the time was over before the first search had found any.
        """
        best: _Found | None = None
        failure: InfeasibleError | SearchLimitError | None = None
        within: float | None = None
        for begins, share in ROUNDS:
            own, n_before = part(progress, begins, share), len(self.boards)
            try:
                found = self._tried(within, own)
                if best is None or (found.strategy.confirmation is not None and found.seconds < best.seconds):
                    best = found
            except (InfeasibleError, SearchLimitError) as error:
                failure = error
                if best is None and len(self.boards) == n_before:
                    best = self._above(error, within or self.limit, own)
            if len(self.boards) != n_before + 1 or self.boards[-1].ended or (best is not None and not self._gives_up_much(best)):
                break
            if (scale := self._scale(self.boards[-1])) is None:
                break
            within = self.limit * scale * (1 - RESERVE)
            own(f"faster plans do not fit as compiled: searches again within {format_bytes(within)}", 1.0)
        if best is None:
            assert failure is not None
            raise failure if len(self.boards) < 2 else self._refusal()
        return self._recorded(best)

    def _tried(self, within: float | None, progress: Progress) -> _Found:
        """The answer of one search, compiled.

        Raises:
            InfeasibleError: nothing is predicted to fit; or nothing fits as compiled, and the finalists are in `boards`.
            SearchLimitError: the time was over.
        """
        board = self.search(within, progress)
        if isinstance(board, Plan):
            return _Found(board, None, within)
        self.boards.append(board)
        return _Found(confirmed(board, self.how), board, within)

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
        return min(refused, default=math.inf) * (1 + MARGIN) < best.seconds

    def _scale(self, board: Board) -> float | None:
        """Predicted through compiled peak, the least of what does not fit; None: there is none, or its compiled peak is unknown."""
        return min((predicted / max(needed, self.limit) for predicted, needed in _refused([board])), default=None)

    def _recorded(self, best: _Found) -> Plan:
        """The strategy with the finalists of all searches, and with a note on the limit of its own, if it has one."""
        strategy, confirmation = best.strategy, best.strategy.confirmation
        if confirmation is not None and len(self.boards) > 1:
            finalists = tuple(each for board in self.boards for each in _told(board, board is best.board))
            strategy = strategy.with_record(replace(strategy.record, confirmation=replace(confirmation, finalists=finalists)))
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
    known = ((each.cost.peak_bytes, _needed(found)) for each, found in plans if found.outcome == "does not fit")
    return [(predicted, needed) for predicted, needed in known if needed is not None]


def _needed(found: Finalist) -> float | None:
    """The bytes that a finalist needs as compiled, fragmentation included where the compiler says it; None: unknown."""
    return max((known for known in (found.needed_bytes, found.peak_bytes) if known is not None), default=None)
