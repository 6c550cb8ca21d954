"""Traffic of ops where no compiler's kernels are known: operands and results in memory, each once."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from profiles import facts_of, floats

from autoshard.compilers.traffic import sent_by_op, traffic_by_op, widened_bytes


def moved(fn, *args):
    """Per op its primitive, and the bytes of each tensor that it moves, operands counted first."""
    facts = facts_of(fn, *args)
    found = traffic_by_op(facts.graph, facts.fusion)
    assert all(traffic.starts == 1 for traffic in found if traffic.tensors)
    return {op.primitive: dict(traffic.tensors) for op, traffic in zip(facts.graph.walk(), found, strict=True)}


def test_an_op_moves_what_is_in_memory():
    """A product reads both matrices and writes its result; a value inside a fusion moves with nobody."""
    found = moved(lambda x, w: jnp.exp(jnp.sin(x @ w)), floats(64, 32), floats(32, 16))
    assert found["dot_general"] == {0: 64 * 32 * 4, 1: 32 * 16 * 4}
    assert found["sin"] == {} and found["exp"] == {1: 64 * 16 * 4}  # an epilogue: the product's kernel writes it


def test_a_lookup_reads_what_it_takes():
    """Of a table the rows that are found, not all of them."""
    found = moved(lambda table, rows: table[rows], floats(1024, 16), jax.ShapeDtypeStruct((8,), jnp.int32))
    assert found["gather"][2] == 8 * 16 * 4 and 1024 * 16 * 4 not in found["gather"].values()


def test_loops_move_what_their_bodies_move():
    """The op itself moves nothing."""
    found = moved(lambda x: jax.lax.scan(lambda c, x: (c + x, None), x[0], x)[0], floats(8, 64))
    assert found["scan"] == {} and found["add"]


def test_narrow_results_pass_through_wide_buffers():
    """What is narrower than the buffer costs the buffer's bytes too."""
    assert [widened_bytes(itemsize, 4) for itemsize in (1, 2, 4, 8)] == [4, 4, 0, 0] and widened_bytes(2, 0) == 0


def test_what_is_computed_as_it_is_read_is_stored_once_to_be_sent():
    """Of two convolutions that may send parts of one fused operand the first stores it: it is written and read, wider if buffers are."""

    def program(x, kernel):
        y = jnp.exp(x)
        return [lax.conv_general_dilated(y, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")) for k in (kernel, 2 * kernel)]

    facts = facts_of(program, floats(8, 16, 16, 4), floats(3, 3, 4, 4))
    first, second = (op for op in facts.graph.walk() if op.primitive == "conv_general_dilated")
    nbytes = 8 * 16 * 16 * 4 * 4
    assert sent_by_op(facts.graph, facts.fusion, [(first, [0]), (second, [0])], 0) == {first.index: ((0, 2 * nbytes),)}
    assert sent_by_op(facts.graph, facts.fusion, [(second, [0])], 8) == {second.index: ((0, 4 * nbytes),)}
    assert sent_by_op(facts.graph, facts.fusion, [(first, [1])], 0) == {}  # the kernel is stored anyway
