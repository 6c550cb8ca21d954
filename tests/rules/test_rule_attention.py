"""cuDNN's attention, planned on a machine without a GPU: split over examples and heads, as its own kernel on each shard."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.rules import rules_of
from autoshard.run.step import Step
from autoshard.trace import trace

BATCH, LENGTH, HEADS, SHARED, WIDTH = 8, 64, 8, 4, 64


def arrays(batch=BATCH):
    make = lambda heads: jax.ShapeDtypeStruct((batch, LENGTH, heads, WIDTH), jnp.bfloat16)  # noqa: E731
    return make(HEADS), make(SHARED), make(SHARED)


def gradients(q, k, v, **options):
    def loss(q, k, v):
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **options).astype(jnp.float32) ** 2)

    return jax.grad(loss, (0, 1, 2))(q, k, v)


def test_examples_and_heads_are_split():
    """Batch over one axis, heads over the other: queries by key heads, forward and backward, with no collective but the scalar loss's."""
    heads = P("data", None, "model")
    options = {"cluster": "h100:8x1", "mesh": {"data": 2, "model": 4}, "searcher": "manual", "pins": dict.fromkeys("qkv", heads)}
    strategy = autoshard.search(gradients, *arrays(), **options)
    assert not strategy.cost.collectives and set(strategy.out_specs) == {P("data", None, "model", None)}
    text = Step(gradients, strategy.record, None).lower(*arrays(), platform="cuda").as_text()
    calls = [line for line in text.splitlines() if "__cudnn$fmha" in line]
    shard = "tensor<4x64x2x64xbf16>, tensor<4x64x1x64xbf16>, tensor<4x64x1x64xbf16>"
    assert len(calls) == 2 and all(shard in line for line in calls)


def test_work_is_that_of_the_kernels():
    """Two products forward, five backward; half of it under a causal mask."""
    pairs = BATCH * HEADS * LENGTH * LENGTH
    found = {}
    for causal in (False, True):
        graph = trace(lambda q, k, v, c=causal: gradients(q, k, v, is_causal=c), *arrays()).graph
        found[causal] = [op.kernel.matrix_flops for op in graph.ops if op.kernel is not None]
    assert found[False] == [2 * 2 * WIDTH * pairs, 5 * 2 * WIDTH * pairs]
    assert found[True] == [each / 2 for each in found[False]]


@pytest.mark.parametrize(("shape", "whole"), [((BATCH, 1), "model"), ((1, HEADS), "data")])
def test_a_bias_that_is_shared_is_not_split_where_its_gradient_adds_up(shape, whole):
    """The gradient of a bias that examples or heads share is a sum over them, which no device has alone."""

    def step(q, k, v, bias):
        loss = lambda bias: jnp.sum(jax.nn.dot_product_attention(q, k, v, bias, implementation="cudnn").astype(jnp.float32))  # noqa: E731
        return jax.grad(loss)(bias)

    bias = jax.ShapeDtypeStruct((*shape, LENGTH, LENGTH), jnp.bfloat16)
    traced = trace(step, *arrays(), bias)
    rules = [rules_of(traced.graph)[op.index] for op in traced.graph.ops if op.kernel is not None]
    kinds = {name: rules[-1].factors[rules[-1].operands[0][dim][0]].kind for name, dim in (("data", 0), ("model", 2))}
    assert kinds == {"data": "pass_through", "model": "pass_through", whole: "need_replication"}
