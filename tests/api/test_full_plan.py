"""plan='full': the fastest of all, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.api.full_plan import Searches, checked_plan, fullest
from autoshard.cluster import Cluster
from autoshard.pipeline.plan_search import Plans
from autoshard.progress import silent
from benchmarks import models


def small(n_layers=4, batch=8):
    return models.gpt(n_layers, 32, 4, 64, batch=batch, length=16, dtype=jnp.float32)


@pytest.fixture(scope="module")
def found():
    """A step without stages, and one with."""
    fn, args = small()
    return [autoshard.search(fn, *args, cluster="cpu:4", **options) for options in ({}, {"stages": 2, "microbatches": 4})]


def test_the_answer_is_the_fastest(found):
    """A pipeline where nothing else fits, the step without stages where that is faster."""
    plain, pipeline = found

    def refused(_):
        raise autoshard.InfeasibleError("none fits")

    def staged(*_):
        return pipeline

    cluster = Cluster.parse("cpu:4")
    alone = fullest(Searches(refused, lambda *_: None, staged), cluster, None, silent)
    assert alone.record.pipeline is not None
    both = fullest(Searches(lambda _: plain, lambda *_: None, staged), cluster, None, silent)
    assert both.cost.makespan_seconds == min(plain.cost.makespan_seconds, pipeline.cost.makespan_seconds)
    assert "no stages in 1 microbatches" in both.notes[-1]
    assert "2 stages in 4 microbatches" in both.notes[-1]
    with pytest.raises(autoshard.InfeasibleError, match="none fits"):
        fullest(Searches(refused, lambda *_: None, lambda *_: refused(None)), cluster, None, silent)


def test_the_gap_is_a_share_of_the_answer(found):
    """A bound of half the answer's seconds leaves half of them, as a strategy's own gap says it."""
    plain, pipeline = found
    bounded = Plans((), plain.cost.objective_seconds / 2, 1, 0)
    searches = Searches(lambda _: plain, lambda *_: bounded, lambda *_: pipeline)
    assert "(gap 50 %)" in fullest(searches, Cluster.parse("cpu:4"), None, silent).notes[-1]


def test_a_search_that_is_interrupted_has_its_best_answer(found):
    """The strategy that was found by then; the interrupt itself where there was none."""
    plain, _ = found

    def interrupted(*_):
        raise KeyboardInterrupt

    def refused(_):
        raise autoshard.InfeasibleError("none fits")

    cluster = Cluster.parse("cpu:4")
    for plans, staged in ((interrupted, None), (lambda *_: None, interrupted)):
        best = fullest(Searches(lambda _: plain, plans, staged), cluster, None, silent, (KeyboardInterrupt,))
        assert best.cost == plain.cost
    with pytest.raises(KeyboardInterrupt):
        fullest(Searches(refused, interrupted, None), cluster, None, silent, (KeyboardInterrupt,))
    with pytest.raises(KeyboardInterrupt):
        fullest(Searches(lambda _: plain, interrupted, None), cluster, None, silent)


@pytest.mark.slow
def test_a_full_search_runs():
    """It is no slower than the step without stages, and computes the same loss."""
    fn, args = small()
    plain = autoshard.search(fn, *args, cluster="cpu:4")
    full = autoshard.search(fn, *args, cluster="cpu:4", plan="full")
    assert full.cost.makespan_seconds <= plain.cost.makespan_seconds * (1 + 1e-9)
    assert full.notes[-1].startswith("plan='full' compared")
    state, *batch = jax.tree.map(lambda x: jnp.full(x.shape, 0.01 if jnp.issubdtype(x.dtype, jnp.floating) else 1, x.dtype), args)
    _, loss = full.apply(fn, devices=jax.devices()[:4])(state, *batch)
    np.testing.assert_allclose(loss, fn(state, *batch)[1], rtol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("best", None, None), "'sharding' or 'full', got 'best'"),
        (("full", 2, None), "got stages="),
        (("full", None, {"data": 4}), "got mesh="),
    ],
)
def test_what_is_refused(arguments, words):
    """Another plan, and options that fix what is searched."""
    with pytest.raises(autoshard.ShardingError, match=words):
        checked_plan(*arguments)
