"""Tables of short rows, graphs, towers, latent vectors, coordinates."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models.blocks import _norm, _read, _read_weights
from benchmarks.models.step import BF16, F32, Program, _train_step, cast, leaf
from benchmarks.outside.heads import _cross_entropy


def tables(number: int = 8, rows: int = 2_000_000, width: int = 32, batch: int = 65_536) -> Program:
    """Embedding tables of short rows, bags of which are summed."""

    def loss(params: Any, places: jax.Array, labels: jax.Array) -> jax.Array:
        found = [table[places[:, k]].sum(1) for k, table in enumerate(params["tables"])]
        x = jax.nn.relu(jnp.concatenate(found, -1) @ params["hidden"])
        return optax.sigmoid_binary_cross_entropy((x @ params["out"])[:, 0], labels).mean()

    dense = {"hidden": leaf(number * width, 1024, dtype=F32), "out": leaf(1024, 1, dtype=F32)}
    params = {"tables": [leaf(rows, width, dtype=F32)] * number} | dense
    places = leaf(batch, number, 10, dtype=jnp.int32)
    return _train_step(loss, params, places, leaf(batch, dtype=F32), optimizer=optax.adagrad(1e-2))


def attention_to_neighbours(layers: int = 3, width: int = 64, nodes: int = 400_000, edges: int = 4_000_000) -> Program:
    """A graph network that weighs its edges by a softmax for each node."""

    def loss(params: Any, x: jax.Array, senders: jax.Array, receivers: jax.Array, labels: jax.Array) -> jax.Array:
        for p in params["layers"]:
            h = x @ p["w"]
            scores = jnp.exp(jnp.tanh(h[senders] @ p["a"] + h[receivers] @ p["b"]))
            total = jax.ops.segment_sum(scores, receivers, nodes)
            x = jax.nn.elu(jax.ops.segment_sum(h[senders] * (scores / (total[receivers] + 1e-6))[:, None], receivers, nodes))
        return _cross_entropy(x @ params["head"], labels)

    layer = {"w": leaf(width, width, dtype=F32), "a": leaf(width, dtype=F32), "b": leaf(width, dtype=F32)}
    ends = leaf(edges, dtype=jnp.int32)
    params = {"layers": [layer] * layers, "head": leaf(width, 40, dtype=F32)}
    return _train_step(loss, params, leaf(nodes, width, dtype=F32), ends, ends, leaf(nodes, dtype=jnp.int32))



def paired(width: int = 1024, hidden: int = 4096, batch: int = 32_768) -> Program:
    """Two towers whose batches are compared, each with all of the other (CLIP, arXiv 2103.00020)."""

    def encoded(p: Any, x: jax.Array) -> jax.Array:
        x = x + jax.nn.gelu(x @ p["up"].astype(BF16)) @ p["down"].astype(BF16)
        return x * jax.lax.rsqrt((x**2).sum(-1, keepdims=True) + 1e-6)

    def loss(params: Any, images: jax.Array, texts: jax.Array) -> jax.Array:
        logits = jnp.exp(params["scale"]) * (encoded(params["image"], images) @ encoded(params["text"], texts).T).astype(F32)
        own = jnp.arange(batch)
        return (_cross_entropy(logits, own) + _cross_entropy(logits.T, own)) / 2

    tower = {"up": leaf(width, hidden), "down": leaf(hidden, width)}
    return _train_step(loss, {"image": tower, "text": tower, "scale": leaf()}, *[leaf(batch, width)] * 2, params=F32)


def latents(layers: int = 4, width: int = 1024, heads: int = 8, batch: int = 32, length: int = 8192, number: int = 256) -> Program:
    """A few latent vectors that read a long sequence (Perceiver, arXiv 2103.03206)."""

    def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        p = cast(params, BF16)
        state = jnp.broadcast_to(p["latents"], (batch, number, width))
        for layer in p["layers"]:
            state = state + _read(_norm(state, layer["norm"]), x, layer["reader"])
            state = state + jax.nn.gelu(state @ layer["up"]) @ layer["down"]
        return _cross_entropy(state.mean(1) @ p["head"], labels)

    layer = {"norm": leaf(width), "reader": _read_weights(width, heads), "up": leaf(width, 4 * width), "down": leaf(4 * width, width)}
    params = {"latents": leaf(number, width), "layers": [layer] * layers, "head": leaf(width, 1000)}
    return _train_step(loss, params, leaf(batch, length, width), leaf(batch, dtype=jnp.int32), params=F32)


def field(width: int = 256, layers: int = 8, batch: int = 1_048_576) -> Program:
    """A perceptron of coordinates by their sines, with its input again half way (NeRF, arXiv 2003.08934)."""

    def loss(params: Any, places: jax.Array, colours: jax.Array) -> jax.Array:
        angles = places[..., None] * 2.0 ** jnp.arange(10)
        seen = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], -1).reshape(batch, -1)
        x = seen
        for number, w in enumerate(params["layers"]):
            x = jax.nn.relu((jnp.concatenate([x, seen], -1) if number == layers // 2 else x) @ w)
        return ((jax.nn.sigmoid(x @ params["out"]) - colours) ** 2).mean()

    read = [60, *[width] * (layers - 1)]
    read[layers // 2] += 60
    params = {"layers": [leaf(n, width, dtype=F32) for n in read], "out": leaf(width, 3, dtype=F32)}
    return _train_step(loss, params, *[leaf(batch, 3, dtype=F32)] * 2)


