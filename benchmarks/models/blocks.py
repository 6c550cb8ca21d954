"""Building blocks of transformers: weights, layers one after the other or scanned, attention, losses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from benchmarks.models.step import cast, leaf


def _tokens(batch: int, length: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    return leaf(batch, length, dtype=jnp.int32), leaf(batch, length, dtype=jnp.int32)


def _layers(each: Mapping[str, Any], layers: int, scan: bool) -> Any:
    """The weights of all layers: stacked to be scanned, or one after the other."""
    if scan:
        return jax.tree.map(lambda weight: leaf(layers, *weight.shape), dict(each))
    return [dict(each) for _ in range(layers)]


def _through(block: Callable, x: jax.Array, layers: Any, scan: bool, remat: bool) -> jax.Array:
    """The stream after all layers, each of which casts its own weights."""

    def layer(x: jax.Array, weights: Any) -> jax.Array:
        return block(x, cast(weights, x.dtype))

    layer = jax.checkpoint(layer) if remat else layer
    if scan:
        return jax.lax.scan(lambda x, weights: (layer(x, weights), None), x, layers)[0]
    for weights in layers:
        x = layer(x, weights)
    return x


def _language(vocabulary: int, length: int | None, width: int, layers: Any, tied: bool) -> dict[str, Any]:
    """A decoder's weights, without positions where no length is given."""
    positions = {} if length is None else {"position": leaf(length, width)}
    head = {} if tied else {"head": leaf(width, vocabulary)}
    return {"embed": leaf(vocabulary, width), **positions, "layers": layers, "norm": leaf(width), **head}


def _attention_weights(width: int, heads: int) -> dict[str, Any]:
    head = width // heads
    return {"norm1": leaf(width), "qkv": leaf(width, 3, heads, head), "out": leaf(heads, head, width)}


def _dense_weights(width: int) -> dict[str, Any]:
    return {"norm2": leaf(width), "up": leaf(width, 4 * width), "down": leaf(4 * width, width)}


def _read_weights(width: int, heads: int) -> dict[str, Any]:
    apart = {name: leaf(width, heads, width // heads) for name in ("query", "key", "value")}
    return apart | {"out": leaf(heads, width // heads, width)}


def _reader(width: int, heads: int) -> dict[str, Any]:
    """A layer's weights, with queries, keys and values apart."""
    return {"norm1": leaf(width), "attention": _read_weights(width, heads)} | _dense_weights(width)


def _embedded(tokens: jax.Array, weights: Any, dtype: Any) -> jax.Array:
    x = cast(weights["embed"], dtype)[tokens]
    return x + cast(weights["position"], dtype) if "position" in weights else x


def _next_token(x: jax.Array, weights: Any, targets: jax.Array, gathers: bool) -> jax.Array:
    x = _norm(x, cast(weights["norm"], x.dtype))
    head = cast(weights["head"], x.dtype) if "head" in weights else cast(weights["embed"], x.dtype).T
    logits = (x @ head).astype(jnp.float32)
    if gathers:
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
    return optax.softmax_cross_entropy(logits, jax.nn.one_hot(targets, logits.shape[-1])).mean()


def _lying(x: jax.Array, stream: P | None) -> jax.Array:
    return x if stream is None else jax.lax.with_sharding_constraint(x, stream)


def _block(x: jax.Array, layer: Any, stream: P | None) -> jax.Array:
    x = _lying(_attention(x, layer), stream)
    return _lying(x + jax.nn.gelu(_norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"], stream)


def _attention(x: jax.Array, layer: Any) -> jax.Array:
    query, key, value = jnp.moveaxis(jnp.einsum("bsd,dchk->bschk", _norm(x, layer["norm1"]), layer["qkv"]), 2, 0)
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key) / query.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    return x + jnp.einsum("bhqs,bshk,hkd->bqd", weights, value, layer["out"])


def _read(queries: jax.Array, read: jax.Array, p: Any, bias: jax.Array | float = 0.0) -> jax.Array:
    """Attention of one sequence to another, or to itself."""
    query = jnp.einsum("bsd,dhk->bshk", queries, p["query"])
    key, value = (jnp.einsum("bsd,dhk->bshk", read, p[name]) for name in ("key", "value"))
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5 + bias
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", weights, value), p["out"])


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)
