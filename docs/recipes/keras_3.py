"""Keras 3 on JAX: the stateless step of a compiled model.

What changes for you: instead of `keras.distribution` and `fit`, write the step
with `stateless_call` and `stateless_apply`, as Keras' guide to custom training
loops with JAX does, and shard that. At the end the values go back to the model.
"""

import os

os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import jax
import jax.numpy as jnp
import keras

import autoshard

keras.utils.set_random_seed(0)
model = keras.Sequential(
    [
        keras.Input((32,)),
        keras.layers.Dense(256, activation="gelu"),
        keras.layers.Dropout(0.1),
        keras.layers.LayerNormalization(),
        keras.layers.Dense(256, activation="gelu"),
        keras.layers.Dense(10),
    ]
)
optimizer = keras.optimizers.AdamW(1e-3)
optimizer.build(model.trainable_variables)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def values(variables):
    return [jnp.array(variable.value) for variable in variables]


def step(state, x, y):
    trained, others, moments = state

    def loss(trained):
        said, new = model.stateless_call(trained, others, x, training=True)
        return cross_entropy(y, said), new

    differentiated = jax.value_and_grad(loss, has_aux=True)
    (value, others), gradients = differentiated(trained)
    trained, moments = optimizer.stateless_apply(moments, gradients, trained)
    return (trained, others, moments), value


def make():
    variables = model.trainable_variables, model.non_trainable_variables
    state = *map(values, variables), values(optimizer.variables)
    x = jax.random.normal(jax.random.key(1), (64, 32))
    return state, x, jnp.arange(64) % 10


sharded = autoshard.parallelize(step, cluster="cpu:8", donate_argnums=0)
state, x, y = make()
for _ in range(3):
    state, loss = sharded(state, x, y)
    print(loss)

for variable, value in zip(model.trainable_variables, state[0], strict=True):
    variable.assign(jax.device_get(value))
print(model(x[:1]))
