"""Flax NNX: a small decoder in the manner of Gemma, its step sharded.

What changes for you: `nnx.jit` becomes `autoshard.parallelize`. Modules and
optimizers stay arguments, and are updated in place as before. No sharding
metadata is needed.
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from optax import adamw
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

import autoshard

linear = partial(nnx.LinearGeneral, use_bias=False)
WIDTH, HEADS, GROUPS, HEAD, WORDS = 64, 4, 2, 16, 512
WAVES = 1e4 ** jnp.arange(0, 1, 2 / HEAD)


def rotate(x):  # rotary positions
    at = jnp.arange(x.shape[1])[:, None, None] / WAVES
    turned = jax.lax.complex(*jnp.split(x, 2, axis=-1)) * jnp.exp(1j * at)
    return jnp.concatenate([turned.real, turned.imag], -1)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.before = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.q = linear(WIDTH, (HEADS, HEAD), rngs=rngs)
        self.k = linear(WIDTH, (GROUPS, HEAD), rngs=rngs)
        self.v = linear(WIDTH, (GROUPS, HEAD), rngs=rngs)
        self.out = linear(HEADS * HEAD, WIDTH, rngs=rngs)
        self.between = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate = linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.up = linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        h = self.before(x)
        q, k, v = rotate(self.q(h)), rotate(self.k(h)), self.v(h)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.reshape(*x.shape[:2], -1))
        h = self.between(x)
        return x + self.down(jax.nn.gelu(self.gate(h)) * self.up(h))


class Model(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(2)])

    def __call__(self, tokens):
        x = self.embed(tokens) * WIDTH**0.5
        for block in self.blocks:
            x = block(x)
        return 30 * jnp.tanh(self.embed.attend(x) / 30)


def step(model, optimizer, tokens):
    def loss(model):
        return cross_entropy(model(tokens[:, :-1]), tokens[:, 1:]).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def make():
    model = Model(nnx.Rngs(0))
    tokens = jax.random.randint(jax.random.key(1), (16, 33), 0, WORDS)
    return model, nnx.Optimizer(model, adamw(1e-3), wrt=nnx.Param), tokens


sharded = autoshard.parallelize(step, cluster="cpu:8")  # or "v5e:4x4", ...
arguments = make()
for _ in range(3):
    print(sharded(*arguments))
