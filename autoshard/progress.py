"""Progress callbacks of searches."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, float], None]
"""Called with the name of the present step and the fraction of it that is done."""


def silent(_: str, __: float) -> None:
    """The progress callback that shows nothing."""


def part(progress: Progress, before: float, share: float) -> Progress:
    """The callback of one part of some work.

    Args:
        before: the fraction of the work that was done before it.
        share: the part's own fraction of the work.

    >>> part(print, 0.5, 0.25)("the third quarter", 0.5)
    the third quarter 0.625
    """
    return lambda what, fraction: progress(what, before + share * fraction)
