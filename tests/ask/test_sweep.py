"""A sweep searches every cluster and batch size, compares them by time and cost, and keeps what it found."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import pytest

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import ClusterError, ShardingError
from autoshard.render import format_between
from autoshard.run import tracing

CLUSTERS, BATCHES = ["v5e:2x2", "v5e:2x4"], [512, 1024]
OPTIONS = {"clusters": CLUSTERS, "batches": BATCHES, "searcher": "recursive_programming"}


def step(weights, x):
    return jnp.tanh(x @ weights)


def args(batch):
    return jax.ShapeDtypeStruct((1024, 1024), jnp.float32), jax.ShapeDtypeStruct((batch, 1024), jnp.float32)


@pytest.fixture(scope="module")
def swept():
    return autoshard.sweep(step, args, tokens_per_example=4, total=1e6, **OPTIONS)


def test_every_point_is_what_a_search_finds(swept):
    """Step time, mesh and peak are those of a search with the same options; times and costs of tokens follow."""
    assert [(point.cluster, point.batch) for point in swept] == [(cluster, batch) for batch in BATCHES for cluster in CLUSTERS]
    point = swept[3]
    alone = autoshard.search(step, *args(1024), cluster="v5e:2x4", searcher="recursive_programming")
    assert (point.step_seconds, dict(point.mesh)) == (alone.cost.makespan_seconds, alone.mesh_shape)
    assert point.strategy == alone
    assert point.items == 4096 and point.seconds_per_item == point.step_seconds / 4096
    assert point.device_hours_per_item == pytest.approx(8 * point.step_seconds / 4096 / 3600)


def test_predicted_times_have_the_interval_of_published_runs(tmp_path):
    """A chip's shares give the interval of a step, kept in files; explain, its JSON and a sweep's days show it; others have none."""
    known = Cluster.parse("v5e:2x2")
    cluster = replace(known, device=replace(known.device, low_share=0.5, high_share=4.0))
    plain = replace(known, device=replace(known.device, low_share=0.0, high_share=0.0))
    found, without = autoshard.sweep(step, args(512), clusters=[cluster, plain], tokens_per_example=4, total=1e12, searcher="data_parallel")
    seconds = found.step_seconds
    assert found.strategy is not None and found.interval_seconds == found.strategy.cost.interval_seconds == (0.5 * seconds, 4 * seconds)
    late = replace(found.strategy.cost, communication_seconds=3.0, exposed_communication_seconds=1.0, late_share=2.0)
    assert late.interval_seconds == (0.5 * seconds, 4 * seconds + 2 * 2.0), "what is hidden may be late"
    found.strategy.save(tmp_path / "kept.json")
    assert autoshard.load(tmp_path / "kept.json").cost.interval_seconds == found.interval_seconds
    between = format_between(*found.interval_seconds)
    assert between in str(found.strategy.explain()) and json.loads(found.strategy.explain().to_json())["time"]["interval_seconds"]
    days = found.seconds_per_item * 1e11 / 86_400
    assert found.days(1e11) == f"{days:,.1f} ({days / 2:,.1f} to {4 * days:,.1f})"
    assert without.interval_seconds is None and "(" not in without.days(1e12)
    assert without.strategy is not None and "published runs" not in str(without.strategy.explain())


@pytest.mark.parametrize("error", [0.0, 0.9])
def test_points_that_predictions_do_not_tell_apart_are_told(error):
    """On one chip within what two plans are off by from each other, the simplest first, whatever else all plans are off by."""
    known = Cluster.parse("v5e:2x4")
    cluster = replace(known, device=replace(known.device, low_share=0.1, high_share=9.0, pair_error=error))
    meshes = {"data": 2, "model": 4}, {"data": 8}
    found = autoshard.sweep(step, args(512), clusters=[cluster], meshes=meshes, searcher="recursive_programming")
    assert [[dict(point.mesh) for point in group] for group in found.equals] == ([[*reversed(meshes)]] if error else [])
    assert ("the simplest first: v5e:2x4 on mesh data=8; " in str(found)) == bool(error)
    assert len(json.loads(found.to_json())["equal"]) == len(found.equals)


def test_each_batch_is_traced_once(monkeypatch):
    """All clusters share the trace of a batch size."""
    traces = []
    monkeypatch.setattr(tracing.TracedOnce, "traced", _counting(tracing.TracedOnce.traced, traces))
    autoshard.sweep(step, args, **OPTIONS)
    assert len(traces) == len(BATCHES)


def _counting(traced, traces):
    return lambda self, options, make: traced(self, options, lambda: traces.append(options) or make())


def test_the_front_is_not_beaten_and_beats_the_rest(swept):
    """On it less time is more cost; every other point is beaten in both."""
    front = swept.pareto
    assert all(a.seconds_per_item < b.seconds_per_item and a.cost_per_item > b.cost_per_item for a, b in pairwise(front))
    for point in swept:
        on_it = any(point is each for each in front)
        beaten = [each for each in front if each.seconds_per_item <= point.seconds_per_item and each.cost_per_item <= point.cost_per_item]
        assert bool(on_it) != bool([each for each in beaten if each is not point])


def test_a_price_turns_device_hours_into_money():
    """By the name of the device or of the cluster; one without a price is refused where others have one."""
    priced = autoshard.sweep(step, args, prices={"v5e:2x2": 3.0, "v5e": 2.0}, **OPTIONS)
    assert [point.price for point in priced] == [3.0, 2.0, 3.0, 2.0]
    assert priced[0].cost_per_item == 3.0 * priced[0].device_hours_per_item
    with pytest.raises(ClusterError, match=r"no price of a device-hour on 'v5e:2x2'.*leave all prices out"):
        autoshard.sweep(step, args, prices={"h100": 2.0}, **OPTIONS)


@pytest.mark.slow
def test_what_does_not_fit_is_a_row_with_its_reason():
    """It ends no sweep, and is on no front."""
    result = autoshard.sweep(step, args, memory_limit_bytes=1.5e6, **OPTIONS)
    assert not result[0].mesh and "fit" in result[0].refusal
    assert all(point.step_seconds is not None for point in result.pareto)
    assert "nothing found" in str(result)


def test_a_sweep_goes_on_where_it_was_interrupted(tmp_path):
    """Ctrl-C returns what there is; the next sweep into the folder searches the rest only, and gives what one sweep would have."""

    def stop(point):
        if point.batch == 1024:
            raise KeyboardInterrupt

    first = autoshard.sweep(step, args, save=tmp_path, found=stop, **OPTIONS)
    assert len(first) == 3 and "Interrupted: 3 of 4" in str(first)
    told = []
    second = autoshard.sweep(step, args, save=tmp_path, progress=lambda what, _: told.append(what), **OPTIONS)
    assert len(second) == 4 and second[:3] == first[:]
    assert told and all(what.startswith("v5e:2x4, batch 1024") for what in told)
    assert second[0].strategy == first[0].strategy
    assert {path.name for path in tmp_path.glob("v5e*.json")} == {f"{point.name}.json" for point in second}


def test_the_table_and_the_json_have_every_point(swept):
    """A row each, with days in all; JSON that reads back, with null for nothing."""
    text = str(swept)
    assert text.count("v5e:2x") == len(swept) and "days in all" in text and "tokens/s" in text
    told = json.loads(swept.to_json())
    assert [point["batch"] for point in told["points"]] == [512, 512, 1024, 1024]
    assert told["pareto"] == [point.key for point in swept.pareto]
    assert "<table" in swept._repr_html_() and "4 points" in repr(swept)


def test_one_tuple_of_arguments_is_enough_without_batches():
    """Costs are then those of a step; with batches arguments are a function."""
    (point,) = autoshard.sweep(step, args(512), clusters=["cpu:4"], meshes=[{"data": 4}], searcher="data_parallel")
    assert point.seconds_per_item == point.step_seconds and dict(point.mesh) == {"data": 4}
    with pytest.raises(ShardingError, match="a function of the batch size"):
        autoshard.sweep(step, args(512), clusters=["cpu:4"], batches=[512])
    with pytest.raises(ShardingError, match="one cluster or more"):
        autoshard.sweep(step, args, clusters=[], batches=[512])
    with pytest.raises(ShardingError, match="list of one cluster or more, got 'cpu:4'"):
        autoshard.sweep(step, args, clusters="cpu:4", batches=[512])
    with pytest.raises(ShardingError, match="list of batch sizes, got 512"):
        autoshard.sweep(step, args, clusters=["cpu:4"], batches=512)
    with pytest.raises(ShardingError, match="whole number of examples"):
        autoshard.sweep(step, args, clusters=["cpu:4"], batches=[0])
