"""Searches in microbatches: what is found runs as the plain step does, and is found where nothing else fits."""

from __future__ import annotations

import json
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.cli import main
from autoshard.plan.microbatching import best
from benchmarks import models

D, B = 64, 64
optimizer = optax.adam(1e-2)


def make(key):
    """Parameters and optimizer state."""
    up, down = jax.random.split(key)
    params = {"up": jax.random.normal(up, (D, 4 * D)) * 0.1, "down": jax.random.normal(down, (4 * D, D)) * 0.1}
    return params, optimizer.init(params)


def step(state, batch, key):
    """A train step with dropout, of a loss that is a mean over the batch."""

    def loss(params):
        x = batch["x"]
        for layer in range(4):
            hidden = jax.nn.gelu(x @ params["up"])
            kept = jax.random.bernoulli(jax.random.fold_in(key, layer), 0.9, hidden.shape)
            x = x + jnp.where(kept, hidden, 0.0) @ params["down"]
        return jnp.mean((x - batch["y"]) ** 2)

    params, memory = state
    value, gradients = jax.value_and_grad(loss)(params)
    updates, memory = optimizer.update(gradients, memory, params)
    return (optax.apply_updates(params, updates), memory), value


def arguments(batch=B):
    """Abstract arguments of the step."""
    leaf = jax.ShapeDtypeStruct((batch, D), jnp.float32)
    return jax.eval_shape(make, jax.random.key(0)), {"x": leaf, "y": leaf}, jax.eval_shape(lambda: jax.random.key(1))


def batch(seed):
    """A concrete one."""
    random = np.random.default_rng(seed)
    return {name: random.normal(size=(B, D)).astype(np.float32) for name in ("x", "y")}


@pytest.mark.parametrize("mesh", [{"data": 8}, {"data": 2, "model": 4}])
def test_a_step_in_microbatches_trains_as_the_plain_one(mesh, tmp_path):
    """Losses and state agree, the collectives are the planned ones, and a saved strategy is the same."""
    strategy = autoshard.search(step, *arguments(), cluster="cpu:8", mesh=mesh, microbatches=4, donate_argnums=0)
    assert strategy.microbatches == 4 and any("4 microbatches" in note for note in strategy.notes)
    assert autoshard.verify(strategy, step, *arguments(), target="cpu").exact
    strategy.save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    assert loaded == strategy and loaded.microbatches == 4
    sharded, state, wanted = loaded.apply(step), loaded.init(make, jax.random.key(0)), make(jax.random.key(0))
    for seed in range(3):
        key = jax.random.key(seed)
        state, loss = sharded(state, batch(seed), key)
        wanted, expected = jax.jit(step)(wanted, batch(seed), key)
        np.testing.assert_allclose(loss, expected, rtol=1e-5)
    for found, expected in zip(jax.tree.leaves(state[0]), jax.tree.leaves(wanted[0]), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-5)


def test_the_decorator_takes_microbatches():
    """The decorated function computes in so many."""
    decorated = autoshard.parallelize(step, cluster="cpu:8", microbatches=2)
    state = make(jax.random.key(0))
    _, loss = decorated(state, batch(0), jax.random.key(0))
    assert decorated.strategy.microbatches == 2
    np.testing.assert_allclose(loss, jax.jit(step)(state, batch(0), jax.random.key(0))[1], rtol=1e-5)


def test_where_nothing_fits_microbatches_are_tried():
    """A transformer whose activations do not fit is found in as many microbatches as it takes; without them it is refused."""
    program = models.gpt(4, 128, 4, 512, batch=512, length=256)
    plain = autoshard.search(program[0], *program[1], cluster="v5e:2x2", mesh={"data": 4}, donate_argnums=0)
    assert plain.microbatches == 1
    limit = 0.5 * plain.cost.peak_bytes
    asked = {"cluster": "v5e:2x2", "mesh": {"data": 4}, "donate_argnums": 0, "memory_limit_bytes": limit, "remat": None}
    with pytest.raises(autoshard.InfeasibleError):
        autoshard.search(program[0], *program[1], **asked, microbatches=None)
    found = autoshard.search(program[0], *program[1], **asked)
    assert found.microbatches > 1 and found.cost.peak_bytes <= limit
    assert abs(found.cost.flops / plain.cost.flops - 1) < 1e-6


NUMBERS = 1, 2, 3, 5, 6, 8, 10, 15, 30


def fitting(limit, peak, seconds, fixed=0.0, numbers=NUMBERS):
    """The number that ``"fit"`` takes, and those it tried, where peaks and seconds of a step are functions of the number."""
    tried = []

    def attempt(n):
        tried.append(n)
        if peak(n) > limit:
            raise autoshard.InfeasibleError("too much", peak(n), False)
        return n

    return best(attempt, "fit", limit, lambda: numbers, fixed, seconds), tried


@pytest.mark.parametrize("fixed", [0.0, 0.1])
@pytest.mark.parametrize(("limit", "fewest"), [(0.95, 2), (0.5, 3), (0.45, 3), (0.28, 5), (0.20, 10), (0.13, 30)])
def test_fit_takes_the_fewest_that_fit_where_that_is_fastest(limit, fewest, fixed):
    """Of the numbers that divide the batch, where a part of the peak stays; with fewer than are tried it could not fit."""
    found, tried = fitting(limit, lambda n: 0.1 + 0.9 / n, seconds=lambda n: n, fixed=fixed)
    assert found == fewest and len(tried) <= 5 and all(n >= 1 / limit for n in tried[1:])
    if fixed == 0.1:  # all of what stays is known: none is tried in vain
        assert all(n >= fewest for n in tried[1:])


def test_fit_takes_more_than_the_fewest_where_that_is_faster():
    """What makes the fewest fit may take more time than further microbatches: one that leaves room is tried first, then fewer."""
    seconds = {1: 1.0, 2: 1.5, 3: 1.4, 4: 1.1}.get
    assert fitting(0.55, lambda n: 1 / n, seconds, numbers=(1, 2, 3, 4)) == (3, [1, 3, 2])
    assert fitting(0.55, lambda n: 1 / n, seconds, numbers=(1, 2, 4)) == (4, [1, 4, 2])
    assert fitting(0.55, lambda n: 1 / n, lambda n: n, numbers=(1, 2, 4)) == (2, [1, 4, 2])
    assert fitting(0.8, lambda n: 1 / n, seconds, numbers=(1, 2, 4)) == (2, [1, 2])  # there is room in two


def test_where_no_number_fits_nothing_is_found():
    """The refusal is that of one, and says what was tried."""
    with pytest.raises(autoshard.InfeasibleError, match=r"too much.*Nor does it fit in microbatches, of which"):
        fitting(0.05, lambda n: 0.1 + 0.9 / n, seconds=lambda n: n)


@pytest.mark.parametrize("batch", [64, 96, 360, 1024])
@pytest.mark.parametrize("whole", [2, 4, 16])
@pytest.mark.parametrize("rise", [0.01, 0.1, 0.5])
def test_fit_goes_back_where_more_microbatches_hold_more(batch, whole, rise):
    """Beyond some number microbatches are too small to be split over all devices: what fits with any of two numbers is found."""
    numbers = [n for n in range(1, batch + 1) if batch % n == 0]
    peaks = {n: 0.1 + 0.9 / n + rise * max(0.0, n / whole - 1) for n in numbers}
    for limit in sorted(peaks.values())[1:-1]:
        found, _ = fitting(limit, peaks.get, seconds=lambda n: n, numbers=numbers)
        assert peaks[found] <= limit


def test_auto_is_never_slower_than_one():
    """Of 1, 2, 4 and 8 microbatches the fastest is returned."""
    found = autoshard.search(step, *arguments(), cluster="v5e:2x4", mesh={"data": 8}, microbatches="auto")
    plain = autoshard.search(step, *arguments(), cluster="v5e:2x4", mesh={"data": 8}, microbatches=None)
    assert found.cost.makespan_seconds <= plain.cost.makespan_seconds


def test_shardings_of_others_are_evaluated_in_microbatches():
    """`evaluate(..., microbatches=n)` costs what `search` costs with the shardings that it found; a word is refused."""
    asked = {"cluster": "cpu:8", "mesh": {"data": 8}, "donate_argnums": 0}
    given = autoshard.evaluate(step, *arguments(), in_specs={"batch*": P("data")}, microbatches=4, **asked)
    assert given.microbatches == 4 and autoshard.verify(given, step, *arguments(), target="cpu").exact
    plain = autoshard.evaluate(step, *arguments(), in_specs={"batch*": P("data")}, **asked)
    assert plain.microbatches == 1 and given.cost.flops == pytest.approx(plain.cost.flops)
    with pytest.raises(autoshard.ShardingError, match="a sharding is evaluated with a number of microbatches, got 'fit'"):
        autoshard.evaluate(step, *arguments(), in_specs={"batch*": P("data")}, microbatches="fit", **asked)


def test_a_frontier_over_numbers_of_microbatches():
    """With "auto" the least memory is that of several microbatches, and nothing is slower than in one; each strategy has its number."""
    asked = {"cluster": "v5e:2x2", "mesh": {"data": 4}, "donate_argnums": 0}
    found = autoshard.frontier(step, *arguments(2**18), microbatches="auto", **asked)
    plain = autoshard.frontier(step, *arguments(2**18), **asked)
    assert found[0].microbatches > 1 == plain[0].microbatches
    assert found[0].cost.peak_bytes < plain[0].cost.peak_bytes and found[-1].cost.makespan_seconds <= plain[-1].cost.makespan_seconds
    assert all(a.cost.peak_bytes < b.cost.peak_bytes and a.cost.makespan_seconds > b.cost.makespan_seconds for a, b in pairwise(found))
    assert "microbatches" in str(found.report())


def coupled(weights, x):
    """Normalises over the batch."""

    def loss(weights):
        hidden = x @ weights
        return (((hidden - hidden.mean(0)) / (hidden.std(0) + 1.0)) @ weights.T).sum()

    return weights - jax.grad(loss)(weights)


def test_what_cannot_be_split_is_refused():
    """By a number with the reason; where nothing fits, the reason comes after that."""
    args = jnp.ones((64, 64)), jnp.ones((4096, 64))
    with pytest.raises(autoshard.TraceError, match=r"reads each example together with what comes of all of them"):
        autoshard.search(coupled, *args, cluster="cpu:8", microbatches=2)
    with pytest.raises(autoshard.InfeasibleError, match=r"(?s)must fit.*Nor could it run in microbatches: .*reads each example together"):
        autoshard.search(coupled, *args, cluster="cpu:8", memory_limit_bytes=2e5)


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "all"])
def test_numbers_that_are_none(wrong):
    """Refused before anything is traced, by search and decorator."""
    for ask in (autoshard.search, autoshard.parallelize):
        with pytest.raises(autoshard.ShardingError, match=r"microbatches are a number, 1 or more, 'fit', 'auto' or None, got"):
            ask(coupled, cluster="cpu:8", microbatches=wrong)


def test_pins_shard_programs_as_they_are():
    """Plain JAX with constraints is not in microbatches."""
    strategy = autoshard.search(step, *arguments(), cluster="cpu:8", microbatches=2)
    with pytest.raises(autoshard.StrategyError, match=r"runs it (in|as) 2 microbatches.*microbatches=None"):
        strategy.pins(step, *arguments())


def test_the_command_line_and_the_file(tmp_path, monkeypatch, capsys):
    """`--microbatches 2` is in the file; files of plain strategies have no such entry."""
    monkeypatch.syspath_prepend(tmp_path)
    source = "import jax, jax.numpy as jnp\ndef f(w, x):\n    return w - jax.grad(lambda w: ((x @ w) ** 2).sum())(w)\n"
    (tmp_path / "microbatched_program.py").write_text(source + "args = jnp.ones((8, 8)), jnp.ones((64, 8))\n")
    run = ["search", "microbatched_program:f", "--args", "microbatched_program:args", "--cluster", "cpu:8"]
    for number, words in ((2, ["--microbatches", "2"]), (None, [])):
        assert main([*run, *words, "--save", str(tmp_path / "s.json")]) == 0
        assert json.loads((tmp_path / "s.json").read_text())["program"].get("microbatches") == number
    assert main([*run, "--microbatches", "few"]) == 2
    assert "a number, 1 or more, 'fit', 'auto' or None, got 'few'" in capsys.readouterr().err


def test_a_batch_that_is_named_is_saved(tmp_path):
    """A loop over examples whose results have the batch's shape leaves open which argument is state; the name is part of the strategy."""

    def step(w, x):
        def loss(w):
            y = jax.lax.map(lambda row: jnp.tanh(row @ w), x)
            return jnp.mean((y - x) ** 2), y

        (value, y), gradient = jax.value_and_grad(loss, has_aux=True)(w)
        return w - gradient, y, value

    args = jnp.eye(8) / 2, jnp.arange(128.0).reshape(16, 8) / 64
    strategy = autoshard.search(step, *args, cluster="cpu:8", microbatches=2, batch="x")
    strategy.save(tmp_path / "named.json")
    found, expected = autoshard.load(tmp_path / "named.json").apply(step)(*args), step(*args)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)
