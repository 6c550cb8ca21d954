"""Demanded precision: hand examples of each kind of reader and of what passes demands on, and its laws."""

from __future__ import annotations

import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import programs
import pytest
from jax.ad_checkpoint import checkpoint_name

from autoshard.analysis.demanded_precision import CARRY, CAST, EXACT, PRODUCT, REDUCTION, is_narrow, precision_demands
from autoshard.trace import trace

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
INDICES = jax.ShapeDtypeStruct((4,), jnp.int32)
LAWS = ("mlp_remat", "lstm", "moe", "gpt_scan", "control_flow")


def demanded(function, *args):
    """The demand on a function's first argument."""
    graph = trace(function, *args).graph
    return precision_demands(graph).on_values[graph.arguments[0]]


@pytest.mark.parametrize(
    ("reader", "demand"),
    [
        (lambda x, y: x @ y, PRODUCT),
        (lambda x, y: jnp.matmul(x, y, precision="highest"), EXACT),
        (lambda x, y: jnp.matmul(x, y, precision=("default", "highest")), EXACT),
        (lambda x, y: jnp.einsum("ij,ik->ijk", x, y), EXACT),
        (lambda x, y: jax.lax.dot(x, y, preferred_element_type=jnp.bfloat16), EXACT),
        (lambda x, y: x.astype(jnp.bfloat16), CAST),
        (lambda x, y: x.astype(jnp.float16), EXACT),
        (lambda x, y: x.sum(0), REDUCTION),
        (lambda x, y: x @ y[0], REDUCTION),
        (lambda x, y: y[:1] @ x, REDUCTION),
        (lambda x, y: jnp.tanh(x), EXACT),
        (lambda x, y: x, EXACT),
        (lambda x, y: y, 0),
        (lambda x, y: (x @ y, x.sum(0), x.astype(jnp.bfloat16)), PRODUCT | REDUCTION | CAST),
    ],
)
def test_each_reader_demands_its_kind(reader, demand):
    """Products at default precision, casts and reductions are told from what reads every bit; the caller does."""
    assert demanded(lambda x, y: (reader(x, y), y), X, X) == demand


@pytest.mark.parametrize(
    "move",
    [
        jnp.transpose,
        lambda x: x.reshape(4, 16).reshape(8, 8),
        lambda x: x[2:, 1:][:, :6],
        lambda x: jax.lax.dynamic_slice(x, (jnp.int32(1), jnp.int32(0)), (4, 8)),
        lambda x: jnp.flip(x, 0),
        lambda x: jnp.pad(x, 1),
        lambda x: jnp.concatenate([x, x], 1),
        lambda x: jnp.stack([x, x])[0],
        lambda x: jax.lax.split(x, (2, 6))[1],
        lambda x: x[jnp.array([3, 1])],
        lambda x: jnp.where(jnp.eye(8, dtype=bool), x, 0.0),
        lambda x: jnp.maximum(x, 0.0),
        lambda x: checkpoint_name(x, "x"),
        lambda x: jax.lax.optimization_barrier((jnp.ones(3), x))[1],
        jax.checkpoint(lambda x: x.T),
        lambda x: jax.lax.cond(x[0, 0].astype(jnp.bfloat16) > 0, jnp.transpose, lambda x: x, x),
    ],
)
def test_what_moves_elements_passes_demands_on(move):
    """What is multiplied, rounded or returned after it was moved is demanded as if it were not."""
    assert is_narrow(demanded(lambda x: move(x).astype(jnp.bfloat16), X))
    assert not is_narrow(demanded(lambda x: (move(x).astype(jnp.bfloat16), jnp.tanh(move(x))), X))
    assert demanded(lambda x: move(x), X) & EXACT


def test_indices_are_demanded_whole():
    """What is looked up by is not what is looked up, and a predicate no branch."""
    assert demanded(lambda i, x: (x[i] @ x, x), INDICES, X) == EXACT
    assert demanded(lambda p, x: (jnp.where(p, x, 0.0) @ x, x), jax.ShapeDtypeStruct((8, 8), bool), X) == 0


def test_barriers_keep_their_operands_apart():
    """What is demanded of one result of a barrier is demanded of the one operand that it is."""

    def program(x, y):
        x, y = jax.lax.optimization_barrier((x, y))
        return x @ x, jnp.tanh(y)

    graph = trace(program, X, X).graph
    assert [precision_demands(graph).on_values[value] for value in graph.arguments] == [PRODUCT, EXACT]


def test_stacking_is_no_carrying():
    """What is stacked trip by trip is demanded as the stack is: it may be narrow, which the buffers of carries are not."""
    graph = trace(lambda x: jax.lax.scan(lambda x, _: (jnp.tanh(x), x * 2), x, length=3)[1].astype(jnp.bfloat16), X).graph
    doubled = next(op for op in graph.walk() if op.primitive == "mul").results[0]
    assert precision_demands(graph).on_values[doubled] == CAST


def test_loops_demand_what_their_bodies_do():
    """Of a stack what of its slices, of a constant what in each trip, of a carry what in later trips and after the loop."""

    def program(x, y, stack, *, last):
        def trip(carry, w):
            x, before = carry
            return (jnp.tanh(w @ y), x), before @ y

        (x, before), rows = jax.lax.scan(trip, (x, x * 2), stack)
        return rows, (jnp.exp(before) if last else before.astype(jnp.bfloat16))

    for last in (False, True):
        graph = trace(lambda x, y, stack, last=last: program(x, y, stack, last=last), X, X, jax.ShapeDtypeStruct((3, 8, 8), X.dtype)).graph
        x, y, stack = (precision_demands(graph).on_values[value] for value in graph.arguments)
        assert y == stack == PRODUCT
        carried = next(op for op in graph.walk() if op.primitive == "scan").holders
        demands = precision_demands(graph)
        handed = next(holder for holder in carried if holder.sources[0].value == graph.arguments[0])
        expected = PRODUCT | CARRY | (EXACT if last else CAST)  # handed on to the second carry, which is multiplied and read after the loop
        assert demands.by_holder(handed) == expected
        assert is_narrow(expected, others=CARRY) == (not last) and not is_narrow(expected)
        assert x == expected | EXACT  # doubled, too


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", LAWS)
def test_demands_never_rise_when_a_reader_is_removed(name):
    """Without some op, or some result of the program, no more is demanded of any value."""
    function, args = programs.PROGRAMS[name]()
    graph = trace(function, *args).graph
    before = precision_demands(graph).on_values
    fewer = [replace(graph, ops=tuple(op for op in graph.ops if op is not left)) for left in random.Random(0).choices(graph.ops, k=12)]
    fewer += [replace(graph, results=graph.results[:n]) for n in range(0, len(graph.results), 5)]
    after = [precision_demands(one).on_values for one in fewer]
    assert all(not demand & ~most for demands in after for demand, most in zip(demands, before, strict=True))
    assert any(demands != before for demands in after)


@pytest.mark.parametrize("name", LAWS)
def test_a_demand_is_that_of_the_readers(name):
    """Of each value the union over its readers is demanded, which a second sweep over the program does not change."""
    function, args = programs.PROGRAMS[name]()
    graph = trace(function, *args).graph
    demands = precision_demands(graph)
    least = [EXACT if value in graph.results else 0 for value in range(len(graph.values))]
    for op in graph.walk():
        for holder in op.holders:
            for flow in holder.sources:
                least[flow.value] |= demands.by_holder(holder)
        for value in op.operands if not op.bodies else ():
            least[value] |= demands.by_ops[op.index]
    narrow = [value for value, each in enumerate(graph.values) if each.dtype == "float32"]
    assert narrow and all(demands.on_values[value] & ~CARRY == least[value] & ~CARRY for value in narrow)
