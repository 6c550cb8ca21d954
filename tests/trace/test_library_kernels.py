"""Kernels of JAX's libraries whose rules are written down: found, with the arguments that were no arrays, and right in parts."""

from __future__ import annotations

from functools import partial
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.gpu import layer_norm, rms_norm
from jax.experimental.pallas.ops.tpu import paged_attention, ragged_paged_attention
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.rules import rules_of
from autoshard.run.step import Step
from autoshard.testing import check_kernel_rule
from autoshard.trace import library_kernels, trace

BATCH, HEADS, SHARED, WIDTH, PAGES, SIZE, EACH = 2, 4, 2, 128, 8, 8, 2


def arrays(*shapes):
    return [jnp.asarray(np.random.default_rng(k).normal(size=shape), jnp.float32) for k, shape in enumerate(shapes)]


def paged(q, keys, values, lengths, pages):
    call = partial(paged_attention.paged_attention, pages_per_compute_block=1, attn_logits_soft_cap=30.0)
    return call(q, keys, values, lengths, pages)


def paged_arguments():
    pages = np.random.default_rng(0).permutation(PAGES)[: BATCH * EACH].reshape(BATCH, EACH)
    cache = (SHARED, PAGES, SIZE, WIDTH)
    return *arrays((BATCH, HEADS, WIDTH), cache, cache), jnp.asarray([5, 14], jnp.int32), jnp.asarray(pages, jnp.int32)


def ragged(q, cache, lengths, pages, ends, number):
    options = {"num_kv_pages_per_block": 2, "num_queries_per_block": 8, "sm_scale": 0.25, "sliding_window": 5}
    return ragged_paged_attention.ragged_paged_attention(q, cache, lengths, pages, ends, number, **options)


def ragged_arguments():
    cache, whole = (PAGES, SIZE, 2 * SHARED, WIDTH), partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    return *arrays((16, HEADS, WIDTH), cache), whole((2,)), whole((2, EACH)), whole((3,)), whole((1,))


def gradients(norm, x, scale, bias):
    return jax.grad(lambda *args: jnp.sum(norm(*args) ** 2), (0, 1, 2))(x, scale, bias)


NORMS = pytest.mark.parametrize("norm", [layer_norm.layer_norm, rms_norm.rms_norm], ids=["layer", "rms"])


@pytest.mark.slow
def test_attention_over_pages_is_split_over_examples_and_key_heads():
    """Each part of examples, and of key heads with their pages, gives what the whole gives."""
    (op,) = (op for op in trace(paged, *paged_arguments()).graph.walk() if op.kernel)
    assert op.primitive == "custom_partitioning" and op.kernel.matrix_flops == 4 * BATCH * HEADS * EACH * SIZE * WIDTH
    check_kernel_rule(paged, *paged_arguments())


def test_ragged_attention_is_split_over_key_heads():
    """Queries and pages by key heads, of which each shard's kernel for TPUs has its part, lowered without TPUs."""
    pins = {"q": P(None, "model"), "cache": P(None, None, "model")}
    options = {"cluster": "v5e:2x2", "mesh": {"data": 2, "model": 2}, "searcher": "manual", "pins": pins}
    strategy = autoshard.search(ragged, *ragged_arguments(), **options)
    assert not strategy.cost.collectives and strategy.out_specs == P(None, "model", None)
    text = Step(ragged, strategy.record, None).lower(*ragged_arguments(), platform="tpu").as_text()
    (call,) = (line for line in text.splitlines() if "tpu_custom_call" in line)
    assert f"tensor<16x{HEADS // 2}x{WIDTH}xf32>, tensor<{PAGES}x{SIZE}x{SHARED}x{WIDTH}xf32>" in call


@NORMS
def test_gradients_of_norms_are_parts_of_a_sum(norm):
    """Rows are split through a norm and its gradients; those of scale and bias are added up, rather than rows gathered."""
    types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 128, 512), (512,), (512,))]
    options = {"cluster": "h100:8x1", "mesh": {"data": 8}, "searcher": "manual", "pins": {"x": P("data")}}
    strategy = autoshard.search(partial(gradients, norm), *types, **options)
    assert {each.kind for each in strategy.cost.collectives} == {"all_reduce"}
    check_kernel_rule(partial(gradients, norm), *arrays((2, 2, 32), (32,), (32,)))


def test_another_kernel_stays_as_it_is():
    """Where no call of the public function has the same kernel, nothing is assumed."""
    with mock.patch.object(library_kernels, "MOST_TRIES", 0):
        traced = trace(paged, *paged_arguments())
    (op,) = (op for op in traced.graph.walk() if op.kernel)
    assert op.primitive == "pallas_call"
    assert not any(factor.shardable for factor in rules_of(traced.graph)[op.index].factors)
