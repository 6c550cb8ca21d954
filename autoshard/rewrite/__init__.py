"""Rewrites of the program that a search may choose; each keeps the results."""

from autoshard.rewrite.attention import proposals as fused_attention
from autoshard.rewrite.attention_check import compared
from autoshard.rewrite.base import applied, divisible, rewritten
from autoshard.rewrite.experts import proposals as packed_experts
from autoshard.rewrite.options import Proposals, Rewriting
from autoshard.rewrite.padding import Padding, padded_alike, stays_whole
from autoshard.rewrite.padding import proposals as padded

PROPOSALS: tuple[Proposals, ...] = (fused_attention, packed_experts, padded)
"""In the order in which they are applied."""
