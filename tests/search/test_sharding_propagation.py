"""Pins spread with least redistribution, disagreements and unreached regions are noted, and manual specs are kept to the letter."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from problems import SMALL, eager_cluster, problem_of
from programs import PROGRAMS

import autoshard
from autoshard.errors import InfeasibleError, ShardingError
from autoshard.search import DataParallel, Manual, RecursiveProgramming, ShardingPropagation
from benchmarks.models import MODELS, gpt

MEGATRON = MODELS["gpt"].tensor_parallel


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def pinned(program, pins, **options):
    """The problem of a small program with argument layouts fixed, by argument position."""
    fn, args = SMALL[program]()
    graph = problem_of(fn, *args).graph
    found = {graph.arguments[position]: tuple(frozenset((dim,)) for dim in layout) for position, layout in pins.items()}
    return problem_of(fn, *args, pins=found, **options)


def test_without_a_pin_that_shards_it_says_what_to_pin():
    """No pin, and pins that replicate, are refused with an example."""
    fn, args = SMALL["matmul"]()
    for problem in (problem_of(fn, *args), pinned("matmul", {0: (-1, -1)})):
        with pytest.raises(ShardingError, match=r"no pin shards anything.*P\('data'\)"):
            ShardingPropagation().solve(problem)


def test_a_pinned_batch_is_followed_to_the_result():
    """A split batch splits every product that reads it; the weights, which nothing splits, stay whole."""
    strategy = autoshard.search(
        lambda v, w, x: jnp.tanh(x @ v) @ w, array(16, 64), array(64, 16), array(4096, 16), cluster=eager_cluster(),
        mesh={"data": 4, "model": 2}, searcher="sharding_propagation", pins={"x": P(("data", "model"))},
    )  # fmt: skip
    assert strategy.in_specs == (P(None, None), P(None, None), P(("data", "model"), None))
    assert strategy.out_specs == P(("data", "model"), None)
    assert not strategy.cost.collectives
    assert not strategy.notes


def test_pins_of_a_contraction_pair_leave_one_reduction():
    """Column, then row: the one collective is the reduction of the second product."""
    solution = ShardingPropagation().solve(pinned("two_matmuls", {0: (-1, 1), 1: (-1, 0)}))
    assert {c.kind for c in solution.judgement.cost.collectives} <= {"all_reduce", "reduce_scatter", "all_gather"}
    assert {c.mesh_axes for c in solution.judgement.cost.collectives} == {("model",)}


def test_an_axis_is_used_only_where_a_pin_reaches():
    """An op that reads nothing pinned stays replicated, though splitting it would be faster, and is noted with its source line."""

    def two(w, x, v, y):
        return x @ w, y @ v

    strategy = autoshard.search(
        two, array(64, 64), array(256, 64), array(64, 64), array(256, 64), cluster=eager_cluster(), mesh={"data": 8},
        searcher="sharding_propagation", pins={"x": P("data")},
    )  # fmt: skip
    assert strategy.in_specs == (P(None, None), P("data", None), P(None, None), P(None, None))
    text = str(strategy.explain())
    assert any("no pin reaches v, y" in note for note in strategy.notes)
    assert any("50 %" in note and "test_sharding_propagation.py" in note for note in strategy.notes)
    assert "no pin reaches" in text


def test_an_axis_that_no_pin_names_is_noted():
    """Replication over a whole mesh axis is said."""
    solution = ShardingPropagation().solve(pinned("matmul", {1: (0, -1)}))
    assert any("mesh axis 'model' of size 2" in note for note in solution.notes)


def test_pins_that_disagree_are_noted_with_place_and_bytes():
    """An argument pinned one way and a constraint another way need a reshard, which is reported with both lines."""

    def step(x):
        y = jax.lax.with_sharding_constraint(jnp.tanh(x), P(None, "data"))
        return (y * 2).sum(0)

    strategy = autoshard.search(
        step, array(64, 64), cluster=eager_cluster(), mesh={"data": 8}, searcher="sharding_propagation", pins={"x": P("data")}
    )
    (note,) = [note for note in strategy.notes if " disagree: " in note]
    assert "x and the constraint at" in note
    assert re.search(r"1 all_\w+ over data, [\d.]+ kB a device", note)
    assert "step)" in note


def test_constraints_in_the_code_alone_are_pins():
    """A with_sharding_constraint is enough to start from: operands and results follow it."""

    def step(w, x):
        return jax.lax.with_sharding_constraint(x @ w, P("data")) + 1

    strategy = autoshard.search(step, array(64, 64), array(512, 64), cluster=eager_cluster(), searcher="sharding_propagation")
    assert strategy.mesh_shape == {"data": 8}
    assert strategy.in_specs[1] == P("data", None)
    assert strategy.out_specs == P("data", None)


@pytest.mark.sample(2)
@pytest.mark.parametrize("program", ["gpt", "gpt_scan", "moe_remat", "lstm"])
def test_what_follows_from_the_batch_is_no_slower_than_data_parallel(program):
    """Seeded with data parallelism's own batch and replicated state it finds its collectives or better ones."""
    fn, args = PROGRAMS[program]()
    problem = problem_of(fn, *args, mesh={"data": 8})
    baseline = DataParallel().solve(problem)
    pins = {value: tuple(frozenset((dim,)) for dim in baseline.assignment.layout(value)) for value in problem.graph.arguments}
    found = ShardingPropagation().solve(problem_of(fn, *args, mesh={"data": 8}, pins=pins))
    assert found.judgement.cost.objective_seconds <= baseline.judgement.cost.objective_seconds * (1 + 1e-9)


@pytest.mark.slow
def test_megatron_pins_are_nearly_the_best_that_keeps_them():
    """On a GPT of realistic sizes the objective is within 5 % of what recursive programming finds under the same pins."""
    fn, args = gpt(2, 1024, 16, 32_000, 32, 512)
    options = {"cluster": "v5p:2x2x2", "mesh": {"data": 2, "model": 4}, "pins": MEGATRON}
    found = autoshard.search(fn, *args, searcher="sharding_propagation", **options)
    best = autoshard.search(fn, *args, searcher=RecursiveProgramming(), **options)
    assert found.cost.objective_seconds <= 1.05 * best.cost.objective_seconds


def test_the_memory_limit_is_kept():
    """A limit is kept by layouts that the pins leave open, or refused with the smallest peak that was found."""
    fn, args = PROGRAMS["gpt"]()
    graph = problem_of(fn, *args, mesh={"data": 8}).graph
    pins = {
        value: (frozenset((0,)),) for value, path in zip(graph.arguments, graph.argument_paths, strict=True) if not path.startswith("state")
    }
    with pytest.raises(InfeasibleError) as refused:
        ShardingPropagation().solve(problem_of(fn, *args, mesh={"data": 8}, pins=pins, memory_limit_bytes=1000))
    assert refused.value.smallest_peak_bytes > 1000


# -- manual --------------------------------------------------------------------------------------------------------------


def test_manual_keeps_specs_and_replicates_the_rest():
    """Arguments have the layouts of their specs, those without one are replicated; nothing else is decided for them."""
    fn, args = SMALL["descent"]()
    by_pins = autoshard.search(fn, *args, cluster=eager_cluster(), mesh={"data": 8}, searcher="manual", pins={"x": P("data")})
    by_value = autoshard.search(fn, *args, cluster=eager_cluster(), mesh={"data": 8}, searcher=Manual({"x": P("data")}))
    for strategy in (by_pins, by_value):
        assert strategy.in_specs[1] == P("data", None)
        assert strategy.out_specs == P(None, None)
    assert by_pins.cost == by_value.cost


@pytest.mark.slow
@pytest.mark.parametrize("pins", [{"batch*": P("data")}, MEGATRON], ids=["data_parallel", "megatron"])
def test_manual_is_no_slower_than_what_jit_makes_of_the_specs(pins):
    """Completed with least redistribution, specs have no larger an objective than completed by Shardy's propagation.

    Nor a longer makespan, but for one all_reduce: that sums are added before they are combined only the judge sees.
    """
    fn, args = gpt(2, batch=64)
    options = {"cluster": "v5e:2x4", "mesh": {"data": 4, "model": 2}}
    completed = autoshard.search(fn, *args, searcher="manual", pins=pins, memory_limit_bytes=1e15, **options)
    shardy = autoshard.evaluate(fn, *args, in_specs=dict(pins), **options)
    assert completed.in_specs == shardy.in_specs
    assert completed.cost.objective_seconds <= shardy.cost.objective_seconds * (1 + 1e-9)
    assert completed.cost.makespan_seconds <= shardy.cost.makespan_seconds * 1.01


def test_manual_refuses_illegal_specs():
    """Specs that do not divide, name no axis or no argument, or contradict pins raise."""
    fn, args = SMALL["matmul"]()
    problem = problem_of(fn, *args)
    for specs, message in (
        ({"x": P("nothing")}, "names mesh axis 'nothing'"),
        ({"x": P(None, None, "data")}, "at most one entry a dimension"),
        ({"z": P("data")}, "matches none of 2"),
    ):
        with pytest.raises(ShardingError, match=message):
            Manual(specs).solve(problem)
    with pytest.raises(ShardingError, match="cannot be sharded over"):
        Manual({"x": P("data")}).solve(problem_of(fn, array(16, 32), array(30, 16)))
    with pytest.raises(ShardingError, match="contradicts the pin of x"):
        Manual({"x": P(None, "model")}).solve(pinned("matmul", {1: (0, -1)}))
    with pytest.raises(ShardingError, match="by argument path"):
        Manual((P("data"),))
