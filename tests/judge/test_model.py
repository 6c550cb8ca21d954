"""The cost model of one mesh: what it says of parts and of the whole agrees, op by op and layout by layout."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from profiles import facts_of, floats

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.cost.reshard import path_seconds
from autoshard.ir import Mesh, Value, divides, layout_number, layouts, legal_choices, operand_layout
from autoshard.judge.model import CostModel, OpCost

MESH = Mesh.of({"data": 2, "model": 4})
CLUSTERS = ("v5e:2x4", "h100:8", "cpu:8")


def model_of(cluster: str) -> CostModel:
    return CostModel(Cluster.parse(cluster), MESH)


def choices(rule):
    """All legal choices of a rule, scattered ones included."""
    atoms = [(factor, scatter) for factor in range(-1, len(rule.factors)) for scatter in range(-1, len(rule.results[0]))]
    named = [(factor, scatter) for factor, scatter in atoms if scatter < 0 or (factor >= 0 and rule.factors[factor].kind == "reduction")]
    return legal_choices(rule, itertools.product(named, repeat=len(MESH.axes)), MESH.sizes)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_matrix_is_its_paths_and_what_is_stored_for_them(cluster):
    """Each entry is the seconds of the path and its copies, and of writing and reading a value that is stored for it alone."""
    model, value = model_of(cluster), Value((64, 128), "float32", 4.0)
    where = [layout for layout in layouts(value.rank, 2) if divides(layout, value.shape, MESH.sizes)]
    for source, target in itertools.product(where, repeat=2):
        at = layout_number(source, value.rank), layout_number(target, value.rank)
        steps = sum(step.seconds + step.copying_seconds for step in model.reshard_path(value, source, target))
        assert model.reshard_matrix(value.shape, value.itemsize, True)[at] == pytest.approx(steps)
        stored = model.storing_seconds(value, source, target)
        assert model.reshard_matrix(value.shape, value.itemsize, False)[at] == pytest.approx(steps + stored)
        assert model.reshard_seconds(value.shape, value.itemsize, False, *map(np.array, at)) == pytest.approx(steps + stored)
        assert (source == target) <= (steps + stored == 0.0)


@pytest.mark.parametrize("cluster", CLUSTERS)
def test_an_op_costs_its_parts(cluster):
    """Seconds, flops, layouts and collectives of a product under every choice are those that are asked for one by one."""
    facts = facts_of(lambda x, w: x @ w, floats(512, 256), floats(256, 1024), compiler=compiler_of(Cluster.parse(cluster)))
    model, (op,), (rule,) = model_of(cluster), facts.graph.walk(), facts.rules
    whole = model.op_cost(facts, op, ((-1, -1), (-1, -1)))
    assert not whole.combines and not whole.exchange and whole.flops == facts.flops[0]
    for choice in choices(rule):
        cost = model.op_cost(facts, op, choice)
        split = np.prod([size for (factor, _), size in zip(choice, MESH.sizes, strict=True) if factor >= 0])
        assert cost.seconds == model.op_seconds(facts, op, choice) <= whole.seconds
        assert cost.flops == facts.flops[0] / split
        assert cost.operands == tuple(operand_layout(rule, choice, position) for position in (0, 1))
        assert cost.combinations == (model.reduction_path(facts, op, choice, 0),)
        assert cost.combines == any(factor >= 0 and rule.factors[factor].kind == "reduction" for factor, _ in choice)
        assert model.own_steps(facts, op, choice) == (*cost.exchange, *cost.combinations[0])
        assert model.op_cost(facts, op, choice) is cost


def test_equal_ops_are_costed_once():
    """The second of two products of equal shapes costs what the first does, and is not computed again; another shape is."""
    facts = facts_of(lambda x, w, v: (x @ w) @ w @ v, floats(64, 64), floats(64, 64), floats(64, 32))
    model, choice = model_of("cpu:8"), ((0, -1), (-1, -1))
    first, second, third = (model.op_cost(facts, op, choice) for op in facts.graph.walk())
    assert facts.alike[0] == facts.alike[1] != facts.alike[2]
    assert first is second and first.flops != third.flops


def test_views_take_no_time():
    """A reshape that splits rows is the operand read otherwise, whole or in parts."""
    facts, model = facts_of(lambda x: jnp.exp(jnp.sin(x).reshape(8, 8, 64)), floats(64, 64)), model_of("cpu:8")
    reshape = next(op for op in facts.graph.walk() if op.primitive == "reshape")
    assert all(model.op_cost(facts, reshape, choice).is_nothing for choice in choices(facts.rules[reshape.index]))
    assert model.least_op_seconds(facts, reshape) == 0.0


def test_nothing_is_what_takes_no_time_and_sends_nothing():
    """Time, an exchange or a combination each make an op cost something."""
    step = model_of("cpu:8").reshard_path(Value((64, 64), "float32", 4.0), (0, -1), (-1, -1))
    nothing = OpCost(0.0, 0.0, (), (), ((),))
    assert nothing.is_nothing and not nothing.combines
    assert not replace(nothing, seconds=1e-9).is_nothing and not replace(nothing, exchange=step).is_nothing
    assert replace(nothing, combinations=((), step)).combines and not replace(nothing, combinations=((), step)).is_nothing


def test_sums_over_a_loop_are_combined_once():
    """What a loop only adds up is all_reduced once for all its trips; a step taken out of that costs it in every trip."""

    def summed(w, x):
        return jax.grad(lambda w: jax.lax.scan(lambda c, x: (c + jnp.sin(x @ w).sum(), None), 0.0, x)[0])(w)

    facts = facts_of(summed, floats(64, 64), floats(5, 128, 64))
    model = model_of("cpu:8")
    sums = [op for op in facts.graph.walk() if facts.sums.accumulated[op.index] > 1 and op.primitive == "dot_general"]
    (op,) = sums
    rule = facts.rules[op.index]
    contracted = next(factor for factor, entry in enumerate(rule.factors) if entry.kind == "reduction")
    (step,) = model.reduction_path(facts, op, ((contracted, -1), (-1, -1)), 0)
    assert (step.kind, step.trips) == ("all_reduce", 5)
    alone = model.each_trip(step)
    assert alone.trips == 1 and alone.seconds == pytest.approx(5 * step.seconds)
    tried = choices(rule)
    seconds = np.zeros(len(tried))
    for kind, axes, groups, trips, _, which, nbytes in model.combined(facts, op, np.array(tried)):
        seconds[which] += model.communication.seconds(kind, nbytes, axes, groups) / trips
    assert seconds == pytest.approx([path_seconds(model.reduction_path(facts, op, each, 0)) for each in tried]) and len(set(seconds)) > 5
    assert model.recombining_seconds(facts, op, ((contracted, -1), (-1, -1))) == pytest.approx(4 * step.seconds)


def test_slower_wires_cost_more_and_nothing_else():
    """On links of a tenth of the bandwidth reshards take longer, ops as long as before."""
    cluster = Cluster.parse("h100:8")
    links = replace(cluster.interconnect, bandwidth_bytes_per_second=cluster.interconnect.bandwidth_bytes_per_second / 10)
    fast, slow = CostModel(cluster, MESH), CostModel(replace(cluster, interconnect=links), MESH)
    facts = facts_of(lambda x, w: x @ w, floats(512, 512), floats(512, 512), compiler=compiler_of(cluster))
    (op,), choice = facts.graph.walk(), ((0, -1), (1, -1))
    assert fast.op_seconds(facts, op, choice) == slow.op_seconds(facts, op, choice)
    ours, theirs = (model.reshard_matrix((512, 512), 4.0, True) for model in (fast, slow))
    assert (ours <= theirs).all() and ours.sum() < theirs.sum()
