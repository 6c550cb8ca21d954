"""Optimizer state divided over a part of the devices that the batch is divided over: found where that is faster, unprompted."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.ir import entry_axes

OPTIMIZER = optax.adam(1e-4)


def train_step(state: Any, x: Any) -> Any:
    """A step of scanned feed-forward layers in mixed precision."""
    params, memory = state

    def loss(params: Any) -> Any:
        def layer(x: Any, w: Any) -> Any:
            return x + jax.nn.gelu(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype), None

        return jnp.mean(jax.lax.scan(jax.checkpoint(layer), x, params)[0].astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(params)
    updates, memory = OPTIMIZER.update(gradients, memory, params)
    return (optax.apply_updates(params, updates), memory), value


def axes_of(specs: Any) -> set[str]:
    """The mesh axes that divide some arrays."""
    leaves = jax.tree.leaves(specs, is_leaf=lambda each: isinstance(each, jax.P))
    return {axis for spec in leaves for entry in spec for axis in entry_axes(entry)}


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "width", "examples"), [("2*v5e:16x16", 4096, 1024), ("h100:8x32", 2048, 256)])
def test_state_is_divided_over_a_part_of_the_devices_of_the_batch(cluster: str, width: int, examples: int) -> None:
    """Of 512 chips in two slices over those of a slice, with other examples in each; of 256 GPUs over those of few hosts."""
    shapes = {"up": (16, width, 4 * width), "down": (16, 4 * width, width)}
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    state = params, jax.eval_shape(OPTIMIZER.init, params)
    x = jax.ShapeDtypeStruct((examples, 1024, width), jnp.bfloat16)
    found = autoshard.search(train_step, state, x, cluster=cluster, donate_argnums=0)
    kept, of_batch = axes_of(found.in_specs[0]), axes_of(jax.P(found.in_specs[1][0]))
    assert kept & of_batch and of_batch - kept
    assert math.prod(found.mesh_shape[axis] for axis in kept) >= 8
    mesh = found.record.mesh
    crossing = {axis for axis, link in zip(mesh.names, Cluster.parse(cluster).links(mesh), strict=True) if link.crossed}
    assert crossing <= of_batch - kept and bool(crossing) == ("*" in cluster)
