"""A small decoder-only transformer in Flax NNX, a byte-level language model of Python's documentation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

VOCABULARY = 256  # bytes
LAYERS = 2
WIDTH = 128
HEADS = 4
LENGTH = 128  # tokens of a sequence
BATCH = 16
LEARNING_RATE = 3e-3


class Block(nnx.Module):
    """Causal attention and a two-layer network, each normalised before and added to its input."""

    def __init__(self, rngs: nnx.Rngs, width: int, heads: int):
        self.norm1 = nnx.LayerNorm(width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(heads, width, decode=False, rngs=rngs)
        self.norm2 = nnx.LayerNorm(width, rngs=rngs)
        self.up = nnx.Linear(width, 4 * width, rngs=rngs)
        self.down = nnx.Linear(4 * width, width, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    """Embeddings, blocks, and a head over the bytes."""

    def __init__(self, rngs: nnx.Rngs, layers: int = LAYERS, width: int = WIDTH, heads: int = HEADS, length: int = LENGTH):
        self.tokens = nnx.Embed(VOCABULARY, width, rngs=rngs)
        self.positions = nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(rngs, width, heads) for _ in range(layers)])
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.head = nnx.Linear(width, VOCABULARY, use_bias=False, rngs=rngs)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Logits ``(batch, length, 256)`` of the token after each."""
        x = self.tokens(tokens) + self.positions(jnp.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def init(**sizes: int) -> tuple[GPT, nnx.Optimizer]:
    """A new model, of the sizes of `GPT`, and its optimizer; equal every time."""
    model = GPT(nnx.Rngs(0), **sizes)
    return model, nnx.Optimizer(model, optax.adamw(LEARNING_RATE), wrt=nnx.Param)


def train_step(model: GPT, optimizer: nnx.Optimizer, tokens: jax.Array, targets: jax.Array) -> jax.Array:
    """The loss of predicting each target from the tokens up to it; updates the model and the optimizer."""

    def loss(model: GPT) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens), targets).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def example() -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Tokens and targets ``(batch, length) int32``, abstract."""
    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH), jnp.int32)
    return tokens, tokens


def arguments() -> tuple[Any, ...]:
    """The arguments of `train_step`, abstract."""
    return *nnx.eval_shape(init), *example()


def gpt_2_arguments() -> tuple[Any, ...]:
    """As `arguments`, abstract, of a model of GPT-2's sizes: a search for many devices has something to divide."""
    tokens = jax.ShapeDtypeStruct((64, 1024), jnp.int32)
    return *nnx.eval_shape(lambda: init(layers=12, width=768, heads=12, length=1024)), tokens, tokens


def batches(steps: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random pieces of the text and the byte after each of theirs, ``(batch, length) int32``; equal every time."""
    text = np.frombuffer(corpus(), dtype=np.uint8).astype(np.int32)
    generator = np.random.default_rng(0)
    for _ in range(steps):
        starts = generator.integers(0, len(text) - LENGTH - 1, BATCH)[:, None] + np.arange(LENGTH)
        yield text[starts], text[starts + 1]


def corpus() -> bytes:
    """The text of ``help()``'s topics, about 500 kB of English that is part of every CPython."""
    from pydoc_data.topics import topics  # delayed: slow to load, and only training reads it

    return "\n\n".join(topics[name] for name in sorted(topics)).encode("utf-8")
