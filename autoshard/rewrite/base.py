"""Rewrites of a traced program that keep its results, as values that are recorded with a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, Self

from autoshard.errors import TraceError
from autoshard.trace import Traced


class Rewrite(Protocol):
    """One rewrite, a frozen value.

    Attributes:
        kind: the name under which it is recorded.

    One with a method ``divisible(traced)`` is applied to microbatches or stages of the program that this gives.
    """

    kind: ClassVar[str]

    def apply(self, traced: Traced) -> Traced:
        """The program rewritten, with equal results; equations keep where they come from.

        Raises:
            TraceError: it is not a program that this rewrite was made for.
        """
        ...

    def json(self) -> dict[str, Any]:
        """The fields as JSON values."""
        ...

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        """The rewrite with these fields.

        Raises:
            ValueError, KeyError, TypeError: they are not its own.
        """
        ...

    def describe(self) -> str:
        """What it does, in a sentence without a full stop."""
        ...


def rewritten(traced: Traced, rewrites: Sequence[Rewrite]) -> Traced:
    """The program with rewrites applied, one after the other; itself where it has them already.

    Raises:
        TraceError: it is not a program that these rewrites were made for.
    """
    if traced.rewrites == tuple(rewrites):
        return traced
    for rewrite in rewrites[len(traced.rewrites) :]:
        divisible = getattr(rewrite, "divisible", None)
        before = traced.undivided if divisible is None or traced.undivided is not None else divisible(traced)
        traced = replace(rewrite.apply(traced), rewrites=(*traced.rewrites, rewrite), undivided=before)
    return traced


def divisible(traced: Traced) -> Traced:
    """The program that is divided into microbatches or stages: before the rewrites that are applied to these."""
    return traced if traced.undivided is None else traced.undivided


def divided(traced: Traced, divide: Callable[[Traced], Traced]) -> Traced:
    """The program in microbatches or stages.

    Args:
        divide: gives the program that it is given in these; itself where that is one microbatch.

    Raises:
        TraceError: it does not run in them, or not with its rewrites and recomputation.
    """
    before = divisible(traced)
    if before is traced:
        return divide(traced)
    made = divide(before)
    if made is before:
        return traced
    if traced.remat is not None:
        said = "; ".join(rewrite.describe() for rewrite in traced.rewrites)
        raise TraceError(
            f"what is computed again is chosen for the whole batch, and {traced.graph.name!r} has rewrites that are made for each "
            f"microbatch: {said}. Use remat=None, or microbatches=1."
        )
    return rewritten(made, traced.rewrites)
