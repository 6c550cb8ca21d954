"""Collectives for every element type, to be called inside `jax.shard_map`.

Each is JAX's own, except on the platforms whose compiler lacks it for the type (`autoshard.compilers.lacking`). There 8-bit floats are
moved as integers and combined as float32, and complex numbers scattered as real and imaginary parts. Sums of 64-bit floats are scattered
by an all_to_all and a local sum, which send as much as a reduce_scatter. The largest of 64-bit numbers are the largest of their leading
halves, and of the trailing halves where the leading ones are equal. Where the largest of floats would leave out NaN, they are sent as
integers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.compilers import dropping_nan, lacking

Axes = tuple[str, ...]
_One = Callable[[Any], Any]

_EXTREMES = {"max": lax.pmax, "min": lax.pmin}


def all_gather(x: Any, axes: Axes, dim: int, groups: list[list[int]] | None = None) -> Any:
    """The shards of all devices of a group, concatenated along a dimension."""
    return _moved("all_gather", x, lambda x: lax.all_gather(x, axes, axis=dim, tiled=True, axis_index_groups=groups))


def all_to_all(x: Any, axes: Axes, split: int, joined: int) -> Any:
    """The parts along dimension ``split`` that the devices of a group send to this one, concatenated along ``joined``."""
    return _moved("all_to_all", x, lambda x: lax.all_to_all(x, axes, split_axis=split, concat_axis=joined, tiled=True))


def permute(x: Any, axes: Axes, pairs: Sequence[tuple[int, int]]) -> Any:
    """The array of the device that sends to this one; zeros where none does.

    Args:
        axes: in the order in which pairs number devices. JAX numbers them in the order of its mesh, whatever the order of the axes is.
    """
    order = [name for name in jax.sharding.get_abstract_mesh().axis_names if name in axes]
    devices = np.arange(lax.axis_size(axes)).reshape([*map(lax.axis_size, order)])
    numbers = devices.transpose([*map(order.index, axes)]).reshape(-1).tolist()
    pairs = [(numbers[source], numbers[target]) for source, target in pairs]
    return _moved("collective_permute", x, lambda x: lax.ppermute(x, tuple(order), pairs))


def reduce_scatter(x: Any, axes: Axes, dim: int) -> Any:
    """This device's part along a dimension of the sum of a group's arrays."""

    def parts(x: Any) -> Any:
        return lax.complex(reduce_scatter(lax.real(x), axes, dim), reduce_scatter(lax.imag(x), axes, dim))

    def exchanged(x: Any) -> Any:
        n = lax.axis_size(axes)
        by_device = x.reshape(*x.shape[:dim], n, x.shape[dim] // n, *x.shape[dim + 1 :])
        return lax.all_to_all(by_device, axes, dim, dim, tiled=True).sum(dim)

    def direct(x: Any) -> Any:
        return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)

    return _by_platform("reduce_scatter", x, direct, parts if _is_complex(x) else _widened(x, direct) if _is_short(x) else exchanged)


def all_reduce(x: Any, axes: Axes, operator: str) -> Any:
    """The combination of a group's arrays by ``sum``, ``max``, ``min``, ``prod``, or ``and`` and ``or`` of booleans."""
    if x.dtype == bool:
        number = x.astype(jnp.uint8)
        return (lax.pmin if operator in ("and", "min", "prod") else lax.pmax)(number, axes).astype(bool)
    if operator == "prod":  # JAX has no all_reduce that multiplies
        return all_gather(x[None], axes, 0).prod(0, dtype=x.dtype)

    def direct(x: Any) -> Any:
        return lax.psum(x, axes) if operator == "sum" else _EXTREMES[operator](x, axes)

    def widened(x: Any) -> Any:
        return all_reduce(x.astype(jnp.float32), axes, operator).astype(x.dtype)

    def with_nan(x: Any) -> Any:
        return _extreme_of_integers(x, axes, operator)

    otherwise = widened if _is_short(x) else lambda x: _extreme_of_halves(x, axes, operator)
    instead = dict.fromkeys(dropping_nan(x.dtype.name), widened if _is_short(x) else with_nan) if operator in _EXTREMES else None
    return _by_platform(operator, x, direct, otherwise, instead)


def _extreme_of_integers(x: Any, axes: Axes, operator: str) -> Any:
    """The extreme of floats as that of integers of their width in the same order, with NaN beyond all others."""
    ends = jnp.iinfo(f"int{8 * x.dtype.itemsize}")

    def ordered(bits: Any) -> Any:  # its own inverse
        return jnp.where(bits < 0, bits ^ ends.max, bits)

    bits = jnp.where(jnp.isnan(x), getattr(ends, operator), ordered(lax.bitcast_convert_type(x, ends.dtype)))
    return lax.bitcast_convert_type(ordered(_EXTREMES[operator](bits, axes)), x.dtype)


def _extreme_of_halves(x: Any, axes: Axes, operator: str) -> Any:
    """The extreme of 64-bit numbers by two collectives of 32-bit ones."""
    extreme, is_float = _EXTREMES[operator], jnp.issubdtype(x.dtype, jnp.floating)
    if is_float:  # a pair of float32 on these platforms
        high = x.astype(jnp.float32)
        low, ends = jnp.where(jnp.isfinite(high), x - high, 0).astype(jnp.float32), (-np.inf, np.inf)
    else:
        high = (x >> 32).astype(jnp.int32 if jnp.issubdtype(x.dtype, jnp.signedinteger) else jnp.uint32)
        low, ends = x.astype(jnp.uint32), (0, np.iinfo(np.uint32).max)
    first = extreme(high, axes)
    neutral = np.array(ends[operator == "min"], low.dtype)
    second = extreme(jnp.where(high == first, low, neutral), axes)
    leading, trailing = first.astype(x.dtype), second.astype(x.dtype)
    return leading + trailing if is_float else leading << 32 | trailing


def _moved(kind: str, x: Any, move: _One) -> Any:
    """An array after a collective that computes nothing, for which 8-bit floats are integers."""
    return _by_platform(kind, x, move, lambda x: lax.bitcast_convert_type(move(lax.bitcast_convert_type(x, jnp.uint8)), x.dtype))


def _widened(x: Any, combine: _One) -> _One:
    return lambda x: combine(x.astype(jnp.float32)).astype(x.dtype)


def _by_platform(collective: str, x: Any, direct: _One, otherwise: _One, instead: Mapping[str, _One] | None = None) -> Any:
    """The result of a collective: ``otherwise`` where a platform's compiler lacks it for the type, and on platforms what is ``instead``."""
    platforms = {**(instead or {}), **dict.fromkeys(lacking(collective, x.dtype.name), otherwise)}
    return lax.platform_dependent(x, default=direct, **platforms) if platforms else direct(x)


def _is_complex(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.complexfloating)


def _is_short(x: Any) -> bool:
    return x.dtype.itemsize == 1
