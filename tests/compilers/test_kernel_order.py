"""Orders of kernels: laws over random fused programs, and who comes when in small traced ones."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import compiled_for, facts_of, floats
from programs import PROGRAMS

from autoshard.compilers.fusion import Kernel
from autoshard.compilers.kernel_order import gradients_last, listed, program_orders, shifted, shortest, usage

ARGUMENTS = frozenset((0, 1))


@st.composite
def fused(draw) -> tuple[tuple[Kernel, ...], list[int]]:
    """Kernels that each read arguments or what others made before, and make a value or two; and the sizes of all values."""
    kernels, known = [], list(ARGUMENTS)
    for op in range(draw(st.integers(0, 8))):
        reads = draw(st.lists(st.sampled_from(known), min_size=1, max_size=3, unique=True))
        made = tuple(range(len(known), len(known) + draw(st.integers(1, 2))))
        known += made
        kernels.append(Kernel(op, tuple(reads), made, draw(st.booleans()), (), op, (0,) * len(reads)))
    return tuple(kernels), draw(st.lists(st.integers(1, 64), min_size=len(known), max_size=len(known)))


def runs(kernels: Iterable[Kernel]) -> bool:
    """Whether every kernel comes after those that make what it reads."""
    known = set(ARGUMENTS)
    for kernel in kernels:
        if not known.issuperset(kernel.reads):
            return False
        known.update(kernel.makes)
    return True


@pytest.mark.sample(1)
@pytest.mark.parametrize("order", [shifted, listed])
@given(fused())
def test_every_order_runs_each_kernel_once_after_those_it_reads_from(order, case):
    """Whatever is moved where less is held, the program is the same; and the order is the same every time."""
    kernels, sizes = case
    found = order(kernels, sizes.__getitem__, ARGUMENTS)
    assert sorted(kernel.op for kernel in found) == [kernel.op for kernel in kernels] and runs(found)
    assert order(kernels, sizes.__getitem__, ARGUMENTS) == found


def test_a_list_scheduler_takes_what_frees_most():
    """Of two branches it first runs the one whose operand is larger than its result, however they were written."""
    grows, shrinks = Kernel(0, (0,), (2,), False), Kernel(1, (1,), (3,), False)
    sizes = [1, 64, 32, 8]
    assert [kernel.op for kernel in listed((grows, shrinks), sizes.__getitem__, frozenset())] == [1, 0]
    assert [kernel.op for kernel in listed((grows, shrinks), sizes.__getitem__, ARGUMENTS)] == [1, 0]  # arguments are freed by nobody
    assert [kernel.op for kernel in listed((grows, shrinks), [1, 1, 8, 8].__getitem__, ARGUMENTS)] == [0, 1]


def test_what_is_made_early_moves_to_its_reader():
    """A value made of arguments long before it is read is made just before that, unless an operand as large would stay for it."""
    early, first, second = Kernel(0, (0,), (2,), False), Kernel(1, (1,), (3,), False), Kernel(2, (3,), (4,), False)
    kernels = early, first, second, Kernel(3, (2, 4), (5,), False)
    assert [kernel.op for kernel in shifted(kernels, [4, 4, 64, 4, 4, 4].__getitem__, ARGUMENTS)] == [1, 2, 0, 3]
    assert [kernel.op for kernel in shifted(kernels, [64, 4, 64, 4, 4, 4].__getitem__, frozenset())] == [0, 1, 2, 3]


def test_what_frees_more_than_it_makes_comes_as_soon_as_it_can():
    """The one reader of a large value runs right after that is made, however late it was written; one that frees less stays."""
    made, other, reader = Kernel(0, (0,), (2,), False), Kernel(1, (1,), (3,), False), Kernel(2, (2,), (4,), False)
    kernels = made, other, reader, Kernel(3, (3, 4), (5,), False)
    assert [kernel.op for kernel in shifted(kernels, [64, 4, 64, 4, 4, 4].__getitem__, frozenset())] == [0, 2, 1, 3]
    assert [kernel.op for kernel in shifted(kernels, [4, 4, 4, 4, 64, 4].__getitem__, frozenset())] == [0, 1, 2, 3]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 64)), max_size=6))
def test_usage_counts_what_is_alive(lives):
    """At each moment the sizes of all buffers that were born and have not died."""
    born, length, sizes = np.array(lives, dtype=int).reshape(-1, 3).T
    expected = [sum(size for start, n, size in lives if start <= moment < start + n) for moment in range(16)]
    assert usage(15, sizes, born, born + length).tolist() == expected


@pytest.mark.parametrize("program", ["mlp", "moe", "lstm", "gpt_scan", "control_flow"])
def test_buffers_are_alive_while_they_are_read(program):
    """In every order: arguments from the start, any other buffer from before its first reader until after its last, results to the end."""
    fn, args = PROGRAMS[program]()
    facts = facts_of(fn, *args)
    returned = {facts.fusion.root[value] for value in facts.graph.results}
    orders = program_orders(facts.graph, facts.fusion)
    for times in (*orders, gradients_last(facts.graph, facts.fusion)[0]):
        assert (times.born < times.dies).all() and (times.dies <= times.moments).all()
        assert all((times.born[place] <= moment < times.dies[place]) for moment, read in times.reads.items() for place in read)
        assert all(times.dies[place] >= times.moments - 2 for value, place in times.places.items() if value in returned)
        assert set(times.values) == set(orders[0].values)
        arrays = [op.index for op in facts.graph.walk() if any(facts.graph.values[value].rank for value in op.results)]
        assert all(0 <= times.starts[op] < times.ends[op] <= times.moments for op in arrays)


@pytest.mark.parametrize("program", ["mlp", "gpt_remat"])
def test_the_shortest_order_holds_least(program):
    """Of the orders that are tried, none holds less at once than the one that is taken."""
    fn, args = PROGRAMS[program]()
    facts = facts_of(fn, *args, donate_argnums=0)
    orders = program_orders(facts.graph, facts.fusion)

    def peak(times):
        sizes = np.array([facts.graph.values[value].nbytes for value in times.values])
        return usage(times.moments, sizes, times.born, times.dies).max()

    assert peak(shortest(facts.graph, orders)) == min(map(peak, orders)) < max(map(peak, orders))


def test_products_that_no_other_waits_for_come_last():
    """Gradients of weights come after all products on the way back, and after them what is done to them alone."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w)
            return y.sum()

        return jax.tree.map(lambda w, g: w - 0.1 * jnp.sort(g), weights, jax.grad(loss)(weights))

    facts = compiled_for(facts_of(step, [floats(64, 64)] * 3, floats(32, 64)), "cpu:8")
    times, last = gradients_last(facts.graph, facts.fusion)
    ops = facts.graph.walk()
    assert {facts.graph.values[ops[op].results[0]].shape for op in last} == {(64, 64)} and len(last) == 3
    others = [op.index for op in ops if op.primitive == "dot_general" and op.index not in last]
    sorts = [op.index for op in ops if op.primitive == "sort"]
    assert max(times.starts[op] for op in others) < min(times.starts[op] for op in last)
    assert max(times.starts[op] for op in last) < min(times.starts[op] for op in sorts)


def test_what_others_hold_up_can_wait():
    """A small value made early for a sum with the end of a chain can wait for that; the chain cannot."""

    def program(x, y):
        small = jnp.sort(x)
        chain = jnp.sort(jnp.sort(jnp.sort(y)))
        return jnp.sort(small + chain)

    facts = facts_of(program, floats(64), floats(64))
    times, (small, *chain) = facts.lifetimes, [op.index for op in facts.graph.walk() if op.primitive == "sort"]
    assert times.put_off[times.starts[small]] == times.ends[chain[-2]] > times.ends[small]
    assert all(times.put_off[times.starts[op]] == times.starts[op] for op in chain)
