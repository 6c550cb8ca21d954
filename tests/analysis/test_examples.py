"""Arguments that may hold examples: told from state by how results depend on them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from autoshard.errors import TraceError
from autoshard.trace import checked_batch, trace, with_named_batch

F32 = jnp.float32
PARAMS = {"up": jax.ShapeDtypeStruct((8, 24), F32), "down": jax.ShapeDtypeStruct((24, 8), F32)}
X = jax.ShapeDtypeStruct((16, 8), F32)
STEPS = jax.ShapeDtypeStruct((16,), jnp.int32)


def net(params, x):
    return jnp.tanh(x @ params["up"]) @ params["down"]


def trained(params, x, apply=net):
    """An autoencoder's new parameters, its loss and its reconstruction."""

    def loss(params):
        y = apply(params, x)
        return jnp.mean((y - x) ** 2), y

    (value, y), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value, y


def with_momentum(params, momentum, x):
    new, value, y = trained(params, x)
    return new, jax.tree.map(lambda m, p, q: 0.9 * m + p - q, momentum, params, new), y, value


def residual(params, x):
    return x - jnp.tanh(x @ params["a"]) @ params["b"]


def normalised(params, x):
    h = x @ params["up"]
    return jnp.tanh((h - h.mean(0)) / (h.std(0) + 1e-3)) @ params["down"]


def recurrent(params, xs):
    return lax.scan(lambda h, x: (h := jnp.tanh(x + h @ params["up"] @ params["down"]), h), jnp.zeros_like(xs[0]), xs)[1]


def simulated(params, env):
    """Environments that act by a policy, each by itself."""
    new, value, _ = trained(params, env["x"])
    return new, {"x": env["x"] + 0.1 * net(params, env["x"]), "t": env["t"] + 1}, value


def against_each_other(made, critic, real, noise):
    """A generator and a critic: what is made has the shape of what is real, and does not depend on it."""
    fake = net(made, noise)
    loss = lambda critic: jnp.mean(net(critic, real) ** 2) - jnp.mean(net(critic, fake) ** 2)  # noqa: E731
    return trained(made, noise)[0], jax.tree.map(jnp.subtract, critic, jax.grad(loss)(critic)), fake


def replayed(state, batch, at):
    new, value, _ = trained(state["params"], batch)
    return {"params": new, "buffer": lax.dynamic_update_slice(state["buffer"], batch, (at, 0))}, value


def averaged(params, slow, x):
    new = trained(params, x)[0]
    return new, jax.tree.map(lambda s, p: 0.9 * s + 0.1 * p, slow, new)


def decoded(params, cache, tokens, at):
    cache = lax.dynamic_update_slice(cache, params["up"].T[tokens][:, None], (0, at, 0))
    return (cache.sum(1) @ params["down"].T).argmax(-1), cache


def looked_up(table, tokens):
    """Rows of a table, of which each new one depends on all that were looked up."""
    loss = lambda table: (lambda h: jnp.mean(jax.nn.logsumexp(h @ table.T, -1)))(table[tokens])  # noqa: E731
    value, gradient = jax.value_and_grad(loss)(table)
    return table - gradient, (tokens + 1) % 16, value


AT, SQUARE = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((16, 16), F32)
FOUND = {
    "a reconstruction": (trained, (PARAMS, X), {"x"}),
    "a reconstruction first": (lambda p, x: trained(p, x)[::-1], (PARAMS, X), {"x"}),
    "momentum": (with_momentum, (PARAMS, PARAMS, X), {"x"}),
    "weights of the batch's shape": (lambda p, x: trained(p, x, residual), ({"a": SQUARE, "b": SQUARE}, SQUARE), {"x"}),
    "batch normalisation": (lambda p, x: trained(p, x, normalised), (PARAMS, X), {"x"}),
    "the batch itself": (lambda p, b: (trained(p, b["x"])[0], b), (PARAMS, {"x": X, "y": STEPS}), {"b['x']", "b['y']"}),
    "environments": (simulated, (PARAMS, {"x": X, "t": STEPS}), {"env['x']", "env['t']"}),
    "environments in the state": (lambda s: simulated(*s)[:2], ((PARAMS, {"x": X, "t": STEPS}),), {"s[1]['x']", "s[1]['t']"}),
    "a generator": (against_each_other, (PARAMS, PARAMS, X, X), {"real", "noise"}),
    "a replay buffer": (replayed, ({"params": PARAMS, "buffer": jax.ShapeDtypeStruct((64, 8), F32)}, X, AT), {"batch"}),
    "an average of weights": (averaged, (PARAMS, PARAMS, X), {"x"}),
    "a step back": (lambda p, old, x: (trained(p, x)[0], p), (PARAMS, PARAMS, X), {"x"}),
    "a table": (looked_up, (X, STEPS), {"tokens"}),
    "a cache": (decoded, (PARAMS, jax.ShapeDtypeStruct((16, 4, 8), F32), STEPS, AT), {"params['up']", "params['down']", "cache", "tokens"}),
}


@pytest.mark.parametrize("name", FOUND)
def test_examples_are_told_from_state(name):
    """By dependence, where shapes and places would say that results replace the batch, too."""
    step, args, expected = FOUND[name]
    graph = trace(step, *args).graph
    assert {graph.argument_paths[k] for k in graph.examples[0]} == expected
    assert graph.state == {argument for _, argument in graph.aliases} - graph.examples[0]


def test_time_before_examples():
    """What is gone through in order along dimension 0 has its examples along dimension 1."""
    args = PARAMS, jax.ShapeDtypeStruct((5, 16, 8), F32)
    graph = trace(lambda p, x: trained(p, x, recurrent), *args).graph
    assert [[graph.argument_paths[k] for k in each] for each in graph.examples] == [[], ["x"]]


def test_donated_arguments_are_state():
    """Unless nothing else holds examples."""
    args = PARAMS, jax.ShapeDtypeStruct((16, 8), F32), STEPS

    def step(params, env, seeds):
        return trained(params, env)[0], env + net(params, env), seeds.sum()

    graph = trace(step, *args, donate_argnums=(0, 1)).graph
    assert {graph.argument_paths[k] for k in graph.examples[0]} == {"seeds"} and 2 in graph.state
    graph = trace(lambda *both: step(*both, np.zeros(3))[:2], *args[:2], donate_argnums=(0, 1)).graph
    assert {graph.argument_paths[k] for k in graph.examples[0]} == {"both[1]"}


def test_a_batch_that_is_named():
    """By path, by container, by pattern or by position; the rest holds no examples."""
    traced = trace(lambda p, b: trained(p, b["x"])[0], PARAMS, {"x": X, "y": STEPS})
    for batch, expected in (("b", (2, 3)), ("b['x']", (2,)), ("*'y'*", (3,)), (1, (2, 3)), (-2, (0, 1)), (("b['x']", 0), (0, 1, 2))):
        named = with_named_batch(traced, checked_batch(batch))
        assert named.graph.examples[0] == {*expected} and named.batch == tuple(traced.graph.argument_paths[k] for k in expected)
    for batch, words in (("batch", "'batch' is none of 4"), (2, "there are 2; got 2. Use 0 to 1"), (1.5, "by path, pattern or position")):
        with pytest.raises(TraceError, match=words):
            with_named_batch(traced, checked_batch(batch))
