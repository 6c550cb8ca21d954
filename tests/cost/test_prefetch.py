"""Scans that gather a trip ahead: the same numbers, the collectives that are charged, and no wait."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from programs import abstract, concrete

import autoshard
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.cost.prefetch import candidates, scans
from autoshard.ir import Mesh
from autoshard.judge.evaluate import evaluate
from autoshard.judge.model import CostModel
from autoshard.lower import jax_mesh, manual_program
from autoshard.problem import Problem
from autoshard.rules import rules_of
from autoshard.search import FullySharded
from autoshard.trace import trace
from autoshard.verify import compare, explicit_collectives

MESH = Mesh.of({"data": 8})


def layers(remat: bool):
    """A train step over stacked float32 weights that each layer casts to bfloat16."""

    def layer(x, w):
        up, down = (each.astype(jnp.bfloat16) for each in w)
        return x + jnp.tanh(x @ up) @ down

    block = jax.checkpoint(layer) if remat else layer

    def loss(w, x):
        y, _ = jax.lax.scan(lambda x, w: (block(x, w), None), x.astype(jnp.bfloat16), w)
        return jnp.square(y.astype(jnp.float32)).mean()

    def step(w, x):
        return jax.tree.map(lambda w, g: w - 0.1 * g, w, jax.grad(loss)(w, x))

    return step, ((abstract((3, 64, 128)), abstract((3, 128, 64))), abstract((64, 64)))


def planned(remat: bool, cluster: str = "v5e:2x4"):
    """The traced step, its facts and model, and fully sharded assignments: as they are, and a trip ahead."""
    step, args = layers(remat)
    traced = trace(step, *args)
    model = CostModel(Cluster.parse(cluster), MESH)
    facts = program_facts(traced.graph, rules_of(traced.graph), compiler_of(model.cluster))
    plain = FullySharded().solve(Problem(facts, model)).assignment
    paths = model.reshard_paths(traced.graph.values)
    found = [each for scan in scans(traced.graph) for each in candidates(traced.graph, facts.rules, plain, scan, paths)]
    return traced, facts, model, plain, replace(plain, ahead={each.value: each.target for each in found})


@pytest.mark.sample(1)
@pytest.mark.parametrize("remat", [False, True])
def test_a_trip_ahead_computes_the_same_numbers(remat):
    """Forward, backward and recomputing scans have the numbers of the plain step, bit by bit."""
    traced, facts, model, plain, ahead = planned(remat)
    args = jax.tree.leaves(concrete(layers(remat)[1]))
    paths = model.reshard_paths(traced.graph.values)

    def run(assignment):
        return jax.jit(manual_program(traced.jaxpr, traced.graph, facts.rules, assignment, jax_mesh(MESH), paths))(*args)

    for got, wanted in zip(run(ahead), run(plain), strict=True):
        np.testing.assert_array_equal(got, wanted)


@pytest.mark.sample(1)
@pytest.mark.parametrize("remat", [False, True])
def test_the_judge_charges_what_is_sent(remat):
    """Each loop gathers once more than it has trips; the objective stays that of the plan."""
    traced, facts, model, plain, ahead = planned(remat)
    assert len(ahead.ahead) >= 4  # two weights forward, two backward
    costs = [evaluate(facts, model, assignment).cost for assignment in (plain, ahead)]
    gathers = [sum(each.count for each in cost.collectives if each.kind == "all_gather") for cost in costs]
    assert gathers[1] == gathers[0] + len(ahead.ahead)
    assert costs[1].objective_seconds == pytest.approx(costs[0].objective_seconds, rel=1e-9)
    assert costs[1].peak_bytes >= costs[0].peak_bytes and costs[1].compute_seconds > costs[0].compute_seconds  # buffers, and their copies
    paths = model.reshard_paths(traced.graph.values)
    program = manual_program(traced.jaxpr, traced.graph, facts.rules, ahead, jax_mesh(MESH), paths)
    lowered = jax.jit(program).lower(*jax.tree.leaves(layers(remat)[1]))
    rows = compare(costs[1].collectives, explicit_collectives(lowered, MESH))
    assert [row for row in rows if not row.agrees or row.predicted_count != row.actual_count] == []


def wide_layers():
    """A scan whose first gather takes longer than rounding, and whose products take longer than the gathers."""

    def loss(w, x):
        y, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w.astype(jnp.bfloat16)), None), x, w)
        return y.astype(jnp.float32).mean()

    def step(w, x):
        return w - 0.1 * jax.grad(loss)(w, x)

    return step, (abstract((8, 2048, 2048)), jax.ShapeDtypeStruct((32_768, 2048), jnp.bfloat16))


def test_a_search_gathers_ahead_where_that_hides_the_wait():
    """On GPUs, which gather beside products, less is exposed; where nothing runs beside, or what is carried is copied, nothing changes."""
    step, args = wide_layers()
    found = autoshard.search(step, *args, cluster="h100:8", searcher="fully_sharded", mesh={"data": 8})
    assert found.record.ahead
    graph, model = trace(step, *args).graph, CostModel(Cluster.parse("h100:8"), MESH)
    facts = program_facts(graph, rules_of(graph), compiler_of(model.cluster))
    ahead, plain = (evaluate(facts, model, each).cost for each in (found.record.assignment, replace(found.record.assignment, ahead={})))
    assert ahead.exposed_communication_seconds < plain.exposed_communication_seconds
    for cluster in ("cpu:8", "v5e:2x4"):
        assert autoshard.search(step, *args, cluster=cluster, searcher="fully_sharded", mesh={"data": 8}).record.ahead == {}


def test_what_is_gathered_ahead_is_saved(tmp_path):
    """A strategy with it comes back equal."""
    step, args = wide_layers()
    found = autoshard.search(step, *args, cluster="h100:8", searcher="fully_sharded", mesh={"data": 8})
    found.save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    assert loaded == found and loaded.record.ahead == found.record.ahead != {}
