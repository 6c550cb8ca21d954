"""Mesh shapes and layouts: shardings of tensors as plain integers.

A *layout* of a tensor of rank ``r`` on a mesh of ``k`` axes is a tuple of ``k`` integers: for each mesh axis, in mesh
order, the dimension it shards, or ``-1`` where the tensor is replicated over it. Axes that shard the same dimension do
so in mesh order, the first one major.

Layouts of one rank are numbered in mixed radix, ``sum((dim + 1) * (rank + 1) ** axis)``, so that cost tables are numpy
matrices indexed by layout number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache

import numpy as np

from autoshard.errors import ShardingError

Layout = tuple[int, ...]
CACHED = 1 << 16  # entries of each cache
Spec = tuple[None | str | tuple[str, ...], ...]
STAGE_AXIS = "stage"
"""The first axis of a pipeline's mesh."""


@dataclass(frozen=True, slots=True)
class Placement:
    """The mapping of a mesh to the physical dimensions of a cluster.

    The devices of ``topology``, with its dimensions in the order ``dims``, are assigned row-major to the mesh axes in the order ``axes``.
    So an axis can run along any physical dimension, or part of one.

    Attributes:
        topology: sizes of the physical dimensions, outermost (slowest link) first.
        dims: a permutation of the physical dimensions.
        axes: a permutation of the mesh axes.
    """

    topology: tuple[int, ...]
    dims: tuple[int, ...]
    axes: tuple[int, ...]

    def __post_init__(self) -> None:
        for order, n in ((self.dims, len(self.topology)), (self.axes, len(self.axes))):
            if sorted(order) != list(range(n)):
                raise ShardingError(f"a placement's orders are permutations of all physical dimensions and of all axes, got {self}.")


@dataclass(frozen=True, slots=True)
class Mesh:
    """A logical mesh: axis names and sizes, outermost (slowest link) first.

    Axes of size 1 split nothing: layouts and choices have no entry for them, only specs and the JAX mesh do.

    Attributes:
        axes: the names and sizes of those larger than 1, in the order in which layouts number them, and in which several of them split one
            dimension.
        placement: its mapping to the cluster, of these axes; None: JAX decides, and costs assume row-major in the order of ``shape``.
        shape: all axes in the order of the JAX mesh, those of size 1 among them; by default ``axes`` as they are given.
        sizes: of ``axes``.

    >>> mesh = Mesh((("data", 4), ("idle", 1), ("model", 2)))
    >>> mesh.size, mesh.names, mesh.sizes, str(mesh)
    (8, ('data', 'model'), (4, 2), 'data=4 x idle=1 x model=2')
    """

    axes: tuple[tuple[str, int], ...]
    placement: Placement | None = None
    shape: tuple[tuple[str, int], ...] = ()
    sizes: tuple[int, ...] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        given, shape = self.axes, self.shape or self.axes
        names = [name for name, _ in shape]
        if len(set(names)) != len(names):
            raise ShardingError(f"mesh axis names must be distinct, got {names}. Rename one of them.")
        for name, size in shape:
            if not isinstance(name, str) or not name:
                raise ShardingError(f"a mesh axis name is a non-empty string, got {name!r}.")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ShardingError(f"mesh axis {name!r} must have a positive integer size, got {size!r}.")
        splitting = tuple(axis for axis in given if axis[1] > 1)
        if sorted(splitting) != sorted(axis for axis in shape if axis[1] > 1):
            raise ShardingError(f"the axes that split are those of the mesh larger than 1: got {given} of {shape}.")
        object.__setattr__(self, "axes", splitting)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "sizes", tuple(size for _, size in splitting))
        placed = self.placement
        if placed is not None and (len(placed.axes) not in (len(given), len(splitting)) or math.prod(placed.topology) != self.size):
            raise ShardingError(f"a placement orders the axes of its mesh, and has as many devices: got {placed} for {self}.")
        if placed is not None and len(placed.axes) > len(splitting):
            kept = [number for number in placed.axes if given[number][1] > 1]
            object.__setattr__(self, "placement", replace(placed, axes=tuple(map(sorted(kept).index, kept))))

    @classmethod
    def of(cls, shape: Mapping[str, int]) -> Mesh:
        """The mesh of a mapping such as ``{"data": 4, "model": 2}``."""
        return cls(tuple((name, size) for name, size in shape.items()))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.axes)

    @property
    def all_names(self) -> tuple[str, ...]:
        """Those of all axes, also of size 1."""
        return tuple(name for name, _ in self.shape)

    @property
    def order(self) -> tuple[int, ...]:
        """The numbers of ``axes`` in the order of ``shape``."""
        names = self.names
        return tuple(names.index(name) for name in self.all_names if name in names)

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(self.sizes)

    @property
    def devices(self) -> np.ndarray:
        """The number of each device, row-major over ``shape``, as an array of the shape ``sizes``."""
        return np.arange(self.size).reshape([self.sizes[axis] for axis in self.order]).transpose(np.argsort(self.order))

    def ordered(self, names: Sequence[str]) -> Mesh:
        """The same devices with layouts that number the axes in another order.

        >>> mesh = Mesh.of({"x": 4, "y": 2}).ordered(("y", "x"))
        >>> mesh.names, str(mesh), layout_to_spec((0, 0), mesh.names, 1)
        (('y', 'x'), 'x=4 x y=2', (('y', 'x'),))
        """
        numbers = [self.names.index(name) for name in names if name in self.names]
        placed = self.placement and replace(self.placement, axes=tuple(map(numbers.index, self.placement.axes)))
        return Mesh(tuple(self.axes[number] for number in numbers), placed, self.shape)

    def __str__(self) -> str:
        return " x ".join(f"{name}={size}" for name, size in self.shape)


def axes_of_product(products: Sequence[int], sizes: Sequence[int]) -> tuple[tuple[int, ...], ...] | None:
    """The numbers of the mesh axes, in order, whose sizes multiply to each of some products; None where the meshes do not match.

    >>> axes_of_product((8,), (4, 2)), axes_of_product((2, 4), (8,))
    (((0, 1),), None)
    """
    found, left = [], list(enumerate(sizes))
    if math.prod(products) != math.prod(sizes):
        return None
    for product in products:
        axes, n = [], 1
        while n < product and left:
            axis, size = left.pop(0)
            axes.append(axis)
            n *= size
        if n != product:
            return None
        found.append(tuple(axes))
    return tuple(found)


def replicated(mesh: Mesh) -> Layout:
    """The layout of a replicated tensor."""
    return (-1,) * len(mesh.axes)


def shard_counts(layout: Layout, rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """Number of shards of each dimension, shape ``(rank,)``."""
    counts = [1] * rank
    for dim, size in zip(layout, sizes, strict=True):
        if dim >= 0:
            counts[dim] *= size
    return tuple(counts)


@lru_cache(CACHED)
def local_shape(shape: tuple[int, ...], layout: Layout, sizes: tuple[int, ...]) -> tuple[float, ...]:
    """The shape of one shard of a tensor, in fractions where the layout does not divide it."""
    return tuple(n / count for n, count in zip(shape, shard_counts(layout, len(shape), sizes), strict=True))


def divides(layout: Layout, shape: Sequence[int], sizes: Sequence[int]) -> bool:
    """Whether the axes that shard a dimension divide it evenly, for every dimension of ``shape``."""
    return all(n % count == 0 for n, count in zip(shape, shard_counts(layout, len(shape), sizes), strict=True))


@lru_cache(CACHED)
def shards(layout: Layout, sizes: tuple[int, ...]) -> int:
    """The number of distinct shards into which the layout splits a tensor."""
    return math.prod(size for dim, size in zip(layout, sizes, strict=True) if dim >= 0)


def shards_of(numbers: np.ndarray, rank: int, sizes: Sequence[int]) -> np.ndarray:
    """The same of the layouts of a rank with some numbers, of any shape."""
    dims = layout_dims(numbers, rank, len(sizes))
    return np.where(dims >= 0, np.array(sizes, np.int64), 1).prod(axis=-1)


def layout_number(layout: Layout, rank: int) -> int:
    """The number of a layout among all layouts of its rank; the inverse of `layouts`."""
    number = 0
    for dim in reversed(layout):
        number = number * (rank + 1) + dim + 1
    return number


def layout_of(number: int, rank: int, n_axes: int) -> Layout:
    """The layout with a number; the inverse of `layout_number`."""
    dims = []
    for _ in range(n_axes):
        number, dim = divmod(number, rank + 1)
        dims.append(dim - 1)
    return tuple(dims)


def layout_numbers(dims: np.ndarray, rank: int) -> np.ndarray:
    """The numbers ``(...)`` of layouts ``(..., n_axes)``."""
    return (dims + 1) @ (rank + 1) ** np.arange(dims.shape[-1])


def layout_dims(numbers: np.ndarray, rank: int, n_axes: int) -> np.ndarray:
    """The layouts ``(..., n_axes)`` of numbers ``(...)``; the inverse of `layout_numbers`."""
    return numbers[..., None] // (rank + 1) ** np.arange(n_axes) % (rank + 1) - 1


@cache
def layouts(rank: int, n_axes: int) -> tuple[Layout, ...]:
    """All ``(rank + 1) ** n_axes`` layouts of a rank, in the order of `layout_number`, divisible or not."""

    def walk(axes: int) -> Iterator[Layout]:
        if axes == 0:
            yield ()
            return
        for rest in walk(axes - 1):
            for dim in range(-1, rank):
                yield (dim, *rest)

    return tuple(walk(n_axes))


def shift_layout(layout: Layout, by: int) -> Layout | None:
    """The layout with ``by`` more leading dimensions (unsharded); None where a removed dimension was sharded.

    >>> shift_layout((0, -1), 1), shift_layout((0, 1), -1)
    ((1, -1), None)
    """
    moved = tuple(dim + by if dim >= 0 else -1 for dim in layout)
    return None if any(old >= 0 and new < 0 for old, new in zip(layout, moved, strict=True)) else moved


def entry_axes(entry: None | str | Sequence[str]) -> tuple[str, ...]:
    """The mesh axes that an entry of a spec names, outermost first."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def layout_to_spec(layout: Layout, names: Sequence[str], rank: int) -> Spec:
    """The layout as a `PartitionSpec`-like tuple with one entry a dimension.

    >>> layout_to_spec((0, 0), ("data", "model"), 2)
    (('data', 'model'), None)
    """
    entries: list[None | str | tuple[str, ...]] = []
    for dim in range(rank):
        axes = tuple(name for name, d in zip(names, layout, strict=True) if d == dim)
        entries.append(None if not axes else axes[0] if len(axes) == 1 else axes)
    return tuple(entries)


def spec_to_layout(spec: Sequence[None | str | Sequence[str]], mesh: Mesh, rank: int, what: str = "the tensor") -> Layout:
    """The layout of a `PartitionSpec`-like sequence; dimensions without an entry are unsharded.

    Raises:
        ShardingError: an unknown or repeated axis, too many entries, or axes against mesh order on one dimension.
    """
    if len(spec) > rank:
        raise ShardingError(
            f"a PartitionSpec has at most one entry a dimension: {what} has rank {rank}, got {tuple(spec)} with {len(spec)} entries. "
            f"Use {rank} at most; a pattern of paths may match tensors of several ranks."
        )
    layout = [-1] * len(mesh.axes)
    dim_of: dict[str, int] = {}
    for dim, entry in enumerate(spec):
        axes = entry_axes(entry)
        for name in axes:
            if name not in mesh.all_names:
                raise ShardingError(
                    f"{what}: dim {dim} names mesh axis {name!r}, and the mesh has {mesh}. "
                    f"Use one of {list(mesh.all_names)}, or give a mesh that has it."
                )
            if dim_of.get(name) == dim:
                raise ShardingError(f"{what}: dim {dim} names mesh axis {name!r} twice; it may be named once. Leave one of them out.")
            if name in dim_of:
                raise ShardingError(
                    f"{what}: mesh axis {name!r} shards both dim {dim_of[name]} and dim {dim}; it may shard one. Write None for the other."
                )
            dim_of[name] = dim
        order = [mesh.names.index(name) for name in axes if name in mesh.names]
        for axis in order:
            layout[axis] = dim
        if order != sorted(order):
            raise ShardingError(
                f"{what}: axes {axes} on dim {dim} are not in mesh order {mesh.names}. Write them in mesh order, or reorder the mesh."
            )
    return tuple(layout)


def check_divides(layout: Layout, shape: Sequence[int], mesh: Mesh, what: str) -> None:
    """Raises `ShardingError`, with the dimension and the axes, where the layout does not divide the shape."""
    counts = shard_counts(layout, len(shape), mesh.sizes)
    for dim, (n, count) in enumerate(zip(shape, counts, strict=True)):
        if n % count:
            axes = tuple(name for name, d in zip(mesh.names, layout, strict=True) if d == dim)
            raise ShardingError(
                f"dim {dim} of {what} has size {n} and cannot be sharded over {axes} of size {count}. "
                f"Use a mesh whose axis sizes divide {n}, or leave dim {dim} unsharded."
            )
