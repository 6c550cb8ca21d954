"""Arrays in their own sizes and with padding, where a strategy pads dimensions: JAX stores no array unevenly over devices.

A call returns things in the form it was given. State that `Strategy.shard` or `Strategy.init` placed has padding, and so has the state that
the step returns for it; of arrays in their own sizes, the step pads and returns those.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.ir import Spec, entry_axes
from autoshard.ir.rewrites import Padded
from autoshard.rewrite.extents import Extents, is_suffix, padded_shape, resized
from autoshard.strategy import Record
from autoshard.trace import SplitModules

Shape = tuple[int, ...]
Change = tuple[Extents, Extents]
"""The padding that an array has, and that it gets."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """The sizes of one argument leaf.

    Attributes:
        own: its shape as the function is written.
        extents: the padding of each dimension.
    """

    own: Shape
    extents: Extents

    @property
    def padded(self) -> Shape:
        """Its shape with padding."""
        return padded_shape(self.own, self.extents)

    @property
    def at_end(self) -> bool:
        """Whether padding is at the end of each dimension."""
        return all(map(is_suffix, self.extents))

    def added(self, x: Any) -> Change | None:
        """The change that gives an array padding of zeros; None where it is no array in its own sizes."""
        return (self._none, self.extents) if np.shape(x) == self.own and any(self.extents) else None

    def removed(self, x: Any) -> Change | None:
        """The change that takes an array's padding away; None where it has none."""
        return (self.extents, self._none) if np.shape(x) == self.padded and any(self.extents) else None

    def own_spec(self, spec: Spec, sizes: Mapping[str, int]) -> tuple[Any, ...]:
        """The spec in which the array is stored in its own sizes: dimensions with padding are whole, and their axes split others.

        Args:
            sizes: of the mesh axes.
        """
        entries = [entry_axes(entry) for entry in (*spec, *(None,) * (len(self.own) - len(spec)))]
        kept = [[] if of else [*axes] for axes, of in zip(entries, self.extents, strict=True)]
        even = sorted((dim for dim, of in enumerate(self.extents) if not of), key=lambda dim: -self.own[dim])
        for axis in (axis for axes, of in zip(entries, self.extents, strict=True) if of for axis in axes):
            parts = {dim: math.prod(sizes[other] for other in (*kept[dim], axis)) for dim in even}
            if (fits := next((dim for dim, n in parts.items() if self.own[dim] % n == 0), None)) is not None:
                kept[fits].append(axis)
        return tuple(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in kept)

    @property
    def _none(self) -> Extents:
        return ((),) * len(self.own)


def _resize(arrays: Sequence[Any], changes: Sequence[Change | None]) -> list[Any]:
    """Arrays with other padding where that is to change.

    One program changes all arrays on the same devices: with more than 32 programs with collectives under way, XLA:CPU may wait forever.
    """
    result, together = list(arrays), defaultdict(list)
    for at, (x, change) in enumerate(zip(arrays, changes, strict=True)):
        if change is None:
            continue
        if isinstance(x, jax.Array) and x.ndim:
            together[None if isinstance(x, Tracer) else frozenset(x.sharding.device_set)].append(at)
        else:
            result[at] = _resize_on_host(x, *change)
    for places in together.values():
        resized_there = _resize_together([arrays[at] for at in places], changes=tuple(changes[at] for at in places))
        for at, x in zip(places, resized_there, strict=True):
            result[at] = x
    return result


def _resize_on_host(x: Any, have: Extents, want: Extents) -> Any:
    if isinstance(x, np.ndarray) and not any(have) and all(map(is_suffix, want)):  # not by way of a device
        return np.pad(x, [(0, of[0][1] - of[0][0]) if of else (0, 0) for of in want])
    return resized(x, have, want)


@partial(jax.jit, static_argnames="changes")
def _resize_together(arrays: Sequence[jax.Array], changes: Sequence[Change]) -> list[jax.Array]:
    return [resized(x, have, want) for x, (have, want) in zip(arrays, changes, strict=True)]


class PaddedArguments:
    """The sizes of a strategy's arguments.

    Attributes:
        leaves: per argument leaf its sizes, where it has padding.
    """

    def __init__(self, record: Record):
        self._shapes = [tuple(tensor.shape) for tensor in record.arguments]
        self.leaves: dict[int, Sizes] = {}
        for rewrite in record.program.rewrites:
            for position, dim, of in rewrite.arguments if isinstance(rewrite, Padded) else ():
                self._add(position, dim, of)

    def _add(self, position: int, dim: int, of: Any) -> None:
        shape = self._shapes[position]
        sizes = self.leaves.get(position, Sizes(shape, ((),) * len(shape)))
        size = 1
        for part, _ in of:
            size *= part
        own, extents = list(sizes.own), list(sizes.extents)
        own[dim], extents[dim] = size, of
        self.leaves[position] = Sizes(tuple(own), tuple(extents))

    def __bool__(self) -> bool:
        return bool(self.leaves)

    @cached_property
    def own_shapes(self) -> list[Shape]:
        """Per argument leaf its shape as the function is written."""
        return [self.leaves[k].own if k in self.leaves else shape for k, shape in enumerate(self._shapes)]

    def with_padding(self, leaves: Sequence[Any], first: int = 0) -> list[Any]:
        """Argument leaves, from a position on, with padding; those that have it, and all others, as they are."""
        return _resize(leaves, [self.leaves[k].added(x) if k in self.leaves else None for k, x in enumerate(leaves, first)])

    def without_padding(self, leaves: Sequence[Any], first: int = 0) -> list[Any]:
        """Argument leaves, from a position on, without padding."""
        return _resize(leaves, [self.leaves[k].removed(x) if k in self.leaves else None for k, x in enumerate(leaves, first)])

    def as_written(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as the function is written for them: arrays with padding are types without, and all others as they are."""
        return self._other(args, lambda sizes, shape: sizes.own if shape == sizes.padded else shape)

    def as_stored(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The arguments as the strategy stores them: arrays in their own sizes are types with padding, and all others as they are."""
        return self._other(args, lambda sizes, shape: sizes.padded if shape == sizes.own else shape)

    def _other(self, args: tuple, shape_of: Callable[[Sizes, Shape], Shape]) -> tuple:
        """The arguments with types in place of arrays, where some have other shapes."""
        if not self.leaves:
            return args
        split = SplitModules(args)
        leaves, tree = jax.tree.flatten(split.states)
        if len(leaves) != len(self._shapes):
            return args
        shapes = {k: shape_of(sizes, np.shape(leaves[k])) for k, sizes in self.leaves.items()}
        if all(np.shape(leaves[k]) == shape for k, shape in shapes.items()):
            return args
        return split.rebuild(tree.unflatten([_typed(x, shapes.get(k)) for k, x in enumerate(leaves)]))

    def given_own(self, leaves: Sequence[Any]) -> Mapping[int, Sizes]:
        """The leaves that are given in their own sizes, of those that have padding."""
        return {k: sizes for k, sizes in self.leaves.items() if np.shape(leaves[k]) == sizes.own}


def _typed(x: Any, shape: Shape | None) -> Any:
    """A type in place of an array."""
    if not isinstance(x, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return x
    return jax.ShapeDtypeStruct(x.shape if shape is None else shape, x.dtype, weak_type=getattr(x, "weak_type", False))


def own_sharding(sharding: NamedSharding, sizes: Sizes) -> NamedSharding:
    """Where an array is in its own sizes."""
    spec = sizes.own_spec(tuple(sharding.spec), sharding.mesh.shape)
    return NamedSharding(sharding.mesh, PartitionSpec(*spec), memory_kind=sharding.memory_kind)


def in_own_sizes(
    function: Callable[..., list[Any]], own: Mapping[int, Sizes], aliases: Sequence[tuple[int, int]]
) -> Callable[..., list[Any]]:
    """A function of arguments with padding, for some that are in their own sizes; so are the results that replace these.

    Args:
        own: the sizes of these arguments.
        aliases: pairs of a result and the argument that it replaces.
    """

    def called(*arguments: Any) -> list[Any]:
        results = function(*_resize(arguments, [own[k].added(x) if k in own else None for k, x in enumerate(arguments)]))
        replaced = {result: own[argument] for result, argument in aliases if argument in own}
        return _resize(results, [replaced[k].removed(x) if k in replaced else None for k, x in enumerate(results)])

    return called
