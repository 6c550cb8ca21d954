"""Comparisons of two strategies say what differs and what it costs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import StrategyError


def train_step(state, x):
    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value


def shapes(batch=256):
    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return {"params": {"up": leaf(512, 2048), "down": leaf(2048, 512)}}, leaf(batch, 512)


def test_a_comparison_has_what_differs():
    """Groups whose specs differ with both, collectives by kind, and seconds by layer that add up to the two steps."""
    specs = {"x": P("data"), "*": P()}
    whole = autoshard.evaluate(train_step, *shapes(), cluster="v5e:2x4", mesh={"data": 8}, in_specs=specs)
    split = autoshard.evaluate(train_step, *shapes(), cluster="v5e:2x4", mesh={"data": 8}, in_specs={**specs, "*down*": P("data")})
    found = autoshard.compare(whole, split, names=("whole", "split")).data
    (change,) = found.tensors
    assert (change.before, change.after) == ((None, None), ("data", None)) and change.before_bytes == 8 * change.after_bytes
    assert {each.name for each in found.collectives} >= {"all_reduce", "all_gather"}
    assert sum(each.before_seconds for each in found.layers) == pytest.approx(
        whole.cost.compute_seconds + whole.cost.exposed_communication_seconds
    )
    assert "whole" in str(autoshard.compare(whole, split, names=("whole", "split")))
    assert autoshard.compare(whole, whole).data.tensors == ()
    with pytest.raises(StrategyError, match="two strategies"):
        autoshard.compare(whole, "split.json")
