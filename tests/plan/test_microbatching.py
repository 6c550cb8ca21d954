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
from autoshard.plan.microbatching import with_few
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


@pytest.mark.sample(1)
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


@pytest.mark.slow
def test_the_decorator_takes_microbatches():
    """The decorated function computes in so many."""
    decorated = autoshard.parallelize(step, cluster="cpu:8", microbatches=2)
    state = make(jax.random.key(0))
    _, loss = decorated(state, batch(0), jax.random.key(0))
    assert decorated.strategy.microbatches == 2
    np.testing.assert_allclose(loss, jax.jit(step)(state, batch(0), jax.random.key(0))[1], rtol=1e-5)


@pytest.mark.slow
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


def tried(limit, peak, numbers=(1, 2, 3, 5, 6, 8, 10, 15, 30)):
    """The numbers that are tried where a frontier has none that is given, the last of which fits."""
    found = []

    def attempt(n):
        found.append(n)
        if peak(n) > limit:
            raise autoshard.InfeasibleError("too much", peak(n), False)

    with_few(attempt, limit, lambda: numbers)
    return found


def test_a_frontier_goes_to_more_microbatches_until_something_fits():
    """Twice as many at least, and as many as the peak asks for; where none fits, the refusal says what was tried."""
    assert tried(0.9, lambda n: 0.8) == [1]
    assert tried(0.9, lambda n: 1 / n) == [1, 2]
    assert tried(0.15, lambda n: 0.1 + 0.9 / n) == [1, 8, 30]
    with pytest.raises(autoshard.InfeasibleError, match="microbatches, of which 30 were tried: the smallest peak is"):
        tried(0.01, lambda n: 0.1 + 0.9 / n)


@pytest.mark.slow
def test_auto_is_never_slower_than_one():
    """Of 1, 2, 4 and 8 microbatches the fastest is returned."""
    found = autoshard.search(step, *arguments(), cluster="v5e:2x4", mesh={"data": 8}, microbatches="auto")
    plain = autoshard.search(step, *arguments(), cluster="v5e:2x4", mesh={"data": 8}, microbatches=None)
    assert found.cost.makespan_seconds <= plain.cost.makespan_seconds


@pytest.mark.slow
def test_shardings_of_others_are_evaluated_in_microbatches():
    """`evaluate(..., microbatches=n)` costs what `search` costs with the shardings that it found; a word is refused."""
    asked = {"cluster": "cpu:8", "mesh": {"data": 8}, "donate_argnums": 0}
    given = autoshard.evaluate(step, *arguments(), in_specs={"batch*": P("data")}, microbatches=4, **asked)
    assert given.microbatches == 4 and autoshard.verify(given, step, *arguments(), target="cpu").exact
    plain = autoshard.evaluate(step, *arguments(), in_specs={"batch*": P("data")}, **asked)
    assert plain.microbatches == 1 and given.cost.flops == pytest.approx(plain.cost.flops)
    with pytest.raises(autoshard.ShardingError, match="a sharding is evaluated with a number of microbatches, got 'fit'"):
        autoshard.evaluate(step, *arguments(), in_specs={"batch*": P("data")}, microbatches="fit", **asked)


@pytest.mark.slow
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
    with pytest.raises(autoshard.StrategyError, match=r"computes 2 microbatches.*Search with microbatches=1\."):
        strategy.pins(step, *arguments())


def test_the_command_line_and_the_file(tmp_path, monkeypatch, capsys):
    """`--microbatches 2` is in the file; files of plain strategies have no such entry."""
    monkeypatch.syspath_prepend(tmp_path)
    source = "import jax, jax.numpy as jnp\ndef f(w, x):\n    return w - jax.grad(lambda w: ((x @ w) ** 2).sum())(w)\n"
    (tmp_path / "microbatched_program.py").write_text(source + "args = jnp.ones((8, 8)), jnp.ones((64, 8))\n")
    run = ["search", "microbatched_program:f", "--args", "microbatched_program:args", "--cluster", "cpu:8"]
    for rewrites, words in (([{"kind": "microbatches", "microbatches": 2}], ["--microbatches", "2"]), (None, [])):
        assert main([*run, *words, "--save", str(tmp_path / "s.json")]) == 0
        assert json.loads((tmp_path / "s.json").read_text())["program"].get("rewrites") == rewrites
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
