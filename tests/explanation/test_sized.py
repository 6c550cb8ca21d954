"""Another size of a plan, estimated from its file, beside the same plan judged at that size."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache

import pytest
from jax import P
from programs import gpt, mlp
from strategy_records import EXAMPLE, PIPELINED

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import StrategyError
from autoshard.explanation.sized import sized

MODEL = dict(n_layers=1, d_model=128, ffn=512, heads=4, vocab=256, seq=128)  # fmt: skip


@cache
def found(batch: int, cluster: str = "v5e:2x4", searcher: str = "data_parallel") -> autoshard.Strategy:
    function, args = gpt(batch=batch, **MODEL)
    n = Cluster.of(cluster).n_devices
    mesh = {"data": n // 2, "model": 2} if searcher == "tensor_parallel" else {"data": n}
    plan = {"searcher": searcher, "microbatches": None, "remat": None, "confirm": False}
    return autoshard.search(function, *args, cluster=cluster, mesh=mesh, donate_argnums=0, **plan)


@pytest.mark.sample(1)
@pytest.mark.parametrize("searcher", ["data_parallel", "fully_sharded", "tensor_parallel"])
def test_another_size_is_close_to_the_plan_judged_there(searcher):
    """Another batch and another number of devices: time and memory within 15 %, work exactly."""
    here = found(64, searcher=searcher).kept
    for estimate, judged in (
        (sized(here, batch=128), found(128, searcher=searcher)),
        (sized(here, Cluster.of("v5e:4x4")), found(64, "v5e:4x4", searcher)),
    ):
        assert estimate.mesh.axes == judged.record.mesh.axes
        assert estimate.cost.flops == pytest.approx(judged.cost.flops, rel=0.02)
        assert estimate.cost.makespan_seconds == pytest.approx(judged.cost.makespan_seconds, rel=0.15)
        assert estimate.cost.peak_bytes == pytest.approx(judged.cost.peak_bytes, rel=0.15)
        paths = {tensor.path: tensor.shape for tensor in judged.record.arguments}
        assert {tensor.path: tensor.shape for tensor in estimate.arguments} == paths


def test_the_same_size_is_the_same():
    """No figure changes where nothing is asked for."""
    here = found(64).kept
    there = sized(here, batch=64)
    for name in ("makespan_seconds", "compute_seconds", "communication_seconds", "peak_bytes", "flops"):
        assert math.isclose(getattr(there.cost, name), getattr(here.cost, name), rel_tol=1e-6)


def test_layers_that_are_sharded_otherwise_are_still_state():
    """The batch is that of the inputs, though one layer's parameters have another spec than those of the other layers."""
    function, args = mlp(layers=3, width=16, batch=8)
    specs = {"*['w']": P(None, "data"), "*[0]['w']": P("data", None), "batch*": P("data")}
    here = autoshard.evaluate(function, *args, cluster="cpu:8", mesh={"data": 8}, in_specs=specs).kept
    batch = [tensor.shape for tensor in sized(here, batch=16).arguments if tensor.path.startswith("batch")]
    assert batch == [(16, 16), (16, 16)]
    assert [tensor.shape for tensor in sized(here, batch=16).results] == [tensor.shape for tensor in here.results]


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        ({"batch": 63}, "Use a multiple"),
        ({"cluster": "h100:8"}, "same devices"),
        ({"cluster": "v5e:1x1"}, "do not divide"),
    ],
)
def test_sizes_that_the_plan_has_not_are_refused(ask, words):
    """With what to do."""
    here = found(64, searcher="tensor_parallel").kept
    with pytest.raises(StrategyError, match=words):
        sized(here, Cluster.of(ask["cluster"]) if "cluster" in ask else None, ask.get("batch"))


def test_files_that_do_not_tell_are_refused():
    """Those without what reports show, pipelines, and more devices for plans that split no batch, of which another batch is estimated."""
    for record in (EXAMPLE, replace(PIPELINED, report="x")):
        with pytest.raises(StrategyError, match="Name the program"):
            sized(record, batch=2)
    function, args = mlp(layers=1, width=8, batch=8)
    whole = autoshard.evaluate(function, *args, cluster="cpu:8", mesh={"data": 8}, in_specs={})
    with pytest.raises(StrategyError, match="no axis of"):
        sized(whole.kept, Cluster.of("cpu:16"))
    assert sized(whole.kept, batch=16).cost.flops == 2 * whole.cost.flops
