"""Arrays over all stages, taken apart into each stage's rows and put together, have the same buffers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from autoshard.ir import Mesh
from autoshard.lower import stage_meshes
from autoshard.pipeline.rows import rows_of_stages


@pytest.mark.parametrize(("dim", "spec"), [(0, PartitionSpec("data")), (1, PartitionSpec(None, None, "data"))])
def test_rows_are_taken_apart_and_put_together_without_a_copy(dim, spec):
    """Each stage's rows are the array's own shards on its devices, and together they are the array again; another array has its own."""
    meshes = stage_meshes([Mesh.of({"data": 2, "model": 2})] * 2)
    rows = rows_of_stages([jax.sharding.NamedSharding(mesh, spec) for mesh in meshes], dim)
    x = jax.device_put(jnp.arange(4 * 4 * 4.0).reshape(4, 4, 4), rows.sharding)
    apart = rows.apart(x)
    buffers = {shard.device: shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
    for number, part in enumerate(apart):
        assert part.sharding == rows.wanted[number]
        assert jnp.array_equal(jax.device_get(part), jnp.split(jax.device_get(x), 2, dim)[number])
        assert all(shard.data.unsafe_buffer_pointer() == buffers[shard.device] for shard in part.addressable_shards)
    again = rows.together(apart)
    assert again.sharding == x.sharding and jnp.array_equal(again, x)
    assert all(one is other for one, other in zip(rows.apart(again), apart, strict=True))  # without a look at its shards
    other = jax.device_put(-x, x.sharding)  # a restored state, say, while the array that was put together last is still there
    assert all(jnp.array_equal(-jax.device_get(one), jax.device_get(new)) for one, new in zip(apart, rows.apart(other), strict=True))
    del again
    assert not rows.latest  # nothing of an array outlives it
