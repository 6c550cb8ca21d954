"""Every collective says what it moves, for how long, and which choice asks for it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from programs import PROGRAMS, abstract
from random_assignments import random_assignment

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Assignment, Mesh
from autoshard.judge.evaluate import evaluate
from autoshard.judge.model import CostModel
from autoshard.rules import rules_of
from autoshard.trace import trace

MESH = Mesh.of({"data": 4, "model": 2})
MODEL = CostModel(Cluster.parse("cpu:8"), MESH)
NOWHERE = (-1, -1)


def collectives(traced, assignment):
    return evaluate(program_facts(traced.graph, rules_of(traced.graph), compiler_of(MODEL.cluster)), MODEL, assignment).cost.collectives


@pytest.mark.parametrize("name", ["mlp", "moe", "lstm", "gpt_scan", "control_flow"])
def test_no_collective_is_unexplained(name):
    """However a program is sharded, each collective has its tensor, its seconds and its cause, and the seconds add up."""
    fn, args = PROGRAMS[name]()
    traced = trace(fn, *args)
    rules = rules_of(traced.graph)
    facts, assignment = program_facts(traced.graph, rules, compiler_of(MODEL.cluster)), random_assignment(traced.graph, rules, MESH, 1)
    judged = evaluate(facts, MODEL, assignment).cost
    assert judged.collectives and all(c.tensor and c.cause and c.source and c.seconds > 0 for c in judged.collectives)
    assert sum(c.seconds * c.count for c in judged.collectives) == pytest.approx(judged.communication_seconds)


def test_partial_sums_are_blamed_on_the_contracted_factor():
    """A contraction that splits its depth says so; where every device keeps a part, which dimension."""
    traced = trace(lambda x, w: x @ w, abstract((16, 64)), abstract((64, 32)))
    x, w = traced.graph.arguments
    (out,) = traced.graph.results
    whole = Assignment(MESH, {0: ((2, -1), NOWHERE)}, {x: (1, -1), w: (0, -1)})
    (found,) = collectives(traced, whole)
    assert found.tensor == "the result of dot_general float32[16,32]"
    assert found.cause == "dot_general splits contracted k=64 over 'data': partial sums, combined on every device"
    scattered = Assignment(MESH, {0: ((2, 0), NOWHERE)}, {x: (1, -1), w: (0, -1), out: (0, -1)})
    (found,) = collectives(traced, scattered)
    assert found.cause == "dot_general splits contracted k=64 over 'data': partial sums, each device keeps its slice of dim 0"


def test_a_gathered_weight_is_blamed_on_what_its_reader_splits():
    """A weight that is stored split and read whole says how it is kept, and what the reader splits over that axis instead."""
    traced = trace(lambda x, w: x @ w, abstract((16, 64)), abstract((64, 32)))
    x, w = traced.graph.arguments
    (out,) = traced.graph.results
    (found,) = collectives(traced, Assignment(MESH, {0: ((0, -1), NOWHERE)}, {x: (0, -1), w: (0, -1), out: (0, -1)}))
    assert (found.kind, found.tensor) == ("all_gather", "w float32[64,32]")
    assert found.cause == "kept as P('data', None), read whole: dot_general splits i=16 over 'data'"
    assert found.source.startswith("dot_general ") and "test_attribution.py" in found.source


def test_new_state_is_blamed_on_the_old_ones_place():
    """A result that replaces an argument moves to where that one lies."""
    traced = trace(lambda state, x: ({"w": state["w"] * 2}, x), {"w": abstract((8, 8))}, abstract((8, 8)))
    state, result = traced.graph.arguments[0], traced.graph.results[0]
    *_, found = collectives(traced, Assignment(MESH, {0: ((1, -1), NOWHERE)}, {state: (0, -1), result: (1, -1)}))
    assert (found.kind, found.tensor) == ("all_to_all", "the result of mul float32[8,8]")
    assert found.cause == "kept as P(None, 'data'), read as P('data', None): the new state['w'] takes the sharding of the old one"


def test_what_a_loop_reads_is_named_by_its_argument():
    """A weight that a scan's body reads whole is named by its path, at the scan, and counted once."""

    def scanned(ws, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    traced = trace(scanned, abstract((4, 16, 16)), abstract((8, 16)))
    found = collectives(traced, Assignment(MESH, {}, {traced.graph.arguments[0]: (1, -1)}))
    assert [(c.tensor, c.count, c.cause) for c in found] == [
        ("ws float32[4,16,16]", 1, "kept as P(None, 'data', None), read whole: the body of scan keeps it in that layout")
    ]


def test_an_op_without_a_rule_is_said_to_have_none():
    """What nobody knows how to split is the reason for a gather of its operand."""
    traced = trace(lambda x: jnp.linalg.qr(x)[0], abstract((16, 16)))
    rules = tuple(None for _ in rules_of(traced.graph))
    assignment = Assignment(MESH, {}, {traced.graph.arguments[0]: (0, -1)})
    found = evaluate(program_facts(traced.graph, rules, compiler_of(MODEL.cluster)), MODEL, assignment).cost.collectives
    assert found and "has no sharding rule" in found[0].cause
