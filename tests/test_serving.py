"""Prefill and decode are searched together: one mesh, equal specs of parameters and cache, results equal to one device's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from autoshard import serving
from autoshard.errors import InfeasibleError, ShardingError

LAYERS, WIDTH, HEADS, VOCABULARY, LENGTH, BATCH = 2, 64, 8, 128, 32, 8


def attended(params, cache, tokens, start):
    """The layers on tokens (batch, n) at positions from ``start`` on, with the new cache and the logits of the last position."""
    x = params["embed"][tokens]
    rows = jnp.arange(tokens.shape[1])[:, None] + start

    def layer(x, both):
        p, old = both
        q, k, v = (jnp.einsum("bnd,dhk->bhnk", x, p[name]) for name in "qkv")
        k, v = (jax.lax.dynamic_update_slice(old[name], new, (0, 0, start, 0)) for name, new in (("k", k), ("v", v)))
        scores = jnp.where(jnp.arange(LENGTH) <= rows, jnp.einsum("bhnk,bhmk->bhnm", q, k), -1e9)
        x = x + jnp.einsum("bhnm,bhmk,hkd->bnd", jax.nn.softmax(scores), v, p["out"])
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], {"k": k, "v": v}

    x, cache = jax.lax.scan(layer, x, (params["layers"], cache))
    return cache, x[:, -1] @ params["embed"].T


def prefill(params, cache, prompt):
    return attended(params, cache, prompt, 0)


def decode(params, cache, token, position):
    return attended(params, cache, token, position)


def arrays():
    shapes = {name: (LAYERS, WIDTH, HEADS, WIDTH // HEADS) for name in "qkv"}
    shapes |= {"out": (LAYERS, HEADS, WIDTH // HEADS, WIDTH), "up": (LAYERS, WIDTH, 4 * WIDTH), "down": (LAYERS, 4 * WIDTH, WIDTH)}
    rng = np.random.default_rng(0)
    layers = {name: jnp.asarray(rng.normal(size=shape) * 0.05, jnp.float32) for name, shape in shapes.items()}
    params = {"embed": jnp.asarray(rng.normal(size=(VOCABULARY, WIDTH)), jnp.float32), "layers": layers}
    prompt = jnp.asarray(rng.integers(0, VOCABULARY, (BATCH, 8)), jnp.int32)
    return params, prompt


def args_of(batch, length):
    params, _ = jax.eval_shape(arrays)
    kept = jax.ShapeDtypeStruct((LAYERS, batch, HEADS, length, WIDTH // HEADS), jnp.float32)
    cache = {"k": kept, "v": kept}
    tokens = [jax.ShapeDtypeStruct((batch, n), jnp.int32) for n in (8, 1)]
    return (params, cache, tokens[0]), (params, cache, tokens[1], jax.ShapeDtypeStruct((), jnp.int32))


@pytest.fixture(scope="module")
def table():
    return serving.search(prefill, decode, args_of, cluster="cpu:8", batches=[1, BATCH], lengths=[LENGTH], new_tokens=4)


def test_both_share_the_mesh_and_the_specs_of_parameters_and_cache(table):
    """Placement included; the cache comes out as it goes in, of both."""
    for row in table:
        assert row.prefill.record.mesh == row.decode.record.mesh
        assert row.prefill.in_specs[:2] == row.decode.in_specs[:2]
        assert row.prefill.out_specs[0] == row.decode.out_specs[0] == row.decode.in_specs[1]


def test_tokens_are_those_of_one_device_and_the_cache_stays_where_it_is(table):
    """A prefill and four decode steps on 8 devices: equal logits, and one sharding of the cache throughout."""
    row = table[1]
    params, prompt = arrays()
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), args_of(BATCH, LENGTH)[0][1])
    expected, logits = jax.jit(prefill)(params, cache, prompt)
    first, step = row.prefill.apply(prefill), row.decode.apply(decode)
    shared, held, sharded_prompt = row.prefill.shard(params, cache, prompt)
    held, found = first(shared, held, sharded_prompt)
    for position in range(8, 12):
        np.testing.assert_allclose(found, logits, rtol=2e-4, atol=2e-4)
        where = jax.tree.map(lambda leaf: leaf.sharding, held)
        token = jnp.argmax(logits, -1)[:, None].astype(jnp.int32)
        expected, logits = jax.jit(decode)(params, expected, token, position)
        held, found = step(shared, held, token, jnp.int32(position))
        assert all(jax.tree.leaves(jax.tree.map(lambda leaf, old: leaf.sharding.is_equivalent_to(old, leaf.ndim), held, where)))
    assert len(where["k"].device_set) == 8
    np.testing.assert_allclose(found, logits, rtol=2e-4, atol=2e-4)


def test_the_best_row_is_that_of_the_objective(table):
    """Of most tokens a second, or of the shortest request; the table says both."""
    assert table.best is max(table, key=lambda row: row.tokens_per_second)
    quick = serving.Serving(table.rows, "latency", "cpu:8")
    assert quick.best is min(table, key=lambda row: row.request_seconds)
    assert table[0].request_seconds == table[0].first_token_seconds + 4 * table[0].token_seconds
    text = str(table)
    assert "tokens/s" in text and "4 decode steps" in text and "<table" in table._repr_html_() and "2 rows" in repr(table)


def test_what_does_not_fit_is_a_row_with_its_reason():
    """A table without any other has no best row."""
    asked = {"cluster": "cpu:8", "batches": [BATCH], "lengths": [LENGTH], "searcher": "data_parallel", "memory_limit_bytes": 1e3}
    table = serving.search(prefill, decode, args_of, **asked)
    assert table[0].decode is None and "nothing fits" in str(table)
    with pytest.raises(InfeasibleError, match="none of 1 does"):
        _ = table.best


def test_parameters_are_padded_alike():
    """A vocabulary that eight devices do not divide: one array of it serves both, and tokens are those of one device."""

    def args(batch, length):
        both = args_of(batch, length)
        embed = jax.ShapeDtypeStruct((20011, WIDTH), jnp.float32)
        return tuple(({**params, "embed": embed}, *rest) for params, *rest in both)

    options = {"cluster": "cpu:8", "batches": [1], "lengths": [LENGTH], "mesh": {"data": 8}, "searcher": "dynamic_programming"}
    row = serving.search(prefill, decode, args, **options).best
    assert row.prefill.in_specs[:2] == row.decode.in_specs[:2] and row.prefill.record.arguments[0].shape == (20016, WIDTH)
    assert all(0 < each.record.program.rewrites[0].dims[0].more_work < 0.001 for each in (row.prefill, row.decode))  # more work
    assert row.request_seconds < serving.search(prefill, decode, args, padding=False, **options).best.request_seconds
    params, prompt = arrays()
    params["embed"] = jnp.asarray(np.random.default_rng(1).normal(size=(20011, WIDTH)), jnp.float32)
    cache = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), args(1, LENGTH)[0][1])
    expected, logits = jax.jit(prefill)(params, cache, prompt[:1])
    token = jnp.argmax(logits, -1)[:, None].astype(jnp.int32)
    _, wanted = jax.jit(decode)(params, expected, token, 8)
    shared, held, own = row.prefill.shard(params, cache, prompt[:1])
    held, found = row.prefill.apply(prefill)(shared, held, own)
    np.testing.assert_allclose(found, logits, rtol=2e-4, atol=2e-4)
    np.testing.assert_allclose(row.decode.apply(decode)(shared, held, token, jnp.int32(8))[1], wanted, rtol=2e-4, atol=2e-4)


def test_another_cache_is_refused():
    """Both get the whole cache; objectives have names."""

    def shorter(batch, length):
        return args_of(batch, length // 2)[0], args_of(batch, length)[1]

    with pytest.raises(ShardingError, match="Give prefill the whole cache"):
        serving.search(prefill, decode, shorter, cluster="cpu:8", batches=[BATCH], lengths=[LENGTH])
    with pytest.raises(ShardingError, match="'throughput' or 'latency'"):
        serving.search(prefill, decode, args_of, cluster="cpu:8", batches=[BATCH], lengths=[LENGTH], objective="speed")
    with pytest.raises(ShardingError, match="batch sizes and lengths"):
        serving.search(prefill, decode, args_of, cluster="cpu:8", batches=[], lengths=[LENGTH])


class Attention(nnx.Module):
    """One layer with its embeddings, in Flax."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.q, self.k, self.v = (nnx.LinearGeneral(WIDTH, (HEADS, WIDTH // HEADS), rngs=rngs) for _ in "qkv")
        self.out = nnx.LinearGeneral((HEADS, WIDTH // HEADS), WIDTH, axis=(-2, -1), rngs=rngs)

    def __call__(self, cache, tokens, start=0):
        x = self.embed(tokens)
        k, v = (jax.lax.dynamic_update_slice(cache[n], new(x), (0, start, 0, 0)) for n, new in (("k", self.k), ("v", self.v)))
        visible = jnp.arange(LENGTH) <= jnp.arange(tokens.shape[1])[:, None] + start
        scores = jnp.where(visible, jnp.einsum("bnhd,bmhd->bhnm", self.q(x), k), -1e9)
        x = x + self.out(jnp.einsum("bhnm,bmhd->bnhd", jax.nn.softmax(scores), v))
        return {"k": k, "v": v}, self.embed.attend(x[:, -1])


def test_parameters_are_a_flax_module():
    """One spec for each of its parameters in both steps, and logits as on one device."""
    model, prompt = Attention(nnx.Rngs(0)), jnp.arange(BATCH * 8).reshape(BATCH, 8)
    cache = {name: jnp.zeros((BATCH, LENGTH, HEADS, WIDTH // HEADS)) for name in "kv"}

    def whole(batch, length):
        return (model, cache, prompt), (model, cache, prompt[:, :1], jnp.int32(0))

    row = serving.search(Attention.__call__, Attention.__call__, whole, cluster="cpu:8", batches=[BATCH], lengths=[LENGTH])[0]
    assert jax.tree.leaves(row.prefill.in_specs[:2]) == jax.tree.leaves(row.decode.in_specs[:2])
    shared, held, sharded_prompt = row.prefill.shard(model, cache, prompt)
    held, _ = row.prefill.apply(Attention.__call__)(shared, held, sharded_prompt)
    held, found = row.decode.apply(Attention.__call__)(shared, held, prompt[:, :1], jnp.int32(8))
    cache, _ = model(cache, prompt)
    np.testing.assert_allclose(found, model(cache, prompt[:, :1], 8)[1], rtol=2e-4, atol=2e-4)
    assert len(held["k"].sharding.device_set) == 8
