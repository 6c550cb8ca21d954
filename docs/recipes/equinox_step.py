"""Equinox: a module as the state of a step.

What changes for you: `eqx.filter_jit` becomes `autoshard.parallelize`. Leaves
that are no arrays, such as activation functions, are static by their value,
so a module is passed whole; `eqx.partition` is not needed.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.nn import gelu
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

import autoshard

optimizer = optax.adam(1e-3)


class Mixer(eqx.Module):
    tokens: eqx.nn.MLP
    channels: eqx.nn.MLP
    norm: eqx.nn.LayerNorm
    out: eqx.nn.Linear

    def __init__(self, key):
        one, two, three = jax.random.split(key, 3)
        self.tokens = eqx.nn.MLP(16, 16, 64, 1, activation=gelu, key=one)
        self.channels = eqx.nn.MLP(64, 64, 256, 1, activation=gelu, key=two)
        self.norm = eqx.nn.LayerNorm(64)
        self.out = eqx.nn.Linear(64, 10, key=three)

    def __call__(self, patches):
        """Of one image: 16 patches of 64 numbers."""
        x = patches + jax.vmap(self.tokens)(patches.T).T
        x = x + jax.vmap(self.channels)(jax.vmap(self.norm)(x))
        return self.out(x.mean(0))


def step(model, moments, images, labels):
    @eqx.filter_value_and_grad
    def loss(model):
        said = jax.vmap(model)(images)
        return cross_entropy(said, labels).mean()

    value, gradients = loss(model)
    updates, moments = optimizer.update(gradients, moments)
    return eqx.apply_updates(model, updates), moments, value


def make():
    model = Mixer(jax.random.key(0))
    moments = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    images = jax.random.normal(jax.random.key(1), (64, 16, 64))
    return model, moments, images, jnp.arange(64) % 10


sharded = autoshard.parallelize(step, cluster="cpu:8", donate_argnums=(0, 1))
model, moments, images, labels = make()
for _ in range(3):
    model, moments, loss = sharded(model, moments, images, labels)
    print(loss)
