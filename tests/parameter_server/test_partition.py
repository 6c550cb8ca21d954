"""Parts of servers: their updates together are the optimizer's update of the whole tree, for any optimizer and tree."""

from __future__ import annotations

import doctest
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.parameter_server import partition as module
from autoshard.parameter_server.partition import part_optimizer, partition

BY_NAME = {"a": "fast", "b": {"c": "slow", "d": "fast"}, "e": "none"}

# Optimizers whose update of an array reads that array alone, though some read its path, or all of it.
SEPARABLE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": optax.adam(optax.exponential_decay(0.1, 2, 0.5)),
    "masked decay": optax.adamw(0.1, weight_decay=0.1, mask=lambda tree: jax.tree.map(lambda x: x.ndim > 1, tree)),
    "by name": optax.multi_transform({"fast": optax.adam(0.1), "slow": optax.lamb(0.01), "none": optax.set_to_zero()}, BY_NAME),
    "factored": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "clipped by element": optax.chain(optax.clip(0.5), optax.rmsprop(0.01)),
    "clipped by array": optax.chain(optax.adaptive_grad_clip(0.1), optax.sgd(0.1)),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "slow copy": optax.chain(optax.sgd(0.1), optax.ema(0.9)),
}

# Those whose update of an array reads others.
COUPLED = {
    "global norm": optax.chain(optax.clip_by_global_norm(1e6), optax.sgd(0.1)),
    "finite": optax.apply_if_finite(optax.sgd(0.1), 3),
    "normalized": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1)),
}


def tree(seed, dtype=np.float32):
    generator = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(generator.normal(size=shape), dtype),
        {"a": (4, 3), "b": {"c": (5,), "d": (2, 3)}, "e": ()},
        is_leaf=lambda x: isinstance(x, tuple),
    )


def in_parts(optimizer, parts, params, gradients):
    """The leaves after updates by the means of gradients, of some steps of some workers, part by part."""
    leaves = jax.tree.leaves(params)
    result = list(leaves)
    for part in parts:
        init, update = part_optimizer(optimizer, params, part)
        own = [leaves[i] for i in part.leaves]
        state = init(own)
        for workers in gradients:
            own, state = update(own, state, [[jax.tree.leaves(each)[i] for i in part.leaves] for each in workers])
        for i, leaf in zip(part.leaves, own, strict=True):
            result[i] = leaf
    return result


def as_a_whole(optimizer, params, gradients):
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for workers in gradients:
        mean = jax.tree.map(lambda *each: sum(each) / len(each), *workers)
        updates, state = update(mean, state, params)
        params = optax.apply_updates(params, updates)
    return jax.tree.leaves(params)


@pytest.mark.sample(4)
@pytest.mark.parametrize(("servers", "workers"), [(2, 2), *(pytest.param(*n, marks=pytest.mark.slow) for n in [(1, 1), (3, 1), (5, 3)])])
@pytest.mark.parametrize("name", [*SEPARABLE, *COUPLED])
def test_updates_of_parts_are_those_of_the_whole(name, servers, workers):
    """For any number of servers, more than arrays included; state that is read by several parts is kept by each."""
    optimizer, params = (SEPARABLE | COUPLED)[name], tree(0)
    gradients = [[tree((step, worker)) for worker in range(workers)] for step in range(3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        parts = partition(optimizer, params, servers)
    assert len(parts) == servers and sorted(i for part in parts for i in part.leaves) == list(range(4))
    for got, wanted in zip(in_parts(optimizer, parts, params, gradients), as_a_whole(optimizer, params, gradients), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SEPARABLE)
def test_separable_optimizers_are_spread(name):
    """Each server has some arrays, and of the state what these need, in all types."""
    for dtype in (np.float32, jnp.bfloat16):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            parts = partition(SEPARABLE[name], tree(0, dtype), 2)
        assert all(part.leaves for part in parts)
        state = jax.tree.leaves(SEPARABLE[name].init(tree(0, dtype)))
        assert all(part.state != tuple(range(len(state))) for part in parts if len(state) > 2)


@pytest.mark.parametrize("name", COUPLED)
def test_coupled_optimizers_stay_on_one_server(name):
    """Also where a limit is so high that no test of values would see it, and the warning says so."""
    with pytest.warns(UserWarning, match=r"all 4 arrays of parameters are on the first of 3 servers"):
        parts = partition(COUPLED[name], tree(0), 3)
    assert [part.leaves for part in parts] == [(0, 1, 2, 3), (), ()]


@settings(max_examples=25)
@given(st.lists(st.integers(0, 1000), min_size=1, max_size=12), st.integers(1, 6))
def test_parts_are_balanced_by_bytes(sizes, servers):
    """No server has more than the mean and the largest array together, and each array is on one."""
    params = [jax.ShapeDtypeStruct((size,), np.float32) for size in sizes]
    parts = partition(optax.sgd(1e-3), params, servers)
    totals = [sum(sizes[i] for i in part.leaves) for part in parts]
    assert sum(totals) == sum(sizes) and max(totals) <= sum(sizes) / servers + max(sizes)


def test_compiled_updates_do_not_have_the_arrays_of_others():
    """Another server's array of a million elements costs nothing."""
    params = [jax.ShapeDtypeStruct((1_000_000,), np.float32), jax.ShapeDtypeStruct((10,), np.float32)]
    part = partition(optax.adam(1e-3), params, 2)[1]
    assert part.leaves == (1,)
    own = [jnp.ones(10)]
    init, update = part_optimizer(optax.adam(1e-3), params, part)
    assert "1000000" not in update.lower(own, init(own), [own]).compile().as_text()


def test_examples():
    """Those of the docstrings."""
    assert doctest.testmod(module).failed == 0
