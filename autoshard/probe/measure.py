"""Measured seconds of programs: the fastest of several rounds, each of which runs every program once.

Other work on a machine only adds time, so the fastest of several runs is the least disturbed; and a longer disturbance affects one
round of all programs rather than all rounds of one. A run is a loop on the devices that outlasts the host's cost of starting it, which is
measured by itself and subtracted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

LEAST_TRIPS = 8  # the first one includes the first access to its memory
MOST_TRIPS = 2**14


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure.

    Attributes:
        run_seconds: the intended duration of one run.
        total_seconds: the time after which no further round starts.
        least_rounds, most_rounds: bounds on the number of rounds, whatever the time.
    """

    run_seconds: float
    total_seconds: float
    least_rounds: int = 3
    most_rounds: int = 30


def measure(
    loops: Sequence[Callable[[int], Callable[[], object]]],
    guesses: Sequence[float],
    start_seconds: float,
    effort: Effort,
    progress: Callable[[float], None],
    settled: Callable[[float], float] = float,
) -> tuple[list[float], float]:
    """Seconds of one trip of each loop, and the disturbance: the ratio of a typical run to the fastest.

    Args:
        loops: functions from a number of trips to a function that runs them and returns when they are done.
        guesses: estimated seconds of a trip.
        start_seconds: the time of a run without trips.
        effort: how long to measure.
        progress: called with the fraction done.
        settled: of a number that decides what runs next the one that counts, where several processes run together.
    """
    begun = time.perf_counter()
    runs, trips = [], []
    for number, (loop, guess) in enumerate(zip(loops, guesses, strict=True)):
        run, n = _prepared(loop, guess, start_seconds, effort.run_seconds, settled)
        runs.append(run)
        trips.append(n)
        progress(0.5 * (number + 1) / len(loops))
    times: list[list[float]] = [[] for _ in runs]
    prepared = time.perf_counter()
    for number in range(effort.most_rounds):
        now = time.perf_counter()
        if number >= effort.least_rounds and settled(now - begun) > effort.total_seconds:
            break
        for k, run in enumerate(runs):
            times[k].append(seconds_of(run))
        left = max(effort.total_seconds - (prepared - begun), 1e-9)
        progress(0.5 + 0.5 * max((number + 1) / effort.most_rounds, min((time.perf_counter() - prepared) / left, 1.0)))
    # starting a loop may take less than starting an empty program: at least a tenth of a run counts as the loop's
    best = [min(each) for each in times]
    disturbance = median(median(each) / fastest for each, fastest in zip(times, best, strict=True))
    return [max(fastest - start_seconds, 0.1 * fastest) / n for fastest, n in zip(best, trips, strict=True)], disturbance


def _prepared(
    loop: Callable[[int], Callable[[], object]],
    guess: float,
    start_seconds: float,
    run_seconds: float,
    settled: Callable[[float], float],
) -> tuple[Callable[[], object], int]:
    """A compiled run of about the intended duration, and its trips; after at most three adjustments."""
    n = _trips(guess, run_seconds)
    for _ in range(3):
        run = loop(n)
        run()
        single = max(seconds_of(run) - start_seconds, 1e-7 * n) / n
        better = _trips(settled(single), run_seconds)
        if n / 4 <= better <= n * 4:
            break
        n = better
    else:
        run = loop(n)
        run()
    return run, n


def _trips(single: float, run_seconds: float) -> int:
    return 2 ** math.ceil(math.log2(min(max(run_seconds / single, LEAST_TRIPS), MOST_TRIPS)))


def seconds_of(run: Callable[[], object]) -> float:
    """The duration of one call."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
