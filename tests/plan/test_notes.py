"""Notes of strategies."""

import jax
import jax.numpy as jnp
import pytest

import autoshard

TABLE = jax.ShapeDtypeStruct((32, 16), jnp.float32)


def _gradient(dtype):
    def step(table, ids):
        return table - jax.grad(lambda t: (t.astype(dtype)[ids].astype(jnp.float32) ** 2).sum())(table)

    return step


@pytest.mark.parametrize(
    ("cluster", "dtype", "lookups", "times"),
    [
        ("h100:1x1", jnp.bfloat16, 8192, "256"),
        ("h100:1x1", jnp.float16, 65536, "2,048"),
        ("h100:1x4", jnp.bfloat16, 65536, "512"),  # a quarter on each device
        ("h100:1x4", jnp.bfloat16, 8192, ""),
        ("h100:1x1", jnp.bfloat16, 8191, ""),
        ("h100:1x1", jnp.float32, 65536, ""),
        ("v5e:1x1", jnp.bfloat16, 65536, ""),
    ],
)
def test_many_additions_to_one_element_in_half_precision_are_slow_on_gpus(cluster, dtype, lookups, times):
    """Told with the line and the additions of one device, where a GPU has no fast atomic addition of the type."""
    ids = jax.ShapeDtypeStruct((lookups,), jnp.int32)
    axes = {"data": int(cluster[-1])}
    found = autoshard.search(_gradient(dtype), TABLE, ids, cluster=cluster, mesh=axes, searcher="data_parallel")
    given = autoshard.evaluate(_gradient(dtype), TABLE, ids, cluster=cluster, mesh=axes, in_specs=(jax.P(), jax.P("data")))
    for notes in (found.notes, given.notes):
        told = [note for note in notes if "one after another" in note]
        assert len(told) == (1 if times else 0)
        assert all(f"adds {times} numbers to each element in {jnp.dtype(dtype)}" in note and "test_notes.py:" in note for note in told)
