"""Train steps that nothing was designed on: the cost model meets them only where it is measured.

A vision transformer (arXiv 2010.11929), an encoder and decoder with a shared bias and tied embeddings (T5, arXiv 1910.10683), a
recommender with embedding tables (DLRM, arXiv 1906.00091), a generative adversarial network (DCGAN, arXiv 1511.06434), and forms of Llama
and GPT.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import BF16, Program, _conv, _norm, _tokens, _train_step, gpt, gpt_scan, leaf, llama


def vit(
    layers: int = 3, width: int = 768, heads: int = 12, batch: int = 256, side: int = 224, patch: int = 16, dtype: Any = BF16
) -> Program:
    """A vision transformer with a class token."""
    n = (side // patch) ** 2

    def loss(params: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        patches = jax.lax.conv_general_dilated(images, params["patch"], (patch, patch), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        token = jnp.broadcast_to(params["class"], (batch, 1, width))
        x = jnp.concatenate([token, patches.reshape(batch, n, width)], axis=1) + params["position"]
        for p in params["layers"]:
            y = _norm(x, p["norm1"])
            x = x + _attention(y, y, p["attention"])
            x = x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"] + p["bias"]) @ p["down"]
        logits = (_norm(x[:, 0], params["norm"]) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    params = {
        "patch": leaf(patch, patch, 3, width, dtype=dtype),
        "class": leaf(1, 1, width, dtype=dtype),
        "position": leaf(1, n + 1, width, dtype=dtype),
        "layers": [_layer(width, heads, dtype) | {"bias": leaf(4 * width, dtype=dtype)} for _ in range(layers)],
        "norm": leaf(width, dtype=dtype),
        "head": leaf(width, 1000, dtype=dtype),
    }
    return _train_step(loss, params, leaf(batch, side, side, 3, dtype=dtype), leaf(batch, dtype=jnp.int32))


def encoder_decoder(
    layers: int = 2, width: int = 1024, heads: int = 16, vocabulary: int = 32_128, batch: int = 64, length: int = 512, dtype: Any = BF16
) -> Program:
    """An encoder with relative positions and a decoder that reads it; one table embeds both and makes the logits."""
    distance = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]

    def loss(params: Any, source: jax.Array, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        bias = jnp.moveaxis(params["relative"][jnp.clip(distance + 16, 0, 31)], -1, 0)[None]
        x = params["embed"][source]
        for p in params["encoder"]:
            y = _norm(x, p["norm1"])
            x = x + _attention(y, y, p["attention"], bias)
            x = x + jax.nn.relu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]
        memory = _norm(x, params["norm"])
        x = params["embed"][tokens]
        causal = jnp.where(distance > 0, -1e9, 0.0)[None, None]
        for p in params["decoder"]:
            y = _norm(x, p["norm1"])
            x = x + _attention(y, y, p["attention"], causal)
            x = x + _attention(_norm(x, p["norm3"]), memory, p["reading"])
            x = x + jax.nn.relu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]
        logits = (_norm(x, params["last"]) @ params["embed"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    reading = {"norm3": leaf(width, dtype=dtype), "reading": _attention_weights(width, heads, dtype)}
    params = {
        "embed": leaf(vocabulary, width, dtype=dtype),
        "relative": leaf(32, heads, dtype=dtype),
        "encoder": [_layer(width, heads, dtype) for _ in range(layers)],
        "norm": leaf(width, dtype=dtype),
        "decoder": [_layer(width, heads, dtype) | reading for _ in range(layers)],
        "last": leaf(width, dtype=dtype),
    }
    return _train_step(loss, params, leaf(batch, length, dtype=jnp.int32), *_tokens(batch, length))


def dlrm(tables: int = 6, rows: int = 200_000, width: int = 128, batch: int = 16_384, dtype: Any = jnp.float32) -> Program:
    """A recommender: dense features and looked-up rows, their products, and a small network on top."""
    first, second = jnp.triu_indices(tables + 1, 1)

    def stack(x: jax.Array, layers: Any) -> jax.Array:
        for number, p in enumerate(layers):
            x = x @ p["weight"] + p["bias"]
            x = jax.nn.relu(x) if number + 1 < len(layers) else x
        return x

    def loss(params: Any, dense: jax.Array, rows: jax.Array, clicked: jax.Array) -> jax.Array:
        features = jax.nn.relu(stack(dense, params["bottom"]))
        every = jnp.stack([features, *(table[rows[:, k]] for k, table in enumerate(params["tables"]))], axis=1)
        products = jnp.einsum("bid,bjd->bij", every, every)[:, first, second]
        logits = stack(jnp.concatenate([features, products], axis=1), params["top"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits.astype(jnp.float32), clicked).mean()

    def layers(*widths: int) -> list[Any]:
        sizes = pairwise(widths)
        return [{"weight": leaf(before, after, dtype=dtype), "bias": leaf(after, dtype=dtype)} for before, after in sizes]

    params = {
        "tables": [leaf(rows, width, dtype=dtype) for _ in range(tables)],
        "bottom": layers(16, 512, 256, width),
        "top": layers(width + tables * (tables + 1) // 2, 1024, 1024, 512, 1),
    }
    looked_up = leaf(batch, tables, dtype=jnp.int32)
    return _train_step(loss, params, leaf(batch, 16, dtype=dtype), looked_up, leaf(batch, dtype=jnp.float32))


def gan(channels: int = 64, noise: int = 128, batch: int = 512, dtype: Any = BF16) -> Program:
    """A generator of transposed convolutions and a critic of strided ones, trained in one step."""
    widths = [8 * channels, 4 * channels, 2 * channels, channels, 3]

    def made(params: Any, z: jax.Array) -> jax.Array:
        x = jax.nn.relu(z @ params["seed"]).reshape(batch, 4, 4, widths[0])
        for number, kernel in enumerate(params["generator"]):
            x = jax.lax.conv_transpose(x, kernel, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            x = jnp.tanh(x) if number + 1 == len(params["generator"]) else jax.nn.relu(x)
        return x

    def judged(params: Any, x: jax.Array) -> jax.Array:
        for kernel in params["critic"]:
            x = jax.nn.leaky_relu(_conv(x, kernel, 2), 0.2)
        return (x.reshape(batch, -1) @ params["verdict"]).astype(jnp.float32)[:, 0]

    def loss(params: Any, z: jax.Array, real: jax.Array) -> jax.Array:
        return jax.nn.softplus(-judged(params, made(params, z))).mean() + jax.nn.softplus(judged(params, real)).mean()

    params = {
        "seed": leaf(noise, 16 * widths[0], dtype=dtype),
        "generator": [leaf(4, 4, before, after, dtype=dtype) for before, after in pairwise(widths)],
        "critic": [leaf(4, 4, before, after, dtype=dtype) for before, after in pairwise(widths[::-1])],
        "verdict": leaf(16 * widths[0], 1, dtype=dtype),
    }
    return _train_step(loss, params, leaf(batch, noise, dtype=dtype), leaf(batch, 64, 64, 3, dtype=dtype))


def _attention(queries: jax.Array, read: jax.Array, p: Any, bias: jax.Array | float = 0.0) -> jax.Array:
    query = jnp.einsum("bsd,dhk->bshk", queries, p["query"])
    key, value = (jnp.einsum("bsd,dhk->bshk", read, p[name]) for name in ("key", "value"))
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key).astype(jnp.float32) / query.shape[-1] ** 0.5 + bias
    weights = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
    return jnp.einsum("bqhk,hkd->bqd", jnp.einsum("bhqs,bshk->bqhk", weights, value), p["out"])


def _attention_weights(width: int, heads: int, dtype: Any) -> dict[str, Any]:
    apart = {name: leaf(width, heads, width // heads, dtype=dtype) for name in ("query", "key", "value")}
    return apart | {"out": leaf(heads, width // heads, width, dtype=dtype)}


def _layer(width: int, heads: int, dtype: Any) -> dict[str, Any]:
    return {
        "norm1": leaf(width, dtype=dtype),
        "attention": _attention_weights(width, heads, dtype),
        "norm2": leaf(width, dtype=dtype),
        "up": leaf(width, 4 * width, dtype=dtype),
        "down": leaf(4 * width, width, dtype=dtype),
    }


UNSEEN: dict[str, Callable[[], Program]] = {
    "vit": vit,
    "vit, float32": partial(vit, dtype=jnp.float32),
    "encoder-decoder": encoder_decoder,
    "encoder-decoder, float32": partial(encoder_decoder, dtype=jnp.float32),
    "dlrm, float32": dlrm,
    "gan": gan,
    "llama": partial(llama, 2, 2048, 16, 4, 7168, 32_768, batch=32),
    "gpt, float32": partial(gpt, 2, batch=32, dtype=jnp.float32),
    "gpt scanned, float32": partial(gpt_scan, batch=32, dtype=jnp.float32),
}
