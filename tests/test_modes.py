"""The modes of parallel training: each is what its page says in compiled programs."""

from __future__ import annotations

from collections import Counter

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard.verify import collectives_of

N = 8


def perceptron(reduce):
    """A Linen network with its Adam step."""
    model = nn.Sequential([nn.Dense(256, use_bias=False), jnp.tanh, nn.Dense(64, use_bias=False), jnp.tanh, nn.Dense(64, use_bias=False)])
    optimizer = optax.adam(1e-2)

    def make(key):
        params = model.init(key, jnp.ones((1, 128)))
        return params, optimizer.init(params)

    def step(state, x):
        params, memory = state
        value, gradients = jax.value_and_grad(lambda params: reduce(jnp.square(model.apply(params, x) - 1)))(params)
        updates, memory = optimizer.update(gradients, memory, params)
        return (optax.apply_updates(params, updates), memory), value

    return make, step, jax.ShapeDtypeStruct((256, 128), jnp.float32)


def convolutions(reduce):
    """A convolutional network, its momentum and a table that is looked up."""
    optimizer = optax.sgd(1e-2, momentum=0.9)

    def make(key):
        keys = jax.random.split(key, 3)
        shapes = (3, 3, 16, 64), (64, 32), (64, 16)
        params = [jax.random.normal(key, shape) * 0.1 for key, shape in zip(keys, shapes, strict=True)]
        return params, optimizer.init(params)

    def loss(params, images):
        kernel, readout, table = params
        images = images + table[jnp.argmax(images[:, 0, 0, :4], -1)][:, None, None, :]
        found = jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return reduce(jnp.square(jax.nn.relu(found).mean((1, 2)) @ readout))

    def step(state, images):
        params, memory = state
        value, gradients = jax.value_and_grad(loss)(params, images)
        updates, memory = optimizer.update(gradients, memory, params)
        return (optax.apply_updates(params, updates), memory), value

    return make, step, jax.ShapeDtypeStruct((64, 8, 8, 16), jnp.float32)


PROGRAMS = {"perceptron": perceptron, "convolutions": convolutions}


@pytest.mark.sample(1)
@pytest.mark.parametrize("reduce", [jnp.mean, jnp.sum])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_means_or_sums_as_the_loss_is(name, reduce):
    """Data parallel training of a mean and of a sum is that of the whole batch on one device."""
    make, step, x = PROGRAMS[name](reduce)
    shapes = jax.eval_shape(make, jax.random.key(0))
    strategy = autoshard.search(step, shapes, x, cluster="cpu:8", searcher="data_parallel")
    sharded, state, wanted = strategy.apply(step), strategy.init(make, jax.random.key(0)), make(jax.random.key(0))
    for seed in range(3):
        batch = np.random.default_rng(seed).normal(size=x.shape).astype(np.float32)
        state, loss = sharded(state, batch)
        wanted, expected = jax.jit(step)(wanted, batch)
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
    for found, expected in zip(jax.tree.leaves(state[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=2e-3, atol=1e-4)


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_stages_of_optimizer_parallelism_in_compiled_programs(name):
    """State on a device and collectives are those of the page's table, in the program that XLA compiles."""
    make, step, x = PROGRAMS[name](jnp.mean)
    shapes = jax.eval_shape(make, jax.random.key(0))
    parameters, memory = (sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(part) if leaf.ndim) for part in shapes)
    batch = x.size * x.dtype.itemsize / N
    states = {0: parameters + memory, 1: parameters + memory / N, 2: parameters + memory / N, 3: (parameters + memory) / N}
    live = []
    for stage, state in states.items():
        searcher = autoshard.FullySharded(stage=stage) if stage else "data_parallel"
        strategy = autoshard.search(step, shapes, x, cluster="cpu:8", searcher=searcher, donate_argnums=0)
        compiled = strategy.apply(step).lower(shapes, x).compile()
        analysis = compiled.memory_analysis()
        assert abs(analysis.argument_size_in_bytes - state - batch) < 128, stage  # counters of steps
        live.append(analysis.argument_size_in_bytes + analysis.temp_size_in_bytes)
        sent = Counter[str]()
        for one in collectives_of(compiled.as_text(), strategy.record.mesh):
            sent[one.kind] += one.count * one.bytes
        assert sent["all_reduce"] + sent["reduce_scatter"] == parameters + 4  # and the loss
        assert sent["reduce_scatter"] == parameters or stage < 2
        assert sent["all_gather"] == parameters * bool(stage) or stage == 3
        assert sent.keys() <= {"all_reduce", "reduce_scatter", "all_gather"}
        assert stage < 3 or parameters <= sent["all_gather"] <= 2 * parameters
    assert live[0] > live[1] >= live[2] > live[3]  # equal where gradients are not live at the peak, as of XLA:CPU's convolutions
