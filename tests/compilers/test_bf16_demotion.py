"""What compilers round before they send it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from problems import eager_cluster

import autoshard
from autoshard.analysis.demanded_precision import precision_demands
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.bf16_demotion import is_demoted
from autoshard.compilers.buffer_assignment import peak_memory
from autoshard.compilers.buffers import Copy
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Assignment, Mesh, as_compiled
from autoshard.judge.evaluate import evaluate
from autoshard.judge.model import CostModel
from autoshard.rules import rules_of
from autoshard.trace import trace

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
W = jax.ShapeDtypeStruct((32, 16), jnp.float32)


@pytest.mark.parametrize(
    ("program", "cluster", "share"),
    [
        (lambda w, x: x @ w, "v5e:2x4", 0.5),
        (lambda w, x: x @ w, "h100:8", 1.0),
        (lambda w, x: x @ w.T.reshape(16, 32).T, "v5e:2x4", 0.5),
        (lambda w, x: jnp.matmul(x, w, precision="highest"), "v5e:2x4", 1.0),
        (lambda w, x: jnp.tanh(x @ w) + jnp.tanh(w).sum(), "v5e:2x4", 0.5),
        (lambda w, x: jnp.einsum("ij,bi->bij", w, x), "v5e:2x4", 1.0),
    ],
)
def test_gathered_operands_of_products_are_rounded_first(program, cluster, share):
    """A float32 weight that only products of default precision read whole is sent as bfloat16 on TPUs; the objective has the plan."""
    split = {"w": P("data"), "x": P("data")}
    strategy = autoshard.evaluate(program, W, X, cluster=eager_cluster(cluster), mesh={"data": 8}, in_specs=split)
    gathers = [c for c in strategy.cost.collectives if c.kind == "all_gather" and c.bytes == 32 * 16 * 4]
    assert len(gathers) == 1
    assert sum(c.bytes for c in as_compiled(gathers)) == share * gathers[0].bytes
    cost = strategy.cost
    assert (cost.compute_seconds + cost.communication_seconds < cost.objective_seconds) == (share < 1)
    assert autoshard.verify(strategy, program, W, X).exact


@pytest.mark.parametrize(("dtype", "share"), [(jnp.bfloat16, 0.5), (jnp.int32, 1.0)])
def test_stacks_that_loops_round_are_rounded_before_they_are_sent(dtype, share, monkeypatch):
    """A stack of float32 weights that a scan reads whole and rounds slice by slice is gathered, and held, as bfloat16."""

    def program(ws, x):
        return jax.lax.scan(lambda x, w: (x @ w.astype(dtype), None), x, ws)[0]

    held = []
    monkeypatch.setattr("autoshard.judge.evaluate.peak_memory", lambda *of: held.append(of[2]) or peak_memory(*of))
    ws, x = jax.ShapeDtypeStruct((4, 32, 32), jnp.float32), jax.ShapeDtypeStruct((64, 32), dtype)
    split = {"ws": P(None, "data"), "x": P("data")}
    strategy = autoshard.search(program, ws, x, cluster="v5e:2x4", mesh={"data": 8}, pins=split, searcher="recursive_programming")
    (gathered,) = (c for c in strategy.cost.collectives if c.kind == "all_gather" and c.bytes == ws.size * 4)
    assert sum(c.bytes for c in as_compiled([gathered])) == share * gathered.bytes
    (copy,) = (copy for copy in held[-1].values() if copy.nbytes == ws.size * 4)
    assert copy.rounded == (share < 1)


@pytest.mark.parametrize(("rounded", "share"), [(True, 0.5), (False, 1.0)])
def test_rounded_copies_take_half_the_memory(rounded, share):
    """A copy of what is rounded before it is sent takes the bytes of bfloat16 on a TPU."""
    cluster = Cluster.parse("v5e:2x4")
    whole, split = (-1,), (0,)
    graph = trace(lambda w: jnp.tanh(w), jax.ShapeDtypeStruct((1 << 14, 1 << 14), jnp.float32)).graph
    (value,), nbytes = graph.arguments, 2.0**30
    facts, assignment = (
        program_facts(graph, rules_of(graph), compiler_of(cluster)),
        Assignment(Mesh.of({"data": 8}), {0: ((0, 0),)}, {value: split, graph.results[0]: split}),
    )
    peaks = [peak_memory(facts, assignment, copies, {}).nbytes for copies in ({}, {(value, whole): Copy(nbytes, 0, 0, rounded)})]
    assert peaks[1] - peaks[0] == share * nbytes


def test_what_others_read_too_keeps_its_bits():
    """A rearranged weight is rounded where only products read it, not where an elementwise op does too."""

    def program(w, x):
        seen = w.reshape(32, 16)
        return x @ w.T, x @ seen, jnp.exp(seen)

    graph = trace(program, jax.ShapeDtypeStruct((16, 32), jnp.float32), X).graph
    demands = precision_demands(graph).on_values
    assert {op.primitive: is_demoted(demands[op.results[0]]) for op in graph.walk() if op.primitive in ("reshape", "transpose")} == {
        "reshape": False,
        "transpose": True,
    }


@pytest.mark.parametrize(("body", "share"), [(lambda x, w: jnp.tanh(x @ w), 0.5), (lambda x, w: jnp.tanh(x @ w) + w, 1.0)])
def test_loops_that_multiply_round_what_they_read(body, share):
    """Stacked weights that are gathered for a loop are sent as bfloat16 where its body does nothing but multiply them."""

    def program(w, x):
        return jax.lax.scan(lambda x, w: (body(x, w), None), x, w)[0]

    args = jax.ShapeDtypeStruct((4, 32, 32), jnp.float32), jax.ShapeDtypeStruct((32, 32), jnp.float32)
    cluster, split = eager_cluster(), {"w": P("data"), "x": P("data")}
    strategy = autoshard.evaluate(program, *args, cluster=cluster, mesh={"data": 4, "model": 2}, in_specs=split)
    (gather,) = [c for c in strategy.cost.collectives if c.tensor == "w float32[4,32,32]"]
    assert sum(c.bytes for c in as_compiled([gather])) == share * gather.bytes


@pytest.mark.parametrize(("looks", "share"), [(False, 0.5), (True, 1.0)])
def test_what_a_loop_carries_for_its_products_is_rounded(looks, share):
    """A carry that is gathered for the next trip's product alone is sent as bfloat16 (seen in an LSTM, libtpu 0.0.42)."""

    def program(x, w):
        last, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)
        return last if looks else last @ w[0]

    graph = trace(program, jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((4, 32, 32), jnp.float32)).graph
    facts = program_facts(graph, rules_of(graph), compiler_of(eager_cluster()))
    product, tanh = (next(op for op in graph.walk() if op.primitive == name) for name in ("dot_general", "tanh"))
    split = {value: (1,) for value in (*product.results, *tanh.results)}
    choices = {product.index: ((2, -1),), tanh.index: ((1, -1),)}
    assert [str(facts.rules[op.index]).split(" {")[0] for op in (product, tanh)] == ["([i, k], [k, j])->([i, j])", "([i, j])->([i, j])"]
    mesh = Mesh.of({"data": 8})
    cost = evaluate(facts, CostModel(eager_cluster(), mesh), Assignment(mesh, choices, split)).cost
    (gather,) = [c for c in cost.collectives if c.kind == "all_gather"]
    assert gather.count == 4 and sum(c.bytes for c in as_compiled([gather])) == share * gather.bytes


@pytest.mark.parametrize(
    ("put", "product", "share"),
    [
        (lambda x, y, looked: jnp.stack([x, looked], 1), "bid,bjd->bij", 1.0),
        (lambda x, y, looked: jnp.stack([x, jnp.tanh(looked)], 1), "bid,bjd->bij", 1.0),
        (lambda x, y, looked: jnp.concatenate([x[:, None], looked[:, None]], 1), "bid,bjd->bij", 1.0),
        (lambda x, y, looked: jnp.stack([x, y], 1), "bid,bjd->bij", 0.5),
        (lambda x, y, looked: jnp.stack([x, looked], 1), "bid,cjd->bicj", 0.5),
        (lambda x, y, looked: jnp.concatenate([x, looked]).reshape(64, 2, 32), "bid,bjd->bij", 0.5),
    ],
)
def test_single_rows_beside_gathered_ones_are_exchanged_as_they_are(put, product, share):
    """Of many matrices with another row that is gathered none is rounded before an all_to_all; two rows are, and a plain product's."""

    def program(x, y, z, table, places):
        moved = jax.lax.with_sharding_constraint(jnp.tanh(x), P(None, "data"))
        return jnp.einsum(product, put(moved, y, table[places]), z)

    rows = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    table, places = jax.ShapeDtypeStruct((1000, 32), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    args = rows, rows, jax.ShapeDtypeStruct((64, 3, 32), jnp.float32), table, places
    split = {"x": P("data"), "y": P(None, "data"), "z": P(None, None, "data"), "table": P(None, "data"), "places": P()}
    strategy = autoshard.evaluate(program, *args, cluster=eager_cluster(), mesh={"data": 8}, in_specs=split)
    (exchange,) = (c for c in strategy.cost.collectives if c.kind == "all_to_all")
    assert sum(c.bytes for c in as_compiled([exchange])) == share * exchange.bytes


def test_gathered_rows_that_are_sent_are_rounded():
    """All of them, so that none that is not sent stands beside another (a recommender whose tables' columns are split, libtpu 0.0.42)."""

    def program(tables, places, z):
        rows = [jax.lax.with_sharding_constraint(table[places], P("data")) for table in tables]
        return jnp.einsum("bid,bjd->bij", jnp.stack(rows, 1), z)

    tables = [jax.ShapeDtypeStruct((1000, 32), jnp.float32)] * 2
    args = tables, jax.ShapeDtypeStruct((64,), jnp.int32), jax.ShapeDtypeStruct((64, 3, 32), jnp.float32)
    split = {"tables*": P(None, "data"), "places": P(), "z": P("data")}
    strategy = autoshard.evaluate(program, *args, cluster=eager_cluster(), mesh={"data": 8}, in_specs=split)
    exchanges = [c for c in strategy.cost.collectives if c.kind == "all_to_all"]
    assert len(exchanges) == 2 and sum(c.bytes for c in as_compiled(exchanges)) == 64 * 32 / 8 * 4


@pytest.mark.parametrize(
    ("done", "share"),
    [
        (jax.nn.relu, 0.5),
        (jnp.abs, 0.5),
        (lambda x: jnp.minimum(x, 3.0), 0.5),
        (lambda x: jax.lax.clamp(0.0, x, 6.0), 0.5),
        (lambda x: -x, 1.0),
        (jnp.tanh, 1.0),
    ],
)
def test_what_is_compared_with_bounds_is_demoted(done, share):
    """What an all_to_all brings for a product, by what is done with it in between (each compiled by libtpu 0.0.42)."""

    def program(x, w):
        return done(jax.lax.with_sharding_constraint(x, P(None, "data"))) @ w

    args = jax.ShapeDtypeStruct((64, 32), jnp.float32), jax.ShapeDtypeStruct((32, 16), jnp.float32)
    strategy = autoshard.evaluate(program, *args, cluster=eager_cluster(), mesh={"data": 8}, in_specs={"x": P("data"), "w": P("data")})
    (exchange,) = (c for c in strategy.cost.collectives if c.kind == "all_to_all")
    assert sum(c.bytes for c in as_compiled([exchange])) == share * exchange.bytes


@pytest.mark.parametrize(
    ("done", "rounded"),
    [
        (lambda x: x, True),
        (lambda x: jnp.maximum(x, 0.0), True),
        (lambda x: jnp.where(jnp.eye(64, 32, dtype=bool), x, 0.0), True),
        (lambda x: x[:16], True),
        (lambda x: x[jnp.array([3, 1])], True),
        (lambda x: jnp.broadcast_to(x, (4, 64, 32)), True),
        (lambda x: jnp.pad(x, ((0, 8), (0, 0))), True),
        (jax.lax.optimization_barrier, True),
        (jnp.tanh, False),
    ],
)
def test_what_products_read_is_kept_rounded(done, rounded):
    """What is stored, by what is done with it before it is multiplied: ``bf16[1024,32,128]`` of sums along rows (libtpu 0.0.42)."""
    graph = trace(lambda x, w: done(jnp.cumsum(x, 0)) @ w, X, W).graph
    facts = program_facts(graph, rules_of(graph), compiler_of(Cluster.parse("v5e:2x4")))
    (stored,) = next(op for op in graph.walk() if op.primitive == "cumsum").results
    assert facts.fusion.stored[stored] and facts.fusion.narrow[stored] == rounded


@pytest.mark.parametrize(("dtype", "rounded"), [(jnp.bfloat16, True), (jnp.float32, False)])
def test_sums_that_are_spread_and_rounded_are_kept_rounded(dtype, rounded):
    """The sums that a mean's gradient is made of: ``bf16[4096] fusion`` (libtpu 0.0.42); of sums that are only summed again every bit."""

    def program(x, y):
        sums = jnp.sum(x.astype(jnp.float32) * y.astype(jnp.float32), 1)
        return jnp.broadcast_to(sums[:, None], (64, 32)).astype(dtype) * y

    x = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16)
    graph = trace(program, x, x).graph
    facts = program_facts(graph, rules_of(graph), compiler_of(Cluster.parse("v5e:2x4")))
    (sums,) = next(op for op in graph.walk() if op.primitive == "reduce_sum").results
    assert facts.fusion.stored[sums] and facts.fusion.narrow[sums] == rounded
