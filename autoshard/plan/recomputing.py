"""The recomputation that a search chooses for a step, as the option ``remat`` says."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from autoshard.errors import InfeasibleError, NothingFasterError, SearchLimitError, ShardingError, TraceError
from autoshard.ir.remat import Remat
from autoshard.plan.plan import Plan
from autoshard.plan.refusals import AGAIN, or_refused

WORDS = ("fit", "auto", "full", "replace")

T = TypeVar("T")


def checked_remat(remat: str | None) -> str | None:
    """The option ``remat``, checked.

    Raises:
        ShardingError: there is not.
    """
    if remat is not None and remat not in WORDS:
        raise ShardingError(f"remat is 'fit', 'auto', 'full', 'replace' or None, got {remat!r}. Use 'auto', for instance.")
    return remat


def _fastest(found: Sequence[T], seconds: Callable[[T], float]) -> T:
    """The fastest of what was found.

    Raises:
        InfeasibleError: there is nothing.
    """
    if not found:
        raise InfeasibleError("nothing fits with recomputation.")
    return min(found, key=seconds)


def staged_remat(
    attempt: Callable[[Remat | None], Plan], remat: str | None, options: Callable[[], Sequence[Remat]], first: Remat | None = None
) -> Plan:
    """The pipeline with as much recomputation as asked for, of all stages alike; ``"auto"`` is as ``"fit"``.

    Args:
        first: the one that is tried first; None: no recomputation. Where nothing fits with it, one that keeps less is tried.

    Raises:
        InfeasibleError: no pipeline fits with any that was tried.
        ShardingError: checkpoints are to be replaced.
    """
    if remat == "replace":
        raise ShardingError("remat='replace' is for whole steps: stages keep the step's own checkpoints. Use remat='fit', or no stages.")
    if remat == "full":
        return attempt(next(reversed(options()), None))
    try:
        return attempt(first)
    except InfeasibleError as error:
        choices = () if remat is None else [each for each in options() if first is None or each.kept_bytes < first.kept_bytes]
        if not choices:
            raise
        return or_refused(error, lambda: _fastest(_least_that_fits(attempt, choices), lambda each: each.cost.makespan_seconds), AGAIN)


def _least_that_fits(attempt: Callable[[Remat | None], T], options: Sequence[Remat]) -> list[T]:
    """What is found with those that fit, down to the one that takes least time, by bisection; what is slower than known is left out.

    Nothing where a step of several passes, such as of two optimizers, runs in microbatches without recomputation alone.
    """
    found: list[T] = []
    first, last = 0, len(options) - 1
    number = last  # where nothing fits with this one, nothing fits
    while first <= last:
        try:
            found.append(attempt(options[number]))
            last = number - 1
        except NothingFasterError:
            last = number - 1
        except InfeasibleError:
            if number == len(options) - 1:
                raise
            first = number + 1
        except (SearchLimitError, TraceError):
            break
        number = (first + last) // 2
    return found
