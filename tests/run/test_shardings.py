"""`mesh`, `shardings` and `abstract`: what other libraries need of a strategy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState

import autoshard


def train_step(state, x, key):
    def loss(params):
        return jnp.mean(state.apply_fn(params, x + jax.random.normal(key, x.shape)) ** 2)

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def make_state() -> TrainState:
    model = linen.Dense(16)
    return TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), jnp.ones((1, 16))), tx=optax.adam(1e-3))


@pytest.fixture(params=["searched", "loaded"])
def strategy(request, tmp_path):
    found = autoshard.search(
        train_step, make_state(), jnp.ones((32, 16)), jax.random.key(0), cluster="cpu:8", mesh={"data": 8}, searcher="fully_sharded"
    )
    found.save(tmp_path / "s.json")
    return found if request.param == "searched" else autoshard.load(tmp_path / "s.json")


def test_shardings_fit_the_users_tree(strategy):
    """Of a loaded strategy too, whose own trees are dicts: `jax.jit` takes them for the state, and for the first few arguments."""
    state = make_state()
    assert strategy.mesh.shape == {"data": 8}
    made = jax.jit(lambda: jax.tree.map(jnp.asarray, state), out_shardings=strategy.shardings(state))()
    wanted, x = strategy.shard(state, jnp.ones((32, 16)))
    assert jax.tree.map(lambda a: a.sharding.spec, made) == jax.tree.map(lambda a: a.sharding.spec, wanted)
    assert strategy.shardings((state, x))[1] == strategy.shardings(1) == x.sharding
    assert jax.sharding.PartitionSpec("data", None) in {each.spec for each in jax.tree.leaves(strategy.shardings(state))}


def test_abstract_state_has_types_and_shardings(strategy):
    """As the argument has, concrete or abstract, or as it is recorded."""
    state = make_state()
    found = strategy.abstract(jax.eval_shape(lambda: state))
    assert jax.tree.structure(found) == jax.tree.structure(state)
    for a, b, sharding in zip(*map(jax.tree.leaves, (found, strategy.abstract(0), strategy.shardings(state))), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, sharding)
    assert strategy.abstract(2).dtype == jax.random.key(0).dtype


@pytest.mark.parametrize(
    ("tree", "pieces"), [(3, ["3 arguments", "got 3", "0 to 2"]), ({"a": jnp.ones(3)}, ["1 arrays", "as the step takes it"])]
)
def test_what_is_no_argument_is_told(strategy, tree, pieces):
    """A position or a tree that the program does not have."""
    with pytest.raises(autoshard.StrategyError) as caught:
        strategy.shardings(tree)
    assert all(piece in str(caught.value) for piece in pieces)


def test_equal_shapes_are_told_apart_by_structure():
    """Of two arguments with the same shapes each tree finds its own."""
    shapes = {"a": jax.ShapeDtypeStruct((16, 8), "float32")}
    specs = (jax.P("data"), jax.P(None, "data"))
    strategy = autoshard.evaluate(lambda d, x: d["a"] + x, shapes, shapes["a"], cluster="cpu:8", mesh={"data": 8}, in_specs=specs)
    assert strategy.shardings(shapes["a"]).spec == jax.P(None, "data") and strategy.shardings(shapes)["a"].spec == jax.P("data", None)


def test_modules_come_as_their_states():
    """An NNX module's shardings are structured as `nnx.state` of it."""
    model = nnx.Linear(16, 16, rngs=nnx.Rngs(0))
    strategy = autoshard.search(lambda model, x: model(x), model, jnp.ones((32, 16)), cluster="cpu:8", mesh={"data": 8})
    found = jax.device_put(nnx.state(model), strategy.shardings(model))
    nnx.update(model, found)
    assert model.kernel[...].sharding == jax.tree.leaves(strategy.shardings(0))[1]


def test_what_is_no_function_is_refused(strategy):
    """A state in the place of the function that makes it, or arguments in that of the step."""
    with pytest.raises(autoshard.StrategyError, match=r"init takes a function .* Pass the function, or place a state"):
        strategy.init(make_state())
    with pytest.raises(autoshard.StrategyError, match=r"a step is a function, .* Pass it first"):
        strategy.apply(make_state())
