"""A recurrent language model."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models.step import BF16, F32, Program, _train_step, cast, leaf


def lstm(
    layers: int = 2,
    width: int = 1024,
    vocabulary: int = 8192,
    batch: int = 512,
    length: int = 256,
    dtype: Any = BF16,
    params: Any = F32,
    remat: bool = False,
) -> Program:
    """A recurrent language model: each layer scans over time, time first."""

    def cell(p: Any, carry: tuple[jax.Array, jax.Array], x: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        hidden, memory = carry
        gates = jnp.einsum("bd,dgw->bgw", x, p["input"]) + jnp.einsum("bd,dgw->bgw", hidden, p["hidden"]) + p["bias"]
        keep, take, give, new = (gates[:, k] for k in range(4))
        memory = jax.nn.sigmoid(keep) * memory + jax.nn.sigmoid(take) * jnp.tanh(new)
        hidden = jax.nn.sigmoid(give) * jnp.tanh(memory)
        return (hidden, memory), hidden

    cell = jax.checkpoint(cell) if remat else cell

    def loss(weights: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
        x = cast(weights["embed"], dtype)[tokens]
        for layer in weights["layers"]:
            p = cast(layer, dtype)
            zero = jnp.zeros(x.shape[1:], dtype)
            _, x = jax.lax.scan(partial(cell, p), (zero, zero), x)
        logits = (x @ cast(weights["head"], dtype)).astype(jnp.float32)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()

    each = {
        "input": leaf(width, 4, width),
        "hidden": leaf(width, 4, width),
        "bias": leaf(4, width),
    }
    weights = {
        "embed": leaf(vocabulary, width),
        "layers": [dict(each) for _ in range(layers)],
        "head": leaf(width, vocabulary),
    }
    tokens = leaf(length, batch, dtype=jnp.int32)
    return _train_step(loss, weights, tokens, tokens, params=params)
