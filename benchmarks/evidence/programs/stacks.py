"""Programs whose loops stack what they make of each step."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp

from benchmarks.evidence.measures import CYCLES, PEAK
from benchmarks.evidence.program import F32, SPLIT, WHOLE, Program, leaf, named


def recurrent(xs, decay):
    """The gradients of a recurrence without products, whose states are stacked."""

    def trip(state, x):
        state = jnp.exp(-decay) * state + x * decay
        return state, jnp.tanh(state)

    return jax.grad(lambda xs, decay: (jax.lax.scan(trip, jnp.zeros(xs.shape[1:]), xs)[1] ** 2).sum(), argnums=(0, 1))(xs, decay)


for width in (16, 32, 64):
    args = leaf(512, 256, width, dtype=F32), leaf(width, dtype=F32)
    named(f"slices of {width} numbers of a loop without products", Program(recurrent, args, PEAK))


def attended(queries, keys, values, merged):
    """The gradients of linear attention, of which the forward loop stacks states of small matrices for the backward one."""
    shape = *keys.shape[1:], values.shape[-1]

    def step(state, inputs):
        query, key, value = inputs
        state = 0.9 * state + jnp.einsum("bhk,bhl->bhkl", key, value)
        return state, jnp.einsum("bhk,bhkl->bhl", query, state)

    def forward(state, inputs):
        after, result = step(state, inputs)
        return after, (result, state.reshape(*shape[:2], -1) if merged else state)

    def backward(after, given):
        state, inputs, result = given
        return jax.vjp(step, state.reshape(shape), inputs)[1]((after, result))

    inputs, zeros = (queries, keys, values), jnp.zeros(shape, F32)
    _, (results, states) = jax.lax.scan(forward, zeros, inputs)
    return jax.lax.scan(backward, zeros, (states, inputs, results), reverse=True)[1]


for steps, width in ((64, 64), (96, 64), (256, 64), (256, 32)):
    given = (leaf(steps, 8, 8, width, dtype=F32),) * 3
    rows = Program(partial(attended, merged=True), given, CYCLES)
    of_matrices = Program(partial(attended, merged=False), given, CYCLES, over=rows)
    named(f"{steps} matrices of {width} x {width} beside rows of {width**2}", of_matrices)


def stacking(step):
    """The gradients of a recurrence of 128 steps, by its weights, from states of zeros; what they need of each step is stacked."""

    def loss(weights, state):
        return (jax.lax.scan(lambda state, _: (step(state, weights), None), state, None, length=128)[0] ** 2).sum()

    return jax.grad(loss)


def convolved(state, kernel):
    return jnp.tanh(jax.lax.conv_general_dilated(state, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))) * state


def multiplied(state, weights):
    return jnp.tanh(jnp.einsum("ij,bjk,lk->bil", weights, state, weights)) * state


def attended_to(state, weights):
    rows = jnp.einsum("btd,dhk->bthk", state, weights)
    shares = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", rows, rows))
    return state + jnp.einsum("bhts,bshk,dhk->btd", shares, rows, weights)


for title, step, weights, state in (
    ("a recurrent convolution to 32 features", convolved, (3, 3, 32, 32), (8, 16, 16, 32)),
    ("a recurrence of 48 x 48 matrices", multiplied, (48, 48), (64, 48, 48)),
    ("a recurrence of attention to 24 positions", attended_to, (128, 4, 32), (64, 24, 128)),
):
    args = leaf(*weights, dtype=F32), leaf(*state, dtype=F32)
    named(f"stacks of {title}", Program(stacking(step), args, PEAK))


def gathered_stack(weights, states):
    """A sum over what a loop stacks of the states of all devices, in another loop."""

    def step(states, _):
        return jnp.tanh(states @ weights), states

    def added(total, slice_):
        return total + jnp.einsum("bij,bik->jk", slice_, jnp.tanh(slice_ @ weights)), None

    stack = jax.lax.scan(step, states, None, length=2048)[1]
    return jax.lax.scan(added, weights, jax.lax.all_gather(stack, "x", axis=1, tiled=True))[0]


for batch, rows, width in ((16, 48, 48), (16, 64, 32), (16, 24, 24), (8, 64, 16)):
    args = leaf(width, width, dtype=F32), leaf(batch, rows, width, dtype=F32)
    specs = (WHOLE, SPLIT), WHOLE
    named(f"a gathered stack of {rows} x {width} matrices", Program(gathered_stack, args, PEAK, on="v5e:2x4", specs=specs))
