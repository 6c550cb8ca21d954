"""Readers of values, expansions of constants, and what loops only add up."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from programs import PROGRAMS, abstract

from autoshard.analysis.values import accumulators, free_values, readers_of
from autoshard.trace import trace


@pytest.mark.parametrize("program", ["mlp", "gpt_scan", "control_flow"])
def test_readers_are_the_ops_that_read(program):
    """Each reader is listed once and in program order; control flow reads what flows into its bodies."""
    fn, args = PROGRAMS[program]()
    graph = trace(fn, *args).graph
    found = readers_of(graph)
    assert all(readers == sorted(set(readers)) for readers in found)
    for op in graph.walk():
        flows = {flow.value for holder in op.holders for flow in holder.sources}
        assert {value for value, readers in enumerate(found) if op.index in readers} == {*op.operands, *flows}


@pytest.mark.parametrize(
    ("program", "free"),
    [
        (lambda x: jnp.arange(8.0) * 2 + 1, True),
        (lambda x: jnp.broadcast_to(jnp.arange(8.0)[:, None], (8, 8)).T, True),
        (lambda x: x * 2, False),
        (lambda x: x + jnp.arange(8.0), False),
        (lambda x: jnp.sort(jnp.arange(8.0)), False),  # which nobody computes again
        (lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y + 1, jnp.arange(8.0)), False),
    ],
)
def test_expansions_of_constants_are_free(program, free):
    """What is elementwise, or moved, of constants alone; not what arguments are in, what is computed once, or what a loop makes."""
    graph = trace(program, abstract((8,))).graph
    assert free_values(graph)[graph.results[0]] is free
    assert not any(free_values(graph)[value] for value in graph.arguments)


def test_what_enters_a_loop_is_free_where_it_is_outside():
    """If it is said what enters it: a mask that each trip reads, and what the trip makes of it alone."""
    graph = trace(lambda x: jax.lax.scan(lambda c, y: (c, y + jnp.cos(c)), jnp.arange(8.0), x)[1], abstract((3, 8))).graph
    (loop,) = (op for op in graph.ops if op.bodies)
    body = loop.bodies[0]
    (cos,) = (op for op in body.ops if op.primitive == "cos")
    assert not free_values(graph)[cos.results[0]]
    assert free_values(graph, dict(zip(body.inputs, loop.operands, strict=True)))[cos.results[0]]


@pytest.mark.parametrize(
    ("trip", "found"),
    [
        (lambda c, x: c + 2 * x, True),
        (lambda c, x: jnp.where(x > 0, c.astype(jnp.bfloat16).astype(jnp.float32) + x, c), True),
        (lambda c, x: jax.lax.cond(x[0] > 0, lambda c: c + x, lambda c: c, c), True),
        (lambda c, x: jax.lax.fori_loop(0, 3, lambda _, c: c + x, c), True),
        (lambda c, x: c + jnp.sum(c * x), False),  # a norm
        (lambda c, x: jnp.outer(x, x) @ c, False),  # a recurrence
        (lambda c, x: jax.lax.fori_loop(0, 3, lambda _, c: c[::-1] + x, c), False),
    ],
)
def test_what_a_loop_only_adds_up(trip, found):
    """A carry that its trips read element by element, casts, branches and loops inside included, and for itself alone."""
    graph = trace(lambda c, x: jax.lax.scan(lambda c, x: (trip(c, x), None), c, x)[0], abstract((8,)), abstract((4, 8))).graph
    (loop,) = graph.ops
    assert [holder.value for holder in accumulators(loop)] == [loop.bodies[0].inputs[0]] * found


def test_what_another_carry_or_a_stack_reads_is_not_only_added_up():
    """Two sums, one of which the other reads and one that is stacked up as well: neither is of use to itself alone."""

    def trip(carry, x):
        one, other, stacked = carry
        return (one + x, other * one, stacked + x), stacked

    graph = trace(lambda c, x: jax.lax.scan(trip, (c, c + 1, c + 2), x), abstract((8,)), abstract((4, 8))).graph
    (loop,) = (op for op in graph.ops if op.bodies)
    assert not list(accumulators(loop))
