"""Lowering of reshard steps and combinations to JAX's collectives, inside `jax.shard_map` over all axes of the mesh.

Each step becomes one collective (`autoshard.lower.element_types`): an all_gather over two axes is one all_gather, and a slice is local.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.cost.permute import exchange
from autoshard.cost.reshard import Step
from autoshard.ir import Layout, Mesh, shard_counts
from autoshard.lower.element_types import all_gather, all_reduce, all_to_all, permute, reduce_scatter


def start_of(layout: Layout, dim: int, size: int, mesh: Mesh) -> Any:
    """The offset of this device's shard along a dimension of an array in this layout; ``size`` is the shard's size."""
    axes = tuple(name for name, sharded in zip(mesh.names, layout, strict=True) if sharded == dim)
    return lax.axis_index(axes) * size if axes else 0


def moved(x: Any, step: Step, mesh: Mesh) -> Any:
    """This device's shard after one step of a reshard, or after a reduce_scatter along one dimension."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        words = moved(jax.random.key_data(x), step, mesh)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
    axes = tuple(mesh.names[axis] for axis in step.axes)
    if step.kind == "slice":
        return _sliced(x, step, mesh)
    if not x.size:  # empty arrays are not sent
        return lax.reshape(x, _after(x.shape, step, mesh))
    if step.kind == "all_gather":
        return all_gather(x, axes, step.source[step.axes[0]], _groups(step, mesh))
    if step.kind == "all_to_all":
        return all_to_all(x, axes, step.target[step.axes[0]], step.source[step.axes[0]])
    if step.kind == "reduce_scatter":
        return reduce_scatter(x, axes, step.target[step.axes[0]])
    return _permuted(x, step, mesh)


def combined(x: Any, operator: str, axes: tuple[str, ...]) -> Any:
    """The combination of the partial results of all devices along some axes, on each of them."""
    return all_reduce(x, axes, operator) if x.size else x


def _groups(step: Step, mesh: Mesh) -> list[list[int]] | None:
    """The places on a step's axis of the devices of each group; None where all devices of its axes are one group."""
    if step.groups is None:
        return None
    (size, stride), (axis,) = step.groups, step.axes
    places = np.arange(mesh.sizes[axis]).reshape(-1, size, stride)
    return places.transpose(0, 2, 1).reshape(-1, size).tolist()


def _sliced(x: Any, step: Step, mesh: Mesh) -> Any:
    """The slice of this device's shard along the axes that are new in the target."""
    new = tuple(after if before < 0 else -1 for before, after in zip(step.source, step.target, strict=True))
    for dim in sorted(set(new) - {-1}):
        size = x.shape[dim] // shard_counts(new, x.ndim, mesh.sizes)[dim]
        x = lax.dynamic_slice_in_dim(x, start_of(new, dim, size, mesh), size, dim)
    return x


def _after(shape: Sequence[int], step: Step, mesh: Mesh) -> tuple[int, ...]:
    """The shape of a device's shard after a step, given the shape before."""
    before, after = (shard_counts(layout, len(shape), mesh.sizes) for layout in (step.source, step.target))
    return tuple(n * b // a for n, b, a in zip(shape, before, after, strict=True))


def _permuted(x: Any, step: Step, mesh: Mesh) -> Any:
    """This device's shard after a permute: the piece of it that another device sends."""
    found, size = exchange(step.source, step.target, x.ndim, mesh.sizes), _after(x.shape, step, mesh)
    if size != x.shape:
        starts = (found.starts * np.array(size)).astype(np.int32)
        x = lax.dynamic_slice(x, list(jnp.asarray(starts)[lax.axis_index(mesh.names)]), size)
    return permute(x, mesh.names, found.pairs.tolist())
