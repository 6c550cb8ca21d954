"""The program of the pages: four residual layers, Adam, and a batch."""

import jax
import jax.numpy as jnp
import optax

optimizer = optax.adam(1e-3)


def make_state(key):
    layers = [
        {
            "up": jax.random.normal(one, (256, 1024)) / 16,
            "down": jax.random.normal(one, (1024, 256)) / 32,
        }
        for one in jax.random.split(key, 4)
    ]
    return layers, optimizer.init(layers)


def train_step(state, batch):
    layers, moments = state

    def loss(layers):
        x = batch["x"]
        for layer in layers:
            x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    value, gradients = jax.value_and_grad(loss)(layers)
    updates, moments = optimizer.update(gradients, moments)
    return (optax.apply_updates(layers, updates), moments), value


state = jax.eval_shape(make_state, jax.random.key(0))  # shapes are enough
batch = {"x": jnp.ones((512, 256)), "y": jnp.zeros((512, 256))}
example_args = state, batch
