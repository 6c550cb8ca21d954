"""The judge: flops, collectives, overlap and peak memory of small programs counted by hand."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from problems import eager_cluster, problem_of
from profiles import compiled_for
from programs import PROGRAMS
from random_assignments import random_assignment

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Assignment, Mesh, legal
from autoshard.judge.evaluate import evaluate
from autoshard.judge.model import CostModel
from autoshard.rules import rules_of
from autoshard.trace import trace

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
W = jax.ShapeDtypeStruct((32, 16), jnp.float32)


def judged(fn, *args, choices=None, layouts=None, copies=None, cluster=None, mesh=None, **options):
    """The judgement of an assignment given by op and value positions; by default everything is replicated over 8 devices."""
    graph = trace(fn, *args, **options).graph
    mesh = Mesh.of(mesh or {"data": 8})
    cluster = cluster or eager_cluster()
    facts = program_facts(graph, rules_of(graph), compiler_of(cluster))
    assignment = Assignment(mesh, choices or {}, layouts or {}, copies or {})
    return evaluate(facts, CostModel(cluster, mesh), assignment), graph


def test_a_sharded_product_costs_its_share():
    """A product whose rows are split does an eighth of the flops and sends nothing."""
    whole, graph = judged(lambda x, w: x @ w, X, W)
    x, _ = graph.arguments
    split, _ = judged(lambda x, w: x @ w, X, W, choices={0: ((0, -1),)}, layouts={x: (0,), graph.results[0]: (0,)})
    assert whole.cost.flops == 2 * 64 * 32 * 16
    assert split.cost.flops == whole.cost.flops / 8
    assert split.cost.collectives == ()
    assert split.cost.objective_seconds < whole.cost.objective_seconds


def test_partial_sums_are_reduced():
    """A split contraction reduces its result, whole, or scattered where the choice says so."""
    _, graph = judged(lambda x, w: x @ w, X, W)
    x, w = graph.arguments
    (out,) = graph.results
    contracted = next(f for f, factor in enumerate(rules_of(graph)[0].factors) if factor.kind == "reduction")
    reduced, _ = judged(lambda x, w: x @ w, X, W, choices={0: ((contracted, -1),)}, layouts={x: (1,), w: (0,)})
    scattered, _ = judged(lambda x, w: x @ w, X, W, choices={0: ((contracted, 0),)}, layouts={x: (1,), w: (0,), out: (0,)})
    assert [(c.kind, c.bytes) for c in reduced.cost.collectives] == [("all_reduce", 64 * 16 * 4)]
    assert [(c.kind, c.bytes) for c in scattered.cost.collectives] == [("reduce_scatter", 64 * 16 * 4)]
    assert scattered.cost.communication_seconds < reduced.cost.communication_seconds


def test_readers_of_one_layout_share_one_reshard():
    """A weight that two products read whole is gathered once."""

    def twice(x, w):
        return (x @ w) @ w.T

    _, graph = judged(twice, X, W)
    judgement, _ = judged(twice, X, W, layouts={graph.arguments[1]: (0,)})
    gathers = [c for c in judgement.cost.collectives if c.kind == "all_gather"]
    assert [c.count for c in gathers] == [1]


def test_loops_count_their_trips():
    """What a scan's body computes and sends counts once a trip."""

    def loop(x, w):
        return jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=5)[0]

    square = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    judgement, graph = judged(loop, X, square)
    (scan,) = graph.ops
    assert judgement.cost.flops == 5 * 2 * 64 * 32 * 32
    carry = next(holder.value for holder in scan.holders if holder.views)
    held = {value: (1,) for value in (carry, graph.results[0])}
    inside = next(op for op in graph.walk() if op.primitive == "dot_general")
    sharded, _ = judged(loop, X, square, layouts=held)
    assert {c.count for c in sharded.cost.collectives if str(inside.origin) in c.source and c.kind == "all_gather"} == {5}


def test_overlap_hides_communication_where_devices_can():
    """With asynchronous collectives the makespan is less than the sum; without, it is the sum."""

    def step(x, w, v):
        reduced = x @ w
        other = jnp.tanh(jnp.tanh(x @ v) @ v.T)
        return reduced.sum(), other

    args = X, W, jax.ShapeDtypeStruct((32, 256), jnp.float32)
    _, graph = judged(step, *args)
    contracted = next(f for f, factor in enumerate(rules_of(graph)[0].factors) if factor.kind == "reduction")
    plan = {"choices": {0: ((contracted, -1),)}, "layouts": {}}
    serial, _ = judged(step, *args, **plan, cluster=replace(eager_cluster("h100:8"), overlap=False))
    overlapped, _ = judged(step, *args, **plan, cluster=replace(eager_cluster("h100:8"), overlap=True))
    synchronous, _ = judged(step, *args, **plan, cluster=eager_cluster("v5e:2x4"))
    assert serial.cost.makespan_seconds == pytest.approx(serial.cost.objective_seconds)
    assert overlapped.cost.objective_seconds == serial.cost.objective_seconds
    assert overlapped.cost.makespan_seconds < serial.cost.makespan_seconds
    assert overlapped.cost.exposed_communication_seconds < serial.cost.exposed_communication_seconds
    assert [c.exposed_seconds == c.seconds for c in synchronous.cost.collectives] == [True]  # all_reduces of a TPU are


def test_what_collectives_leave_exposed_adds_up():
    """Exposed times of all collectives, in loops and outside, are what the makespan has beyond compute; each is at most its own."""

    def loop(x, w):
        y, _ = jax.lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=5)
        return y @ w, jnp.tanh(x)

    square = jax.ShapeDtypeStruct((32, 32), jnp.float32)
    for name in ("v5e:2x4", "h100:8"):
        cluster = eager_cluster(name)
        _, graph = judged(loop, X, square, cluster=cluster)
        for seed in range(20):
            assignment = random_assignment(graph, rules_of(graph), Mesh.of({"data": 8}), seed)
            plan = {"choices": assignment.choices, "layouts": assignment.layouts, "copies": assignment.copies}
            cost = judged(loop, X, square, cluster=cluster, **plan)[0].cost
            exposed = sum(c.exposed_seconds * c.count for c in cost.collectives)
            assert cost.exposed_communication_seconds == pytest.approx(exposed)
            assert cost.makespan_seconds == pytest.approx(cost.compute_seconds + exposed)
            assert cost.compute_seconds <= cost.makespan_seconds <= cost.objective_seconds
            assert all(c.exposed_seconds <= c.seconds * (1 + 1e-9) for c in cost.collectives)


def test_other_layouts_cost_what_is_stored_and_copied_for_them():
    """A value between fused ops is written and read where the next op wants another layout; an all_to_all is packed and unpacked."""

    def step(x):
        return jnp.sin(jnp.cos(x))

    cluster, large = Cluster.parse("v5e:2x4"), jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    _, graph = judged(step, large, cluster=cluster)
    made = graph.ops[0].results[0]
    rows, columns = ((0, -1),), ((1, -1),)
    ends = {graph.arguments[0]: (0,), graph.results[0]: (0,)}
    plain, _ = judged(step, large, cluster=cluster, choices={0: rows, 1: rows}, layouts={**ends, made: (0,)})
    moved, _ = judged(step, large, cluster=cluster, choices={0: rows, 1: columns}, layouts={**ends, made: (0,), graph.results[0]: (1,)})
    there, back = moved.cost.collectives  # the result replaces the argument, and lies where that does
    nbytes, rate = 4096 * 4096 * 4 / 8, cluster.device.memory_rate
    assert there.kind == back.kind == "all_to_all" and there.bytes == back.bytes == nbytes
    assert moved.cost.compute_seconds - plain.cost.compute_seconds == pytest.approx((2 + 4 + 4) * nbytes / rate)
    assert moved.cost.objective_seconds == moved.cost.compute_seconds + moved.cost.communication_seconds


def test_judging_again_gives_the_same():
    """What the model keeps of one evaluation changes nothing in the next."""
    graph = trace(lambda x, w: jnp.tanh(x @ w).sum(0), X, W).graph
    facts, mesh = program_facts(graph, rules_of(graph), compiler_of(eager_cluster())), Mesh.of({"data": 4, "model": 2})
    model = CostModel(eager_cluster(), mesh)
    for seed in range(10):
        assignment = random_assignment(graph, facts.rules, mesh, seed)
        assert evaluate(facts, model, assignment).cost == evaluate(facts, CostModel(eager_cluster(), mesh), assignment).cost


@pytest.mark.sample(5)
@pytest.mark.parametrize("cluster", ["", "v5e:2x4", "a100:8"])
@pytest.mark.parametrize("program", ["mlp", "gpt", "convnet", "lstm", "moe"])
def test_no_choice_costs_less_than_an_even_share(program, cluster):
    """`least_op_seconds` bounds an op from below whatever its choice, so that meshes may be cut by it."""
    fn, args = PROGRAMS[program]()
    problem = problem_of(fn, *args)
    model, profiled = problem.model, problem.facts
    if cluster:
        model, profiled = CostModel(Cluster.parse(cluster), problem.mesh), compiled_for(problem.facts, cluster)
    for op in problem.graph.walk():
        least = model.least_op_seconds(profiled, op)
        rule = problem.rules[op.index]
        factors = range(-1, len(rule.factors)) if rule else (-1,)
        for choice in (((a, -1), (b, -1)) for a in factors for b in factors):
            if rule is None or legal(rule, choice, problem.mesh.sizes):
                assert least <= model.op_seconds(profiled, op, choice) * (1 + 1e-9), f"{op.primitive} {choice}"


def test_what_is_sliced_between_fused_ops_is_stored():
    """A fused value that one reader takes a slice of is written whole and read in part, by the judge and in the tables."""
    graph = trace(lambda x: jnp.exp(x + 1.0).sum(), X).graph
    facts = program_facts(graph, rules_of(graph), compiler_of(Cluster.parse("v5e:2x4")))
    value = next(op.results[0] for op in graph.walk() if op.primitive == "exp")
    assert not facts.portable[value]
    model = CostModel(Cluster.parse("v5e:2x4"), Mesh.of({"data": 8}))
    source, target, nbytes = (-1,), (0,), graph.values[value].nbytes
    seconds = model.storing_seconds(graph.values[value], source, target)
    assert seconds == pytest.approx(nbytes * (1 + 1 / 8) / model.cluster.device.memory_rate)
    assert model.reshard_matrix(graph.values[value].shape, 4, False)[0, 1] == pytest.approx(seconds)
    assert model.reshard_matrix(graph.values[value].shape, 4, True)[0, 1] == 0.0
    assert model.storing_seconds(graph.values[value], source, source) == 0.0


@pytest.mark.parametrize(
    ("cluster", "product", "hidden"),
    [("v5e:2x4", True, True), ("v5e:2x4", False, False), ("v5p:2x2x2", True, False), ("h100:8", False, True)],
)
def test_gathers_hide_where_compilers_have_them_run_beside_other_work(cluster, product, hidden):
    """XLA:TPU runs them within products' kernels, and on v5e alone (libtpu 0.0.42); XLA:GPU beside whatever runs."""

    def step(x, y, w):
        other = y @ y.T if product else jnp.cumsum(jnp.cumsum(y, 1), 1)
        return x @ w, other

    rows, square = jax.ShapeDtypeStruct((512, 1024), jnp.bfloat16), jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16)
    _, graph = judged(step, rows, square, jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16))
    weight = graph.arguments[2]
    found, _ = judged(
        step, rows, square, jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16), layouts={weight: (0,)}, cluster=Cluster.parse(cluster)
    )
    (gather,) = found.cost.collectives
    assert gather.kind == "all_gather"
    assert gather.exposed_seconds == pytest.approx(0.0 if hidden else gather.seconds)


@pytest.mark.parametrize("materialised", [False, True])
def test_what_is_fused_into_a_reader_waits_with_it(materialised):
    """Moments that are decayed in the kernel that adds a gradient hide nothing of the collective before it; a kernel of their own does."""

    def step(x, w, moments, y):
        decayed = 0.9 * moments
        return decayed + x @ w, jnp.cumsum(y) if materialised else decayed.shape[0]

    args = X, W, jax.ShapeDtypeStruct((64, 16), jnp.float32), jax.ShapeDtypeStruct((4096,), jnp.float32)
    _, graph = judged(step, *args)
    product = next(op for op in graph.walk() if op.primitive == "dot_general")
    contracted = next(f for f, factor in enumerate(rules_of(graph)[product.index].factors) if factor.kind == "reduction")
    found, _ = judged(step, *args, choices={product.index: ((contracted, -1),)}, cluster=Cluster.parse("h100:8"))
    (reduced,) = found.cost.collectives
    assert reduced.kind == "all_reduce"
    assert (reduced.exposed_seconds < reduced.seconds * 0.999) == materialised
