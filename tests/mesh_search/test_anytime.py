"""A search that ends early returns its incumbent, within the memory limit and with a valid gap."""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import replace
from functools import partial, reduce

import jax
import jax.numpy as jnp
import pytest
from programs import PROGRAMS

import autoshard
from autoshard import concurrency
from autoshard.cluster import Cluster
from autoshard.errors import OutOfTime, SearcherError, SearchLimitError
from autoshard.mesh_search import anytime
from autoshard.mesh_search.anytime import timed
from autoshard.plan import attempts
from autoshard.problem import problem
from autoshard.problem.cost_tables import CostTables
from autoshard.progress import silent

OPTIONS = {"cluster": "v5e:2x4", "searcher": "auto"}


def interrupting(after, calls=None):
    """A progress callback that is an impatient user's Ctrl-C; what it is called with goes into the list of calls."""
    calls = [] if calls is None else calls

    def progress(what, fraction):
        calls.append(what)
        if len(calls) == after:
            raise KeyboardInterrupt

    return progress


@pytest.mark.sample(2)
@pytest.mark.parametrize("after", [2, 20, 60])
@pytest.mark.parametrize("searcher", ["recursive_programming", "dynamic_programming", "auto"])
def test_ctrl_c_returns_the_incumbent(searcher, after):
    """It is bounded as always, no slower than data parallelism, and says what it is."""
    fn, args = PROGRAMS["mlp"]()
    baseline = autoshard.search(fn, *args, cluster="v5e:2x4", searcher="data_parallel", mesh={"data": 8})
    calls = []
    found = autoshard.search(fn, *args, cluster="v5e:2x4", searcher=searcher, interruptible=True, progress=interrupting(after, calls))
    assert found.cost.makespan_seconds <= baseline.cost.makespan_seconds * (1 + 1e-9)
    assert 0 < found.lower_bound_seconds <= found.cost.objective_seconds
    assert any("ended early" in note for note in found.notes) == ("ended early" in str(found.explain())) == (len(calls) == after)


def test_without_being_asked_ctrl_c_stops():
    """An interrupt comes out as such."""
    fn, args = PROGRAMS["mlp"]()
    with pytest.raises(KeyboardInterrupt):
        autoshard.search(fn, *args, progress=interrupting(3), **OPTIONS)


def test_the_time_limit_ends_a_search():
    """With hardly any time there is a strategy within the memory limit all the same; where nothing fits, the error says what to do."""
    fn, args = PROGRAMS["gpt"]()
    found = autoshard.search(fn, *args, time_limit_seconds=1e-6, **OPTIONS)
    assert found.cost.makespan_seconds > 0
    with pytest.raises(SearchLimitError, match=r"1e-06 s.*longer time_limit_seconds"):
        autoshard.search(fn, *args, time_limit_seconds=1e-6, memory_limit_bytes=10.0, **OPTIONS)
    with pytest.raises(SearcherError, match="positive number of seconds"):
        autoshard.search(fn, *args, time_limit_seconds=0, **OPTIONS)


def test_another_clock_may_count_the_seconds():
    """Of a thread's own time none passes while others compute, so that these leave the answer as it is; infinitely many never pass."""
    clock = iter([0.0, 1.0, 3.0]).__next__
    progress = timed(silent, 2.0, clock)
    progress("", 0.0)
    with pytest.raises(OutOfTime, match="2 s"):
        progress("", 0.0)
    timed(silent, math.inf)("", 0.0)
    assert autoshard.IntegerProgramming().limited(math.inf) == autoshard.IntegerProgramming()


@pytest.mark.slow
@pytest.mark.parametrize("program", ["gpt", "moe", "convnet"])
@pytest.mark.parametrize("baseline", ["data_parallel", "fully_sharded", "tensor_parallel"])
def test_where_a_baseline_fits_the_time_limit_never_leaves_nothing(program, baseline):
    """With no time at all and what a baseline takes, on any mesh, as the limit, something within the limit is found."""
    fn, args = PROGRAMS[program]()
    cluster = Cluster.parse("v5e:2x4")
    for mesh in ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4}):
        free = autoshard.search(fn, *args, cluster=cluster, mesh=mesh, searcher=baseline)
        limit = free.cost.peak_bytes
        found = autoshard.search(fn, *args, cluster=cluster, memory_limit_bytes=limit, time_limit_seconds=1e-9)
        assert found.cost.peak_bytes <= limit
        small = replace(cluster, memory_limit_bytes=int(1.001 * limit))  # of which 2 % are a reserve, if anything fits without
        assert autoshard.search(fn, *args, cluster=small, time_limit_seconds=1e-9).cost.peak_bytes <= small.memory_limit_bytes


def test_at_the_end_of_the_time_the_batch_is_split_over_a_part_of_more_devices():
    """One axis of 16 devices divides no batch of 8: the baseline is on a mesh with an axis that does."""
    fn, args = PROGRAMS["mlp"](batch=8)
    found = autoshard.search(fn, *args, cluster="v5e:4x4", time_limit_seconds=1e-9)
    assert found.mesh_shape == {"data": 8, "model": 2}


def test_a_frontier_ends_early_too():
    """The answers found by then make the front."""
    fn, args = PROGRAMS["mlp"]()
    found = autoshard.frontier(fn, *args, cluster="v5e:2x4", interruptible=True, progress=interrupting(12))
    assert len(found) >= 1
    assert "ended early, on mesh" in str(found.report())
    with pytest.raises(KeyboardInterrupt):
        autoshard.frontier(fn, *args, cluster="v5e:2x4", progress=interrupting(12))


@pytest.mark.sample(1)
@pytest.mark.parametrize("ask", [autoshard.search, autoshard.frontier])
def test_progress_never_leaves_its_bar(ask):
    """All fractions are between nothing and everything, and the last quarter is reached."""
    fn, args = PROGRAMS["mlp"]()
    fractions = []
    ask(fn, *args, cluster="v5e:2x4", progress=lambda what, fraction: fractions.append(fraction))
    assert all(0 <= fraction <= 1 for fraction in fractions)
    assert max(fractions) > 0.5


class Clock:
    """A clock that stands still for some looks at it, and then runs by `step` seconds a look."""

    def __init__(self, still=0, step=1.0):
        self.left, self.step, self.now = still, step, 0.0

    def __call__(self):
        self.left -= 1
        self.now += self.step if self.left < 0 else 0.0
        return self.now


@pytest.mark.slow
@pytest.mark.parametrize(("searcher", "still"), [("auto", 20), ("auto", 200), ("auto", 600), ("recursive_programming", 60)])
def test_no_phase_of_a_search_outlasts_its_time(monkeypatch, searcher, still):
    """Whichever is going on when the time is over, a handful of assignments are judged afterwards, and hardly any tables made."""
    fn, args = PROGRAMS["gpt"]()
    clock, late = Clock(still, 1e6), {"judged": 0, "tables": 0}

    def counted(name, made):
        def call(*args, **kwargs):
            late[name] += clock.now > 0.0
            return made(*args, **kwargs)

        return call

    monkeypatch.setattr(problem, "evaluate", counted("judged", problem.evaluate))
    monkeypatch.setattr(CostTables, "table", counted("tables", CostTables.table))
    monkeypatch.setattr(attempts, "timed", partial(timed, clock=clock))
    monkeypatch.setattr(anytime, "LAST_SECONDS", 0.0)
    monkeypatch.setattr(anytime, "LAST_SHARE", 0.0)
    with suppress(SearchLimitError):  # which limit of memory is far below what it takes without
        autoshard.search(fn, *args, cluster="v5e:2x4", searcher=searcher, memory_limit_bytes=400_000, time_limit_seconds=10)
    assert clock.now > 0.0, "the search was over before"
    assert late["judged"] <= 6
    assert late["tables"] <= 2 * problem.CHECKED


def deep(weights, x):
    """A step that fits in microbatches alone."""
    value, gradients = jax.value_and_grad(lambda weights: jnp.mean(reduce(lambda h, w: jnp.tanh(h @ w), weights, x) ** 2))(weights)
    return [w - g for w, g in zip(weights, gradients, strict=True)], value


DEEP = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 6, jax.ShapeDtypeStruct((4096, 64), jnp.float32)


def test_where_nothing_is_found_in_time_a_baseline_fits_in_the_form_that_holds_least():
    """The time of the first search is over before it fits, and no other form was searched."""
    found = autoshard.search(deep, *DEEP, cluster="v5e:2x4", memory_limit_bytes=240_000, remat=None, time_limit_seconds=1e-3)
    assert found.microbatches > 1 and found.cost.peak_bytes <= 240_000
    assert any("ended early" in note for note in found.notes)


@pytest.mark.slow
def test_half_of_the_time_is_left_for_microbatches_where_nothing_fits(monkeypatch):
    """A step that fits in microbatches alone is found, though a search in one would take all of the time."""
    monkeypatch.setattr(attempts, "timed", lambda *given, **options: timed(*given, clock=Clock(), **options))
    monkeypatch.setattr(concurrency, "cores", lambda: 1)  # the clock counts calls in this process
    found = autoshard.search(deep, *DEEP, cluster="v5e:2x4", memory_limit_bytes=220_000, remat=None, time_limit_seconds=200)
    assert (found.microbatches, found.cost.peak_bytes <= 220_000) == (2, True)


def test_no_clock_is_left_in_a_strategy():
    """The problem that later questions search again is watched by none."""
    fn, args = PROGRAMS["mlp"]()
    found = autoshard.search(fn, *args, time_limit_seconds=1e-6, **OPTIONS)
    assert found._searched.problem is not None
    assert found._searched.problem.observer is None
