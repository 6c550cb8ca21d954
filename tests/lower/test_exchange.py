"""Ops whose shards exchange data: numbers as unsharded, collectives as predicted, and searched where they win."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from problems import problem_of
from programs import abstract, concrete
from random_assignments import random_assignment

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Assignment, Collective, Mesh, exchanges
from autoshard.judge.evaluate import evaluate
from autoshard.judge.model import CostModel
from autoshard.lower import constrained, jax_mesh
from autoshard.rules import rules_of
from autoshard.search import RecursiveProgramming
from autoshard.trace import trace
from autoshard.verify import collectives_of, compare, explicit_collectives

OURS = re.compile(r"shard_map/(all_gather|ppermute)$")
MESH = Mesh.of({"x": 2, "y": 4})
MODEL = CostModel(Cluster.parse("cpu:8"), MESH)
COMPILER = compiler_of(MODEL.cluster)


def ordering(x, w):
    """A router's bookkeeping: the best experts of every token, and every token's place at its expert."""
    scores = x @ w
    values, experts = jax.lax.top_k(scores.T, 2)
    best = jnp.argmax(scores, -1)
    chosen = jax.nn.one_hot(best, 16)
    place = (jnp.cumsum(chosen, 0) * chosen).sum(-1)
    running = jax.lax.cumlogsumexp(scores, axis=0, reverse=True) + jnp.flip(jax.lax.cummax(scores, axis=1), (0, 1))
    return values, experts, place, running, jnp.argmin(scores, 0)


def vision(images, first, second):
    """Strided and plain convolutions and overlapping max pooling, with their gradients."""

    def loss(first, second):
        numbers = ("NHWC", "HWIO", "NHWC")
        x = jax.lax.conv_general_dilated(images, first, (2, 2), "SAME", dimension_numbers=numbers)
        x = jax.lax.reduce_window(jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        x = jax.lax.conv_general_dilated(x, second, (1, 1), "SAME", dimension_numbers=numbers)
        return jnp.square(jax.lax.reduce_window(x, 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")).mean()

    return jax.value_and_grad(loss, (0, 1))(first, second)


def looped(x, w):
    """A scanned body that accumulates along a dimension of its carry."""
    return jax.lax.scan(lambda carry, row: (jnp.cumsum(jnp.tanh(carry @ w), 0) * 0.1, carry[row]), x, jnp.arange(3))


PROGRAMS = {
    "ordering": (ordering, (abstract((32, 8)), abstract((8, 16)))),
    "vision": (vision, (abstract((2, 32, 32, 4)), abstract((3, 3, 4, 8)), abstract((3, 3, 8, 8)))),
    "looped": (looped, (abstract((16, 8)), abstract((8, 8)))),
}


def lowered(traced, rules, assignment, args):
    paths = MODEL.reshard_paths(traced.graph.values)
    return jax.jit(constrained(traced.jaxpr, traced.graph, rules, assignment, jax_mesh(MESH), paths)).lower(*args)


def exchanged(facts, assignment):
    """What shards are predicted to send each other."""
    found = []
    for op in facts.graph.walk():
        rule, choice = facts.rules[op.index], assignment.choice(op.index)
        if rule is not None and not all(facts.free[value] for value in op.results):
            for step in MODEL.exchange_path(facts, op, choice):
                found.append(Collective(step.kind, tuple(MESH.names[axis] for axis in step.axes), step.nbytes, op.trips))
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", PROGRAMS)
def test_exchanges_compute_the_unsharded_numbers_with_the_predicted_collectives(name, seed):
    """However it is sharded: the same numbers, Shardy's collectives are the predicted ones, and of exchanges XLA's are, too."""
    fn, shapes = PROGRAMS[name]
    traced = trace(fn, *shapes)
    rules = rules_of(traced.graph)
    assignment = random_assignment(traced.graph, rules, MESH, seed)
    args = jax.tree.leaves(concrete(shapes, seed))
    step = lowered(traced, rules, assignment, args)
    compiled = step.compile()
    for got, wanted in zip(compiled(*args), jax.tree.leaves(jax.jit(fn)(*args)), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-5)
    predicted = evaluate(program_facts(traced.graph, rules, COMPILER), MODEL, assignment).cost.collectives
    assert [row for row in compare(predicted, explicit_collectives(step, MESH)) if not row.agrees] == []
    ours = [found for found in collectives_of(compiled.as_text(), MESH) if OURS.search(found.source)]
    assert [row for row in compare(exchanged(program_facts(traced.graph, rules, COMPILER), assignment), ours) if not row.agrees] == []


def test_the_random_assignments_do_exchange():
    """The programs above meet every kind of exchange, over one axis and over two."""
    met = set()
    for fn, shapes in PROGRAMS.values():
        traced = trace(fn, *shapes)
        rules = rules_of(traced.graph)
        for seed in range(4):
            assignment = random_assignment(traced.graph, rules, MESH, seed)
            for op in traced.graph.walk():
                for factor, axes in exchanges(rules[op.index], assignment.choice(op.index), MESH.sizes) if rules[op.index] else ():
                    met.add((op.primitive, rules[op.index].factors[factor].kind, len(axes)))
    assert {primitive for primitive, _, _ in met} >= {"cumsum", "argmax", "argmin", "top_k", "rev", "conv_general_dilated"}
    assert {kind for _, kind, _ in met} == {"permutation", "reduction"} and {n for _, _, n in met} == {1, 2}


def solved(fn, *shapes, mesh):
    """A program on a cluster whose devices are slow and links fast, and its searched assignment."""
    problem = problem_of(fn, *shapes, mesh=mesh)
    return problem, RecursiveProgramming().solve(problem)


def split_axes(problem, assignment, primitive):
    """Per op of a primitive, the axes that split factors whose shards exchange."""
    rules, sizes = problem.rules, problem.mesh.sizes
    ops = [op for op in problem.graph.walk() if op.primitive == primitive]
    return [sum(len(axes) for _, axes in exchanges(rules[op.index], assignment.choice(op.index), sizes)) for op in ops]


def test_one_image_is_convolved_by_all_devices():
    """With a batch of one and few channels, the search splits space and exchanges halos."""

    def smooth(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

    problem, solution = solved(smooth, abstract((1, 512, 512, 3)), abstract((5, 5, 3, 3)), mesh={"x": 4, "y": 2})
    assert split_axes(problem, solution.assignment, "conv_general_dilated") == [2]
    assert {c.kind for c in solution.judgement.cost.collectives} == {"collective_permute"}


def test_places_at_experts_are_counted_without_gathering_tokens():
    """A running count over sharded tokens sends each shard's totals, not the tokens."""

    def places(tokens, router):
        chosen = jax.nn.one_hot(jnp.argmax(tokens @ router, -1), 8)
        return jnp.cumsum(chosen, 0) * chosen

    problem, solution = solved(places, abstract((4096, 64)), abstract((64, 8)), mesh={"x": 8})
    assert split_axes(problem, solution.assignment, "cumsum") == [1]
    assert [(c.kind, c.bytes) for c in solution.judgement.cost.collectives if c.source.startswith("cumsum")] == [("all_gather", 8 * 8 * 4)]


@pytest.mark.parametrize(
    "fn, shapes, operand",
    [
        (lambda x: jnp.sort(x, 0), (abstract((8, 4)),), 0),
        (lambda x: jnp.fft.fft(x, axis=0).real, (abstract((16, 4)),), 0),
        (lambda x: jax.lax.slice(x, (1, 0), (7, 4)), (abstract((8, 4)),), 0),
        (lambda x, y: jnp.concatenate((x, y)), (abstract((8, 4)), abstract((16, 4))), 1),
        (lambda x: jnp.linalg.cholesky(x @ x.T + 9 * jnp.eye(8)), (abstract((8, 8)),), 0),
    ],
)
def test_what_must_be_whole_is_gathered_as_predicted(fn, shapes, operand):
    """An operand that lies sharded on a need-replication factor costs the predicted all_gathers, and no more."""
    traced = trace(fn, *shapes)
    rules = rules_of(traced.graph)
    argument = traced.graph.arguments[operand]
    assignment = Assignment(MESH, {}, {argument: (0, 0)})
    args = jax.tree.leaves(concrete(shapes))
    predicted = evaluate(program_facts(traced.graph, rules, COMPILER), MODEL, assignment).cost.collectives
    assert [c.kind for c in predicted] == ["all_gather"] and predicted[0].bytes == traced.graph.values[argument].nbytes
    step = lowered(traced, rules, assignment, args)
    for actual in (explicit_collectives(step, MESH), collectives_of(step.compile().as_text(), MESH)):
        assert [row for row in compare(predicted, actual) if not row.agrees] == []
