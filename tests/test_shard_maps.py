"""Programs with a `jax.shard_map` of their own: what it computes and sends is costed as it is compiled; results are plain JAX's."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.ir import Rule
from autoshard.rules import rules_of
from autoshard.trace import trace
from tests.requirements import needs_tpu_compiler

D, N = 16, 128
MESH = jax.make_mesh((8,), ("i",), axis_types=(AxisType.Auto,))
GRID = jax.make_mesh((2, 4), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
TURN = [(k, (k + 1) % 8) for k in range(8)]


def mapped(function, in_specs, out_specs, mesh=MESH, **options):
    """The function on the shards of a mesh."""
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def stepped(loss: Callable) -> Callable:
    """A train step of a loss."""

    def step(weights, x):
        value, gradients = jax.value_and_grad(loss)(weights, x)
        return weights - 0.1 * gradients, value

    return step


def ring(q, k, v):
    """Attention to keys and values that go round a ring, with a running softmax."""

    def visit(carry, _):
        k, v, out, most, total = carry
        scores = q @ k.T
        higher = jnp.maximum(most, scores.max(-1))
        weights, kept = jnp.exp(scores - higher[:, None]), jnp.exp(most - higher)
        out, total = out * kept[:, None] + weights @ v, total * kept + weights.sum(-1)
        return (lax.ppermute(k, "i", TURN), lax.ppermute(v, "i", TURN), out, higher, total), None

    zero = lax.pcast(jnp.zeros(q.shape[0]), ("i",), to="varying")
    (_, _, out, _, total), _ = lax.scan(visit, (k, v, jnp.zeros_like(q), zero - 1e9, zero), None, length=8)
    return out / total[:, None]


def attended(w, x):
    q, k, v = (x @ w[n] for n in range(3))
    return jnp.mean((mapped(ring, P("i"), P("i"))(q, k, v) @ w[3]) ** 2)


def dispatched(x, w):
    """Rows sent to the devices of their experts, and back."""
    sent = lax.all_to_all(x.reshape(8, -1, D), "i", 0, 0)
    return lax.all_to_all(jax.nn.relu(sent @ w[0]), "i", 0, 0).reshape(x.shape)


def routed(w, x):
    return jnp.mean((mapped(dispatched, (P("i"), P("i")), P("i"))(x @ w[0], w) @ w[1]) ** 2)


def staged(w, x):
    """Eight stages of a pipeline, one a device, through which eight microbatches go."""
    stage = lax.axis_index("i")

    def tick(t, carry):
        state, outs = carry
        state = jnp.tanh(jnp.where(stage == 0, x[jnp.minimum(t, 7)], state) @ w[0])
        outs = jnp.where(stage == 7, lax.dynamic_update_index_in_dim(outs, state, jnp.clip(t - 7, 0, 7), 0), outs)
        return lax.ppermute(state, "i", TURN), outs

    start = lax.pcast(jnp.zeros_like(x), ("i",), to="varying")
    return lax.psum(jnp.where(stage == 7, lax.fori_loop(0, 15, tick, (start[0], start))[1], 0), "i")


def piped(w, x):
    return jnp.mean(mapped(staged, (P("i"), P()), P())(w, x.reshape(8, -1, D)) ** 2)


def averaged(w, x):
    """A step of data parallelism written by hand."""
    value, gradients = jax.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w[0]) @ w[1]) ** 2))(lax.pcast(w, "i", to="varying"))
    return w - 0.1 * lax.pmean(gradients, "i"), lax.pmean(value, "i")


def gathered(x, w):
    """A layer whose sequence is split outside and whole inside."""
    return lax.psum_scatter(jnp.tanh(lax.all_gather(x, "i", tiled=True) @ w[0]) @ w[0].T, "i", scatter_dimension=0, tiled=True)


def sequential(w, x):
    layer = mapped(gathered, (P("i"), P("i")), P("i"))
    return jnp.mean((layer(layer(x @ w[0], w), w) @ w[1]) ** 2)


def two_axes(w, x):
    """Two shard_maps, over one axis and over both, between ops that are sharded by the search."""
    summed = mapped(lambda x: lax.psum(jnp.sin(x), "b"), P("a", "b"), P("a", None), GRID)
    product = mapped(lambda x, w: lax.all_gather(x, "a", tiled=True) @ w, (P("a"), P(None, "b")), P(None, "b"), GRID, check_vma=False)
    return jnp.mean(jnp.tanh(product(jnp.repeat(summed(x @ w[0]), 4, 1), w[1]) @ w[2]) ** 2)


def branches(w, x):
    """Collectives in a while loop of known length and behind a branch, in a function with a derivative of its own, checkpointed."""

    @jax.custom_jvp
    def mean(x):
        return lax.pmean(x, "i")

    mean.defjvp(lambda primals, tangents: (mean(*primals), lax.pmean(*tangents, "i")))

    def body(x):
        x = lax.cond(lax.axis_index("i") % 2 == 0, jnp.sin, jnp.cos, x)
        return lax.fori_loop(0, 3, lambda _, x: x + mean(x), x)

    return jnp.mean(jax.checkpoint(mapped(body, P("i"), P("i")))(x @ w[0]) ** 2)


def partly(w, x):
    """A shard_map of one of two axes; the other one is left to the partitioner."""
    return jnp.mean(mapped(lambda x: lax.psum(jnp.sin(x), "b"), P("b"), P(None), GRID, axis_names={"b"})(x @ w[0]) ** 2)


HALVES, PAIRS = [[0, 1, 2, 3], [4, 5, 6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]


def grouped(w, x):
    """Collectives among groups of an axis' devices: its halves, and pairs across them."""

    def body(x):
        x = lax.all_gather(x - lax.pmean(x, "i", axis_index_groups=HALVES), "i", axis_index_groups=PAIRS, tiled=True)
        return lax.psum_scatter(x, "i", axis_index_groups=HALVES, tiled=True)

    return jnp.mean(mapped(body, P("i"), P("i"), check_vma=False)(x @ w[0]) ** 2)


def nested(w, x):
    """Tensor parallelism over one axis inside data parallelism over the other."""

    def layer(x, up, down):
        return lax.psum(jnp.tanh(x @ up) @ down, "b")

    def shard(x, w):
        over_b = {"in_specs": (P(), P(None, "b"), P("b")), "out_specs": P(), "axis_names": {"b"}, "check_vma": False}
        x = jax.shard_map(layer, **over_b)(x, w[0], w[1])
        half = jax.shard_map(lambda x: jnp.sin(x), in_specs=P("b"), out_specs=P("b"), axis_names={"b"}, check_vma=False)(x)
        return half - lax.pmean(half.mean(0), "a")

    return jnp.mean(mapped(shard, (P("a"), P()), P("a"), GRID, axis_names={"a"}, check_vma=False)(x @ w[2], w[:2]) ** 2)


ROW, SHARD = N // 8 * D * 4, D * D * 4
OWN = {  # the collectives that each program writes itself: kind, axes, bytes and count of each
    "attended": (stepped(attended), [("collective_permute", ("i",), ROW, 8)] * 4),
    "routed": (stepped(routed), [("all_to_all", ("i",), ROW, 1)] * 4),
    "piped": (stepped(piped), [("collective_permute", ("i",), ROW, 15)] * 2 + [("all_reduce", ("i",), 8 * ROW, 1)]),
    "averaged": (mapped(averaged, (P(), P("i")), (P(), P())), [("all_reduce", ("i",), 8 * SHARD, 1), ("all_reduce", ("i",), 4.0, 1)]),
    "sequential": (stepped(sequential), [("all_gather", ("i",), 8 * ROW, 1)] * 4 + [("reduce_scatter", ("i",), 8 * ROW, 1)] * 4),
    "two_axes": (stepped(two_axes), None),
    "branches": (stepped(branches), None),
    "grouped": (grouped, [("all_reduce", ("i",), ROW, 1), ("all_gather", ("i",), 2 * ROW, 1), ("reduce_scatter", ("i",), 2 * ROW, 1)]),
    "nested": (nested, [("all_reduce", ("b",), N // 2 * D * 4, 1), ("all_reduce", ("a",), D * 4, 1)]),
    "partly": (stepped(partly), [("all_reduce", ("b",), N // 4 * D * 4, 1)]),
}


def arguments():
    """Weights of eight shards, and a batch."""
    random = np.random.default_rng(0)
    return [(random.normal(size=shape) * 0.3).astype(np.float32) for shape in ((8, D, D), (N, D))]


def written(strategy):
    """The collectives of a program's own."""
    found = (each for each in strategy.cost.collectives if "written in the program" in each.cause)
    return sorted((each.kind, each.mesh_axes, each.bytes, each.count) for each in found)


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", OWN)
def test_what_a_shard_map_computes_and_sends_is_what_is_compiled(name):
    """Collectives are in the cost with axes, bytes, count and line; XLA:CPU has these and the FLOPs; results are those of plain JAX."""
    step, wanted = OWN[name]
    args = arguments()
    strategy = autoshard.search(step, *args, cluster="cpu:8")
    assert wanted is None or written(strategy) == sorted(wanted)
    assert all("test_shard_maps.py" in each.source and each.seconds > 0 for each in strategy.cost.collectives)
    verification = autoshard.verify(strategy, step, *args, target="cpu")
    assert verification.exact
    assert verification.actual_flops == pytest.approx(strategy.cost.flops)
    for found, expected in zip(jax.tree.leaves(strategy.apply(step)(*args)), jax.tree.leaves(jax.jit(step)(*args)), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.sample(1)
@pytest.mark.parametrize("searcher", ["recursive_programming", "data_parallel", "fully_sharded", "tensor_parallel", "sharding_propagation"])
def test_every_searcher_keeps_the_specs_of_a_shard_map(searcher):
    """What a shard_map reads and returns is laid out as its specs say, whoever searches; the judge's cost has its collectives."""
    args = arguments()
    strategy = autoshard.search(OWN["two_axes"][0], *args, cluster="cpu:8", searcher=searcher)
    expected = jax.tree.leaves(jax.jit(OWN["two_axes"][0])(*args))
    assert written(strategy)
    for found, each in zip(jax.tree.leaves(strategy.apply(OWN["two_axes"][0])(*args)), expected, strict=True):
        np.testing.assert_allclose(found, each, rtol=1e-5, atol=1e-6)


def test_the_optimum_is_that_of_integer_programming():
    """Fixed work is in the objective and in its bound, by elimination as by integer programming."""
    args, step = arguments(), OWN["routed"][0]
    found = [autoshard.search(step, *args, cluster="cpu:8", searcher=name) for name in ("dynamic_programming", "integer_programming")]
    assert found[0].gap == pytest.approx(0, abs=1e-9)
    assert found[0].cost.objective_seconds == pytest.approx(found[1].cost.objective_seconds)


def test_specs_that_somebody_chose_are_costed_with_the_shard_map():
    """`evaluate` has the shard_map's collectives, and what the given shardings cost beside them."""
    args, step = arguments(), OWN["attended"][0]
    given = autoshard.evaluate(step, *args, cluster="cpu:8", mesh={"i": 8}, in_specs=(P(), P(None, "i")))
    assert written(given) == sorted(OWN["attended"][1])
    assert autoshard.verify(given, step, *args, target="cpu").exact


def test_rules_of_a_shard_map():
    """Operands are taken apart and results put together as the specs say; an op of the body has whole dimensions alone."""

    def program(x):
        return mapped(lambda x: lax.psum(x @ x.T, "b"), P(("a", "b")), P(None), GRID, check_vma=False)(x)

    graph = trace(program, jax.ShapeDtypeStruct((16, 4), jnp.float32)).graph
    enters, *body, leaves = rules_of(graph)
    assert str(enters) == "([ijk, l])->([k, l]) {i=2, j=4, k=2, l=4} need_replication={k, l}"
    assert enters.given == ((2, 0), (4, 1)) and leaves.given == ((2, -1), (4, -1))
    assert all(isinstance(rule, Rule) and {factor.kind for factor in rule.factors} <= {"need_replication"} for rule in body)


def test_a_cluster_of_another_size_is_refused():
    """With the line of the shard_map, its mesh and what to search for."""
    with pytest.raises(autoshard.ClusterError, match=r"the shard_map at .*test_shard_maps.*on i=8, of 8 devices.*for a cluster of 8"):
        autoshard.search(OWN["routed"][0], *arguments(), cluster="v5e:2x2")


def test_of_two_meshes_the_finer_one_is_searched():
    """A shard_map over eight devices runs on a mesh of two axes that another one has."""

    def program(x):
        first = mapped(lambda x: x - lax.pmean(x, "i"), P("i"), P("i"))(x)
        return mapped(lambda x: x * lax.psum(x, "b"), P("a", "b"), P("a", "b"), GRID, check_vma=False)(first)

    (_, x) = arguments()
    strategy = autoshard.search(program, x, cluster="cpu:8", pins={"x": P("a")})
    assert strategy.mesh_shape == {"a": 2, "b": 4}
    assert autoshard.verify(strategy, program, x, target="cpu").exact


def test_microbatches_are_refused():
    """Where the body needs all examples, with its operation and line; `tests/microbatch/test_mapped.py` has those that are not."""
    with pytest.raises(autoshard.TraceError, match=r"dot_general at .*test_shard_maps.* pairs each example with others"):
        autoshard.search(OWN["attended"][0], *arguments(), cluster="cpu:8", microbatches=2)


@needs_tpu_compiler
@pytest.mark.slow(minutes=2)
@pytest.mark.parametrize("name", ["attended", "routed", "piped", "averaged"])
def test_xla_tpu_compiles_what_is_predicted(name):
    """Collectives are those of XLA:TPU's module, in the bytes in which it sends them."""
    step, _ = OWN[name]
    args = [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in arguments()]
    strategy = autoshard.search(step, *args, cluster="v5e:2x4")
    assert autoshard.verify(strategy, step, *args, target="tpu").exact
