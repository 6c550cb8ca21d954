"""What a search lets the backward pass compute again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from autoshard.errors import InfeasibleError, SearchLimitError, ShardingError
from autoshard.ir.remat import Remat

WORDS = ("fit", "auto", "full")

Found = TypeVar("Found", bound=tuple[Any, ...])


def checked_remat(remat: str | None) -> str | None:
    """What the user asks for, if there is such.

    Raises:
        ShardingError: there is not.
    """
    if remat is not None and remat not in WORDS:
        raise ShardingError(f"remat is 'fit', 'auto', 'full' or None, got {remat!r}. Use 'auto', for instance.")
    return remat


def best_remat(attempt: Callable[[Remat | None], Found], remat: str | None, options: Callable[[], Sequence[Remat]]) -> Found:
    """What is found with as much recomputation as asked for.

    Args:
        attempt: searches with a recomputation; the second of what it gives is the solution.
        options: the recomputations that there are, from little time to little memory.

    Raises:
        InfeasibleError: nothing fits with any that was tried.
    """
    if remat is None:
        return attempt(None)
    if remat == "full":
        return attempt(next(reversed(options()), None))
    found: list[Found] = []
    failure: InfeasibleError | None = None
    try:
        found.append(attempt(None))
        if remat == "fit" or not found[0][1].hints.price:  # memory does not bind: what runs again could only add time
            return found[0]
    except InfeasibleError as error:
        failure = error
    found += _least_that_fits(attempt, options())
    if not found and failure is not None:
        raise failure
    return min(found, key=lambda each: each[1].judgement.cost.makespan_seconds)


def _least_that_fits(attempt: Callable[[Remat | None], Found], options: Sequence[Remat]) -> list[Found]:
    """What is found with those that fit, down to the one that takes least time, by bisection."""
    found: list[Found] = []
    first, last = 0, len(options) - 1
    number = last  # where nothing fits with this one, nothing fits
    while first <= last:
        try:
            found.append(attempt(options[number]))
            last = number - 1
        except InfeasibleError:
            if not found:
                break
            first = number + 1
        except SearchLimitError:
            break
        number = (first + last) // 2
    return found
