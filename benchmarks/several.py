"""Small float32 train steps that go over their batch more than once: SAM, CLIP, PPO, and balanced experts with Muon."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.models import Program
from benchmarks.models.step import leaf

F32 = jnp.float32
WIDTH, BATCH = 16, 16


def _moved(weights: Any, gradients: Any, rate: float | jax.Array) -> Any:
    return jax.tree.map(lambda w, g: w - rate * g, weights, gradients)


def _layers(layers: int) -> list[Any]:
    return [{"up": leaf(WIDTH, 2 * WIDTH, dtype=F32), "down": leaf(2 * WIDTH, WIDTH, dtype=F32)}] * layers


def _through(layers: Any, x: jax.Array) -> jax.Array:
    for p in layers:
        x = x + jnp.tanh(x @ p["up"]) @ p["down"]
    return x


def sam(layers: int) -> Program:
    """Sharpness-aware minimisation: the gradient where the normalised first one leads (arXiv 2010.01412)."""

    def step(weights: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            return jnp.mean((_through(weights, x) - y) ** 2)

        gradients = jax.grad(loss)(weights)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
        value, gradients = jax.value_and_grad(loss)(_moved(weights, gradients, -0.05 / norm))
        return _moved(weights, gradients, 0.1), value

    return step, (_layers(layers), leaf(BATCH, WIDTH, dtype=F32), leaf(BATCH, WIDTH, dtype=F32))


def clip(layers: int) -> Program:
    """Two towers whose batches are compared, each with all of the other (arXiv 2103.00020)."""

    def step(weights: Any, images: jax.Array, texts: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            a, b = (_through(weights[name], x) for name, x in (("image", images), ("text", texts)))
            a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
            scores = jnp.exp(weights["scale"]) * (a @ b.T)
            rows, columns = (jnp.diagonal(jax.nn.log_softmax(each)) for each in (scores, scores.T))
            return -jnp.mean(rows + columns) / 2

        value, gradients = jax.value_and_grad(loss)(weights)
        return _moved(weights, gradients, 0.1), value

    towers = {"image": _layers(layers), "text": _layers(layers), "scale": leaf(dtype=F32)}
    return step, (towers, leaf(BATCH, WIDTH, dtype=F32), leaf(BATCH, WIDTH, dtype=F32))


def ppo(layers: int, updates: int = 2) -> Program:
    """A policy and its values, updated twice by clipped ratios on advantages that are standardised over the batch (arXiv 1707.06347)."""

    def step(weights: Any, seen: jax.Array, chosen: jax.Array, old: jax.Array, returns: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            features = _through(weights["layers"], seen)
            logs, values = jax.nn.log_softmax(features @ weights["actor"]), (features @ weights["critic"])[:, 0]
            gains = jax.lax.stop_gradient(returns - values)
            gains = (gains - gains.mean()) / (gains.std() + 1e-3)
            ratios = jnp.exp(jnp.take_along_axis(logs, chosen[:, None], -1)[:, 0] - old)
            clipped = jnp.minimum(ratios * gains, jnp.clip(ratios, 0.8, 1.2) * gains)
            return ((values - returns) ** 2).mean() - clipped.mean() + 0.01 * (jnp.exp(logs) * logs).sum(-1).mean()

        value = jnp.zeros(())
        for _ in range(updates):
            value, gradients = jax.value_and_grad(loss)(weights)
            weights = _moved(weights, gradients, 0.01)
        return weights, value

    weights = {"layers": _layers(layers), "actor": leaf(WIDTH, 8, dtype=F32), "critic": leaf(WIDTH, 1, dtype=F32)}
    return step, (weights, leaf(BATCH, WIDTH, dtype=F32), leaf(BATCH, dtype=jnp.int32), *[leaf(BATCH, dtype=F32)] * 2)


def muon(layers: int, experts: int = 4) -> Program:
    """Mixtures of experts whose routers are balanced over the batch, and an optimizer with products of its own, as Muon's."""

    def step(weights: Any, x: jax.Array, y: jax.Array) -> Any:
        def loss(weights: Any) -> jax.Array:
            found, balance = x, jnp.zeros(())
            for layer in weights:
                shares = jax.nn.softmax(found @ layer["route"])
                chosen = jax.nn.one_hot(jnp.argmax(shares, -1), experts)
                balance += jnp.sum(jnp.mean(chosen, 0) * jnp.mean(shares, 0))
                found = found + jnp.tanh(jnp.einsum("bi,eio,be->bo", found, layer["up"], chosen * shares))
            return jnp.mean((found - y) ** 2) + 0.1 * balance

        value, gradients = jax.value_and_grad(loss)(weights)
        cubes = jax.tree.map(lambda g: g @ jnp.swapaxes(g, -1, -2) @ g, gradients)
        return _moved(weights, cubes, 0.1), value

    layer = {"route": leaf(WIDTH, experts, dtype=F32), "up": leaf(experts, WIDTH, WIDTH, dtype=F32)}
    return step, ([layer] * layers, leaf(BATCH, WIDTH, dtype=F32), leaf(BATCH, WIDTH, dtype=F32))
