"""Attention over a divided sequence: equal to the whole, balanced under a causal mask, priced as it runs, and found where it is faster."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.ask.strategy import Strategy
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.ir.rewrites import FusedAttention
from autoshard.rewrite import Rewriting
from autoshard.rewrite.attention import proposals
from autoshard.rewrite.attention_program import fused
from autoshard.rewrite.ring_attention import IMPLEMENTATIONS, RINGS
from autoshard.rules.ring import BACKWARD, FORWARD
from autoshard.run.tracing import TracedOnce
from autoshard.trace import trace
from tests.rewrite.attention_programs import arrays, causal, gradients, grouped, plain, windowed

CUDNN, SPLASH = RINGS["cuDNN's attention"], RINGS["splash attention"]


@pytest.fixture
def any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN's stand-in, which is JAX's own operations, takes float32, too."""
    monkeypatch.setitem(IMPLEMENTATIONS, CUDNN.name, replace(CUDNN, missing=lambda problem: ""))


def in_a_ring(fn: Callable, args: Any, implementation: Any, mesh: dict[str, int], **options: Any) -> Strategy:
    """The strategy of a program whose attention is computed by blocks, on CPU devices."""
    places = fused(trace(fn, *args), IMPLEMENTATIONS[implementation.name], interpret=True).places
    assert places
    rewrites = (FusedAttention(implementation.name, places, interpret=True),)
    devices = math.prod(mesh.values())
    return autoshard.search(TracedOnce(fn, rewrites), *args, cluster=f"cpu:{devices}", mesh=mesh, padding=False, **options)


def rings(strategy: Strategy) -> dict[str, Any]:
    """The choices of attention, forward and backward."""
    assert strategy._traced is not None
    return {op.primitive: strategy.record.assignment.choice(op.index) for op in strategy._traced.graph.walk() if op.kernel is not None}


def assert_equal(strategy: Strategy, fn: Callable, args: Sequence[Any], tolerance: float) -> None:
    rng = np.random.default_rng(0)
    given = [jnp.asarray(0.1 * rng.standard_normal(x.shape) if x.dtype.kind == "f" else np.zeros(x.shape), x.dtype) for x in args]
    for found, wanted in zip(jax.tree.leaves(strategy.apply(fn)(*given)), jax.tree.leaves(jax.jit(fn)(*given)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=tolerance, atol=tolerance * float(jnp.abs(wanted).max()))


@pytest.mark.usefixtures("any_type")
@pytest.mark.parametrize(
    ("attend", "devices", "kv_heads"),
    [
        (causal, 8, 1),
        pytest.param(causal, 4, 1, marks=pytest.mark.slow),
        pytest.param(causal, 2, 1, marks=pytest.mark.slow),
        pytest.param(plain, 8, 1, marks=pytest.mark.slow),
        pytest.param(plain, 2, 1, marks=pytest.mark.slow),
        pytest.param(grouped, 8, 1, marks=pytest.mark.slow),
    ],
)
def test_a_divided_sequence_gives_the_results_and_gradients_of_the_whole(attend: Callable, devices: int, kv_heads: int) -> None:
    """One key head on several devices: all have a part of the sequence; outputs and all gradients are those of the program."""
    args = arrays(length=1024, width=64, heads=4 if attend is grouped else kv_heads, kv_heads=kv_heads, batch=1)
    strategy = in_a_ring(gradients(attend), args, CUDNN, {"x": devices})
    assert {*rings(strategy)} == {FORWARD, BACKWARD} and all(factor >= 0 for ((factor, _),) in rings(strategy).values())
    assert_equal(strategy, gradients(attend), args, 5e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("any_type")
def test_sequence_and_heads_are_divided_by_axes_of_their_own() -> None:
    """Two key heads, shared by four queries, on two devices each way, and a ring of four; in checkpointed layers of a scan."""

    def fn(w, x):
        def layer(x, w):
            q, k, v = (jnp.einsum("btd,dhk->bthk", x, each) for each in (w, w[:, ::2], w[:, 1::2]))
            return x + grouped(q, k, v).reshape(x.shape), None

        return jax.value_and_grad(lambda w: jnp.sum(jnp.sin(jax.lax.scan(jax.checkpoint(layer), x, w)[0])))(w)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 64, 4, 16), (1, 4096, 64))]
    strategy = in_a_ring(fn, args, CUDNN, {"heads": 2, "sequence": 4}, pins={"x": jax.P(None, "sequence")})
    assert all(len({factor for factor, _ in choice} - {-1}) == 2 for choice in rings(strategy).values())
    assert_equal(strategy, fn, args, 2e-5)


@pytest.mark.slow
def test_splash_attention_computes_blocks() -> None:
    """The kernel itself, in interpret mode: blocks by what it keeps for its gradient."""
    args = arrays(length=1024, width=64, heads=1, kv_heads=1, batch=1)
    strategy = in_a_ring(gradients(causal), args, SPLASH, {"x": 4})
    assert all(factor >= 0 for ((factor, _),) in rings(strategy).values())
    assert_equal(strategy, gradients(causal), args, 5e-6)


@pytest.mark.slow
@pytest.mark.usefixtures("any_type")
@pytest.mark.parametrize("attend", [causal, plain])
def test_collectives_of_a_ring_are_those_that_are_priced(attend: Callable) -> None:
    """Keys and values in seven hops, gradients in seven and one home, halves to their places: as the compiled program has them."""
    args = arrays(length=1024, width=64, heads=1, kv_heads=1, batch=1)
    strategy = in_a_ring(gradients(attend), args, CUDNN, {"x": 8})
    by_op = dict[str, int]()
    for each in strategy.cost.collectives:
        assert each.op is not None
        by_op[each.op.primitive] = by_op.get(each.op.primitive, 0) + each.count
    moved = {FORWARD: 10, BACKWARD: 18} if attend is causal else {FORWARD: 0, BACKWARD: 0}
    assert by_op == {FORWARD: 14 + moved[FORWARD], BACKWARD: 30 + moved[BACKWARD]}
    assert autoshard.verify(strategy, gradients(attend), *args, numbers=False).exact


def step(w: Any, x: Any) -> Any:
    """A step of projections and attention."""

    def loss(w: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, each) for each in w)
        return jnp.sum(grouped(q, k, v).astype(jnp.float32) ** 2)

    return jax.grad(loss)(w)


def planned() -> Strategy:
    """Eight heads, two of them of keys, on sixteen chips."""
    w = [jax.ShapeDtypeStruct((1024, n, 128), jnp.bfloat16) for n in (8, 2, 2)]
    x = jax.ShapeDtypeStruct((1, 32768, 1024), jnp.bfloat16)
    return autoshard.search(step, w, x, cluster="v5e:4x4", mesh={"model": 16}, kernels="auto")


@pytest.mark.slow
def test_a_ring_is_found_where_heads_do_not_suffice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight heads on sixteen chips: the search divides the sequence by itself, and is faster than what it finds without."""
    found = planned()
    rewrite = found.record.program.rewrites[0]
    assert {*rings(found)} == {FORWARD, BACKWARD} and isinstance(rewrite, FusedAttention) and rewrite.kernel == SPLASH.name
    permutes = [each for each in found.cost.collectives if each.kind == "collective_permute" and each.count > 2]
    assert sum(each.count * each.exposed_seconds for each in permutes) < 0.5 * sum(each.count * each.seconds for each in permutes)
    monkeypatch.setattr("autoshard.rewrite.attention.is_long", lambda problem, devices: False)
    assert found.cost.makespan_seconds < 0.7 * planned().cost.makespan_seconds


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "kv_heads", "is_causal", "compiled"), [(8, 1, True, 845e6), (8, 1, False, 587e6), (7, 7, True, 1.47e9)])
def test_blocks_on_their_way_and_sums_are_in_the_peak(heads: int, kv_heads: int, is_causal: bool, compiled: float) -> None:
    """Within a tenth of what libtpu 0.0.52 assigned on v5e."""

    def loss(w: Any, x: Any) -> Any:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, each) for each in w)
        return jnp.sum(jax.nn.dot_product_attention(q, k, v, is_causal=is_causal).astype(jnp.float32) ** 2)

    w = [jax.ShapeDtypeStruct((256, n, 128), jnp.bfloat16) for n in (heads, kv_heads, kv_heads)]
    x = jax.ShapeDtypeStruct((1, 2**18, 256), jnp.bfloat16)
    found = autoshard.search(jax.grad(loss), w, x, cluster="v5e:2x4", mesh={"model": 8}, kernels="auto")
    assert {*rings(found)} == {FORWARD, BACKWARD}
    assert found.cost.peak_bytes == pytest.approx(compiled, rel=0.1)


@pytest.mark.slow
def test_heads_for_a_sequence_are_the_reshards_of_any_attention() -> None:
    """Sixteen heads on sixteen chips, and rows of the sequence on each: an all_to_all takes one to the other, and there is no ring."""
    args = arrays(length=32768, width=128, heads=16, kv_heads=16, batch=1, dtype=jnp.bfloat16)[:3]
    rows = jax.P(None, "model")
    found = autoshard.search(causal, *args, cluster="v5e:4x4", mesh={"model": 16}, kernels="auto", pins={"*": rows})
    assert {*rings(found)} == {"pallas_call"}
    assert [each.kind for each in found.cost.collectives] == ["all_to_all"] * 4


@pytest.mark.slow
def test_a_ring_is_proposed_for_long_sequences_of_few_heads_alone() -> None:
    """Short ones, those with as many heads, and windows are not divided: their other forms are as good."""
    cluster = Cluster.parse("v5e:2x4")
    assert compiler_of(cluster).fused_attention == "splash attention"

    def kernels(attend: Callable, length: int, heads: int) -> set[str]:
        traced = trace(attend, *arrays(length=length, width=64, heads=heads, kv_heads=heads, batch=1, dtype=jnp.bfloat16)[:3])
        return {each.kernel for each in proposals(traced, cluster, Rewriting(kernels="auto"))}

    assert kernels(causal, 8192, 4) == {SPLASH.name, "splash attention"}
    assert kernels(causal, 4096, 4) == kernels(causal, 8192, 8) == kernels(windowed, 8192, 4) == {"splash attention"}
