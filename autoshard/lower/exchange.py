"""Lowering of ops whose shards need each other's data: the computation of one device, with its collectives.

A function in `BODIES` makes the sends of its rule, in the rule's order. Axes that split the same factor act as one, in mesh order.
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
from autoshard.lower import ring
from autoshard.lower.element_types import all_gather, permute
from autoshard.rules.contraction import conv_window
from autoshard.rules.shape import shift
from autoshard.rules.window import Window, pool_window

Bind = Callable[..., Sequence[Any]]
"""Binds an operation's primitive: ``(*operands, **replaced parameters)`` to results."""


@dataclass(frozen=True, slots=True)
class Split:
    """A split factor whose shards exchange data.

    Attributes:
        factor: its number in the rule.
        axes: the names of the mesh axes that split it, in mesh order.
        shards: the number of shards.
    """

    factor: int
    axes: tuple[str, ...]
    shards: int

    def gathered(self, x: Any, dim: int) -> Any:
        """The arrays of all shards, concatenated along a dimension."""
        return all_gather(x, self.axes, dim)

    def permuted(self, x: Any, target: Callable[[int], int]) -> Any:
        """The array of the shard whose target is this one; zeros where there is none."""
        pairs = [(shard, target(shard)) for shard in range(self.shards)]
        return permute(x, self.axes, [(source, to) for source, to in pairs if 0 <= to < self.shards])

    def with_halos(self, x: Any, dim: int, window: Window, fill: Any) -> Any:
        """The shard with the halos that its window reads of the neighbouring shards; beyond the first and the last shard is ``fill``."""
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
        """The sums of a shard: its own part of an array with halos, plus the parts of the neighbours' halos that belong to it."""
        before, behind = window.halo
        size = x.shape[dim] - before - behind
        own = lax.slice_in_dim(x, before, before + size, axis=dim)
        for count, step in ((before, -1), (behind, 1)):
            if count:
                edge = lax.slice_in_dim(x, 0, count, axis=dim) if step < 0 else lax.slice_in_dim(x, before + size, None, axis=dim)
                received = self.permuted(edge, lambda shard, step=step: shard + step)
                at = (size - count, 0, 0) if step < 0 else (0, size - count, 0)
                own += lax.pad(received, jnp.zeros((), x.dtype), [at if d == dim else (0, 0, 0) for d in range(x.ndim)])
        return own

    @property
    def index(self) -> Any:
        """The index of this device's shard."""
        return lax.axis_index(self.axes)


def _dim_of(dims: Dims, split: Split) -> int:
    return next(dim for dim, factors in enumerate(dims) if split.factor in factors)


_JOINED = {"cumsum": lax.add, "cumprod": lax.mul, "cummax": lax.max, "cummin": lax.min, "cumlogsumexp": jnp.logaddexp}


def _cumulative(join: Callable[[Any, Any], Any]):
    def cumulative(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], x: Any) -> list[Any]:
        """The accumulation within the shard, joined with that of the shards before it (behind it in reverse), which all devices compute."""
        (split,), axis, reverse = splits, params["axis"], params["reverse"]
        (own,) = bind(x)
        end = 0 if reverse else own.shape[axis] - 1
        (ends,) = bind(split.gathered(lax.slice_in_dim(own, end, end + 1, axis=axis), axis))
        first, before = (split.shards - 1, split.index + 1) if reverse else (0, split.index - 1)
        so_far = lax.dynamic_slice_in_dim(ends, jnp.clip(before, 0, split.shards - 1), 1, axis)
        return [jnp.where(split.index == first, own, join(own, so_far).astype(own.dtype))]

    return cumulative


def _argmax(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], x: Any) -> list[Any]:
    """The first extreme among the shards' own; shards are in order of position, so ties and NaN are as in the whole."""
    (split,), (axis,) = splits, params["axes"]
    (found,) = bind(x)
    place = lax.expand_dims(found, (axis,))
    values = split.gathered(jnp.take_along_axis(x, place, axis), axis)
    places = split.gathered(place + (split.index * x.shape[axis]).astype(place.dtype), axis)
    (best,) = bind(values)
    return [lax.squeeze(jnp.take_along_axis(places, lax.expand_dims(best, (axis,)), axis), (axis,))]


def _top_k(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], x: Any) -> list[Any]:
    """The k best among the k best of each shard; shards are in order of position, so ties are as in the whole."""
    (split,), axis = splits, params["axis"]
    values, places = bind(x)
    values = split.gathered(values, axis)
    places = split.gathered(places + (split.index * x.shape[axis]).astype(places.dtype), axis)
    best, at = bind(values)
    return [best, jnp.take_along_axis(places, at, axis)]


def _rev(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], x: Any) -> list[Any]:
    """The opposite shard, reversed."""
    for split in splits:
        x = split.permuted(x, lambda shard, last=split.shards - 1: last - shard)
    return list(bind(x))


def _pad(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], x: Any, fill: Any) -> list[Any]:
    """The shard with the positions that are shifted into it, and without those that are shifted out."""
    config = list(params["padding_config"])
    for split in splits:
        dim = _dim_of(rule.operands[0], split)
        moved, size = shift(config[dim]), x.shape[dim]
        haloed = split.with_halos(x, dim, Window(abs(moved) + 1, 1, 1, max(moved, 0)), fill)
        start = max(-moved, 0)
        x = lax.slice_in_dim(haloed, start, start + size, axis=dim)
        config[dim] = (0, 0, 0)
    return list(bind(x, fill, padding_config=tuple(config)))


def _convolution(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], lhs: Any, rhs: Any) -> list[Any]:
    """The convolution of the shard with its halos, which are zeros at the ends; the padding is reduced by the halos."""
    numbers, padding = params["dimension_numbers"], list(params["padding"])
    right, made = (_shape(rule, dims) for dims in (rule.operands[1], *rule.results))
    for split in splits:
        dim = _dim_of(rule.operands[0], split)
        k = numbers.lhs_spec.index(dim) - 2
        window, summed = conv_window(params, right, made, k)
        size = lhs.shape[dim]
        steps = rhs.shape[numbers.rhs_spec[2 + k]] if summed else size * window.spread // window.stride
        padding[k] = window.padding(size, steps)
        lhs = split.with_halos(lhs, dim, window, 0)
    return list(bind(lhs, rhs, padding=tuple(padding)))


def _shape(rule: Rule, dims: Dims) -> tuple[int, ...]:
    return tuple(math.prod(rule.factors[factor].size for factor in dim) for dim in dims)


def _extreme(dtype: Any, largest: bool) -> Any:
    """The largest value of a dtype, or the smallest."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.inf if largest else -np.inf
    if jnp.issubdtype(dtype, jnp.bool_):
        return largest
    return jnp.iinfo(dtype).max if largest else jnp.iinfo(dtype).min


Fills = Callable[[Mapping[str, Any], Sequence[Any]], Sequence[Any]]
"""``(params, operands)`` to the neutral element of each array that a window slides over."""


def _pool(fills: Fills):
    def pool(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], *operands: Any) -> list[Any]:
        """The pooled shards with their halos, which are neutral elements at the ends."""
        arrays, neutral, padding = list(operands), fills(params, operands), list(params["padding"])
        for split in splits:
            dim = _dim_of(rule.operands[0], split)
            window, size = pool_window(params, dim), arrays[0].shape[dim]
            padding[dim] = window.padding(size, size * window.spread // window.stride)
            arrays = [split.with_halos(x, dim, window, fill) for x, fill in zip(arrays, neutral, strict=True)]
            if window.span == window.spread == 1:  # XLA:CPU aborts on windows of one with negative padding (jaxlib 0.10.2): crop
                low, high = padding[dim]
                end = arrays[0].shape[dim] + min(high, 0)
                arrays = [lax.slice_in_dim(x, max(-low, 0), end, axis=dim) for x in arrays]
                padding[dim] = max(low, 0), max(high, 0)
        return list(bind(*arrays, padding=tuple(padding)))

    return pool


def _never_selected(params: Mapping[str, Any], x: Any) -> Any:
    """The value that a window selects last by its ``select_prim``."""
    return _extreme(x.dtype, params["select_prim"].name == "le")


def _pool_gradient(bind: Bind, params: Mapping[str, Any], rule: Rule, splits: Sequence[Split], source: Any, x: Any) -> list[Any]:
    """The gradient of the shard's windows with respect to it and its halos, whose sums are sent back to their shards."""
    padding, dims = list(params["padding"]), [_dim_of(rule.operands[1], split) for split in splits]
    windows = [pool_window(params, dim) for dim in dims]
    for split, dim, window in zip(splits, dims, windows, strict=True):
        padding[dim] = (0, 0)
        x = split.with_halos(x, dim, window, _never_selected(params, x))
    (sums,) = bind(source, x, padding=tuple(padding))
    for split, dim, window in reversed([*zip(splits, dims, windows, strict=True)]):
        sums = split.without_halos(sums, dim, window)
    return [sums]


BODIES: Mapping[str, Callable[..., list[Any]]] = {
    **ring.BODIES,
    **{primitive: _cumulative(join) for primitive, join in _JOINED.items()},
    "argmax": _argmax,
    "argmin": _argmax,
    "top_k": _top_k,
    "pad": _pad,
    "rev": _rev,
    "conv_general_dilated": _convolution,
    "reduce_window_sum": _pool(lambda params, operands: (0,)),
    "reduce_window_max": _pool(lambda params, operands: (_extreme(operands[0].dtype, False),)),
    "reduce_window_min": _pool(lambda params, operands: (_extreme(operands[0].dtype, True),)),
    "select_and_gather_add": _pool(lambda params, operands: (0, _never_selected(params, operands[1]))),
    "select_and_scatter_add": _pool_gradient,
}
