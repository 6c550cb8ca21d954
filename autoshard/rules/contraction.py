"""Primitives that multiply and sum: dot products and convolutions."""

from __future__ import annotations

from typing import Any

from autoshard.ir import Factor, Rule, Value
from autoshard.rules.registry import Dim, assemble, free, rule, whole


@rule("dot_general")
def dot_general(lhs: Value, rhs: Value, /, *, results: tuple[Value, ...], dimension_numbers: Any, **_) -> Rule:
    """Batch and free dimensions pass through, contracted ones are summed: ``([i, k], [k, j])->([i, j]) reduction={k}``."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers
    left, right = free(lhs.shape), free(rhs.shape)
    for a, b in zip(lhs_contracting, rhs_contracting, strict=True):
        left[a] = right[b] = Factor(lhs.shape[a], "reduction", "sum")
    for a, b in zip(lhs_batch, rhs_batch, strict=True):
        right[b] = left[a]
    return assemble(
        [left, right],
        [[*(left[d] for d in lhs_batch), *_others(left, lhs_contracting, lhs_batch), *_others(right, rhs_contracting, rhs_batch)]],
    )


@rule("ragged_dot_general")
def ragged_dot_general(
    lhs: Value, rhs: Value, group_sizes: Value, /, *, results: tuple[Value, ...], ragged_dot_dimension_numbers: Any, **_
) -> Rule:
    """As a dot product whose ragged and group dimensions stay whole, since a group may lie anywhere in them."""
    numbers = ragged_dot_dimension_numbers
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    left, right = free(lhs.shape), free(rhs.shape)
    for a, b in zip(lhs_contracting, rhs_contracting, strict=True):
        left[a] = right[b] = Factor(lhs.shape[a], "reduction", "sum")
    for a, b in zip(lhs_batch, rhs_batch, strict=True):
        right[b] = left[a]
    for d in numbers.lhs_ragged_dimensions:
        ragged = Factor(lhs.shape[d], "need_replication")
        right = [ragged if dim is left[d] else dim for dim in right]
        left[d] = ragged
    for d in groups:
        right[d] = Factor(rhs.shape[d], "need_replication")
    dims = [
        *(left[d] for d in lhs_batch),
        *_others(left, lhs_contracting, lhs_batch),
        *_others(right, rhs_contracting, (*rhs_batch, *groups)),
    ]
    if len(dims) < results[0].rank:  # the contracted dimension is the ragged one: a result for each group
        dims = [Factor(results[0].shape[0], "need_replication"), *dims]
    return assemble([left, right, whole(group_sizes.shape)], [dims])


def _others(dims: list[Factor], *taken: tuple[int, ...]) -> list[Factor]:
    return [dim for d, dim in enumerate(dims) if not any(d in some for some in taken)]


@rule("conv_general_dilated")
def conv_general_dilated(
    lhs: Value,
    rhs: Value,
    /,
    *,
    results: tuple[Value, ...],
    dimension_numbers: Any,
    window_strides: tuple[int, ...],
    padding: tuple[tuple[int, int], ...],
    lhs_dilation: tuple[int, ...],
    feature_group_count: int,
    batch_group_count: int,
    **_,
) -> Rule:
    """Batch and output features pass through, input features are summed, spatial dimensions stay whole.

    A window of one element that neither strides nor pads leaves its spatial dimension free. What a grouped convolution
    groups (features, or the batch and the output features) stays whole: XLA:CPU aborts the process on some of it.
    """
    (out,) = results
    numbers = dimension_numbers
    left, right, result = (list[Dim](whole(v.shape)) for v in (lhs, rhs, out))
    batch, channels, *space = numbers.lhs_spec
    features, depth, *window = numbers.rhs_spec
    out_batch, out_features, *out_space = numbers.out_spec
    if batch_group_count == 1:
        left[batch] = result[out_batch] = Factor(lhs.shape[batch])
    if feature_group_count == 1:
        left[channels] = right[depth] = Factor(lhs.shape[channels], "reduction", "sum")
    if feature_group_count == batch_group_count == 1:
        right[features] = result[out_features] = Factor(rhs.shape[features])
    for k, (d, w, o) in enumerate(zip(space, window, out_space, strict=True)):
        if rhs.shape[w] == window_strides[k] == lhs_dilation[k] == 1 and tuple(padding[k]) == (0, 0):
            left[d] = result[o] = Factor(lhs.shape[d])
    return assemble([left, right], [result])
