"""Decision variables of small programs: which ops lead, which follow, and the reads between variables."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from problems import SMALL, problem_of
from profiles import facts_of, floats
from programs import PROGRAMS

from autoshard.problem.variables import Decisions, decisions_of


def variables_of(fn, *args, pins=None) -> Decisions:
    return decisions_of(facts_of(fn, *args), pins or {})


@pytest.mark.parametrize("program", ["mlp", "moe", "lstm", "control_flow"])
def test_every_array_has_a_home_or_is_settled(program):
    """Arguments, what ops with shards make and what loops hold have a variable and one of its slots; constants and scalars need none."""
    fn, args = PROGRAMS[program]()
    facts = facts_of(fn, *args)
    found = decisions_of(facts, {})
    assert all(slot < len(found.variables[variable].slots) for variable, slot in found.home.values())
    assert all(facts.graph.values[value].rank > 0 for value in found.home)
    assert {value for value in facts.graph.arguments if facts.graph.values[value].rank} <= set(found.home)
    for op in facts.graph.walk():
        rule = facts.rules[op.index]
        if rule is not None and any(factor.shardable for factor in rule.factors) and not facts.idle[op.index]:
            assert all(value in found.home for value in op.results if not facts.settled[value])


@pytest.mark.parametrize("program", ["mlp", "moe", "lstm", "control_flow"])
def test_every_op_is_decided_once(program):
    """An op leads one variable, follows in one, or cannot be split; a variable refers to the signatures of its ops."""
    fn, args = PROGRAMS[program]()
    facts = facts_of(fn, *args)
    found = decisions_of(facts, {})
    leaders = [variable.leader for variable in found.variables if variable.leader >= 0]
    followers = [op for variable in found.variables for op, _, _ in variable.followers]
    assert len({*leaders, *followers}) == len(leaders) + len(followers)
    ops = facts.graph.walk()
    for variable in found.variables:
        if variable.leader >= 0:
            signature = found.signatures[variable.label_type[1]]
            assert facts.alike[signature.op] == facts.alike[variable.leader] and signature.trips == ops[variable.leader].trips
        assert len(variable.followers) == len(variable.follower_signatures)
        for (op, _, position), (_, number, where) in zip(variable.followers, variable.follower_signatures, strict=True):
            assert position == where and facts.alike[found.signatures[number].op] == facts.alike[op]


@pytest.mark.sample(3)
@pytest.mark.parametrize("program", [*SMALL, "lstm"])
def test_every_read_of_another_layout_is_an_edge(program):
    """An op that leads a variable reads each operand of another variable over an edge, through the value's copy where it has one."""
    fn, args = (SMALL.get(program) or PROGRAMS[program])()
    facts = facts_of(fn, *args)
    found = decisions_of(facts, {})
    edges = {(edge.value, edge.target) for edge in found.edges}
    for number, variable in enumerate(found.variables):
        for value in facts.graph.walk()[variable.leader].operands if variable.leader >= 0 else ():
            assert value not in found.home or found.home[value][0] == number or (value, number) in edges
    for edge in found.edges:
        sources = {found.home[edge.value], (found.copies.get(edge.value, -1), 0)}
        assert (edge.source, edge.source_slot) in sources and edge.trips >= 1
        assert all(slot < len(found.variables[edge.target].slots) for slot in edge.target_slots)


def test_elementwise_ops_and_transposes_follow():
    """Whatever is done to each element lies where the product's result does; a transpose has a slot that follows from it."""
    found = variables_of(lambda x, w: jnp.tanh(x @ w + 1.0).T, floats(64, 32), floats(32, 16))
    (product,) = (variable for variable in found.variables if variable.leader >= 0)
    assert len(product.followers) == 3 and [variable.label_type[0] for variable in found.variables if variable.leader < 0] == [
        "layout",
        "layout",
    ]
    assert [derivation[0] for derivation in product.slots] == ["operand", "operand", "result", "via"]


def test_a_value_of_several_readers_has_a_copy():
    """One reader reads the value itself; two read a copy that both may share."""
    one = variables_of(lambda x, w: x @ w, floats(64, 32), floats(32, 16))
    two = variables_of(lambda x, w, v: (x @ w, x @ v), floats(64, 32), floats(32, 16), floats(32, 8))
    assert not one.copies and len(two.copies) == 1
    ((value, copy),) = two.copies.items()
    assert two.variables[copy].label_type == ("layout", (64, 32), 4.0, False)
    assert [edge.target for edge in two.edges if edge.value == value and edge.source == two.home[value][0]] == [copy]


def test_what_is_pinned_or_widened_from_bytes_decides_for_itself():
    """A constraint's result follows nobody, since its operand may be resharded into it; nor does a cast of bytes to numbers."""
    pinned, plain = (lambda x: jnp.sin(jnp.exp(x))), floats(64, 32)
    facts = facts_of(pinned, plain)
    free = decisions_of(facts, {})
    held = decisions_of(facts, {facts.graph.results[0]: (frozenset({0}),)})
    assert len(held.variables) == len(free.variables) + 1 and [variable.pins for variable in held.variables if variable.pins]
    bytes_, floats_ = (jax.ShapeDtypeStruct((64, 32), dtype) for dtype in (jnp.int8, jnp.float32))
    assert len(variables_of(lambda x: x.astype(jnp.bfloat16), bytes_).variables) == 2
    assert len(variables_of(lambda x: x.astype(jnp.bfloat16), floats_).variables) == 1


def test_what_cannot_be_split_is_read_whole():
    """An op without a rule, or none of whose factors can be split, gathers what it reads; it decides nothing."""
    found = variables_of(
        lambda x: jnp.fft.fft(x.astype(jnp.complex64)).real,
        floats(
            64,
        ),
    )
    assert any(variable.whole_reads for variable in found.variables)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", sorted(SMALL))
def test_equal_variables_have_equal_keys(name):
    """The same program twice has the same decisions, edge for edge: a key says all that a variable's tables depend on."""
    fn, args = SMALL[name]()
    first, second = (problem_of(fn, *args).decisions for _ in range(2))
    assert [variable.key() for variable in first.variables] == [variable.key() for variable in second.variables]
    assert first.edges == second.edges and dict(first.home) == dict(second.home) and dict(first.copies) == dict(second.copies)
