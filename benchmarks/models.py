"""Train steps of any depth in plain JAX, with abstract arguments: nothing is allocated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax


def gpt(
    layers: int, width: int = 1024, heads: int = 16, vocabulary: int = 32_768, batch: int = 512, length: int = 1024
) -> tuple[Callable, tuple]:
    """An AdamW train step of an unrolled decoder-only transformer, and its arguments ``(state, tokens, targets)``."""
    head = width // heads

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def layer() -> dict[str, Any]:
        return {
            "norm1": leaf(width),
            "qkv": leaf(width, 3, heads, head),
            "out": leaf(heads, head, width),
            "norm2": leaf(width),
            "up": leaf(width, 4 * width),
            "down": leaf(4 * width, width),
        }

    params = {
        "embed": leaf(vocabulary, width),
        "position": leaf(length, width),
        "layers": [layer() for _ in range(layers)],
        "norm": leaf(width),
    }
    optimizer = optax.adamw(1e-3)
    state = {"params": params, "optimizer": jax.eval_shape(optimizer.init, params)}
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)

    def train_step(state: Any, tokens: jax.Array, targets: jax.Array) -> tuple[Any, jax.Array]:
        loss, gradients = jax.value_and_grad(_loss)(state["params"], tokens, targets)
        updates, moments = optimizer.update(gradients, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, loss

    return train_step, (state, tokens, tokens)


def _loss(params: Any, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    x = params["embed"][tokens] + params["position"]
    for layer in params["layers"]:
        x = _block(x, layer)
    logits = (_norm(x, params["norm"]) @ params["embed"].T).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def _block(x: jax.Array, layer: Any) -> jax.Array:
    query, key, value = jnp.moveaxis(jnp.einsum("bsd,dchk->bschk", _norm(x, layer["norm1"]), layer["qkv"]), 2, 0)
    scores = jnp.einsum("bqhk,bshk->bhqs", query, key) / query.shape[-1] ** 0.5
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(causal, scores, -1e9), axis=-1)
    x = x + jnp.einsum("bhqs,bshk,hkd->bqd", weights, value, layer["out"])
    return x + jax.nn.gelu(_norm(x, layer["norm2"]) @ layer["up"]) @ layer["down"]


def _norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt((x**2).mean(-1, keepdims=True) + 1e-6) * (1 + scale)
