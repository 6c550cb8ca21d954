"""Calls like the one before: no array of theirs is looked at again, and all that differs is still noticed."""

from __future__ import annotations

import collections
import functools
import gc
import os
import subprocess
import sys
import warnings
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.run import calls
from autoshard.run import step as steps
from autoshard.run.calls import OFTEN, Repeat, reader
from autoshard.run.step import Step
from autoshard.trace import traced as tracing


class Moments(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclass
class State:
    weights: Any
    moments: Any


def example(n: int = 16) -> tuple[State, jax.Array]:
    """A state of dicts, lists and tuples, and a batch."""
    weights = {
        "up": jnp.full((8, 16), 0.1, jnp.float32),
        "layers": [{"w": jnp.full((16, 16), 0.01 * i, jnp.float32), "b": None} for i in range(3)],
    }
    return State(weights, Moments(jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights))), jnp.ones((n, 8))


def train_step(state, x):
    def loss(weights):
        y = x @ weights["up"]
        for layer in weights["layers"]:
            y = y + jnp.tanh(y @ layer["w"])
        return jnp.mean((y - 1) ** 2)

    value, gradient = jax.value_and_grad(loss)(state.weights)
    second = jax.tree.map(lambda m, g: 0.9 * m + g * g, state.moments.second, gradient)
    weights = jax.tree.map(lambda w, g, m: w - 0.1 * g / (1 + m), state.weights, gradient, second)
    return State(weights, Moments(state.moments.first + 1, second)), value


COMPILED: list[str] = []


def note(event: str, duration_secs: float, fun_name: str = "", **_: Any) -> None:
    if "backend_compile" in event:
        COMPILED.append(fun_name)


jax.monitoring.register_event_duration_secs_listener(note)

OPTIONS = {"cluster": "cpu:8", "mesh": {"data": 8}, "searcher": "data_parallel"}


def made(how: str, donate: tuple[int, ...] = (), fn=train_step, args=None):
    """The step, applied or decorated."""
    if how == "apply":
        return autoshard.search(fn, *(args or example()), donate_argnums=donate, **OPTIONS).apply(fn)
    return autoshard.parallelize(fn, donate_argnums=donate, progress=False, **OPTIONS)


def assert_close(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.fixture
def counts(monkeypatch):
    """How often a call was looked through (`anew`), and how often one was taken to be like the one before (`tried`)."""
    found = collections.Counter()
    anew, tried = Step.anew, Repeat.__call__

    def counted_anew(self, *args):
        found["anew"] += 1
        return anew(self, *args)

    def counted_try(self, args):
        found["tried"] += 1
        return tried(self, args)

    monkeypatch.setattr(Step, "anew", counted_anew)
    monkeypatch.setattr(Repeat, "__call__", counted_try)
    return found


@pytest.mark.sample(2)
@pytest.mark.parametrize("donate", [(), (0,)])
@pytest.mark.parametrize("how", ["apply", "decorate"])
def test_only_the_first_call_is_looked_through(how, donate, counts):
    """From the second call on a step is its jitted function, and computes the same."""
    step, wanted, (state, x), (expected, _) = made(how, donate), jax.jit(train_step), example(), example()
    for _ in range(4):
        state, loss = step(state, x)
        expected, expected_loss = wanted(expected, x)
        assert_close((state, loss), (expected, expected_loss))
    assert counts == {"anew": 1, "tried": 3}


@pytest.mark.parametrize("donate", [pytest.param((), marks=pytest.mark.slow), (0,)])
def test_only_the_first_call_of_a_pipeline_is_looked_through(donate, counts):
    """Later ones move what is elsewhere, and notice arguments of other shapes and those that are used up."""
    options = {"cluster": "cpu:8", "mesh": {"data": 4}, "stages": 2, "microbatches": 2, "searcher": "data_parallel"}
    (state, x), (expected, _), wanted = example(), example(), jax.jit(train_step)
    step = autoshard.search(train_step, state, x, donate_argnums=donate, **options).apply(train_step)
    for k in range(4):
        before = state
        state, loss = step(before, np.asarray(x + k))
        expected, expected_loss = wanted(expected, x + k)
        assert_close((state, loss), (expected, expected_loss))
    assert counts == {"anew": 1, "tried": 3}
    for other in batches(x).values():
        state, loss = step(state, other)
        expected, expected_loss = wanted(expected, x)
        assert_close((state, loss), (expected, expected_loss))
    with pytest.raises(autoshard.StrategyError):
        step(state, x[:8])
    with pytest.raises(autoshard.StrategyError):
        step(state, x.astype(jnp.bfloat16))
    if donate:
        with pytest.raises(autoshard.StrategyError, match=r"up.*earlier"):
            step(before, x)
    with pytest.raises(autoshard.StrategyError, match=r"inside jax\.jit"):
        jax.jit(step)(state, x)


def batches(x):
    first, last = jax.devices()[0], jax.devices()[-1]
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return {
        "numpy": np.asarray(x),
        "nowhere in particular": jnp.asarray(x),
        "one device": jax.device_put(x, first),
        "another device": jax.device_put(x, SingleDeviceSharding(last)),
        "another mesh": jax.device_put(x, NamedSharding(mesh, P("a", "b"))),
        "whole": jax.device_put(x, NamedSharding(mesh, P())),
    }


@pytest.mark.sample(2)
@pytest.mark.parametrize("where", batches(np.ones((16, 8), np.float32)))
def test_arguments_that_lie_elsewhere_are_moved(where, counts):
    """After calls with arrays in place one that is elsewhere is moved, and nothing is compiled for it; from then on no call is in vain."""
    step, wanted, (state, x) = made("apply"), jax.jit(train_step), example()
    x = jax.random.normal(jax.random.key(0), x.shape)
    strategy = autoshard.search(train_step, state, x, **OPTIONS)
    _, there = strategy.shard(state, x)
    for _ in range(2):
        step(*strategy.shard(state, x))
    other, results, placed = batches(x)[where], [], strategy.shard(state)[0]
    jax.device_put(other, there.sharding)  # which compiles what moves it
    COMPILED.clear()
    for batch in (other, other, there, other, there, other, there, other):
        results.append(step(placed, batch))
    assert not COMPILED
    assert counts["anew"] <= 1 + OFTEN
    for result in results:
        assert_close(result, wanted(state, x))


def test_a_state_that_was_moved_once_is_not_looked_through_again(monkeypatch):
    """The first call brings a state to its devices, and later ones only the batch that comes from the host."""
    step, (state, x) = made("apply"), example()
    looked: list[int] = []
    real = calls.put

    def counted(leaves, *where):
        looked.extend(leaves)
        return real(leaves, *where)

    monkeypatch.setattr(calls, "put", counted)
    for _ in range(4):
        looked.clear()
        state, _ = step(state, x)
    assert len(looked) == 1


def names_called(call) -> list[str]:
    """The functions of JAX's `jit` in Python that a call goes through; none where its compiled cache has the program."""
    found: list[str] = []

    def note_call(frame, event, _):
        if event == "call" and frame.f_code.co_filename.endswith("pjit.py"):
            found.append(frame.f_code.co_name)

    sys.setprofile(note_call)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def scaled_step(state, x, rate=0.5, mode=1):
    scale = rate * mode * jnp.mean(x)
    return jax.tree.map(lambda leaf: leaf - scale * leaf, state), scale


KINDS = {
    "arrays": ({}, lambda x: ((x,), {})),
    "donated": ({"donate_argnums": 0}, lambda x: ((x,), {})),
    "numpy": ({}, lambda x: ((np.asarray(x),), {})),
    "a number": ({}, lambda x: ((x, 0.25), {})),
    "weakly typed": ({}, lambda x: ((x, jnp.log(2.0)), {})),
    "by name": ({}, lambda x: ((), {"x": x, "rate": 0.25})),
    "static": ({"static_argnums": 3}, lambda x: ((x, 0.25, 3), {})),
    "static by name": ({"static_argnames": "mode", "donate_argnums": 0}, lambda x: ((x, 0.25), {"mode": 3})),
}


@pytest.mark.sample(4)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", ["apply", "decorate", "load"])
def test_later_calls_stay_in_the_compiled_cache(kind, how, tmp_path):
    """From the third call on `jax.jit` finds the program without Python, as it never does where its first trace raised."""
    options, made_of = KINDS[kind]
    state, x = {"w": jnp.ones((16, 8)), "b": [jnp.ones(8), jnp.ones(8)]}, jnp.ones((16, 8))
    args, kwargs = made_of(x)
    step = autoshard.parallelize(scaled_step, progress=False, **OPTIONS, **options)
    if how != "decorate":
        strategy = step.search(state, *args, **kwargs)
        if how == "load":
            strategy.save(tmp_path / "s.json")
            strategy = autoshard.load(tmp_path / "s.json")
        step = strategy.apply(step)
    for _ in range(3):
        args, kwargs = made_of(x)
        state, _ = step(state, *args, **kwargs)
    args, kwargs = made_of(x)
    assert names_called(lambda: step(state, *args, **kwargs)) == []


def test_a_call_that_is_refused_leaves_others_fast():
    """Another shape, a used up array, and a transformation in between: the calls after them are as before."""
    step, (state, x) = made("apply", (0,)), example()
    for _ in range(3):
        before, (state, _) = state, step(state, x)
    for bad in ((before, x), (state, jnp.ones((16, 9))), (state,)):
        with pytest.raises(autoshard.AutoshardError):
            step(*bad)
    jax.eval_shape(step, state, x)
    for _ in range(2):
        state, _ = step(state, x)
    found: list[Any] = []
    assert names_called(lambda: found.append(step(state, x))) == []


def test_modules_stay_in_the_compiled_cache():
    """Flax NNX modules are taken apart, and the call of their arrays is found without Python."""
    from flax import nnx

    def update(model, x):
        loss, gradients = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - 0.1 * g, nnx.state(model, nnx.Param), gradients))
        return loss

    model, plain, x = nnx.Linear(8, 8, rngs=nnx.Rngs(0)), nnx.Linear(8, 8, rngs=nnx.Rngs(0)), jnp.ones((16, 8))
    step = made("decorate", fn=update)
    for _ in range(3):
        np.testing.assert_allclose(step(model, x), update(plain, x), rtol=1e-5)
    assert names_called(lambda: step(model, x)) == []


@pytest.mark.parametrize("how", ["apply", "decorate"])
def test_numbers_and_keywords_are_arguments_too(how, counts):
    """Python numbers stay weakly typed, and arguments may be named in any call."""

    def scaled(state, x, rate):
        return state["w"] * rate + x.sum(), state["h"] * rate

    state, x = {"w": jnp.ones(16), "h": jnp.ones(16, jnp.bfloat16)}, jnp.ones(16)
    step = made(how, fn=scaled, args=(state, x, 0.5))
    for rate in (0.5, 0.25, 2.0):
        assert_close(step(state, x, rate), scaled(state, x, rate))
        assert_close(step(state, rate=rate, x=x), scaled(state, x, rate))
    assert step(state, x, 0.5)[1].dtype == jnp.bfloat16
    assert counts["anew"] == 1
    with pytest.raises(autoshard.TraceError, match="does not fit"):
        step(state, x, 0.5, other=1)


@pytest.mark.filterwarnings("ignore:.*searched again")
def test_a_counter_that_starts_as_a_number_is_searched_and_compiled_once():
    """What replaces it is a weakly typed array, as `jax.jit` traces the number: it is the same program."""

    def counted(state, x):
        return {"step": state["step"] + 1, "w": state["w"] - jnp.mean(x)}

    step, state, x = autoshard.parallelize(counted, progress=False, **OPTIONS), {"step": 0, "w": jnp.ones((16, 8))}, jnp.ones((16, 8))
    COMPILED.clear()
    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            state = step(state, x)
    assert COMPILED == ["jit(counted)"] and state["step"] == 3


def test_other_types_find_their_own_programs(counts):
    """Other shapes, types and structures after calls that went straight through compute what the plain function does."""
    step = made("decorate", fn=lambda x, y: (jax.tree.map(lambda a: a * 2, x), jnp.sum(y)))
    ones = np.ones
    others = [
        (ones((16, 8), np.float32), ones(8, np.float32)),
        (ones((24, 8), np.float32), ones(8, np.float32)),
        (ones((16, 8), np.int32), ones(8, np.float32)),
        ([ones((16, 8), np.float32)], ones(8, np.float32)),
        ([ones((16, 8), np.float32)] * 2, ones(8, np.float32)),
        ({"a": ones((16, 8), np.float32)}, ones(8, np.float32)),
        (2.0, ones(8, np.float32)),
    ]
    for args in (*others, *reversed(others)):
        for _ in range(3):
            found = step(*args)
            assert_close(found, (jax.tree.map(lambda a: a * 2, args[0]), 8.0))
            dtypes = [leaf.dtype for leaf in jax.tree.leaves(found[0])]
            assert dtypes == [jnp.result_type(leaf) for leaf in jax.tree.leaves(args[0])]
    assert counts["tried"] > len(others)


@pytest.mark.filterwarnings("ignore:.*searched again")
def test_two_kinds_of_calls_in_turn_are_not_tried_in_vain(counts):
    """Where shapes alternate no call is taken to be like the one before, once both are known; where they stay, it is again."""
    step = made("decorate", fn=lambda x: x * 2)
    few, many = jnp.ones((16, 8)), jnp.ones((24, 8))
    for _ in range(3):
        step(few)
        step(many)
    counts.clear()
    for _ in range(3):
        step(few)
        step(many)
    assert counts == {"anew": 6}
    counts.clear()
    for _ in range(4):
        step(few)
    assert counts["tried"] >= 2


def test_weak_types_in_turn_keep_their_results():
    """A scale that is weakly typed in some calls and not in others promotes as it does under `jax.jit`, in any order."""
    step, plain = made("apply", fn=lambda x, scale: x * scale, args=(jnp.ones(16, jnp.bfloat16), jnp.log(2.0))), jax.jit(lambda x, s: x * s)
    x, weak = jnp.ones(16, jnp.bfloat16), jnp.log(2.0)
    assert weak.weak_type
    for scale in (weak, weak, weak * 2, weak, weak):
        found = step(x, scale)
        assert (found.dtype, found.weak_type) == (plain(x, scale).dtype, plain(x, scale).weak_type)
    with pytest.raises(autoshard.StrategyError):
        step(x, jnp.bfloat16(2))
    assert step(x, weak).dtype == jnp.bfloat16


@pytest.mark.parametrize("how", ["apply", "decorate"])
def test_used_up_arrays_are_told_wherever_they_stand(how):
    """One donated leaf among new ones, put into the returned state itself as well, is named; the state without it goes on."""
    step, (state, x) = made(how, donate=(0,)), example()
    for _ in range(3):
        before, (state, _) = state, step(state, x)
    kept = state.weights["layers"][1]["w"]
    for old in (before, State(before.weights, state.moments), State(state.weights, Moments(state.moments.first, before.moments.second))):
        with pytest.raises(autoshard.StrategyError, match="was passed to an earlier one"):
            step(old, x)
    state.weights["layers"][1]["w"] = before.weights["layers"][1]["w"]
    with pytest.raises(autoshard.StrategyError, match=r"layers'\]\[1\]\['w'\] was passed to an earlier one"):
        step(state, x)
    state.weights["layers"][1]["w"] = kept
    step(state, x)


@pytest.mark.parametrize("how", ["apply", "parallelize", "shard"])
def test_an_array_may_be_donated_in_two_places(how):
    """As an average that starts as the parameters, in the first call, where jaxlib crashes."""

    def averaged(state, x):
        weights, average, key = state
        return (weights - 0.1 * (x @ weights).mean(), 0.5 * (average + weights), jax.random.split(key)[0]), average.sum()

    def start():
        weights = jnp.ones((8, 16))
        return weights, weights, jax.random.key(0)

    x, state, expected = jnp.ones((16, 8)), start(), start()
    step = made("apply" if how == "shard" else how, (0,), averaged, (state, x))
    if how == "shard":
        strategy = autoshard.search(averaged, state, x, donate_argnums=0, **OPTIONS)
        (state,) = strategy.shard(state)
    for _ in range(4):
        state, found = step(state, x)
        expected, wanted = averaged(expected, x)
        np.testing.assert_allclose(found, wanted, rtol=1e-4)


def test_used_up_arrays_are_told_next_to_numbers():
    """Where leaves are not all arrays, those that are used up are found all the same."""

    def scaled(state, rate):
        return {"w": state["w"] * rate, "rate": rate}

    args = {"w": jnp.ones(16), "rate": np.float32(1)}, 0.5
    step = made("apply", (0,), scaled, args)
    for _ in range(3):
        before = step({"w": jnp.ones(16), "rate": np.float32(1)}, 0.5)
        state = step({"rate": np.float32(1), "w": before["w"]}, 0.5)
    assert state["w"][0] == 0.25
    with pytest.raises(autoshard.StrategyError, match=r"state\['w'\] was passed to an earlier one"):
        step({"rate": np.float32(1), "w": before["w"]}, 0.5)


@jax.custom_vjp
def rounded(x):
    return jnp.round(8 * x) / 8


rounded.defvjp(lambda x: (rounded(x), None), lambda _, cotangent: (cotangent,))


@pytest.mark.slow
def test_transformations_of_a_step_see_through_it():
    """After calls on arrays a step can be differentiated, by its own derivatives too, and jitted, and called on arrays again."""

    def f(w, x):
        return jnp.sum(jnp.tanh(rounded(x @ w)) ** 2)

    w, x = jnp.full((8, 8), 0.1, jnp.float32), jnp.ones((16, 8))
    strategy = autoshard.search(f, w, x, **OPTIONS)
    step, (w, x) = strategy.apply(f), strategy.shard(w, x)
    for _ in range(2):
        for _ in range(3):
            assert_close(step(w, x), f(w, x))
        assert_close(jax.grad(step)(w, x), jax.grad(f)(w, x))
        assert_close(jax.jit(lambda w, x: 2 * step(w, x))(w, x), 2 * f(w, x))
        assert_close(jax.vjp(step, w, x)[1](1.0), jax.vjp(f, w, x)[1](1.0))
        with jax.disable_jit():
            assert_close(step(w, np.asarray(x)), f(w, x))


@pytest.mark.parametrize("seen_before", [False, True])
def test_arrays_of_another_jitted_function_are_no_tracers(seen_before):
    """A step is called on constants in it: its compiler options are those of the outer function, and its own later calls keep theirs."""
    fn, batch = functools.partial(jnp.multiply, 2.0), jnp.arange(16.0)
    step = autoshard.parallelize(fn, cluster="cpu:8", searcher="data_parallel", progress=False)
    if seen_before:
        step(batch), step(batch)
    np.testing.assert_array_equal(jax.jit(lambda: step(batch) + 1)(), 2 * batch + 1)
    np.testing.assert_array_equal(step(batch), 2 * batch)


def test_wrong_arguments_are_told_as_in_a_first_call():
    """After calls that went straight through, text and arguments that are missing have the errors of a first call."""
    step, (state, x) = made("apply"), example()
    for bad in ((state,), (state, "x"), (state, x, x), (state.weights, x), (state, jnp.ones((16, 9)))):
        fresh = made("apply")
        with pytest.raises(autoshard.AutoshardError) as wanted:
            fresh(*bad)
        for _ in range(2):
            step(state, x)
        with pytest.raises(autoshard.AutoshardError) as found:
            step(*bad)
        assert (type(found.value), str(found.value)) == (type(wanted.value), str(wanted.value))
        assert found.value.__context__ is None or isinstance(found.value.__context__, type(wanted.value.__context__))


MANY_STEPS = """
import jax, jax.numpy as jnp, numpy as np
import autoshard

def step(w, x):
    for _ in range(8):
        y = jnp.tanh(x @ w)
        w = w + 0.01 * y.T @ x
    return w, (y * y).sum()

w = x = np.full((64, 64), 0.01, np.float32)
strategy = autoshard.search(step, w, x, cluster="cpu:8", searcher="fully_sharded", donate_argnums=DONATED)
run = strategy.apply(step)
w, x = strategy.shard(w, x)
for _ in range(1500):
    after, value = run(w, x)
    w = after if DONATED else w
print(float(value))
"""


@pytest.mark.slow
@pytest.mark.parametrize("donated", [(), (0,)])
def test_many_steps_without_a_look_at_their_results(donated):
    """XLA:CPU waits forever with many programs under way; its process is ended after ten seconds here."""
    flags = "--xla_force_host_platform_device_count=8 --xla_cpu_collective_call_terminate_timeout_seconds=10"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    command = [sys.executable, "-c", MANY_STEPS.replace("DONATED", repr(donated))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0 and np.isfinite(float(done.stdout)), done.stderr[-2000:]


def test_lowering_and_calling_share_one_trace(monkeypatch):
    """The program is traced once, however often it is lowered and called."""
    runs: list[int] = []
    real = steps.manual_program

    def counted(*args, **kwargs):
        flat = real(*args, **kwargs)

        def function(*arguments):
            runs.append(1)
            return flat(*arguments)

        return function

    monkeypatch.setattr(steps, "manual_program", counted)
    step, (state, x) = made("apply"), example()
    step.lower(state, x)
    for _ in range(2):
        step(state, np.asarray(x))
        step(state, x)
    step.lower(*jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (state, x)))
    assert len(runs) == 1


def test_the_program_of_the_search_is_not_taken_apart_again(monkeypatch):
    """`apply` reuses what `search` traced for the same function and types; another function or donation is traced anew."""
    built: list[int] = []
    real = tracing.build

    def counted(jaxpr):
        built.append(1)
        return real(jaxpr)

    monkeypatch.setattr(tracing, "build", counted)

    def double(x):
        return x * 2

    x = jnp.ones(16)
    strategy = autoshard.search(double, x, **OPTIONS)
    gc.collect()
    before = len(built)
    assert strategy.apply(double)(x)[0] == 2
    assert len(built) == before
    assert strategy.apply(lambda x: x * 2)(x)[0] == 2
    assert len(built) == before + 1
    donating = tracing.trace(double, x, donate_argnums=0, before=strategy._traced)
    assert donating.graph.donated == (0,) and len(built) == before + 2
    with pytest.raises(autoshard.StrategyError):
        strategy.apply(double)(jnp.ones(24))


TREES = [
    1,
    None,
    (),
    {"b": 1, "a": 2},
    {"b": {"x": 1, "y": 2}, "a": {"z": 3}},
    {"b": {"x": 1, "y": None}, "a": 3, "c": {}, "d": (4, [5, {"e": 6}])},
    [[1, 2], [3], []],
    Moments({"a": 1}, {"a": 2}),
    Moments(1, 2),
    State({"a": [1, 2]}, Moments(3, ({"b": 4}, None))),
    [State(1, 2), State(3, 4)],
    collections.OrderedDict(b=1, a=collections.defaultdict(list, {"c": 2})),
    {k: {"attention": {"q": k, "k": k + 100}, "norm": k + 200} for k in range(5)},
]


@pytest.mark.parametrize("tree", TREES, ids=str)
def test_readers_give_all_leaves(tree):
    """What is looked at for arrays that are used up are the leaves of the pytree, each once."""
    assert sorted(reader(jax.tree.structure(tree))([tree])) == sorted(jax.tree.leaves(tree))
