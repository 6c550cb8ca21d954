"""Collectives over named mesh axes, for communication written by hand inside `jax.shard_map`.

`axes` is the name of a mesh axis, or a tuple of names that act as one. The devices that differ along these axes only are a group of `n`,
and `jax.lax.axis_index(axes)` is a device's rank in its group: row-major in the order of the names. Along the mesh's other axes, each group
communicates by itself. Shapes are those of one device's shard, and sizes are in elements.

Every error is a `ShardingError`: outside shard_map, for an axis that it does not map, and for a shape, dim, rank or reduction that does not
fit.

Each function is a few primitives of `jax.lax` and has a gradient: that of a sharded function is the gradient of the whole that it computes,
with `check_vma` and without. For gradients taken inside shard_map JAX's own rules hold:

- With `check_vma`, the default, a gradient with respect to a replicated value comes summed over the mesh. After
  `jax.lax.pcast(params, axes, to="varying")` it is each device's own, and `all_reduce` combines them.
- Without, it is each device's own, and where the loss itself was reduced, that of the sum of all devices' losses.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.errors import ShardingError
from autoshard.lower import element_types

__all__ = ["all_gather", "all_reduce", "all_to_all", "broadcast", "halo_exchange", "neighbor_exchange", "reduce_scatter"]

Axes = str | Sequence[str]
"""A mesh axis, or several that act as one."""

Target = int | Sequence[int] | Mapping[int, int]
"""The receivers of a part: a number of ranks along the line, a number of steps along each axis, or receivers by their senders."""

REDUCTIONS: Mapping[str, Callable[..., Any]] = {"sum": jnp.sum, "mean": jnp.mean, "max": jnp.max, "min": jnp.min, "prod": jnp.prod}


def all_reduce(x: Any, axes: Axes, op: str = "sum") -> Any:
    """The elementwise reduction of the group's shards, on each of its devices.

    Args:
        x: an array or a pytree of arrays, of one shape on all devices.
        axes: the mesh axes of the group.
        op: "sum", "mean", "max", "min" or "prod", which gathers all shards. Where several shards have the maximum, its gradient is
            divided equally among them, as `jnp.max` does.

    Returns:
        Arrays of the shapes of `x`, replicated over `axes`.

    Source: MPI_Allreduce; `jax.lax.psum`, `pmean`, `pmax`, `pmin`.

    >>> import jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
    >>> total = jax.shard_map(lambda x: all_reduce(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    >>> print(total(np.arange(8.0)))
    [28.]
    """
    names, _ = _group(axes)
    op = _reduction(op)
    return jax.tree.map(lambda leaf: _all_reduced(_number(leaf, op), names, op), x)


def all_gather(x: Any, axes: Axes, dim: int = 0) -> Any:
    """The group's shards joined along a dimension in order of rank, on each of its devices.

    Its gradient is a reduce_scatter. `check_vma` takes the result for one that varies over `axes`, although all devices have the same: to
    return it from shard_map as replicated, use `jax.lax.all_gather(..., to="invarying")`.

    Args:
        x: an array or a pytree of arrays.
        axes: the mesh axes of the group, of `n` devices.
        dim: the dimension to join along, of size s.

    Returns:
        Arrays of the shapes of `x`, but n * s along `dim`.

    Source: MPI_Allgather; `jax.lax.all_gather`.

    >>> import jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
    >>> gathered = jax.shard_map(lambda x: all_gather(x, "data"), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))
    >>> gathered(np.arange(8.0)).shape
    (64,)
    """
    names, n = _group(axes)

    def gathered(x: Any) -> Any:
        along = _dim(x, dim)
        if not x.size:  # XLA gathers nothing empty
            return lax.concatenate([x] * n, along)
        return lax.all_gather(x, names, axis=along, tiled=True)

    return jax.tree.map(lambda leaf: gathered(jnp.asarray(leaf)), x)


def reduce_scatter(x: Any, axes: Axes, op: str = "sum", dim: int = 0) -> Any:
    """This device's part of the elementwise reduction of the group's shards: the part of its rank along a dimension.

    Args:
        x: an array or a pytree of arrays, of one shape on all devices.
        axes: the mesh axes of the group, of `n` devices.
        op: "sum", "mean", "max", "min" or "prod", with gradients as in `all_reduce`.
        dim: the dimension to scatter, whose size s `n` divides.

    Returns:
        Arrays of the shapes of `x`, but s / n along `dim`.

    Source: MPI_Reduce_scatter_block; `jax.lax.psum_scatter`, or `all_to_all` and a local reduction, which send as many bytes.

    >>> import jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
    >>> scattered = jax.shard_map(lambda x: reduce_scatter(x, "data", "mean"), mesh=mesh, in_specs=jax.P(), out_specs=jax.P("data"))
    >>> print(scattered(np.arange(8.0)))
    [0. 1. 2. 3. 4. 5. 6. 7.]
    """
    names, n = _group(axes)
    reduce = REDUCTIONS[_reduction(op)]

    def scattered(x: Any) -> Any:
        along = _divided_dim(x, dim, names, n)
        if op in ("sum", "mean") and x.size:
            total = element_types.reduce_scatter(x, names, along)
            return total / n if op == "mean" else total
        parts = x.reshape(*x.shape[:along], n, x.shape[along] // n, *x.shape[along + 1 :])
        reduced = reduce(lax.all_to_all(parts, names, split_axis=along, concat_axis=along, tiled=True), axis=along)
        return reduced if op == "mean" else reduced.astype(x.dtype)

    return jax.tree.map(lambda leaf: scattered(_number(leaf, op)), x)


def broadcast(x: Any, axes: Axes, root: int = 0) -> Any:
    """The shard of one rank, on every device of its group.

    Args:
        x: an array or a pytree of arrays, of one shape on all devices; those of other ranks than `root` are not read.
        axes: the mesh axes of the group.
        root: the rank whose shard is sent.

    Returns:
        Arrays of the shapes of `x`, replicated over `axes`.

    Source: MPI_Bcast; `jax.lax.psum` of the root's shard and zeros, since `jax.lax.pbroadcast` is for GPUs alone (0.10.2).

    >>> import jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
    >>> of_third = jax.shard_map(lambda x: broadcast(x, "data", root=3), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P())
    >>> print(of_third(np.arange(8.0)))
    [3.]
    """
    names, n = _group(axes)
    if not 0 <= root < n:
        raise ShardingError(f"A broadcast has a rank of its group as root: got root {root} for axes {names}, whose ranks are 0 to {n - 1}.")

    def sent(x: Any) -> Any:
        return lax.psum(jnp.where(lax.axis_index(names) == root, x, jnp.zeros_like(x)), names).astype(x.dtype)

    return jax.tree.map(lambda leaf: sent(jnp.asarray(leaf)), x)


def all_to_all(x: Any, axes: Axes, split_dim: int, concat_dim: int) -> Any:
    """The parts sent to this device, joined: each device of the group splits its shard into one part per rank.

    An array that is sharded along `concat_dim` is sharded along `split_dim` instead.

    Args:
        x: an array or a pytree of arrays, of one shape on all devices.
        axes: the mesh axes of the group, of `n` devices.
        split_dim: the dimension to split, whose size s `n` divides.
        concat_dim: the dimension to join along in order of rank, of size c.

    Returns:
        Arrays of the shapes of `x`, but s / n along `split_dim` and n * c along `concat_dim`; the shape of `x` where they are the same.

    Source: MPI_Alltoall; `jax.lax.all_to_all`.

    >>> import jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
    >>> transposed = jax.shard_map(lambda x: all_to_all(x, "data", 1, 0), mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P(None, "data"))
    >>> bool((transposed(np.arange(64).reshape(8, 8)) == np.arange(64).reshape(8, 8)).all())
    True
    """
    names, n = _group(axes)

    def exchanged(x: Any) -> Any:
        return lax.all_to_all(x, names, _divided_dim(x, split_dim, names, n), _dim(x, concat_dim), tiled=True)

    return jax.tree.map(lambda leaf: exchanged(jnp.asarray(leaf)), x)


def neighbor_exchange(parts: Sequence[Any], axes: Axes, targets: Sequence[Target], *, periodic: bool = False) -> tuple[Any, ...]:
    """The arrays that other devices of the group send to this one: each sends `parts[i]` to `targets[i]`.

    Args:
        parts: arrays to send, each of one shape on all devices; different parts may have different shapes.
        axes: the mesh axes of the group, of `n` devices: a line in order of rank, and a grid with a direction for each axis.
        targets: where each part is sent. An int is a number of ranks along the line: -1 is the rank before. A tuple is a number of steps
            along each axis: in a grid of rows and columns (-1, 0) is the device above, and (1, 1) a diagonal neighbour. A mapping of
            senders to receivers gives the ranks themselves; those that it leaves out send nothing.
        periodic: whether the first device of a direction follows its last; if not, nothing is sent beyond the last.

    Returns:
        For each part the array received, of the part's shape; zeros where no device sends one.

    Source: MPI_Cart_shift and MPI_Neighbor_alltoallw, NeighborExchange of MindSpore; `jax.lax.ppermute`, one for each part.

    >>> import jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()), "data")
    >>> def received(x):
    ...     of_previous, of_next, swapped = neighbor_exchange([x, x, x], "data", [1, -1, {0: 7, 7: 0}])
    ...     return of_previous, of_next, swapped
    >>> print(*jax.shard_map(received, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))(np.arange(8)), sep="\\n")
    [0 0 1 2 3 4 5 6]
    [1 2 3 4 5 6 7 0]
    [7 0 0 0 0 0 0 0]
    """
    names, _ = _group(axes)
    if len(parts) != len(targets):
        raise ShardingError(f"Each part has one target: got {len(parts)} parts and {len(targets)} targets. Give as many of both.")
    pairs = [_pairs(target, names, periodic) for target in targets]
    return tuple(_permuted(jnp.asarray(part), names, each) for part, each in zip(parts, pairs, strict=True))


def halo_exchange(x: Any, axes: Any, widths: Any, dim: Any = 0, *, periodic: bool = False, fill: Any = 0) -> Any:
    """The shard between the borders of the shards before and behind it, as a stencil or a convolution reads it.

    In several dimensions, such as the two of an image, `axes`, `widths` and `dim` are sequences with an entry for each. Dimensions are
    exchanged in turn, each with the halos of those before: corners come from the diagonal neighbours, in two messages a dimension.

    Args:
        x: an array, of one shape on all devices.
        axes: the mesh axes that shard the dimension.
        widths: (before, behind), the elements received from the rank before and from the rank behind: each at most the shard's own size.
        dim: the dimension, of size s.
        periodic: whether the first and the last rank are each other's neighbours.
        fill: the value of the halos beyond the first and the last rank where they are not.

    Returns:
        An array of the shape of `x`, but before + s + behind along `dim`.

    Source: MPI_Cart_shift, NeighborExchangeV2 of MindSpore; Kjolstad and Snir, "Ghost Cell Pattern" (2010), for the corners.

    >>> import jax, numpy as np
    >>> mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), "data")
    >>> f = lambda x: halo_exchange(x, "data", (1, 2), fill=-1)
    >>> print(jax.shard_map(f, mesh=mesh, in_specs=jax.P("data"), out_specs=jax.P("data"))(np.arange(6)))
    [-1  0  1  2  3  4  2  3  4  5 -1 -1]
    """
    several = list(_entries(axes, widths, dim)) if isinstance(dim, Sequence) else [(axes, widths, dim)]
    x = jnp.asarray(x)
    if len({_dim(x, each) for _, _, each in several}) < len(several):
        raise ShardingError(f"A halo is exchanged along each dim once: got dims {dim} of shape {x.shape}. Add its widths up.")
    for entry in several:
        x = _with_halos(x, entry, periodic, fill)
    return x


def _all_reduced(x: Any, names: tuple[str, ...], op: str) -> Any:
    """The reduction of an array over a group."""
    if op in ("sum", "mean"):
        return (lax.psum if op == "sum" else lax.pmean)(x, names)
    return _product(x, names) if op == "prod" else _extreme(x, names, op)


def _with_halos(x: Any, entry: tuple[Axes, Sequence[int], int], periodic: bool, fill: Any) -> Any:
    """The shard between its neighbours' borders along one dimension."""
    axes, (before, behind), dim = entry
    (names, n), along = _group(axes), _dim(x, dim)
    size = x.shape[along]
    if not 0 <= min(before, behind) <= max(before, behind) <= size:
        raise ShardingError(
            f"A halo comes from the adjacent shard alone, so that its width is from 0 to the shard's size: got ({before}, {behind}) "
            f"for dim {along} of shape {x.shape}. Use narrower halos, or fewer devices along {names}."
        )
    borders = lax.slice_in_dim(x, size - before, size, axis=along), lax.slice_in_dim(x, 0, behind, axis=along)
    left, right = neighbor_exchange(borders, names, (1, -1), periodic=periodic)
    if not periodic:
        rank, beyond = lax.axis_index(names), jnp.asarray(fill, x.dtype)
        left, right = jnp.where(rank == 0, beyond, left), jnp.where(rank == n - 1, beyond, right)
    return lax.concatenate([left, x, right], along)


@partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def _extreme(x: Any, names: tuple[str, ...], op: str) -> Any:
    """The largest or smallest elements of a group, for which JAX has no derivative (0.10.2)."""
    return (lax.pmax if op == "max" else lax.pmin)(x, names)


@_extreme.defjvp
def _extreme_jvp(names: tuple[str, ...], op: str, primals: Any, tangents: Any) -> Any:
    """The mean of the tangents of the elements that equal the extreme one."""
    (x,), (tangent,) = primals, tangents
    extreme = _extreme(x, names, op)
    is_it = (x == extreme).astype(tangent.dtype)
    return extreme, lax.psum(is_it * tangent, names) / lax.psum(is_it, names)


@partial(jax.custom_jvp, nondiff_argnums=(1,))
def _product(x: Any, names: tuple[str, ...]) -> Any:
    """The product of a group's elements. Without check_vma, the derivative of this gather would be wrong."""
    return lax.all_gather(x, names, to="invarying").prod(0, dtype=x.dtype)


@_product.defjvp
def _product_jvp(names: tuple[str, ...], primals: Any, tangents: Any) -> Any:
    """The sum of each device's tangent times the product of the other elements, without a division by elements that may be zero."""
    (x,), (tangent,) = primals, tangents
    n = lax.axis_size(names)
    own = (jnp.arange(n) == lax.axis_index(names)).reshape(n, *[1] * x.ndim)
    others = jnp.where(own, 1, lax.all_gather(x, names)).prod(0)
    return _product(x, names), lax.psum(tangent * others, names)


def _group(axes: Axes) -> tuple[tuple[str, ...], int]:
    """The names of a group's mesh axes, and how many devices it has."""
    names = (axes,) if isinstance(axes, str) else tuple(axes)
    mapped = tuple(str(name) for name in jax.sharding.get_abstract_mesh().manual_axes)
    if not names or len(set(names)) < len(names):
        raise ShardingError(f"A collective has one mesh axis or several different ones: got {names}. Name each axis once.")
    if not set(names) <= set(mapped):
        raise ShardingError(
            f"A collective is called inside jax.shard_map, over axes that it maps: got {names}, and mapped are {mapped or 'none'}. "
            + ("Use these, or a mesh that has the others." if mapped else "Call it in a function given to jax.shard_map(..., mesh=mesh).")
        )
    return names, lax.axis_size(names)


def _reduction(op: str) -> str:
    if op not in REDUCTIONS:
        raise ShardingError(f"A reduction is one of {', '.join(REDUCTIONS)}: got {op!r}. For another, reduce gathered shards.")
    return op


def _number(x: Any, op: str) -> Any:
    """An array as its reduction takes it: booleans are counted, and have a maximum and a minimum of their own type."""
    x = jnp.asarray(x)
    return x.astype(int) if x.dtype == bool and op not in ("max", "min") else x


def _dim(x: Any, dim: int) -> int:
    """A dimension of an array, counted from 0."""
    if not -x.ndim <= dim < x.ndim:
        raise ShardingError(f"A dim is from {-x.ndim} to {x.ndim - 1} for an array of shape {x.shape}: got {dim}. Use one that it has.")
    return dim % x.ndim


def _divided_dim(x: Any, dim: int, names: tuple[str, ...], n: int) -> int:
    """A dimension that the group divides, counted from 0."""
    along = _dim(x, dim)
    if x.shape[along] % n:
        raise ShardingError(
            f"A dim is split evenly among the {n} devices along {names}: got size {x.shape[along]} for dim {along} of shape {x.shape}. "
            f"Pad it to a multiple of {n}, or use axes whose size divides {x.shape[along]}."
        )
    return along


def _pairs(target: Target, names: tuple[str, ...], periodic: bool) -> list[tuple[int, int]]:
    """The ranks that send, each with the rank that it sends to."""
    grid = tuple(lax.axis_size(name) for name in names)
    n = math.prod(grid)
    if isinstance(target, Mapping):
        if not {*target.keys(), *target.values()} <= set(range(n)) or len(set(target.values())) < len(target):
            raise ShardingError(
                f"Each rank receives a part from one rank at most, and ranks are 0 to {n - 1} along {names}: got {dict(target)}. "
                "Use one part for each sender to the same rank."
            )
        return sorted(target.items())
    steps, sizes = (tuple(target), grid) if isinstance(target, Sequence) else ((int(target),), (n,))
    if len(steps) != len(sizes):
        raise ShardingError(f"A target has a step for each of the axes {names}, or is one int: got {steps}. Use 0 where it takes none.")
    places = [np.add(place, steps) for place in np.ndindex(sizes)]
    there = [periodic or bool(((place >= 0) & (place < sizes)).all()) for place in places]
    return [(rank, int(np.ravel_multi_index(place, sizes, "wrap"))) for rank, place in enumerate(places) if there[rank]]


def _permuted(x: Any, names: tuple[str, ...], pairs: Sequence[tuple[int, int]]) -> Any:
    """The array received. `jax.lax.ppermute` ranks devices in the mesh's order of axes, whatever that of the names (0.10.2)."""
    order = [name for name in jax.sharding.get_abstract_mesh().axis_names if name in names]
    sizes = [lax.axis_size(name) for name in order]
    rank = np.arange(math.prod(sizes)).reshape(sizes).transpose([order.index(name) for name in names]).ravel().tolist()
    return lax.ppermute(x, tuple(order), [(rank[sender], rank[receiver]) for sender, receiver in pairs])


def _entries(axes: Any, widths: Any, dims: Any) -> Any:
    """The axes, widths and dim of each dimension of a halo."""
    if isinstance(axes, str) or not len(axes) == len(widths) == len(dims):
        raise ShardingError(f"With several dims, axes and widths have an entry for each: got dims {dims}, axes {axes}, widths {widths}.")
    return zip(axes, widths, dims, strict=True)
