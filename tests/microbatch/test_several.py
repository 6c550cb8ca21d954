"""Steps whose later part reads what comes of all examples in an earlier one, in several loops over microbatches."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun

from autoshard.errors import TraceError
from autoshard.ir.rewrites import Microbatches
from autoshard.rewrite import applied
from autoshard.trace import trace

GENERATOR = np.random.default_rng(0)


def normal(*shape, scale=1.0):
    return jnp.asarray(scale * GENERATOR.standard_normal(shape), jnp.float32)


WEIGHTS = {"up": normal(12, 32, scale=0.3), "down": normal(32, 12, scale=0.3)}
X, Y = normal(16, 12), normal(16, 12)


def layers(weights, x):
    return jnp.tanh(x @ weights["up"]) @ weights["down"]


def moved(weights, gradients, rate):
    return jax.tree.map(lambda w, g: w - rate * g, weights, gradients)


def sharpness_aware(weights, x, y):
    """The gradient where the normalised first one leads."""

    def loss(weights):
        return jnp.mean((layers(weights, x) - y) ** 2)

    gradients = jax.grad(loss)(weights)
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(gradients)))
    value, gradients = jax.value_and_grad(loss)(moved(weights, gradients, -0.05 / norm))
    return moved(weights, gradients, 0.1), value


def adversarial(both, x, y):
    """Two optimizers: one network is trained against the other as the step has just updated it; the first gradient is returned, too."""
    actor, critic = both
    error, of_critic = jax.value_and_grad(lambda critic: jnp.mean((layers(critic, x) - y) ** 2))(critic)
    critic = moved(critic, of_critic, 0.1)
    value, of_actor = jax.value_and_grad(lambda actor: jnp.mean(layers(critic, layers(actor, x)) ** 2))(actor)
    return (moved(actor, of_actor, 0.1), critic), error, value, of_critic


def standardised(weights, x, y):
    """A loss weighted by what the network gives, standardised over the batch, as advantages are."""
    scores = lax.stop_gradient(layers(weights, x)[:, 0])
    scores = (scores - scores.mean()) / (scores.std() + 1e-3)

    def loss(weights):
        found = layers(weights, x)
        return jnp.mean(found[:, 0] * scores) + jnp.mean((found - y) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return moved(weights, gradients, 0.1), value


def contrastive(weights, images, texts):
    """Each example is held against all others: their few features are kept, and layers computed again for the gradients."""

    def features(x):
        found = jnp.mean(layers(weights_of[0], x), 1)
        return found / jnp.linalg.norm(found, axis=-1, keepdims=True)

    weights_of = [weights]

    def loss(weights):
        weights_of[0] = weights
        scores = features(images) @ features(texts).T
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(scores)))

    value, gradients = jax.value_and_grad(loss)(weights)
    return moved(weights, gradients, 0.1), value


def symmetric(weights, images, texts):
    """CLIP's loss with a learned temperature, whose scores are read by rows and columns: their gradients wait for nothing else."""

    def loss(both):
        weights, scale = both
        a, b = (jnp.mean(layers(weights, x), 1) for x in (images, texts))
        a, b = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (a, b))
        scores = jnp.exp(scale) * (a @ b.T)
        rows, columns = (jnp.diagonal(jax.nn.log_softmax(each)) for each in (scores, scores.T))
        return -jnp.mean(rows + columns) / 2, jnp.mean(jnp.argmax(scores, -1) == jnp.arange(len(a)))

    value, gradients = jax.value_and_grad(loss, has_aux=True)((weights, jnp.float32(0.5)))
    return moved((weights, jnp.float32(0.5)), gradients, 0.1), value


EXPERTS = [
    {"route": normal(12, 4, scale=0.3), "up": normal(4, 12, 12, scale=0.3), "scale": jnp.asarray(np.eye(12), jnp.float32)} for _ in range(4)
]


def balanced(weights, x, y):
    """Mixtures of experts whose routers are balanced over the batch, and an optimizer with products of its own (Muon's)."""

    def loss(weights):
        found, balance = x, 0.0
        for layer in weights:
            shares = jax.nn.softmax(found @ layer["route"])
            chosen = jax.nn.one_hot(jnp.argmax(shares, -1), shares.shape[-1])
            balance += jnp.sum(jnp.mean(chosen, 0) * jnp.mean(shares, 0))
            found = found + jnp.tanh(jnp.einsum("bi,eio,be->bo", found, layer["up"], chosen * shares)) @ layer["scale"]
        return jnp.mean((found - y) ** 2) + 0.1 * balance

    value, gradients = jax.value_and_grad(loss)(weights)
    return moved(weights, jax.tree.map(lambda g: g @ jnp.swapaxes(g, -1, -2) @ g, gradients), 0.1), value


WIDE = normal(16, 8, 12), normal(16, 8, 12)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("step", "args", "loops"),
    [
        (sharpness_aware, (WEIGHTS, X, Y), 2),
        (adversarial, ((WEIGHTS, jax.tree.map(lambda w: 0.7 * w, WEIGHTS)), X, Y), 2),
        (standardised, (WEIGHTS, X, Y), 2),
        (contrastive, (WEIGHTS, *WIDE), 2),
        (symmetric, (WEIGHTS, *WIDE), 2),
        (balanced, (EXPERTS, X, Y), 2),
    ],
)
def test_steps_in_several_loops(step, args, loops):
    """Results are those of the whole batch, and no product reads all of it."""
    traced = trace(step, *args)
    many = applied(Microbatches(4), traced)
    leaves = jax.tree.leaves(args)
    wanted, found = (jax.jit(jaxpr_as_fun(each.jaxpr))(*leaves) for each in (traced, many))
    for one, other in zip(wanted, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=2e-6 * max(1.0, float(jnp.abs(one).max())))
    assert f"in {loops} such loops" in " ".join(many.graph.assumptions)
    shapes = [value.shape for value in many.graph.values]
    around = [op for op in many.graph.ops if op.primitive == "dot_general" and any(len(X) in shapes[value] for value in op.operands)]
    assert len(around) <= 3 and all(max(many.graph.values[v].size for v in op.results) <= 16 * 16 for op in around)


def normalised(weights, x, y):
    """Batch normalisation in every layer: each would compute all layers before it once more."""

    def loss(weights):
        found = x
        for _ in range(3):
            found = layers(weights, found)
            found = (found - found.mean(0)) / (found.std(0) + 1e-3)
        return jnp.mean((found - y) ** 2)

    return jax.grad(loss)(weights)


def printed(weights, x, y):
    """Prints, which would happen twice."""
    jax.debug.print("{}", x.sum())
    return sharpness_aware(weights, x, y)


@pytest.mark.parametrize("step", [normalised, printed])
def test_steps_that_are_refused(step):
    """Both operations are named with their lines: what reads single examples, and what comes of all."""
    expected = r"at .*test_several.py:\d+ .* reads each example together with what comes of all of them, of \w+ at .*test_several.py:\d+"
    with pytest.raises(TraceError, match=expected):
        applied(Microbatches(4), trace(step, WEIGHTS, X, Y))
