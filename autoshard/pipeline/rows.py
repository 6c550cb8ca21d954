"""Arrays stacked along layers of which each stage has the rows of its own layers.

To the user one is a single array over the devices of all stages, whose dimension of layers, mostly the first, is split over them; to the
programs of a stage it is an array of its rows, on the stage's devices. Both have the same buffers: nothing is copied from one to the other.

Where each part of the devices has several chunks, their layers are no neighbours, but a device has one block of an array: between steps it
has neighbouring rows. In each step the rows of chunks that are elsewhere are sent there, and the new ones back.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from autoshard.ir.pieces import rows_of
from autoshard.lower import by_rows
from autoshard.pipeline.sending import Copies, absent, is_here, put, sending


@dataclass(frozen=True, slots=True, eq=False)
class RowsOfStages:
    """Where such an array is; `rows_of_stages` makes it.

    Attributes:
        sharding: of the whole array.
        stages: per stage that of its rows, as they are in the whole array.
        wanted: the same as the stage's programs have them: where they differ, rows are moved among the stage's devices.
        dim: the dimension of layers.
        latest: the array that was put together last, and its rows: a loop over steps passes it to the next one. It is forgotten with the
            array, so that it keeps no memory.
    """

    sharding: NamedSharding
    stages: tuple[NamedSharding, ...]
    wanted: tuple[NamedSharding, ...]
    dim: int
    latest: list[Any] = field(default_factory=list)

    def apart(self, x: jax.Array) -> list[Any]:
        """Each stage's rows of an array with the sharding of the whole; None for stages of which this process has no devices."""
        if self.latest and self.latest[0]() is x:
            return [put(rows, wanted) if is_here(wanted) else None for rows, wanted in zip(self.latest[1], self.wanted, strict=True)]
        data, n = {shard.device: shard.data for shard in x.addressable_shards}, len(self.stages)
        shape = tuple(size // n if d == self.dim else size for d, size in enumerate(x.shape))

        def rows(own: NamedSharding, wanted: NamedSharding) -> Any:
            arrays = [data[device] for device in own.addressable_devices]
            return put(jax.make_array_from_single_device_arrays(shape, own, arrays), wanted) if arrays else None

        return [rows(own, wanted) for own, wanted in zip(self.stages, self.wanted, strict=True)]

    def together(self, rows: Sequence[jax.Array]) -> jax.Array:
        """The whole array of each stage's rows; those of stages elsewhere are global arrays without parts in this process."""
        shape = tuple(size * len(rows) if d == self.dim else size for d, size in enumerate(rows[0].shape))
        there = [put(x, own) if is_here(own) else x for x, own in zip(rows, self.stages, strict=True)]
        arrays = [shard.data for x in there for shard in x.addressable_shards]
        made = jax.make_array_from_single_device_arrays(shape, self.sharding, arrays)
        self.latest[:] = weakref.ref(made, lambda _: self.latest.clear()), there
        return made


def rows_of_stages(wanted: Sequence[NamedSharding], dim: int) -> RowsOfStages:
    """Where an array is whose parts along a dimension have these shardings on the stages: in the whole array all have the first's spec."""
    stages = tuple(NamedSharding(each.mesh, wanted[0].spec, memory_kind=each.memory_kind) for each in wanted)
    return RowsOfStages(by_rows(stages, dim), stages, tuple(wanted), dim)


class RowsOfChunks:
    """The same where each part of the devices has several chunks.

    Attributes:
        sharding: of the whole array.
        blocks: where it is, each part's rows together.
    """

    def __init__(self, wanted: Sequence[NamedSharding], n_parts: int, dim: int, type_: Any, donated: bool):
        """``wanted`` is per piece the sharding of its rows, which have a ``type_``; ``donated`` says that the array may be used up."""
        self.chunks, self.dim, self.donated = len(wanted) // n_parts, dim, donated
        own = [NamedSharding(each.mesh, wanted[0].spec) for each in wanted[:n_parts]]  # the first chunks are on all parts in order
        self.blocks: RowsOfStages = rows_of_stages(own, dim)
        self.sharding: NamedSharding = self.blocks.sharding
        homes = [own[rows_of(piece, self.chunks)] for piece in range(len(wanted))]
        pairs = list(zip(homes, wanted, strict=True))
        self._there = Copies([sending(home, place, type_.shape, type_.dtype) for home, place in pairs])
        self._back = Copies([sending(place, home, type_.shape, type_.dtype) for home, place in pairs])
        shape = tuple(size * self.chunks if d == dim else size for d, size in enumerate(type_.shape))
        self._absent = [None if is_here(each) else absent(shape, type_.dtype, each) for each in own]
        self._split = [jax.jit(self._parts, out_shardings=[each] * self.chunks) for each in own]
        self._join = [jax.jit(self._whole, out_shardings=each) for each in own]

    def _parts(self, block: jax.Array) -> list[jax.Array]:
        return jnp.split(block, self.chunks, self.dim)

    def _whole(self, *rows: jax.Array) -> jax.Array:
        return jnp.concatenate(rows, self.dim)

    def apart(self, x: jax.Array) -> list[Any]:
        """Each piece's rows of an array with the sharding of the whole; None for pieces of which this process has no devices."""
        blocks = self.blocks.apart(x)
        rows = [part for block, split in zip(blocks, self._split, strict=True) for part in self._rows(block, split)]
        if self.donated:
            for block in (*(block for block in blocks if block is not None), x):
                block.delete()
        return self._there(rows)

    def _rows(self, block: Any, split: Any) -> list[Any]:
        return [None] * self.chunks if block is None else split(block)

    def together(self, rows: Sequence[jax.Array]) -> jax.Array:
        """The whole array of each piece's rows."""
        back = self._back(rows)
        own = [back[first : first + self.chunks] for first in range(0, len(back), self.chunks)]
        parts = zip(own, self._join, self._absent, strict=True)
        return self.blocks.together([join(*each) if elsewhere is None else elsewhere for each, join, elsewhere in parts])
