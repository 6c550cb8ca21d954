"""Copies of tables whose rows are looked up or added to: which tables are copied, and what XLA:TPU's schedules say that takes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from profiles import MESH, facts_of, floats

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.judge.model import CostModel

V5E = Cluster.parse("v5e:2x4")
NOWHERE = ((-1, -1),)


def places(n):
    return jax.ShapeDtypeStruct((n,), jnp.int32)


def copied(fn, *args, on=V5E):
    """Per op that copies tables, its primitive and the milliseconds that its copies add."""
    facts = facts_of(fn, *args, compiler=compiler_of(on))
    model = CostModel(on, MESH)
    by_rows = [op for op in facts.graph.walk() if facts.traffic[op.index].by_rows]
    return [(op.primitive, 1e3 * op.trips * model._row_seconds(facts, op, NOWHERE)) for op in by_rows]


@pytest.mark.parametrize(
    ("rows", "width", "cycles"),
    [(1 << 20, 8, 1842810), (1 << 20, 32, 2166480), (1 << 20, 64, 2584576), (1 << 15, 8, 13548), (1 << 15, 64, 32256)],
)
@pytest.mark.parametrize("itemsize", [2, 4])
def test_a_copy_takes_what_the_schedule_says(rows, width, cycles, itemsize):
    """Of tables in the device's memory within 5 %, in the core's own within a fifth, in float32 as in bfloat16 (v5e, libtpu 0.0.52)."""
    nbytes = compiler_of(V5E).row_bytes((float(rows), float(width)), itemsize, itemsize, rows / 16)
    near = rows == 1 << 15
    assert nbytes / V5E.device.memory_rate * 1.5e9 == pytest.approx(cycles, rel=0.2 if near else 0.05)


@pytest.mark.parametrize(("width", "number"), [(64, 2), (128, 0), (256, 0)])
def test_rows_of_whole_tiles_are_not_copied(width, number):
    """A table of 64 numbers a row is copied to be looked up, and the gradient copied back; others are in rows anyway."""

    def gradient(table, places, y):
        return jax.grad(lambda table: (jnp.sin(table[places]) * y).sum())(table)

    found = copied(gradient, floats(1 << 20, width), places(65536), floats(65536, width))
    assert [name for name, time in found if time] == ["gather", "scatter-add"][:number]


@pytest.mark.parametrize(("rows", "width", "fewest"), [(700_000, 48, 1823), (400_000, 20, 1355), (800_000, 40, 2291), (1_000_000, 8, 3906)])
def test_few_rows_are_added_to_a_large_table_where_it_is(rows, width, fewest):
    """A row for each 30 tiles that a copy would waste is worth it: 1,823 into 700,000 of 48 (libtpu 0.0.52); small tables always."""

    def nbytes(rows, added):
        return compiler_of(V5E).row_bytes((float(rows), float(width)), 4, 4, added)

    assert nbytes(rows, 0.97 * fewest) == 0 < nbytes(rows, 1.03 * fewest)
    assert nbytes(rows // 4, 64.0) > 0


def test_rows_that_are_not_sorted_are_added_to_zeros_in_rows():
    """16,384 of a million rows of 8: XLA:TPU fills 2^20 rows of whole tiles in 2.95 million cycles; 65,536 rows are sorted instead."""
    few, many = (compiler_of(V5E).row_bytes((float(1 << 20), 8.0), 4, 4, added) for added in (16384.0, 65536.0))
    assert (few - many) / V5E.device.memory_rate * 1.5e9 == pytest.approx(2951200 - 184480, rel=0.1)


def test_a_table_is_copied_once():
    """For two lookups, and for a loop of lookups, as for one; numbers of which rows are slices are not copied."""
    table, where = floats(1 << 20, 64), places(512)
    ((_, once),) = copied(lambda t, a: t[a].sum(0), table, where)
    assert copied(lambda t, a, b: t[a].sum(0) + t[b].sum(0), table, where, places(256)) == [("gather", once)]
    loop = jax.ShapeDtypeStruct((8, 512), jnp.int32)
    assert copied(lambda t, a: jax.lax.map(lambda a: t[a].sum(0), a), table, loop) == [("gather", pytest.approx(once))]
    assert copied(lambda t, a: t[a, a].sum(0), table, where) == []


@pytest.mark.parametrize(("rounded", "share"), [(False, 1.0), (True, 0.31)])
def test_tables_are_rounded_before_they_are_copied(rounded, share):
    """Rows of float32 of which products read bfloat16 alone are copied as such, here into the core's own memory."""
    table = floats(300_000, 24)
    ((_, whole),) = copied(lambda t, a: t[a].sum(0), table, places(512))
    ((_, time),) = copied(lambda t, a, w: t[a] @ w if rounded else t[a].sum(0) * w[:, 0], table, places(512), floats(24, 24))
    assert time / whole == pytest.approx(share, rel=0.05)


def test_how_much_tiles_waste_counts_before_tables_are_rounded():
    """500,000 rows of 48 float32 would waste 160 MB in tiles, and are not copied, although half of that would do (libtpu 0.0.52)."""
    assert copied(lambda t, a, w: t[a] @ w, floats(500_000, 48), places(512), floats(48, 24)) == [("gather", 0.0)]


def test_computed_tables_are_made_in_rows():
    """Neither nodes' features that are computed, nor their sums over edges, nor the gradients of both are copied."""

    def program(w, x, senders, receivers):
        return jax.grad(lambda w: (jax.ops.segment_sum((x @ w)[senders], receivers, 60_000) ** 2).sum())(w)

    assert copied(program, floats(32, 32), floats(60_000, 32), places(240_000), places(240_000)) == []


def test_other_targets_copy_nothing():
    """GPUs and CPUs read and add to rows where they are."""
    for cluster in ("h100:8", "cpu:8"):
        assert copied(lambda t, a: t.at[a].add(1.0), floats(1 << 20, 64), places(512), on=Cluster.parse(cluster)) == []
