"""Attention as it is written in public libraries and by hand: functions of queries, keys and values [batch, length, heads, width]."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.linen
import flax.nnx
import jax
import jax.numpy as jnp

BIG = -1e9


def causal_mask(t: int, s: int | None = None) -> jax.Array:
    return jnp.tril(jnp.ones((t, s or t), bool))


def plain(q, k, v):
    p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5, axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def causal(q, k, v):
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    p = jax.nn.softmax(jnp.where(causal_mask(q.shape[1]), scores, BIG), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", p, v)


def minimal(q, k, v):
    """Heads first, the scale on the queries, the mask added, the softmax by hand (as in minGPT's ports)."""
    q, k, v = (x.transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = (q * q.shape[-1] ** -0.5) @ k.swapaxes(-1, -2)
    at = jnp.arange(q.shape[2])
    scores = scores + jnp.where(at[:, None] >= at[None, :], 0.0, -1e10)
    e = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    return ((e / e.sum(-1, keepdims=True)) @ v).transpose(0, 2, 1, 3)


def unnormalised(q, k, v):
    """Normalised after the product with values (as in MaxText)."""
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1]), k).astype(jnp.float32)
    rows, columns = (jax.lax.broadcasted_iota(jnp.int32, (q.shape[1], k.shape[1]), axis) for axis in (0, 1))
    scores = scores + jnp.where(columns <= rows, 0.0, -0.7 * float(jnp.finfo(jnp.float32).max))[None, None, None]
    largest = jnp.max(scores, axis=-1, keepdims=True)
    e = jnp.exp(scores - largest)
    total = jnp.moveaxis(jnp.sum(e, axis=-1, keepdims=True), -2, 1).reshape(*q.shape[:3], 1)
    made = jnp.einsum("bkgts,bskd->btkgd", e.astype(v.dtype), v).reshape(q.shape)
    return (made / total).astype(q.dtype)


def grouped(q, k, v):
    """Keys and values repeated for the queries of a group (as in Hugging Face's Flax models)."""
    repeats = q.shape[2] // k.shape[2]
    return causal(q, jnp.repeat(k, repeats, axis=2), jnp.repeat(v, repeats, axis=2))


def softcap(q, k, v):
    """Capped logits and a local window (as in Gemma 2)."""
    scores = jnp.einsum("BTNH,BSNH->BTNS", q * q.shape[-1] ** -0.5, k)
    scores = jnp.tanh(scores / 20.0) * 20.0
    mask = causal_mask(q.shape[1])[None]
    at = jnp.arange(q.shape[1])
    mask = mask & (at[None, :, None] < at[None, None, :] + 7)
    p = jax.nn.softmax(jnp.where(mask[:, :, None], scores, -2.3819763e38), axis=-1).astype(k.dtype)
    return jnp.einsum("BTNS,BSNH->BTNH", p, v)


def flash_like(q, k, v):
    """Its own backward pass, with the row sums from outputs and cotangents (as in FlashAttention, algorithm 4)."""

    @jax.custom_vjp
    def attend(q, k, v):
        return forward(q, k, v)[0]

    def forward(q, k, v):
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        s = jnp.where(causal_mask(q.shape[1]), s, -jnp.inf)
        lse = jax.nn.logsumexp(s, axis=-1)
        return jnp.einsum("bhqk,bkhd->bqhd", jnp.exp(s - lse[..., None]), v), lse

    def fwd(q, k, v):
        o, lse = forward(q, k, v)
        return o, (q, k, v, o, lse)

    def bwd(kept, do):
        q, k, v, o, lse = kept
        s = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        p = jnp.exp(jnp.where(causal_mask(q.shape[1]), s, -jnp.inf) - lse[..., None])
        delta = jnp.einsum("bqhd,bqhd->bhq", do, o)
        ds = p * (jnp.einsum("bqhd,bkhd->bhqk", do, v) - delta[..., None]) * q.shape[-1] ** -0.5
        return jnp.einsum("bhqk,bkhd->bqhd", ds, k), jnp.einsum("bhqk,bqhd->bkhd", ds, q), jnp.einsum("bhqk,bqhd->bkhd", p, do)

    attend.defvjp(fwd, bwd)
    return attend(q, k, v)


def segments(q, k, v):
    """Packed examples: tokens see those before them in their own segment."""
    ids = jax.lax.stop_gradient(jnp.cumsum(jnp.abs(q[:, :, 0, 0]) > 1.0, axis=1).astype(jnp.int32))
    mask = flax.linen.combine_masks(flax.linen.make_attention_mask(ids, ids, jnp.equal), flax.linen.make_causal_mask(ids))
    return flax.linen.dot_product_attention(q, k, v, mask=mask)


def padded(q, k, v):
    """Keys that are no padding, here by their first number."""
    there = jax.lax.stop_gradient(v[:, :, 0, 0] > -1.0)
    return flax.nnx.dot_product_attention(q, k, v, mask=there[:, None, None, :])


def windowed(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=(5, 0), implementation="xla")


def both_sides(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, local_window_size=(3, 4), scale=0.3, implementation="xla")


def jax_causal(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="xla")


def merged(q, k, v):
    """Batch and heads in one dimension (as in Haiku's ports of T5)."""
    b, t, h, d = q.shape
    q, k, v = (x.transpose(0, 2, 1, 3).reshape(b * h, x.shape[1], d) for x in (q, k, v))
    p = jax.nn.softmax(jnp.where(causal_mask(t)[None], jnp.matmul(q, k.transpose(0, 2, 1)) * d**-0.5, -jnp.inf))
    return (p @ v).reshape(b, h, t, d).transpose(0, 2, 1, 3)


def mixed_precision(q, k, v):
    """Products of bfloat16, scores and softmax in float32."""
    q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    p = jax.nn.softmax(jnp.where(causal_mask(q.shape[1]), scores, jnp.finfo(jnp.float32).min), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", p.astype(jnp.bfloat16), v)


def by_keys(q, k, v):
    """A mask by the keys themselves."""
    return flax.linen.dot_product_attention(q, k, v, mask=(k[:, :, :, 0] > -1.0).transpose(0, 2, 1)[:, :, None, :])


def chunked(q, k, v):
    """Tokens see those of their own chunk, as in Llama 4."""
    at = jnp.arange(q.shape[1]) // 5
    return flax.linen.dot_product_attention(q, k, v, mask=((at[:, None] == at[None, :]) & causal_mask(q.shape[1]))[None, None])


FUSED: dict[str, tuple[Callable, dict[str, Any]]] = {
    "plain": (plain, {}),
    "causal": (causal, {"lowest": 0}),
    "minimal": (minimal, {"lowest": 0}),
    "unnormalised": (unnormalised, {"lowest": 0, "scale": 1.0}),
    "grouped": (grouped, {"lowest": 0}),
    "softcap": (softcap, {"lowest": 0, "highest": 6, "softcap": 20.0}),
    "flash_like": (flash_like, {"lowest": 0}),
    "segments": (segments, {"lowest": 0, "segments": True}),
    "padded": (padded, {"valid": True}),
    "by_keys": (by_keys, {"valid": True}),
    "chunked": (chunked, {"lowest": 0, "segments": True}),
    "windowed": (windowed, {"lowest": 0, "highest": 5}),
    "both_sides": (both_sides, {"lowest": -4, "highest": 3, "scale": 0.3}),
    "jax_causal": (jax_causal, {"lowest": 0}),
    "merged": (merged, {"lowest": 0}),
    "mixed_precision": (mixed_precision, {"lowest": 0}),
    "flax_linen": (
        lambda q, k, v: flax.linen.dot_product_attention(q, k, v, mask=flax.linen.make_causal_mask(q[:, :, 0, 0])),
        {"lowest": 0},
    ),
    "flax_nnx": (lambda q, k, v: flax.nnx.dot_product_attention(q, k, v, is_causal=True), {"lowest": 0}),
}
"""Attention that is replaced, with what is read of its mask and its scores."""


def with_bias(q, k, v):
    """A learned bias of positions, as in T5."""
    table = jnp.sin(jnp.arange(2 * q.shape[1] * q.shape[2], dtype=q.dtype)).reshape(-1, q.shape[2])
    at = jnp.arange(q.shape[1])
    bias = table[at[None, :] - at[:, None] + q.shape[1]]
    return flax.linen.dot_product_attention(q, k, v, bias=bias.transpose(2, 0, 1)[None])


def alibi(q, k, v):
    at, slopes = jnp.arange(q.shape[1]), 2.0 ** -jnp.arange(1, q.shape[2] + 1)
    bias = slopes[:, None, None] * (at[None, None, :] - at[None, :, None])
    return flax.linen.dot_product_attention(q, k, v, bias=bias[None], mask=causal_mask(q.shape[1])[None, None])


def dropout(q, k, v):
    return flax.linen.dot_product_attention(q, k, v, dropout_rng=jax.random.key(0), dropout_rate=0.1, deterministic=False)


def sigmoid(q, k, v):
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.sigmoid(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)


def prefix(q, k, v):
    at = jnp.arange(q.shape[1])
    return flax.linen.dot_product_attention(q, k, v, mask=((at[None, :] < 6) | causal_mask(q.shape[1]))[None, None])


def data_mask(q, k, v):
    mask = jax.lax.stop_gradient(v[:, :, None, 0, 0] * v[:, None, :, 1, 0]) > 0.1
    return flax.linen.dot_product_attention(q, k, v, mask=(mask | jnp.eye(q.shape[1], dtype=bool))[:, None])


def clipped(q, k, v):
    scores = jnp.clip(jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5, -50.0, 50.0)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), v)


def of_some_heads(q, k, v):
    """A local window in every other head."""
    scores, at = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5, jnp.arange(q.shape[1])
    near = (at[:, None] - at[None, :] < 5) | (jnp.arange(q.shape[2]) % 2 == 1)[:, None, None]
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(jnp.where(near & causal_mask(q.shape[1]), scores, BIG), axis=-1), v)


def rows_without_keys(q, k, v):
    """Padding of queries and keys: rows of padding see nothing."""
    there = jax.lax.stop_gradient(v[:, :, 0, 0] > -1.0)
    return flax.linen.dot_product_attention(q, k, v, mask=flax.linen.make_attention_mask(there, there))


PLAIN: dict[str, tuple[Callable, str]] = {
    "with_bias": (with_bias, "bias"),
    "alibi": (alibi, "bias"),
    "dropout": (dropout, "random"),
    "prefix": (prefix, "mask"),
    "data_mask": (data_mask, "mask"),
    "clipped": (clipped, "softmax"),
    "of_some_heads": (of_some_heads, "mask"),
    "rows_without_keys": (rows_without_keys, "mask"),
}
"""What looks like attention and stays, with a word of the reason."""


def gradients(function: Callable, *, remat: bool = False) -> Callable:
    """The result of a function and its gradients."""

    def call(q, k, v, ct):
        f = jax.checkpoint(function) if remat else function
        o, back = jax.vjp(f, q, k, v)
        return o, back(ct.astype(o.dtype))

    return call


def arrays(length: int = 16, heads: int = 4, kv_heads: int = 4, width: int = 8, batch: int = 2, dtype: Any = jnp.float32) -> tuple:
    """Types of queries, keys, values and a cotangent."""
    make = functools.partial(jax.ShapeDtypeStruct, dtype=dtype)
    q, k = make((batch, length, heads, width)), make((batch, length, kv_heads, width))
    return q, k, k, q
