"""Programs whose arrays are narrow, looked up or sliced: where what lies in memory is decided by more than their sizes."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models import BF16, Program, leaf
from benchmarks.models.blocks import _norm, _read, _reader
from benchmarks.models.step import _train_step, cast


def windows(layers: int = 2, width: int = 96, heads: int = 3, batch: int = 256, side: int = 56, dtype: Any = BF16) -> Program:
    """A vision transformer whose attention is to windows of 7 x 7 pixels, every other layer's shifted."""
    window, classes = 7, 1000
    n = side // window

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(batch, n, window, n, window, -1).transpose(0, 1, 3, 2, 4, 5).reshape(batch * n * n, window * window, -1)

    def joined(x: jax.Array) -> jax.Array:
        return x.reshape(batch, n, n, window, window, -1).transpose(0, 1, 3, 2, 4, 5).reshape(batch, side, side, -1)

    def loss(params: Any, patches: jax.Array, labels: jax.Array) -> jax.Array:
        x = patches @ params["embed"]
        for number, p in enumerate(params["layers"]):
            shift = window // 2 if number % 2 else 0
            y = split(jnp.roll(_norm(x, p["norm1"]), (-shift, -shift), (1, 2)))
            x = x + jnp.roll(joined(_read(y, y, p["attention"], p["bias"][None])), (shift, shift), (1, 2))
            x = x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"]
        logits = (x.mean((1, 2)) @ params["head"]).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    bias = {"bias": leaf(heads, window**2, window**2, dtype=dtype)}
    params = {
        "embed": leaf(48, width, dtype=dtype),
        "layers": [_reader(width, heads) | bias for _ in range(layers)],
        "head": leaf(width, classes, dtype=dtype),
    }
    return _train_step(loss, params, leaf(batch, side, side, 48, dtype=dtype), leaf(batch, dtype=jnp.int32), params=dtype)


def graph_network(layers: int = 4, width: int = 256, nodes: int = 200_000, edges: int = 2_000_000, dtype: Any = jnp.float32) -> Program:
    """A graph network: every node sums the messages of those with an edge to it."""
    features, classes = 100, 47

    def loss(params: Any, x: jax.Array, senders: jax.Array, receivers: jax.Array, labels: jax.Array) -> jax.Array:
        x = x @ params["input"]
        for p in params["layers"]:
            messages = jax.nn.relu(x @ p["message"])[senders]
            received = jax.ops.segment_sum(messages, receivers, num_segments=nodes)
            x = jax.nn.relu(jnp.concatenate([x, received], -1) @ p["update"])
        return optax.softmax_cross_entropy_with_integer_labels(x @ params["output"], labels).mean()

    params = {
        "input": leaf(features, width, dtype=dtype),
        "layers": [{"message": leaf(width, width, dtype=dtype), "update": leaf(2 * width, width, dtype=dtype)} for _ in range(layers)],
        "output": leaf(width, classes, dtype=dtype),
    }
    ends = leaf(edges, dtype=jnp.int32)
    return _train_step(loss, params, leaf(nodes, features, dtype=dtype), ends, ends, leaf(nodes, dtype=jnp.int32))


def state_space(
    layers: int = 4,
    width: int = 512,
    states: int = 16,
    batch: int = 32,
    length: int = 1024,
    dtype: Any = BF16,
    remat: bool = False,
) -> Program:
    """A language model of selective state spaces, which an associative scan goes through."""
    inner, vocabulary = 2 * width, 8192

    def combined(left: Any, right: Any) -> Any:
        return left[0] * right[0], right[0] * left[1] + right[1]

    def mixed(p: Any, x: jax.Array) -> jax.Array:
        u, gate = jnp.split(x @ p["into"], 2, -1)
        step = jax.nn.softplus((u @ p["step"]).astype(jnp.float32))
        read, write = ((u @ p[name]).astype(jnp.float32) for name in ("read", "write"))
        decay = jnp.exp(-step[..., None] * jnp.exp(p["decay"]))
        put = (step * u.astype(jnp.float32))[..., None] * write[:, :, None, :]
        _, state = jax.lax.associative_scan(combined, (decay, put), axis=1)
        return ((state * read[:, :, None, :]).sum(-1).astype(dtype) * jax.nn.silu(gate)) @ p["out"]

    mixed = jax.checkpoint(mixed) if remat else mixed

    def loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = params["embed"][tokens]
        for p in params["layers"]:
            x = x + mixed(p, _norm(x, p["norm"]))
        logits = (x @ params["embed"].T).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    layer = {
        "norm": leaf(width, dtype=dtype),
        "into": leaf(width, 2 * inner, dtype=dtype),
        "step": leaf(inner, inner, dtype=dtype),
        "read": leaf(inner, states, dtype=dtype),
        "write": leaf(inner, states, dtype=dtype),
        "decay": leaf(inner, states, dtype=jnp.float32),
        "out": leaf(inner, width, dtype=dtype),
    }
    tokens = leaf(batch, length, dtype=jnp.int32)
    return _train_step(loss, {"embed": leaf(vocabulary, width, dtype=dtype), "layers": [layer] * layers}, tokens, tokens)


def diffusion(
    layers: int = 4,
    width: int = 1024,
    heads: int = 16,
    batch: int = 256,
    side: int = 32,
    dtype: Any = BF16,
    params: Any = jnp.float32,
    remat: bool = False,
) -> Program:
    """A transformer of images with noise, each layer of which is scaled and shifted by a class (DiT, arXiv 2212.09748)."""
    n, channels = (side // 2) ** 2, 16

    def block(x: jax.Array, condition: jax.Array, p: Any) -> jax.Array:
        p = cast(p, dtype)
        moved = (condition @ p["modulate"])[:, None]
        shift, scale, gate, other_shift, other_scale, other_gate = jnp.split(moved, 6, -1)
        y = _norm(x, p["norm1"]) * (1 + scale) + shift
        x = x + gate * _read(y, y, p["attention"])
        y = _norm(x, p["norm2"]) * (1 + other_scale) + other_shift
        return x + other_gate * (jax.nn.gelu(y @ p["up"]) @ p["down"])

    block = jax.checkpoint(block) if remat else block

    def loss(weights: Any, patches: jax.Array, noise: jax.Array, level: jax.Array, labels: jax.Array) -> jax.Array:
        mixed = patches * (1 - level[:, None, None]) + noise * level[:, None, None]
        x = mixed @ cast(weights["embed"], dtype) + cast(weights["position"], dtype)
        condition = jax.nn.silu(cast(weights["classes"][labels], dtype) + level[:, None] * cast(weights["level"], dtype))
        for p in weights["layers"]:
            x = block(x, condition, p)
        guess = _norm(x, cast(weights["norm"], dtype)) @ cast(weights["head"], dtype)
        return ((guess - noise).astype(jnp.float32) ** 2).mean()

    weights = {
        "embed": leaf(channels, width),
        "position": leaf(n, width),
        "classes": leaf(1000, width),
        "level": leaf(width),
        "layers": [_reader(width, heads) | {"modulate": leaf(width, 6 * width)} for _ in range(layers)],
        "norm": leaf(width),
        "head": leaf(width, channels),
    }
    image = leaf(batch, n, channels, dtype=dtype)
    return _train_step(loss, weights, image, image, leaf(batch, dtype=dtype), leaf(batch, dtype=jnp.int32), params=params)
