"""Scanned layers in stages that are one program compute what the step computes, whatever layers read and make."""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.extend.core import jaxpr_as_fun
from jax.sharding import PartitionSpec as P

from autoshard.errors import PipelineError, TraceError
from autoshard.ir.rewrites import OneProgram
from autoshard.microbatch import passes_of
from autoshard.rewrite import applied
from autoshard.trace import trace
from benchmarks import models, several
from tests.programs import abstract, concrete, train_step_of

LAYERS, BATCH, WIDTH = 8, 16, 8
SMALL = {"layers": 4, "width": 16, "heads": 2, "vocabulary": 16, "batch": 8, "length": 4, "dtype": jnp.float32}


def plain(x, w, _):
    return x + jnp.tanh(x @ w["up"] + w["bias"]) @ w["down"]


def normed(x, w, _):
    """Not a number where the input is zero, as it is for stages without a microbatch."""
    return plain(x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True)), w, _)


def dropped(x, w, extra):
    kept = jax.random.bernoulli(extra["key"], 0.8, x.shape)
    return jnp.where(kept, plain(x, w, extra) / 0.8, 0.0)


def masked(x, w, extra):
    return plain(x * extra["mask"], w, extra) + extra["each"]


def layered(layer, remat=False, taps=False):
    """A step of a layer scanned; ``taps``: its loss reads what each layer makes, a sum over layers and one carried through them."""
    layer = jax.checkpoint(layer) if remat else layer
    weights = {"up": abstract((LAYERS, WIDTH, WIDTH)), "bias": abstract((LAYERS, WIDTH)), "down": abstract((LAYERS, WIDTH, WIDTH))}

    def loss(params, x, y, mask, each, keys):
        def body(carry, slices):
            x, total, number = carry
            w, each, key = slices
            x = layer(x, w, {"mask": mask, "each": each, "key": key})
            return (x, total + jnp.mean(x**4), number + 1), (x[:, 0], jnp.sum(x**2) / (number + 1.0)) if taps else None

        start = x @ params["in"], jnp.zeros(()), jnp.zeros((), jnp.int32)
        (x, total, _), made = lax.scan(body, start, (params["layers"], each, keys))
        value = jnp.mean((x - y) ** 2)
        return value + 0.1 * total + 0.01 * jnp.mean(jnp.sin(made[0])) + 1e-3 * jnp.sum(made[1]) if taps else value

    key = jax.ShapeDtypeStruct((LAYERS,), jax.random.key(0).dtype)
    rows = abstract((BATCH, WIDTH))
    given = rows, rows, abstract((BATCH, 1)), abstract((LAYERS, BATCH, WIDTH)), key
    return train_step_of(loss, {"in": abstract((WIDTH, WIDTH)), "layers": weights}, *given, optimizer=optax.adam(1e-2))


def keyed():
    """Layers that split a key which they carry, and drop out by it."""

    def loss(params, x, key):
        def body(carry, w):
            x, key = carry
            key, own = jax.random.split(key)
            return (dropped(x, w, {"key": own}), key), None

        return jnp.mean(lax.scan(body, (x, key), params)[0][0] ** 2)

    weights = {"up": abstract((LAYERS, WIDTH, WIDTH)), "bias": abstract((LAYERS, WIDTH)), "down": abstract((LAYERS, WIDTH, WIDTH))}
    return train_step_of(loss, weights, abstract((BATCH, WIDTH)), jax.ShapeDtypeStruct((), jax.random.key(0).dtype))


PROGRAMS = {
    "keyed": keyed,
    "plain": partial(layered, plain),
    "remat": partial(layered, plain, remat=True),
    "taps": partial(layered, plain, taps=True),
    "norm": partial(layered, normed),
    "dropout": partial(layered, dropped),
    "masks": partial(layered, masked, remat=True, taps=True),
    "gpt": partial(models.gpt_scan, **SMALL),
    "gpt_remat": partial(models.gpt_scan, **SMALL, remat=True),
    "llama": partial(models.llama, **SMALL, kv_heads=1, ffn=32, scan=True),
    "moe": partial(models.moe, **SMALL, scan=True),
}


@cache
def traced(name):
    fn, args = PROGRAMS[name]()
    return trace(fn, *args), args


def slow(*case):
    return pytest.param(case, marks=pytest.mark.slow)


CASES = [
    ("norm", 4, 4, 1), ("remat", 2, 4, 2, True), ("keyed", 2, 2, 2), ("masks", 4, 2, 1), ("taps", 2, 4, 2),
    slow("keyed", 2, 2, 1), slow("norm", 4, 4, 2),
    slow("dropout", 2, 2, 1), slow("plain", 8, 16, 1), slow("taps", 2, 8, 1), slow("remat", 8, 4, 1), slow("masks", 8, 8, 1),
    slow("dropout", 2, 8, 4), slow("plain", 4, 16, 2), slow("taps", 2, 2, 4), slow("remat", 2, 4, 2), slow("masks", 4, 8, 2),
    slow("gpt", 2, 8, 1), slow("gpt_remat", 4, 2, 1), slow("llama", 4, 4, 1), slow("moe", 2, 2, 1),
    slow("gpt", 2, 4, 2), slow("gpt_remat", 2, 8, 2), slow("llama", 2, 2, 2), slow("moe", 2, 4, 2),
    slow("plain", 4, 4, 1, True), slow("norm", 4, 4, 2, True), slow("taps", 2, 4, 2, True), slow("masks", 4, 2, 1, True),
    slow("dropout", 2, 2, 1, True), slow("keyed", 2, 2, 2, True), slow("gpt", 2, 4, 2, True), slow("gpt_remat", 4, 8, 1, True),
    slow("llama", 4, 4, 1, True), slow("moe", 2, 4, 2, True),
]  # fmt: skip


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_the_numbers_are_those_of_the_step(case):
    """Results and state after three steps, whether layers drop out, have sums, see masks, or are no numbers without a microbatch."""
    name, *order = case
    whole, args = traced(name)
    made = applied(OneProgram(*order), whole)
    run, expected = jax.jit(jaxpr_as_fun(made.jaxpr)), jax.jit(jaxpr_as_fun(whole.jaxpr))
    ours = theirs = [jnp.asarray(x) for x in jax.tree.leaves(concrete(args))]
    replaced = dict(whole.graph.aliases)
    for _ in range(3):
        here, there = run(*ours), expected(*theirs)
        losses = [k for k in range(len(here)) if k not in replaced]
        for k in losses:
            np.testing.assert_allclose(here[k], there[k], rtol=1e-5)
        ours, theirs = [*ours], [*theirs]
        for k, argument in replaced.items():
            ours[argument], theirs[argument] = here[k], there[k]
    for x, y in zip(ours, theirs, strict=True):
        if jnp.issubdtype(x.dtype, jnp.number):
            np.testing.assert_allclose(x, y, atol=1e-5 * float(jnp.max(jnp.abs(y))) + 1e-12)


def test_the_layers_of_all_stages_run_together_tick_by_tick():
    """Eight layers in four stages are a scan over ticks around one over two layers, forward and backward; nothing else changes."""
    whole, _ = traced("plain")
    made = applied(OneProgram(4, 8), whole)
    lengths = [op.equation.params["length"] for op in made.graph.walk() if op.primitive == "scan"]
    assert lengths == [11, 2, 11, 2]
    assert [op.equation.params["length"] for op in whole.graph.walk() if op.primitive == "scan"] == [8, 8]
    assert (made.stages, made.microbatches) == (4, 8)
    assert "11 ticks, in 3 of which each stage has none" in made.graph.assumptions[-1]


def test_in_two_rounds_ticks_are_half_as_long():
    """Eight layers in two stages and two rounds of eight microbatches: 17 ticks of two layers instead of 9 of four."""
    whole, _ = traced("plain")
    lengths = []
    for n_rounds in (1, 2):
        made = applied(OneProgram(2, 8, n_rounds), whole)
        lengths.append([op.equation.params["length"] for op in made.graph.walk() if op.primitive == "scan"])
        assert made.rounds == n_rounds and ("goes through all stages 2 times" in made.graph.assumptions[-1]) == (n_rounds == 2)
    assert lengths == [[9, 4, 9, 4], [17, 2, 17, 2]]
    with pytest.raises(PipelineError, match="as many microbatches as there are stages, and these again: got 2 microbatches for 4 stages"):
        applied(OneProgram(4, 2, 2), whole)
    with pytest.raises(PipelineError, match=r"as many layers each in 2 rounds: the scan at .* has 8, got stages=8"):
        applied(OneProgram(8, 8, 2), whole)


@pytest.mark.parametrize("name, n_rounds", [("plain", 1), pytest.param("remat", 1, marks=pytest.mark.slow)])
def test_gradients_of_weights_that_are_apart_leave_no_stage_without_work(name, n_rounds):
    """They run once a microbatch, after the ticks: a layer's two products of weights are in that loop, and in no other."""
    whole, _ = traced(name)
    made = applied(OneProgram(4, 8, n_rounds, True), whole)
    tasks, layers = 8 * n_rounds, LAYERS // 4 // n_rounds
    scans = [op for op in made.graph.walk() if op.primitive == "scan"]
    lengths = [op.equation.params["length"] for op in scans]
    assert lengths == [tasks + 3, layers, tasks + 3, layers, tasks, layers] and made.weights_apart
    products = [sum(inner.primitive == "dot_general" for inner in op.walk()) for op in scans if op.equation.params["length"] != layers]
    again = 1 if name == "remat" else 0  # of the two of a layer that computes them again
    assert products == [2, 2 + again, 2]


def test_what_the_forward_pass_keeps_is_read_tick_by_tick():
    """It is never put together for the whole batch: no array but those of ticks has all layers and all ticks' examples."""
    made = applied(OneProgram(4, 2), traced("plain")[0])
    inner = [value for value in made.graph.values if value.shape[:2] == (LAYERS, BATCH)]
    assert len(inner) == 1, "only the argument that no layer reads"


def unrolled():
    weights = [abstract((WIDTH, WIDTH)) for _ in range(4)]

    def loss(weights, x):
        for w in weights:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    return train_step_of(loss, weights, abstract((BATCH, WIDTH)))


def recurrent():
    """A scan over time, whose steps share their weights: no layers."""

    def loss(w, x):
        return jnp.mean(lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), jnp.zeros((BATCH, WIDTH)), jnp.swapaxes(x, 0, 1))[0] ** 2)

    return train_step_of(loss, abstract((WIDTH, WIDTH)), abstract((BATCH, 6, WIDTH)))


@pytest.mark.parametrize(
    "program, n_stages, n_microbatches, error, words",
    [
        (unrolled, 2, 2, PipelineError, "has no scan. Write the layers as such a scan, or use another schedule"),
        (recurrent, 2, 2, PipelineError, "has scans, but none that does so, such as that at .*test_one_program.py"),
        (PROGRAMS["plain"], 3, 2, PipelineError, "the scan at .* has 8, got stages=3. Use a number of stages that divides"),
        (PROGRAMS["plain"], 2, 3, TraceError, "got 3: .*Use 2"),
    ],
)
def test_what_cannot_be_divided_is_refused(program, n_stages, n_microbatches, error, words):
    """Programs without scanned layers, layers that the stages do not divide, and batches that the microbatches do not."""
    fn, args = program()
    with pytest.raises(error, match=words):
        applied(OneProgram(n_stages, n_microbatches), trace(fn, *args))


@pytest.mark.parametrize("program", [several.sam, several.clip, several.ppo, several.muon])
def test_steps_in_several_passes_are_refused_with_the_schedule_that_runs_them(program):
    """And not with one microbatch, which is no pipeline; that schedule has as many passes."""
    fn, args = program(layers=4)
    traced = trace(fn, *args)
    with pytest.raises(TraceError, match=rf"has to {len(passes_of(traced, 4))} times.* Use schedule='auto'") as error:
        applied(OneProgram(2, 4), traced)
    assert "microbatches=1" not in str(error.value)


def test_normalised_batches_are_refused_without_advice_that_does_not_help():
    """Each layer needs all examples: no passes over microbatches, and no microbatches in one program."""

    def layer(x, w):
        h = jnp.tanh(x @ w)
        return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5), None

    shapes = abstract((LAYERS, WIDTH, WIDTH)), abstract((BATCH, WIDTH))
    fn, args = train_step_of(lambda w, x: jnp.mean(lax.scan(layer, x, w)[0] ** 2), *shapes)
    with pytest.raises(TraceError, match=r"or leave stages out\.$") as error:
        applied(OneProgram(2, 4), trace(fn, *args))
    assert "microbatches=1" not in str(error.value)


def test_layers_with_a_shard_map_are_refused_with_its_line():
    """By stages of one program, whatever the mesh."""
    mesh = jax.sharding.AbstractMesh((2, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)

    @partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P(None, "model"), P("model")), out_specs=P("data"))
    def mapped(x, up, down):
        return lax.psum(jnp.tanh(x @ up) @ down, "model")

    def loss(params, x):
        return jnp.mean(lax.scan(lambda x, w: (mapped(x, w["up"], w["down"]), None), x, params)[0] ** 2)

    weights = abstract((LAYERS, WIDTH, WIDTH))
    traced = trace(jax.grad(loss), {"up": weights, "down": weights}, abstract((BATCH, WIDTH)))
    line = mapped.__wrapped__.__code__.co_firstlineno + 5  # where the layers call it
    with pytest.raises(PipelineError, match=rf"shard_map at .*test_one_program.py:{line} .*sharding constraints"):
        applied(OneProgram(2, 4), traced)
