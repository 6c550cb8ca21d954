"""Facts of programs that no assignment changes, each on the smallest program that shows it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from profiles import compiled_for, facts_of, floats
from programs import PROGRAMS


def product(facts, number: int = 0):
    """One of a program's matrix products, in order."""
    return [op for op in facts.graph.walk() if op.primitive == "dot_general"][number]


@pytest.mark.parametrize("program", ["mlp", "moe", "lstm", "control_flow"])
def test_readers_and_makers_are_two_sides_of_one_relation(program):
    """A value is a result of the op that makes it, if any does; it is an operand of those that read it, or flows into their bodies."""
    fn, args = PROGRAMS[program]()
    facts = facts_of(fn, *args)
    ops = facts.graph.walk()
    assert all(maker is None or value in ops[maker].results for value, maker in enumerate(facts.makers))
    assert all(facts.makers[value] is None for value in facts.graph.arguments)
    for value, readers in enumerate(facts.readers):
        for op in (ops[reader] for reader in readers):
            assert value in (*op.operands, *(flow.value for holder in op.holders for flow in holder.sources))
        assert facts.wanted[value] == (bool(readers) or value in facts.graph.results)


@pytest.mark.parametrize("program", ["mlp", "gpt_scan", "convnet"])
def test_ops_that_are_alike_are_of_one_kind_and_size(program):
    """Ops that share a number have the same primitive, rule, work, traffic and shapes; the layers of a stack share theirs."""
    fn, args = PROGRAMS[program]()
    facts = facts_of(fn, *args)
    values, known = facts.graph.values, {}
    for op in facts.graph.walk():
        shapes = tuple(values[value].shape for value in (*op.operands, *op.results))
        fact = op.primitive, facts.rules[op.index], facts.flops[op.index], facts.traffic[op.index], shapes
        assert known.setdefault(facts.alike[op.index], fact) == fact
    assert len(known) < len(facts.graph.walk())


def test_work_is_that_of_the_whole_op():
    """A product of matrices multiplies and adds once for each row, column and element between; a transpose does nothing."""
    facts = facts_of(lambda x, w: (x @ w).T, floats(32, 16), floats(16, 64))
    assert facts.flops == (2.0 * 32 * 16 * 64, 0.0)


def test_constants_take_no_part():
    """What is made of constants alone is free, its ops are run by nobody, and no layout is asked of it; nor of a scalar."""
    facts = facts_of(lambda x, s: jnp.where(jnp.arange(64) > 32, x * s, 0.0), floats(64), jax.ShapeDtypeStruct((), jnp.float32))
    iota = next(op for op in facts.graph.walk() if op.primitive == "iota")
    assert facts.idle[iota.index] and facts.free[iota.results[0]] and facts.settled[iota.results[0]]
    x, scalar = facts.graph.arguments
    assert not facts.free[x] and not facts.settled[x] and facts.settled[scalar]
    assert not facts.idle[facts.makers[facts.graph.results[0]]]


def test_what_is_stored_or_made_of_less_is_portable():
    """An argument, what a kernel makes, an expansion of smaller values; not what a product computes of a matrix as it reads it."""
    facts = facts_of(lambda x, w, b: (jnp.exp(x) @ w, jnp.broadcast_to(jnp.sin(b), (64, 64)) @ w), *[floats(64, 64)] * 2, floats(64))
    (read,) = (op.results[0] for op in facts.graph.walk() if op.primitive == "exp")
    expanded = product(facts, 1).operands[0]
    assert not facts.materialised[read] and not facts.portable[read]
    assert not facts.materialised[expanded] and facts.portable[expanded]
    assert all(facts.portable[value] for value in (*facts.graph.arguments, *facts.graph.results))


def test_reductions_that_no_product_waits_for_are_told_from_the_others():
    """A bias's gradient is only written to the state; a norm that the next product reads is waited for."""

    def step(w, b, x):
        def loss(w, b):
            y = x @ w
            return ((y / y.sum(-1, keepdims=True)) @ w + b).sum()

        return jax.grad(loss, (0, 1))(w, b)

    facts = facts_of(step, floats(16, 16), floats(16), floats(32, 16))
    ((sums, products),) = facts.unawaited
    assert all(op.primitive == "dot_general" for op in products)
    (norm,) = (op for op in facts.graph.walk() if op.primitive == "reduce_sum" and product(facts).results[0] in op.operands)
    assert norm not in sums and [facts.graph.values[op.results[0]].shape for op in sums] == [(16,)]


def test_lookups_are_of_arguments_or_of_what_is_computed():
    """A gather of an argument's rows is of a table; one of what a product made is another lookup."""
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    facts = facts_of(lambda table, x, rows: (table[rows], (x @ table.T)[rows]), floats(64, 16), floats(32, 16), rows)
    assert [op.operands[0] for op in facts.table_lookups] == [facts.graph.arguments[0]]
    assert [op.operands[0] for op in facts.lookups] == [product(facts).results[0]]


def test_what_a_scatter_adds_to_is_known_where_it_lies_in_memory():
    """Rows added to an argument are added where it is; one number a row is compared instead, and nothing is added to."""
    rows = jax.ShapeDtypeStruct((8,), jnp.int32)
    added = facts_of(lambda table, x, rows: table.at[rows].add(x), floats(64, 16), floats(8, 16), rows)
    assert [op.primitive for op in added.added_to] == ["scatter-add"]
    picked = facts_of(jax.grad(lambda x, at: jnp.take_along_axis(jnp.exp(x), at[:, None], 1).sum()), floats(8, 32), rows)
    assert not picked.added_to


def test_weights_of_loops_are_those_that_products_inside_read():
    """A stack of matrices by which every trip multiplies as it is; not one of which each trip reads a slice, nor a single matrix."""

    def program(stack, kept, single, x):
        def trip(x, w):
            return jnp.tanh(jnp.einsum("bcd,cde->bce", x @ w @ single, kept)), None

        return lax.scan(trip, x, stack)[0]

    facts = facts_of(program, floats(3, 16, 16), floats(4, 16, 16), floats(16, 16), floats(8, 4, 16))
    scan = next(op for op in facts.graph.walk() if op.primitive == "scan")
    assert facts.looped_weights == {facts.graph.arguments[1]: (scan.index,)}


def test_only_what_sends_is_sending():
    """Shards of a convolution send each other the borders of images, those of a product or an elementwise op nothing."""
    facts = facts_of(lambda x, k, w: lax.conv(jnp.sin(x), k, (1, 1), "SAME") @ w, floats(8, 4, 16, 16), floats(4, 4, 3, 3), floats(16, 16))
    assert [op.primitive for op in facts.sending] == ["conv_general_dilated"]


def test_another_order_is_the_same_program():
    """Only when buffers are alive changes; who asks for lifetimes gets those of the new order."""
    fn, args = PROGRAMS["mlp"]()
    facts = compiled_for(facts_of(fn, *args), "cpu:8")
    other = facts.orders.tried[0]
    moved = facts.in_order(other)
    assert moved.lifetimes is other and facts.lifetimes is facts.orders.best
    assert moved.graph is facts.graph and moved.fusion is facts.fusion and moved.orders.tried is facts.orders.tried
