"""The number of microbatches that a step is searched in."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

from autoshard.errors import InfeasibleError, SearchLimitError, TraceError
from autoshard.progress import Progress, part
from autoshard.render import format_bytes

Microbatches = int | str | None
"""A number; ``"fit"``: one, or where nothing fits in one the fastest that does; ``"auto"``: the fastest of a few; None: one."""

TRIES = 5  # of numbers of microbatches, where the first does not fit
AUTO = (2, 4, 8)  # beside one

Found = TypeVar("Found")
N = TypeVar("N")


def with_few(attempt: Callable[[int], Found], limit: float, numbers: Callable[[], Sequence[int]]) -> Found:
    """What is found in one microbatch, or else in the first of a few larger numbers in which something fits.

    Each is at least twice the one before, or as many times as much as the smallest peak there is above the limit.

    Args:
        attempt: searches with a number of microbatches.
        limit: bytes that a device may hold.
        numbers: those of microbatches that the batch can be divided into, ascending.

    Raises:
        InfeasibleError: nothing fits with any number that was tried.
    """
    n, failure, peaks = 1, None, dict[int, float]()
    while len(peaks) < TRIES:
        try:
            return attempt(n)
        except InfeasibleError as error:
            failure, peaks[n] = failure or error, error.smallest_peak_bytes or math.inf
        except (SearchLimitError, TraceError) as other:
            if failure is None:
                raise
            more = f" Nor could it run in microbatches: {other}" if isinstance(other, TraceError) and len(peaks) == 1 else ""
            raise InfeasibleError(f"{failure}{more}", min(peaks.values()), failure.proven) from None
        larger = [other for other in numbers() if other > n]
        if not larger:
            break
        least = n * max(2.0, peaks[n] / limit)
        n = next((other for other in larger if other >= least), larger[-1])
    assert failure is not None
    tried, smallest = ", ".join(map(str, [*peaks][1:])), min(peaks.values())
    if not tried:
        raise failure
    text = f"{failure} Nor does it fit in microbatches, of which {tried} were tried: the smallest peak is {format_bytes(smallest)}."
    raise InfeasibleError(text, smallest, failure.proven)


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
