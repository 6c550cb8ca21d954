"""LeNet-5 (LeCun et al., 1998) in Flax NNX on scikit-learn's 1,797 handwritten digits."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import numpy as np
import optax
from flax import nnx

from autoshard.errors import AutoshardError

SIDE = 32  # pixels; the digits have 8 x 8, enlarged four times
CLASSES = 10
BATCH = 64
LEARNING_RATE = 3e-3


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


def arguments() -> tuple:
    """The arguments of `train_step`, abstract."""
    return *nnx.eval_shape(init), *example()


def batches(steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random images ``(batch, 32, 32, 1) float32`` in [0, 1] with their labels ``(batch,) int32``; equal every time."""
    images, labels = digits()
    generator = np.random.default_rng(0)
    for _ in range(steps):
        chosen = generator.integers(0, len(images), BATCH)
        yield images[chosen], labels[chosen]


def digits() -> tuple[np.ndarray, np.ndarray]:
    """All images ``(1797, 32, 32, 1) float32`` and labels ``(1797,) int32``.

    Raises:
        AutoshardError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits  # an optional dependency
    except ImportError:
        raise AutoshardError(
            "the LeNet demo reads the digits that scikit-learn ships, and scikit-learn is not installed. "
            "Install it with: pip install 'autoshard[demo]'."
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    images = np.kron(np.reshape(pixels, (-1, 8, 8)) / 16, np.ones((1, SIDE // 8, SIDE // 8)))
    return images[..., None].astype(np.float32), np.asarray(labels, np.int32)
