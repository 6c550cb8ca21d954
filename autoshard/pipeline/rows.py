"""Arrays stacked along layers of which each stage has the rows of its own layers.

To the user one is a single array over the devices of all stages, whose dimension of layers, mostly the first, is split over them; to the
programs of a stage it is an array of its rows, on the stage's devices. Both have the same buffers: nothing is copied from one to the other.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard.lower import by_rows
from autoshard.pipeline.sending import is_here, put


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
