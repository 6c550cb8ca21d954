"""Primitives that slide a window: pooling and its gradients."""

from __future__ import annotations

from autoshard.ir import Rule, Value
from autoshard.rules.registry import assemble, free_but, resized, rule


@rule(
    "reduce_window",
    "reduce_window_sum",
    "reduce_window_max",
    "reduce_window_min",
    "select_and_gather_add",
    "select_and_scatter",
    "select_and_scatter_add",
)
def window(
    *operands: Value,
    results: tuple[Value, ...],
    window_dimensions: tuple[int, ...],
    window_strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    base_dilation: tuple[int, ...] | None = None,
    **_,
) -> Rule:
    """Windowed dimensions stay whole, the others (batch, features) pass through; scalars are initial values."""
    dilation = base_dilation or (1,) * len(window_dimensions)
    moves = zip(window_dimensions, window_strides, dilation, padding, strict=True)
    moved = [d for d, (n, stride, spread, pads) in enumerate(moves) if (n, stride, spread, *pads) != (1, 1, 1, 0, 0)]
    dims = free_but(results[0].shape, moved)
    tensors = [resized(dims, v.shape) if v.rank else [] for v in (*operands, *results)]
    return assemble(tensors[: len(operands)], tensors[len(operands) :])
