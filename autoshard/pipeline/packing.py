"""Arrays of each device as they are handed from one program of a stage to the next, as few of them as possible.

The time that a call takes the host grows with the number of arrays: with small ones it is longer than what devices compute. So small arrays
are concatenated, which costs a copy; large ones, whose copies would take devices longer than the host, and those in the memory of hosts,
are handed on as they are. What a device has may differ from device to device, as partial sums do: an array that is handed on is what all
devices have, one after the other along its first dimension.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SMALL_BYTES = 2**20  # copied twice in about 2 microseconds at 1 TB/s, and a tenth of what an array costs the host is 1
_UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


@dataclass(frozen=True, slots=True)
class _Place:
    """Where one array is.

    Attributes:
        array: the number of the array that it is handed on in.
        first: its first element there; -1 where it is that array.
        handed: the dtype that it has there.
        dtype: its own.
        on_host: whether it is in the memory of the device's host.
    """

    array: int
    first: int
    shape: tuple[int, ...]
    handed: Any
    dtype: Any
    on_host: bool = False


@dataclass(frozen=True, slots=True)
class Packing:
    """How a list of a device's arrays is handed on.

    Attributes:
        places: one per array.
        n_arrays: how many arrays they are handed on in.
    """

    places: tuple[_Place, ...]
    n_arrays: int

    @classmethod
    def of(cls, types: Sequence[Any], keep_dtypes: bool = False, dtypes: Sequence[Any] | None = None) -> Packing:
        """The packing of arrays of these types; with ``keep_dtypes`` each array that is handed on has one of theirs.

        Args:
            dtypes: in which the arrays are handed on; None: their own.
        """
        places: list[_Place] = []
        packed: dict[Any, tuple[int, int]] = {}  # per dtype the array and its length so far
        n_arrays = 0
        for type_, handed in zip(types, dtypes or [each.dtype for each in types], strict=True):
            size, on_host = math.prod(type_.shape), getattr(type_, "memory_space", None) == jax.memory.Space.Host
            storage = None if _is_key(handed) or on_host else _storage(handed, keep_dtypes)
            if storage is None or size * np.dtype(storage).itemsize > SMALL_BYTES:
                places.append(_Place(n_arrays, -1, tuple(type_.shape), type_.dtype if on_host else handed, type_.dtype, on_host))
                n_arrays += 1
                continue
            array, length = packed.get(storage, (n_arrays, 0))
            n_arrays += storage not in packed
            packed[storage] = array, length + size
            places.append(_Place(array, length, tuple(type_.shape), handed, type_.dtype))
        return cls(tuple(places), n_arrays)

    @property
    def dtypes(self) -> tuple[Any, ...]:
        """In which the arrays are handed on."""
        return tuple(place.handed for place in self.places)

    @property
    def on_host(self) -> tuple[bool, ...]:
        """Per array that is handed on whether it is in the memory of hosts."""
        there = {place.array for place in self.places if place.on_host}
        return tuple(k in there for k in range(self.n_arrays))

    @property
    def nbytes(self) -> float:
        """The bytes of the arrays on a device; none of random keys, nor of what is in the memory of hosts."""
        own = (place for place in self.places if not place.on_host and not _is_key(place.handed))
        sizes = (math.prod(place.shape) * np.dtype(place.handed).itemsize for place in own)
        return float(sum(sizes))

    def pack(self, arrays: Sequence[Any]) -> list[Any]:
        """What is handed on for a device's arrays."""
        found: list[list[Any]] = [[] for _ in range(self.n_arrays)]
        for place, x in zip(self.places, arrays, strict=True):
            x = x if place.handed == place.dtype and place.first < 0 else jnp.asarray(x, place.handed)
            found[place.array].append(x if place.first < 0 else x.reshape(-1))
        dtypes: dict[int, set[Any]] = {}
        for place in self.places:
            dtypes.setdefault(place.array, set()).add(place.handed)
        joined = []
        for k, parts in enumerate(found):
            if len(dtypes[k]) > 1:
                parts = [_unsigned(x) for x in parts]
            joined.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts))
        return [x if x.ndim else x[None] for x in joined]

    def unpack(self, handed_on: Sequence[Any]) -> list[Any]:
        """A device's arrays of what was handed on."""
        found = []
        for place in self.places:
            x = handed_on[place.array]
            if place.first < 0:
                x = x.reshape(place.shape)
            else:
                # Without a barrier XLA:TPU reshapes the packed array as a whole before it is sliced, and pads rows of few columns to 128.
                part = lax.optimization_barrier(lax.slice_in_dim(x, place.first, place.first + math.prod(place.shape)))
                x = _restored(part, place.handed).reshape(place.shape)
            found.append(x if place.handed == place.dtype else x.astype(place.dtype))
        return found


def _is_key(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def _storage(dtype: Any, keep: bool) -> Any:
    """The dtype of the array in which arrays of a dtype are stored."""
    dtype = jnp.dtype(dtype)
    if keep or dtype.kind == "c" or dtype.itemsize not in _UNSIGNED or "int4" in dtype.name or "int2" in dtype.name:
        return dtype
    return jnp.dtype(_UNSIGNED[dtype.itemsize])


def _unsigned(x: Any) -> Any:
    """The bits of an array as unsigned integers."""
    if x.dtype == jnp.bool_:
        return x.astype(jnp.uint8)
    target = _UNSIGNED[x.dtype.itemsize]
    return x if x.dtype == target else lax.bitcast_convert_type(x, target)


def _restored(x: Any, dtype: Any) -> Any:
    """An array of a dtype of its bits, or itself."""
    if x.dtype == dtype:
        return x
    return x.astype(jnp.bool_) if dtype == jnp.bool_ else lax.bitcast_convert_type(x, dtype)
