"""Weights that are not trained."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models.blocks import _attention, _attention_weights, _norm
from benchmarks.models.step import BF16, F32, Program, _train_step, leaf
from benchmarks.outside.heads import _cross_entropy


def lora(
    layers: int = 16, width: int = 4096, hidden: int = 11_008, rank: int = 16, scan: bool = True, remat: bool = True, stored: Any = BF16
) -> Program:
    """Low-rank updates of frozen weights (arXiv 2106.09685), which may be whole numbers with a scale for each column."""

    def read(frozen: Any, low: Any, x: jax.Array) -> jax.Array:
        weight = frozen["w"].astype(BF16) * frozen["scale"] if "scale" in frozen else frozen["w"]
        return x @ weight + (x @ low["a"].astype(BF16)) @ low["b"].astype(BF16)

    def layer(x: jax.Array, both: Any) -> tuple[jax.Array, None]:
        frozen, low = both
        y = _norm(x, frozen["norm"])
        up = jax.nn.silu(read(frozen["gate"], low["gate"], y)) * read(frozen["up"], low["up"], y)
        return x + read(frozen["down"], low["down"], up), None

    step = jax.checkpoint(layer) if remat else layer

    def loss(params: Any, frozen: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        if scan:
            x, _ = jax.lax.scan(step, x, (frozen, params))
        else:
            for both in zip(frozen, params, strict=True):
                x, _ = step(x, both)
        return ((x - targets).astype(F32) ** 2).mean()

    sizes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    scales = {} if stored is BF16 else {"scale": 1}
    held = {
        name: {"w": leaf(*size, dtype=stored)} | dict.fromkeys(scales, leaf(size[1])) for name, size in sizes.items()
    } | {"norm": leaf(width)}
    low = {name: {"a": leaf(into, rank, dtype=F32), "b": leaf(rank, out, dtype=F32)} for name, (into, out) in sizes.items()}

    def stacked(tree: Any) -> Any:
        return jax.tree.map(lambda w: leaf(layers, *w.shape, dtype=w.dtype), tree) if scan else [tree] * layers

    x = leaf(32, 1024, width)
    return _train_step(loss, stacked(low), x, x, frozen=stacked(held))


def frozen_encoder(layers: int = 8, width: int = 1024, heads: int = 16, out: int = 50_000) -> Program:
    """A head that is trained on a frozen encoder, which no gradient goes through."""

    def loss(params: Any, frozen: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
        def layer(x: jax.Array, p: Any) -> tuple[jax.Array, None]:
            x = _attention(x, p)
            return x + jax.nn.gelu(_norm(x, p["norm2"]) @ p["up"]) @ p["down"], None

        x = jax.lax.stop_gradient(jax.lax.scan(layer, x, frozen)[0])
        return _cross_entropy(x @ params.astype(BF16), labels)

    dense = {"norm2": leaf(width), "up": leaf(width, 4 * width), "down": leaf(4 * width, width)}
    frozen = jax.tree.map(lambda w: leaf(layers, *w.shape), _attention_weights(width, heads) | dense)
    return _train_step(loss, leaf(width, out, dtype=F32), leaf(64, 512, width), leaf(64, 512, dtype=jnp.int32), frozen=frozen)

