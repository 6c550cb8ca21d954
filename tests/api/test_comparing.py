"""What-ifs are searches of the same program under one change, and comparisons say what differs and what it costs."""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import ClusterError, StrategyError

OPTIONS = {"cluster": "v5e:2x4", "searcher": "dynamic_programming", "donate_argnums": 0}


def train_step(state, x):
    def loss(params):
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)

    value, grads = jax.value_and_grad(loss)(state["params"])
    return {"params": jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)}, value


def shapes(batch=256):
    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return {"params": {"up": leaf(512, 2048), "down": leaf(2048, 512)}}, leaf(batch, 512)


@cache
def strategy():
    return autoshard.search(train_step, *shapes(), mesh={"data": 8}, **OPTIONS)


@pytest.mark.parametrize(
    ("change", "program"),
    [
        ({"pins": {"*up*": P(None, "data")}}, {"mesh": {"data": 8}, "pins": {"*up*": P(None, "data")}}),
        ({"mesh": {"data": 2, "model": 4}}, {"mesh": {"data": 2, "model": 4}}),
        ({"batch": 64}, {"mesh": {"data": 8}}),
        ({"cluster": "v5e:4x4", "mesh": {"data": 16}}, {"mesh": {"data": 16}, "cluster": "v5e:4x4"}),
    ],
    ids=lambda change: ",".join(change),
)
def test_a_what_if_is_the_search_with_that_change(change, program):
    """Its strategy has the cost that a search from the function has under the same change, and both sides' figures are theirs."""
    found = strategy().what_if(**change)
    searched = autoshard.search(train_step, *shapes(change.get("batch", 256)), **{**OPTIONS, **program})
    assert found.strategy.cost.makespan_seconds == pytest.approx(searched.cost.makespan_seconds, rel=1e-9)
    assert found.data.before.step_seconds == strategy().cost.makespan_seconds
    assert found.data.after.step_seconds == found.strategy.cost.makespan_seconds
    assert found.strategy.record.program.fingerprint == searched.record.program.fingerprint
    assert next(iter(change)) in str(found).splitlines()[0]


def test_only_another_batch_is_traced_again(monkeypatch):
    """Other pins, meshes and clusters take the program as it was traced."""
    monkeypatch.setattr("autoshard.api.prepared.trace", None)
    assert strategy().what_if(cluster="v5e:4x4").strategy.mesh_shape
    with pytest.raises(TypeError):
        strategy().what_if(batch=64)


def test_a_search_s_own_pins_stay():
    """They hold in a what-if, and give way to one of the same tensor."""
    pinned = autoshard.search(train_step, *shapes(), mesh={"data": 8}, pins={"*up*": P("data"), "x": P()}, **OPTIONS)
    (up,) = (t for t in pinned.what_if(pins={"x": P("data")}).strategy.record.arguments if "up" in t.path)
    assert up.spec == ("data", None)
    found = pinned.what_if(pins={"*up*": P()}).strategy
    assert [t.spec for t in found.record.arguments if "up" in t.path or t.path == "x"] == [(None, None), (None, None)]


def test_a_strategy_from_a_file_wants_its_program(tmp_path):
    """It says so; with the program it gives the same, for another batch too."""
    strategy().save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    with pytest.raises(StrategyError, match="with_program"):
        loaded.what_if(batch=64)
    with pytest.raises(StrategyError, match="with_program"):
        loaded.explain("up")
    whole = loaded.with_program(train_step, *shapes())
    assert whole.what_if(batch=64).data == strategy().what_if(batch=64).data


@pytest.mark.parametrize(
    ("change", "error"), [({"batch": 0}, StrategyError), ({"batch": True}, StrategyError), ({"mesh": {"data": 3}}, ClusterError)]
)
def test_what_cannot_be_is_refused(change, error):
    """A batch is a positive number, and a mesh covers the devices."""
    with pytest.raises(error):
        strategy().what_if(**change)


def test_modules_are_not_kept_alive():
    """A strategy of NNX modules asks for the function again where another batch is traced, and takes it from with_program."""

    def forward(model, x):
        return model(x)

    model, x = nnx.Linear(16, 32, rngs=nnx.Rngs(0)), jnp.ones((64, 16))
    found = autoshard.search(forward, model, x, mesh={"data": 8}, cluster="cpu:8", searcher="dynamic_programming")
    with pytest.raises(StrategyError, match="with_program"):
        found.what_if(batch=128)
    other = found.with_program(forward, model, x).what_if(batch=128).strategy
    assert other.record.arguments[-1].shape == (128, 16)


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
