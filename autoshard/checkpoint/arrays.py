"""A state's leaves as the arrays that Orbax stores, and back: typed keys as their data, nothing for arrays without elements."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.errors import CheckpointError
from autoshard.render import format_bytes
from autoshard.run.placing import put
from autoshard.run.structure import KEYS, dtype_of
from autoshard.strategy import TensorRecord


@dataclass(frozen=True, slots=True)
class Place:
    """A leaf of a state, and where it is wanted.

    Attributes:
        name: under which it is stored.
        tensor: its shape and type.
        sharding: where it is wanted.
        is_weak: whether its type is weak, as a Python number's.
    """

    name: str
    tensor: TensorRecord
    sharding: NamedSharding
    is_weak: bool = False

    @property
    def stored(self) -> jax.ShapeDtypeStruct:
        """What is stored, with its sharding."""
        shape, dtype, sharding = self.tensor.shape, self.tensor.dtype, self.sharding
        if dtype in KEYS:
            data = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0, impl=KEYS[dtype])))
            spec = (*sharding.spec, *(None,) * (len(shape) + data.ndim - len(sharding.spec)))
            return jax.ShapeDtypeStruct((*shape, *data.shape), data.dtype, sharding=NamedSharding(sharding.mesh, PartitionSpec(*spec)))
        return jax.ShapeDtypeStruct(shape, dtype_of(dtype), sharding=sharding)


def names_of(tensors: Sequence[TensorRecord]) -> list[str]:
    """A name for each array: its path, numbered where two arguments have the same."""
    paths = [tensor.path for tensor in tensors]
    return paths if len(set(paths)) == len(paths) else [f"{path} #{number}" for number, path in enumerate(paths)]


def placed_leaves(leaves: Sequence[Any], places: Sequence[Place]) -> list[jax.Array]:
    """The leaves as arrays of all processes: those on devices as they are, others put where they are wanted.

    Raises:
        CheckpointError: one was donated, or has another type.
        StrategyError: processes pass different arrays for one.
    """
    several = jax.process_count() > 1
    found = list(leaves)
    local = [at for at, x in enumerate(leaves) if not isinstance(x, jax.Array) or (several and x.is_fully_addressable)]
    if local:
        shardings, names = [places[at].sharding for at in local], [places[at].name for at in local]
        there = put([leaves[at] for at in local], shardings, names, (True,) * len(local))
        for at, x in zip(local, there, strict=True):
            found[at] = x
    for x, place in zip(found, places, strict=True):
        if x.is_deleted():
            raise CheckpointError(
                f"a state is saved while its arrays exist, and {place.name} was donated to a step. Save what the step returned."
            )
        if (x.shape, str(x.dtype)) != (place.tensor.shape, place.tensor.dtype):
            raise CheckpointError(
                f"a state is saved as its strategy has it, and {place.name} is {x.dtype}{list(x.shape)} where the strategy has "
                f"{place.tensor.dtype}{list(place.tensor.shape)}. Save it with the strategy of its own step."
            )
    return found


def stored(x: jax.Array) -> jax.Array:
    """An array as it is stored."""
    return jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def empty(place: Place) -> jax.Array:
    """The array without elements, where it is wanted."""
    wanted = place.stored
    return put([np.zeros(wanted.shape, wanted.dtype)], [wanted.sharding], [place.name])[0]  # pyright: ignore[reportArgumentType]


def leaf(x: jax.Array, place: Place) -> jax.Array:
    """The leaf of a stored array."""
    if place.tensor.dtype in KEYS:
        return jax.random.wrap_key_data(x, impl=KEYS[place.tensor.dtype])
    if place.is_weak and not x.ndim:
        return put([x.item()], [place.sharding], [place.name], (True,))[0]
    return x


def check_memory(places: Sequence[Place]) -> None:
    """Raises `CheckpointError` where the shapes alone say that the devices of this process cannot hold the arrays."""
    if not places:
        return
    devices = list(places[0].sharding.addressable_devices)
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    limit = sum(limits) if limits and all(limits) else os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")  # pyright: ignore
    needed = 0
    for place in places:
        wanted = place.stored
        needed += prod(wanted.sharding.shard_shape(wanted.shape)) * wanted.dtype.itemsize * len(devices)  # pyright: ignore
    if needed > limit:
        raise CheckpointError(
            f"a state is restored into the memory of this process's {len(devices)} devices, {format_bytes(limit)}, and by its shapes it "
            f"takes {format_bytes(needed)} there. Restore it under a strategy for more devices, or another checkpoint."
        )
