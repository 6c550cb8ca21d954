from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from collective_types import TYPES, N, collectives_of
from jax.sharding import Mesh, PartitionSpec

from autoshard.compilers import TARGETS
from autoshard.lower import element_types as et

FEW = ["bool", "int4", "int64", "float8_e4m3", "float8_e5m2", "bfloat16", "float64", "complex64"]


def wide(x):
    """Numbers as NumPy computes with them."""
    x = np.asarray(x)
    return x if x.dtype.kind in "buic" and x.dtype.name in np.sctypeDict else x.astype(np.float64)


def numbers(name, rng):
    """Numbers whose sums every type has, and whose trailing halves differ where a type has some."""
    dtype = jnp.dtype(name)
    small = rng.integers(0 if name.startswith("u") else -1, 2, (N, 8, 8))
    if name == "float8_e8m0fnu":
        return (2.0**small).astype(dtype)
    if name.startswith("complex"):
        return (small + 1j * small[::-1]).astype(dtype)
    if dtype.itemsize < 8:
        return small.astype(dtype)
    last = rng.integers(0, 2**31, small.shape) * (2.0**-40 if dtype.kind == "f" else 1)
    return small.astype(dtype) * 2**3 + last if dtype.kind == "f" else small.astype(dtype) * 2**33 + last.astype(dtype)


@pytest.mark.sample(1)
@pytest.mark.parametrize("types", [FEW, pytest.param(TYPES, marks=pytest.mark.slow)], ids=["few types", "all types"])
@pytest.mark.parametrize("lacked", [False, True])
def test_collectives_of_every_type_combine_what_devices_have(monkeypatch, lacked, types):
    """Bit for bit what NumPy makes of the shards, by the collectives of XLA:CPU and by those that stand in for what compilers lack."""
    lacks = {(one, name) for target in TARGETS.values() for one, names in target.lacks.items() for name in names}
    monkeypatch.setattr(et, "lacking", lambda collective, name: ("cpu",) if lacked and (collective, name) in lacks else ())
    with jax.enable_x64(True):
        rng, mesh = np.random.default_rng(0), Mesh(np.array(jax.devices()[:N]), "x")
        given = {name: numbers(name, rng) for name in types if not lacked or name in {name for _, name in lacks}}

        def made(given):
            return {name: {one: how(x[0])[None] for one, (how, _) in collectives_of(name).items()} for name, x in given.items()}

        spec = PartitionSpec("x")
        results = jax.jit(jax.shard_map(made, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(given)
        for name, found in results.items():
            for one, (_, expected) in collectives_of(name).items():
                assert found[one].dtype == name
                wanted = expected(wide(given[name])).astype(given[name].dtype)
                np.testing.assert_array_equal(wide(found[one]), wide(wanted), f"{one} of {name}")


def test_the_largest_and_the_least_of_devices_are_nan_where_one_of_theirs_is():
    """As on one device, for NaN of either sign; infinities and zeros are in the order of the others."""
    with jax.enable_x64(True):
        rows = np.array([[np.nan, 1, -np.inf, -2.0], [1, -np.nan, np.inf, -0.5], [-1, 3, 0.0, -1.0], [2, -3, 2, -4.0]])
        types = ["float8_e5m2", "float8_e8m0fnu", "bfloat16", "float16", "float32", "float64"]
        given = {name: jnp.asarray(rows, name) if name != "float8_e8m0fnu" else jnp.exp2(jnp.asarray(rows)).astype(name) for name in types}

        def made(given):
            return {name: [et.all_reduce(x, ("x",), "max"), et.all_reduce(x, ("x",), "min")] for name, x in given.items()}

        spec, mesh = PartitionSpec("x"), Mesh(np.array(jax.devices()[:N]), "x")
        results = jax.jit(jax.shard_map(made, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))(given)
        for name, found in results.items():
            wanted = [np.broadcast_to(extreme(wide(given[name]), 0), rows.shape) for extreme in (np.max, np.min)]
            np.testing.assert_array_equal([wide(each) for each in found], wanted, name)
