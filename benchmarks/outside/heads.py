"""Heads of language models and their losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from benchmarks.models.step import BF16, F32, Program, _train_step, leaf


def _cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits.astype(F32), targets).mean()


def _head(loss_of: Callable[[jax.Array, jax.Array], jax.Array], vocabulary: int = 65_536, width: int = 2048, wide: bool = False) -> Program:
    """A layer, a tied head whose products are of float32 if it is wide, and a loss."""

    def loss(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        x = jnp.tanh(x @ params["layer"].astype(BF16))
        logits = jnp.einsum("bld,vd->blv", x, params["embed"].astype(BF16), preferred_element_type=F32 if wide else BF16)
        return loss_of(logits, targets)

    params = {"layer": leaf(width, width), "embed": leaf(vocabulary, width)}
    return _train_step(loss, params, leaf(32, 1024, width), leaf(32, 1024, dtype=jnp.int32), params=F32)


def _capped(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return _cross_entropy(30 * jnp.tanh(logits.astype(F32) / 30), targets)


def _narrow_capped(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return _cross_entropy(30 * jnp.tanh(logits / 30), targets)


def _with_z(logits: jax.Array, targets: jax.Array) -> jax.Array:
    logits = logits.astype(F32)
    total = jax.nn.logsumexp(logits, -1)
    picked = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return (total - picked).mean() + 1e-4 * (total**2).mean()


def _smoothed(logits: jax.Array, targets: jax.Array) -> jax.Array:
    logs = jax.nn.log_softmax(logits.astype(F32))
    return -(0.9 * jnp.take_along_axis(logs, targets[..., None], -1)[..., 0] + 0.1 * logs.mean(-1)).mean()


def _masked(logits: jax.Array, targets: jax.Array) -> jax.Array:
    """Cross entropy of tokens that are not padding, with the share that is right."""
    logits = logits.astype(F32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    right = (logits.argmax(-1) == targets).mean()
    return jnp.where(targets > 0, losses, 0).sum() / (targets > 0).sum() + 0 * right


def distilled(width: int = 2048, vocabulary: int = 32_768) -> Program:
    """A student's logits beside those of a frozen teacher."""

    def logits_of(p: Any, x: jax.Array) -> jax.Array:
        return (jax.nn.gelu(x @ p["layer"].astype(BF16)) @ p["head"].astype(BF16)).astype(F32) / 2

    def loss(params: Any, teacher: Any, x: jax.Array) -> jax.Array:
        wanted = jax.nn.log_softmax(jax.lax.stop_gradient(logits_of(teacher, x)))
        return (jnp.exp(wanted) * (wanted - jax.nn.log_softmax(logits_of(params, x)))).sum(-1).mean()

    params = {"layer": leaf(width, width), "head": leaf(width, vocabulary)}
    return _train_step(loss, params, leaf(32, 1024, width), params=F32, frozen=params)


def preferred(width: int = 2048, vocabulary: int = 32_768) -> Program:
    """Log probabilities of a chosen and a rejected answer, beside those of a frozen reference (DPO, arXiv 2305.18290)."""

    def told(p: Any, x: jax.Array, tokens: jax.Array) -> jax.Array:
        logits = (jax.nn.gelu(x @ p["layer"].astype(BF16)) @ p["head"].astype(BF16)).astype(F32)
        return jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[..., None], -1)[..., 0].sum(-1)

    def loss(params: Any, frozen: Any, chosen: jax.Array, rejected: jax.Array, tokens: jax.Array, others: jax.Array) -> jax.Array:
        ours = told(params, chosen, tokens) - told(params, rejected, others)
        theirs = told(frozen, chosen, tokens) - told(frozen, rejected, others)
        return -jax.nn.log_sigmoid(0.1 * (ours - theirs)).mean()

    params, x = {"layer": leaf(width, width), "head": leaf(width, vocabulary)}, leaf(32, 512, width)
    return _train_step(loss, params, x, x, *[leaf(32, 512, dtype=jnp.int32)] * 2, params=F32, frozen=params)
