"""Steps inside loops and branches of the program, in microbatches of each step."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

import autoshard
from autoshard.errors import TraceError
from autoshard.ir.rewrites import Microbatches
from autoshard.microbatch import divisors
from autoshard.rewrite import applied
from autoshard.trace import trace

NORMAL = np.random.default_rng(0).standard_normal
WEIGHTS = {name: jnp.asarray(0.3 * NORMAL(shape), jnp.float32) for name, shape in (("up", (12, 32)), ("down", (32, 12)))}
BATCHES = tuple(jnp.asarray(NORMAL((6, 8, 12)), jnp.float32) for _ in "xy")


def loss(weights, x, y):
    return jnp.mean((jnp.tanh(x @ weights["up"]) @ weights["down"] - y) ** 2)


def step(weights, x, y):
    value, gradients = jax.value_and_grad(loss)(weights, x, y)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def several_steps(weights, batches):
    """Several steps in one call."""
    return lax.scan(lambda weights, batch: step(weights, *batch), weights, batches)


def passes(state, batches):
    """Passes over minibatches of a batch that is shuffled before each."""
    x, y = (each.reshape(-1, each.shape[-1]) for each in batches)

    def one(state, _):
        weights, key = state
        key, own = jax.random.split(key)
        order = jax.random.permutation(own, len(x))
        weights, values = several_steps(weights, tuple(each[order].reshape(6, 8, -1) for each in (x, y)))
        return (weights, key), values

    return lax.scan(one, (state, jax.random.key(2)), None, length=3)[0][0]


def in_turns(both, count, batches):
    """Two networks that are trained in turns."""
    x, y = (each[0] for each in batches)

    def first(both):
        weights, value = step(both[0], x, y)
        return (weights, both[1]), value

    def second(both):
        weights, value = step(both[1], x, y)
        return (both[0], weights), value

    both, value = lax.cond(count % 2 == 0, first, second, both)
    return both, value


def sometimes(weights, count, batches):
    """A step that is left out at times."""
    x, y = (each[1] for each in batches)
    return lax.cond(count % 3 == 0, lambda weights: step(weights, x, y), lambda weights: (weights, 0.0), weights)


def until(weights, batches):
    """Steps on one batch until the loss is small."""
    x, y = (each[0] for each in batches)
    first = weights, jnp.float32(9.0), 0
    return lax.while_loop(lambda s: (s[1] > 0.5) & (s[2] < 5), lambda s: (*step(s[0], x, y), s[2] + 1), first)


CASES = {
    "several": (several_steps, (WEIGHTS, BATCHES)),
    "passes": (passes, (WEIGHTS, BATCHES)),
    "in turns": (in_turns, ((WEIGHTS, WEIGHTS), jnp.int32(3), BATCHES)),
    "sometimes": (sometimes, (WEIGHTS, jnp.int32(3), BATCHES)),
    "until": (until, (WEIGHTS, BATCHES)),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("n", [2, 4])
def test_steps_inside_loops_and_branches_are_each_computed_in_microbatches(name, n):
    """Results are those of the program as it is written, and each step has a loop over as many microbatches."""
    fn, arguments = CASES[name]
    traced = applied(Microbatches(n), trace(fn, *arguments))
    found = jax.jit(jaxpr_as_fun(traced.jaxpr))(*jax.tree.leaves(arguments))
    for made, wanted in zip(found, jax.tree.leaves(jax.jit(fn)(*arguments)), strict=True):
        np.testing.assert_allclose(made, wanted, rtol=2e-5, atol=1e-6)
    loops = [op for op in traced.graph.walk() if op.primitive == "scan" and op.params["length"] == n]
    assert len(loops) == (2 if name == "in turns" else 1)
    assert traced.microbatches == n
    assert any(note.startswith("microbatches are those of each step in ") for note in traced.graph.assumptions)


def test_numbers_of_microbatches_are_those_that_divide_the_batch_of_the_steps():
    """Six batches of eight examples are divided into eight microbatches at most, and never into the six."""
    assert divisors(trace(several_steps, WEIGHTS, BATCHES)) == (1, 2, 4, 8)
    with pytest.raises(TraceError, match="divides a batch"):
        applied(Microbatches(3), trace(several_steps, WEIGHTS, BATCHES))


def test_scanned_layers_that_normalise_over_the_batch_are_no_steps():
    """Weights of a scanned layer are no batch: where layers need all examples, the refusal names what couples these."""

    def normalised(weights, x, y):
        def layer(x, w):
            x = jnp.tanh(x @ w)
            return (x - x.mean(0)) / (x.std(0) + 1e-3), None

        def error(weights):
            return jnp.mean((lax.scan(layer, x, weights)[0] - y) ** 2)

        return weights - 0.1 * jax.grad(error)(weights)

    traced = trace(normalised, jnp.ones((3, 12, 12)), *(each[0] for each in BATCHES))
    with pytest.raises(TraceError, match=r"microbatches are computed one after the other, and .*test_nested\.py"):
        applied(Microbatches(2), traced)


def test_stages_of_several_steps_are_refused_by_their_loop():
    """Of many steps in one call stages are not made: the error names the loop and its line."""
    batches = tuple(jnp.tile(each, (9, 1, 1)) for each in BATCHES)
    with pytest.raises(TraceError, match=r"steps inside scan at .*test_nested.py:\d+ .*Search one of these by itself"):
        autoshard.search(several_steps, WEIGHTS, batches, cluster="cpu:4", stages=2, microbatches=2)


@pytest.mark.parametrize("is_inside", [False, True], ids=["step", "layers"])
def test_a_print_happens_once_a_step_or_is_refused(is_inside, capsys):
    """Once in each of several steps; in a loop over layers it would happen once a microbatch, and the refusal names it."""

    def printing(weights, batch):
        def layer(x, _):
            x = jnp.tanh(x @ weights["up"]) @ weights["down"]
            if is_inside:
                jax.debug.print("found {}", x.sum())
            return x, None

        x = lax.scan(layer, batch[0], None, length=2)[0]
        jax.debug.print("found {}", x.sum())
        return jax.tree.map(lambda w: w - x.sum(), weights), x.sum()

    def program(weights, batches):
        return lax.scan(printing, weights, batches)

    traced = trace(program, WEIGHTS, BATCHES)
    if is_inside:
        with pytest.raises(TraceError, match=r"debug_\w+ at .*printing.* has an effect.*return what it reads from there"):
            applied(Microbatches(2), traced)
        return
    jax.block_until_ready(jaxpr_as_fun(applied(Microbatches(2), traced).jaxpr)(*jax.tree.leaves((WEIGHTS, BATCHES))))
    jax.effects_barrier()
    assert capsys.readouterr().out.count("found") == len(BATCHES[0])


def test_steps_in_a_loop_fit_in_microbatches_on_several_devices():
    """A search with microbatches and recomputation of such a program gives its results."""
    strategy = autoshard.search(several_steps, WEIGHTS, BATCHES, cluster="cpu:4", microbatches=2, remat="auto")
    found = strategy.apply(several_steps)(*strategy.shard(WEIGHTS, BATCHES))
    for made, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(jax.jit(several_steps)(WEIGHTS, BATCHES)), strict=True):
        np.testing.assert_allclose(made, wanted, rtol=2e-5, atol=1e-6)
