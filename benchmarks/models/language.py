"""Decoder-only language models: GPT, Llama, and a mixture of experts."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from benchmarks.models.blocks import (
    _attention,
    _attention_weights,
    _block,
    _dense_weights,
    _embedded,
    _language,
    _layers,
    _lying,
    _next_token,
    _norm,
    _through,
    _tokens,
)
from benchmarks.models.step import BF16, F32, Program, _train_step, leaf


def gpt(
    layers: int,
    width: int = 1024,
    heads: int = 16,
    vocabulary: int = 32_768,
    batch: int = 512,
    length: int = 1024,
    dtype: Any = BF16,
    params: Any = F32,
    gathers: bool = True,
    tied: bool = True,
    scan: bool = False,
    remat: bool = False,
    stream: P | None = None,
) -> Program:
    """A decoder-only transformer.

    Args:
        gathers: whether its loss gathers the targets' logits; otherwise it compares with all of them.
        tied: whether the embedding makes the logits, too.
        scan: whether the layers are stacked and scanned instead of unrolled.
        remat: whether the backward pass computes each layer again.
        stream: where the residual stream is constrained to lie between sublayers, if anywhere.
    """

    def loss(weights: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = _lying(_embedded(tokens, weights, dtype), stream)
        x = _through(partial(_block, stream=stream), x, weights["layers"], scan, remat)
        return _next_token(x, weights, targets, gathers)

    each = _attention_weights(width, heads) | _dense_weights(width)
    weights = _language(vocabulary, length, width, _layers(each, layers, scan), tied)
    return _train_step(loss, weights, *_tokens(batch, length), params=params)


def gpt_scan(
    layers: int = 8,
    width: int = 1024,
    heads: int = 16,
    vocabulary: int = 32_768,
    batch: int = 64,
    length: int = 1024,
    dtype: Any = BF16,
    params: Any = F32,
    gathers: bool = True,
    tied: bool = True,
    remat: bool = False,
    stream: P | None = None,
) -> Program:
    """The same transformer with its layers stacked and scanned."""
    return gpt(layers, width, heads, vocabulary, batch, length, dtype, params, gathers, tied, True, remat, stream)


def llama(
    layers: int = 2,
    width: int = 4096,
    heads: int = 32,
    kv_heads: int = 8,
    ffn: int = 14_336,
    vocabulary: int = 128_256,
    batch: int = 64,
    length: int = 2048,
    dtype: Any = BF16,
    params: Any = F32,
    gathers: bool = True,
    tied: bool = False,
    scan: bool = False,
    remat: bool = True,
    stream: P | None = None,
    experts: int = 0,
    room: float = 1.25,
) -> Program:
    """A Llama-3 decoder (arXiv 2407.21783; sizes of the 8B): grouped queries, rotary positions, gated feed-forward, untied head.

    Args: as of `gpt`, and
        experts: of so many gated networks each token passes two (Mixtral, arXiv 2401.04088); 0: one network for all.
        room: tokens that an expert takes of each sequence, in shares of an even split.
    """
    head, capacity = width // heads, math.ceil(2 * room * length / max(experts, 1))

    def mixture(y: jax.Array, layer: Any) -> jax.Array:
        gates = jax.nn.softmax((y @ layer["router"]).astype(jnp.float32))
        best = jax.lax.top_k(gates, 2)[0]
        chosen = gates >= best[..., 1:]
        place = jnp.where(chosen, jnp.cumsum(chosen, axis=1) - 1, capacity)  # beyond the capacity: none
        dispatch = jax.nn.one_hot(place, capacity, dtype=dtype)
        inputs = jnp.einsum("bsec,bsd->becd", dispatch, y)
        gated = jax.nn.silu(jnp.einsum("becd,edf->becf", inputs, layer["gate"])) * jnp.einsum("becd,edf->becf", inputs, layer["up"])
        outputs = jnp.einsum("becf,efd->becd", gated, layer["down"])
        shares = (gates / best.sum(-1, keepdims=True)).astype(dtype)
        return jnp.einsum("bsec,becd->bsd", dispatch * shares[..., None], outputs)

    def rotary(x: jax.Array) -> jax.Array:
        angles = jnp.arange(length)[:, None] / 500_000 ** (jnp.arange(0, head, 2) / head)
        cos, sin = (f(angles)[:, None, :].astype(dtype) for f in (jnp.cos, jnp.sin))
        first, second = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)

    def block(x: jax.Array, layer: Any) -> jax.Array:
        y = _norm(x, layer["norm1"])
        query = rotary(jnp.einsum("bsd,dhk->bshk", y, layer["query"]))
        key = rotary(jnp.einsum("bsd,dhk->bshk", y, layer["key"]))
        value = jnp.einsum("bsd,dhk->bshk", y, layer["value"])
        grouped = query.reshape(*query.shape[:2], kv_heads, heads // kv_heads, head)
        scores = jnp.einsum("bqhgk,bshk->bhgqs", grouped, key).astype(jnp.float32) / head**0.5
        causal = jnp.tril(jnp.ones((length, length), bool))
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1).astype(dtype)
        mixed = jnp.einsum("bhgqs,bshk->bqhgk", weights, value).reshape(query.shape)
        x = _lying(x + jnp.einsum("bshk,hkd->bsd", mixed, layer["out"]), stream)
        y = _norm(x, layer["norm2"])
        if experts:
            return _lying(x + mixture(y, layer), stream)
        return _lying(x + (jax.nn.silu(y @ layer["gate"]) * (y @ layer["up"])) @ layer["down"], stream)

    def loss(weights: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = _lying(_embedded(tokens, weights, dtype), stream)
        return _next_token(_through(block, x, weights["layers"], scan, remat), weights, targets, gathers)

    each = {
        "norm1": leaf(width),
        "query": leaf(width, heads, head),
        "key": leaf(width, kv_heads, head),
        "value": leaf(width, kv_heads, head),
        "out": leaf(heads, head, width),
        "norm2": leaf(width),
        "gate": leaf(width, ffn),
        "up": leaf(width, ffn),
        "down": leaf(ffn, width),
    }
    if experts:
        networks = {name: leaf(experts, *each[name].shape) for name in ("gate", "up", "down")}
        each |= networks | {"router": leaf(width, experts)}
    weights = _language(vocabulary, None, width, _layers(each, layers, scan), tied)
    return _train_step(loss, weights, *_tokens(batch, length), params=params)


def moe(
    layers: int = 2,
    width: int = 1024,
    heads: int = 16,
    experts: int = 8,
    vocabulary: int = 32_768,
    batch: int = 64,
    length: int = 1024,
    room: float = 1.25,
    dtype: Any = BF16,
    params: Any = F32,
    sorts: bool = False,
    gathers: bool = True,
    tied: bool = True,
    scan: bool = False,
    remat: bool = False,
    stream: P | None = None,
    optimizer: Any = None,
) -> Program:
    """A transformer whose dense layers are mixtures of experts: one expert a token.

    Args:
        room: tokens that an expert takes of each sequence, in shares of an even split; those beyond are dropped.
        sorts: whether tokens are sorted by expert and gathered, rather than dispatched by one-hot products (GShard, arXiv 2006.16668).
        gathers, tied, scan, remat, stream: as of `gpt`.
        optimizer: of optax; None: AdamW.
    """
    capacity = math.ceil(room * length / experts)

    def experts_of(inputs: jax.Array, layer: Any) -> jax.Array:
        hidden = jax.nn.gelu(jnp.einsum("becd,edf->becf", inputs, layer["up"]))
        return jnp.einsum("becf,efd->becd", hidden, layer["down"])

    def sorted_mixture(x: jax.Array, layer: Any) -> jax.Array:
        gates = jax.nn.softmax((x @ layer["router"]).astype(jnp.float32))
        chosen = jnp.argmax(gates, -1)
        counts = jax.nn.one_hot(chosen, experts, dtype=jnp.int32).sum(1)
        places = jnp.arange(capacity) + (jnp.cumsum(counts, axis=1) - counts)[..., None]
        token = jnp.take_along_axis(jnp.argsort(chosen, axis=1), jnp.minimum(places, length - 1).reshape(batch, -1), axis=1)
        inputs = jnp.take_along_axis(x, token[..., None], axis=1).reshape(batch, experts, capacity, width)
        weights = jnp.take_along_axis(gates.max(-1), token, axis=1).reshape(places.shape) * (jnp.arange(capacity) < counts[..., None])
        outputs = experts_of(inputs, layer) * weights[..., None].astype(dtype)
        return jnp.zeros_like(x).at[jnp.arange(batch)[:, None], token].add(outputs.reshape(batch, -1, width))

    def dispatched_mixture(x: jax.Array, layer: Any) -> jax.Array:
        gates = jax.nn.softmax((x @ layer["router"]).astype(jnp.float32))
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        place = ((jnp.cumsum(chosen, axis=1) - 1) * chosen).sum(-1).astype(jnp.int32)
        dispatch = (chosen[..., None] * jax.nn.one_hot(place, capacity)[..., None, :]).astype(dtype)
        outputs = experts_of(jnp.einsum("bsec,bsd->becd", dispatch, x), layer)
        return jnp.einsum("bsec,becd->bsd", dispatch * gates[..., None].astype(dtype), outputs)

    mixture = sorted_mixture if sorts else dispatched_mixture

    def block(x: jax.Array, layer: Any) -> jax.Array:
        x = _lying(_attention(x, layer), stream)
        return _lying(x + mixture(_norm(x, layer["norm2"]), layer), stream)

    def loss(weights: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = _lying(_embedded(tokens, weights, dtype), stream)
        return _next_token(_through(block, x, weights["layers"], scan, remat), weights, targets, gathers)

    each = _attention_weights(width, heads) | {
        "norm2": leaf(width),
        "router": leaf(width, experts),
        "up": leaf(experts, width, 4 * width),
        "down": leaf(experts, 4 * width, width),
    }
    weights = _language(vocabulary, length, width, _layers(each, layers, scan), tied)
    return _train_step(loss, weights, *_tokens(batch, length), params=params, optimizer=optimizer)
