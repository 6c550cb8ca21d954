"""Rules of dot products and convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.ir import Factor, Rule, Value
from autoshard.rules.registry import Dim, assemble, free, reduced, rule, whole
from autoshard.rules.window import Window


@rule("dot_general")
def dot_general(lhs: Value, rhs: Value, /, *, results: tuple[Value, ...], dimension_numbers: Any, **_) -> Rule:
    """Batch and free dimensions pass through, contracted ones are summed: ``([i, k], [k, j])->([i, j]) reduction={k}``."""
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = dimension_numbers
    left, right = free(lhs.shape), free(rhs.shape)
    for a, b in zip(lhs_contracting, rhs_contracting, strict=True):
        left[a] = right[b] = reduced(lhs.shape[a], "sum", results[0].dtype)
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
    """A dot product whose ragged and group dimensions stay whole, since the boundaries of groups are data.

    Batches, and other dimensions before the ragged one, may have sizes of their own.
    """
    numbers = ragged_dot_dimension_numbers
    (lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch) = numbers.dot_dimension_numbers
    groups = tuple(numbers.rhs_group_dimensions)
    left, right = free(lhs.shape), free(rhs.shape)
    for a, b in zip(lhs_contracting, rhs_contracting, strict=True):
        left[a] = right[b] = reduced(lhs.shape[a], "sum", results[0].dtype)
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
    sizes: list[Factor] = whole(group_sizes.shape)
    if group_sizes.rank > 1:
        (ragged,) = numbers.lhs_ragged_dimensions
        sizes[:-1] = _own_sizes(left, ragged, lhs_contracting, lhs_batch)
    return assemble([left, right, sizes], [dims])


def _own_sizes(left: list[Factor], ragged: int, contracting: Sequence[int], batch: Sequence[int]) -> list[Factor]:
    """The dimensions of the left operand that have group sizes of their own: batches, and those before the ragged one of its kind."""
    if ragged in batch:
        return [left[d] for d in batch[: batch.index(ragged)]]
    free = [d for d in range(len(left)) if d not in contracting and d not in batch]
    kind = list(contracting) if ragged in contracting else free
    return [left[d] for d in (*batch, *kind[: kind.index(ragged)])]


def _others(dims: list[Factor], *taken: tuple[int, ...]) -> list[Factor]:
    return [dim for d, dim in enumerate(dims) if not any(d in some for some in taken)]


def conv_window(params: Mapping[str, Any], rhs: Sequence[int], out: Sequence[int], k: int) -> tuple[Window, bool]:
    """The window that slides along the k-th spatial dimension of the left operand, and whether its steps are the right one's elements.

    Usually the right operand is the window and the result has the steps. In a kernel's gradient the right operand is the
    longer one: its elements are the steps, and the result is the window.

    Args:
        params: of the convolution.
        rhs, out: the shapes of the right operand and of the result.
        k: which spatial dimension.
    """
    numbers = params["dimension_numbers"]
    window, steps = rhs[numbers.rhs_spec[2 + k]], out[numbers.out_spec[2 + k]]
    stride, spread, dilation = (params[name][k] for name in ("window_strides", "lhs_dilation", "rhs_dilation"))
    low = params["padding"][k][0]
    if window > steps:
        return Window((steps - 1) * stride + 1, dilation, spread, low), True
    return Window((window - 1) * dilation + 1, stride, spread, low), False


@rule("conv_general_dilated")
def conv_general_dilated(
    lhs: Value,
    rhs: Value,
    /,
    *,
    results: tuple[Value, ...],
    feature_group_count: int,
    batch_group_count: int,
    **params: Any,
) -> Rule:
    """Batch and output features pass through, input features are summed, spatial shards exchange halos.

    In a kernel's gradient spatial dimensions are summed, too. They stay whole where halos differ in size. The dimensions that a grouped
    convolution groups (features, or the batch and the output features) stay whole: XLA:CPU aborts on some of these.
    """
    (out,) = results
    numbers = params["dimension_numbers"]
    left, right, result = (list[Dim](whole(v.shape)) for v in (lhs, rhs, out))
    batch, channels, *space = numbers.lhs_spec
    features, depth, *window = numbers.rhs_spec
    out_batch, out_features, *out_space = numbers.out_spec
    if batch_group_count == 1:
        left[batch] = result[out_batch] = Factor(lhs.shape[batch])
    if feature_group_count == 1:
        left[channels] = right[depth] = reduced(lhs.shape[channels], "sum", out.dtype)
    if feature_group_count == batch_group_count == 1:
        right[features] = result[out_features] = Factor(rhs.shape[features])
    for k, (d, w, o) in enumerate(zip(space, window, out_space, strict=True)):
        moving, summed = conv_window(params, rhs.shape, out.shape, k)
        if summed:
            left[d], right[w] = moving.dims(lhs.shape[d], rhs.shape[w], moving.sends(0), "sum")
        else:
            left[d], result[o] = moving.dims(lhs.shape[d], out.shape[o], moving.sends(0))
    return assemble([left, right], [result])
