"""Products on the vector unit: hand examples in and out of loops, and of the stacks of loops that have no others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from autoshard.analysis.vector_products import is_on_matrix_unit
from autoshard.compilers.op_patterns import sliced_alone
from autoshard.trace import trace

ROWS, STATE = jax.ShapeDtypeStruct((6, 4, 16), jnp.float32), jax.ShapeDtypeStruct((4, 16, 16), jnp.float32)


def on_matrix_unit(graph):
    """Which of a program's products are."""
    return [is_on_matrix_unit(graph, op) for op in graph.walk() if op.primitive in ("dot_general", "conv_general_dilated")]


def in_a_loop(spec):
    """A product for each slice of some rows with a carried state."""
    return lambda rows, state: jax.lax.scan(lambda state, row: (state * 0.9, jnp.einsum(spec, row, state)), state, rows)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda rows, state: rows[0] @ state[0], [True]),
        (lambda rows, state: rows[0, 0] @ state[0], [False]),
        (lambda rows, state: state[0] @ rows[0, 0][:, None], [False]),
        (lambda rows, state: jnp.einsum("bk,bkv->bv", rows[0], state), [True]),
        (lambda rows, state: jnp.einsum("bk,bv->bkv", rows[0], rows[1]), [False]),
        (in_a_loop("bk,bkv->bv"), [False]),
        (in_a_loop("bk,bvk->bv"), [False]),
        (in_a_loop("bk,ckv->bcv"), [True]),
    ],
)
def test_vectors_are_multiplied_on_the_vector_unit(function, expected):
    """Single vectors, outer products, and batches of vectors in loops are; several rows and batches elsewhere are not."""
    assert on_matrix_unit(trace(function, ROWS, STATE).graph) == expected


@pytest.mark.parametrize(("spec", "alone"), [("bk,bkv->bv", True), ("bk,ckv->bcv", False)])
def test_stacks_of_loops_with_vectors_alone_keep_their_order(spec, alone):
    """What a loop reads slices of is laid out for products of matrices, and not for those with vectors."""
    graph = trace(in_a_loop(spec), ROWS, STATE).graph
    assert (graph.arguments[0] in sliced_alone(graph)) == alone
