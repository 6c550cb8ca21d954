"""What a TPU's compiler computes again: counted by hand, its laws, and what the compiler did of programs that were compiled."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from profiles import recorded

import autoshard
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.compilers.tpu.rematerialisation import GOAL
from autoshard.errors import InfeasibleError
from autoshard.ir import Assignment, Mesh
from autoshard.judge.evaluate import evaluate, recomputation
from autoshard.judge.model import CostModel
from autoshard.rules import rules_of
from autoshard.trace import trace
from benchmarks.single_dtype import gpt, gpt_scan, llama, moe

LAYERS, ROWS, WIDTH = 8, 2**17, 1024
VALUE = ROWS * WIDTH * 2  # bytes of what a layer stores: more than fast memory takes
MESH = Mesh.of({"data": 8})
SPEC = jax.ShapeDtypeStruct


def stack(weights, x):
    """Layers one after the other, and the gradient of what becomes of them."""

    def loss(weights):
        y = x
        for weight in weights:
            y = jnp.tanh(y @ weight)
        return y.astype(jnp.float32).sum()

    return jax.grad(loss)(weights)


def scanned(weights, x):
    """The same layers in a loop."""

    def loss(weights):
        y, _ = jax.lax.scan(lambda y, weight: (jnp.tanh(y @ weight), None), x, weights)
        return y.astype(jnp.float32).sum()

    return jax.grad(loss)(weights)


WEIGHTS = [SPEC((WIDTH, WIDTH), jnp.bfloat16)] * LAYERS
X = SPEC((ROWS, WIDTH), jnp.bfloat16)


def judged(fn, *args, of_peak, kind="v5e"):
    """The peak of a replicated program, and what is computed again where the memory is such a part of that."""
    graph = trace(fn, *args).graph
    cluster = Cluster.parse(f"{kind}:2x4" if kind != "h100" else "h100:8")
    facts = program_facts(graph, rules_of(graph), compiler_of(cluster))
    nowhere = Assignment(MESH, {}, {}, {})
    judgement = evaluate(facts, CostModel(cluster, MESH), nowhere)
    peak = judgement.cost.peak_bytes
    smaller = replace(cluster, memory_limit_bytes=int(peak * of_peak))
    return peak, recomputation(facts, CostModel(smaller, MESH), judgement)


def test_as_many_layers_run_twice_as_have_to():
    """A layer's result that is computed again is not held meanwhile; one that must go makes one kernel run twice, two make two."""
    peak, none = judged(stack, WEIGHTS, X, of_peak=1.001 / GOAL)
    assert none is None
    for n in (1, 2):
        _, again = judged(stack, WEIGHTS, X, of_peak=(peak - (n - 0.5) * VALUE) / peak / GOAL)
        assert again is not None
        assert (again.kernels, again.peak_bytes) == (n, pytest.approx(peak - n * VALUE, rel=0.01))


def test_a_kernel_that_runs_twice_takes_its_time_twice():
    """What is added to a step is what the kernels take: here products of 2 x rows x width x width operations."""
    peak, _ = judged(stack, WEIGHTS, X, of_peak=2.0)
    _, again = judged(stack, WEIGHTS, X, of_peak=(peak - 0.5 * VALUE) / peak / GOAL)
    assert again is not None
    least = 2 * ROWS * WIDTH**2 / Cluster.parse("v5e:2x4").device.matrix_rate("bfloat16")
    assert least < again.seconds < 2 * least


def test_what_a_kernel_reads_is_kept_for_it():
    """A product is computed again from a quarter of its size, which stays for that though nobody else reads it; from as much it is not."""

    def kept(x, w, v, q, p, r):
        y = (x @ w) @ v
        return y * (jnp.tanh(y @ q) @ p @ r)

    def widths(between):
        sizes = (WIDTH, between), (between, 4 * WIDTH), (4 * WIDTH, 8 * WIDTH), (8 * WIDTH, 8 * WIDTH), (8 * WIDTH, 4 * WIDTH)
        return [SPEC(size, jnp.bfloat16) for size in sizes]

    peak, again = judged(kept, X, *widths(WIDTH), of_peak=0.99 / GOAL)
    assert again is not None
    assert (again.kernels, again.peak_bytes) == (1, pytest.approx(peak - 3 * VALUE, rel=0.01))
    assert judged(kept, X, *widths(4 * WIDTH), of_peak=0.99 / GOAL)[1] is None


def test_what_loops_hold_stays():
    """Of layers in a loop nothing is computed again: their results lie in one stack."""
    stacked = SPEC((LAYERS, WIDTH, WIDTH), jnp.bfloat16)
    assert judged(scanned, stacked, X, of_peak=1 / 1.02 / GOAL)[1] is None


def test_other_compilers_and_far_smaller_memories_compute_nothing_again():
    """Only TPUs are known to, and what holds more than a fifth above the memory may not fit, whatever runs twice."""
    of_peak = 0.95
    assert judged(stack, WEIGHTS, X, of_peak=of_peak)[1] is not None
    assert judged(stack, WEIGHTS, X, of_peak=of_peak, kind="h100")[1] is None
    assert judged(stack, WEIGHTS, X, of_peak=0.8)[1] is None


def searched(make, how, cluster, **options):
    fn, args = make(**options)
    found = autoshard.search(fn, *args, cluster=cluster, mesh={"data": 8}, searcher=how, donate_argnums=0, memory_limit_bytes=1e15)
    return found.cost


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("make", "how", "cluster", "batch", "kernels", "peak_bytes"),
    recorded(
        (
            (partial(gpt, 6, width=2048, length=512), "data_parallel", "v5e:2x4", 416, 2, 15.87e9),
            (partial(moe, 2), "data_parallel", "v5e:2x4", 384, 1, 15.24e9),
            (partial(moe, 4), "fully_sharded", "v5e:2x4", 272, 1, 15.19e9),
            (partial(llama, 3, 1024, 8, 2, 4096, 32_768, length=1024, remat=False), "data_parallel", "v5e:2x4", 376, 1, 15.53e9),
            (partial(gpt, 4, width=2048), "fully_sharded", "v5p:2x2x2", 1664, pytest.approx(2, abs=1), 92.60e9),
        ),
        quick=(1, 3),
    ),
)
def test_the_compiler_runs_as_many_kernels_twice(make, how, cluster, batch, kernels, peak_bytes):
    """As libtpu 0.0.42 logs it, on v5p to one: "Rematerialized 2 instructions", "Peak memory usage of module now ..."."""
    again = searched(make, how, cluster, batch=batch).recomputation
    assert again is not None
    assert again.kernels == kernels
    assert again.peak_bytes == pytest.approx(peak_bytes, rel=0.04)


@pytest.mark.slow
def test_the_compiler_refuses_scanned_layers():
    """A loop's stacks are not made again: 17.4 GB are needed (libtpu 0.0.42)."""
    cost = searched(gpt_scan, "data_parallel", "v5e:2x4", batch=104)
    assert cost.peak_bytes > Cluster.parse("v5e:2x4").memory_limit_bytes
    assert cost.recomputation is None


@pytest.mark.slow
def test_layers_that_share_a_mask_run_again_before_the_first_that_is_differentiated():
    """So all their scores are there at once: libtpu 0.0.42 gets four layers down to 30.07 GB."""
    make = partial(llama, 4, 2048, 16, 4, 7168, 32_768, remat=False)
    again = searched(make, "fully_sharded", "v6e:2x4", batch=192).recomputation
    assert again is not None
    assert again.peak_bytes == pytest.approx(30.07e9, rel=0.06)


def test_a_search_counts_on_what_fits_as_scheduled(tmp_path):
    """A strategy above the limit is never returned, whatever the compiler would do about it; asked for without a limit it says so."""
    fn, args = stack, (WEIGHTS, SPEC((8 * ROWS, WIDTH), jnp.bfloat16))
    common = {"mesh": {"data": 8}, "searcher": "data_parallel"}
    free = autoshard.search(fn, *args, cluster="v5e:2x4", **common).cost
    cluster = replace(Cluster.parse("v5e:2x4"), memory_limit_bytes=int(free.peak_bytes - 0.5 * VALUE))
    with pytest.raises(InfeasibleError):
        autoshard.search(fn, *args, cluster=cluster, microbatches=None, **common)
    found = autoshard.search(fn, *args, cluster=cluster, memory_limit_bytes=1e15, **common)
    assert found.cost.peak_bytes == free.peak_bytes > cluster.memory_limit_bytes
    assert found.cost.recomputation is not None
    assert found.cost.compiled_peak_bytes <= GOAL * cluster.memory_limit_bytes
    assert "as the compiler makes it fit, by running" in str(found.explain())
    found.save(tmp_path / "strategy.json")
    assert autoshard.load(tmp_path / "strategy.json").cost == found.cost
