"""LeNet-5 (LeCun et al., 1998) in Flax NNX on digits that are drawn here: shifted, bold or thin, and noisy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

SIDE = 32  # pixels
CLASSES = 10
BATCH = 64
LEARNING_RATE = 3e-3
SCALE = 4  # pixels of a dot
DOTS = (
    "01110 10001 10011 10101 11001 10001 01110",
    "00100 01100 00100 00100 00100 00100 01110",
    "01110 10001 00001 00110 01000 10000 11111",
    "11111 00010 00100 00010 00001 10001 01110",
    "00010 00110 01010 10010 11111 00010 00010",
    "11111 10000 11110 00001 00001 10001 01110",
    "00110 01000 10000 11110 10001 10001 01110",
    "11111 00001 00010 00100 01000 01000 01000",
    "01110 10001 10001 01110 10001 10001 01110",
    "01110 10001 10001 01111 00001 00010 01100",
)  # each digit in 7 rows of 5 dots


class LeNet5(nnx.Module):
    """Two convolutions with average pooling, three dense layers, tanh between them."""

    def __init__(self, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 6, (5, 5), padding="VALID", rngs=rngs)
        self.conv2 = nnx.Conv(6, 16, (5, 5), padding="VALID", rngs=rngs)
        self.dense1 = nnx.Linear(5 * 5 * 16, 120, rngs=rngs)
        self.dense2 = nnx.Linear(120, 84, rngs=rngs)
        self.head = nnx.Linear(84, CLASSES, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits ``(batch, 10)`` of images ``(batch, 32, 32, 1)``."""
        x = nnx.avg_pool(nnx.tanh(self.conv1(images)), (2, 2), strides=(2, 2))
        x = nnx.avg_pool(nnx.tanh(self.conv2(x)), (2, 2), strides=(2, 2))
        x = nnx.tanh(self.dense1(x.reshape(x.shape[0], -1)))
        return self.head(nnx.tanh(self.dense2(x)))


def init() -> tuple[LeNet5, nnx.Optimizer]:
    """A new model and its optimizer; equal every time."""
    model = LeNet5(nnx.Rngs(0))
    return model, nnx.Optimizer(model, optax.adamw(LEARNING_RATE), wrt=nnx.Param)


def train_step(model: LeNet5, optimizer: nnx.Optimizer, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The loss on a batch of images; updates the model and the optimizer."""

    def loss(model: LeNet5) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def example() -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Images ``(batch, 32, 32, 1) float32`` and labels ``(batch,) int32``, abstract."""
    return jax.ShapeDtypeStruct((BATCH, SIDE, SIDE, 1), np.float32), jax.ShapeDtypeStruct((BATCH,), np.int32)


def arguments() -> tuple[Any, ...]:
    """The arguments of `train_step`, abstract."""
    return *nnx.eval_shape(init), *example()


def batches(steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random images ``(batch, 32, 32, 1) float32`` in [0, 1] with their labels ``(batch,) int32``; equal every time."""
    generator = np.random.default_rng(0)
    for _ in range(steps):
        labels = generator.integers(0, CLASSES, BATCH).astype(np.int32)
        yield np.stack([drawn(int(label), generator) for label in labels]), labels


def drawn(digit: int, generator: np.random.Generator) -> np.ndarray:
    """An image ``(32, 32, 1) float32`` in [0, 1] of a digit, at a random place, as bright and as noisy as chance has it."""
    dots = np.array([[int(dot) for dot in row] for row in DOTS[digit].split()], np.float32)
    pixels = np.kron(dots, np.ones((SCALE, SCALE), np.float32))
    image = np.zeros((SIDE, SIDE), np.float32)
    top, left = (int(generator.integers(0, SIDE - n + 1)) for n in pixels.shape)
    image[top : top + pixels.shape[0], left : left + pixels.shape[1]] = pixels * generator.uniform(0.6, 1.0)
    return np.clip(image + generator.normal(0.0, 0.1, image.shape), 0.0, 1.0)[..., None].astype(np.float32)
