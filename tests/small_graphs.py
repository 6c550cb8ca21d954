"""Random small programs, each with few enough assignments to try them all."""

from __future__ import annotations

import random
from functools import cache

import jax
import jax.numpy as jnp

SIZES = (4, 8, 12, 16, 32)  # 12: not every axis divides every dimension


@cache
def random_small(seed: int):
    """A random program of products, sums and elementwise operations over two to four matrices, and its arguments; some are gradients."""
    rng = random.Random(seed)
    dims = [rng.choice(SIZES) for _ in range(4)]
    shapes = [(rng.choice(dims), rng.choice(dims)) for _ in range(rng.randint(2, 4))]
    picks = [rng.random() for _ in range(16)]
    n_products = rng.randint(1, 2)

    def program(*matrices):
        draws = iter(picks)
        value = matrices[0]
        left = n_products
        for matrix in matrices[1:]:
            if left and value.shape[1] in matrix.shape:
                value, left = value @ (matrix if matrix.shape[0] == value.shape[1] else matrix.T), left - 1
            elif value.shape == matrix.shape:
                value = value * matrix
            elif value.shape[0] == matrix.shape[0]:
                value = value + matrix.sum(1)[:, None]
            else:
                value = value + matrix.mean()
            if next(draws) < 0.4:
                value = jnp.tanh(value)
            if next(draws) < 0.2:
                value = value.T
        return value

    args = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)
    if rng.random() < 0.3:
        return (lambda first, *rest: first - 0.1 * jax.grad(lambda w: (program(w, *rest) ** 2).sum())(first)), args
    return program, args
