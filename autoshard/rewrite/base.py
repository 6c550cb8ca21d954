"""Rewrites of a traced program that keep its results, as values that are recorded with a plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol, Self

from autoshard.trace import Traced


class Rewrite(Protocol):
    """One rewrite, a frozen value.

    Attributes:
        kind: the name under which it is recorded.
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
        traced = replace(rewrite.apply(traced), rewrites=(*traced.rewrites, rewrite))
    return traced
