"""Anytime search: the answer of a search that ends early, within the memory limit and with a valid gap.

A search ends early when its time is over, or when the user interrupts it. Its answer is the fastest within the memory limit, by the judge,
of all assignments judged by then and of the one that the searcher noted last. The time is checked by its progress callback, and by its
problem's observer before each assignment that is judged and while tables are made.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from autoshard.concurrency import thread_seconds
from autoshard.errors import OutOfTime, SearcherError
from autoshard.ir import Assignment
from autoshard.judge.evaluate import Judgement
from autoshard.problem import Hints, Problem
from autoshard.progress import Progress, silent
from autoshard.search.searcher import Solution

LAST_SECONDS, LAST_SHARE = 1.0, 0.05  # for a baseline that fits where nothing was found, or for a bound of what was


def checked_seconds(seconds: float | None) -> float | None:
    """The time limit of a search, checked.

    Raises:
        SearcherError: it is not a positive number.
    """
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0):
        raise SearcherError(f"time_limit_seconds is a positive number of seconds, or None for no limit; got {seconds!r}.")
    return seconds


@dataclass(slots=True, eq=False)
class Timed:
    """A progress callback that raises `OutOfTime` once the time of a search is over.

    Attributes:
        progress: the callback that is called before.
        clock: what counts the seconds.
        seconds: how many the search was given.
        until: on the clock, when they are over.
        patience: on the clock, when the search ends if it has found nothing within the memory limit.
        found: whether it has found something.
    """

    progress: Progress
    clock: Callable[[], float]
    seconds: float
    until: float
    patience: float
    found: bool = False

    def __call__(self, what: str, fraction: float) -> None:
        self.check()
        self.progress(what, fraction)

    def check(self) -> None:
        """Raises `OutOfTime` where the time is over."""
        if self.clock() > (self.until if self.found else self.patience):
            raise OutOfTime(
                f"the search was given {self.seconds:g} s, and found no strategy within the memory limit by then. "
                "Use a longer time_limit_seconds, or searcher='recursive_programming'."
            )

    @property
    def has_no_patience(self) -> bool:
        """Whether the search ends if it has found nothing."""
        return self.clock() > self.patience

    @property
    def is_over(self) -> bool:
        """Whether all of the time is over."""
        return self.clock() > self.until

    def last(self) -> Timed:
        """The callback of what remains to be done after the end, for `LAST_SECONDS` of this thread, or `LAST_SHARE` of all the time."""
        until = thread_seconds() + max(LAST_SECONDS, LAST_SHARE * self.seconds)
        return Timed(silent, thread_seconds, self.seconds, until, until)


def timed(
    progress: Progress, seconds: float | None, clock: Callable[[], float] = time.perf_counter, patience: float = 1.0
) -> Progress | Timed:
    """The progress callback, which also raises `OutOfTime` once so many seconds from now, 0 or more, are over; None: it never does.

    Args:
        clock: what counts the seconds; `thread_seconds` counts those that this thread computes.
        patience: the share of the seconds after which a search ends that has found nothing within the memory limit.
    """
    if seconds is None:
        return progress
    now = clock()
    return Timed(progress, clock, seconds, now + seconds, now + patience * seconds)


def endings(seconds: float | None, interruptible: bool) -> tuple[type[BaseException], ...]:
    """The exceptions that end a search early: of a time limit, and of Ctrl-C if that may."""
    return *((OutOfTime,) if seconds is not None else ()), *((KeyboardInterrupt,) if interruptible else ())


@dataclass(slots=True)
class Incumbent:
    """The fastest answer within the memory limit that a search has found by now; an observer of its problem.

    Attributes:
        problem: the problem that is searched.
        clock: of the search; None: its time is not limited.
        best: the judgement of the fastest answer; None: none fits yet.
        smallest_peak_bytes: of all answers, within the limit or not.
        hints: of the search by now; None: there are none.
        waiting: makes the assignment that was noted last and is not judged yet.
    """

    problem: Problem
    clock: Timed | None = None
    best: Judgement | None = None
    smallest_peak_bytes: float = math.inf
    hints: Hints | None = None
    waiting: Callable[[], Assignment] | None = field(default=None, repr=False)

    def check(self) -> None:
        if self.clock is not None:
            self.clock.check()

    def judged(self, judgement: Judgement) -> None:
        limit = self.problem.memory_limit_bytes
        self.smallest_peak_bytes = min(self.smallest_peak_bytes, judgement.cost.peak_bytes)
        if limit is not None and judgement.cost.peak_bytes > limit:
            return
        if self.clock is not None:
            self.clock.found = True
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
