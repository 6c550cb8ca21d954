"""The frontier of step time against memory: sorted, undominated, within the limit, baselines included."""

from __future__ import annotations

from itertools import pairwise

import pytest
from programs import PROGRAMS

import autoshard
from autoshard.errors import InfeasibleError, ShardingError

OPTIONS = {"cluster": "v5e:2x4", "mesh": {"data": 8}}


@pytest.fixture(scope="module")
def mlp():
    fn, args = PROGRAMS["mlp"]()
    return autoshard.frontier(fn, *args, **OPTIONS)


def costs(frontier):
    return [(strategy.cost.peak_bytes, strategy.cost.makespan_seconds) for strategy in frontier]


def test_no_strategy_is_beaten_by_another(mlp):
    """Peaks rise and times fall from one to the next."""
    found = costs(mlp)
    assert len(found) > 1
    assert all(one[0] < other[0] and one[1] > other[1] for one, other in pairwise(found))


@pytest.mark.slow
def test_what_dynamic_programming_proves_holds_for_what_holds_as_little(mlp):
    """The fastest has the bound that a search without a limit proves on its mesh, and no bound is above what any other met."""
    fn, args = PROGRAMS["mlp"]()
    found = autoshard.frontier(fn, *args, searcher="dynamic_programming", **OPTIONS)
    free = autoshard.search(fn, *args, searcher="dynamic_programming", **OPTIONS)
    assert found[-1].record.lower_bound_seconds >= (1 - 1e-3) * free.cost.objective_seconds
    for held, strategy in enumerate(found):
        assert all(strategy.lower_bound_seconds <= other.cost.objective_seconds for other in found[: held + 1])
        holding_less = [other for other in mlp if other.cost.peak_bytes <= strategy.cost.peak_bytes]
        assert all(strategy.lower_bound_seconds <= other.cost.objective_seconds for other in holding_less)


def test_no_baseline_beats_any_of_them(mlp):
    """ZeRO's stages, data and tensor parallelism lie on the frontier or behind it."""
    fn, args = PROGRAMS["mlp"]()
    for searcher in (*(autoshard.FullySharded(stage) for stage in (1, 2, 3)), "data_parallel", "tensor_parallel", "recursive_programming"):
        cost = autoshard.search(fn, *args, searcher=searcher, **OPTIONS).cost
        assert any(peak <= cost.peak_bytes * 1.02 and seconds <= cost.makespan_seconds for peak, seconds in costs(mlp))


@pytest.mark.slow
def test_the_limit_is_kept(mlp):
    """Nothing lies above the limit; one that nothing fits is refused with the smallest peak."""
    fn, args = PROGRAMS["mlp"]()
    limit = (mlp[0].cost.peak_bytes + mlp[-1].cost.peak_bytes) / 2
    assert all(peak <= limit for peak, _ in costs(autoshard.frontier(fn, *args, memory_limit_bytes=limit, **OPTIONS)))
    with pytest.raises(InfeasibleError, match="the smallest peak") as caught:
        autoshard.frontier(fn, *args, memory_limit_bytes=10.0, **OPTIONS)
    assert caught.value.smallest_peak_bytes == mlp[0].cost.peak_bytes


def test_within_picks_from_it(mlp):
    """It gives the fastest below a limit, or names the smallest peak."""
    limit = (mlp[0].cost.peak_bytes + mlp[-1].cost.peak_bytes) / 2
    assert mlp.within(limit).cost.peak_bytes <= limit < mlp[-1].cost.peak_bytes
    assert mlp.within(1e12) is mlp[-1]
    with pytest.raises(InfeasibleError, match="the smallest peak") as caught:
        mlp.within(10.0)
    assert caught.value.smallest_peak_bytes == mlp[0].cost.peak_bytes


@pytest.mark.slow
def test_few_points_are_kept_where_few_are_asked_for():
    """Of one point it is the fastest; none is refused."""
    fn, args = PROGRAMS["mlp"]()
    (fastest,) = autoshard.frontier(fn, *args, points=1, **OPTIONS)
    assert fastest.cost.makespan_seconds <= autoshard.search(fn, *args, **OPTIONS).cost.makespan_seconds
    with pytest.raises(ShardingError, match="1 or more"):
        autoshard.frontier(fn, *args, points=0, **OPTIONS)


def test_it_shows_as_a_table(mlp):
    """A row for each strategy, as text and in a notebook."""
    text = str(mlp.report())
    assert str(mlp) == text
    assert text.count("data=8") == len(mlp)
    assert "<table" in mlp._repr_html_()
    assert "Frontier of" in repr(mlp)


def test_strategies_of_the_frontier_run_and_are_saved(mlp, tmp_path):
    """Each is a whole strategy: saved, loaded and explained as any other."""
    mlp[0].save(tmp_path / "least.json")
    assert autoshard.load(tmp_path / "least.json").cost.peak_bytes == mlp[0].cost.peak_bytes
    assert "peak" in str(mlp[0].explain())
