"""Kernels on shards: a train step with attention as a Pallas kernel equals the step with plain attention."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import kernel_examples
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import PartitionSpec as P

import autoshard

BATCH, HEADS, SHARED, LENGTH, WIDTH = 8, 4, 2, 8, 4


def plain(q, k, v):
    k, v = (jnp.repeat(x, HEADS // SHARED, 1) for x in (k, v))
    return jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2)) @ v


def _forward(q, k, v, o):
    o[0, 0] = jax.nn.softmax(q[0, 0] @ k[0, 0].T) @ v[0, 0]


def _backward(q, k, v, to, dq, dk, dv):
    @pl.when(pl.program_id(2) == 0)
    def _():
        dk[...], dv[...] = jnp.zeros_like(dk), jnp.zeros_like(dv)

    _, pull = jax.vjp(lambda q, k, v: jax.nn.softmax(q @ k.T) @ v, q[0, 0, 0], k[0, 0], v[0, 0])
    found = pull(to[0, 0, 0])
    dq[0, 0, 0] = found[0]
    dk[0, 0] += found[1]
    dv[0, 0] += found[2]


def like(*arrays):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


@jax.custom_vjp
def attention(q, k, v):
    return _attend(q, k, v)[0]


def _attend(q, k, v):
    own = pl.BlockSpec((1, 1, LENGTH // 2, WIDTH), lambda b, h, i: (b, h, i, 0))
    shared = pl.BlockSpec((1, 1, LENGTH, WIDTH), lambda b, h, i: (b, h // 2, 0, 0))
    grid = len(q), HEADS, 2
    call = pl.pallas_call(_forward, grid=grid, in_specs=[own, shared, shared], out_specs=own, out_shape=like(q)[0], interpret=True)
    return call(q, k, v), (q, k, v)


def _gradients(saved, to):
    q, k, v = saved
    apart = (len(q), SHARED, HEADS // SHARED, LENGTH, WIDTH)
    q, to = q.reshape(apart), to.reshape(apart)
    own = pl.BlockSpec((1, 1, 1, LENGTH, WIDTH), lambda b, h, m: (b, h, m, 0, 0))
    shared = pl.BlockSpec((1, 1, LENGTH, WIDTH), lambda b, h, m: (b, h, 0, 0))
    specs = {"in_specs": [own, shared, shared, own], "out_specs": [own, shared, shared]}
    dq, dk, dv = pl.pallas_call(_backward, grid=apart[:3], out_shape=like(q, k, v), interpret=True, **specs)(q, k, v, to)
    return dq.reshape(saved[0].shape), dk, dv


attention.defvjp(_attend, _gradients)


def step(attend, weights, x):
    def heads(h, w):
        return jnp.swapaxes((h @ w).reshape(len(h), LENGTH, -1, WIDTH), 1, 2)

    def loss(weights):
        h = x
        for w in weights:
            made = attend(*(heads(h, w[name]) for name in "qkv"))
            h = h + jnp.swapaxes(made, 1, 2).reshape(h.shape) @ w["o"]
        return jnp.mean(h**2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def arguments():
    rng = np.random.default_rng(0)
    wide, narrow = HEADS * WIDTH, SHARED * WIDTH
    weights = [{n: rng.normal(size=(wide, wide if n in "qo" else narrow)).astype(np.float32) / 4 for n in "qkvo"}]
    return weights, rng.normal(size=(BATCH, LENGTH, wide)).astype(np.float32)


PLANS = {
    "batch": {"mesh": {"data": 8}, "searcher": "data_parallel"},
    "heads": {"mesh": {"data": 2, "model": 4}, "searcher": "manual", "pins": {"x": P("data"), "weights[0]['q']": P(None, "model")}},
    "microbatches": {"mesh": {"data": 2, "model": 2}, "cluster": "cpu:4", "microbatches": 2, "remat": "full"},
    "stages": {"stages": 2, "microbatches": 2, "cluster": "cpu:4"},
}


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "lowering"), [*((name, "manual") for name in PLANS), ("heads", "constraints")])
def test_a_step_with_a_kernel_equals_the_plain_one(name, lowering):
    """Attention as a kernel, forward and backward, split over batch and heads, in microbatches and in stages, gives plain results."""
    args = arguments()
    expected = jax.jit(partial(step, plain))(*args)
    fn = partial(step, attention)
    fn.__name__ = "step"
    strategy = autoshard.search(fn, *args, **{"cluster": "cpu:8", **PLANS[name]})
    for found, wanted in zip(jax.tree.leaves(strategy.apply(fn, lowering=lowering)(*args)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_a_kernel_is_split_like_the_plain_operations():
    """Data parallelism splits the work of attention as a kernel by 8, as that of plain attention, and leaves no kernel whole."""
    args, options = arguments(), {"cluster": "v5e:2x4", "mesh": {"data": 8}, "searcher": "data_parallel"}
    ours, theirs = (autoshard.search(lambda w, x, a=attend: step(a, w, x), *args, **options) for attend in (attention, plain))
    assert ours.in_specs == theirs.in_specs and not any("kernel" in note for note in ours.notes)
    assert ours.cost.flops == pytest.approx(theirs.cost.flops, rel=0.2)


OPTIONS = [{"mesh": {"data": 4}, "searcher": "data_parallel"}, {"mesh": {"data": 2}, "searcher": "data_parallel", "microbatches": 2}]


@pytest.mark.parametrize("options", OPTIONS, ids=["shards", "microbatches"])
def test_prefetched_scalars_are_those_of_the_programs(options):
    """Each shard, and each microbatch of every second example, finds its examples' lengths and pages; shards have their own."""

    def step(weights, batch):
        def loss(weights):
            summed = kernel_examples.paged(batch["lengths"], batch["pages"].reshape(-1), cache)
            return jnp.mean((batch["x"] * jax.lax.stop_gradient(summed) * weights) ** 2)

        value, gradient = jax.value_and_grad(loss)(weights)
        return weights - 0.1 * gradient, value

    rng = np.random.default_rng(0)
    cache = rng.normal(size=(16, 4, 3)).astype(np.float32)
    lengths, pages = rng.integers(1, 5, 8).astype(np.int32), rng.permutation(16).reshape(8, 2).astype(np.int32)
    args = np.ones(3, np.float32), {"lengths": lengths, "pages": pages, "x": rng.normal(size=(8, 3)).astype(np.float32)}
    strategy = autoshard.search(step, *args, cluster=f"cpu:{options['mesh']['data']}", **options)
    assert "microbatches" in options or {each.kind for each in strategy.cost.collectives} == {"all_reduce"}
    for found, wanted in zip(strategy.apply(step)(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


@pytest.mark.parametrize("lowering", ["manual", "constraints"])
def test_kernels_for_other_devices_are_opaque_where_nothing_is_compiled(lowering):
    """Without a TPU the collectives of a program with a kernel for TPUs are read and compared with the predicted ones."""

    def step(x):
        block = pl.BlockSpec((8, 128), lambda i: (i, 0))
        made = jax.ShapeDtypeStruct(x.shape, x.dtype)
        specs = {"in_specs": [block], "out_specs": block, "out_shape": made}
        return jnp.sum(pl.pallas_call(lambda x, o: o.__setitem__(..., x[...]), grid=(8,), **specs)(x))

    x = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    strategy = autoshard.search(step, x, cluster="v5e:2x4", mesh={"data": 8}, searcher="manual", pins={"x": P("data")})
    found = autoshard.verify(strategy, step, x, lowering=lowering)
    assert found.exact and found.rows
