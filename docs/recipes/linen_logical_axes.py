"""Flax Linen with logical axes, as MaxText has them: the rules become pins.

What changes for you: nothing in the model. Search under your rules with
`pins="arguments"`, and each parameter keeps the mesh axes that its logical
names stand for; all the rest is searched. Leave `pins=` out to see what is
found without your rules, and `autoshard.compare` the two.
"""

import flax.linen as nn
import jax
import optax
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

import autoshard

RULES = {"batch": "data", "embed": None, "mlp": "model", "vocab": "model"}


def dense(features, *axes):
    start = nn.with_logical_partitioning(nn.initializers.lecun_normal(), axes)
    return nn.Dense(features, kernel_init=start, use_bias=False)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        h = dense(512, "embed", "mlp")(h)
        h = nn.with_logical_constraint(nn.gelu(h), ("batch", None, "mlp"))
        return x + dense(128, "mlp", "embed")(h)


class Model(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(1024, 128)(tokens)
        for _ in range(2):
            x = Block()(x)
        return dense(1024, "embed", "vocab")(x)


model, optimizer = Model(), optax.adamw(1e-3)


def make():
    tokens = jax.random.randint(jax.random.key(1), (16, 33), 0, 1024)
    params = model.init(jax.random.key(0), tokens[:, :-1])["params"]
    return (params, optimizer.init(params)), tokens


def step(state, tokens):
    params, moments = state

    def loss(params):
        said = model.apply({"params": params}, tokens[:, :-1])
        return cross_entropy(said, tokens[:, 1:]).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    updates, moments = optimizer.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


with nn.logical_axis_rules(tuple(RULES.items())):
    sharded = autoshard.parallelize(step, cluster="cpu:8", pins="arguments")
    state, tokens = make()
    for _ in range(3):
        state, loss = sharded(state, tokens)
        print(loss)
    print(sharded.strategy.mesh_shape)
