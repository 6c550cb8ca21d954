"""Functions that were jitted: what they donate and what they hold static counts for a search."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import autoshard

OPTIONS = {"cluster": "cpu:8", "mesh": {"data": 8}, "searcher": "data_parallel"}


def train_step(params, x, rate=0.1):
    value, gradients = jax.value_and_grad(lambda params: jnp.mean(jnp.tanh(x @ params["w"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - rate * g, params, gradients), value


def arguments():
    return {"w": jnp.ones((16, 16)), "unused": jnp.ones(3)}, jnp.ones((32, 16))


JITTED = {
    "jit": jax.jit(train_step, donate_argnums=0),
    "by name": jax.jit(train_step, donate_argnames=("params",)),
    "bound": functools.partial(jax.jit(train_step, donate_argnums=0), rate=0.2),
    "wrapped": functools.wraps(train_step)(lambda *args: jax.jit(train_step, donate_argnums=0)(*args)),
    "decorated": autoshard.parallelize(train_step, donate_argnums=0, **OPTIONS),
    "decorated again": autoshard.parallelize(jax.jit(train_step, donate_argnums=0), **OPTIONS),
}


@pytest.mark.parametrize("how", JITTED)
def test_what_a_function_donates_is_donated(how):
    """In a search, in an evaluation, and where the step runs."""
    strategy = autoshard.search(JITTED[how], *arguments(), **OPTIONS)
    given = autoshard.evaluate(JITTED[how], *arguments(), cluster="cpu:8", mesh={"data": 8}, in_specs={})
    assert strategy.record.donate_argnums == given.record.donate_argnums == (0,)
    state, x = strategy.shard(*arguments())
    strategy.apply(JITTED[how])(state, x)
    assert state["w"].is_deleted() and not x.is_deleted()


@pytest.mark.parametrize(
    "fn",
    [
        train_step,
        jax.jit(train_step),
        jax.jit(lambda params, x: jax.jit(train_step, donate_argnums=0)(params, x)),  # of the inner one JAX takes no notice
        lambda params, x: (jax.jit(train_step, donate_argnums=0)(params, x), params["w"] + 1),
    ],
)
def test_nothing_else_is_donated(fn):
    """What another jitted function would not donate is not."""
    assert autoshard.search(fn, *arguments(), **OPTIONS).record.donate_argnums == ()


def test_what_an_nnx_jitted_function_donates_is_donated():
    """Donated modules come back whole, as those of `donate_argnums`."""

    def step(model, x):
        model.kernel[...] += 1
        return model(x)

    def searched(fn, **options):
        return autoshard.search(fn, nnx.Linear(16, 16, rngs=nnx.Rngs(0)), jnp.ones((32, 16)), **OPTIONS, **options)

    assert searched(nnx.jit(step, donate_argnums=0)) == searched(step, donate_argnums=0) != searched(step)


def test_a_strategy_decides_what_its_step_donates():
    """A function that donates runs by a strategy that does not, as it was searched."""
    strategy = autoshard.search(train_step, *arguments(), **OPTIONS)
    state, x = strategy.shard(*arguments())
    for how in ("jit", "wrapped", "decorated"):
        _, loss = strategy.apply(JITTED[how])(state, x)
        np.testing.assert_allclose(loss, train_step(state, x)[1], rtol=1e-5)
