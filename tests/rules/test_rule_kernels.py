"""Kernels: why a grid axis stays whole, and the work of a call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernel_examples import running_sum
from rule_examples import example

from autoshard.rules import grid_of, kernel_of


def kernel_in(function, *args):
    """The equation of the one kernel of a function."""
    (eqn,) = (eqn for eqn in jax.make_jaxpr(function)(*args).eqns if eqn.primitive.name == "pallas_call")
    return eqn


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("kernel_attention", {}),
        ("kernel_grouped_sum", {1: "write the same blocks"}),
        ("kernel_product", {2: "write the same blocks"}),
        ("kernel_running_sum", {0: "reads its position", 1: "scratch memory"}),
        ("kernel_numbered", {0: "reads its position"}),
        ("kernel_chosen", {}),
        ("kernel_skewed", {0: "not alone in indexing", 1: "not alone in indexing"}),
    ],
)
def test_an_axis_that_stays_whole_says_why(name, reasons):
    """The axes that cannot be split are those, each with its reason."""
    found = grid_of(example(name).params).whole
    assert found.keys() == reasons.keys()
    assert all(reason in found[axis] for axis, reason in reasons.items())


def test_a_declared_parallel_axis_carries_nothing():
    """Scratch memory keeps an axis whole only where the kernel does not declare it parallel."""
    x = np.ones((4, 4), np.float32)

    def summed(declared):
        params = dict(kernel_in(running_sum, x).params)
        return params | {"compiler_params": pltpu.CompilerParams(dimension_semantics=declared)}

    assert 1 in grid_of(summed(("arbitrary", "arbitrary"))).whole
    assert 1 not in grid_of(summed(("arbitrary", "parallel"))).whole


def products(number, estimate=None):
    """A kernel of so many products of 8 x 8 matrices, for each of four programs."""

    def kernel(x, y):
        for _ in range(number):
            x[0] = x[0] @ x[0]
        y[0] = jnp.exp(x[0])

    block = pl.BlockSpec((1, 8, 8), lambda i, j: (i, 0, 0))
    made = jax.ShapeDtypeStruct((4, 8, 8), jnp.float32)
    return kernel_in(
        lambda x: pl.pallas_call(kernel, grid=(4, 3), in_specs=[block], out_specs=block, out_shape=made, cost_estimate=estimate)(x),
        np.ones((4, 8, 8), np.float32),
    )


def test_the_work_is_that_of_one_program_times_their_number():
    """Products and other operations count in each program; a block moves once while its index stays the same."""
    one, many = (kernel_of(products(number)) for number in (1, 5))
    assert (one.matrix_flops, many.matrix_flops) == (12 * 2 * 8**3, 5 * 12 * 2 * 8**3)
    assert one.vector_flops == many.vector_flops == 12 * 8**2
    assert one.nbytes == 2 * 4 * 8 * 8 * 4 and one.dtype == "float32"


def test_a_cost_estimate_replaces_the_count():
    """What the author of a kernel says of its work is what counts."""
    found = kernel_of(products(1, pl.CostEstimate(flops=1000, transcendentals=10, bytes_accessed=7)))
    assert (found.matrix_flops, found.vector_flops, found.nbytes) == (1000, 10, 7)
