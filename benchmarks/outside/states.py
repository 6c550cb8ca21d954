"""Recurrences: associative scans, states that scans carry, policies."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models.blocks import _norm, _read_weights
from benchmarks.models.step import BF16, F32, Program, _train_step, cast, leaf


def _decayed(left: Any, right: Any) -> Any:
    return left[0] * right[0], right[0] * left[1] + right[1]


def linear_recurrence(layers: int = 4, width: int = 1024, batch: int = 64, length: int = 2048, dtype: Any = F32) -> Program:
    """Gated linear recurrences by an associative scan (arXiv 2402.19427)."""

    def loss(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        for p in params:
            y = _norm(x, p["norm"].astype(BF16))
            decay = jax.nn.sigmoid((y @ p["decay"].astype(BF16)).astype(dtype))
            put = jnp.sqrt(1 - decay**2 + 1e-6) * (y @ p["into"].astype(BF16)).astype(dtype)
            _, state = jax.lax.associative_scan(_decayed, (decay, put), axis=1)
            x = x + (state.astype(BF16) * jax.nn.gelu(y @ p["gate"].astype(BF16))) @ p["out"].astype(BF16)
        return ((x - targets).astype(F32) ** 2).mean()

    layer = {"norm": leaf(width), **{name: leaf(width, width) for name in ("decay", "into", "gate", "out")}}
    return _train_step(loss, [layer] * layers, *[leaf(batch, length, width)] * 2, params=F32)


def linear_attention(layers: int = 4, width: int = 1024, heads: int = 16, batch: int = 32, length: int = 2048) -> Program:
    """Attention without softmax, in chunks whose states are carried by a scan."""
    chunk, head = 128, width // heads

    def attended(p: Any, y: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("bld,dhk->lbhk", y, p[name]).reshape(-1, chunk, batch, heads, head) for name in ("query", "key", "value"))

        def trip(state: jax.Array, one: Any) -> tuple[jax.Array, jax.Array]:
            q, k, v = one
            scores = jnp.tril(jnp.einsum("qbhk,sbhk->bhqs", q, k))
            read = jnp.einsum("bhqs,sbhk->qbhk", scores, v) + jnp.einsum("qbhk,bhkv->qbhv", q, state.astype(BF16))
            return state + jnp.einsum("sbhk,sbhv->bhkv", k, v).astype(F32), read

        _, read = jax.lax.scan(trip, jnp.zeros((batch, heads, head, head), F32), (jax.nn.elu(q) + 1, jax.nn.elu(k) + 1, v))
        return jnp.einsum("lbhk,hkd->bld", read.reshape(length, batch, heads, head), p["out"])

    def loss(params: Any, x: jax.Array, targets: jax.Array) -> jax.Array:
        for p in cast(params, BF16):
            x = x + attended(p, _norm(x, p["norm"]))
        return ((x - targets).astype(F32) ** 2).mean()

    layer = {"norm": leaf(width)} | _read_weights(width, heads)
    return _train_step(loss, [layer] * layers, *[leaf(batch, length, width)] * 2, params=F32)


def policy(width: int = 512, batch: int = 4096, length: int = 64, actions: int = 18) -> Program:
    """A recurrent policy with values, clipped ratios and advantages that a backward scan adds up (PPO, arXiv 1707.06347)."""

    def loss(params: Any, seen: jax.Array, chosen: jax.Array, old: jax.Array, rewards: jax.Array) -> jax.Array:
        def trip(state: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            update, reset = jnp.split(jax.nn.sigmoid(jnp.concatenate([x, state], -1) @ params["gates"]), 2, -1)
            state = update * state + (1 - update) * jnp.tanh(jnp.concatenate([x, reset * state], -1) @ params["state"])
            return state, state

        states = jax.lax.scan(trip, jnp.zeros((batch, width)), jax.nn.relu(seen @ params["into"]))[1]
        logs, values = jax.nn.log_softmax(states @ params["actor"]), (states @ params["critic"])[..., 0]
        errors = jax.lax.stop_gradient(rewards[:-1] + 0.99 * values[1:] - values[:-1])
        gains = jax.lax.scan(lambda total, error: ((total := error + 0.94 * total), total), jnp.zeros(batch), errors, reverse=True)[1]
        ratios = jnp.exp(jnp.take_along_axis(logs, chosen[..., None], -1)[..., 0] - old)[:-1]
        clipped = jnp.minimum(ratios * gains, jnp.clip(ratios, 0.8, 1.2) * gains)
        missed = ((values[:-1] - jax.lax.stop_gradient(gains + values[:-1])) ** 2).mean()
        return missed - clipped.mean() + 0.01 * (jnp.exp(logs) * logs).mean()

    shapes = {"into": (256, width), "gates": (2 * width, 2 * width), "state": (2 * width, width)}
    shapes |= {"actor": (width, actions), "critic": (width, 1)}
    params = {name: leaf(*shape, dtype=F32) for name, shape in shapes.items()}
    each = leaf(length, batch, dtype=F32)
    return _train_step(loss, params, leaf(length, batch, 256, dtype=F32), leaf(length, batch, dtype=jnp.int32), each, each)

