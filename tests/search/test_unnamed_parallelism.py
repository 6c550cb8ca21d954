"""Expert, context, tensor, sequence and vocabulary parallelism come out of a search that has no word for any of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
import pytest

import autoshard
from autoshard.trace import trace
from benchmarks.models import gpt, leaf, moe

OPTIONS = {"cluster": "v5e:2x4", "mesh": {"x": 8}, "memory_limit_bytes": 1e15}
EXACT = pytest.mark.parametrize("searcher", ["recursive_programming", "dynamic_programming"])


def descend(loss):
    """One step of gradient descent."""

    def step(params, *batch):
        value, gradients = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, gradients), value

    return step


def sharded_dims(strategy, fn, args, shape):
    """The dimensions that mesh axis x shards in the program's values of a shape."""
    graph = trace(fn, *args).graph
    layouts = [strategy.record.assignment.layout(value) for value, found in enumerate(graph.values) if found.shape == shape]
    return {layout[0] for layout in layouts} - {-1}  # constants are replicated


@pytest.mark.sample(1)
@EXACT
@pytest.mark.parametrize("sorts", [False, True], ids=["dispatched", "sorted"])
def test_experts_are_split(searcher, sorts):
    """The weights of a mixture of experts are split by expert, and its products run so: tokens travel, by all_to_all or otherwise."""
    fn, args = moe(1, 1024, 16, 8, 4096, 16, 1024, sorts=sorts)
    strategy = autoshard.search(fn, *args, searcher=searcher, **OPTIONS)
    specs = {tensor.path: tensor.spec for tensor in strategy.record.arguments}
    assert specs["state['params']['layers'][0]['up']"] == ("x", None, None)
    assert specs["state['params']['layers'][0]['down']"] == ("x", None, None)
    hidden = sharded_dims(strategy, fn, args, (16, 8, 160, 4096))  # batch, experts, room, hidden units
    assert hidden == {1}
    if sorts:  # gathered and scattered by token, computed by expert
        assert {c.kind for c in strategy.cost.collectives if "[16,8,160,1024]" in c.tensor} == {"all_to_all"}


@pytest.mark.slow
@EXACT
def test_projections_are_split_and_the_stream_between_them_by_positions(searcher):
    """Where the batch is small, heads and hidden units are split, and the values between them by positions, as in sequence parallelism."""
    batch, length, width = 2, 2048, 2048
    fn, args = gpt(1, width, 16, 4096, batch, length)
    strategy = autoshard.search(fn, *args, searcher=searcher, **OPTIONS)
    specs = {tensor.path: tensor.spec for tensor in strategy.record.arguments}
    assert specs["state['params']['layers'][0]['up']"] == (None, "x")
    assert specs["state['params']['layers'][0]['down']"] == ("x", None)
    assert specs["state['params']['layers'][0]['qkv']"] == (None, None, "x", None)
    assert sharded_dims(strategy, fn, args, (batch, length, 4 * width)) == {2}
    assert 1 in sharded_dims(strategy, fn, args, (batch, length, width))
    kinds = [c.kind for c in strategy.cost.collectives if f"[{batch},{length},{width}]" in c.tensor]
    assert "reduce_scatter" in kinds and "all_reduce" not in kinds


@pytest.mark.slow
@EXACT
def test_long_sequences_are_split(searcher):
    """Where neither batch nor heads divide, attention is split by positions, and what comes before and after as well."""
    batch, length, heads, width = 1, 65_536, 4, 512

    def loss(params, x):
        q, k, v = (jnp.einsum("bsd,dhk->bshk", x, params[name]) for name in "qkv")
        weights = jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k).astype(jnp.float32)).astype(x.dtype)
        y = jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", weights, v), params["o"])
        return (y.astype(jnp.float32) ** 2).mean()

    params = {name: leaf(width, heads, width // heads) for name in "qkv"} | {"o": leaf(heads, width // heads, width)}
    fn, args = descend(loss), (params, leaf(batch, length, width))
    strategy = autoshard.search(fn, *args, searcher=searcher, **OPTIONS)
    assert sharded_dims(strategy, fn, args, (batch, heads, length, length)) in ({2}, {3})
    assert 1 in sharded_dims(strategy, fn, args, (batch, length, width))
    assert strategy.cost.flops < 1.01 / 8 * 12 * 2 * batch * length * length * width


@pytest.mark.sample(1)
@EXACT
def test_a_large_vocabulary_is_split(searcher):
    """The head and its logits are split by vocabulary; what the loss reduces over it are a few numbers a token."""
    batch, length, width, vocabulary = 4, 512, 1024, 262_144

    def loss(params, x, targets):
        logits = (x @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    fn = descend(loss)
    args = {"head": leaf(width, vocabulary)}, leaf(batch, length, width), leaf(batch, length, dtype=jnp.int32)
    strategy = autoshard.search(fn, *args, searcher=searcher, **OPTIONS)
    assert strategy.record.arguments[0].spec == (None, "x")
    assert sharded_dims(strategy, fn, args, (batch, length, vocabulary)) == {2}
    assert max(c.bytes for c in strategy.cost.collectives) <= 4 * batch * length * width


@pytest.mark.sample(1)
@EXACT
def test_a_tied_table_is_split_by_vocabulary_where_it_is_looked_up_as_well(searcher):
    """One table serves look-up and head: split by vocabulary in both, so that tokens travel and the table does not."""
    batch, length, width, vocabulary = 1, 512, 1024, 262_144

    def loss(params, tokens, targets):
        logits = (jnp.tanh(params["table"][tokens]) @ params["table"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    tokens = leaf(batch, length, dtype=jnp.int32)
    fn, args = descend(loss), ({"table": leaf(vocabulary, width)}, tokens, tokens)
    strategy = autoshard.search(fn, *args, searcher=searcher, **OPTIONS)
    assert strategy.record.arguments[0].spec == ("x", None)
    assert sharded_dims(strategy, fn, args, (batch, length, vocabulary)) == {2}
    assert max(c.bytes for c in strategy.cost.collectives) <= 4 * batch * length * width
