"""Hugging Face Transformers, Flax models: GPT-2.

What changes for you: in the step of the Flax examples, `jax.pmap` becomes
`autoshard.parallelize`; drop `pmean`, `replicate` and `shard`. Transformers 5
has no Flax models any more; this is for the releases before.
"""

import jax
import jax.numpy as jnp
import optax
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy
from transformers import FlaxGPT2LMHeadModel, GPT2Config

import autoshard

config = GPT2Config(vocab_size=512, n_embd=64, n_layer=2, n_head=4)
model = FlaxGPT2LMHeadModel(config, seed=0)
optimizer = optax.adamw(1e-3)


def step(state, tokens, key):
    params, moments = state

    def loss(params):
        said = model(tokens, params=params, dropout_rng=key, train=True).logits
        return cross_entropy(said[:, :-1], tokens[:, 1:]).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    updates, moments = optimizer.update(gradients, moments, params)
    return (optax.apply_updates(params, updates), moments), value


def make():
    params = jax.tree.map(jnp.array, model.params)
    tokens = jax.random.randint(jax.random.key(1), (16, 32), 0, 512)
    return (params, optimizer.init(params)), tokens, jax.random.key(2)


sharded = autoshard.parallelize(step, cluster="cpu:8", donate_argnums=0)
state, tokens, key = make()
for _ in range(3):
    state, loss = sharded(state, tokens, key)
    print(loss)
