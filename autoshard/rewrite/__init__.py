"""Rewrites of the program that a search may choose; each keeps the results."""

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.errors import StrategyError
from autoshard.rewrite.attention import FusedAttention
from autoshard.rewrite.attention import proposals as fused_attention
from autoshard.rewrite.attention_check import compared
from autoshard.rewrite.base import Rewrite, divided, divisible, rewritten
from autoshard.rewrite.experts import PackedExperts
from autoshard.rewrite.experts import proposals as packed_experts
from autoshard.rewrite.options import Proposals, Rewriting
from autoshard.rewrite.padding import Padded, Padding, padded_alike, stays_whole
from autoshard.rewrite.padding import proposals as padded

__all__ = [
    "PROPOSALS",
    "FusedAttention",
    "Padded",
    "Padding",
    "Rewrite",
    "Rewriting",
    "compared",
    "divided",
    "divisible",
    "from_json",
    "padded_alike",
    "rewritten",
    "stays_whole",
    "to_json",
]

KINDS: dict[str, type[Rewrite]] = {each.kind: each for each in (FusedAttention, PackedExperts, Padded)}

PROPOSALS: tuple[Proposals, ...] = (fused_attention, packed_experts, padded)
"""In the order in which they are applied."""


def to_json(rewrites: Sequence[Rewrite]) -> tuple[dict[str, Any], ...]:
    """Rewrites as JSON values, as a strategy's record has them."""
    return tuple({"kind": rewrite.kind, **rewrite.json()} for rewrite in rewrites)


def from_json(records: Sequence[Mapping[str, Any]]) -> tuple[Rewrite, ...]:
    """The rewrites of a record.

    Raises:
        StrategyError: one is not known, or has other fields.
    """
    found: list[Rewrite] = []
    for record in records:
        fields = {name: value for name, value in record.items() if name != "kind"}
        kind = KINDS.get(record.get("kind", ""))
        if kind is None:
            raise StrategyError(f"a rewrite is one of {', '.join(KINDS) or 'none'}, got {record.get('kind')!r}. Search again.")
        try:
            found.append(kind.from_json(fields))
        except (KeyError, TypeError, ValueError) as error:
            raise StrategyError(f"the rewrite {record.get('kind')!r} of this strategy cannot be read: {error}. Search again.") from None
    return tuple(found)
