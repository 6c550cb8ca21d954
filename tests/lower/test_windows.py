"""Windowed products: the numbers of the plain ones, and the permutes that the judge charges instead of their collectives."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from programs import concrete
from random_assignments import random_assignment
from test_constrain import MODEL, lowering, replicated
from test_manual import manual

import autoshard
from autoshard.analysis.partial_sums import late_sums
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.cost.windows import RESULT, Windows
from autoshard.errors import StrategyError
from autoshard.ir import Mesh
from autoshard.judge.model import CostModel
from autoshard.problem import Problem
from autoshard.rules import rules_of
from autoshard.trace import trace
from autoshard.verify import compare, explicit_collectives

MESH = MODEL.mesh
SEEDS = 40


def floats(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def product(x, w):
    return jnp.tanh(x) @ jnp.sin(w)


def batched(x, w):
    return jnp.einsum("bij,bjk->bik", jnp.tanh(x), jnp.sin(w))


def step(w, v, x):
    """A loss's gradients, in a scan."""

    def loss(weights):
        w, v = weights
        return jnp.sum(jax.lax.scan(lambda carry, _: (jnp.tanh(carry @ w) @ v, None), x, None, 2)[0])

    return jax.grad(loss)((w, v))


PROGRAMS = {
    "product": (product, (floats(16, 64), floats(64, 32))),
    "batched": (batched, (floats(8, 16, 8), floats(8, 8, 16))),
    "step": (step, (floats(16, 32), floats(32, 16), floats(16, 16))),
}


@cache
def facts_of(name):
    fn, shapes = PROGRAMS[name]
    traced = trace(fn, *shapes)
    return traced, program_facts(traced.graph, rules_of(traced.graph), compiler_of(Cluster.parse("v5e:2x4")))


def windowed(name, seed, mesh=MESH, model=MODEL):
    """A random assignment with every window that it can have, one a product, and those."""
    traced, facts = facts_of(name)
    assignment = random_assignment(traced.graph, facts.rules, mesh, seed)
    late = late_sums(traced.graph, facts.rules, assignment, facts.sums).values
    found = Windows(traced.graph, facts.rules, assignment, model.reshard_paths(traced.graph.values), facts.readers, late).all()
    windows = {window.op.index: window for window in found}
    return replace(assignment, windows={op: window.operand for op, window in windows.items()}), list(windows.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_windows_compute_the_numbers_of_their_products(name):
    """Whatever goes round: a left operand, a right one, a result; along a dimension of the result, of the sum, of the batch."""
    (_, shapes), (traced, _) = PROGRAMS[name], facts_of(name)
    args = jax.tree.leaves(concrete(shapes, 0))
    plain = jax.jit(lowering(traced, replicated(traced)))(*args)
    met = set()
    for seed in range(SEEDS):
        assignment, windows = windowed(name, seed)
        kinds = {(window.operand, window.factor) for window in windows}
        if kinds <= met:
            continue
        met |= kinds
        for got, wanted in zip(jax.jit(manual(traced, assignment))(*args), plain, strict=True):
            np.testing.assert_allclose(got, wanted, rtol=2e-4, atol=1e-5)
    assert {operand for operand, _ in met} == {RESULT, 0, 1}
    assert len(met) >= 5


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_their_permutes_are_those_of_the_judge(name):
    """Kind, axes, count and bytes; the objective is that of the plan without windows."""
    (_, shapes), (traced, facts) = PROGRAMS[name], facts_of(name)
    for seed in [seed for seed in range(SEEDS) if windowed(name, seed)[1]][:4]:
        assignment, windows = windowed(name, seed)
        with_windows = Problem(facts, MODEL).evaluate(assignment)
        without = Problem(facts, MODEL).evaluate(replace(assignment, windows={}))
        assert with_windows.cost.objective_seconds == pytest.approx(without.cost.objective_seconds, rel=1e-9)
        assert with_windows.cost.flops == without.cost.flops
        lowered = jax.jit(manual(traced, assignment)).lower(*jax.tree.leaves(concrete(shapes, seed)))
        rows = compare(with_windows.cost.collectives, explicit_collectives(lowered, MESH))
        assert [row for row in rows if not row.agrees or row.predicted_count != row.actual_count] == []
        assert sum(row.predicted_count for row in rows if row.kind == "collective_permute") >= len(windows)


def megatron(x, up, down):
    """Sequence parallelism around a feed-forward layer: gathered before the first product, scattered after the second."""
    return x + jax.nn.gelu(x @ up.astype(jnp.bfloat16)) @ down.astype(jnp.bfloat16)


LAYER = jax.ShapeDtypeStruct((32768, 4096), jnp.bfloat16), floats(4096, 16384), floats(16384, 4096)
SEQUENCE = {"x": P(("data", "model")), "up": P(None, "model"), "down": P("model")}


def searched(cluster):
    return autoshard.search(megatron, *LAYER, cluster=cluster, mesh={"data": 2, "model": 4}, pins=SEQUENCE, donate_argnums=0)


def evaluated_without(strategy):
    """What the same plan costs without windows."""
    traced, cluster = trace(megatron, *LAYER, donate_argnums=0), Cluster.parse("v5p:2x2x2")
    facts = program_facts(traced.graph, rules_of(traced.graph), compiler_of(cluster))
    model = CostModel(cluster, strategy.record.mesh)
    return Problem(facts, model).evaluate(replace(strategy.record.assignment, windows={})).cost


def test_search_windows_what_hides_a_collective():
    """Where XLA:TPU waits for an all_gather of activations or of a weight, its large product sends blocks round a ring; no other does."""
    found = searched("v5p:2x2x2")
    permutes = [each for each in found.cost.collectives if each.kind == "collective_permute"]
    assert len(found.record.windows) == 1 and len(permutes) == MESH.sizes[1] - 1
    assert sum(each.exposed_seconds for each in permutes) < 0.5 * sum(each.seconds for each in permutes)
    plain = evaluated_without(found)
    assert found.cost.makespan_seconds < 0.95 * plain.makespan_seconds
    assert found.cost.objective_seconds == pytest.approx(plain.objective_seconds, rel=1e-9)
    assert not searched("h100:8").record.windows
    assert not searched("v5e:2x4").record.windows


def test_windows_are_saved_and_loaded(tmp_path):
    found = searched("v5p:2x2x2")
    found.save(tmp_path / "found.json")
    assert autoshard.load(tmp_path / "found.json").record.windows == found.record.windows


def test_a_window_of_what_is_no_product_is_refused():
    found = searched("v5p:2x2x2")
    other = next(op.index for op in trace(megatron, *LAYER).graph.walk() if op.primitive != "dot_general")
    broken = autoshard.Strategy(replace(found.record, windows={other: 0}))
    with pytest.raises(StrategyError, match="is no matrix product and has a window"):
        broken.apply(megatron).lower(*LAYER)


def test_small_products_are_not_windowed():
    """A permute's launch and a kernel's start for each block cost more than they hide."""
    facts, cluster, mesh = facts_of("product")[1], Cluster.parse("v5e:2x4"), Mesh.of({"data": 2, "model": 4})
    problem = Problem(facts, CostModel(cluster, mesh))
    for seed in range(SEEDS):
        assignment, windows = windowed("product", seed, mesh, problem.model)
        plain = problem.evaluate(replace(assignment, windows={})).cost.makespan_seconds
        assert not windows or problem.evaluate(assignment).cost.makespan_seconds > plain
