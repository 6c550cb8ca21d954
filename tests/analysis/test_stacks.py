"""Stacks between loops: which there are, in which shape they are stored, and that numbers stay the same."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.analysis.stacks import merged, stacks_between_loops
from autoshard.compilers import TARGETS
from autoshard.trace import trace

F32 = jnp.float32
BATCH, STEPS, HEADS, WIDTH = 12, 24, 2, 4


def linear_attention(weights, x):
    """The gradients of a recurrence whose states are matrices that vectors are multiplied by."""

    def loss(weights):
        queries, keys, values = (jnp.einsum("btd,dhk->tbhk", x, weights[name]) for name in "qkv")

        def step(state, inputs):
            query, key, value = inputs
            state = 0.9 * state + jnp.einsum("bhk,bhl->bhkl", key, value)
            return state, jnp.einsum("bhk,bhkl->bhl", query, state)

        return (jax.lax.scan(step, jnp.zeros((x.shape[0], HEADS, WIDTH, WIDTH)), (queries, keys, values))[1] ** 2).mean()

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def mixed(weights, x):
    """The same shapes in a recurrence of matrix products."""

    def step(state, rows):
        state = jnp.tanh(state @ weights)
        return state, (rows * state).sum()

    return jax.grad(lambda x: jax.lax.scan(step, jnp.ones((BATCH, WIDTH, WIDTH)), x)[1].sum())(x)


def arguments():
    generator = np.random.default_rng(0)
    weights = {name: generator.normal(size=(16, HEADS, WIDTH)).astype(np.float32) for name in "qkv"}
    return weights, generator.normal(size=(BATCH, STEPS, 16)).astype(np.float32)


@pytest.mark.parametrize(
    ("stack", "stored"),
    [
        ((256, 8, 8, 64, 64), (256, 8, 8, 4096)),
        ((256, 8, 8, 48), (256, 8, 384)),  # as few dimensions as fill whole tiles
        ((256, 8, 64, 512), (256, 8, 64, 512)),
        ((12, 8, 64, 64), (12, 8, 64, 64)),  # so few steps are in no lanes
        ((64, 8, 64, 64), (64, 8, 64, 64)),
        ((256, 5, 7, 9), (256, 5, 7, 9)),  # nothing fills whole tiles
    ],
)
def test_matrices_are_stored_as_rows_where_steps_would_fill_the_lanes_better(stack, stored):
    assert merged(stack, 128) == stored


def test_only_recurrences_of_vectors_have_such_stacks():
    graph = trace(linear_attention, *arguments()).graph
    found = stacks_between_loops(graph)
    assert (STEPS, BATCH, HEADS, WIDTH, WIDTH) in {graph.values[value].shape for value in found}
    assert all(op.primitive == "scan" for readers in found.values() for op, _ in readers)
    other = trace(mixed, np.ones((WIDTH, WIDTH), np.float32), np.ones((STEPS, BATCH, WIDTH, WIDTH), np.float32)).graph
    assert not stacks_between_loops(other)


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"remat": "full"}], ids=str)
def test_numbers_stay_the_same(monkeypatch, options):
    """Tiles of eight lanes, which the states' last dimension does not fill, on devices that have none."""
    monkeypatch.setattr(TARGETS["cpu"], "stack_lanes", 8)
    weights, x = arguments()
    strategy = autoshard.search(linear_attention, weights, x, cluster="cpu:4", **options)
    step = strategy.apply(linear_attention)
    text = step.lower(weights, x).as_text()
    assert f"{HEADS}x{WIDTH * WIDTH}xf32" in text, "no stack is stored otherwise"
    wanted = jax.jit(linear_attention)(weights, x)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), step(weights, x), wanted)
