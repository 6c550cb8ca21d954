"""Checksums of arrays where they are: of the values alone, however they are sharded.

An array's checksum is the sum modulo 2**32 of a hash of each of its 32-bit words with its place. A hash is one-to-one in the word, so that
a change of one word always shows; any other change escapes with a probability of 2**-32. Sums do not depend on their order: every sharding,
mesh and number of processes gives the same, and one word an array leaves the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.run.placing import by_devices

_SPREAD = np.uint32(0x9E3779B1)  # odd
_MIXERS = (np.uint32(0x85EBCA6B), np.uint32(0xC2B2AE35))  # of MurmurHash3's finalizer
_WORD = 0xFFFFFFFF


def checksums(arrays: Sequence[jax.Array]) -> tuple[int, ...]:
    """A number an array; in several processes all have to call, and get the same.

    >>> one, other, moved = checksums([jnp.array([1.0, 2.0]), jnp.array([1.0, -2.0]), jnp.array([2.0, 1.0])])
    >>> len({one, other, moved})
    3
    """
    totals = [0] * len(arrays)
    for places in by_devices([x.sharding for x in arrays]):
        for place, total in zip(places, _totals(tuple(arrays[place] for place in places)), strict=True):
            totals[place] = int(np.asarray(total))
    return tuple(totals)


@jax.jit
def _totals(arrays: tuple[jax.Array, ...]) -> list[jax.Array]:
    return [jnp.sum(_hashed(_words(_on_device(x))), dtype=jnp.uint32) for x in arrays]


def _on_device(x: jax.Array) -> jax.Array:
    """The array in its devices' memory: offloaded ones are in that of hosts, where nothing is computed."""
    return x if jax.typeof(x).memory_space == jax.memory.Space.Device else jax.device_put(x, jax.memory.Space.Device)


def _hashed(words: jax.Array) -> jax.Array:
    strides = [np.uint32(prod(words.shape[dim + 1 :]) & _WORD) for dim in range(words.ndim)]
    places = [lax.broadcasted_iota(jnp.uint32, words.shape, dim) * stride for dim, stride in enumerate(strides)]
    mixed = words ^ sum(places, jnp.zeros(words.shape, jnp.uint32)) * _SPREAD
    for shift, mixer in zip((16, 13), _MIXERS, strict=True):
        mixed = (mixed ^ (mixed >> shift)) * mixer
    return mixed ^ (mixed >> 16)


def _words(x: jax.Array) -> jax.Array:
    """The bits of an array as 32-bit words; elements of more bits have several, in last dimensions."""
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return jnp.stack([_words(jnp.real(x)), _words(jnp.imag(x))], axis=-1)
    if x.dtype.itemsize == 8:
        return lax.bitcast_convert_type(x, jnp.uint32)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x if x.dtype == jnp.uint32 else x.astype(jnp.int32).astype(jnp.uint32)
    if jnp.finfo(x.dtype).bits < 8:
        return lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    return lax.bitcast_convert_type(x, {4: jnp.uint32, 2: jnp.uint16, 1: jnp.uint8}[x.dtype.itemsize]).astype(jnp.uint32)
