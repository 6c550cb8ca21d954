"""LeNet-5 trained with a parameter server on Ray, in both modes, next to one process: ``python -m autoshard.demo.parameter_server``."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from autoshard import parameter_server
from autoshard.demo import lenet
from autoshard.demo.lenet import BATCH, LEARNING_RATE, LeNet5

STEPS = 200
DIGITS = 2048
HELD_OUT = 360  # digits, the last ones
OPTIMIZER = optax.adamw(LEARNING_RATE)

Batch = tuple[np.ndarray, np.ndarray]


@functools.cache
def data() -> Batch:
    """The digits, drawn once in each process."""
    images, labels = zip(*lenet.batches(DIGITS // BATCH), strict=True)
    return np.concatenate(images), np.concatenate(labels)


def init_params() -> nnx.State:
    """The parameters at first; equal every time."""
    return nnx.state(LeNet5(nnx.Rngs(0)), nnx.Param)


def logits(params: nnx.State, images: jax.Array | np.ndarray) -> jax.Array:
    """Logits ``(n, 10)`` of images ``(n, 32, 32, 1)``."""
    graph = nnx.graphdef(nnx.eval_shape(lambda: LeNet5(nnx.Rngs(0))))
    return nnx.merge(graph, params)(images)


def loss(params: nnx.State, batch: Batch) -> jax.Array:
    """The mean loss of a batch."""
    images, labels = batch
    return optax.softmax_cross_entropy_with_integer_labels(logits(params, images), labels).mean()


def batches(worker: int, workers: int, step: int) -> Batch:
    """A worker's part of the batch of a step; the same whenever it is called."""
    images, labels = data()
    chosen = np.random.default_rng(step).integers(0, len(images) - HELD_OUT, BATCH)[worker::workers]
    return images[chosen], labels[chosen]


def accuracy(params: nnx.State) -> float:
    """The share of held-out digits that are recognised."""
    images, labels = data()
    return float(np.mean(np.argmax(logits(params, images[-HELD_OUT:]), axis=-1) == labels[-HELD_OUT:]))


def one_process(steps: int = STEPS) -> tuple[nnx.State, np.ndarray]:
    """The parameters after a training in this process, and the losses ``(steps,)``."""

    @jax.jit
    def train_step(params: nnx.State, state: optax.OptState, batch: Batch) -> tuple[Any, optax.OptState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, batch)
        updates, state = OPTIMIZER.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params, losses = init_params(), []
    state = OPTIMIZER.init(params)
    for step in range(steps):
        params, state, value = train_step(params, state, batches(0, 1, step))
        losses.append(float(value))
    return params, np.array(losses)


def main() -> None:
    """Prints last losses and accuracies of the three trainings."""
    params, losses = one_process()
    print(f"{'one process':<14} loss {losses[-10:].mean():.3f}  accuracy {accuracy(params):.1%}", flush=True)
    for mode in parameter_server.MODES:
        result = parameter_server.train(jax.value_and_grad(loss), init_params, OPTIMIZER, batches, steps=STEPS, mode=mode)
        print(f"{mode:<14} loss {result.losses[-10:].mean():.3f}  accuracy {accuracy(result.params):.1%}", flush=True)


if __name__ == "__main__":
    from autoshard.demo import parameter_server as module  # what is sent to workers by name, such as `data`, is not of `__main__`

    module.main()
