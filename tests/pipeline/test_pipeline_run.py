"""A pipelined step computes what the step computes on one device, in the order of its schedule."""

from __future__ import annotations

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax._src.dispatch import runtime_tokens  # JAX has no public way to drop those of a callback that failed

from autoshard.errors import PipelineError
from autoshard.pipeline.instructions import Instruction
from autoshard.pipeline.lowered import lowered_programs
from autoshard.pipeline.run import Pipelined
from autoshard.pipeline.schedule import Schedule, Task
from autoshard.pipeline.scheduling import schedule_of
from autoshard.pipeline.stages import stages_of
from autoshard.trace import trace
from benchmarks import models
from tests import programs
from tests.microbatch.test_sorted_rows import mixture, top_2
from tests.pipelines import compared, pipelined
from tests.programs import abstract, train_step_of

B, D = 16, 8
SMALL = {"dtype": jnp.float32}


@cache
def normalised():
    """Layers with batch normalisation, and a scale of the loss that the last stage alone reads, through an exponential."""
    params = {"layers": [{"w": abstract((D, D)), "g": abstract((D,))}] * 2, "scale": abstract(())}

    def loss(params, x, y):
        for p in params["layers"]:
            h = x @ p["w"]
            x = x + jax.nn.relu((h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-3) * p["g"])
        return jnp.exp(params["scale"]) * jnp.mean((x - y) ** 2)

    return train_step_of(loss, params, abstract((B, D)), abstract((B, D)), optimizer=optax.sgd(0.1, 0.9))


@pytest.mark.slow
def test_one_microbatch_of_examples_that_depend_on_each_other():
    """Batch normalisation in stages; one argument is read by the last stage alone, and one by none."""

    def step(state, x, y, unread):
        return plain(state, x, y)

    plain, args = normalised()
    args = *args, abstract((3,))
    compared(pipelined(step, args, 2, 1), args)


def test_results_that_no_task_computes():
    """Constants, arguments as they are, a value returned twice and what is made of the step's number come beside what stages compute."""

    def step(params, n, x):
        value, gradients = jax.value_and_grad(lambda params: jnp.mean((jnp.tanh(x @ params[0]) @ params[1]) ** 2))(params)
        rate = 1e-3 * jnp.minimum(1.0, n / 10)
        extra = 1e-3, jnp.float32(x.size), jnp.zeros((2, 3)), np.arange(3), True, jax.random.key(0), None, {}
        return jax.tree.map(lambda p, g: p - rate * g, params, gradients), n + 1, value, value, rate, params[1], x, extra

    args = [abstract((D, 2 * D)), abstract((2 * D, D))], abstract((), "int32"), abstract((2 * B, D))
    compared(pipelined(step, args, 2, 2, "zero_bubble"), args)


def slow(cases):
    """Cases that run with the slow tests."""
    return [pytest.param(*case, marks=pytest.mark.slow) for case in cases]


@cache
def mlp(layers=4, dropout=False, tapped=False):
    """Layers of one width; with dropout a key is an argument, and ``tapped`` adds a second loss half way."""
    params = [{"w": abstract((D, 2 * D)), "v": abstract((2 * D, D))} for _ in range(layers)]

    def loss(params, x, y, *key):
        taps = []
        for k, p in enumerate(params):
            hidden = jnp.tanh(x @ p["w"])
            if key:
                kept = jax.random.bernoulli(jax.random.fold_in(key[0], k), 0.8, hidden.shape)
                hidden = jnp.where(kept, hidden / 0.8, 0.0)
            x = x + hidden @ p["v"]
            taps.append(jnp.mean(jnp.abs(x)))
        return jnp.mean((x - y) ** 2) + (0.1 * taps[layers // 2 - 1] if tapped else 0.0)

    keys = (jax.ShapeDtypeStruct((), jax.random.key(0).dtype),) if dropout else ()
    return train_step_of(loss, params, abstract((B, D)), abstract((B, D)), *keys)


@cache
def lstm(layers=2, length=5):
    """Two layers of an LSTM, each a scan over time, and a readout of the last state."""
    params = [{"x": abstract((D, 4 * D)), "h": abstract((D, 4 * D)), "b": abstract((4 * D,))} for _ in range(layers)]

    def layer(p, xs):
        def cell(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x @ p["x"] + h @ p["h"] + p["b"], 4, -1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((xs.shape[1], D))
        return lax.scan(cell, (zeros, zeros), xs)[1]

    def loss(params, x, y):
        for p in params["layers"]:
            x = layer(p, jnp.moveaxis(x, 0, 1)).swapaxes(0, 1)
        return jnp.mean((x[:, -1] @ params["out"] - y) ** 2)

    return train_step_of(loss, {"layers": params, "out": abstract((D, D))}, abstract((B, length, D)), abstract((B, D)))


@cache
def masked(layers=4):
    """A mean over the examples of a mask, so few that each stage divides by their number by itself."""

    def loss(params, x, mask):
        for w in params:
            x = x + jnp.tanh(x @ w)
        return ((x**2).sum(-1) * mask).sum() / mask.sum()

    return train_step_of(loss, [abstract((D, D))] * layers, abstract((B, D)), abstract((B,)))


SCHEDULES = [("gpipe", 2, 4, 1), ("auto", 2, 4, 2), ("interleaved", 2, 4, 2)]
MORE_SCHEDULES = [
    *[("zero_bubble", 4, 8, 1), ("auto", 2, 8, 3), ("auto", 4, 4, 4), ("1f1b", 4, 4, 1), ("1f1b", 1, 2, 1)],
    *[("1f1b", 8, 2, 1), ("interleaved", 4, 4, 2), ("zero_bubble", 8, 8, 1)],
]


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "n_stages", "n_microbatches", "n_chunks"), [*SCHEDULES, *slow(MORE_SCHEDULES)])
def test_every_schedule_computes_the_step_in_its_order(schedule, n_stages, n_microbatches, n_chunks):
    """And the tasks that are started are those of the schedule, each stage's in its order."""
    fn, args = mlp(max(n_stages * n_chunks, 2))  # a layer a piece
    run = pipelined(fn, args, n_stages, n_microbatches, schedule, n_chunks=n_chunks)
    compared(run, args)
    assert run.executed == run.order
    for stage, order in enumerate(run.schedule.orders):
        assert tuple(task for at, task in run.executed if at == stage) == order


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "n_chunks"), [("zero_bubble", 1), *slow([("1f1b", 1), ("gpipe", 1), ("interleaved", 2)])])
def test_tokens_that_are_sorted_by_expert(schedule, n_chunks):
    """Each stage sorts those of its microbatch, and computes them again in the backward pass."""
    layer = jax.checkpoint(top_2) if schedule == "zero_bubble" else top_2

    def loss(layers, x):
        for p in layers:
            x = layer(p, x)
        return jnp.mean(x**2)

    fn, args = train_step_of(loss, [mixture()] * 2 * n_chunks, abstract((B, D)), optimizer=optax.sgd(0.1))
    compared(pipelined(fn, args, 2, 4, schedule, n_chunks=n_chunks), args)


PROGRAMS = {
    "gpt": partial(programs.gpt, n_layers=2),
    "dropout and two losses": partial(mlp, dropout=True, tapped=True),
    "lstm": lstm,
    "masked": masked,
}
LARGER = {
    "gpt, recomputed": partial(programs.gpt, n_layers=4, remat=True),
    "resnet": lambda: models.resnet((1, 1), 8, 16, 16, 32, groups=4, **SMALL)[:2],
    "llama": lambda: models.llama(4, 32, 4, 2, 64, 64, batch=16, length=16, **SMALL)[:2],
    "mixture of experts": lambda: models.moe(2, 32, 4, 4, 64, batch=16, length=16, **SMALL)[:2],
    "u-net": lambda: models.unet(2, 8, 16, 16, 4, **SMALL)[:2],
    "encoder-decoder": lambda: models.encoder_decoder(width=64, heads=4, vocabulary=96, batch=16, length=32, **SMALL)[:2],
}


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_on_two_stages(name):
    """Losses and state of unlike programs are those of one device."""
    fn, args = PROGRAMS[name]()
    compared(pipelined(fn, args, 2, 4), args)


@pytest.mark.slow
@pytest.mark.parametrize(("n_stages", "schedule"), [(2, "zero_bubble"), (4, "1f1b")])
@pytest.mark.parametrize("name", {**PROGRAMS, **LARGER})
def test_programs_on_more_stages(name, n_stages, schedule):
    """With the shardings that are found for each stage, and on as many stages as the program has layers for."""
    fn, args = {**PROGRAMS, **LARGER}[name]()
    if n_stages == 4 and name == "lstm":  # three products
        with pytest.raises(PipelineError, match="4 stages"):
            stages_of(trace(fn, *args), n_stages, 4)
        return
    mesh = {"data": 2, "model": 4 // n_stages}
    compared(pipelined(fn, args, n_stages, 4, schedule, mesh, "auto"), args)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGER)
def test_programs_in_chunks_of_a_v(name):
    """What stages send to others than their neighbours, and to stages on the same devices, arrives."""
    fn, args = LARGER[name]()
    compared(pipelined(fn, args, 2, 4, "auto", n_chunks=2), args)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow), pytest.param(2, marks=pytest.mark.slow)])
def test_any_shardings_of_the_stages(seed):
    """Random layouts and partial sums of every value are handed from task to task as they are."""
    fn, args = mlp(2, dropout=True) if seed == 0 else programs.gpt(n_layers=2)
    compared(pipelined(fn, args, 2, 4, "zero_bubble", {"data": 2, "model": 2}, 100 * seed), args, steps=2)


@pytest.mark.slow
def test_what_is_only_read_narrow_is_handed_on_narrow():
    """Float32 weights that layers cast themselves: their programs get bfloat16, with the same results to the last bit."""

    def loss(weights, x):
        def layer(x, w):
            return jnp.tanh(x @ w.astype(x.dtype)), None

        return jnp.mean(lax.scan(layer, x, weights)[0].astype(jnp.float32) ** 2)

    fn, args = train_step_of(loss, abstract((4, 64, 64)), abstract((B, 64), jnp.bfloat16))
    runs = [pipelined(fn, args, 2, 4, demotes=demotes) for demotes in (False, True)]
    results = [run(*map(jnp.asarray, jax.tree.leaves(programs.concrete(args)))) for run in runs]
    assert all(bool((one == other).all()) for one, other in zip(*results, strict=True))
    wide, narrow = (handed_bytes(run, "F") for run in runs)
    assert narrow < 0.7 * wide


def handed_bytes(run, kind, stage=0):
    """The bytes that a stage's tasks of a kind read."""
    found = lowered_programs(run.staged.stages[stage], run.plans[stage], run._programs[stage], run.schedule.n_microbatches, 1, None)
    (task,) = (each for each in found if each.name == kind)
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(task.lowered.in_avals))


@pytest.mark.slow
def test_a_large_array_of_another_stage_is_read_where_it_arrives():
    """What the first stage makes once for the tasks of another one, too large to be copied for them; their lowering takes it as well."""

    def loss(weights, x):
        shared = weights["a"] @ weights["b"]
        for w in weights["layers"]:
            x = jnp.tanh(x @ shared) @ w
        return jnp.mean(x**2)

    weights = {"a": abstract((512, 2)), "b": abstract((2, 640)), "layers": [abstract((640, 512))] * 2}
    fn, args = train_step_of(loss, weights, abstract((B, 512)))
    run = pipelined(fn, args, 2, 2, mesh={"data": 1})
    n_own = len(run.staged.stages[1].arguments)
    assert any(k >= n_own for task in run._programs[1].tasks.values() for k in task.arguments)
    compared(run, args)
    assert handed_bytes(run, "B", 1) >= 512 * 640 * 4


@pytest.mark.slow
def test_state_stays_on_its_stage():
    """Weights and optimizer state are returned on the devices of the stage that reads them, with the sharding that it wants."""
    fn, args = mlp(4)
    run = pipelined(fn, args, 2, 2)
    results = compared(run, args, steps=1)
    for result, argument in run.staged.traced.graph.aliases:
        assert run.out_shardings[result] == run.in_shardings[argument]
        assert results[result].sharding.is_equivalent_to(run.out_shardings[result], results[result].ndim)
    assert len({sharding.mesh for sharding in run.in_shardings}) == 2


@pytest.mark.slow
def test_a_failure_names_stage_microbatch_and_line():
    """An exception in a task says where it happened: here a NaN that JAX looks for, of the third example, which is of microbatch 2."""

    def loss(params, x, y):
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x * jnp.sqrt(y + jnp.sum(x, -1, keepdims=True)))

    fn, args = train_step_of(loss, [abstract((D, D))] * 4, abstract((B, D)), abstract((B, D)))
    run = pipelined(fn, args, 2, 4)
    given = [jnp.full(x.shape, x.dtype.type(0 if not x.shape else 1)) for x in jax.tree.leaves(args)]
    jax.block_until_ready(run(*given))
    given[-1] = given[-1].at[2].set(-1000.0)
    with jax.debug_nans(True), pytest.raises(PipelineError, match=r"microbatch 2 .*stage 1.*test_pipeline_run\.py.*nan"):
        run.checked(*given)


@pytest.mark.sample(1)
@pytest.mark.parametrize("n_microbatches", [1, 2])
def test_callbacks_are_called_once(n_microbatches):
    """Prints and other callbacks of every stage, and of what comes after the loop over microbatches."""
    calls = []

    def step(params, x):
        def loss(params):
            h = x
            for w in params:
                h = jnp.tanh(h) @ w
                jax.debug.callback(lambda x: calls.append(float(x)), jnp.max(h))
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(params)
        jax.debug.callback(lambda x: calls.append(float(x)), value)
        return [w - g for w, g in zip(params, gradients, strict=True)], value

    args = [abstract((D, D))] * 2, abstract((B, D))
    run = pipelined(step, args, 2, n_microbatches)
    given = [jnp.ones((D, D)) / D, jnp.eye(D), jnp.ones((B, D))]
    jax.block_until_ready(run(*given))
    jax.effects_barrier()
    first, second = math.tanh(1.0), math.tanh(math.tanh(1.0))
    assert sorted(calls) == pytest.approx(sorted([first, second, second**2]), rel=1e-5)


def test_a_callback_that_raises_names_its_stage_and_lines():
    """The error of the stage that it is in, with the lines of the step that the stage computes."""

    def reject(x):
        raise ValueError("too large")

    def step(params, x):
        def loss(params):
            h = jnp.tanh(x) @ params[0]
            h = jnp.tanh(h) @ params[1]
            jax.debug.callback(reject, jnp.max(h))
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(params)
        return [w - g for w, g in zip(params, gradients, strict=True)], value

    run = pipelined(step, [[abstract((D, D))] * 2, abstract((B, D))], 2, 2)
    with pytest.raises(PipelineError, match=r"(?s)stage 1.*test_pipeline_run\.py.*too large"):
        run.checked(jnp.eye(D), jnp.eye(D), jnp.ones((B, D)))
    runtime_tokens.clear()  # or JAX raises the error once more at each barrier


@pytest.mark.slow
def test_an_interrupted_call_leaves_its_arguments_as_they_were(monkeypatch):
    """Ctrl-C between two tasks, although the state is donated: the next call computes the step."""
    fn, args = mlp(4)
    run = pipelined(fn, args, 2, 2, donated=(0,), early=False)
    last, start = [each for each in run._instructions if "of microbatch" in each.what][-1], Instruction.run

    def interrupted(each, arrays):
        if each is last:
            raise KeyboardInterrupt
        start(each, arrays)

    given = [jnp.full(x.shape, x.dtype.type(0.1)) for x in jax.tree.leaves(args)]
    expected = jax.device_get(jax.tree.leaves(jax.jit(fn)(*jax.tree.unflatten(jax.tree.structure(args), given))))
    placed = [jax.device_put(x, sharding) for x, sharding in zip(given, run.in_shardings, strict=True)]
    with monkeypatch.context() as patched:
        patched.setattr(Instruction, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(*placed)
    results = run(*placed)
    assert any(x.is_deleted() for x in placed)  # now the state is used up
    for result, one in zip(results, expected, strict=True):
        assert jax.device_get(result) == pytest.approx(one, rel=1e-4, abs=1e-6)


def test_what_stages_receive_has_names_of_the_users_program():
    """Activations and gradients with the stage and the line that they come from; two of one line are numbered."""

    def loss(params, x, y):
        for w in params:
            x, y = jnp.tanh(x @ w), jnp.tanh(y @ w)
        return jnp.mean(x * y)

    fn, args = train_step_of(loss, [abstract((D, D))] * 2, abstract((B, D)), abstract((B, D)))
    first, last = stages_of(trace(fn, *args), 2, 2).stages
    line = f"(test_pipeline_run.py:{loss.__code__.co_firstlineno + 2})"
    names = last.traced.graph.argument_paths[len(last.arguments) :]
    assert names == (f"activation_from_stage0 {line}", f"activation_from_stage0 {line} 2")
    assert f"gradient_from_stage1 {line}" in first.traced.graph.argument_paths


def test_parts_that_do_not_fit_are_refused():
    """A schedule of other numbers, and orders that wait for each other, with the numbers."""
    fn, args = mlp(4)
    staged = stages_of(trace(fn, *args), 2, 4)
    run = pipelined(fn, args, 2, 4)
    with pytest.raises(PipelineError, match="2 pieces of 4 microbatches"):
        Pipelined(staged, run.plans, schedule_of("1f1b", 2, 2))
    late = tuple(Task(kind, i) for i in range(4) for kind in "FB")
    with pytest.raises(PipelineError, match="wait for each other: stage 0 for B0"):
        Pipelined(staged, run.plans, Schedule("mine", (late, tuple(sorted(late, key=lambda task: (task.kind != "F", -task.microbatch))))))


def test_one_trace_of_a_cut_makes_the_same_stages():
    """A cut gives the programs again, with equal fingerprints."""
    fn, args = mlp(4)
    traced = trace(fn, *args)
    staged = stages_of(traced, 2, 4)
    again = stages_of(traced, 2, 4, staged.cut)
    assert [s.traced.graph.fingerprint for s in staged.stages] == [s.traced.graph.fingerprint for s in again.stages]
