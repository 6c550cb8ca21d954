"""Rewrites of a traced program that keep its results, applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from autoshard.errors import TraceError
from autoshard.ir.rewrites import FusedAttention, Microbatches, Offload, OneProgram, PackedExperts, Padded, Recompute, Rewrite, variant
from autoshard.microbatch import microbatched
from autoshard.recompute import offloaded, recomputed
from autoshard.rewrite.attention import with_fused_attention
from autoshard.rewrite.experts import packed_experts
from autoshard.rewrite.grouped_kernels import with_grouped_products
from autoshard.rewrite.one_program import in_one_program
from autoshard.rewrite.padding import padded
from autoshard.trace import Traced

APPLIED: Mapping[type[Rewrite], Callable[[Any, Traced], Traced]] = {
    FusedAttention: with_fused_attention,
    PackedExperts: packed_experts,
    Padded: padded,
    Recompute: recomputed,
    Microbatches: microbatched,
    OneProgram: in_one_program,
    Offload: offloaded,
}
"""What gives a program with one more rewrite, its last: results are equal, and equations keep where they come from."""

DIVIDED: Mapping[type[Rewrite], Callable[[Traced], Traced]] = {PackedExperts: with_grouped_products}
"""For kinds that microbatches and stages get each by itself, the program that is divided into these; else the one that is rewritten."""


def applied(rewrite: Rewrite, traced: Traced) -> Traced:
    """The program with one more rewrite.

    Raises:
        TraceError: it is not a program that this rewrite was made for.
    """
    return APPLIED[type(rewrite)](rewrite, traced)


def rewritten(traced: Traced, rewrites: Sequence[Rewrite]) -> Traced:
    """The program with rewrites applied, one after the other; itself where it has them already.

    Raises:
        TraceError: it is not a program that these rewrites were made for.
    """
    for rewrite in rewrites[len(traced.rewrites) :]:
        traced = _divided(traced, rewrite) if isinstance(rewrite, Microbatches | OneProgram) else _noted(traced, rewrite)
    return traced


def _noted(traced: Traced, rewrite: Rewrite) -> Traced:
    """The program with one more rewrite, which knows what it was before those that are applied to its parts."""
    divided = DIVIDED.get(type(rewrite))
    before = traced.undivided if divided is None or traced.undivided is not None else divided(traced)
    return replace(applied(rewrite, traced), undivided=before)


def divisible(traced: Traced) -> Traced:
    """The program that is divided into microbatches or stages: before the rewrites that are applied to these."""
    return traced if traced.undivided is None else traced.undivided


def _divided(traced: Traced, divide: Microbatches | OneProgram) -> Traced:
    """The program in microbatches or stages, to each of which its rewrites are applied that come before those of its own form.

    Raises:
        TraceError: it does not run in them, or not with its rewrites and recomputation.
    """
    before = divisible(traced)
    if before is traced or (made := applied(divide, before)) is before:
        return applied(divide, traced)
    if traced.remat is not None:
        said = "; ".join(rewrite.describe() for rewrite in variant(traced.rewrites))
        raise TraceError(
            f"what is computed again is chosen for the whole batch, and {traced.graph.name!r} has rewrites that are made for each "
            f"microbatch: {said}. Use remat=None, or microbatches=1."
        )
    for rewrite in traced.rewrites[len(before.rewrites) :]:
        made = _noted(made, rewrite)
    return replace(made, rewrites=(*traced.rewrites, divide))
