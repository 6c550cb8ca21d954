"""Searches that end early: what they met by then is an answer, within the memory limit and with an honest gap.

A search ends early where its time is over, as its progress callback finds, or where the user interrupts it. Everything that was judged on
the way counts, and so does what a searcher noted as its answer so far; whichever is fastest, by the judge, of what fits.
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
    """The time that a search was given is over."""


def checked_seconds(seconds: float | None) -> float | None:
    """The seconds that a search is given, if they are any."""
    if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0):
        raise SearcherError(f"time_limit_seconds is a positive number of seconds, or None for no limit; got {seconds!r}.")
    return seconds


def timed(progress: Progress, seconds: float | None) -> Progress:
    """The progress callback, which raises `OutOfTime` when so many seconds from now are over; None: never."""
    seconds = checked_seconds(seconds)
    if seconds is None:
        return progress
    until = time.perf_counter() + seconds

    def limited(what: str, fraction: float) -> None:
        if time.perf_counter() > until:
            raise OutOfTime(
                f"the search was given {seconds:g} s, and by then no strategy was met that fits the memory limit. "
                "Use a longer time_limit_seconds, or searcher='recursive_programming'."
            )
        progress(what, fraction)

    return limited


def endings(seconds: float | None, interruptible: bool) -> tuple[type[BaseException], ...]:
    """What may end a search early that has a time limit, or that Ctrl-C may end."""
    return *((OutOfTime,) if seconds is not None else ()), *((KeyboardInterrupt,) if interruptible else ())


@dataclass(slots=True)
class Incumbent:
    """The fastest of what a search met that fits the problem's memory limit.

    Attributes:
        problem: whose search is watched.
        best: what the judge says of it.
        hints: what the search found out by then; None where that is nothing.
        waiting: what was noted last, and is not judged yet.
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
        """The answer so far; None where nothing that fits was met."""
        if self.waiting is not None:
            waiting, self.waiting = self.waiting, None
            self.judged(self.problem.evaluate(waiting()))
        if self.best is None:
            return None
        return Solution(self.best, min(self.problem.compute_bound(), self.best.cost.objective_seconds))
