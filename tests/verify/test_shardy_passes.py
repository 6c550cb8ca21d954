from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec
from programs import abstract, gpt, gpt_scan
from random_assignments import random_assignment

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Mesh
from autoshard.judge.evaluate import evaluate
from autoshard.judge.model import CostModel
from autoshard.lower import constrained, jax_mesh, manual_program
from autoshard.problem import Problem
from autoshard.rules import rules_of
from autoshard.search import DataParallel
from autoshard.trace import trace
from autoshard.verify import collectives_of, compare, explicit_collectives, propagated

MESH = Mesh.of({"x": 2, "y": 4})
MODEL = CostModel(Cluster.parse("cpu:8"), MESH)


def lowered(traced, rules, assignment, args):
    paths = MODEL.reshard_paths(traced.graph.values)
    return jax.jit(constrained(traced.jaxpr, traced.graph, rules, assignment, jax_mesh(MESH), paths)).lower(*jax.tree.leaves(args))


def mlp(x, w1, w2):
    return jax.grad(lambda w1, w2: jnp.square(jax.nn.relu(x @ w1) @ w2).sum(1).mean(), (0, 1))(w1, w2)


def attention(x, qkv):
    q, k, v = jnp.moveaxis(jnp.einsum("bsd,dchk->bschk", x, qkv), 2, 0)
    return jnp.einsum("bhqs,bshk->bqhk", jax.nn.softmax(jnp.einsum("bqhk,bshk->bhqs", q, k)), v)


def recurrent(x, w, xs):
    return jax.lax.scan(lambda carry, row: (jax.checkpoint(lambda c: jnp.tanh(c @ w))(carry) + row, carry.sum(0)), x, xs)


PROGRAMS = {
    "mlp": (mlp, (abstract((16, 32)), abstract((32, 64)), abstract((64, 8)))),
    "attention": (attention, (abstract((8, 16, 32)), abstract((32, 3, 4, 8)))),
    "recurrent": (recurrent, (abstract((8, 16)), abstract((16, 16)), abstract((3, 8, 16)))),
}


@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", PROGRAMS)
def test_shardy_inserts_what_the_judge_predicts(name, seed):
    """In a fully constrained program Shardy's collectives are the predicted ones, in kind, axes, bytes and count."""
    fn, args = PROGRAMS[name]
    traced = trace(fn, *args)
    rules = rules_of(traced.graph)
    assignment = random_assignment(traced.graph, rules, MESH, seed)
    predicted = evaluate(program_facts(traced.graph, rules, compiler_of(MODEL.cluster)), MODEL, assignment).cost.collectives
    actual = explicit_collectives(lowered(traced, rules, assignment, args), MESH)
    assert actual
    assert [row for row in compare(predicted, actual) if not row.agrees] == []


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", [gpt, gpt_scan])
def test_a_data_parallel_transformer_is_partitioned_as_predicted(program):
    """Of a whole train step, Shardy's and XLA's collectives are the predicted ones."""
    fn, args = program(n_layers=1)
    traced = trace(fn, *args)
    rules = rules_of(traced.graph)
    judged = DataParallel().solve(Problem(program_facts(traced.graph, rules, compiler_of(MODEL.cluster)), MODEL))
    manual = manual_program(traced.jaxpr, traced.graph, rules, judged.assignment, jax_mesh(MESH), MODEL.reshard_paths(traced.graph.values))
    step = jax.jit(manual).lower(*jax.tree.leaves(args))
    predicted = judged.judgement.cost.collectives
    assert predicted
    for actual in (explicit_collectives(step, MESH), collectives_of(step.compile().as_text(), MESH)):
        assert [row for row in compare(predicted, actual) if not row.agrees] == []


def test_the_module_itself_is_left_alone():
    """Shardy's passes work in place, so they run on a copy."""
    traced = trace(lambda x: x @ x, abstract((8, 8)))
    rules = rules_of(traced.graph)
    step = lowered(traced, rules, random_assignment(traced.graph, rules, MESH, 3), abstract((8, 8)))
    before = step.as_text()
    assert explicit_collectives(step, MESH) == explicit_collectives(step, MESH)
    assert step.as_text() == before


def layouts(fn, args, in_layouts, mesh=None):
    """The propagated layouts of a function's top-level results, and of every value by op primitive."""
    traced = trace(fn, *args)
    found, _ = propagated(traced.jaxpr, traced.graph, in_layouts, mesh or MESH)
    by_primitive = {op.primitive: [found.get(value) for value in op.results] for op in traced.graph.walk()}
    return [found.get(value) for value in traced.graph.results], by_primitive


def test_layouts_propagate_through_a_product():
    """Rows keep the left operand's axis, columns the right one's; arguments keep what they are given."""
    traced = trace(lambda x, w: x @ w, abstract((8, 16)), abstract((16, 32)))
    found, sides = propagated(traced.jaxpr, traced.graph, [(0, -1), (-1, 1)], MESH)
    assert [found[value] for value in (*traced.graph.arguments, *traced.graph.results)] == [(0, -1), (-1, 1), (0, 1)]
    assert sides == {0: (((0, -1), (-1, 1)), ((0, 1),))}


@pytest.mark.parametrize("wrap", [jax.checkpoint, jax.jit, lambda f: lambda x, w: jax.lax.cond(x[0, 0] > 0, f, lambda x, w: x, x, w)])
def test_layouts_propagate_into_bodies(wrap):
    """Values inside checkpoints, calls and branches are found too."""
    _, inside = layouts(wrap(lambda x, w: jnp.sin(x @ w)), (abstract((8, 16)), abstract((16, 16))), [(0, -1), (-1, 1)])
    assert inside["sin"] == [(0, 1)]


def test_layouts_propagate_through_loops():
    """A scan's body, its carry and its stacked results are found, the scanned dimension whole."""
    results, inside = layouts(recurrent, PROGRAMS["recurrent"][1], [(0, -1), (-1, -1), None])
    assert results == [(0, -1), (-1, -1)]
    assert inside["tanh"] == [(0, -1)]


def test_the_users_constraints_guide_the_propagation():
    """A constraint inside the function holds, on the axes that the mesh has."""

    def constrain(x):
        return jnp.sin(jax.lax.with_sharding_constraint(jnp.cos(x), PartitionSpec(("y", "elsewhere"), None)))

    assert layouts(constrain, (abstract((8, 16)),), [None])[0] == [(-1, 0)]


def test_what_a_layout_cannot_say_is_replicated():
    """An axis before one of smaller number on the same dimension is kept, the one after it is not."""
    results, _ = layouts(lambda x: x.reshape(16, 16).reshape(256), (abstract((16, 16)),), [(1, 0)])
    assert results in ([(-1, 0)], [(-1, -1)])
