from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from autoshard.cost.reshard import Step
from autoshard.ir import Mesh
from autoshard.lower import jax_mesh
from autoshard.lower.collectives import moved


@pytest.mark.parametrize("inner", [2, 4])
@pytest.mark.parametrize("dim", [0, 1])
def test_an_all_gather_in_two_steps_is_one_of_all(inner, dim):
    """Groups of neighbours and then groups of devices apart give each device the whole, in order, along any dimension."""
    mesh, x = Mesh.of({"data": 8}), np.arange(16 * 24.0).reshape(16, 24)
    source, target = (dim,), (-1,)
    first = Step("all_gather", (0,), source, source, 0.0, 0.0, groups=(inner, 1))
    second = Step("all_gather", (0,), source, target, 0.0, 0.0, groups=(8 // inner, inner))
    spec = PartitionSpec(*["data" if k == dim else None for k in range(2)])

    def gathered(shard):
        return moved(moved(shard, first, mesh), second, mesh)[None]

    program = jax.shard_map(gathered, mesh=jax_mesh(mesh), in_specs=spec, out_specs=PartitionSpec("data"), check_vma=False)
    np.testing.assert_array_equal(program(x), np.broadcast_to(x, (8, 16, 24)))
