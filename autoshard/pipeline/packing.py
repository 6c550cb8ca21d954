"""Arrays of each device as they are handed from one program of a stage to the next, as few of them as possible.

The time that a call takes the host grows with the number of arrays: with small ones it is longer than what devices compute. So small arrays
are concatenated, which costs a copy; large ones, whose copies would take devices longer than the host, are handed on as
they are. What a device has may differ from device to device, as partial sums do: an array is handed on with a new first dimension over all
devices.
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
    """Where one array is: the number of the array that it is handed on in, and its first element there; -1 where it is that array."""

    array: int
    first: int
    shape: tuple[int, ...]
    dtype: Any


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
    def of(cls, types: Sequence[Any], keep_dtypes: bool = False) -> Packing:
        """The packing of arrays of these types; with ``keep_dtypes`` each array that is handed on has one of theirs."""
        places: list[_Place] = []
        packed: dict[Any, tuple[int, int]] = {}  # per dtype the array and its length so far
        n_arrays = 0
        for type_ in types:
            size = math.prod(type_.shape)
            storage = None if jnp.issubdtype(type_.dtype, jax.dtypes.extended) else _storage(type_.dtype, keep_dtypes)
            if storage is None or size * np.dtype(storage).itemsize > SMALL_BYTES:
                places.append(_Place(n_arrays, -1, tuple(type_.shape), type_.dtype))
                n_arrays += 1
                continue
            array, length = packed.get(storage, (n_arrays, 0))
            n_arrays += storage not in packed
            packed[storage] = array, length + size
            places.append(_Place(array, length, tuple(type_.shape), type_.dtype))
        return cls(tuple(places), n_arrays)

    def pack(self, arrays: Sequence[Any]) -> list[Any]:
        """What is handed on for a device's arrays."""
        found: list[list[Any]] = [[] for _ in range(self.n_arrays)]
        for place, x in zip(self.places, arrays, strict=True):
            found[place.array].append(x if place.first < 0 else jnp.asarray(x, place.dtype).reshape(-1))
        dtypes: dict[int, set] = {}
        for place in self.places:
            dtypes.setdefault(place.array, set()).add(place.dtype)
        joined = []
        for k, parts in enumerate(found):
            if len(dtypes[k]) > 1:
                parts = [_unsigned(x) for x in parts]
            joined.append(parts[0] if len(parts) == 1 else jnp.concatenate(parts))
        return [x[None] for x in joined]

    def unpack(self, handed_on: Sequence[Any]) -> list[Any]:
        """A device's arrays of what was handed on."""
        found = []
        for place in self.places:
            x = handed_on[place.array][0]
            if place.first >= 0:
                part = lax.slice_in_dim(x, place.first, place.first + math.prod(place.shape))
                x = _restored(part, place.dtype).reshape(place.shape)
            found.append(x)
        return found


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
