"""Programs that show when XLA:TPU computes new state in the kernel of a gradient's product."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.evidence.measures import CYCLES
from benchmarks.evidence.program import BF16, F32, Program, leaf, named


def adam(p, m, v, g):
    """New parameters and moments."""
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    return p - 1e-3 * (m / (jnp.sqrt(v) + 1e-8)), m, v


def momentum(p, m, g):
    """New parameters and momentum."""
    m = 0.9 * m + g
    return p - 1e-3 * m, m


def updated(update, gradient, inputs, shape, on="v5e:1x1"):
    """The cycles of an update in the kernel of its gradient over those of both in kernels of their own."""
    states = (leaf(*shape, dtype=F32),) * (3 if update is adam else 2)

    def step(apart, *args):
        g = gradient(*args[: len(inputs)]).astype(F32)
        return update(*args[len(inputs) :], lax.optimization_barrier(g) if apart else g)

    over = Program(lambda *args: step(True, *args), (*inputs, *states), CYCLES, on)
    return Program(lambda *args: step(False, *args), (*inputs, *states), CYCLES, on, over=over)


def outer(x, y):
    """A weight's gradient of activations and those of its result."""
    return jnp.einsum("tm,tn->mn", x, y)


def of_logits(x, logits):
    """The gradient of a head's weights through a softmax."""
    return outer(x, jax.nn.softmax(logits.astype(F32)).astype(BF16))


def of_activation(x, y):
    """The gradient of a layer's weights behind an activation."""
    return outer(jax.nn.gelu(x), y)


for title, update, gradient, rows, m, n in (
    ("Adam of a product", adam, outer, 16384, 2048, 4096),
    ("Adam of a product", adam, outer, 32768, 2048, 4096),
    ("Adam of a head's softmax", adam, of_logits, 32768, 1024, 4096),
    ("Adam behind an activation", adam, of_activation, 4096, 2048, 8192),
    ("Adam behind an activation", adam, of_activation, 8192, 2048, 8192),
    ("Adam behind an activation", adam, of_activation, 16384, 2048, 4096),
    ("momentum behind an activation", momentum, of_activation, 8192, 1024, 4096),
    ("momentum behind an activation", momentum, of_activation, 16384, 1024, 4096),
    ("momentum behind an activation", momentum, of_activation, 65536, 1024, 4096),
):
    name = f"{title} of {rows} rows, over both apart"
    named(name, updated(update, gradient, (leaf(rows, m), leaf(rows, n)), (m, n)))
for kind in ("v5p:1x1x1", "v6e:1x1"):
    inputs = leaf(32768, 2048), leaf(32768, 4096)
    named(f"Adam of a product of 32768 rows on {kind[:3]}, over both apart", updated(adam, outer, inputs, (2048, 4096), kind))
