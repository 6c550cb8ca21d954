"""Why a tensor is sharded as it is: names, costs of other layouts as the judge and searches have them, and what is not available."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from strategy_records import EXAMPLE

import autoshard
from autoshard.errors import StrategyError
from autoshard.explanation.tensor import group_of
from autoshard.explanation.tensor_text import tensor_parts
from autoshard.judge.evaluate import evaluate
from autoshard.render import Paragraph
from autoshard.strategy import TensorRecord


def train_step(state, x):
    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] + jnp.sum(jnp.cos(params["bias"]))) ** 2)

    grads = jax.grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}


def shapes():
    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return {"params": {"up": leaf(512, 2048), "down": leaf(2048, 512), "bias": leaf(6)}}, leaf(256, 512)


@cache
def strategy(searcher="dynamic_programming"):
    return autoshard.search(train_step, *shapes(), cluster="v5e:2x4", mesh={"data": 8}, searcher=searcher, donate_argnums=0)


def by_spec(data):
    return {each.spec: each for each in data.alternatives}


def test_each_layout_has_its_cost_alone_and_at_best():
    """'Alone' is the judge's step with that layout and no other change; 'at best' is that of a search with the layout pinned."""
    found = by_spec(strategy().explain("up").data)
    judged, value = strategy()._judged, strategy()._traced.graph.argument_paths.index("state['params']['up']")
    assert len(found) == 3
    for dim, spec in enumerate([("data", None), (None, "data")]):
        layouts = {**judged.record.assignment.layouts, strategy()._traced.graph.arguments[value]: (dim,)}
        alone = evaluate(judged.facts, judged.model, replace(judged.record.assignment, layouts=layouts)).cost
        pinned = autoshard.search(
            train_step, *shapes(), cluster="v5e:2x4", mesh={"data": 8}, searcher="dynamic_programming", donate_argnums=0,
            pins={"*up*": P(*spec)},
        )  # fmt: skip
        if not found[spec].is_own:
            assert found[spec].fixed_seconds == pytest.approx(alone.makespan_seconds)
            assert found[spec].step_seconds == pytest.approx(pinned.cost.makespan_seconds)


def test_what_is_not_available_says_why():
    """A dimension that does not divide, and a pin, each have their words; a replicated tensor says that it is."""
    data = strategy().explain("bias").data
    assert "dim 0 has size 6, which 8 does not divide" in by_spec(data)[("data",)].obstacle
    assert data.next_best is None
    assert "replicated" in str(strategy().explain("bias")) and "no other layout is available" in str(strategy().explain("bias"))
    pinned = autoshard.search(
        train_step, *shapes(), cluster="v5e:2x4", mesh={"data": 8}, pins={"*up*": P()}, searcher="dynamic_programming"
    )
    obstacles = {each.spec: each.obstacle for each in pinned.explain("up").data.alternatives}
    assert obstacles[("data", None)] == "a pin fixes another layout" and "a pin fixes it" in str(pinned.explain("up"))


def test_a_better_layout_than_somebodys_is_said():
    """Of a sharding by hand the answer says that another layout would be faster, and by how much."""
    specs = {"x": P("data"), "*up*": P(), "*down*": P("data")}
    given = autoshard.evaluate(train_step, *shapes(), cluster="v5e:2x4", mesh={"data": 8}, in_specs=specs)
    data = given.explain("down").data
    assert data.next_best.step_seconds < given.cost.makespan_seconds
    (first, *_) = (part for part in tensor_parts(data) if isinstance(part, Paragraph))
    assert "It is not the fastest" in first.text


@pytest.mark.parametrize(
    ("name", "group"),
    [
        ("state['params']['layers'][*]['up']", "state['params']['layers'][*]['up']"),
        ("state['params']['layers'][0]['up']", "state['params']['layers'][*]['up']"),
        ("layers/*/up", "state['params']['layers'][*]['up']"),
        ("params.layers.1.up", "state['params']['layers'][*]['up']"),
        ("norm", "state['params']['norm']"),
        ("mu/norm", "state['params']['norm']"),
        ("b?tch", "batch"),
    ],
)
def test_names_are_paths_patterns_and_ends(name, group):
    """A parameter comes before the moments that mirror it, and these name its group too."""
    assert group_of(model(), name).name == group


@pytest.mark.parametrize(
    ("name", "words"), [("norn", "Near ones: state['params']['norm']"), ("layers/*/*", "names 3 groups"), ("", "no argument of")]
)
def test_other_names_get_near_ones(name, words):
    """What is misspelt gets the nearest names, and what is ambiguous the groups."""
    with pytest.raises(StrategyError, match=words.replace("[", r"\[").replace("*", r"\*")):
        group_of(model(), name)


def model():
    def tensor(path, *shape):
        return TensorRecord(path, shape, "float32", (None,) * len(shape))

    params = [("layers'][0]['up", 64, 32), ("layers'][1]['up", 64, 32), ("layers'][0]['down", 32, 64), ("norm", 64)]
    own = [tensor(f"state['params']['{name}']", *shape) for name, *shape in params]
    moments = [tensor(f"state['optimizer'][0].mu['{name}']", *shape) for name, *shape in params]
    own += [tensor("state['params']['layers'][1]['down']", 32, 64)]
    return replace(EXAMPLE, arguments=tuple([*own, *moments, tensor("batch", 16, 64)]))
