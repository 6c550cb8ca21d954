"""Leaves that are no arrays, as those of Equinox modules: they are static by themselves, by their value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.run.step import Step

OPTIONS = {"cluster": "cpu:8", "mesh": {"data": 8}, "searcher": "fully_sharded"}


@jax.tree_util.register_pytree_node_class
class Net:
    """A module as Equinox has them: all that it is made of are leaves."""

    def __init__(self, w: Any, activation: Callable, name: str):
        self.parts = w, activation, name

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _, parts):
        return cls(*parts)

    def __call__(self, x):
        w, activation, _ = self.parts
        return activation(x @ w)


def train_step(net, x):
    w, *rest = net.parts
    value, gradient = jax.value_and_grad(lambda w: jnp.mean((Net(w, *rest)(x) - 1) ** 2))(w)
    return Net(w - gradient, *rest), value


def make(activation: Callable = jnp.tanh) -> Net:
    return Net(jnp.full((16, 16), 0.1, jnp.float32), activation, "net")


X = np.linspace(-1, 1, 512, dtype=np.float32).reshape(32, 16)


def test_they_go_through_a_step_and_come_back(monkeypatch):
    """A train step returns its module with the same functions and strings; from the second call on no argument is looked at again."""
    anew, calls = Step.anew, []
    monkeypatch.setattr(Step, "anew", lambda *args: calls.append(0) or anew(*args))
    step, net, w = autoshard.parallelize(train_step, donate_argnums=0, progress=False, **OPTIONS), make(), make().parts[0]
    for _ in range(3):
        net, loss = step(net, X)
        _, wanted = train_step(Net(w, jnp.tanh, "net"), X)
        w = train_step(Net(w, jnp.tanh, "net"), X)[0].parts[0]
        np.testing.assert_allclose(loss, wanted, rtol=1e-5)
    assert net.parts[1:] == (jnp.tanh, "net") and len(calls) == 1
    np.testing.assert_allclose(net.parts[0], w, rtol=1e-5)


def test_another_value_is_another_program():
    """It is searched for with a warning, and both are kept."""
    step = autoshard.parallelize(train_step, progress=False, **OPTIONS)
    step(make(), X)
    with pytest.warns(UserWarning, match=r"args\[0\].* of static .*sin"):
        np.testing.assert_allclose(step(make(jnp.sin), X)[1], train_step(make(jnp.sin), X)[1], rtol=1e-5)
    np.testing.assert_allclose(step(make(), X)[1], train_step(make(), X)[1], rtol=1e-5)


def test_strategies_place_and_make_what_is_around_them(tmp_path):
    """`shard` and `init`, of loaded strategies too."""
    strategy = autoshard.search(train_step, make(), X, **OPTIONS)
    strategy.save(tmp_path / "s.json")
    for each in (strategy, autoshard.load(tmp_path / "s.json")):
        for net in (each.init(make), each.shard(make())[0]):
            assert net.parts[1:] == (jnp.tanh, "net") and net.parts[0].sharding.spec == strategy.in_specs[0].parts[0]


def test_equinox_modules_train():
    """Functions and numbers inside modules are static, whether or not the step is jitted by Equinox, whose donation counts."""
    eqx = pytest.importorskip("equinox")
    import optax

    class Model(eqx.Module):
        mlp: Any
        dropout: Any

        def __call__(self, x, key):
            return self.dropout(self.mlp(x), key=key)

    optimizer = optax.adam(1e-2)

    def step(model, state, x, key):
        def loss(model):
            return jnp.mean((jax.vmap(model)(x, jax.random.split(key, len(x))) - 1) ** 2)

        value, gradients = eqx.filter_value_and_grad(loss)(model)
        updates, state = optimizer.update(gradients, state)
        return eqx.apply_updates(model, updates), state, value

    def losses(step):
        key = jax.random.key(0)
        model = Model(eqx.nn.MLP(16, 16, 32, 1, key=key), eqx.nn.Dropout(0.5))
        state, found = optimizer.init(eqx.filter(model, eqx.is_array)), []
        for number in range(3):
            model, state, value = step(model, state, jnp.array(X), jax.random.key(number))
            found.append(float(value))
        return found

    wanted = losses(eqx.filter_jit(step))
    for fn, donated in ((step, ()), (eqx.filter_jit(step, donate="all-except-first"), (1, 2, 3))):
        decorated = autoshard.parallelize(fn, progress=False, **OPTIONS)
        np.testing.assert_allclose(losses(decorated), wanted, rtol=1e-4)
        assert decorated.strategy.record.donate_argnums == donated
