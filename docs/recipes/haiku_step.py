"""Haiku: a transformed function with state.

What changes for you: `jax.jit`, or `jax.pmap`, becomes `autoshard.parallelize`.
Drop `jax.lax.pmean` and `axis_name`: the step is written for one device and the
whole batch, so a mean, and a batch norm's too, is of all examples.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import optax
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

import autoshard

optimizer = optax.sgd(0.1, momentum=0.9)


@hk.transform_with_state
def network(images, is_training):
    x = hk.Conv2D(32, 3)(images)
    for _ in range(2):
        h = hk.BatchNorm(True, True, decay_rate=0.9)(x, is_training)
        x = x + hk.Conv2D(32, 3)(jax.nn.relu(h))
    return hk.Linear(10)(x.mean((1, 2)))


def step(state, batch):
    params, averages, moments = state

    def loss(params):
        said, new = network.apply(params, averages, None, batch["image"], True)
        return cross_entropy(said, batch["label"]).mean(), new

    differentiated = jax.value_and_grad(loss, has_aux=True)
    (value, averages), gradients = differentiated(params)
    updates, moments = optimizer.update(gradients, moments)
    return (optax.apply_updates(params, updates), averages, moments), value


def make():
    image = jax.random.normal(jax.random.key(1), (64, 8, 8, 3))
    params, averages = network.init(jax.random.key(0), image, True)
    state = params, averages, optimizer.init(params)
    return state, {"image": image, "label": jnp.arange(64) % 10}


sharded = autoshard.parallelize(step, cluster="cpu:8", donate_argnums=0)
state, batch = make()
for _ in range(3):
    state, loss = sharded(state, batch)
    print(loss)
