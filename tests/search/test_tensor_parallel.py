"""Contraction pairs are found by their contractions alone, and split as experts split them, or better."""

from __future__ import annotations

import sys

import jax
import jax.numpy as jnp
import pytest
from problems import SMALL, eager_cluster, problem_of
from programs import PROGRAMS

import autoshard
from autoshard.errors import InfeasibleError
from autoshard.memory_limit.lagrangian import least_peak
from autoshard.search import Auto, DataParallel, TensorParallel
from autoshard.search.tensor_parallel import contraction_pairs
from benchmarks.models import MODELS, gpt, gpt_scan, moe


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def pairs_of(fn, *args):
    """First products, second ones and ends, each by its second operand's shape and its feature's size; the batch starts with b or x."""
    problem = problem_of(fn, *args)
    batch = {value for value, path in zip(problem.graph.arguments, problem.graph.argument_paths, strict=True) if path[0] in "bx"}
    found = contraction_pairs(problem, set(problem.graph.arguments) - batch)
    ops = problem.graph.walk()

    def described(splits):
        return sorted(
            (problem.graph.values[ops[op].operands[1]].shape, problem.rules[op].factors[factor].size) for op, factor in splits.items()
        )

    first = {op: factor for op, factor in found.pairs.items() if op not in found.seconds}
    return described(first), described({op: found.pairs[op] for op in found.seconds}), described(found.ends)


@pytest.mark.parametrize("make", [gpt, gpt_scan], ids=["unrolled", "scanned"])
def test_the_pairs_of_a_transformer_are_its_blocks_projections(make):
    """Heads pair query, key and value with the output, hidden units up with down; the vocabulary ends in a loss."""
    first, second, ends = pairs_of(*_program(make(2, 64, 4, 512, 16, 32)))
    n = 2 if make is gpt else 1
    assert first == sorted([((64, 256), 256), ((64, 3, 4, 16), 4)] * n)
    assert second == sorted([((256, 64), 256), ((4, 16, 64), 4)] * n)
    assert [size for _, size in ends] == [512, 512]


def _program(program):
    fn, args = program
    return fn, *args


def test_a_chain_of_products_pairs_two_by_two():
    """Of four products in a row each is in one pair: column, row, column, row."""

    def chain(p, q, r, s, x):
        return jnp.tanh(jnp.tanh(jnp.tanh(x @ p) @ q) @ r) @ s

    fn_args = chain, array(16, 64), array(64, 16), array(16, 128), array(128, 16), array(512, 16)
    first, second, _ = pairs_of(*fn_args)
    assert first == [((16, 64), 64), ((16, 128), 128)]
    assert second == [((64, 16), 64), ((128, 16), 128)]


@pytest.mark.parametrize("fused", ["split", "reshaped", "by_head"])
def test_fused_projections_that_are_taken_apart_leave_their_second_product_split(fused):
    """The output is split by heads; what makes query, key and value in one product pairs with it where heads come first, else follows."""
    batch, length, width, heads = 4, 32, 64, 8

    def attention(p, r, x):
        y = jnp.tanh(x @ p)
        if fused == "split":
            q, k, v = (part.reshape(batch, length, heads, -1) for part in jnp.split(y, 3, axis=-1))
        else:
            axis = 2 if fused == "reshaped" else 3
            q, k, v = jnp.moveaxis(y.reshape(batch, length, *((3, heads) if axis == 2 else (heads, 3)), -1), axis, 0)
        weights = jax.nn.softmax(jnp.einsum("bqhd,bshd->bhqs", q, k), -1)
        return jnp.einsum("bhqs,bshd->bqhd", weights, v).reshape(batch, length, width) @ r

    first, second, _ = pairs_of(attention, array(width, 3 * width), array(width, width), array(batch, length, width))
    assert first == ([((width, 3 * width), 3 * width)] if fused == "by_head" else [])
    assert second == [((width, width), width)]


def test_fused_gates_are_taken_apart_too():
    """One product makes gate and units; the product that contracts their product is split all the same."""

    def gated(p, r, x):
        gate, units = jnp.split(x @ p, 2, axis=-1)
        return (jax.nn.silu(gate) * units) @ r

    assert pairs_of(gated, array(64, 512), array(256, 64), array(512, 64))[:2] == ([], [((256, 64), 256)])


def test_a_first_product_that_contracts_nothing_follows_its_weight():
    """The last layer of a critic, transposed and scaled by a constant there, as in a gradient penalty, has no decision of its own."""

    def penalised(p, q, r, x):
        return (jnp.tanh(x @ p) * (jnp.ones((1, 1)) @ q)) @ r

    args = array(64, 256), array(1, 256), array(256, 64), array(128, 64)
    strategy = autoshard.search(penalised, *args, cluster="cpu:4", mesh={"model": 4}, searcher="tensor_parallel")
    assert strategy.in_specs[1:3] == (jax.P(None, "model"), jax.P("model", None))


def test_a_feature_that_is_reduced_between_is_no_pair():
    """A norm over the feature that the next product contracts keeps both whole."""

    def normed(p, q, x):
        y = x @ p
        return (y / y.sum(-1, keepdims=True)) @ q

    assert pairs_of(normed, array(16, 64), array(64, 16), array(512, 16))[:2] == ([], [])


def test_gated_units_share_their_second_product():
    """Two first products that are multiplied go with one second product, and leave one reduction on the way forward."""

    def step(w, x):
        def loss(w):
            return (((jax.nn.silu(x @ w["p"]) * (x @ w["q"])) @ w["r"]) ** 2).sum()

        return jax.tree.map(jnp.subtract, w, jax.grad(loss)(w))

    args = {"p": array(64, 256), "q": array(64, 256), "r": array(256, 64)}, array(4096, 64)
    first, second, _ = pairs_of(step, *args)
    assert (len(first), len(second)) == (2, 1)
    options = {"cluster": eager_cluster(), "mesh": {"data": 4, "model": 2}}
    strategy = autoshard.search(step, *args, searcher=TensorParallel(sequence=False), **options)
    assert strategy.in_specs[0]["p"][1] == strategy.in_specs[0]["q"][1] == "model"
    assert [c.count for c in strategy.cost.collectives if c.kind == "all_reduce" and c.mesh_axes == ("model",)] == [1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt", "gpt_scan", "moe"])
@pytest.mark.parametrize("mesh", [{"data": 2, "model": 4}, {"data": 4, "model": 2}], ids=str)
def test_it_is_judged_no_slower_than_the_experts_specs(name, mesh):
    """The specs that experts write by hand, completed by Shardy's propagation, take no less."""
    make = {"gpt": gpt, "gpt_scan": gpt_scan, "moe": moe}[name]
    fn, args = make(2, batch=64)
    found = autoshard.search(fn, *args, cluster="v5e:2x4", mesh=mesh, searcher="tensor_parallel", memory_limit_bytes=1e15)
    hand = autoshard.evaluate(fn, *args, cluster="v5e:2x4", mesh=mesh, in_specs=dict(MODELS[name].tensor_parallel))
    assert found.cost.makespan_seconds <= hand.cost.makespan_seconds


@pytest.mark.slow
def test_sequence_parallelism_is_an_option_that_pays():
    """Without it every pair of the forward pass ends in an all_reduce; with it the answer is no slower."""
    fn, args = gpt(2, batch=64)
    options = {"cluster": "v5e:2x4", "mesh": {"data": 2, "model": 4}, "memory_limit_bytes": 1e15}
    with_it = autoshard.search(fn, *args, searcher=TensorParallel(), **options)
    without = autoshard.search(fn, *args, searcher=TensorParallel(sequence=False), **options)
    assert with_it.cost.makespan_seconds <= without.cost.makespan_seconds
    assert any(c.kind == "reduce_scatter" and c.mesh_axes == ("model",) for c in with_it.cost.collectives)


@pytest.mark.slow
def test_the_mesh_is_searched_over_two_axes():
    """Without a mesh the factorisations of the devices into two axes are tried."""
    fn, args = gpt(1, 512, 8, 4096, 32, 128)
    strategy = autoshard.search(fn, *args, cluster="v5e:2x4", searcher="tensor_parallel")
    assert strategy.stats["meshes"] > 1


@pytest.mark.parametrize("program", ["convnet", "lstm"])
def test_other_programs_have_an_answer_too(program):
    """Channels pair convolutions; a program without pairs is split by its batch alone."""
    fn, args = PROGRAMS[program]()
    assert TensorParallel().solve(problem_of(fn, *args)).judgement.cost.objective_seconds > 0
    fn, args = SMALL["gathered"]()
    problem = problem_of(fn, *args, mesh={"data": 8})
    baseline = DataParallel().solve(problem).judgement.cost.objective_seconds
    assert TensorParallel(vocabulary=False).solve(problem).judgement.cost.objective_seconds <= baseline * (1 + 1e-9)


def test_it_is_in_the_portfolio():
    """Tensor parallelism is a member of auto."""
    assert any(isinstance(member, TensorParallel) for member in Auto().members)


@pytest.mark.slow
def test_a_batch_as_large_as_its_mesh_axis_is_split_once():
    """Where other axes take all of a dimension at first, the fixed part of this one becomes legal in a later round, and is taken."""
    fn, args = gpt(1, 64, 4, 256, 4, 32)
    found = TensorParallel().solve(problem_of(fn, *args, mesh={"data": 4, "model": 2}))
    assert found.judgement.cost.makespan_seconds > 0.0
    assert Auto().solve(problem_of(fn, *args, mesh={"data": 4, "model": 2})).judgement.cost.makespan_seconds > 0.0


@pytest.mark.sample(1)
@pytest.mark.parametrize("program", ["mlp", "gpt"])
def test_under_a_limit_it_stays_tensor_parallel(program, monkeypatch):
    """No single decisions are changed until something fits: under every limit there is an answer of the baseline's own, or a refusal."""

    class Unasked:
        def __init__(self, *_):
            raise AssertionError("the baseline is repaired")

    monkeypatch.setattr(sys.modules[least_peak.__module__], "Repair", Unasked)
    fn, args = PROGRAMS[program]()
    free = TensorParallel().solve(problem_of(fn, *args)).judgement.cost.peak_bytes
    outcomes = set()
    for share in (1.0, 0.95, 0.5):
        try:
            found = TensorParallel().solve(problem_of(fn, *args, memory_limit_bytes=share * free))
            assert found.judgement.cost.peak_bytes <= share * free
            outcomes.add("fits")
        except InfeasibleError as error:
            assert error.smallest_peak_bytes > share * free
            outcomes.add("refused")
    assert outcomes == {"fits", "refused"}


@pytest.mark.slow
@pytest.mark.parametrize("is_scanned", [False, True])
def test_microbatches_leave_state_split(is_scanned):
    """Weights, momenta and sums of gradients are split over both axes, so that the peak falls with the number of microbatches."""

    def layers(weights, x):
        def layer(x, pair):
            return x + jnp.tanh(x @ pair[0]) @ pair[1], None

        if is_scanned:
            return jax.lax.scan(layer, x, weights)[0]
        for number in range(3):
            x, _ = layer(x, (weights[0][number], weights[1][number]))
        return x

    def step(state, batch):
        gradients = jax.grad(lambda weights: (layers(weights, batch) ** 2).mean())(state[0])
        momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state[1], gradients)
        return jax.tree.map(lambda w, m: w - 1e-3 * m, state[0], momenta), momenta

    weights = (array(3, 256, 1024), array(3, 1024, 256)) if is_scanned else ([array(256, 1024)] * 3, [array(1024, 256)] * 3)
    options = {"cluster": "v5e:2x4", "mesh": {"data": 4, "model": 2}, "searcher": "tensor_parallel", "donate_argnums": 0, "remat": None}
    args = (weights, weights), array(4096, 256)
    found = [autoshard.search(step, *args, microbatches=n, **options) for n in (None, 2, 8)]
    for strategy in found[1:]:
        assert all({"data", "model"} <= {*spec} for spec in jax.tree.leaves(strategy.in_specs[0]))
        assert all(one.kind != "all_reduce" or "data" not in one.mesh_axes or one.bytes == 4 for one in strategy.cost.collectives)
    peaks = [strategy.cost.peak_bytes for strategy in found]
    assert peaks == sorted(peaks, reverse=True)
    whole = autoshard.search(step, *args, microbatches=8, **options | {"searcher": TensorParallel(state=False)})
    assert whole.cost.makespan_seconds < found[-1].cost.makespan_seconds and whole.cost.peak_bytes > 1.5 * peaks[-1]
