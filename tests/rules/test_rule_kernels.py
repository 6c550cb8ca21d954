"""Kernels: why a grid axis stays whole, and the work of a call."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from kernel_examples import causal, grouped_gradient, masked, on_cores, piped, running_sum, up_to_itself
from rule_examples import example

import autoshard
from autoshard.rules import grid_of, kernel_of
from autoshard.trace import trace


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
        ("kernel_paged", {1: "write the same blocks"}),
        ("kernel_cross_entropy", {1: "write the same blocks"}),
        ("kernel_state_space", {2: "reads its position"}),
        ("kernel_segment_sum", {0: "scratch memory may pass something"}),
        ("kernel_segment_blocks", {0: "scratch memory may pass something"}),
        ("kernel_between", {}),
        ("kernel_edged", {0: "known when it runs", 1: "not alone in indexing"}),
        ("kernel_neighbours", {0: "scalars are not read one after the other"}),
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


def test_memory_that_is_overwritten_where_a_group_begins_passes_nothing():
    """Heads are split by groups, though nothing is declared parallel and another axis's position is read, where nobody reads the rest."""
    eqn = kernel_in(grouped_gradient, np.ones((4, 4, 3), np.float32))
    kernel = kernel_of(eqn, (1,))
    assert next(factor.kind for factor in kernel.rule.factors if factor.size == 2) == "pass_through"
    assert "grid axis 0" in kernel.whole[0] and len(kernel.whole) == 1
    assert "grid axis 1 is not split, since programs along it write the same blocks" in kernel_of(eqn).whole[1]


def test_kernels_that_copy_by_themselves_are_whole_and_say_so():
    """A pipeline in a kernel is traced without a TPU; it and a kernel on cores are whole, and a note says what that costs."""
    for function, reason in ((piped, "one program"), (on_cores, "cores copy by themselves")):
        x = jax.ShapeDtypeStruct((128, 128), jnp.float32)
        strategy = autoshard.search(lambda x, f=function: f(x), x, cluster="v5e:2x4")
        (note,) = (note for note in strategy.notes if "runs whole on every device" in note)
        assert "kernel_examples.py" in note and "100 % of the work" in note and reason in note and "autoshard.kernel_rule" in note
    assert strategy.cost.flops == 2 * 128**3


def test_a_kernel_whose_blocks_are_too_large_is_told():
    """Blocks that change count twice, others and scratch once: 5 MiB twice in and out, 10 and 6 MiB, of 16 on a v5e and 32 on a v6e."""

    def step(x, table, limit=None):
        def kernel(x, table, o, scratch):
            scratch[...] = jnp.zeros_like(scratch)
            o[...] = x[...] + table[:1] + scratch[:1]

        block, constant = pl.BlockSpec((1280, 1024), lambda i: (i, 0)), pl.BlockSpec((2560, 1024), lambda i: (0, 0))
        scratch, params = [pltpu.VMEM((1536, 1024), x.dtype)], pltpu.CompilerParams(vmem_limit_bytes=limit)
        specs = {"in_specs": [block, constant], "out_specs": block, "out_shape": x, "scratch_shapes": scratch, "compiler_params": params}
        return pl.pallas_call(kernel, grid=(len(x) // 1280,), **specs)(x, table)

    args = [jax.ShapeDtypeStruct((rows, 1024), jnp.float32) for rows in (10240, 2560)]

    def told(cluster, limit=None):
        notes = autoshard.search(lambda x, table: step(x, table, limit), *args, cluster=cluster).notes
        return [note for note in notes if "holds 37.7 MB in the core's own memory" in note and "vmem_limit_bytes" in note]

    assert told("v5e:2x4") and told("v6e:2x4") and not told("v6e:2x4", 40 * 2**20)


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


def test_what_a_position_leaves_out_is_not_work():
    """A branch that ten of sixteen programs take, and a loop as long as a program's position says, count as often as they run."""
    x = np.ones((8, 8), np.float32)
    for function in (causal, up_to_itself):
        assert kernel_of(kernel_in(function, x, x)).matrix_flops == 10 * 2 * 2 * 8 * 2


def test_what_a_constant_mask_leaves_out_is_not_work():
    """Blocks of a mask that is a constant of the program, in a loop and a checkpoint, too; of one that is data all count, which is said."""
    mask, x = jnp.asarray(np.tril(np.ones((4, 4), np.int32))), np.ones((8, 8), np.float32)

    def step(x, mask=mask):
        return jax.lax.scan(jax.checkpoint(lambda h, _: (masked(mask, h, x), None)), x, None, length=3)[0]

    def work(*args):
        graph = trace(step, *args).graph
        (found,) = (op.kernel.matrix_flops for op in graph.walk() if op.kernel)
        return found, len(graph.assumptions)

    assert work(x) == (10 * 2 * 2 * 8 * 2, 0) and work(x, mask) == (16 * 2 * 2 * 8 * 2, 1)


def test_work_that_depends_on_data_is_said_to_be_a_guess():
    """A loop whose length is data counts once, a branch as taken; an estimate of the author's is no guess."""

    def kernel(n, x, o):
        @pl.when(n[0] > 1)
        def _():
            o[...] = jax.lax.while_loop(lambda c: jnp.sum(c) < 9, lambda c: c @ c, x[...])

    def call(n, x, estimate=None):
        specs = [pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec((8, 8), lambda: (0, 0))]
        return pl.pallas_call(kernel, in_specs=specs, out_shape=jax.ShapeDtypeStruct((8, 8), x.dtype), cost_estimate=estimate)(n, x)

    args = np.ones(1, np.int32), np.ones((8, 8), np.float32)
    found = kernel_of(kernel_in(call, *args))
    assert [words.split()[1] for words in found.guessed] == ["branch", "loop"] and found.matrix_flops == 2 * 8**3
    (note,) = trace(call, *args).graph.assumptions
    assert "test_rule_kernels.py" in note and "a loop whose length is not known counts once" in note
    estimate = pl.CostEstimate(flops=1, transcendentals=0, bytes_accessed=1)
    assert not kernel_of(kernel_in(lambda n, x: call(n, x, estimate), *args)).guessed
