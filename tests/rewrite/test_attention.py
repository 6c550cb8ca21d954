"""Attention in kernels: results are those of the program as it is written, and the kernels are those of the library."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import TraceError
from autoshard.ir.rewrites import KINDS, FusedAttention, from_json, to_json
from autoshard.plan import variants
from autoshard.reader import Node
from autoshard.rewrite import Rewriting, applied
from autoshard.rewrite.attention import proposals, with_fused_attention
from autoshard.rewrite.attention_kernels import CUDNN, SPLASH
from autoshard.rewrite.attention_program import fused
from autoshard.rewrite.base import APPLIED
from autoshard.run.tracing import TracedOnce
from autoshard.trace import Traced, trace
from tests.requirements import needs_tpu_compiler
from tests.rewrite.attention_programs import FUSED, alibi, arrays, causal, gradients, grouped

KV_HEADS = {"grouped": 2, "unnormalised": 2}


def kernels(traced: Traced) -> list[str]:
    """The kernels that a program calls, at any depth."""
    return [op.primitive for op in traced.graph.walk() if op.kernel is not None]


def values(traced: Traced, seed: int = 0) -> list[Any]:
    rng = np.random.default_rng(seed)
    kinds = [(v.shape, v.dtype) for v in traced.jaxpr.in_avals]
    return [jnp.asarray(0.1 * rng.standard_normal(s) if d.kind != "i" else rng.integers(0, 3, s), d) for s, d in kinds]


def assert_equal(one: Traced, other: Traced, tolerance: float) -> None:
    args = values(one)
    for a, b in zip(jax.jit(jaxpr_as_fun(one.jaxpr))(*args), jax.jit(jaxpr_as_fun(other.jaxpr))(*args), strict=True):
        a, b = (np.asarray(x, np.float64) for x in (a, b))
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance * np.abs(a).max())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["unnormalised", "grouped", "segments"])
def test_results_and_gradients_are_those_of_the_program(name: str) -> None:
    """Splash attention in interpret mode computes what is written, forward and backward."""
    args = arrays(length=256, width=64, kv_heads=KV_HEADS.get(name, 4), batch=1)
    traced = trace(gradients(FUSED[name][0]), *args)
    made = fused(traced, SPLASH, interpret=True)
    assert len(made.places) == 1 and kernels(made.traced) == ["pallas_call"] * 3
    assert_equal(traced, made.traced, 5e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED)
@pytest.mark.parametrize("remat", [False, True])
def test_results_and_gradients_of_all_spellings(name: str, remat: bool) -> None:
    """The same of all ways to write it, and of checkpoints."""
    args = arrays(length=256, width=64, kv_heads=KV_HEADS.get(name, 4))
    traced = trace(gradients(FUSED[name][0], remat=remat), *args)
    assert_equal(traced, fused(traced, SPLASH, interpret=True).traced, 2e-2 if name == "mixed_precision" else 5e-6)


def test_repeated_keys_are_read_once() -> None:
    """Keys and values that are repeated for a group enter the kernel before that, and their gradients leave it summed."""
    args = arrays(length=128, width=64, heads=4, kv_heads=2)
    made = fused(trace(gradients(grouped), *args), SPLASH, interpret=True).traced
    for op in made.graph.walk():
        shapes = [made.graph.values[n].shape for n in op.operands]
        assert op.kernel is None or (shapes.count((2, 2, 128, 64)) == 2 and (2, 4, 128, 64) not in shapes)  # two key heads


@pytest.mark.slow
def test_key_heads_are_repeated_for_more_devices():
    """Two key heads on an axis of eight: forward and gradients run on devices, equal, with a key head and its own queries on each."""
    args = arrays(length=128, width=64, heads=8, kv_heads=2, batch=1)
    fn = gradients(grouped)
    (place,) = fused(traced := trace(fn, *args), SPLASH).places
    rewrites = (FusedAttention(SPLASH.name, (place,), interpret=True, parts=8),)
    strategy = autoshard.search(TracedOnce(fn, rewrites), *args, cluster="cpu:8", mesh={"model": 8}, padding=False)
    kernel = next(op for op in strategy._traced.graph.walk() if op.kernel is not None)
    assert 8 in {strategy._traced.graph.values[value].shape[0] for value in kernel.operands}
    given = values(traced)
    for found, wanted in zip(jax.tree.leaves(strategy.apply(fn)(*given)), jax.tree.leaves(jax.jit(fn)(*given)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-5, atol=2e-5 * float(jnp.abs(wanted).max()))


@pytest.mark.slow
def test_repeated_key_heads_are_a_choice():
    """On one axis, where key heads are fewer, the kernel's work is divided by all devices; as many key heads are left as they are."""

    def step(w, x):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, each) for each in w)
        return jnp.sum(grouped(q, k, v).astype(jnp.float32) ** 2)

    def found(kv_heads):
        w = [jax.ShapeDtypeStruct((512, heads, 64), jnp.bfloat16) for heads in (16, kv_heads, kv_heads)]
        args = w, jax.ShapeDtypeStruct((1, 4096, 512), jnp.bfloat16)
        return autoshard.search(jax.grad(step), *args, cluster="v5e:2x4", mesh={"model": 8}, kernels="auto")

    few, many = found(2), found(8)
    assert few.record.program.rewrites[0].parts == 8 and "key heads repeated" in str(few.explain())
    assert many.record.program.rewrites[0].parts == 1
    assert few.cost.kernel_flops == many.cost.kernel_flops
    assert from_json(Node(to_json(few.record.program.rewrites))) == few.record.program.rewrites


def layers(body: Callable, count: int = 2, policy: Any = None, remat: bool = False) -> Callable:
    """The gradient of scanned layers."""
    body = jax.checkpoint(body, policy=policy) if remat else body

    def loss(weights, x, ids):
        def layer(x, w):
            return body(x, w, ids), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, x, weights)[0]))

    return jax.grad(loss)


def block(x, w, ids):
    q, k, v = (jnp.einsum("btd,dhk->bthk", x, w[n]) for n in range(3))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * 8**-0.5
    mask = (ids[:, None, :, None] == ids[:, None, None, :]) & jnp.tril(jnp.ones((x.shape[1],) * 2, bool))
    p = jax.nn.softmax(jnp.where(mask, scores, -1e9))
    return x + jnp.einsum("bhqk,bkhd->bqhd", p, v).reshape(x.shape)


SCANNED = (
    jax.ShapeDtypeStruct((2, 3, 128, 2, 64), jnp.float32),
    jax.ShapeDtypeStruct((1, 128, 128), jnp.float32),
    jax.ShapeDtypeStruct((1, 128), jnp.int32),
)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kept", "remat", "products kept"])
def test_scanned_layers_pass_on_what_the_backward_kernel_needs(how: str) -> None:
    """A loop's forward kernel runs again in a checkpoint only; scores are no longer stacked over layers."""
    policy = jax.checkpoint_policies.dots_saveable if how == "products kept" else None
    traced = trace(layers(block, policy=policy, remat=how != "kept"), *SCANNED)
    made = fused(traced, SPLASH, interpret=True)
    assert len(kernels(made.traced)) == (4 if how == "remat" else 3)
    stacked = [made.traced.graph.values[n].shape for op in made.traced.graph.walk() for n in op.results]
    assert (2, 1, 2, 128, 128) not in stacked and made.places
    if how == "kept":
        assert_equal(traced, made.traced, 1e-5)


def test_layers_in_groups_pass_on_what_the_backward_kernel_needs() -> None:
    """Through loops inside loops, too."""

    def loss(weights, x, ids):
        def group(x, some):
            return jax.lax.scan(lambda x, w: (block(x, w, ids), None), x, some)[0], None

        return jnp.sum(jnp.sin(jax.lax.scan(group, x, weights)[0]))

    weights, *others = SCANNED
    made = fused(trace(jax.grad(loss), jax.ShapeDtypeStruct((2, *weights.shape), weights.dtype), *others), SPLASH, interpret=True)
    assert len(made.places) == 1 and len(kernels(made.traced)) == 3


def test_attention_of_one_example_is_replaced_too() -> None:
    """Without dimensions of batch or heads."""

    def one(q, k, v):
        return jax.nn.softmax(q @ k.T / 8) @ v

    shape = jax.ShapeDtypeStruct((128, 64), jnp.float32)
    assert len(kernels(fused(trace(jax.grad(lambda *args: jnp.sum(jnp.sin(one(*args)))), *[shape] * 3), SPLASH).traced)) == 2


def test_attention_whose_weights_are_returned_stays() -> None:
    """Where something else reads the scores, nothing is replaced, and the reason is told."""

    def returned(q, k, v):
        p = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        return jnp.einsum("bhqk,bkhd->bqhd", p, v), p

    traced = trace(returned, *arrays(length=128, width=64)[:3])
    made = fused(traced, SPLASH)
    assert made.traced is traced and not made.places and "used elsewhere" in made.left[0]


@pytest.mark.parametrize(
    ("kernel", "change", "reason"),
    [
        (SPLASH, {"length": 100, "width": 64}, "multiples of 128"),
        (SPLASH, {"length": 128, "width": 24}, "multiples of 64"),
        (CUDNN, {"length": 128, "width": 64}, "bfloat16 and float16"),
        (CUDNN, {"length": 128, "width": 256, "dtype": jnp.bfloat16}, "up to 128"),
    ],
)
def test_what_a_kernel_cannot_take_stays_with_the_reason(kernel: Any, change: dict, reason: str) -> None:
    """Lengths, widths and types that the library refuses."""
    made = fused(trace(causal, *arrays(**change)[:3]), kernel)
    assert not made.places and reason in made.left[0]


def test_cudnns_attention_is_that_of_jax() -> None:
    """On GPUs the program calls cuDNN's kernels, forward and backward, by key heads where these are shared."""
    args = arrays(length=128, width=64, kv_heads=2, dtype=jnp.bfloat16)
    made = fused(trace(gradients(grouped), *args), CUDNN)
    assert [name.rsplit("_", 2)[1] for name in kernels(made.traced)] == ["fwd", "bwd"]


def test_kernels_are_proposed_where_they_are_asked_for() -> None:
    """``kernels="auto"`` on TPUs and GPUs, and neither None nor CPUs; the rewrite is recorded and made again."""
    traced = trace(gradients(causal), *arrays(length=128, width=64, dtype=jnp.bfloat16))
    tpu, gpu, cpu = (Cluster.of(name) for name in ("v5e:2x4", "h100:8x1", "cpu:8"))
    (rewrite,) = proposals(traced, tpu, Rewriting(kernels="auto"))
    assert rewrite.kernel == "splash attention" and "causal" in rewrite.describe()
    assert proposals(traced, gpu, Rewriting(kernels="auto"))[0].kernel == "cuDNN's attention"
    assert not proposals(traced, tpu, Rewriting()) and not proposals(traced, cpu, Rewriting(kernels="auto"))
    assert from_json(Node(to_json([rewrite]))) == (rewrite,)
    assert applied(rewrite, traced).graph.fingerprint == applied(rewrite, traced).graph.fingerprint != traced.graph.fingerprint


def step(w, x):
    """A layer's gradient with respect to its weights, of four heads."""

    def loss(w):
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, each) for each in w)
        return jnp.square(causal(q, k, v)).mean()

    return jax.tree.map(lambda a, g: a - g, w, jax.grad(loss)(w))


STEP = ([jax.ShapeDtypeStruct((64, 4, 64), jnp.float32)] * 3, jax.ShapeDtypeStruct((8, 128, 64), jnp.float32))


class Interpreted(FusedAttention):
    """Kernels that run on CPUs, however small what they compute."""

    required = True


@pytest.fixture
def interpreted(monkeypatch):
    """The kernels that searches propose run on CPUs."""

    def proposed(traced, cluster, rewriting):
        return [Interpreted(each.kernel, each.places, interpret=True) for each in proposals(traced, cluster, rewriting)]

    monkeypatch.setattr(variants, "PROPOSALS", (proposed,))
    monkeypatch.setitem(KINDS, FusedAttention.kind, Interpreted)
    monkeypatch.setitem(APPLIED, Interpreted, with_fused_attention)


@pytest.mark.sample(1)
@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("pins", "microbatches"), [({"x": P("x")}, 1), ({"w*": P(None, "x", None)}, 2)])
def test_kernels_run_on_shards(pins, microbatches, tmp_path):
    """Split over examples or heads, in microbatches, and from a file, a step gives what it gives unsharded."""
    found = autoshard.search(
        step, *STEP, cluster="v5e:2x2", mesh={"x": 4}, pins=pins, microbatches=microbatches, kernels="auto", searcher="sharding_propagation"
    )
    assert [each.kind for each in found.record.program.rewrites] == ["fused_attention", "microbatches"][:microbatches]
    assert "attention runs in splash attention" in str(found.explain())
    found.save(tmp_path / "found.json")
    rng = np.random.default_rng(0)
    args = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), STEP)
    for strategy in (found, autoshard.load(tmp_path / "found.json")):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), strategy.apply(step)(*args), step(*args))


def test_what_kernels_would_save_is_told_where_they_are_not_asked_for():
    """A note has the time of attention as it is written and in a kernel; with kernels="auto" another has why it stays."""
    shapes = arrays(length=2048, width=128, batch=16, dtype=jnp.bfloat16)
    found = autoshard.search(gradients(causal), *shapes, cluster="v6e:2x4", searcher="data_parallel")
    (note,) = [note for note in found.notes if "kernels='auto'" in note]
    assert "splash attention" in note and "attention_programs.py" in note
    fused = autoshard.search(gradients(causal), *shapes, cluster="v6e:2x4", searcher="data_parallel", kernels="auto")
    assert fused.cost.makespan_seconds < found.cost.makespan_seconds / 2 and not any("kernels='auto'" in note for note in fused.notes)
    stays = autoshard.search(gradients(alibi), *shapes, cluster="v6e:2x4", searcher="data_parallel", kernels="auto")
    assert any("adds a bias" in note for note in stays.notes)


@needs_tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("cluster", ["v5e:2x4", "v6e:2x4"])
def test_xla_compiles_the_kernels_on_their_shards(cluster):
    """XLA:TPU takes a sharded step with splash attention, with the products that are predicted."""
    shapes = arrays(length=1024, kv_heads=2, width=128, batch=8, dtype=jnp.bfloat16)
    found = autoshard.search(gradients(grouped), *shapes, cluster=cluster, kernels="auto")
    assert found.record.program.rewrites
    autoshard.verify(found, gradients(grouped), *shapes, target="tpu")


def test_a_record_of_another_program_is_refused() -> None:
    """The places of a record are those of the program."""
    traced = trace(causal, *arrays(length=128, width=64)[:3])
    with pytest.raises(TraceError, match="Search again"):
        applied(FusedAttention("splash attention", ("elsewhere.py:1",)), traced)
