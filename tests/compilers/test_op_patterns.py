"""Patterns of ops, each on the smallest program that has it and on one that nearly has it."""

from __future__ import annotations

import doctest
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from profiles import floats

from autoshard.analysis.values import free_values
from autoshard.compilers import op_patterns
from autoshard.compilers.op_patterns import (
    added_to,
    is_call,
    is_one_hot,
    minor,
    recomputes,
    row_updates,
    sliced,
    stands_alone,
    stays_narrow,
    trims,
)
from autoshard.ir import Graph
from autoshard.trace import trace

IMAGES = floats(8, 16, 16, 4)
INDICES = jax.ShapeDtypeStruct((8,), jnp.int32)


def graph_of(fn, *args) -> Graph:
    return trace(fn, *args).graph


def found(graph: Graph, pattern) -> list[str]:
    """The primitives of the ops that a pattern is true of."""
    return [op.primitive for op in graph.walk() if pattern(op)]


def test_only_checkpoints_recompute():
    """The body that a checkpoint's gradient runs again, not the first run, and nothing of a step without one."""

    def loss(w, x):
        return jnp.sin(jnp.sin(x @ w) @ w).sum()

    args = floats(8, 8), floats(4, 8)
    assert found(graph_of(jax.grad(jax.checkpoint(loss)), *args), recomputes)
    assert not found(graph_of(jax.checkpoint(loss), *args), recomputes) and not found(graph_of(jax.grad(loss), *args), recomputes)


@pytest.mark.parametrize(
    ("program", "alone"),
    [
        (lambda x: x @ x, ["dot_general"]),
        (lambda x: jnp.sort(x), ["sort"]),
        (lambda x: jnp.tanh(x).sum(), []),
        (lambda x: x[2:6], []),
        (lambda x: lax.slice_in_dim(x, 0, None, 2, 1), ["slice"]),
        (lambda x: lax.pad(x, 0.0, [(1, 1, 0), (0, 0, 0)]), []),
        (lambda x: lax.pad(x, 0.0, [(0, 0, 1), (0, 0, 0)]), ["pad"]),
    ],
)
def test_products_sorts_and_strides_stand_alone(program, alone):
    """Elementwise ops and reductions are fused, and so are slices and pads whose elements stay next to each other."""
    assert found(graph_of(program, floats(8, 8)), stands_alone) == alone


def test_checkpoints_are_calls_and_loops_are_none():
    """A call's results are its body's own; what a loop or a branch makes is held for it."""
    args = floats(8), jax.ShapeDtypeStruct((), jnp.bool_)

    def program(x, flag):
        x = jax.checkpoint(lambda x: jnp.sin(jnp.sin(x)))(x)
        x, _ = lax.scan(lambda x, _: (jnp.tanh(x), None), x, None, length=3)
        return lax.cond(flag, jnp.exp, jnp.cos, x)

    graph = graph_of(program, *args)
    assert [is_call(op) for op in graph.ops if op.bodies] == [True, False, False]


@pytest.mark.parametrize(
    ("program", "position"),
    [
        (lambda x, y, at: jnp.sin(x) + jnp.zeros_like(x).at[at].add(y), 0),
        (lambda x, y, at: jnp.zeros_like(x).at[at].add(y) + jnp.sin(x), 1),
        (lambda x, y, at: jnp.sin(x) + jnp.sin(x).at[at].add(y), None),  # not into zeros
        (lambda x, y, at: (s := jnp.sin(x)) * (s + jnp.zeros_like(x).at[at].add(y)), None),  # the summand has another reader
    ],
)
def test_a_scatter_into_zeros_that_is_only_added_is_a_scatter_into_the_summand(program, position):
    """Which of the two summands it goes into, and by which scatter; nothing where either is read by anyone else."""
    graph = graph_of(program, floats(8, 4), floats(8, 4), INDICES)
    made = added_to(graph, free_values(graph))
    ops = graph.walk()
    assert [(ops[op].primitive, place, ops[scatter].primitive) for op, (place, scatter) in made.items()] == (
        [] if position is None else [("add", position, "scatter-add")]
    )


@pytest.mark.parametrize(
    ("update", "shared"),
    [
        (lambda w, g: jnp.maximum(w - g, 0.0), True),
        (lambda w, g: w - jnp.where(jnp.isfinite(g), g, 0.0), True),
        (lambda w, g: w + g, True),
        (lambda w, g: w - jnp.sqrt(g * g + 0.0), False),
        (lambda w, g: w - jnp.where(g > 1.0, g, 1.0), False),
    ],
)
def test_an_update_shares_the_zeros_that_rows_are_added_to(update, shared):
    """If it compares with them or selects them, or if it only adds the sum; adding 0 is simplified away."""
    graph = graph_of(lambda w, places, rows: update(w, jnp.zeros((32, 4)).at[places].add(rows)), floats(32, 4), INDICES, floats(8, 4))
    found = row_updates(graph)
    assert ([*found.values()] == [(graph.arguments[0],)]) == shared and bool(found) == shared


def test_zeros_do_not_connect_updates():
    """An argument that is compared with the same zeros, elsewhere, is no part of the update."""

    def step(w, v, places, rows):
        zeros = jnp.zeros((32, 4))
        return jnp.maximum(w - zeros.at[places].add(rows), zeros), jnp.maximum(v, zeros)

    graph = graph_of(step, floats(32, 4), floats(32, 4), INDICES, floats(8, 4))
    assert [*row_updates(graph).values()] == [(graph.arguments[0],)]


@pytest.mark.parametrize(("kept", "narrower"), [(1024, True), (1000, True), (512, False)])
def test_a_slice_that_leaves_little_out_of_a_product_is_its_own_affair(kept, narrower):
    """At least fifteen sixteenths of a product's result are kept, and nothing else reads it."""
    args = floats(128, 64), floats(64, 1024)
    assert bool(trims(graph_of(lambda x, w: lax.slice_in_dim(x @ w, 0, kept - 1, axis=1), *args))) == narrower
    assert not trims(graph_of(lambda x, w: ((y := x @ w) * 2, lax.slice_in_dim(y, 0, kept - 1, axis=1)), *args))


def test_one_number_a_row_is_compared_not_scattered():
    """The gradient of picking one logit a row is one-hot; looking rows up in a table, and counting, are scatters."""
    logits, table = floats(8, 32), floats(32, 16)
    picked = graph_of(jax.grad(lambda x, at: jnp.take_along_axis(x, at[:, None], 1).sum()), logits, INDICES)
    looked_up = graph_of(jax.grad(lambda x, at: x[at].sum()), table, INDICES)
    counted = graph_of(lambda x, at: x.at[at].add(1.0), floats(32), INDICES)
    assert found(picked, lambda op: is_one_hot(op, picked.values)) == ["scatter-add"]
    for graph in (looked_up, counted):
        assert not found(graph, lambda op, values=graph.values: is_one_hot(op, values))


@pytest.mark.parametrize(("expression", "narrow"), [("bqhgk,bshk->bhgqs", True), ("bqhk,bshk->bhqs", False), ("qgk,sk->qgs", True)])
def test_scores_without_groups_are_kept_wide(expression, narrow):
    """Not scores of queries of several heads that share keys, nor products without a batch."""
    left, right = (floats(*[4] * len(part)) for part in expression.split("->")[0].split(","))
    graph = graph_of(lambda q, k: jnp.einsum(expression, q, k), left, right)
    (product,) = (op for op in graph.walk() if op.primitive == "dot_general")
    assert stays_narrow(product, graph.values) is narrow


@pytest.mark.parametrize(
    ("program", "kept", "again"),
    [
        (lambda y: jnp.tanh(y[:4]) * y[4:], True, False),
        (lambda y: jnp.tanh(y[:4]), False, False),
        (lambda y: jnp.tanh(y[::2]), True, False),
    ],
)
def test_what_is_sliced_twice_or_with_strides(program, kept, again):
    """A computed value of which two slices, or one with strides, are read; compilers that compute it twice keep none of these."""
    graph = graph_of(lambda x: program(jnp.exp(x)), floats(8, 8))
    (made,) = (value for op in graph.walk() if op.primitive == "exp" for value in op.results)
    assert (made in sliced(graph, False), made in sliced(graph, True)) == (kept, again)


def test_images_have_batch_and_features_innermost():
    """What a convolution reads and makes, and what is computed of that; a kernel has its features, and a plain product wants nothing."""

    def program(x, kernel, w):
        y = lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        return jnp.tanh(y), jnp.sin(w) @ w

    graph = graph_of(program, IMAGES, floats(3, 3, 4, 4), floats(8, 8))
    wanted, (images, kernel, weight) = minor(graph), graph.arguments
    assert wanted[images] == wanted[graph.results[0]] == ((0,), (3,))
    assert wanted[kernel] == ((3,), (2,)) and wanted[weight] is None and wanted[graph.results[1]] is None


def test_batched_products_have_their_own_dimensions_innermost():
    """Rows and columns of the matrices, on operands, result and what is computed of that; not the batch, wherever it stands."""
    graph = graph_of(lambda q, k: jnp.tanh(jnp.einsum("qbd,kbd->bqk", q, k)), floats(16, 4, 8), floats(32, 4, 8))
    wanted, (left, right) = minor(graph), graph.arguments
    (product,) = (op for op in graph.walk() if op.primitive == "dot_general")
    assert set(wanted[left]) == {(0,), (2,)} == set(wanted[right])
    assert set(wanted[product.results[0]]) == {(1,), (2,)} == set(wanted[graph.results[0]])


def test_what_is_printed_of_batched_products_changes_nothing():
    """An operation without results, such as `jax.debug.print`, spreads no dimensions."""

    def product(q, k, prints):
        scores = jnp.einsum("bqd,bkd->bqk", q, k)
        if prints:
            jax.debug.print("{x} {mean}", x=scores, mean=scores.mean())
        return jnp.tanh(scores)

    shown, quiet = (graph_of(partial(product, prints=prints), floats(4, 16, 8), floats(4, 32, 8)) for prints in (True, False))
    assert [minor(shown)[value] for value in shown.arguments] == [minor(quiet)[value] for value in quiet.arguments] != [None, None]


def test_examples_in_the_docstrings_hold():
    """The examples hold."""
    assert not doctest.testmod(op_patterns).failed


@pytest.mark.parametrize("axes", [(1,), (1, 2)])
def test_transforms_whose_frequencies_are_multiplied_have_batch_and_features_innermost(axes):
    """Through transposes and slices between a transform and a batched product; other transforms have any order."""

    def program(x, weights, multiplied):
        made = jnp.fft.rfftn(x, axes=axes)
        low = made[(slice(None), *(slice(4),) * len(axes))]
        return jnp.einsum("b...i,...io->b...o", low, weights) if multiplied else low * 2

    x, weights = floats(16, *(32,) * len(axes), 8), jax.ShapeDtypeStruct((*(4,) * len(axes), 8, 8), jnp.complex64)
    for multiplied in (True, False):
        graph = graph_of(partial(program, multiplied=multiplied), x, weights)
        *_, last = (op for op in graph.walk() if op.primitive == "fft")
        dims, shape = minor(graph)[last.results[0]], graph.values[last.results[0]].shape
        assert (dims is not None and {shape[dim] for group in dims for dim in group} == {16, 8}) == multiplied
