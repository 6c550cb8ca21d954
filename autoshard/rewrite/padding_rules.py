"""How each primitive takes padding: which factors of its rule may be padded, and its parameters at other sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import threefry2x32_p

from autoshard.ir import Factor, Graph, Op, Rule
from autoshard.primitives import is_scatter, of_kind, primitive
from autoshard.rewrite.extents import Extent, Extents, is_suffix, padded_shape

Shape = tuple[int, ...]

_UNCHANGED = frozenset(
    {
        *of_kind("elementwise"),
        *of_kind("identity"),
        *of_kind("placement"),
        *of_kind("rearrangement"),
        *of_kind("cumulative"),
        *of_kind("product"),
        *of_kind("sort"),
        *of_kind("linear_algebra"),
        *of_kind("reversal"),
        *of_kind("stacking"),
        *of_kind("reduction"),
        *of_kind("window"),
        *of_kind("fourier"),
        *of_kind("concatenation"),
        "bitcast_convert_type",
        "broadcast_in_dim",
        "tile",
        "slice",
        "dynamic_slice",
        "split",
    }
)


@dataclass(frozen=True, slots=True)
class _Case:
    """A factor of an operation, as `TAKES` is asked about it.

    Attributes:
        dims: per operand the dimension that is this factor alone or with others; None where it has none.
    """

    op: Op
    rule: Rule
    number: int
    factor: Factor
    extent: Extent
    values: Sequence[Any]

    @property
    def is_suffix(self) -> bool:
        return is_suffix(self.extent)

    def dim(self, tensor: int) -> int | None:
        """The operand's dimension that has the factor."""
        return dim_of(self.rule.operands[tensor], self.number)


def dim_of(dims: Sequence[Sequence[int]], factor: int) -> int | None:
    """The dimension that has a factor."""
    return next((dim for dim, factors in enumerate(dims) if factor in factors), None)


def takes(graph: Graph, op: Op, rule: Rule | None, number: int, extent: Extent) -> bool:
    """Whether an operation can be computed with a factor of its rule padded so, its operands masked where that matters."""
    if rule is None or op.mapped or op.bodies or op.equation is None:
        return False
    factor = rule.factors[number]
    sizes = {graph.values[value].dtype for value in (*op.operands, *op.results)}
    if any(dtype.startswith("key") for dtype in sizes) and op.primitive != "random_bits":
        return False
    function = _TAKES.get(op.primitive)
    return function is not None and function(_Case(op, rule, number, factor, extent, graph.values))


def _passing(case: _Case) -> bool:
    return case.factor.kind == "pass_through"


def _passing_or_reduced(case: _Case) -> bool:
    return case.factor.kind in ("pass_through", "reduction")


def _by_position(case: _Case) -> bool:
    """Those dimensions in which elements are found by their positions are padded at their end."""
    return case.factor.kind == "pass_through" or (case.is_suffix and case.factor.kind in ("permutation", "reduction"))


def _among_others(case: _Case) -> bool:
    """A top_k's: of all elements of a dimension, which is a sort, the least one may be below what is in the padding, as NaN is."""
    k = case.op.params["k"]
    return _by_position(case) and (case.factor.kind == "pass_through" or k < case.factor.size)


def _indexed(case: _Case) -> bool:
    """A gather's or a scatter's: dimensions that are searched or written element by element are padded at their end."""
    numbers, dim = case.op.params["dimension_numbers"], case.dim(0)
    starts = numbers.start_index_map if case.op.primitive == "gather" else numbers.scatter_dims_to_operand_dims
    searched = dim is not None and dim in starts and not _is_window(case, dim)
    return _passing_or_reduced(case) and (not searched or case.is_suffix)


def _is_window(case: _Case, dim: int) -> bool:
    """Whether a gather or a scatter takes a dimension whole."""
    size = case.values[case.op.operands[0]].shape[dim]
    if case.op.primitive == "gather":
        return case.op.params["slice_sizes"][dim] == size
    return dim not in case.op.params["dimension_numbers"].inserted_window_dims


def _updated(case: _Case) -> bool:
    """A slice update's: where one element is written, positions matter."""
    shapes = [case.values[value].shape for value in case.op.operands[:2]]
    dim = case.dim(0)
    return _passing(case) and (case.is_suffix or dim is None or shapes[0][dim] == shapes[1][dim])


def _drawn(case: _Case) -> bool:
    """Random bits' dimensions that are drawn from one key, where every element's are computed by its position."""
    (keys,) = (case.values[value] for value in case.op.operands)
    partitionable = jax.config.jax_threefry_partitionable  # pyright: ignore[reportAttributeAccessIssue]
    dim = dim_of(case.rule.results[0], case.number)
    return _passing(case) and case.is_suffix and keys.dtype == "key<fry>" and partitionable and dim is not None and dim >= keys.rank


def _windowed(case: _Case) -> bool:
    return case.factor.kind in ("pass_through", "reduction") or (case.is_suffix and case.factor.kind == "permutation")


_TAKES: Mapping[str, Callable[[_Case], bool]] = {
    **dict.fromkeys(_UNCHANGED, _passing),
    **{name: _passing_or_reduced for name in of_kind("reduction") if primitive(name).operator},
    **dict.fromkeys(of_kind("product"), _passing_or_reduced),
    **dict.fromkeys(of_kind("cumulative"), lambda case: case.factor.kind in ("pass_through", "permutation")),
    **dict.fromkeys(("argmax", "argmin"), _by_position),
    "top_k": _among_others,
    "conv_general_dilated": _windowed,
    **dict.fromkeys(("reduce_window_max", "reduce_window_min", "reduce_window_sum"), _windowed),
    "gather": _indexed,
    **dict.fromkeys(of_kind("scatter"), _indexed),
    "dynamic_update_slice": _updated,
    "iota": lambda case: _passing(case) and (case.is_suffix or dim_of(case.rule.results[0], case.number) != case.op.params["dimension"]),
    "empty": _passing,
    "random_bits": _drawn,
}


# -- evaluation at other sizes -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Padding:
    """An operation with padded operands and results.

    Attributes:
        bind: binds its primitive: ``(*operands, **replaced parameters)`` to results.
        reads, makes: the extents of its operands and results.
        operands, results: their shapes without padding.
    """

    op: Op
    bind: Callable[..., list[Any]]
    reads: tuple[Extents, ...]
    makes: tuple[Extents, ...]
    operands: tuple[Shape, ...]
    results: tuple[Shape, ...]

    @property
    def made(self) -> Shape:
        """The padded shape of the first result."""
        return padded_shape(self.results[0], self.makes[0])

    def computed(self, operands: Sequence[Any]) -> list[Any]:
        """The results, of operands with these extents."""
        return list(_COMPUTED.get(self.op.primitive, _as_it_is)(self, *operands))


def _as_it_is(p: Padding, *operands: Any) -> list[Any]:
    return p.bind(*operands)


def _shape(name: str) -> Callable[..., list[Any]]:
    return lambda p, *operands: p.bind(*operands, **{name: p.made})


def _slice(p: Padding, x: Any) -> list[Any]:
    whole, start, limit = p.operands[0], p.op.params["start_indices"], p.op.params["limit_indices"]
    limits = tuple(m if p.reads[0][d] else at for d, (at, m) in enumerate(zip(limit, x.shape, strict=True)))
    assert all(limit[d] == whole[d] and start[d] == 0 for d, each in enumerate(p.reads[0]) if each), "a rule passes on whole dimensions"
    return p.bind(x, limit_indices=limits)


def _split(p: Padding, x: Any) -> list[Any]:
    axis = p.op.params["axis"]
    sizes = (x.shape[axis],) if len(p.results) == 1 else p.op.params["sizes"]
    return p.bind(x, sizes=sizes)


def _gather(p: Padding, x: Any, indices: Any) -> list[Any]:
    numbers, sizes, whole = p.op.params["dimension_numbers"], p.op.params["slice_sizes"], p.operands[0]
    taken = tuple(m if size == n else size for size, n, m in zip(sizes, whole, x.shape, strict=True))
    searched = {k: whole[d] for k, d in enumerate(numbers.start_index_map) if p.reads[0][d] and sizes[d] != whole[d]}
    fills = lax.GatherScatterMode.from_any(p.op.params["mode"]) == lax.GatherScatterMode.FILL_OR_DROP
    return p.bind(x, _inside(indices, searched, clips=not fills), slice_sizes=taken)


def _scatter(p: Padding, x: Any, indices: Any, updates: Any) -> list[Any]:
    numbers, whole = p.op.params["dimension_numbers"], p.operands[0]
    by_element = [(k, d) for k, d in enumerate(numbers.scatter_dims_to_operand_dims) if d in numbers.inserted_window_dims]
    written = {k: whole[d] for k, d in by_element if p.reads[0][d]}
    clips = lax.GatherScatterMode.from_any(p.op.params["mode"]) == lax.GatherScatterMode.CLIP
    return p.bind(x, _inside(indices, written, clips), updates)


def _inside(indices: Any, sizes: Mapping[int, int], clips: bool) -> Any:
    """Indices that mean for dimensions with padding what they mean without.

    Args:
        sizes: per coordinate into such a dimension its size without padding.
        clips: whether those past the end mean the last element; otherwise they mean none.
    """
    if not sizes:
        return indices
    if indices.dtype.itemsize < 4 or jnp.issubdtype(indices.dtype, jnp.unsignedinteger):
        wide = np.int64 if indices.dtype.itemsize > 4 else np.int32
        indices = lax.convert_element_type(lax.min(indices, _full(indices, min(jnp.iinfo(indices.dtype).max, jnp.iinfo(wide).max))), wide)
    limits = np.full(indices.shape[-1:], jnp.iinfo(indices.dtype).max, indices.dtype)
    for coordinate, size in sizes.items():
        limits[coordinate] = size - 1
    most = lax.broadcast_in_dim(limits, indices.shape, (indices.ndim - 1,)) if len(limits) > 1 else _full(indices, limits[0])
    if clips:
        return lax.min(indices, most)
    return lax.select(lax.gt(indices, most), _full(indices, jnp.iinfo(indices.dtype).max), indices)


def _full(like: Any, value: Any) -> Any:
    return lax.full(like.shape, value, like.dtype)


def _update(p: Padding, x: Any, update: Any, *starts: Any) -> list[Any]:
    """The array with the update, whose one element along a padded dimension is written where it would be without padding."""
    whole, written = p.operands[:2]
    placed = [
        jnp.minimum(start, np.asarray(n - m, start.dtype)) if of and m != n else start
        for start, n, m, of in zip(map(jnp.asarray, starts), whole, written, p.reads[0], strict=True)
    ]
    return p.bind(x, update, *placed)


def _random_bits(p: Padding, keys: Any) -> list[Any]:
    """The random bits at the positions that the elements have without padding."""
    first, whole, made = keys.ndim, p.results[0], p.made
    if all(not of for of in p.makes[0][first + 1 :]):
        return p.bind(keys, shape=made[first:])  # positions are those in rows
    shape, sizes = made[first:], whole[first:]
    high, low = jnp.zeros(shape, np.uint32), jnp.zeros(shape, np.uint32)
    for dim in range(len(shape)):
        stride = int(np.prod(sizes[dim + 1 :], dtype=np.int64))
        index = lax.broadcasted_iota(np.uint32, shape, dim)
        added = index * np.uint32(stride & 0xFFFFFFFF)
        low = low + added
        if np.prod(sizes, dtype=np.float64) > 1 << 32:
            high = high + lax.mulhi(index, _full(index, stride & 0xFFFFFFFF)) + index * np.uint32(stride >> 32)
            high = high + (low < added).astype(np.uint32)
    words = jax.random.key_data(keys)
    counts = (lax.broadcast_in_dim(count, made, range(first, len(made))) for count in (high, low))
    halves = (lax.broadcast_in_dim(words[..., half], made, range(first)) for half in (0, 1))
    one, other = threefry2x32_p.bind(*halves, *counts)
    width = p.op.params["bit_width"]
    if width == 64:
        return [lax.shift_left(one.astype(np.uint64), np.uint64(32)) | other.astype(np.uint64)]
    return [(one ^ other).astype(f"uint{width}")]


_COMPUTED: Mapping[str, Callable[..., list[Any]]] = {
    "broadcast_in_dim": _shape("shape"),
    "reshape": _shape("new_sizes"),
    "iota": _shape("shape"),
    "empty": _shape("shape"),
    "dynamic_slice": _shape("slice_sizes"),
    "dynamic_update_slice": _update,
    "gather": _gather,
    "random_bits": _random_bits,
    "slice": _slice,
    "split": _split,
    "tile": lambda p, x: p.bind(x, reps=tuple(m // max(n, 1) for m, n in zip(p.made, x.shape, strict=True))),
    **dict.fromkeys(filter(is_scatter, of_kind("scatter")), _scatter),
}
