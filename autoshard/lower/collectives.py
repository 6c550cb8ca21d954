"""The collectives of a plan as one device calls them, inside `jax.shard_map` over all axes of the mesh.

A step of a reshard, or of a combination of partial results, becomes the one collective that it is named after: a slice takes this
device's part and sends nothing, a reduce_scatter is `jax.lax.psum_scatter`, and an all_gather over two axes is one all_gather.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.cost.reshard import Step
from autoshard.ir import Layout, Mesh, local_shape, shard_counts

ReshardPath = Callable[[int, Layout, Layout], Sequence[Step]]
"""``(value number, source, target)`` to the steps between the two layouts."""


def start_of(layout: Layout, dim: int, size: int, mesh: Mesh) -> Any:
    """Where this device's part of a dimension begins, ``size`` elements long, in an array of this layout."""
    axes = tuple(name for name, sharded in zip(mesh.names, layout, strict=True) if sharded == dim)
    return lax.axis_index(axes) * size if axes else 0


def moved(x: Any, step: Step, mesh: Mesh) -> Any:
    """This device's part after one step of a reshard, or after one combination of partial results."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = moved(jax.random.key_data(x), step, mesh)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    if not (several := tuple(axis for axis in step.axes if mesh.sizes[axis] > 1)):  # one device has all there is
        return x
    step, axes = replace(step, axes=several), tuple(mesh.names[axis] for axis in several)
    if step.kind == "slice":
        return _sliced(x, step, mesh)
    if step.kind == "all_reduce":
        return combined(x, "sum", axes)
    if not x.size:  # what is empty is not sent
        return lax.full(_after(x.shape, step, mesh), 0, x.dtype)
    if step.kind == "all_gather":
        return lax.all_gather(x, axes, axis=step.source[step.axes[0]], tiled=True)
    if step.kind == "all_to_all":
        source, target = step.source[step.axes[0]], step.target[step.axes[0]]
        return lax.all_to_all(x, axes, split_axis=target, concat_axis=source, tiled=True)
    if step.kind == "reduce_scatter":
        return _scattered(x, step, mesh)
    return _permuted(x, step, mesh)


def combined(x: Any, operator: str, axes: tuple[str, ...]) -> Any:
    """What the partial results of all devices along some axes come to, on each of them."""
    if not x.size:
        return x
    if x.dtype == bool:
        number = x.astype(jnp.uint8)
        return (lax.pmin if operator in ("and", "min") else lax.pmax)(number, axes).astype(bool)
    if operator == "prod":  # JAX has no all_reduce that multiplies
        return lax.all_gather(x, axes).prod(0, dtype=x.dtype)
    return _COMBINE[operator](x, axes)


_COMBINE: dict[str, Callable[[Any, tuple[str, ...]], Any]] = {"sum": lax.psum, "max": lax.pmax, "min": lax.pmin}


def _sliced(x: Any, step: Step, mesh: Mesh) -> Any:
    """The part of what this device has that is its own along some more axes."""
    new = tuple(after if before < 0 else -1 for before, after in zip(step.source, step.target, strict=True))
    for dim in sorted(set(new) - {-1}):
        size = x.shape[dim] // shard_counts(new, x.ndim, mesh.sizes)[dim]
        x = lax.dynamic_slice_in_dim(x, start_of(new, dim, size, mesh), size, dim)
    return x


def _scattered(x: Any, step: Step, mesh: Mesh) -> Any:
    """The sum over some axes of which each device keeps its part: one reduce_scatter for each dimension that is scattered."""
    dims = [step.target[axis] for axis in step.axes]
    for dim in dict.fromkeys(dims):
        axes = tuple(mesh.names[axis] for axis, other in zip(step.axes, dims, strict=True) if other == dim)
        x = lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)
    return x


def _after(shape: Sequence[int], step: Step, mesh: Mesh) -> tuple[int, ...]:
    """The shape of a device's part after a step that finds one of this shape."""
    before, after = (shard_counts(layout, len(shape), mesh.sizes) for layout in (step.source, step.target))
    return tuple(n * b // a for n, b, a in zip(shape, before, after, strict=True))


def _permuted(x: Any, step: Step, mesh: Mesh) -> Any:
    """The piece that another device has of this one's part: each sends one."""
    shape = tuple(n * count for n, count in zip(x.shape, shard_counts(step.source, x.ndim, mesh.sizes), strict=True))
    pairs, starts = _exchanges(shape, step.source, step.target, step.axes, mesh)
    if any(map(any, starts)) or _after(x.shape, step, mesh) != x.shape:
        at = jnp.asarray(starts, np.int32)[lax.axis_index(mesh.names)]
        x = lax.dynamic_slice(x, list(at), _after(x.shape, step, mesh))
    return lax.ppermute(x, mesh.names, pairs)


@cache
def _exchanges(
    shape: tuple[int, ...], source: Layout, target: Layout, axes: tuple[int, ...], mesh: Mesh
) -> tuple[tuple[tuple[int, int], ...], tuple[tuple[int, ...], ...]]:
    """Which device sends to which, and where in its part the piece begins that it sends.

    As many devices have a part as want a piece of it. Of those that agree in their places along all axes but the given ones, whoever wants
    what it has keeps it, and the others are paired in mesh order.
    """
    places = list(product(*map(range, mesh.sizes)))
    part = tuple(map(int, local_shape(shape, source, mesh.sizes)))
    have, want = ([_corner(place, layout, shape, mesh) for place in places] for layout in (source, target))
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, corner in enumerate(have):
        holders.setdefault(corner, []).append(device)
    # Per device the corner of the part in which the piece that it wants lies.
    inside = [tuple(at // n * n for at, n in zip(corner, part, strict=True)) for corner in want]

    def fixed(device: int) -> tuple[int, ...]:
        return tuple(index for axis, index in enumerate(places[device]) if axis not in axes)

    senders = {device: device for device, corner in enumerate(have) if inside[device] == corner}
    for device in senders:
        holders[have[device]].remove(device)
    for device, corner in enumerate(inside):
        if device not in senders:
            senders[device] = min(holders[corner], key=lambda other: (fixed(other) != fixed(device), other))
            holders[corner].remove(senders[device])
    starts: list[tuple[int, ...]] = [()] * len(places)
    for device, sender in senders.items():
        starts[sender] = tuple(b - a for a, b in zip(have[sender], want[device], strict=True))
    return tuple(sorted((sender, device) for device, sender in senders.items())), tuple(starts)


def _corner(place: Sequence[int], layout: Layout, shape: tuple[int, ...], mesh: Mesh) -> tuple[int, ...]:
    """Where the part of the device at a place of the mesh begins."""
    position = [0] * len(shape)
    for axis, dim in enumerate(layout):
        if dim >= 0:
            position[dim] = position[dim] * mesh.sizes[axis] + place[axis]
    return tuple(p * int(n) for p, n in zip(position, local_shape(shape, layout, mesh.sizes), strict=True))
