"""What programs only add up, and what the judge and `verify` make of that."""

from __future__ import annotations

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import as_compiled
from autoshard.rules import rules_of
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


def recomputed(w, x):
    """A weight used twice, in layers that are computed again: each gradient is made in another region than their sum."""
    first = jax.checkpoint(lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w.T))
    second = jax.checkpoint(lambda w, x: jnp.sin(x @ w))
    return jax.grad(lambda w: jnp.sum(second(w, first(w, x))))(w)


TIED = tied, (W, X, jax.ShapeDtypeStruct((64, 16), jnp.float32))
SLICES = W, jax.ShapeDtypeStruct((TRIPS, *X.shape), jnp.float32)


def sums_of(fn, args):
    graph = trace(fn, *args).graph
    return graph, program_facts(graph, rules_of(graph), compiler_of(Cluster.parse("v5e:2x4"))).sums


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
        ("h100:8", P(), "all_reduce", [2, 2]),
        ("v5e:2x4", P("data"), "reduce_scatter", [2, 2]),
        ("h100:8", P("data"), "reduce_scatter", [2, 2]),
    ],
)
def test_gradients_that_are_widened_before_they_are_added(cluster, lies, kind, sent):
    """Of a float32 weight that two bfloat16 products read: each is combined as it is, in two bytes a number."""

    def step(w, x):
        def loss(w):
            y = jnp.tanh(x @ w.astype(jnp.bfloat16))
            return jnp.tanh(y @ w.astype(jnp.bfloat16)).astype(jnp.float32).mean()

        return w - jax.grad(loss)(w)

    args = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16)
    found = autoshard.evaluate(step, *args, cluster=cluster, mesh={"data": 8}, in_specs={"w": lies, "x": P("data")}, donate_argnums=0)
    made = [collective for collective in as_compiled(found.cost.collectives) if collective.kind == kind and collective.bytes > 4]
    assert [collective.bytes / 256**2 for collective in made for _ in range(collective.count)] == sent


@pytest.mark.parametrize("weight", ["bij", "ibj"])
def test_batched_gradients_are_one_sum(weight):
    """However a transpose between the products and their sum moves the dimensions."""

    def step(w, x):
        def loss(w):
            return jnp.sum(jnp.sin(jnp.einsum(f"bki,{weight}->bkj", x, w))) + jnp.sum(jnp.tanh(jnp.einsum(f"{weight},bjk->bik", w, x)))

        return jax.grad(loss)(w)

    cube = jax.ShapeDtypeStruct((32, 32, 32), jnp.float32)
    assert len(sums_of(step, (cube, cube))[1].additions) == 1


@pytest.mark.parametrize(("fn", "trips"), [(accumulated, TRIPS), (looked_at, 1)])
def test_what_a_loop_only_adds_up_is_found(fn, trips):
    """A gradient that a loop adds to a value nothing else reads is accumulated over its trips; one that is looked at is not."""
    graph, sums = sums_of(fn, SLICES)
    products = [op.index for op in graph.walk() if op.primitive == "dot_general" and op.trips == TRIPS]
    assert max(sums.accumulated[index] for index in products) == trips


@pytest.mark.parametrize("cluster", ["v5e:2x4", "cpu:8"])
def test_reductions_of_two_dimensions_are_one_collective(cluster):
    """Partial sums over axes of several dimensions are combined at once, whatever the compiler."""
    strategy = autoshard.evaluate(jnp.sum, X, cluster=cluster, mesh={"data": 2, "model": 4}, in_specs={"*": P("data", "model")})
    assert [c.mesh_axes for c in as_compiled(strategy.cost.collectives)] == [("data", "model")]
    if cluster.startswith("cpu"):
        assert autoshard.verify(strategy, jnp.sum, X, target="cpu").exact


def counted(strategy):
    """How often each kind of collective runs, of more than a scalar."""
    found = Counter()
    for collective in as_compiled(strategy.cost.collectives):
        found[collective.kind] += collective.count if collective.bytes > 4 else 0
    return {kind: count for kind, count in found.items() if count}


def nested(w, x):
    """A weight that is used twice in every trip: its gradients are added to each other, then over the trips."""

    def grow(sums, part):
        def loss(w):
            half = w.astype(jnp.bfloat16)
            return jnp.sum(jnp.tanh(jnp.tanh(part.astype(jnp.bfloat16) @ half) @ half.T).astype(jnp.float32))

        return sums + jax.grad(loss)(w), None

    return jax.lax.scan(grow, jnp.ones_like(w), x, reverse=True)[0]


def averaged(w, x):
    """Gradients and losses scaled where they are added, by numbers that are known and that are not."""

    def grow(sums, part):
        value, gradient = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(part @ w)))(w)
        total, losses = sums
        return (total + gradient / TRIPS * w[0, 0], losses + 0.5 * value), None

    (total, losses), _ = jax.lax.scan(grow, (jnp.zeros_like(w), jnp.zeros(())), x)
    return total * losses


def layered(w, x):
    """Gradients of layers that a loop stacks up, masked and added up by another one: those of all layers are combined at once."""

    def grow(sums, part):
        def layer(seen, own):
            return seen, jax.grad(lambda own: jnp.sum(jnp.tanh(part @ own)))(own)

        _, gradients = jax.lax.scan(layer, None, jnp.stack([w, 2 * w, 3 * w]))
        return sums + jnp.where(w[0, 0] < 9, gradients, 0.0), None

    return jax.lax.scan(grow, jnp.zeros((3, *w.shape)), x)[0].sum(0)


def stacked_twice(w, x):
    """The same, but what is stacked up is also read."""

    def grow(sums, part):
        _, gradients = jax.lax.scan(lambda _, own: (None, jax.grad(lambda own: jnp.sum(jnp.tanh(part @ own)))(own)), None, w[None])
        return sums + gradients * jnp.max(gradients), None

    return jax.lax.scan(grow, jnp.zeros((1, *w.shape)), x)[0][0]


def squared(w, x):
    """A square of a sum is no sum of squares."""

    def grow(sums, part):
        value = jnp.sum(jnp.tanh(part @ w))
        return sums + value * value, None

    return jax.lax.scan(grow, jnp.zeros(()), x)[0] * w


def spread(w, x):
    """One number that is added to many."""
    return jax.lax.scan(lambda sums, part: (sums + jnp.sum(jnp.tanh(part @ w)), None), jnp.zeros_like(w), x)[0]


def truncated(w, x):
    """Whole numbers that are made of sums: not what those made of the parts add up to."""

    def grow(sums, part):
        return sums + jnp.sum(jnp.tanh(part @ w), 0).astype(jnp.int32), None

    return jax.lax.scan(grow, jnp.zeros(w.shape[1:], jnp.int32), x)[0]


def halved(w, x):
    """Quotients of whole numbers: not those of the parts."""

    def grow(sums, part):
        return sums + jax.lax.div(jnp.sum(jnp.round(part * 3).astype(jnp.int32), 0), 4), None

    return jax.lax.scan(grow, jnp.zeros(x.shape[2:], jnp.int32), x)[0] + w[:, 0].astype(jnp.int32)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("fn", "args", "lies", "sent"),
    [
        (*TIED, P(), {"all_reduce": 1}),
        (*TIED, P("data"), {"all_gather": 1, "reduce_scatter": 1}),
        (recomputed, (W, X), P(), {"all_reduce": 1}),
        (accumulated, SLICES, P(), {"all_reduce": 1}),
        (nested, SLICES, P(), {"all_reduce": 1}),
        (averaged, SLICES, P(), {"all_reduce": 1}),
        (layered, SLICES, P(), {"all_reduce": 1}),
        (stacked_twice, SLICES, P(), {"all_reduce": TRIPS}),
        (squared, SLICES, P(), {}),
        (spread, SLICES, P(), {}),
        (truncated, SLICES, P(), {"all_reduce": TRIPS}),
        (halved, SLICES, P(), {"all_reduce": TRIPS}),
        (looked_at, SLICES, P(), {"all_reduce": TRIPS}),
    ],
)
def test_sums_are_added_before_they_are_combined(fn, args, lies, sent):
    """As often as is planned, and the numbers are those of one device."""
    batch = {name: P("data") if fn in (TIED[0], recomputed) else P(None, "data") for name in ("x", "y")}
    strategy = strategy_of(fn, args, "cpu:8", {"w": lies} | {name: batch[name] for name in ("x", "y")[: len(args) - 1]})
    assert counted(strategy) == sent
    scalars = {each.count for each in as_compiled(strategy.cost.collectives) if each.bytes == 4}
    assert scalars == ({TRIPS} if fn in (squared, spread) else {1} if fn is averaged else set())
    assert autoshard.verify(strategy, fn, *args, target="cpu").exact
    arrays = [jax.random.normal(jax.random.key(k), each.shape, each.dtype) for k, each in enumerate(args)]
    within = 0.3 if fn is nested else 1e-3  # of bfloat16 products in the tens
    np.testing.assert_allclose(strategy.apply(fn)(*arrays), jax.jit(fn)(*arrays), rtol=2e-4, atol=within)


def test_a_sum_that_is_rounded_is_combined_in_every_trip():
    """Partial sums are not rounded on their way into what a loop carries: one rounding a device and trip is less exact than one a trip."""

    def rounded(w, x):
        def grow(sums, part):
            return sums + jax.grad(lambda w: jnp.sum(jnp.tanh(part @ w)))(w).astype(jnp.bfloat16), None

        return jax.lax.scan(grow, jnp.zeros(w.shape, jnp.bfloat16), x)[0]

    assert counted(strategy_of(rounded, SLICES, "cpu:8", {"x": P(None, "data")})) == {"all_reduce": TRIPS}


def test_sums_over_different_axes_are_combined_apart():
    """Of two products that are added, each is combined over the axis of its own rows."""

    def fn(x, y, u, v):
        return x.T @ y + u.T @ v

    arrays = [jax.random.normal(jax.random.key(k), (16, 32)) for k in range(4)]
    rows = {name: P("a" if name in "xy" else "b") for name in "xyuv"}
    strategy = autoshard.evaluate(fn, *arrays, cluster="cpu:8", mesh={"a": 2, "b": 4}, in_specs=rows)
    assert counted(strategy) == {"all_reduce": 2}
    np.testing.assert_allclose(strategy.apply(fn)(*arrays), fn(*arrays), rtol=1e-4, atol=1e-4)
