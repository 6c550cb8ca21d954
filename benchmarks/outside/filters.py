"""Convolutions: depthwise, over frames, strided and transposed."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models.blocks import _norm
from benchmarks.models.step import BF16, F32, Program, _train_step, leaf
from benchmarks.outside.heads import _cross_entropy

IMAGES = ("NHWC", "HWIO", "NHWC")
SEQUENCES = ("NWC", "WIO", "NWC")


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1, groups: int = 1, dims: Any = IMAGES) -> jax.Array:
    strides, kernel = (stride,) * (len(dims[0]) - 2), kernel.astype(x.dtype)
    return jax.lax.conv_general_dilated(x, kernel, strides, "SAME", dimension_numbers=dims, feature_group_count=groups)


def depthwise_images(layers: int = 4, width: int = 192, window: int = 7, batch: int = 256, side: int = 56) -> Program:
    """Depthwise convolutions between products of channels (ConvNeXt, arXiv 2201.03545)."""

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        for p in params["layers"]:
            y = _norm(_conv(x, p["filter"], groups=width), p["norm"].astype(BF16))
            x = x + jax.nn.gelu(y @ p["up"].astype(BF16)) @ p["down"].astype(BF16)
        return _cross_entropy(x.mean((1, 2)) @ params["head"].astype(BF16), labels)

    layer = {"filter": leaf(window, window, 1, width), "norm": leaf(width), "up": leaf(width, 4 * width), "down": leaf(4 * width, width)}
    params = {"layers": [layer] * layers, "head": leaf(width, 1000)}
    return _train_step(loss, params, leaf(batch, side, side, width), leaf(batch, dtype=jnp.int32), params=F32)


def depthwise_sequences(layers: int = 4, width: int = 1024, window: int = 4, batch: int = 64, length: int = 2048) -> Program:
    """Gated depthwise convolutions over sequences."""

    def loss(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        for p in params:
            y = _norm(x, p["norm"].astype(BF16)) @ p["into"].astype(BF16)
            value, gate = jnp.split(y, 2, -1)
            value = _conv(value, p["filter"], groups=width, dims=SEQUENCES)
            x = x + (value * jax.nn.silu(gate)) @ p["out"].astype(BF16)
        return ((x - targets).astype(F32) ** 2).mean()

    layer = {"norm": leaf(width), "into": leaf(width, 2 * width), "filter": leaf(window, 1, width), "out": leaf(width, width)}
    return _train_step(loss, [layer] * layers, *[leaf(batch, length, width)] * 2, params=F32)


def video(channels: int = 64, batch: int = 32, frames: int = 16, side: int = 112) -> Program:
    """Convolutions over frames and pixels, strided from one width to the next."""
    widths, dims = [channels, 2 * channels, 4 * channels, 8 * channels], ("NDHWC", "DHWIO", "NDHWC")

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        x = _conv(x, params["first"], dims=dims)
        for p in params["layers"]:
            x = jax.nn.relu(_conv(jax.nn.relu(_conv(x, p["same"], dims=dims)) + x, p["wider"], 2, dims=dims))
        return _cross_entropy(x.mean((1, 2, 3)) @ params["head"].astype(BF16), labels)

    layers = [{"same": leaf(3, 3, 3, a, a), "wider": leaf(3, 3, 3, a, b)} for a, b in pairwise(widths)]
    params = {"first": leaf(3, 3, 3, 3, channels), "layers": layers, "head": leaf(widths[-1], 400)}
    return _train_step(loss, params, leaf(batch, frames, side, side, 3), leaf(batch, dtype=jnp.int32), params=F32)


def autoencoder(channels: int = 64, batch: int = 256, side: int = 128, groups: int = 8) -> Program:
    """Strided convolutions and transposed ones with group norms by reshape, and noise between them (VAE, arXiv 1312.6114)."""
    widths = [channels, 2 * channels, 4 * channels]

    def normed(x: jax.Array, scale: jax.Array) -> jax.Array:
        y = x.reshape(*x.shape[:-1], groups, -1).astype(F32)
        y = (y - y.mean((1, 2, 4), keepdims=True)) * jax.lax.rsqrt(y.var((1, 2, 4), keepdims=True) + 1e-5)
        return (y.reshape(x.shape) * scale).astype(x.dtype)

    def loss(params: Any, images: jax.Array, noise: jax.Array) -> jax.Array:
        x = _conv(images, params["first"])
        for p in params["down"]:
            x = jax.nn.silu(normed(_conv(x, p["filter"], 2), p["scale"]))
        mean, spread = jnp.split(_conv(x, params["code"]), 2, -1)
        x = mean + jnp.exp(spread) * noise
        for p in params["up"]:
            x = jax.lax.conv_transpose(x, p["filter"].astype(BF16), (2, 2), "SAME", dimension_numbers=IMAGES)
            x = jax.nn.silu(normed(x, p["scale"]))
        again = _conv(x, params["last"])
        return ((again - images).astype(F32) ** 2).mean() + (jnp.exp(2 * spread) + mean**2 - spread).astype(F32).mean()

    def resized(pairs: Any) -> list[Any]:
        return [{"filter": leaf(4, 4, a, b), "scale": leaf(b)} for a, b in pairs]

    widest = widths[-1]
    params = {
        "first": leaf(3, 3, 3, channels),
        "down": resized(pairwise(widths)),
        "code": leaf(1, 1, widest, 2 * widest),
        "up": resized(pairwise(widths[::-1])),
        "last": leaf(3, 3, channels, 3),
    }
    code = leaf(batch, side // 4, side // 4, widest)
    return _train_step(loss, params, leaf(batch, side, side, 3), code, params=F32)

