"""What programs only add up, and what the judge and `verify` make of that."""

from __future__ import annotations

import random

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from problems import eager_cluster

import autoshard
from autoshard.cost.model import CostModel
from autoshard.cost.profile import profile
from autoshard.ir import Mesh, as_compiled
from autoshard.problem import Problem
from autoshard.rules import rules_of
from autoshard.search.elimination import table_cost
from autoshard.trace import trace

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
W = jax.ShapeDtypeStruct((32, 16), jnp.float32)
TRIPS = 4


def tied(w, x, y):
    """A weight used twice, as tied embeddings are: both gradients are summed over the batch, and added."""
    return jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)) + jnp.sum(jnp.tanh(y @ w.T)))(w)


def accumulated(w, x):
    """Gradients added up over slices of the batch."""

    def grow(sums, part):
        return sums + jax.grad(lambda w: jnp.sum(jnp.tanh(part @ w)))(w), None

    return jax.lax.scan(grow, jnp.zeros_like(w), x)[0]


def looked_at(w, x):
    """The same, but each trip reads what there is so far."""

    def grow(sums, part):
        return sums + jax.grad(lambda w: jnp.sum(jnp.tanh(part @ w)))(w + sums), None

    return jax.lax.scan(grow, jnp.zeros_like(w), x)[0]


TIED = tied, (W, X, jax.ShapeDtypeStruct((64, 16), jnp.float32))
SLICES = W, jax.ShapeDtypeStruct((TRIPS, *X.shape), jnp.float32)


def sums_of(fn, args):
    graph = trace(fn, *args).graph
    return graph, profile(graph, rules_of(graph)).sums


def strategy_of(fn, args, cluster, batch):
    """Data parallelism over 8 devices."""
    return autoshard.evaluate(fn, *args, cluster=cluster, mesh={"data": 8}, in_specs=batch)


def test_added_gradients_are_found():
    """The two products of a tied weight are the sides of one addition, transposed or not."""
    graph, sums = sums_of(*TIED)
    (addition,) = sums.additions
    assert [graph.walk()[side].primitive for side in addition.sides] == ["dot_general", "dot_general"]


def test_gradients_that_are_rounded_before_they_are_added_are_not_one_sum():
    """Of narrowed all_reduces compilers make no single one."""

    def rounded(b, x):
        return jax.grad(lambda b: jnp.sum(jnp.tanh(x + b.astype(jnp.float32))) + jnp.sum(jnp.sin(x * b.astype(jnp.float32))))(b)

    assert sums_of(rounded, (jax.ShapeDtypeStruct((32,), jnp.bfloat16), X))[1].additions == ()


@pytest.mark.parametrize(
    ("cluster", "lies", "kind", "sent"),
    [
        ("v5e:2x4", P(), "all_reduce", [2, 2]),
        ("h100:8", P(), "all_reduce", [4]),
        ("v5e:2x4", P("data"), "reduce_scatter", [2, 2]),
        ("h100:8", P("data"), "reduce_scatter", [2, 2]),
    ],
)
def test_gradients_that_are_widened_before_they_are_added(cluster, lies, kind, sent):
    """Of a float32 weight that two bfloat16 products read: bytes a number of what compilers send (libtpu 0.0.42, jaxlib 0.10.2)."""

    def step(w, x):
        def loss(w):
            y = jnp.tanh(x @ w.astype(jnp.bfloat16))
            return jnp.tanh(y @ w.astype(jnp.bfloat16)).astype(jnp.float32).mean()

        return w - jax.grad(loss)(w)

    args = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)
    found = autoshard.evaluate(step, *args, cluster=cluster, mesh={"data": 8}, in_specs={"w": lies, "x": P("data")}, donate_argnums=0)
    made = [collective for collective in as_compiled(found.cost.collectives) if collective.kind == kind and collective.bytes > 4]
    assert [collective.bytes / 256**2 for collective in made for _ in range(collective.count)] == sent


@pytest.mark.parametrize(("weight", "n_sums"), [("bij", 1), ("ibj", 0)])
def test_batched_gradients_are_one_sum_where_their_products_are_made_turned_around(weight, n_sums):
    """A transpose that swaps a batched product's operands becomes part of it; one that moves its batch stands between it and the sum."""

    def step(w, x):
        def loss(w):
            return jnp.sum(jnp.sin(jnp.einsum(f"bki,{weight}->bkj", x, w))) + jnp.sum(jnp.tanh(jnp.einsum(f"{weight},bjk->bik", w, x)))

        return jax.grad(loss)(w)

    cube = jax.ShapeDtypeStruct((32, 32, 32), jnp.float32)
    assert len(sums_of(step, (cube, cube))[1].additions) == n_sums


@pytest.mark.parametrize(("fn", "trips"), [(accumulated, TRIPS), (looked_at, 1)])
def test_what_a_loop_only_adds_up_is_found(fn, trips):
    """A gradient that a loop adds to a value nothing else reads is accumulated over its trips; one that is looked at is not."""
    graph, sums = sums_of(fn, SLICES)
    products = [op.index for op in graph.walk() if op.primitive == "dot_general" and op.trips == TRIPS]
    assert max(sums.accumulated[index] for index in products) == trips


@pytest.mark.parametrize(("cluster", "made"), [("v5e:2x4", 1), ("h100:8", 1), ("cpu:8", 2)])
def test_compilers_combine_a_sum_once(cluster, made):
    """Of a tied weight's two all_reduces XLA:TPU and XLA:GPU make one: verify expects it, the makespan has it, the objective has both."""
    strategy = strategy_of(*TIED, eager_cluster(cluster), {"x": P("data"), "y": P("data")})
    gradients = [c for c in strategy.cost.collectives if c.kind == "all_reduce"]
    assert len(gradients) == 2 and len(as_compiled(gradients)) == made
    cost = strategy.cost
    twice = cost.objective_seconds - cost.compute_seconds - cost.communication_seconds
    assert twice == pytest.approx(gradients[1].seconds if made == 1 else 0.0)
    assert autoshard.verify(strategy, tied, *TIED[1]).exact


@pytest.mark.parametrize(("cluster", "made"), [("v5e:2x4", 1), ("cpu:8", TRIPS)])
def test_loops_combine_what_they_add_up_at_their_end(cluster, made):
    """An accumulated gradient's all_reduce runs once, and costs once, on clusters whose compilers move it out of the loop."""
    strategy = strategy_of(accumulated, SLICES, eager_cluster(cluster), {"x": P(None, "data")})
    (gradient,) = [c for c in strategy.cost.collectives if c.kind == "all_reduce"]
    assert gradient.count == TRIPS and [c.count for c in as_compiled([gradient])] == [made]
    whole = strategy_of(looked_at, SLICES, eager_cluster(cluster), {"x": P(None, "data")})
    assert TRIPS * gradient.seconds == pytest.approx(made * whole.cost.collectives[0].seconds)
    assert autoshard.verify(strategy, accumulated, *SLICES).exact


@pytest.mark.parametrize(("cluster", "times"), [("v5e:2x4", 2), ("cpu:8", TRIPS)])
def test_what_a_loop_adds_up_is_combined_as_wide_as_it_is_carried(cluster, times):
    """Gradients in bfloat16 that are added up in float32 are one all_reduce of float32 (libtpu 0.0.42), each in bfloat16 elsewhere."""

    def widened(w, x):
        def grow(sums, part):
            gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(part @ w).astype(jnp.float32)))(w.astype(jnp.bfloat16))
            return sums + gradient.astype(jnp.float32), None

        return jax.lax.scan(grow, jnp.zeros_like(w), x)[0]

    slices = W, jax.ShapeDtypeStruct((TRIPS, *X.shape), jnp.bfloat16)
    strategy = strategy_of(widened, slices, eager_cluster(cluster), {"x": P(None, "data")})
    (gradient,) = [c for c in strategy.cost.collectives if c.kind == "all_reduce"]
    assert (gradient.bytes, gradient.count) == (32 * 16 * 2, TRIPS)
    assert sum(c.bytes * c.count for c in as_compiled([gradient])) == times * gradient.bytes
    assert autoshard.verify(strategy, widened, *slices).exact


def test_what_is_added_in_slices_is_combined_in_every_trip():
    """An all_reduce of which a loop adds up slices stays inside (seen in an LSTM, libtpu 0.0.42), for the judge and in the tables."""
    graph = trace(accumulated, *SLICES).graph
    facts = profile(graph, rules_of(graph))
    problem = Problem(facts, CostModel(eager_cluster("v5e:2x4"), Mesh.of({"data": 8})))
    product, add = (max(op.index for op in graph.walk() if op.primitive == name) for name in ("dot_general", "add"))
    rule = facts.rules[product]
    assert rule is not None
    reduced = next(f for f, factor in enumerate(rule.factors) if factor.kind == "reduction")
    nodes, labels = problem.nodes.nodes, problem.start()
    labels[next(i for i, node in enumerate(nodes) if node.leader == product)] = ((reduced, -1),)
    found = []
    for split in (-1, 0):
        labels[next(i for i, node in enumerate(nodes) if node.leader == add)] = ((split, -1),)
        tables = problem.tables((0,), labels)
        at = tables.incumbent
        objective = sum(own[at[i]] for i, own in enumerate(tables.unary)) + sum(pair[at[i], at[j]] for (i, j), pair in tables.pairs.items())
        cost = problem.evaluate(problem.assignment(labels)).cost
        assert cost.objective_seconds == pytest.approx(objective + problem.fixed_seconds(), rel=1e-9)
        found += [c.count for c in as_compiled(cost.collectives) if c.kind == "all_reduce"]
    assert found == [1, TRIPS]


@pytest.mark.parametrize("cluster", ["v5e:2x2", "cpu:4"])
@pytest.mark.parametrize(
    "scaled", [lambda g, w: g / 4, lambda g, w: -g, lambda g, w: g / (1.0 + jnp.abs(w).sum()), lambda g, w: g.astype("bfloat16")]
)
def test_what_is_scaled_before_it_is_added_is_combined_first(scaled, cluster):
    """Averages over slices of a batch: scaling follows its product and has no partial sums, for the tables as for the judge."""

    def averaged(w, x):
        return jax.lax.scan(lambda sums, part: (sums + scaled(part.T @ w, w), None), jnp.zeros_like(w), x)[0]

    square = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    graph = trace(averaged, square, jax.ShapeDtypeStruct((TRIPS, 16, 16), jnp.float32)).graph
    problem = Problem(profile(graph, rules_of(graph)), CostModel(eager_cluster(cluster), Mesh.of({"data": 2, "model": 2})))
    tables, rng = problem.tables((0, 1), problem.start()), random.Random(0)
    for _ in range(200):
        at = [rng.randrange(len(options)) for options in tables.labels]
        labels = [options[k] for options, k in zip(tables.labels, at, strict=True)]
        cost = problem.evaluate(problem.assignment(labels)).cost
        assert cost.objective_seconds == pytest.approx(table_cost(tables.unary, tables.pairs, at) + problem.fixed_seconds(), rel=1e-9)


@pytest.mark.parametrize(("cluster", "made"), [("v5e:2x4", [("data", "model")]), ("cpu:8", [("data",), ("model",)])])
def test_reductions_of_two_dimensions_are_one_collective_where_compilers_fold_them(cluster, made):
    """XLA's partitioner combines over one dimension after the other; XLA:TPU and XLA:GPU make one of it, XLA:CPU does not."""
    strategy = autoshard.evaluate(jnp.sum, X, cluster=cluster, mesh={"data": 2, "model": 4}, in_specs={"*": P("data", "model")})
    assert [c.mesh_axes for c in as_compiled(strategy.cost.collectives)] == made
    assert [c.mesh_axes for c in strategy.cost.collectives] == [("data", "model")]
    if cluster.startswith("cpu"):
        assert autoshard.verify(strategy, jnp.sum, X, target="cpu").exact
