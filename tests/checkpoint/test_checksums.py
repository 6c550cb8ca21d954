"""The law of checksums: they depend on values and places alone, and show every change of one bit."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from autoshard.checkpoint.checksums import checksums

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint32", "int8", "uint8", "bool", "complex64", "float8_e4m3fn", "int4")


def array(dtype, seed=0, shape=(8, 12)):
    return jnp.asarray(np.random.default_rng(seed).integers(0, 2, shape)).astype(dtype)


def test_shardings_make_no_difference():
    """Of arrays of all types: whole, and split in various ways."""
    arrays = [array(dtype) for dtype in DTYPES]
    whole = checksums(arrays)
    assert len(set(whole)) > 1 and all(0 <= each < 2**32 for each in whole)
    for shape, spec in (((4,), P(None, "a")), ((2, 4), P("a", "b")), ((8,), P())):
        mesh = jax.sharding.Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), ("a", "b")[: len(shape)])
        assert checksums([jax.device_put(x, NamedSharding(mesh, spec)) for x in arrays]) == whole


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "bool"])
def test_every_change_of_a_bit_shows(dtype):
    """Wherever it is; the sign of a zero, and the payload of a NaN too."""
    host = np.asarray(array(dtype, shape=(3, 2)))
    seen = {checksums([jnp.asarray(host)])}
    n_bits = 1 if dtype == "bool" else 8 * host.dtype.itemsize
    for place in range(host.size):
        for bit in range(n_bits):
            changed = host.copy()
            changed.view(np.uint8).reshape(host.size, -1)[place, bit // 8] ^= 1 << bit % 8
            seen.add(checksums([jnp.asarray(changed)]))
    assert len(seen) == 1 + host.size * n_bits


@settings(max_examples=50)
@given(st.lists(st.integers(0, 2**32 - 1), min_size=8, max_size=8), st.permutations(range(8)))
def test_orders_and_signs_show(words, order):
    """Values that change places, and all signs at once, give another checksum."""
    host = np.array(words, np.uint32)
    one, moved, negated = checksums([jnp.asarray(host), jnp.asarray(host[order]), jnp.asarray(host ^ np.uint32(1 << 31))])
    assert (one == moved) == bool((host == host[order]).all()) and one != negated
