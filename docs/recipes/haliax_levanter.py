"""Haliax, and so Levanter: arrays with named axes.

What changes for you: `hax.named_jit` and its axis mappings become
`autoshard.parallelize`: a search finds what the mapping would have said. Named
arrays are arguments as any pytree is. To keep a mapping for some axes, pin
these arguments: `pins={"*weight*": P("model", None)}`.
"""

import equinox as eqx
import haliax as hax
import haliax.nn as hnn
import jax
import optax

import autoshard

Batch, In = hax.Axis("batch", 64), hax.Axis("in", 32)
Hidden, Class = hax.Axis("hidden", 256), hax.Axis("class", 10)
optimizer = optax.adam(1e-3)


class Network(eqx.Module):
    up: hnn.Linear
    norm: hnn.LayerNorm
    down: hnn.Linear

    @staticmethod
    def init(key):
        one, two = jax.random.split(key)
        up = hnn.Linear.init(In, Hidden, key=one)
        norm = hnn.LayerNorm.init(Hidden, eps=1e-5)
        return Network(up, norm, hnn.Linear.init(Hidden, Class, key=two))

    def __call__(self, x):
        return self.down(self.norm(hnn.gelu(self.up(x))))


def step(model, moments, x, labels):
    @eqx.filter_value_and_grad
    def loss(model):
        wanted = hnn.one_hot(labels, Class)
        losses = hnn.cross_entropy_loss(model(x), Class, wanted, reduction=None)
        return hax.mean(losses).scalar()

    value, gradients = loss(model)
    updates, moments = optimizer.update(gradients, moments)
    return eqx.apply_updates(model, updates), moments, value


def make():
    model = Network.init(jax.random.key(0))
    moments = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    x = hax.random.normal(jax.random.key(1), (Batch, In))
    return model, moments, x, hax.arange(Batch) % 10


sharded = autoshard.parallelize(step, cluster="cpu:8", donate_argnums=(0, 1))
model, moments, x, labels = make()
for _ in range(3):
    model, moments, loss = sharded(model, moments, x, labels)
    print(loss)
