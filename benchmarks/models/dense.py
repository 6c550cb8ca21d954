"""Networks of dense layers: a residual one, and a recommender with embedding tables."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models.step import BF16, F32, Program, _train_step, cast, leaf


def mlp(
    layers: int = 4,
    width: int = 4096,
    hidden: int = 16_384,
    batch: int = 16_384,
    dtype: Any = BF16,
    params: Any = F32,
    remat: bool = False,
) -> Program:
    """A residual network of dense layers: regression on vectors."""

    def block(x: jax.Array, layer: Any) -> jax.Array:
        p = cast(layer, dtype)
        return x + jax.nn.gelu(x @ p["up"] + p["inner"]) @ p["down"] + p["outer"]

    block = jax.checkpoint(block) if remat else block

    def loss(weights: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        for layer in weights:
            x = block(x, layer)
        return ((x - targets).astype(jnp.float32) ** 2).mean()

    each = {"up": leaf(width, hidden), "inner": leaf(hidden), "down": leaf(hidden, width), "outer": leaf(width)}
    x = leaf(batch, width, dtype=dtype)
    return _train_step(loss, [dict(each) for _ in range(layers)], x, x, params=params)


def dlrm(tables: int = 6, rows: int = 200_000, width: int = 128, batch: int = 16_384, dtype: Any = BF16, params: Any = F32) -> Program:
    """A recommender (DLRM, arXiv 1906.00091): dense features and looked-up rows, their products, and a small network on top.

    Rows are cast once they are looked up: a cast of whole tables would be most of the step.
    """
    first, second = jnp.triu_indices(tables + 1, 1)

    def stack(x: jax.Array, layers: Any) -> jax.Array:
        for number, layer in enumerate(layers):
            p = cast(layer, dtype)
            x = x @ p["weight"] + p["bias"]
            x = jax.nn.relu(x) if number + 1 < len(layers) else x
        return x

    def loss(weights: Any, dense: jax.Array, rows: jax.Array, clicked: jax.Array) -> jax.Array:
        features = jax.nn.relu(stack(dense, weights["bottom"]))
        looked_up = (cast(table[rows[:, k]], dtype) for k, table in enumerate(weights["tables"]))
        every = jnp.stack([features, *looked_up], axis=1)
        products = jnp.einsum("bid,bjd->bij", every, every)[:, first, second]
        logits = stack(jnp.concatenate([features, products], axis=1), weights["top"])[:, 0]
        return optax.sigmoid_binary_cross_entropy(logits.astype(jnp.float32), clicked).mean()

    def layers(*widths: int) -> list[Any]:
        return [{"weight": leaf(before, after), "bias": leaf(after)} for before, after in pairwise(widths)]

    weights = {
        "tables": [leaf(rows, width) for _ in range(tables)],
        "bottom": layers(16, 512, 256, width),
        "top": layers(width + tables * (tables + 1) // 2, 1024, 1024, 512, 1),
    }
    looked_up = leaf(batch, tables, dtype=jnp.int32)
    return _train_step(loss, weights, leaf(batch, 16, dtype=dtype), looked_up, leaf(batch, dtype=jnp.float32), params=params)
