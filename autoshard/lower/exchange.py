"""What one device computes of an op whose shards need each other's data, and the collectives that they send it by.

A body in `BODIES` makes the sends of its rule, in the rule's order. Axes that share a factor act as one, in mesh order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.ir import Dims, Rule
from autoshard.rules.contraction import conv_window
from autoshard.rules.window import Window, pool_window

Bind = Callable[..., Sequence[Any]]
"""An operation's primitive bound on operands, given one by one, some of its parameters replaced."""


@dataclass(frozen=True, slots=True)
class Split:
    """A factor whose shards send each other data.

    Attributes:
        factor: its number in the rule.
        axes: the names of the mesh axes that split it, in mesh order.
        shards: into how many.
    """

    factor: int
    axes: tuple[str, ...]
    shards: int

    def gathered(self, x: Any, dim: int) -> Any:
        """What all shards hold, put together along a dimension."""
        return lax.all_gather(x, self.axes, axis=dim, tiled=True)

    def permuted(self, x: Any, target: Callable[[int], int]) -> Any:
        """What the shard holds of which this one is the target; zeros where that would be none."""
        pairs = [(shard, target(shard)) for shard in range(self.shards)]
        return lax.ppermute(x, self.axes, [(source, to) for source, to in pairs if 0 <= to < self.shards])

    def with_halos(self, x: Any, dim: int, window: Window, fill: Any) -> Any:
        """The shard between what its window reads of the shards beside it; ``fill`` is what lies beyond the first and the last."""
        size, pieces = x.shape[dim], [x]
        for count, step in zip(window.halo, (1, -1), strict=True):
            if count:
                edge = lax.slice_in_dim(x, size - count, size, axis=dim) if step > 0 else lax.slice_in_dim(x, 0, count, axis=dim)
                halo = self.permuted(edge, lambda shard, step=step: shard + step)
                outermost = self.index == (0 if step > 0 else self.shards - 1)
                halo = jnp.where(outermost, jnp.asarray(fill, x.dtype), halo)
                pieces = [halo, *pieces] if step > 0 else [*pieces, halo]
        return lax.concatenate(pieces, dim)

    def without_halos(self, x: Any, dim: int, window: Window) -> Any:
        """What all shards have added up for this one: its own part of their sums, and what comes back of the neighbours' halos."""
        before, behind = window.halo
        size = x.shape[dim] - before - behind
        own = lax.slice_in_dim(x, before, before + size, axis=dim)
        for count, step in ((before, -1), (behind, 1)):
            if count:
                edge = lax.slice_in_dim(x, 0, count, axis=dim) if step < 0 else lax.slice_in_dim(x, before + size, None, axis=dim)
                came = self.permuted(edge, lambda shard, step=step: shard + step)
                at = (size - count, 0, 0) if step < 0 else (0, size - count, 0)
                own += lax.pad(came, jnp.zeros((), x.dtype), [at if d == dim else (0, 0, 0) for d in range(x.ndim)])
        return own

    @property
    def index(self) -> Any:
        """Which shard this device holds."""
        return lax.axis_index(self.axes)


def _dim_of(dims: Dims, split: Split) -> int:
    return next(dim for dim, factors in enumerate(dims) if split.factor in factors)


_JOINED = {"cumsum": lax.add, "cumprod": lax.mul, "cummax": lax.max, "cummin": lax.min, "cumlogsumexp": jnp.logaddexp}


def _cumulative(join: Callable[[Any, Any], Any]):
    def cumulative(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], x: Any) -> list[Any]:
        """The shard's own, joined to what the shards before it (behind it, in reverse) come to, which every device accumulates."""
        (split,), axis, reverse = splits, params["axis"], params["reverse"]
        (own,) = bind(x)
        end = 0 if reverse else own.shape[axis] - 1
        (ends,) = bind(split.gathered(lax.slice_in_dim(own, end, end + 1, axis=axis), axis))
        first, before = (split.shards - 1, split.index + 1) if reverse else (0, split.index - 1)
        so_far = lax.dynamic_slice_in_dim(ends, jnp.clip(before, 0, split.shards - 1), 1, axis)
        return [jnp.where(split.index == first, own, join(own, so_far).astype(own.dtype))]

    return cumulative


def _argmax(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], x: Any) -> list[Any]:
    """The first of the shards' finds that is extreme: shards are in order of position, so ties and NaN are as in the whole."""
    (split,), (axis,) = splits, params["axes"]
    (found,) = bind(x)
    place = lax.expand_dims(found, (axis,))
    values = split.gathered(jnp.take_along_axis(x, place, axis), axis)
    places = split.gathered(place + (split.index * x.shape[axis]).astype(place.dtype), axis)
    (best,) = bind(values)
    return [lax.squeeze(jnp.take_along_axis(places, lax.expand_dims(best, (axis,)), axis), (axis,))]


def _top_k(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], x: Any) -> list[Any]:
    """The best of the shards' best: shards are in order of position, and ties within each too."""
    (split,), axis = splits, params["axis"]
    values, places = bind(x)
    values = split.gathered(values, axis)
    places = split.gathered(places + (split.index * x.shape[axis]).astype(places.dtype), axis)
    best, at = bind(values)
    return [best, jnp.take_along_axis(places, at, axis)]


def _rev(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], x: Any) -> list[Any]:
    """The reversed shard of the device opposite."""
    for split in splits:
        x = split.permuted(x, lambda shard, last=split.shards - 1: last - shard)
    return list(bind(x))


def _convolution(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], lhs: Any, rhs: Any) -> list[Any]:
    """The convolution of the shard with its halos, zeros at the ends; it pads no more than they leave to be padded."""
    numbers, padding = params["dimension_numbers"], list(params["padding"])
    left, right, made = (_shape(rule, dims) for dims in (*rule.operands, *rule.results))
    for split in splits:
        dim = _dim_of(rule.operands[0], split)
        k = numbers.lhs_spec.index(dim) - 2
        window, summed = conv_window(params, left, right, made, k)
        size = lhs.shape[dim]
        steps = rhs.shape[numbers.rhs_spec[2 + k]] if summed else size * window.spread // window.stride
        padding[k] = window.padding(size, steps)
        lhs = split.with_halos(lhs, dim, window, 0)
    return list(bind(lhs, rhs, padding=tuple(padding)))


def _shape(rule: Rule, dims: Dims) -> tuple[int, ...]:
    return tuple(math.prod(rule.factors[factor].size for factor in dim) for dim in dims)


def _extreme(dtype: Any, largest: bool) -> Any:
    """The value of this dtype that nothing exceeds, or that exceeds nothing."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.inf if largest else -np.inf
    if jnp.issubdtype(dtype, jnp.bool_):
        return largest
    return jnp.iinfo(dtype).max if largest else jnp.iinfo(dtype).min


Fills = Callable[[Mapping[str, Any], Sequence[Any]], Sequence[Any]]
"""``(params, operands)`` to what a window ignores of each array it slides over."""


def _pool(fills: Fills):
    def pool(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], *operands: Any) -> list[Any]:
        """The pooled shards with their halos; at the ends lies what the window ignores."""
        arrays, ignored, padding = list(operands), fills(params, operands), list(params["padding"])
        for split in splits:
            dim = _dim_of(rule.operands[0], split)
            window, size = pool_window(params, dim), arrays[0].shape[dim]
            padding[dim] = window.padding(size, size * window.spread // window.stride)
            arrays = [split.with_halos(x, dim, window, fill) for x, fill in zip(arrays, ignored, strict=True)]
            if window.span == window.spread == 1:  # of negative padding around windows of one XLA:CPU aborts (jaxlib 0.10.2): crop
                low, high = padding[dim]
                end = arrays[0].shape[dim] + min(high, 0)
                arrays = [lax.slice_in_dim(x, max(-low, 0), end, axis=dim) for x in arrays]
                padding[dim] = max(low, 0), max(high, 0)
        return list(bind(*arrays, padding=tuple(padding)))

    return pool


def _selected(params: Mapping[str, Any], x: Any) -> Any:
    """What a window that selects by ``select_prim`` selects last."""
    return _extreme(x.dtype, params["select_prim"].name == "le")


def _pool_gradient(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], source: Any, x: Any) -> list[Any]:
    """The shard's own windows scattered over it and its halos, whose sums go back to where they came from."""
    padding, dims = list(params["padding"]), [_dim_of(rule.operands[1], split) for split in splits]
    windows = [pool_window(params, dim) for dim in dims]
    for split, dim, window in zip(splits, dims, windows, strict=True):
        padding[dim] = (0, 0)
        x = split.with_halos(x, dim, window, _selected(params, x))
    (sums,) = bind(source, x, padding=tuple(padding))
    for split, dim, window in reversed([*zip(splits, dims, windows, strict=True)]):
        sums = split.without_halos(sums, dim, window)
    return [sums]


BODIES: Mapping[str, Callable[..., list[Any]]] = {
    **{primitive: _cumulative(join) for primitive, join in _JOINED.items()},
    "argmax": _argmax,
    "argmin": _argmax,
    "top_k": _top_k,
    "rev": _rev,
    "conv_general_dilated": _convolution,
    "reduce_window_sum": _pool(lambda params, operands: (0,)),
    "reduce_window_max": _pool(lambda params, operands: (_extreme(operands[0].dtype, False),)),
    "reduce_window_min": _pool(lambda params, operands: (_extreme(operands[0].dtype, True),)),
    "select_and_gather_add": _pool(lambda params, operands: (0, _selected(params, operands[1]))),
    "select_and_scatter_add": _pool_gradient,
}
