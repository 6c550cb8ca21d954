"""Quantised weights are sent quantised."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import autoshard

WIDTH, LAYERS = 1024, 3
STATE = {
    "frozen": jax.ShapeDtypeStruct((LAYERS, WIDTH, WIDTH), jnp.int8),
    "scales": jax.ShapeDtypeStruct((LAYERS, WIDTH), jnp.bfloat16),
}
X = jax.ShapeDtypeStruct((8192, WIDTH), jnp.bfloat16)


def step(state, x):
    """The scales are trained, the weights are not."""

    def loss(scales):
        @jax.checkpoint
        def layer(x, weights):
            q, s = weights
            return jnp.tanh(x @ q.astype(jnp.bfloat16) * s), None

        return jnp.sum(jax.lax.scan(layer, x, (state["frozen"], scales))[0].astype(jnp.float32))

    return state | {"scales": state["scales"] - jax.grad(loss)(state["scales"])}


def both_ways(q, b, x):
    """The weight multiplied as it is and transposed, as the gradient of another one has it."""

    def loss(b):
        return jnp.sum((jnp.tanh(x @ q.astype(jnp.bfloat16) + b) @ q.T.astype(jnp.bfloat16)).astype(jnp.float32))

    return b - jax.grad(loss)(b)


def gathered(found):
    """The large arrays that are gathered."""
    return [each.tensor for each in found.cost.collectives if each.kind == "all_gather" and each.bytes >= WIDTH * WIDTH]


def test_fully_sharded_weights_are_gathered_before_they_are_cast():
    found = autoshard.search(step, STATE, X, cluster="v5e:2x4", mesh={"data": 8}, searcher="fully_sharded", donate_argnums=0)
    assert gathered(found) and all("int8" in tensor for tensor in gathered(found)), gathered(found)


def test_search_gathers_quantised_weights_before_they_are_cast():
    args = jax.ShapeDtypeStruct((WIDTH, 2 * WIDTH), jnp.int8), jax.ShapeDtypeStruct((2 * WIDTH,), jnp.bfloat16), X
    pins = {"q": P("data"), "x": P("data")}
    found = autoshard.search(both_ways, *args, cluster="v5e:2x4", mesh={"data": 8}, pins=pins, donate_argnums=1)
    assert gathered(found) == [f"q int8[{WIDTH},{2 * WIDTH}]"], "once, for both"
