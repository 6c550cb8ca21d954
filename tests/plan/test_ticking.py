"""A pipeline in one program is searched, run, saved and verified like any step, and sends one activation a tick each way."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autoshard
from autoshard.errors import ClusterError, PipelineError, ShardingError
from autoshard.pipeline.schedule import ONE_PROGRAM
from benchmarks import models

WIDTH, HIDDEN, LAYERS, BATCH = 128, 256, 8, 256
OPTIMIZER = optax.adam(1e-3)


def train_step(state, batch):
    def loss(params):
        def layer(x, w):
            return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

        x, _ = jax.lax.scan(layer, batch["x"] @ params["in"], params["layers"])
        return jnp.mean(jnp.sum((x @ params["out"] - batch["y"]) ** 2, axis=-1))

    value, gradients = jax.value_and_grad(loss)(state["params"])
    updates, optimizer = OPTIMIZER.update(gradients, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": optimizer}, value


def init(key):
    keys = jax.random.split(key, 4)
    layers = {
        "up": jax.random.normal(keys[0], (LAYERS, WIDTH, HIDDEN)) / 11,
        "down": jax.random.normal(keys[1], (LAYERS, HIDDEN, WIDTH)) / 40,
    }
    ends = {name: jax.random.normal(k, (WIDTH, WIDTH)) / 11 for name, k in (("in", keys[2]), ("out", keys[3]))}
    params = {**ends, "layers": layers}
    return {"params": params, "optimizer": OPTIMIZER.init(params)}


@functools.cache
def example():
    key = jax.random.key(0)
    return init(key), {"x": jax.random.normal(key, (BATCH, WIDTH)), "y": jnp.ones((BATCH, WIDTH))}


@functools.cache
def searched(stages=4, microbatches=4, cluster="cpu:8"):
    options = {"stages": stages, "schedule": "one_program", "microbatches": microbatches, "searcher": "dynamic_programming"}
    return autoshard.search(train_step, *example(), cluster=cluster, donate_argnums=0, **options)


def check_trained(strategy, step, state, *batch, steps=3):
    """Losses and state after a few steps are those of one device."""
    run, alone, reference = strategy.apply(step), jax.jit(step), state
    state, *placed = strategy.shard(jax.tree.map(jnp.array, state), *batch)
    for _ in range(steps):
        state, loss = run(state, *placed)
        reference, expected = alone(reference, *batch)
        assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    for here, there in zip(jax.tree.leaves(state), jax.tree.leaves(reference), strict=True):
        np.testing.assert_allclose(here, there, atol=1e-5 * float(jnp.max(jnp.abs(there))) + 1e-12)


@pytest.mark.parametrize("stages, microbatches", [(4, 4), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((2, 8), (8, 16)))])
def test_numbers_are_those_of_one_device(stages, microbatches):
    """After three steps of Adam."""
    check_trained(searched(stages, microbatches), train_step, *example())


def test_stages_have_their_layers_and_the_mesh_has_them_first():
    """Weights and moments of the layers are split among the stages, as the mesh's first axis."""
    strategy = searched()
    assert next(iter(strategy.mesh_shape.items())) == ("stage", 4) and math.prod(strategy.mesh_shape.values()) == 8
    assert strategy.microbatches == 4 and strategy.stages == ()
    for tensor in strategy.record.arguments:
        if "layers" in tensor.path:
            assert np.atleast_1d(tensor.spec[0])[0] == "stage", tensor.path


def test_what_stages_send_in_a_tick_is_one_activation_each_way():
    """As collective permutes of a microbatch, in the forward and the backward loop, and nothing else crosses stages there."""
    strategy, ticks = searched(), 4 + 4 - 1
    crossing = [each for each in strategy.cost.collectives if "stage" in each.mesh_axes]
    looped = [each for each in crossing if each.count > 1]
    assert [(each.kind, each.count) for each in looped] == [("collective_permute", ticks)] * 2
    per_device = BATCH // 4 * WIDTH * 4
    assert all(per_device // 2 <= each.bytes <= per_device for each in looped)


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", ["shardy", "cpu"])
def test_the_compiled_program_has_the_planned_collectives(target):
    """In kind, number and bytes; FLOPs too: the bubbles of all ticks are in both."""
    found = autoshard.verify(searched(), train_step, *example(), target=target)
    assert found.exact and found.flops_ratio == pytest.approx(1.0, abs=0.01)


@functools.cache
def in_two_rounds():
    """The step in 4 stages and two rounds, which small steps on CPUs gain nothing by."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ONE_PROGRAM, "one_program_interleaved", (2,))
        options = {"stages": 4, "schedule": "one_program_interleaved", "microbatches": 4, "searcher": "dynamic_programming"}
        return autoshard.search(train_step, *example(), cluster="cpu:8", donate_argnums=0, **options)


@pytest.mark.slow
def test_in_two_rounds_numbers_are_those_of_one_device(tmp_path):
    """Of a strategy that was saved, too, which says in how many rounds it runs."""
    strategy = in_two_rounds()
    strategy.save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    assert loaded == strategy and loaded.record.program.rounds == 2
    check_trained(loaded, train_step, *example())
    explained = " ".join(str(loaded.explain()).split())
    assert "Schedule one_program_interleaved: 4 microbatches in 4 stages" in explained and "through which they go 2 times" in explained
    assert "11 ticks forward" in explained and "stage 0 F0a F1a F2a F3a F0b F1b F2b F3b" in explained


@functools.cache
def with_weights_apart():
    """The step in 4 stages, whose gradients of weights are apart."""
    options = {"stages": 4, "schedule": "one_program_zero_bubble", "microbatches": 4, "searcher": "dynamic_programming"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(ONE_PROGRAM, "one_program_zero_bubble", (1,))
        return autoshard.search(train_step, *example(), cluster="cpu:8", donate_argnums=0, **options)


@pytest.mark.slow
def test_with_weights_apart_numbers_are_those_of_one_device(tmp_path):
    """Of a strategy that was saved, too; its explanation says that gradients of weights have no bubble."""
    strategy = with_weights_apart()
    strategy.save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    assert loaded == strategy and loaded.record.program.weights_apart
    check_trained(loaded, train_step, *example())
    explained = " ".join(str(loaded.explain()).split())
    assert "Schedule one_program_zero_bubble: 4 microbatches in 4 stages" in explained
    assert "gradients of weights come after the last one, where no stage waits" in explained


@pytest.mark.slow
@pytest.mark.parametrize("target", ["shardy", "cpu"])
def test_the_bubble_of_weights_apart_is_as_planned(target):
    """The compiled program has the planned collectives, and FLOPs in which gradients of weights are computed once a microbatch alone."""
    strategy = with_weights_apart()
    found = autoshard.verify(strategy, train_step, *example(), target=target)
    assert found.exact and found.flops_ratio == pytest.approx(1.0, abs=0.01)
    of_weights, more_ticks = 2 * 2 * BATCH * WIDTH * HIDDEN * LAYERS / 8, (4 + 4 - 1) / 4 - 1
    assert searched().cost.flops - strategy.cost.flops == pytest.approx(of_weights * more_ticks, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["shardy", "cpu"])
def test_in_two_rounds_weights_and_gradients_are_exchanged_once_a_step(target):
    """As predicted, in kind, number and bytes; beside them stages send activations alone, to the next stage and back to the first."""
    strategy = in_two_rounds()
    looped = [each for each in strategy.cost.collectives if "stage" in each.mesh_axes and each.count > 1]
    assert [(each.kind, each.count) for each in looped] == [("collective_permute", 2 * 4 + 4 - 1)] * 4
    assert any(each.kind == "all_to_all" and each.count == 1 for each in strategy.cost.collectives)
    found = autoshard.verify(strategy, train_step, *example(), target=target)
    assert found.exact and found.flops_ratio == pytest.approx(1.0, abs=0.01)


def test_a_note_compares_rounds():
    """Whoever asks for two rounds and gets one is told what both take."""
    options = {"stages": 4, "schedule": "one_program_interleaved", "microbatches": 4, "searcher": "data_parallel"}
    found = autoshard.search(train_step, *example(), cluster="cpu:8", **options)
    assert found.record.program.rounds == 1
    assert any("in 1 round," in note and "in 2 rounds, of which the faster was taken" in note for note in found.notes)


@pytest.mark.slow
def test_two_rounds_are_taken_where_they_are_faster():
    """Of a step whose weights take long to exchange and whose ticks are short one round is; of one with long ticks two are."""
    options = {"stages": 4, "schedule": "one_program_interleaved", "mesh": {"data": 2}}
    small = autoshard.search(train_step, *example(), cluster="cpu:8", microbatches=4, **options)
    assert small.record.program.rounds == 1
    step, args = models.gpt_scan(remat=True)
    large = autoshard.search(step, *args, cluster="v5e:2x4", microbatches=8, donate_argnums=0, **options)
    assert large.record.program.rounds == 2


def test_a_saved_strategy_runs_as_before(tmp_path):
    """The file says into how many stages and microbatches the program is rewritten."""
    strategy = searched()
    strategy.save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    assert loaded == strategy and loaded.record.program.stages == 4
    check_trained(loaded, train_step, *example(), steps=1)
    explained = " ".join(str(loaded.explain()).split())
    assert "Schedule one_program: 4 microbatches in 4 stages" in explained and "7 ticks forward" in explained
    assert "stage 3 .........F0 F1 F2 F3 B3 B2 B1 B0" in explained


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", pytest.param("fit", marks=pytest.mark.slow)])
def test_layers_are_computed_again_within_stages(remat):
    """Recomputation is chosen for the step as it was traced, and saved with the stages; numbers stay the same."""
    options = {"stages": 4, "schedule": "one_program", "microbatches": 4, "searcher": "data_parallel", "donate_argnums": 0}
    kept = autoshard.search(train_step, *example(), cluster="cpu:8", **options, remat=None)
    limit = None if remat == "full" else 0.9 * kept.cost.peak_bytes
    strategy = autoshard.search(train_step, *example(), cluster="cpu:8", **options, remat=remat, memory_limit_bytes=limit)
    assert strategy.remat == remat and strategy.cost.peak_bytes < kept.cost.peak_bytes
    check_trained(strategy, train_step, *example(), steps=1)


@pytest.mark.slow
def test_a_decorated_step_takes_the_schedule():
    """`parallelize` has the same options."""
    options = {"stages": 4, "schedule": "one_program", "microbatches": 4, "searcher": "data_parallel", "progress": False}
    run = autoshard.parallelize(train_step, cluster="cpu:8", **options)
    state, batch = example()
    assert math.isfinite(float(run(state, batch)[1]))
    assert run.strategy.record.program.stages == 4


def test_numbers_of_microbatches_are_tried_where_none_is_given():
    """Multiples of the stages; bubbles take less of more microbatches."""
    options = {"stages": 2, "schedule": "one_program", "searcher": "data_parallel", "mesh": {"data": 4}}
    strategy = autoshard.search(train_step, *example(), cluster="cpu:8", **options)
    assert strategy.microbatches in (2, 4, 8) and strategy.mesh_shape == {"stage": 2, "data": 4}


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt_remat"])
@pytest.mark.parametrize("stages, rounds", [(2, 1), (4, 1), (8, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("schedule", ["one_program", "one_program_zero_bubble"])
@pytest.mark.slow
def test_language_models_train_as_on_one_device(name, stages, rounds, schedule, monkeypatch):
    """Scanned GPT, with `jax.checkpoint` and without, and Llama, in 2, 4 and 8 stages on eight devices, in one round and in two."""
    from tests.programs import concrete

    small = {"layers": 8, "width": 32, "heads": 4, "vocabulary": 64, "batch": 16, "length": 8, "dtype": jnp.float32}
    if name == "llama":
        step, args = models.llama(**small, kv_heads=2, ffn=64, scan=True)
    else:
        step, args = models.gpt_scan(**small, remat=name == "gpt_remat")
    options = {"stages": stages, "schedule": schedule, "microbatches": 4, "searcher": "recursive_programming", "donate_argnums": 0}
    monkeypatch.setitem(ONE_PROGRAM, schedule, (rounds,))
    strategy = autoshard.search(step, *args, cluster="cpu:8", **options)
    assert strategy.record.program.rounds == rounds
    check_trained(strategy, step, *concrete(args))


def unrolled(state, batch):
    for w in jax.tree.leaves(state["params"]["layers"]["up"]):
        batch = {"x": batch["x"] @ w[0] @ w[0].T, "y": batch["y"]}
    return state, jnp.mean(batch["x"])


@pytest.mark.parametrize(
    "step, options, error, words",
    [
        (train_step, {"stages": 3}, ClusterError, "stages have as many devices each: cpu:8 has 8, got stages=3"),
        (train_step, {}, ShardingError, "got schedule='one_program' without one"),
        (train_step, {"stages": 2, "mesh": {"data": 2}}, ClusterError, "with stages=2 a mesh is that of each stage, on 4 of the 8"),
        (train_step, {"stages": 2, "microbatches": 1}, ShardingError, "got microbatches=1 for 2 stages. Use 2 or more"),
        (unrolled, {"stages": 2, "microbatches": 2}, PipelineError, "has no scan"),
    ],
)
def test_what_cannot_be_one_program_is_refused(step, options, error, words):
    """With the rule, what was got, and what to do."""
    with pytest.raises(error, match=words):
        autoshard.search(step, *example(), cluster="cpu:8", schedule="one_program", **options)
