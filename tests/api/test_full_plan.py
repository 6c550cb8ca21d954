"""plan='full': the fastest of all, and what it refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.api.full_plan import Searches, checked_plan, checked_schedule, fullest
from autoshard.cluster import Cluster
from autoshard.ir import Mesh
from autoshard.pipeline.layering import Layering
from autoshard.pipeline.plan_search import Candidate, Estimate, Plans
from autoshard.progress import silent
from benchmarks import models


def small(n_layers=4, batch=8):
    return models.gpt(n_layers, 32, 4, 64, batch=batch, length=16, dtype=jnp.float32)


@pytest.fixture(scope="module")
def found():
    """A step without stages, and one with."""
    fn, args = small()
    return [autoshard.search(fn, *args, cluster="cpu:4", **options) for options in ({}, {"stages": 2, "microbatches": 4})]


CLUSTER = Cluster.parse("cpu:4")


def refused(*_):
    raise autoshard.InfeasibleError("none fits")


def estimate(n_stages, seconds, schedule="1f1b"):
    """Of a plan that promises so many seconds."""
    layering = Layering((1,) * n_stages, (0,) * n_stages, seconds, (1.0,) * n_stages)
    return Estimate(Candidate(n_stages, 4), schedule, Mesh((("data", 4 // n_stages),)), layering, (), False, seconds)


def test_the_answer_is_the_fastest(found):
    """A pipeline where nothing else fits, the step without stages where that is faster."""
    plain, pipeline = found
    alone = fullest(Searches(refused, lambda *_: None, lambda *_: pipeline), CLUSTER, None, silent)
    assert alone.record.pipeline is not None
    both = fullest(Searches(lambda *_: plain, lambda *_: None, lambda *_: pipeline), CLUSTER, None, silent)
    assert both.cost.makespan_seconds == min(plain.cost.makespan_seconds, pipeline.cost.makespan_seconds)
    assert "no stages in 1 microbatches" in both.notes[-1]
    assert "2 stages in 4 microbatches" in both.notes[-1]
    with pytest.raises(autoshard.InfeasibleError, match="none fits"):
        fullest(Searches(refused, lambda *_: None, refused), CLUSTER, None, silent)


def test_only_what_may_be_fastest_is_searched(found):
    """Not the step without stages where pipelines promise far less, nor pipelines that promise more than it takes; each number once."""
    plain, pipeline = found
    asked = []

    def staged(n_stages, like, seconds):
        asked.append((n_stages, like.candidate.n_microbatches, like.schedule))
        return pipeline

    far = Plans((estimate(2, 1e-9, "zero_bubble"), estimate(2, 2e-9), estimate(4, 3e-9), estimate(1, 4e-9)), 0.0, 3, 3)
    fullest(Searches(refused, lambda *_: far, staged), CLUSTER, None, silent)
    assert asked == [(2, 4, "zero_bubble"), (4, 4, "1f1b")]
    asked.clear()
    near = Plans((estimate(1, 0.9e9), estimate(2, 1e9)), 0.0, 2, 2)
    assert fullest(Searches(lambda *_: plain, lambda *_: near, staged), CLUSTER, None, silent).record.pipeline is None
    assert asked == []


def test_a_deep_step_is_searched_as_its_layers_are_fastest(found):
    """The search without stages is told the plan; of other steps it is not, since all their meshes are tried."""
    plain, _ = found
    plans = Plans((estimate(1, 1e-9),), 0.0, 1, 1)
    for is_deep in (False, True):
        told = []

        def whole(seconds, like=None, told=told):
            told.append(like)
            return plain

        fullest(Searches(whole, lambda *_: plans, refused, is_deep), CLUSTER, None, silent)
        assert told == [plans.ranked[0] if is_deep else None]


def test_the_gap_is_a_share_of_the_answer(found):
    """A bound of half the answer's seconds leaves half of them, as a strategy's own gap says it."""
    plain, pipeline = found
    bounded = Plans((), plain.cost.objective_seconds / 2, 1, 0)
    searches = Searches(lambda *_: plain, lambda *_: bounded, lambda *_: pipeline)
    assert "(gap 50 %)" in fullest(searches, CLUSTER, None, silent).notes[-1]


def test_a_search_that_is_interrupted_has_its_best_answer(found):
    """The strategy that was found by then; the interrupt itself where there was none."""
    plain, _ = found

    def interrupted(*_):
        raise KeyboardInterrupt

    best = fullest(Searches(lambda *_: plain, lambda *_: None, interrupted), CLUSTER, None, silent, (KeyboardInterrupt,))
    assert best.cost == plain.cost
    with pytest.raises(KeyboardInterrupt):
        fullest(Searches(refused, interrupted, None), CLUSTER, None, silent, (KeyboardInterrupt,))
    with pytest.raises(KeyboardInterrupt):
        fullest(Searches(lambda *_: plain, lambda *_: None, interrupted), CLUSTER, None, silent)


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


def test_a_schedule_needs_a_pipeline():
    """Without stages it would say nothing."""
    with pytest.raises(autoshard.ShardingError, match="got schedule='gpipe' without one"):
        checked_schedule("gpipe", False)
    checked_schedule("gpipe", True)
    checked_schedule(None, False)


def test_a_decorated_step_has_a_full_plan():
    """`parallelize` takes the plan as `search` does, and refuses a misspelt one at once."""
    with pytest.raises(autoshard.ShardingError, match="'sharding' or 'full'"):
        autoshard.parallelize(lambda x: x, plan="best")
    fn, args = small(2)
    found = autoshard.parallelize(fn, cluster="cpu:2", plan="full", progress=False).search(*args)
    assert found.notes[-1].startswith("plan='full' compared")
