"""Steps with a `jax.shard_map` of their own in stages, each of which computes it on its own devices, have the numbers of plain JAX."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import ClusterError
from autoshard.pipeline.micro import micro_of
from autoshard.trace import trace

EXPERTS, WIDTH, HIDDEN, BATCH, LAYERS = 4, 16, 32, 32, 4
MESH = jax.make_mesh((EXPERTS,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.devices()[:EXPERTS])
SPLIT = P("expert")


@partial(jax.shard_map, mesh=MESH, in_specs=(SPLIT, P(), SPLIT, SPLIT), out_specs=SPLIT)
def experts(x, router, up, down):
    """Rows go to the device of their expert and back."""
    weights, chosen = lax.top_k(jax.nn.softmax(x @ router), 1)
    taken = jax.nn.one_hot(chosen[:, 0], EXPERTS, dtype=x.dtype)
    there = lax.all_to_all(jnp.einsum("be,bd->ebd", taken, x), "expert", 0, 0)
    made = jax.nn.relu(there @ up[0]) @ down[0]
    return jnp.einsum("ebd,be->bd", lax.all_to_all(made, "expert", 0, 0), taken * weights)


def layer(x, weights):
    return x + experts(x, weights["router"], weights["up"], weights["down"]), None


def step(layers, x, y):
    def loss(layers):
        if isinstance(layers, dict):
            found, _ = lax.scan(layer, x, layers)
        else:
            found = x
            for weights in layers:
                found, _ = layer(found, weights)
        return jnp.mean((found - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(layers)
    return jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradients), value


def example(scanned):
    shapes = {"router": (WIDTH, EXPERTS), "up": (EXPERTS, WIDTH, HIDDEN), "down": (EXPERTS, HIDDEN, WIDTH)}
    keys = jax.random.split(jax.random.key(0), LAYERS)
    layers = [{name: jax.random.normal(key, shape) / 5 for name, shape in shapes.items()} for key in keys]
    layers = jax.tree.map(lambda *each: jnp.stack(each), *layers) if scanned else layers
    return layers, jax.random.normal(keys[0], (BATCH, WIDTH)), jnp.ones((BATCH, WIDTH))


@pytest.mark.slow
@pytest.mark.parametrize("scanned", [False, True])
@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "auto"])
def test_experts_of_a_stage_are_on_its_devices(schedule, scanned):
    """Weights and loss are those of plain JAX, whose devices are the mesh's; those of the second stage are others."""
    args = example(scanned)
    options = {"stages": 2, "microbatches": 4, "schedule": schedule, "searcher": "data_parallel"}
    strategy = autoshard.search(step, *args, cluster="cpu:8", **options)
    assert [stage.mesh_shape for stage in strategy.stages] == [{"expert": EXPERTS}] * len(strategy.stages)
    found, expected = strategy.apply(step)(*strategy.shard(*args)), jax.jit(step)(*args)
    for here, there in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(here), np.asarray(there), atol=1e-5)


def test_a_shard_map_is_one_operation_of_a_microbatch():
    """It is on one stage with all that it computes, and names no devices."""
    micro = micro_of(trace(step, *example(False)), 4)
    mapped = [op for op in micro.body.ops if any(inner.mapped for inner in op.walk())]
    assert len(mapped) >= 2 * LAYERS and all(op.primitive == "remat2" for op in mapped)
    inner = [each.params["mesh"] for op in mapped for each in op.walk() if "entries" in each.params]
    assert inner and all(isinstance(mesh, jax.sharding.AbstractMesh) for mesh in inner)


@pytest.mark.slow
def test_its_mesh_has_as_many_devices_as_a_stage():
    """Else the search says what the shard_map has, and what a stage has."""
    with pytest.raises(ClusterError, match=r"the shard_map at .* is on expert=4, of 4 devices, and .* has 2"):
        autoshard.search(step, *example(False), cluster="cpu:8", stages=4, microbatches=4, schedule="1f1b")
