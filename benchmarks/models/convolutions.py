"""Convolutional networks: ResNet and U-Net."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models.step import BF16, F32, Program, _train_step, cast, leaf


def resnet(
    blocks: tuple[int, ...] = (1, 1, 1, 1),
    channels: int = 64,
    classes: int = 1024,
    batch: int = 1024,
    side: int = 224,
    groups: int = 0,
    dtype: Any = BF16,
    params: Any = F32,
    remat: bool = False,
) -> Program:
    """A residual network of bottlenecks (arXiv 1512.03385); norms are over the batch, or over so many groups of channels."""

    def block(x: jax.Array, p: Any, stride: int) -> jax.Array:
        y = jax.nn.relu(_channel_norm(_conv(x, p["reduce"]), p["norm1"], groups))
        y = jax.nn.relu(_channel_norm(_conv(y, p["spatial"], stride), p["norm2"], groups))
        y = _channel_norm(_conv(y, p["expand"]), p["norm3"], groups)
        return jax.nn.relu(y + (_conv(x, p["shortcut"], stride) if "shortcut" in p else x))

    block = jax.checkpoint(block, static_argnums=2) if remat else block

    def loss(weights: Any, images: jax.Array, labels: jax.Array) -> jax.Array:
        x = jax.nn.relu(_channel_norm(_conv(images, weights["stem"], 2), weights["norm"], groups))
        x = jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for number, stage in enumerate(weights["stages"]):
            for index, p in enumerate(stage):
                x = block(x, p, 2 if number and not index else 1)
        logits = (x.mean((1, 2)) @ cast(weights["head"], dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    def bottleneck(before: int, inside: int) -> dict[str, Any]:
        p = {
            "reduce": leaf(1, 1, before, inside),
            "spatial": leaf(3, 3, inside, inside),
            "expand": leaf(1, 1, inside, 4 * inside),
            "norm1": leaf(inside),
            "norm2": leaf(inside),
            "norm3": leaf(4 * inside),
        }
        return p if before == 4 * inside else p | {"shortcut": leaf(1, 1, before, 4 * inside)}

    stages, before = [], channels
    for number, depth in enumerate(blocks):
        inside = channels * 2**number
        stages.append([bottleneck(before if not index else 4 * inside, inside) for index in range(depth)])
        before = 4 * inside
    weights = {
        "stem": leaf(7, 7, 3, channels),
        "norm": leaf(channels),
        "stages": stages,
        "head": leaf(before, classes),
    }
    return _train_step(loss, weights, leaf(batch, side, side, 3, dtype=dtype), leaf(batch, dtype=jnp.int32), params=params)


def unet(
    depth: int = 2,
    channels: int = 64,
    batch: int = 256,
    side: int = 128,
    groups: int = 8,
    resizes: bool = False,
    dtype: Any = BF16,
    params: Any = F32,
    remat: bool = False,
) -> Program:
    """A U-Net (arXiv 1505.04597): halved with strides, doubled with transposed convolutions or by resizing, skips concatenated."""

    def double(x: jax.Array, p: Any) -> jax.Array:
        x = jax.nn.silu(_channel_norm(_conv(x, p["first"]), p["norm1"], groups))
        return jax.nn.silu(_channel_norm(_conv(x, p["second"]), p["norm2"], groups))

    double = jax.checkpoint(double) if remat else double

    def upwards(x: jax.Array, kernel: jax.Array) -> jax.Array:
        if resizes:
            n, height, width, c = x.shape
            return _conv(jax.image.resize(x, (n, 2 * height, 2 * width, c), "nearest"), kernel)
        return jax.lax.conv_transpose(x, cast(kernel, x.dtype), (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    def loss(weights: Any, images: jax.Array, targets: jax.Array) -> jax.Array:
        x, skips = images, []
        for level in weights["down"]:
            x = double(x, level)
            skips.append(x)
            x = _conv(x, level["halve"], 2)
        x = double(x, weights["middle"])
        for level, skip in zip(weights["up"], reversed(skips), strict=True):
            x = double(jnp.concatenate([upwards(x, level["twice"]), skip], axis=-1), level)
        return ((_conv(x, weights["head"]) - targets).astype(jnp.float32) ** 2).mean()

    def pair(before: int, after: int) -> dict[str, Any]:
        return {
            "first": leaf(3, 3, before, after),
            "second": leaf(3, 3, after, after),
            "norm1": leaf(after),
            "norm2": leaf(after),
        }

    widths = [channels * 2**level for level in range(depth + 1)]
    weights = {
        "down": [
            pair(3 if not level else widths[level - 1], widths[level]) | {"halve": leaf(3, 3, widths[level], widths[level])}
            for level in range(depth)
        ],
        "middle": pair(widths[depth - 1], widths[depth]),
        "up": [
            pair(2 * widths[level], widths[level]) | {"twice": leaf(3, 3, widths[level + 1], widths[level])}
            for level in reversed(range(depth))
        ],
        "head": leaf(1, 1, channels, 3),
    }
    images = leaf(batch, side, side, 3, dtype=dtype)
    return _train_step(loss, weights, images, images, params=params)


def _conv(x: jax.Array, kernel: jax.Array, stride: int = 1) -> jax.Array:
    return jax.lax.conv_general_dilated(x, cast(kernel, x.dtype), (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def _channel_norm(x: jax.Array, scale: jax.Array, groups: int) -> jax.Array:
    """Normalised over the batch and all pixels, or for each image over its pixels and each group of channels."""
    n, height, width, channels = x.shape
    grouped = x.reshape(n, height, width, groups or channels, -1).astype(jnp.float32)
    dims = (1, 2, 4) if groups else (0, 1, 2)
    centred = grouped - grouped.mean(dims, keepdims=True)
    centred = centred * jax.lax.rsqrt((centred**2).mean(dims, keepdims=True) + 1e-5)
    return centred.reshape(x.shape).astype(x.dtype) * (1 + cast(scale, x.dtype))
