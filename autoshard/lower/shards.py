"""Computation of an op on the shards of one device, with the collectives of its rule and no others.

To be called inside `jax.shard_map` over all axes of the mesh. It satisfies the law of the sharding rules: if the operands are sharded along
the split factors, the op runs on each shard, and partial results are combined by the reductions' operators, the result is that of the
whole op.

Most primitives run on shards unchanged. Those with sizes among their parameters get the shard's (`RESIZED`); those that depend on positions
in the whole array (a lookup, an iota, random bits) get the shard's offset (`PLACED`); those whose shards need each other's data exchange it
by their rule (`autoshard.lower.exchange`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from autoshard.ir import Choice, Layout, Mesh, Rule, computed_layout, exchanges, local_shape, operand_layout, reductions
from autoshard.lower import kernels
from autoshard.lower.collectives import combined, start_of
from autoshard.lower.exchange import BODIES, Split
from autoshard.lower.mesh import abstract_mesh, to_named_sharding
from autoshard.primitives import of_kind
from autoshard.rules import partitioned

Bind = Callable[..., Sequence[Any]]
"""Binds an operation's primitive: ``(*operands, **replaced parameters)`` to results."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Sharded:
    """An op under a choice.

    Attributes:
        primitive, params: of the equation.
        bind: binds its primitive.
        rule, choice: how it is split.
        mesh: the mesh.
        operands, results: the shapes of the whole arrays.
    """

    primitive: str
    params: Mapping[str, Any]
    bind: Bind
    rule: Rule
    choice: Choice
    mesh: Mesh
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]

    @cached_property
    def entering(self) -> tuple[Layout, ...]:
        """The layouts of the operands."""
        return tuple(operand_layout(self.rule, self.choice, k) for k in range(len(self.operands)))

    @cached_property
    def leaving(self) -> tuple[Layout, ...]:
        """The layouts of the results, before partial ones are combined."""
        return tuple(computed_layout(self.rule, self.choice, k) for k in range(len(self.results)))

    def local(self, shape: Shape, layout: Layout) -> Shape:
        """The shape of one shard of an array."""
        return tuple(map(int, local_shape(shape, layout, self.mesh.sizes)))

    def start(self, layout: Layout, dim: int, size: int) -> Any:
        """The offset of this device's shard along a dimension; ``size`` is the shard's size."""
        return start_of(layout, dim, size, self.mesh)

    def positions(self, layout: Layout, shape: Shape, dim: int, counted: int, dtype: Any) -> Any:
        """The positions in the whole array, along a dimension, of the elements of an array of this device's.

        Args:
            layout: that of the whole array.
            shape, dim: of the positions.
            counted: the whole array's dimension.
        """
        start = jnp.asarray(self.start(layout, counted, shape[dim]))
        return lax.broadcasted_iota(dtype, shape, dim) + start.astype(dtype)

    def part(self, x: Any, layout: Layout, dim: int, size: int) -> Any:
        """This device's part of a whole array, along a dimension."""
        return lax.dynamic_slice_in_dim(x, self.start(layout, dim, size), size, dim)

    @property
    def splits(self) -> list[Split]:
        """The split factors whose shards exchange data."""
        return [
            Split(factor, tuple(self.mesh.names[axis] for axis in axes), math.prod(self.mesh.sizes[axis] for axis in axes))
            for factor, axes in exchanges(self.rule, self.choice, self.mesh.sizes)
        ]

    def computed(self, shards: Sequence[Any]) -> list[Any]:
        """The results on this device in the layouts `leaving`, partial ones not yet combined."""
        if not any(factor >= 0 and n > 1 for (factor, _), n in zip(self.choice, self.mesh.sizes, strict=True)):
            return list(self.bind(*shards))
        if splits := self.splits:
            return list(BODIES[self.primitive](self.bind, self.params, self.rule, splits, *shards))
        if self.primitive in PLACED:
            return list(PLACED[self.primitive](self, *shards))
        resized = RESIZED[self.primitive](self) if self.primitive in RESIZED else {}
        return list(self.bind(*shards, **resized))

    def run(self, shards: Sequence[Any]) -> list[Any]:
        """The results on this device in the layouts `leaving`, partial ones combined."""
        results = self.computed(shards)
        for operator, axes in self.partial().items():
            results = [combined(x, operator, axes) for x in results]
        return results

    def partial(self) -> dict[str, tuple[str, ...]]:
        """Per operator, the mesh axes over which it combines partial results."""
        found: dict[str, tuple[str, ...]] = {}
        for axis, operator, _ in reductions(self.rule, self.choice):
            if self.mesh.sizes[axis] > 1:
                found[operator] = (*found.get(operator, ()), self.mesh.names[axis])
        return found


# -- primitives with sizes among their parameters --------------------------------------------------------------------------


def _shape(name: str) -> Callable[[Sharded], dict[str, Any]]:
    """The parameter that is the result's shape."""
    return lambda op: {name: op.local(op.results[0], op.leaving[0])}


def _in_shard(op: Sharded, positions: Sequence[int]) -> tuple[int, ...]:
    """Positions in the operand's dimensions, or sizes along them, as those of a shard: whole shards in dimensions that are split."""
    whole, shard = op.operands[0], op.local(op.operands[0], op.entering[0])
    return tuple(at if m == n else at * m // n for at, n, m in zip(positions, whole, shard, strict=True))


def _pad(op: Sharded) -> dict[str, Any]:
    low, high, interior = zip(*op.params["padding_config"], strict=True)
    return {"padding_config": tuple(zip(_in_shard(op, low), _in_shard(op, high), interior, strict=True))}


def _tile(op: Sharded) -> dict[str, Any]:
    shard = op.local(op.operands[0], op.entering[0])
    made = op.local(op.results[0], op.leaving[0])
    return {"reps": tuple(n // m for n, m in zip(made, (1,) * (len(made) - len(shard)) + shard, strict=True))}


def _results(op: Sharded) -> dict[str, Any]:
    """The types of a foreign function's results."""
    pairs = zip(op.params["result_avals"], op.results, op.leaving, strict=True)
    return {"result_avals": tuple(aval.update(shape=op.local(shape, layout)) for aval, shape, layout in pairs)}


RESIZED: Mapping[str, Callable[[Sharded], dict[str, Any]]] = {
    "broadcast_in_dim": _shape("shape"),
    "dynamic_slice": _shape("slice_sizes"),
    "empty": _shape("shape"),
    "ffi_call": _results,
    "pad": _pad,
    "reshape": _shape("new_sizes"),
    "slice": lambda op: {name: _in_shard(op, op.params[name]) for name in ("start_indices", "limit_indices")},
    "split": lambda op: {"sizes": tuple(op.local(shape, at)[op.params["axis"]] for shape, at in zip(op.results, op.leaving, strict=True))},
    "tile": _tile,
}


# -- primitives that depend on positions -------------------------------------------------------------------------------------


def _iota(op: Sharded) -> list[Any]:
    """The positions of this shard's elements in the whole, converted after the shard's offset is added."""
    dim, shape = op.params["dimension"], op.local(op.results[0], op.leaving[0])
    positions = op.positions(op.leaving[0], shape, dim, dim, np.int32)
    return [lax.convert_element_type(positions, op.params["dtype"])]


def _counts(op: Sharded, first: int) -> tuple[Any, Any]:
    """High and low words of the row-major positions of this shard's elements, counted over the dimensions from ``first`` on."""
    whole, shard = op.results[0][first:], op.local(op.results[0], op.leaving[0])[first:]
    high, low = jnp.zeros(shard, np.uint32), jnp.zeros(shard, np.uint32)
    for dim in range(len(shard)):
        stride = math.prod(whole[dim + 1 :])
        index = op.positions(op.leaving[0], shard, dim, first + dim, np.uint32)
        added = index * np.uint32(stride & 0xFFFFFFFF)
        low = low + added
        if math.prod(whole) > 1 << 32:
            factor = jnp.full(shard, stride & 0xFFFFFFFF, np.uint32)
            high = high + lax.mulhi(index, factor) + index * np.uint32(stride >> 32) + (low < added).astype(np.uint32)
    return high, low


def _random_bits(op: Sharded, keys: Any) -> list[Any]:
    """The random bits at this shard's positions, which threefry hashes."""
    drawn = _drawn(op, keys)
    if drawn is None:
        return _drawn_whole(op, keys)
    first, second = drawn
    width = op.params["bit_width"]
    if width == 64:
        return [lax.shift_left(first.astype(np.uint64), np.uint64(32)) | second.astype(np.uint64)]
    return [(first ^ second).astype(f"uint{width}")]


def _random_split(op: Sharded, keys: Any) -> list[Any]:
    """The keys at this shard's positions."""
    drawn = _drawn(op, keys)
    return _drawn_whole(op, keys) if drawn is None else [jax.random.wrap_key_data(jnp.stack(drawn, -1), impl=jax.random.key_impl(keys))]


def _drawn(op: Sharded, keys: Any) -> tuple[Any, Any] | None:
    """Threefry's two words for each key and each position; None where the drawn dimensions are not split, or for another generator."""
    n = keys.ndim
    split = any(dim >= n for dim in op.leaving[0])
    if not split or str(keys.dtype) != "key<fry>" or not jax.config.jax_threefry_partitionable:  # pyright: ignore[reportAttributeAccessIssue]
        return None
    shape = op.local(op.results[0], op.leaving[0])
    words = jax.random.key_data(keys)
    counts = (lax.broadcast_in_dim(count, shape, range(n, len(shape))) for count in _counts(op, n))
    halves = (lax.broadcast_in_dim(words[..., half], shape, range(n)) for half in (0, 1))
    return tuple(threefry2x32_p.bind(*halves, *counts))


def _drawn_whole(op: Sharded, keys: Any) -> list[Any]:
    """This shard's slice of everything that is drawn from its keys."""
    (x,) = op.bind(keys)
    for dim, size in enumerate(op.local(op.results[0], op.leaving[0])[keys.ndim :], keys.ndim):
        if size != x.shape[dim]:
            x = op.part(x, op.leaving[0], dim, size)
    return [x]


def _positions(indices: Any, limits: Sequence[int]) -> tuple[Any, Any]:
    """Indices as signed integers, clamped to ``0 ... limits``, and per row of them whether all were inside."""
    dtype = indices.dtype
    most = np.array([min(limit, jnp.iinfo(dtype).max) for limit in limits], dtype)
    inside = ((indices >= 0) & (indices <= most)).all(-1)
    wide = np.int64 if dtype.itemsize > 4 else np.int32
    return lax.clamp(jnp.zeros((), dtype), indices, jnp.broadcast_to(most, indices.shape)).astype(wide), inside


def _lookup(op: Sharded, x: Any, indices: Any) -> list[Any]:
    """The rows of this shard; zeros, or false, in place of other shards' rows."""
    numbers, sizes = op.params["dimension_numbers"], op.params["slice_sizes"]
    taken = tuple(m if size == n else size for size, n, m in zip(sizes, op.operands[0], x.shape, strict=True))
    searched = [(k, d) for k, d in enumerate(numbers.start_index_map) if d in op.entering[0] and sizes[d] != op.operands[0][d]]
    if not searched:
        return list(op.bind(x, indices, slice_sizes=taken))
    places, inside = _positions(indices, [op.operands[0][d] - sizes[d] for d in numbers.start_index_map])
    mine = jnp.ones(inside.shape, bool)
    for k, d in searched:
        place = places[..., k] - op.start(op.entering[0], d, x.shape[d])
        mine &= (place >= 0) & (place < x.shape[d])
        places = places.at[..., k].set(jnp.clip(place, 0, x.shape[d] - 1))
    in_bounds = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    (found,) = op.bind(x, places, slice_sizes=taken, mode=in_bounds, fill_value=None, indices_are_sorted=False)
    if lax.GatherScatterMode.from_any(op.params["mode"]) == lax.GatherScatterMode.FILL_OR_DROP:
        found = jnp.where(jnp.expand_dims(inside, numbers.offset_dims), found, _filling(op.params.get("fill_value"), found.dtype))
    return [jnp.where(jnp.expand_dims(mine, numbers.offset_dims), found, jnp.zeros((), found.dtype))]


def _filling(value: Any, dtype: Any) -> Any:
    """The fill value of a gather for indices out of bounds: as given, or NaN, the least signed or largest unsigned integer, or true."""
    if value is None:
        kinds = ((jnp.inexact, lambda: np.nan), (jnp.signedinteger, lambda: jnp.iinfo(dtype).min), (jnp.bool_, lambda: True))
        value = next((make() for kind, make in kinds if jnp.issubdtype(dtype, kind)), None)
        value = jnp.iinfo(dtype).max if value is None else value
    return jnp.asarray(value, dtype)


NEUTRAL = {"sum": 0, "prod": 1}
"""The initial value of a scatter on all devices but one; a maximum or a minimum may count its operand several times."""


def _scatter(op: Sharded, x: Any, indices: Any, updates: Any) -> list[Any]:
    """The shard with the updates inside it; the operand counts once over the shards of a reduction."""
    numbers, mode = op.params["dimension_numbers"], lax.GatherScatterMode.from_any(op.params["mode"])
    others = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
    written = dict(zip([d for d in range(x.ndim) if d not in others], _windows(op.operands[2], numbers), strict=True))
    scattered = [(k, d) for k, d in enumerate(numbers.scatter_dims_to_operand_dims) if d in op.entering[0] and d not in written]
    replaced: dict[str, Any] = {}
    if scattered:
        if mode == lax.GatherScatterMode.CLIP:
            indices, _ = _positions(indices, [op.operands[0][d] - written.get(d, 1) for d in numbers.scatter_dims_to_operand_dims])
        elif indices.dtype.itemsize < 4 or jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
            indices = indices.astype(np.int64 if indices.dtype.itemsize > 4 else np.int32)
        starts = [0] * indices.shape[-1]
        for k, d in scattered:
            starts[k] = op.start(op.entering[0], d, x.shape[d])
        indices = indices - jnp.stack([jnp.asarray(start, indices.dtype) for start in starts])
        replaced = {"mode": lax.GatherScatterMode.FILL_OR_DROP}
    if scattered and math.prod(indices.shape[:-1]) == 1:
        # XLA turns a single update into a slice update, and loses the clamping of its position to the shard: openxla/xla#49121.
        x = lax.optimization_barrier(x)
    for operator, axes in op.partial().items():
        if operator in NEUTRAL:
            x = jnp.where(lax.axis_index(axes) == 0, x, jnp.asarray(NEUTRAL[operator], x.dtype))
    return list(op.bind(x, indices, updates, **replaced))


def _windows(updates: Shape, numbers: Any) -> list[int]:
    return [updates[d] for d in numbers.update_window_dims]


def _update(op: Sharded, x: Any, update: Any, *starts: Any) -> list[Any]:
    """The shard with the update if its position is inside, else unchanged."""
    whole, written = op.operands[:2]
    placed = [d for d, (n, m) in enumerate(zip(whole, written, strict=True)) if m == 1 < n and d in op.entering[0]]
    if not placed:
        return list(op.bind(x, update, *starts))
    at, mine = [], jnp.bool_(True)
    for d, (start, n, m) in enumerate(zip(starts, whole, written, strict=True)):
        place, _ = _positions(jnp.asarray(start)[None], [n - m])
        place = place[0].astype(np.int32)
        if d in placed:
            place = place - op.start(op.entering[0], d, x.shape[d])
            mine &= (place >= 0) & (place < x.shape[d])
            place = jnp.clip(place, 0, x.shape[d] - 1)
        at.append(place)
    return list(op.bind(x, jnp.where(mine, update, lax.dynamic_slice(x, at, update.shape)), *at))


def with_one_batch(bind: Bind, x: Any, n: int) -> list[Any]:
    """The transforms of the last ``n`` dimensions, with the others as one.

    XLA:CPU transforms arrays in row-major order, but gives those of several batch dimensions the order of a reshard that follows, and fails
    when it runs (jaxlib 0.10.2).
    """
    batch, core = x.shape[: x.ndim - n], x.shape[x.ndim - n :]
    (made,) = bind(lax.reshape(x, (math.prod(batch), *core)))
    return [lax.reshape(made, (*batch, *made.shape[1:]))]


def _kernel(op: Sharded, *shards: Any) -> list[Any]:
    """A kernel with a smaller grid."""
    read, made = [x.shape for x in shards], [op.local(shape, layout) for shape, layout in zip(op.results, op.leaving, strict=True)]

    def positions(tensor: int, dim: int) -> Any:
        layout, shape = ((*op.entering, *op.leaving)[tensor], (*read, *made)[tensor])
        return op.positions(layout, (shape[dim],), 0, dim, np.int32)

    operands = kernels.shifted(op.params, shards, made, positions)
    return list(op.bind(*operands, **kernels.on_shards(op.params, [x.shape for x in operands], made)))


def _partitioned(op: Sharded, *shards: Any) -> list[Any]:
    """The results of a function that partitions itself, as its author says for these layouts."""
    mesh = abstract_mesh(op.mesh)
    avals = zip((op.entering, op.leaving), (op.params["call"].in_avals, op.params["call"].out_avals), strict=True)
    told = [
        [
            jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=to_named_sharding(layout, len(aval.shape), op.mesh.names, mesh))
            for layout, aval in zip(layouts, side, strict=True)
        ]
        for layouts, side in avals
    ]
    function, _ = partitioned(op.params, mesh, *told)
    return jax.tree.leaves(function(*op.params["in_tree"].unflatten(shards)))


PLACED: Mapping[str, Callable[..., Sequence[Any]]] = {
    "custom_partitioning": _partitioned,
    "dynamic_update_slice": _update,
    "fft": lambda op, x: with_one_batch(op.bind, x, len(op.params["fft_lengths"])),
    "gather": _lookup,
    "iota": _iota,
    "iota_2x32_shape": lambda op: list(_counts(op, 0)),
    "pallas_call": _kernel,
    "random_bits": _random_bits,
    "random_split": _random_split,
    **dict.fromkeys(of_kind("scatter"), _scatter),
}
