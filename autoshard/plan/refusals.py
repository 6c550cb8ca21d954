"""The refusal of a search that has tried other ways, too, or has not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from autoshard.errors import InfeasibleError
from autoshard.render import format_bytes

AGAIN = "where the backward pass computes again what it reads"

T = TypeVar("T")


def or_refused(error: InfeasibleError, otherwise: Callable[[], T], tried: str) -> T:
    """What is found otherwise; where nothing is, the first refusal, with what was tried.

    Args:
        otherwise: searches in the other way; its refusal without a smallest peak says that there is no such way.
        tried: the other way, to be read after "Nor does it fit".

    Raises:
        InfeasibleError: nothing fits.
    """
    try:
        return otherwise()
    except InfeasibleError as other:
        if other.smallest_peak_bytes is None:
            raise error from None
        smallest = min(filter(None, (error.smallest_peak_bytes, other.smallest_peak_bytes)))
        raise InfeasibleError(f"{error} Nor does it fit {tried}: the smallest peak is {format_bytes(smallest)}.", smallest) from None


def with_untried(error: InfeasibleError, untried: Sequence[str]) -> InfeasibleError:
    """The refusal with what was not tried."""
    text = f"{error} Not tried: {', '.join(untried)}." if untried else str(error)
    return InfeasibleError(text, error.smallest_peak_bytes, error.proven)
