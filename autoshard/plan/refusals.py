"""The refusal of a search that has tried other ways, too, or has not."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from autoshard.errors import InfeasibleError, OutOfTime
from autoshard.plan.forms import Form
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


def too_short(seconds: float | None) -> OutOfTime:
    """The end of a search whose time was over before it had found anything."""
    return OutOfTime(
        f"the search was given {seconds:g} s, in which it found no strategy within the memory limit, and not all numbers of "
        "microbatches and recomputations could be searched. Use a longer time_limit_seconds, or a number of microbatches."
    )


def refused_in_all(error: InfeasibleError, first: Form, refused: Mapping[Form, float], reason: str) -> InfeasibleError:
    """The refusal of the first form of a step, with what else was tried.

    Args:
        refused: by form the smallest peak found.
        reason: why there are no microbatches, if there are none.
    """
    text, smallest = str(error), error.smallest_peak_bytes or math.inf
    text += f" Nor could it run in microbatches: {reason}" if reason else ""
    some = ", ".join(map(str, sorted({form.microbatches for form in refused} - {first.microbatches})))
    tried: dict[str, Callable[[Form], bool]] = {
        f"in microbatches, of which {some} were tried": lambda form: form.microbatches > first.microbatches,
        AGAIN: lambda form: form.again != first.again,
        "with kept activations in the memory of hosts": lambda form: form.again is not None and form.again.hosted_bytes > 0,
        "with optimizer state in the memory of hosts": lambda form: form.hosted > first.hosted,
    }
    for words, is_other in tried.items():
        if forms := [form for form in refused if is_other(form)]:
            least = min(refused[form] for form in forms)
            smallest = min(smallest, least)
            text += f" Nor does it fit {words}: the smallest peak is {format_bytes(least)}."
    return InfeasibleError(text, None if smallest == math.inf else smallest, error.proven)
