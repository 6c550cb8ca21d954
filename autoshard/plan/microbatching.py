"""The number of microbatches that a step is searched in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from autoshard.errors import InfeasibleError, SearchLimitError, TraceError
from autoshard.progress import Progress, part
from autoshard.render import format_bytes

Microbatches = int | str | None
"""A number; ``"fit"``: one, or where nothing fits in one the fastest that does; ``"auto"``: the fastest of a few; None: one."""

TRIES = 5  # of numbers of microbatches, where the first does not fit
ROOM = 1.5  # times what is not fixed: where so much may fit, the limit hardly binds
AUTO = (2, 4, 8)  # beside one

Found = TypeVar("Found")
Seconds = Callable[[Any], float]
"""The seconds of a step, of what an attempt gives."""
N = TypeVar("N")


def best(
    attempt: Callable[[int], Found],
    microbatches: Microbatches,
    limit: float,
    numbers: Callable[[], Sequence[int]],
    fixed_bytes: float = 0.0,
    seconds: Seconds = lambda each: each[1].judgement.cost.makespan_seconds,
) -> Found:
    """What is found with as many microbatches as asked for.

    Args:
        attempt: searches with a number of microbatches.
        limit: bytes that a device may hold.
        numbers: those of microbatches that the batch can be divided into, ascending.
        fixed_bytes: what a device holds in any number, at least.
        seconds: of a step of what an attempt gives, whose second is the solution if this is left out.

    Raises:
        InfeasibleError: nothing fits with any number that was tried.
    """
    if microbatches == "auto":
        return min(all_found(attempt), key=seconds)
    if microbatches != "fit":
        return attempt(1 if microbatches is None else int(microbatches))
    try:
        return attempt(1)
    except InfeasibleError as error:
        return _fastest_that_fits(attempt, error, limit, numbers(), fixed_bytes, seconds)


def _fastest_that_fits(
    attempt: Callable[[int], Found], error: InfeasibleError, limit: float, numbers: Sequence[int], fixed: float, seconds: Seconds
) -> Found:
    """The fastest of what is found with `TRIES` numbers of microbatches, of which the first is one that leaves room.

    A step's peak is taken for a constant plus a part in inverse proportion to the number of microbatches: with what is known of the
    constant, or follows from the peaks found so far, that gives the fewest that may fit. What nearly fits takes long to search, and what
    makes it fit often takes more time than further microbatches. So the first number leaves `ROOM`, and fewer are tried then, as far as
    that is faster. Where a peak is higher than with fewer, since microbatches of few examples are split over devices otherwise, the next
    number is one beside that of the smallest peak.

    Args:
        error: of the search in one.
        numbers: to choose from, ascending.
        fixed: what is known of the constant.
        seconds: of a step of what an attempt gives.

    Raises:
        InfeasibleError: nothing fits with any; says which were tried.
    """
    peaks = {1: error.smallest_peak_bytes or math.inf}
    found: dict[int, Found] = {}
    for number in range(TRIES):
        if found:
            n = _fewer(numbers, peaks, {n: seconds(each) for n, each in found.items()}, limit, fixed)
        else:
            most = fixed + (limit - fixed) / ROOM if number == 0 and limit > fixed else limit
            n = _next([n for n in numbers if n not in peaks], peaks, most, fixed)
        if n is None:
            break
        try:
            found[n] = attempt(n)
        except InfeasibleError as other:
            peaks[n] = other.smallest_peak_bytes or math.inf
        except SearchLimitError:
            break
        except TraceError as other:
            if found:
                break
            text = f"{error} Nor could it run in microbatches: {other}"
            raise InfeasibleError(text, error.smallest_peak_bytes, error.proven) from None
    if found:
        return min(found.values(), key=seconds)
    if len(peaks) == 1:
        raise error
    tried, smallest = ", ".join(map(str, sorted(peaks)[1:])), min(peaks.values())
    text = f"{error} Nor does it fit in microbatches, of which {tried} were tried: the smallest peak is {format_bytes(smallest)}."
    raise InfeasibleError(text, smallest, error.proven)


def _fewer(numbers: Sequence[int], peaks: Mapping[int, float], found: Mapping[int, float], limit: float, fixed: float) -> int | None:
    """A number between that of the fastest found and the next fewer one that was tried; None: none may fit.

    Args:
        peaks: by numbers with which nothing was found.
        found: seconds by numbers with which something was.
    """
    fastest = min(found, key=lambda n: (found[n], n))
    few = max(n for n in (*peaks, *found) if n < fastest)
    peak = peaks.get(few, math.inf)
    least = _least(few, peak, limit, fixed) if math.isfinite(peak) else 0.0
    between = [n for n in numbers if few < n < fastest and n >= least]
    return between[(len(between) - 1) // 2] if between else None


def _least(n: int, peak: float, limit: float, fixed: float) -> float:
    """The number of microbatches with which a peak would be the limit, if all but what is fixed were in inverse proportion to it."""
    fixed = min(fixed, peak, limit)
    return n * (peak - fixed) / (limit - fixed) if limit > fixed else n * peak / limit


def _next(numbers: Sequence[int], peaks: Mapping[int, float], limit: float, fixed: float) -> int | None:
    """The number of microbatches to try next, by the peaks that were found with others; None: none may fit."""
    best = min(peaks, key=lambda n: (peaks[n], -n))
    around = [n for n in numbers if not any(n < other < best or best < other < n for other in peaks)]
    if not around:
        return None
    if best < max(peaks):  # of numbers beyond, peaks rise
        return around[(len(around) - 1) // 2]
    (last, peak), *before = sorted(peaks.items(), reverse=True)
    least = _least(last, peak, limit, fixed) if math.isfinite(peak) else 2 * last
    if before:
        few, higher = before[0]
        shrinks = (higher - peak) / (1 / few - 1 / last) if math.isfinite(higher) and higher > peak else 0.0
        constant = peak - shrinks / last
        least = max(least, shrinks / (limit - constant) if shrinks and constant < limit else 4 * last)
    larger = [n for n in around if n > last]
    return next((n for n in larger if n >= least), larger[-1] if larger else None)


def all_found(attempt: Callable[[int], Found]) -> list[Found]:
    """What is found in one and in several microbatches; a number that the batch cannot be divided by is left out.

    Raises:
        InfeasibleError: nothing fits with any number.
    """
    failure: InfeasibleError | None = None
    found: list[Found] = []
    try:
        found.append(attempt(1))
    except InfeasibleError as error:
        failure = error
    for n in AUTO:
        try:
            found.append(attempt(n))
        except InfeasibleError:
            continue
        except (SearchLimitError, TraceError):
            break
    if failure is not None and not found:
        raise failure
    return found


def found_with_each(
    numbers: Sequence[N],
    attempt: Callable[[N, int, Progress], Found],
    progress: Progress,
    ends: tuple[type[BaseException], ...] = (),
    is_last: Callable[[Found], bool] = lambda _: False,
) -> list[Found]:
    """What is found with each number of microbatches, in order; a number with which nothing is found is left out.

    Args:
        attempt: searches with a number, given how many numbers are left, this one included, and its progress.
        ends: exceptions that end the search; what was found until then is returned.
        is_last: whether what was found ends the search.

    Raises:
        InfeasibleError, SearchLimitError: nothing is found with any number.
    """
    found: list[Found] = []
    failure: InfeasibleError | SearchLimitError | None = None
    for k, n in enumerate(numbers):
        try:
            found.append(attempt(n, len(numbers) - k, part(progress, k / len(numbers), 1 / len(numbers))))
        except ends:
            if not found:
                raise
            break
        except (InfeasibleError, SearchLimitError) as error:
            failure = error
        if found and is_last(found[-1]):
            break
    if failure is not None and not found:
        raise failure
    return found
