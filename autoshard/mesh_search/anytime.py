"""Anytime search: the answer of a search that ends early, within the memory limit and with a valid gap.

A search ends early when its time is over, which its progress callback checks, or when the user interrupts it. Its answer is the fastest
within the memory limit, by the judge, of all assignments judged by then and of the one that the searcher noted last.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autoshard.errors import SearcherError, SearchLimitError
from autoshard.ir import Assignment
from autoshard.judge.evaluate import Judgement
from autoshard.problem import Hints, Problem
from autoshard.progress import Progress
from autoshard.search.searcher import Solution


class OutOfTime(SearchLimitError):
    """The time limit of a search is over."""


def checked_seconds(seconds: float | None) -> float | None:
    """The time limit of a search, checked.

    Raises:
        SearcherError: it is not a positive number.
    """
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0):
        raise SearcherError(f"time_limit_seconds is a positive number of seconds, or None for no limit; got {seconds!r}.")
    return seconds


def timed(progress: Progress, seconds: float | None, clock: Callable[[], float] = time.perf_counter) -> Progress:
    """The progress callback, which also raises `OutOfTime` once so many seconds from now, 0 or more, are over; None: it never does.

    Args:
        clock: what counts the seconds; `time.thread_time` counts those that this thread computes.
    """
    if seconds is None:
        return progress
    until = clock() + seconds

    def limited(what: str, fraction: float) -> None:
        if clock() > until:
            raise OutOfTime(
                f"the search was given {seconds:g} s, and found no strategy within the memory limit by then. "
                "Use a longer time_limit_seconds, or searcher='recursive_programming'."
            )
        progress(what, fraction)

    return limited


def endings(seconds: float | None, interruptible: bool) -> tuple[type[BaseException], ...]:
    """The exceptions that end a search early: of a time limit, and of Ctrl-C if that may."""
    return *((OutOfTime,) if seconds is not None else ()), *((KeyboardInterrupt,) if interruptible else ())


@dataclass(slots=True)
class Incumbent:
    """The fastest answer within the memory limit that a search has found by now; an observer of its problem.

    Attributes:
        problem: the problem that is searched.
        best: the judgement of the fastest answer; None: none fits yet.
        hints: of the search by now; None: there are none.
        waiting: makes the assignment that was noted last and is not judged yet.
    """

    problem: Problem
    best: Judgement | None = None
    hints: Hints | None = None
    waiting: Callable[[], Assignment] | None = field(default=None, repr=False)

    def judged(self, judgement: Judgement) -> None:
        limit = self.problem.memory_limit_bytes
        if limit is not None and judgement.cost.peak_bytes > limit:
            return
        if self.best is None or judgement.cost.makespan_seconds < self.best.cost.makespan_seconds:
            self.best = judgement

    def noted(self, found: Callable[[], Assignment]) -> None:
        self.waiting = found

    def hinted(self, hints: Hints) -> None:
        self.hints = hints

    def solution(self) -> Solution | None:
        """The answer so far; None where none fits."""
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            self.judged(self.problem.evaluate(waiting()))
        if self.best is None:
            return None
        return Solution(self.best, min(self.problem.compute_bound(), self.best.cost.objective_seconds))
