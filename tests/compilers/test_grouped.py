"""Grouped products cost what compilers make of them: of all groups, or of blocks of rows, and with the rows that are stored for each."""

from __future__ import annotations

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import autoshard
from benchmarks.evidence.programs import PROGRAMS
from benchmarks.evidence.rows import read_rows
from tests.programs import abstract

ROWS = read_rows()
COUNTED = {
    name: figure
    for row in ("blocks of grouped products", "rows stored for each group")
    for name, figure in ROWS[row].expected.items()
    if PROGRAMS[name].measure.name.startswith("times")
}
PEAKS = {name: figure for name, figure in ROWS["rows stored for each group"].expected.items() if name.endswith("in memory")}
WORK = 2 * 4096 * 1024 * 2048  # of each row with its group's matrix


@cache
def cost_of(name):
    """The predicted cost of a program of the evidence."""
    program = PROGRAMS[name]
    return autoshard.search(program.function, *program.args, cluster=program.on, balance=100.0).cost


@pytest.mark.sample(5)
@pytest.mark.parametrize("name", COUNTED)
def test_work_is_what_the_compiled_program_counts(name):
    """And what is done of it is a part of that where a kernel skips blocks of rows, of which several groups' are computed again."""
    times, _, skips = str(COUNTED[name]).partition(", ")
    cost = cost_of(name)
    assert cost.compiled_flops / WORK == pytest.approx(float(times), rel=1e-3)
    assert 1 < cost.flops / WORK < 1.5 if skips else cost.flops == cost.compiled_flops


@pytest.mark.parametrize("name", PEAKS)
def test_rows_of_each_group_are_in_memory(name):
    assert cost_of(name).peak_bytes / 2**20 == pytest.approx(PEAKS[name], rel=0.1)


def step(weights, x, sizes):
    """Two products and an update, whose gradients read the same rows as they do."""

    def loss(p):
        hidden = jax.nn.gelu(lax.ragged_dot(x, p[0].astype(x.dtype), sizes))
        return jnp.mean(lax.ragged_dot(hidden, p[1].astype(x.dtype), sizes).astype(jnp.float32) ** 2)

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


STEP = [abstract((8, 1024, 4096)), abstract((8, 4096, 1024))], jax.ShapeDtypeStruct((8192, 1024), "bfloat16"), abstract((8,), "int32")


@pytest.mark.sample(1)
@pytest.mark.parametrize(("cluster", "compiled"), [("h100:1", 1636), ("v5p:1x1x1", 528)])
def test_what_is_stored_lives_until_gradients_have_read_it(cluster, compiled):
    """The peak in MiB, as the compilers say (libtpu 0.0.52, jax-cuda12-plugin 0.10.2)."""
    found = autoshard.search(step, *STEP, cluster=cluster, donate_argnums=0, balance=100.0).cost.peak_bytes
    assert found / 2**20 == pytest.approx(compiled, rel=0.1)


def test_batches_of_groups_are_products_as_any():
    """Where groups are batches, each is a product of its own."""
    groups = lax.RaggedDotDimensionNumbers((((2,), (1,)), ((0,), (0,))), (0,), ())
    args = abstract((8, 64, 32)), abstract((8, 32, 16)), jax.ShapeDtypeStruct((8,), "int32")
    found = autoshard.search(lambda x, w, n: lax.ragged_dot_general(x, w, n, groups), *args, cluster="h100:1").cost
    assert found.flops == found.compiled_flops == 2 * 8 * 64 * 32 * 16
