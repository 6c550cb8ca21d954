"""States saved under one strategy and restored under others: bit-equal, placed by the strategy, and training goes on."""

from __future__ import annotations

import functools
import sys
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from flax.training.train_state import TrainState
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard import checkpoint

BATCH = np.linspace(-1, 1, 24 * 24, dtype=np.float32).reshape(24, 24)
ADAM = optax.adam(1e-2)


class State(NamedTuple):
    """Of all kinds of leaves; its fields are not in the order of their names."""

    step: int
    params: dict
    optimizer: tuple
    key: jax.Array
    half: jax.Array
    nothing: None = None


def make_state(seed: int = 0) -> State:
    up, down, key = jax.random.split(jax.random.key(seed), 3)
    params = {"up": jax.random.normal(up, (24, 48)) / 5, "down": jax.random.normal(down, (48, 24)).astype(jnp.bfloat16)}
    return State(0, params, ADAM.init(params), jax.random.split(key, 24), jnp.zeros((0, 3)))


def train_step(state: State, batch):
    def loss(params):
        return jnp.mean((jax.nn.relu(batch @ params["up"]) @ params["down"].astype(jnp.float32) - 1) ** 2)

    value, gradients = jax.value_and_grad(loss)(state.params)
    updates, optimizer = ADAM.update(gradients, state.optimizer)
    keys = jax.vmap(lambda key: jax.random.fold_in(key, 1))(state.key)
    return State(state.step + 1, optax.apply_updates(state.params, updates), optimizer, keys, state.half), value


@functools.cache
def strategy_on(n: int, shape: tuple = ()) -> autoshard.Strategy:
    mesh = dict(shape or (("data", n),))
    pins = {"state.params['up']": P(None, "model")} if "model" in mesh else {}
    searcher = "auto" if pins else "fully_sharded"
    return autoshard.search(train_step, make_state(), BATCH, cluster=f"cpu:{n}", mesh=mesh, searcher=searcher, pins=pins)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A state after two steps on 4 x 2 devices, the loss of its next step, and its checkpoint."""
    strategy = strategy_on(8, (("data", 4), ("model", 2)))
    step, state = strategy.apply(train_step), strategy.init(make_state)
    for _ in range(2):
        state, _ = step(state, BATCH)
    path = tmp_path_factory.mktemp("checkpoints") / "two"
    checkpoint.save(path, state, strategy, extra={"epoch": 3, "rows": [1, 2.5, None]})
    return state, float(step(state, BATCH)[1]), path


def bits(tree):
    """Host arrays, typed keys as their data."""
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in map(jnp.asarray, jax.tree.leaves(tree))]


def check_equal(found, wanted):
    for one, other in zip(bits(found), bits(wanted), strict=True):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)


@pytest.mark.sample(1)
@pytest.mark.parametrize("n", [8, 6, 4, 2, 1])
def test_any_mesh_restores_the_same_bits(trained, n):
    """On 8, 6, 4, 2 devices and 1: the leaves of all kinds, where the strategy wants them, and the same next loss."""
    state, loss, path = trained
    strategy = strategy_on(n)
    found = checkpoint.restore(path, strategy)
    assert jax.tree.structure(found) == jax.tree.structure(state) and found.step.weak_type
    check_equal(found, state)
    for x, sharding in zip(jax.tree.leaves(found), jax.tree.leaves(strategy.shardings(0)), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim) and len(x.sharding.device_set) == n
    np.testing.assert_allclose(strategy.apply(train_step)(found, BATCH)[1], loss, rtol=1e-5)


def test_its_own_strategy_is_inside(trained, tmp_path):
    """Without a strategy the saved one places the state: in dicts by the names of fields, or as the state that it is to be like."""
    state, _, path = trained
    strategy = checkpoint.strategy(path)
    assert strategy == strategy_on(8, (("data", 4), ("model", 2))) and checkpoint.extra(path) == {"epoch": 3, "rows": [1, 2.5, None]}
    found = checkpoint.restore(path)
    assert list(found) == list(State._fields) and found["params"]["up"].sharding.spec == P(None, "model")
    check_equal(list(found["optimizer"][0].values()), state.optimizer[0])
    for like in (state, jax.eval_shape(make_state)):
        again = checkpoint.restore(path, like=like)
        assert jax.tree.structure(again) == jax.tree.structure(state)
        check_equal(again, state)


def test_the_devices_of_the_saved_strategy_have_to_be_there(trained):
    """Else the error says how to search another; devices may be given."""
    state, _, path = trained
    with pytest.raises(autoshard.ClusterError, match=r"needs a device.*got 4\..*start=autoshard.checkpoint.strategy\(path\)"):
        checkpoint.restore(path, devices=jax.devices()[:4])
    found = checkpoint.restore(path, strategy_on(4), devices=jax.devices()[4:])
    assert found.half.sharding.device_set == set(jax.devices()[4:])
    check_equal(found, state)


@pytest.mark.slow
def test_donated_arrays_may_be_saved_before(tmp_path):
    """What was saved is what was there, although the next step's results overwrite it."""
    strategy = autoshard.search(train_step, make_state(), BATCH, cluster="cpu:2", mesh={"data": 2}, donate_argnums=0)
    step, state = strategy.apply(train_step), strategy.init(make_state)
    with checkpoint.Checkpoints(tmp_path / "run", keep=9) as checkpoints:
        before = []
        for number in range(3):
            before.append(jax.tree.map(jnp.copy, state))
            checkpoints.save(number, state, strategy)
            old, (state, _) = state, step(state, BATCH)
        assert old.params["up"].is_deleted()
        for number, wanted in enumerate(before):
            check_equal(checkpoints.restore(strategy, step=number)[1], wanted)
        with pytest.raises(autoshard.CheckpointError, match=r"was donated to a step. Save what the step returned"):
            checkpoints.save(4, old, strategy)


# -- frameworks -----------------------------------------------------------------------------------------------------------


def linen_program():
    model = linen.Dense(24)

    def make():
        return TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), BATCH), tx=optax.adamw(1e-3))

    def step(state, x):
        value, gradients = jax.value_and_grad(lambda params: jnp.mean(state.apply_fn(params, x) ** 2))(state.params)
        return state.apply_gradients(grads=gradients), value

    return make, step


def equinox_program():
    def make():
        return eqx.nn.MLP(24, 24, 48, 1, activation=jax.nn.gelu, key=jax.random.key(0))

    def step(model, x):
        value, gradients = eqx.filter_value_and_grad(lambda model: jnp.mean(jax.vmap(model)(x) ** 2))(model)
        return eqx.apply_updates(model, jax.tree.map(lambda g: -0.1 * g, gradients)), value

    return make, step


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", [linen_program, equinox_program])
@pytest.mark.parametrize("is_loaded", [False, True])
def test_states_of_frameworks_come_back_whole(program, is_loaded, tmp_path):
    """With what is static in them: of a strategy that was searched as they are, of one that was loaded as they are to be like."""
    make, step = program()
    strategies = [autoshard.search(step, make(), BATCH, cluster=f"cpu:{n}", mesh={"data": n}, searcher="fully_sharded") for n in (8, 4)]
    state, _ = strategies[0].apply(step)(make(), BATCH)
    checkpoint.save(tmp_path / "c", state, strategies[0])
    target, like = strategies[1], None
    if is_loaded:
        target.save(tmp_path / "s.json")
        target, like = autoshard.load(tmp_path / "s.json"), make()
    found = checkpoint.restore(tmp_path / "c", target, like=like)
    arrays = functools.partial(jax.tree.map, lambda x: x if eqx.is_array(x) else None)
    check_equal(arrays(found), arrays(state))
    losses = [strategy.apply(step)(x, BATCH)[1] for strategy, x in ((strategies[0], state), (target, found))]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_nnx_objects_are_restored_into(tmp_path):
    """A module and its optimizer, jointly, are updated in place; without them their states come."""

    def step(model, optimizer, x):
        value, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        optimizer.update(model, gradients)
        return value

    def make(seed):
        model = nnx.Sequential(nnx.Linear(24, 24, rngs=nnx.Rngs(seed)), nnx.Dropout(0.5, rngs=nnx.Rngs(seed)))
        return model, nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)

    saved, other = make(0), make(1)
    one, two = (autoshard.search(step, *saved, BATCH, cluster=f"cpu:{n}", mesh={"data": n}, searcher="fully_sharded") for n in (8, 2))
    one.apply(step)(*saved, BATCH)
    checkpoint.save(tmp_path / "c", saved, one)
    found = checkpoint.restore(tmp_path / "c", two, like=other)
    assert found[0] is other[0] and found[1] is other[1]
    check_equal(nnx.state(other), nnx.state(saved))
    assert len(other[0].layers[0].kernel.sharding.device_set) == 2
    states = checkpoint.restore(tmp_path / "c", two)
    assert isinstance(states[0], nnx.State)
    check_equal(states, nnx.state(saved))
    np.testing.assert_allclose(two.apply(step)(*other, BATCH), one.apply(step)(*saved, BATCH), rtol=1e-5)


# -- refusals -------------------------------------------------------------------------------------------------------------


def changed(**fields):
    """The state with other fields, and a step of it."""
    return autoshard.search(lambda state, x: (state, x.sum()), make_state()._replace(**fields), BATCH, cluster="cpu:1")


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"half": jnp.zeros((0, 4))}, r"state.half float32\[0,3\] where the strategy of '<lambda>' has state.half float32\[0,4\]"),
        ({"step": 0.5}, r"state.step int32\[\] where .* state.step float32\[\]"),
        ({"nothing": jnp.ones(2)}, r"has nothing more where .* has state.nothing float32\[2\]"),
        ({"params": {"up": jnp.ones(2)}}, r"has state.params\['down'\] bfloat16\[48,24\] where .* has state.params\['up'\] float32\[2\]"),
    ],
)
def test_a_strategy_for_another_state_is_refused(trained, fields, words):
    """By the first array that differs, with both shapes and what to do."""
    with pytest.raises(autoshard.CheckpointError, match=f"{words}. Restore it under a strategy for a state of the same"):
        checkpoint.restore(trained[2], changed(**fields))


def test_a_state_to_be_like_has_the_same_arrays_in_the_same_places(trained):
    """One of other shapes is refused by its first, and one that only orders them otherwise as well."""
    _, _, path = trained
    with pytest.raises(
        autoshard.CheckpointError, match=r"has state.step int32\[\] where the state that is passed as like= has an array \[3"
    ):
        checkpoint.restore(path, like=make_state()._replace(step=np.ones(3)))
    with pytest.raises(autoshard.CheckpointError, match=r"structured as the argument of 'train_step'.*structured otherwise"):
        checkpoint.restore(path, like=(*make_state()[:2], tuple(make_state().optimizer), *make_state()[3:]))


def test_what_cannot_be_saved_is_refused(trained, tmp_path):
    """A state that is no argument, of other types, with no arrays; an existing folder; what JSON does not have."""
    state, strategy = make_state(), strategy_on(2)
    for bad, error, words in [
        ({"a": jnp.ones(3)}, autoshard.StrategyError, "Pass or return the state as the step takes it"),
        (tuple(state), autoshard.CheckpointError, "structured otherwise"),
        (state._replace(key=jax.vmap(jax.random.key_data)(state.key)[:, 0]), autoshard.CheckpointError, r"state.key is uint32\[24\] where"),
    ]:
        with pytest.raises(error, match=words):
            checkpoint.save(tmp_path / "c", bad, strategy)
    for extra in ({1: 2}, float("nan"), np.ones(3), "a" * 2**21, (1, 2)):
        with pytest.raises(autoshard.CheckpointError, match=r"extra= of a checkpoint is a JSON value"):
            checkpoint.save(tmp_path / "c", state, strategy, extra=extra)
    with pytest.raises(autoshard.CheckpointError, match=r"exists. Choose another path"):
        checkpoint.save(trained[2], state, strategy)
    for call in (lambda: checkpoint.save(tmp_path / "c", strategy, state), lambda: checkpoint.restore(trained[2], state)):
        with pytest.raises(autoshard.CheckpointError, match=r"with a strategy, got State\. Call save\(path, state, strategy\)"):
            call()
    empty = autoshard.search(lambda a, x: (a, x.sum()), jnp.zeros((0, 2)), BATCH, cluster="cpu:1")
    with pytest.raises(autoshard.CheckpointError, match="at least one array with elements"):
        checkpoint.save(tmp_path / "c", jnp.zeros((0, 2)), empty)
    assert not any(tmp_path.iterdir())


def test_orbax_may_be_missing(monkeypatch, trained, tmp_path):
    """Then every call says how to install it."""
    monkeypatch.setitem(sys.modules, "orbax.checkpoint", None)
    monkeypatch.setitem(sys.modules, "orbax", None)
    for call in (
        lambda: checkpoint.save(tmp_path / "c", make_state(), strategy_on(2)),
        lambda: checkpoint.restore(trained[2]),
        lambda: checkpoint.strategy(trained[2]),
        lambda: checkpoint.Checkpoints(tmp_path).latest(),
    ):
        with pytest.raises(autoshard.CheckpointError, match=r"pip install 'autoshard\[checkpoint\]'"):
            call()
