"""Sums between parts of a cluster in fewer bits (`autoshard.cost.narrow_sums`), inside `jax.shard_map`.

Numbers are rounded to one of their two neighbours, the nearer one more often in proportion: errors have a mean of zero, and average out
from step to step. What is random comes from a hash of the numbers' own bits and positions: equal programs give equal results, and nothing
is kept between steps. Error feedback would keep what was rounded off, an array as large as all gradients and other on every device: state
of the step that no argument of it has a place for, nor a checkpoint that is restored on another mesh.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from autoshard.cost.narrow_sums import BLOCK, Crossing
from autoshard.lower.element_types import reduce_scatter

WITHIN = {"bfloat16": 2 * 2**-8, "int8": 3 / 127}
"""The largest errors that rounding makes of the largest number of a sum: a unit of each summand and of the sum, which are smaller."""

Axes = Mapping[str, int]
"""Mesh axes with their sizes, in mesh order."""


def narrow_all_reduce(x: Any, axes: Axes, narrow: Mapping[str, Crossing]) -> Any:
    """The sum over some axes, on each device; those of ``narrow`` cross levels."""
    n, width = math.prod(axes.values()), next(iter(narrow.values())).sums
    flat = x.reshape(-1)
    flat = jnp.pad(flat, (0, -flat.size % (n * BLOCK)))
    own = narrow_reduce_scatter(flat, axes, 0, narrow)
    gathered = [lax.all_gather(each, tuple(axes), axis=0, tiled=True) for each in encoded(own[None].astype(jnp.float32), width)]
    return decoded(gathered, flat.size // n).reshape(-1)[: x.size].reshape(x.shape).astype(x.dtype)


def narrow_reduce_scatter(x: Any, axes: Axes, dim: int, narrow: Mapping[str, Crossing]) -> Any:
    """This device's part, along a dimension, of the sum over some axes."""
    dtype, sizes = x.dtype, list(axes.values())
    x = jnp.moveaxis(x, dim, 0)
    shape = x.shape[0] // math.prod(sizes), *x.shape[1:]
    x = x.reshape(*sizes, *shape)
    x = x.astype(jnp.float32) if dtype.itemsize < 4 else x
    for at, axis in enumerate(axes):
        crossing = narrow.get(axis)
        if crossing is None:
            x = reduce_scatter(x, (axis,), at)
            continue
        parts, inside = crossing.parts, crossing.inside
        x = x.reshape(*x.shape[:at], parts, inside, *x.shape[at + 1 :])
        if inside > 1:
            groups = [[part * inside + k for k in range(inside)] for part in range(parts)]
            x = lax.psum_scatter(x, axis, scatter_dimension=at + 1, axis_index_groups=groups, tiled=True)
        groups = None if inside == 1 else [[part * inside + k for part in range(parts)] for k in range(inside)]
        x = _across(jnp.squeeze(x, at + 1), axis, at, crossing, groups)
    return jnp.moveaxis(x.reshape(shape), 0, dim).astype(dtype)


def _across(x: Any, axis: str, at: int, crossing: Crossing, groups: list[list[int]] | None) -> Any:
    """The sum over parts of the cluster of this device's part along a dimension, which keeps size 1."""
    rows = jnp.moveaxis(x, at, 0)
    sent = encoded(rows.reshape(crossing.parts, -1).astype(jnp.float32), crossing.sums)
    got = [lax.all_to_all(each, axis, split_axis=0, concat_axis=0, axis_index_groups=groups, tiled=True) for each in sent]
    summed = decoded(got, rows[0].size).sum(0)
    return jnp.expand_dims(summed.reshape(rows.shape[1:]), at).astype(x.dtype)


def encoded(x: Any, width: str) -> tuple[Any, ...]:
    """Rows of float32 in a narrow type: bfloat16, or int8 with a scale for each block; rounded at random."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK)))
    noise = _noise(x)
    if width == "bfloat16":
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        rounded = ((bits + (noise >> 16)) >> 16).astype(jnp.uint16)  # sent as bits: XLA:CPU sends bfloat16 as float32
        return (jnp.where(jnp.isfinite(x), rounded, lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)),)
    blocks = x.reshape(x.shape[0], -1, BLOCK)
    scales = jnp.max(jnp.abs(blocks), axis=2) / 127
    unit = jnp.where(scales > 0, scales, 1.0)[..., None]
    fraction = (noise >> 8).reshape(blocks.shape).astype(jnp.float32) * 2.0**-24
    codes = jnp.clip(jnp.floor(blocks / unit + fraction), -127, 127).astype(jnp.int8)
    return codes.reshape(x.shape), scales


def decoded(arrays: Sequence[Any], size: int) -> Any:
    """The rows of float32, without padding."""
    codes = arrays[0]
    codes = lax.bitcast_convert_type(codes, jnp.bfloat16) if codes.dtype == jnp.uint16 else codes
    codes = codes.astype(jnp.float32)
    if len(arrays) > 1:
        codes = (codes.reshape(codes.shape[0], -1, BLOCK) * arrays[1][..., None]).reshape(codes.shape)
    return codes[:, :size]


def _noise(x: Any) -> Any:
    """A hash of each number's bits and position (the finalizer of MurmurHash3)."""
    place = lax.broadcasted_iota(jnp.uint32, x.shape, 1) * jnp.uint32(0x9E3779B9)
    bits = lax.bitcast_convert_type(x, jnp.uint32) ^ place
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)


def error_of(width: str, parts: int) -> float:
    """The largest error of a sum of normal numbers over parts of a cluster, of its largest number, as measured here on this machine."""
    x = jax.random.normal(jax.random.key(0), (parts, parts * BLOCK * 8))
    narrow = {"parts": Crossing(parts, 1, width)}
    summed = jax.vmap(lambda x: narrow_all_reduce(x, {"parts": parts}, narrow), axis_name="parts")(x)[0]
    exact = x.sum(0)
    return float(jnp.max(jnp.abs(summed - exact)) / jnp.max(jnp.abs(exact)))
