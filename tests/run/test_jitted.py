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


@pytest.mark.sample(2)
@pytest.mark.parametrize("how", JITTED)
def test_what_a_function_donates_is_donated(how):
    """In a search, in an evaluation, and where the step runs."""
    strategy = autoshard.search(JITTED[how], *arguments(), **OPTIONS)
    given = autoshard.evaluate(JITTED[how], *arguments(), cluster="cpu:8", mesh={"data": 8}, in_specs={})
    assert strategy.record.donate_argnums == given.record.donate_argnums == (0,)
    state, x = strategy.shard(*arguments())
    strategy.apply(JITTED[how])(state, x)
    assert state["w"].is_deleted() and not x.is_deleted()


@pytest.mark.sample(1)
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


# --- static arguments -------------------------------------------------------------------------------------------------


def scaled(w, n, x, mode="double", *, negate=False):
    y = x @ w * (n if n > 1 else 0)
    return (-2 if negate else 2) * y if mode == "double" else y


X, W = np.ones((32, 16), np.float32), np.ones((16, 16), np.float32)


@pytest.mark.sample(1)
@pytest.mark.parametrize("options", [{"static_argnums": (1, 3), "static_argnames": "negate"}, {"static_argnames": ("mode", "n", "negate")}])
def test_static_arguments_are_those_of_jit(options):
    """Whatever way they are passed, and whether or not they have a position; other values are searched for, with a warning."""
    step, wanted = autoshard.parallelize(scaled, progress=False, **OPTIONS, **options), jax.jit(scaled, **options)
    calls = [((W, 2, X), {}), ((W, 2, X), {}), ((W, 2), {"x": X}), ((W, 2, X, "double"), {"negate": True}), ((W, 2, X), {"negate": True})]
    for args, kwargs in calls:
        np.testing.assert_allclose(step(*args, **kwargs), wanted(*args, **kwargs))
    assert step.strategy.in_specs[1] is None and len(step.strategy.in_specs) >= 3
    assert step.search(W, 2, X, negate=True) is step.strategy
    with pytest.warns(UserWarning, match="static 3, after static 2"):
        np.testing.assert_allclose(step(W, 3, X), wanted(W, 3, X))


def test_static_arguments_of_a_jitted_function_stay_static(tmp_path):
    """Searched, verified, saved, loaded and applied; `shard` leaves them as they are."""
    fn = jax.jit(scaled, static_argnames=("n", "mode"))
    strategy = autoshard.search(fn, W, 2, X, **OPTIONS)
    strategy.save(tmp_path / "s.json")
    for each in (strategy, autoshard.load(tmp_path / "s.json")):
        assert autoshard.verify(each, fn, W, 2, X).exact
        placed = each.shard(W, 2, X)
        assert placed[1] == 2
        np.testing.assert_allclose(each.apply(fn)(*placed), fn(W, 2, X))


@pytest.mark.parametrize(
    ("options", "pieces"),
    [
        ({"static_argnums": 4}, ["static_argnums", "4 parameters", "got 4", "0 to 3"]),
        ({"static_argnames": "nn"}, ["static_argnames", "'nn'", "w, n, x, mode, negate"]),
        ({"static_argnums": 0}, ["'w' is ndarray", "hash", "Pass an array"]),
    ],
)
def test_wrong_static_arguments_are_told(options, pieces):
    """What is no parameter where the decorator stands, and what has no hash at the call."""
    with pytest.raises(autoshard.TraceError) as caught:
        autoshard.parallelize(scaled, **options, **OPTIONS)(W, 2, X)
    assert all(piece in str(caught.value) for piece in pieces)


# --- methods ----------------------------------------------------------------------------------------------------------


class Trainer:
    def __init__(self, rate):
        self.rate = rate

    @functools.partial(autoshard.parallelize, donate_argnums=1, progress=False, **OPTIONS)
    def step(self, w, x):
        return w - self.rate * jnp.mean(x @ w)


class Model(nnx.Module):
    def __init__(self):
        self.linear = nnx.Linear(16, 16, rngs=nnx.Rngs(0))

    @functools.partial(autoshard.parallelize, progress=False, **OPTIONS)
    def count(self, x):
        self.linear.bias[...] += 1
        return self.linear(x)


def test_methods_are_decorated_as_functions_are():
    """The instance is argument 0: static where it is no pytree, so that each has its own program."""
    one, other = Trainer(1.0), Trainer(2.0)
    w = jnp.asarray(W)
    np.testing.assert_allclose(one.step(w, X), W - 16)
    assert w.is_deleted() and one.step.strategy.record.donate_argnums == (1,)
    with pytest.warns(UserWarning, match="searched again for args.* of static"):
        np.testing.assert_allclose(other.step(jnp.asarray(W), X), W - 32)
    np.testing.assert_allclose(one.step(jnp.asarray(W), X), W - 16)
    assert autoshard.search(one.step, W, X, **OPTIONS).record.donate_argnums == (0,)
    model = Model()
    for _ in range(2):
        model.count(jnp.asarray(X))
    np.testing.assert_allclose(model.linear.bias[...], 2)
