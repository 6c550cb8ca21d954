"""The number of microbatches that a step is searched in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from autoshard.errors import InfeasibleError, SearchLimitError, ShardingError, TraceError
from autoshard.search import Solution

Microbatches = int | str | None
"""A number; ``"fit"``: more than one where nothing fits otherwise; ``"auto"``: the fastest of a few; None: one."""

WORDS = ("fit", "auto")
TRIES = 3  # of numbers of microbatches, where the first does not fit
AUTO = (2, 4, 8)  # beside one

Found = TypeVar("Found", bound=tuple[Any, Solution, Any])


def checked_number(microbatches: Microbatches) -> Microbatches:
    """What the user asks for, if it is a number or a word that there is.

    Raises:
        ShardingError: it is neither.
    """
    is_number = isinstance(microbatches, int) and not isinstance(microbatches, bool) and microbatches >= 1
    if microbatches is not None and microbatches not in WORDS and not is_number:
        raise ShardingError(f"microbatches are a number, 1 or more, 'fit', 'auto' or None, got {microbatches!r}. Use 4, for instance.")
    return microbatches


def best(attempt: Callable[[int], Found], microbatches: Microbatches, limit: float) -> Found:
    """What is found with as many microbatches as asked for.

    Args:
        attempt: searches with a number of microbatches; the second of what it gives is the solution.
        limit: bytes that a device may hold.

    Raises:
        InfeasibleError: nothing fits with any number that was tried.
    """
    if microbatches == "auto":
        return _fastest(attempt)
    if microbatches != "fit":
        return attempt(1 if microbatches is None else int(microbatches))
    try:
        return attempt(1)
    except InfeasibleError as error:
        for n in _numbers(error, limit):
            try:
                return attempt(n)
            except InfeasibleError:
                continue
            except SearchLimitError:
                break
            except TraceError as other:
                text = f"{error} Nor could it run in microbatches: {other}"
                raise InfeasibleError(text, error.smallest_peak_bytes, error.proven) from None
        raise


def _numbers(error: InfeasibleError, limit: float) -> Iterator[int]:
    """The numbers to try: from as many as the memory is short of, rounded up to a power of two."""
    peak = error.smallest_peak_bytes
    first = 1 if peak is None or not math.isfinite(peak) else max(1, math.ceil(math.log2(peak / limit)))
    return (2 ** (first + k) for k in range(TRIES))


def _fastest(attempt: Callable[[int], Found]) -> Found:
    """The fastest of what is found in one and in several microbatches; a number that the batch cannot be divided by is left out."""
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
    return min(found, key=lambda each: each[1].judgement.cost.makespan_seconds)
