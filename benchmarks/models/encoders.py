"""A vision transformer, an encoder of text, and an encoder with a decoder."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models.blocks import _embedded, _language, _layers, _next_token, _norm, _read, _read_weights, _reader, _through, _tokens
from benchmarks.models.step import BF16, F32, Program, _train_step, cast, leaf


def vit(
    layers: int = 3,
    width: int = 768,
    heads: int = 12,
    batch: int = 256,
    side: int = 224,
    patch: int = 16,
    dtype: Any = BF16,
    params: Any = F32,
    scan: bool = False,
    remat: bool = False,
) -> Program:
    """A vision transformer with a class token (arXiv 2010.11929)."""
    n = (side // patch) ** 2

    def loss(weights: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        ends = cast({name: weights[name] for name in ("patch", "class", "position", "norm", "head")}, dtype)
        patches = jax.lax.conv_general_dilated(images, ends["patch"], (patch, patch), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        token = jnp.broadcast_to(ends["class"], (batch, 1, width))
        x = jnp.concatenate([token, patches.reshape(batch, n, width)], axis=1) + ends["position"]
        x = _through(_encoding, x, weights["layers"], scan, remat)
        logits = (_norm(x[:, 0], ends["norm"]) @ ends["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    weights = {
        "patch": leaf(patch, patch, 3, width),
        "class": leaf(1, 1, width),
        "position": leaf(1, n + 1, width),
        "layers": _layers(_reader(width, heads) | {"bias": leaf(4 * width)}, layers, scan),
        "norm": leaf(width),
        "head": leaf(width, 1000),
    }
    return _train_step(loss, weights, leaf(batch, side, side, 3, dtype=dtype), leaf(batch, dtype=jnp.int32), params=params)


def bert(
    layers: int = 2,
    width: int = 1024,
    heads: int = 16,
    vocabulary: int = 30_522,
    batch: int = 256,
    length: int = 512,
    dtype: Any = BF16,
    params: Any = F32,
    scan: bool = False,
    remat: bool = False,
) -> Program:
    """A bidirectional encoder that guesses masked tokens (BERT, arXiv 1810.04805), here all of them; its embedding makes the logits."""

    def loss(weights: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = _through(_encoding, _embedded(tokens, weights, dtype), weights["layers"], scan, remat)
        return _next_token(x, weights, targets, gathers=True)

    layer = _reader(width, heads) | {"bias": leaf(4 * width)}
    weights = _language(vocabulary, length, width, _layers(layer, layers, scan), tied=True)
    return _train_step(loss, weights, *_tokens(batch, length), params=params)


def _encoding(x: jax.Array, p: Any) -> jax.Array:
    """A layer of an encoder: attention of all to all, and a dense network."""
    y = _norm(x, p["norm1"])
    x = x + _read(y, y, p["attention"])
    return x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"] + p["bias"]) @ p["down"]


def encoder_decoder(
    layers: int = 2,
    width: int = 1024,
    heads: int = 16,
    vocabulary: int = 32_128,
    batch: int = 64,
    length: int = 512,
    dtype: Any = BF16,
    params: Any = F32,
    gathers: bool = True,
    tied: bool = True,
    scan: bool = False,
    remat: bool = False,
) -> Program:
    """An encoder with relative positions and a decoder that reads it (T5, arXiv 1910.10683); one table embeds both.

    Args: as of `gpt`.
    """
    distance = jnp.arange(length)[None, :] - jnp.arange(length)[:, None]

    def encoder(bias: jax.Array, x: jax.Array, p: Any) -> jax.Array:
        y = _norm(x, p["norm1"])
        x = x + _read(y, y, p["attention"], bias)
        return x + jax.nn.relu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]

    def decoder(causal: jax.Array, memory: jax.Array, x: jax.Array, p: Any) -> jax.Array:
        y = _norm(x, p["norm1"])
        x = x + _read(y, y, p["attention"], causal)
        x = x + _read(_norm(x, p["norm3"]), memory, p["reading"])
        return x + jax.nn.relu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]

    def loss(weights: Any, source: jax.Array, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        bias = jnp.moveaxis(cast(weights["relative"], dtype)[jnp.clip(distance + 16, 0, 31)], -1, 0)[None]
        x = _through(partial(encoder, bias), _embedded(source, weights, dtype), weights["encoder"], scan, remat)
        memory = _norm(x, cast(weights["norm"], dtype))
        x = _embedded(tokens, weights, dtype)
        causal = jnp.where(distance > 0, -1e9, 0.0)[None, None]
        x = _through(partial(decoder, causal, memory), x, weights["decoder"], scan, remat)
        return _next_token(x, weights | {"norm": weights["last"]}, targets, gathers)

    reading = {"norm3": leaf(width), "reading": _read_weights(width, heads)}
    weights = {
        "embed": leaf(vocabulary, width),
        "relative": leaf(32, heads),
        "encoder": _layers(_reader(width, heads), layers, scan),
        "norm": leaf(width),
        "decoder": _layers(_reader(width, heads) | reading, layers, scan),
        "last": leaf(width),
    }
    weights |= {} if tied else {"head": leaf(width, vocabulary)}
    return _train_step(loss, weights, leaf(batch, length, dtype=jnp.int32), *_tokens(batch, length), params=params)
