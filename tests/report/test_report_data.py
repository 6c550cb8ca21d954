"""The data of a report is the strategy's: events end with the step, memory peaks at the peak, devices stand where they are placed."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from programs import abstract, gpt, gpt_scan, mlp

import autoshard
from autoshard.cluster import Cluster
from autoshard.errors import StrategyError
from autoshard.ir import Mesh
from autoshard.ir.layout import Placement
from autoshard.report import HtmlReport
from autoshard.report.data import to_data
from autoshard.report.devices import devices_of, devices_of_stages
from autoshard.report.memory import GROUPS
from autoshard.report.program import Node
from autoshard.report.timeline import Event, Loop

# Each on a cluster whose compiler overlaps otherwise; of a scan, of unrolled layers, and of layers without names.
PROGRAMS = {"gpt": (gpt, "v5e:4x4"), "gpt_scan": (gpt_scan, "h100:4x2"), "mlp": (mlp, "cpu:8")}


@cache
def strategy_of(name: str) -> autoshard.Strategy:
    program, cluster = PROGRAMS[name]
    function, args = program()
    axes = {"data": 4, "model": Cluster.parse(cluster).n_devices // 4}
    return autoshard.search(function, *args, cluster=cluster, mesh=axes, searcher="tensor_parallel", donate_argnums=0)


@cache
def report_of(name: str) -> HtmlReport:
    return strategy_of(name).report()


def unrolled(loop: Loop) -> list[Event]:
    """The events of a step, those of every trip of a loop instead of the loop."""
    found = []
    for event in loop.events:
        found += [event] if event.loop is None else [inner for _ in range(event.loop.trips) for inner in unrolled(event.loop)]
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_timeline_is_the_step(name):
    """It ends with the predicted step time; compute, communication and exposed seconds of its events are those of the cost."""
    cost, step = strategy_of(name).cost, report_of(name).content.step
    assert step is not None
    assert step.seconds == pytest.approx(cost.makespan_seconds, rel=1e-9)
    events = unrolled(step)
    sums = {
        kind: sum(event.seconds for event in events if (event.kind == "compute") == (kind == "compute")) for kind in ("compute", "sent")
    }
    assert sums["compute"] == pytest.approx(cost.compute_seconds, rel=1e-6)
    assert sums["sent"] == pytest.approx(cost.communication_seconds, rel=1e-6)
    assert sum(event.exposed_seconds for event in events) == pytest.approx(cost.exposed_communication_seconds, rel=1e-6, abs=1e-12)


def test_a_pipeline_s_stages_have_a_timeline_memory_and_graph():
    """Each is that of the stage's own program; of a file without the program there are none."""
    function, args = mlp()
    found = autoshard.search(function, *args, cluster="cpu:8", stages=2, microbatches=2, donate_argnums=0)
    stages = found.report().content.stages
    assert [stage.step.seconds for stage in stages] == pytest.approx([stage.cost.makespan_seconds for stage in found.stages], rel=1e-9)
    data = to_data(found.report().content)
    assert all(stage["memory"] and stage["graph"] and stage["timeline"] for stage in data["stages"]) and len(data["stages"]) == 2
    assert data["timeline"] is None and to_data(autoshard.Strategy(found.record).report().content)["stages"] == []


@pytest.mark.parametrize("name", PROGRAMS)
def test_no_two_events_use_the_same_thing_at_once(name):
    """Compute runs one kernel at a time, and the links one collective; a blocking collective holds up both."""

    def check(loop: Loop) -> None:
        for is_compute in (True, False):
            own = [event for event in loop.events if event.is_blocking or (event.kind == "compute") == is_compute]
            ends = ((event.start_seconds, event.start_seconds + event.seconds) for event in own)
            assert all(after[0] >= before[1] - 1e-9 * loop.seconds for before, after in pairwise(sorted(ends)))
        for event in loop.events:
            if event.loop is not None:
                assert event.loop.trips * event.loop.seconds == pytest.approx(event.seconds, rel=1e-9)
                check(event.loop)

    step = report_of(name).content.step
    assert step is not None
    check(step)


@pytest.mark.parametrize("name", PROGRAMS)
def test_memory_has_the_predicted_peak(name):
    """The groups add up to the predicted peak at the marked moment, to no more elsewhere, and so does what is alive then."""
    peak, curve = strategy_of(name).cost.peak_bytes, report_of(name).content.memory
    assert curve is not None
    sums = [sum(moment.bytes) for moment in curve.moments]
    assert sums[curve.peak] == pytest.approx(peak, rel=1e-9)
    assert max(sums) == pytest.approx(peak, rel=1e-9)
    assert sum(each.bytes for each in curve.alive) == pytest.approx(peak, rel=1e-9)


def test_memory_is_within_what_the_compiler_lets_an_order_take():
    """On H100 gradients wait as far as memory allows: the curve ends there, too."""
    function, args = gpt(n_layers=4, batch=64, seq=64, remat=True)

    def searched(memory_limit_bytes):
        cluster = replace(Cluster.parse("h100:8"), memory_limit_bytes=memory_limit_bytes)
        plan = {"mesh": {"data": 8}, "searcher": "data_parallel", "memory_limit_bytes": 1e15}
        return autoshard.search(function, *args, cluster=cluster, **plan)

    free, least = (searched(limit).cost.peak_bytes for limit in (60 * 10**9, 1))
    strategy = searched(int((free + least) / 2))
    curve = strategy.report().content.memory
    assert curve is not None and least < strategy.cost.peak_bytes < free
    sums = [sum(moment.bytes) for moment in curve.moments]
    for most in (sums[curve.peak], max(sums), sum(each.bytes for each in curve.alive)):
        assert most == pytest.approx(strategy.cost.peak_bytes, rel=1e-9)


def test_sums_over_microbatches_are_gradients():
    """What the loop adds up, and not the slices of the batch that it reads."""
    function, args = mlp(width=128, batch=64)
    found = autoshard.search(function, *args, cluster="h100:8", mesh={"data": 8}, searcher="data_parallel", microbatches=4, remat=None)
    curve = found.report().content.memory
    assert curve is not None
    most = {group: max(moment.bytes[k] for moment in curve.moments) for k, group in enumerate(GROUPS)}
    assert 2 * most["gradients"] > most["parameters"] > 2 * most["temporaries"]


@pytest.mark.parametrize("program", [mlp, gpt_scan])
def test_what_waits_for_the_backward_pass_is_activations(program):
    """Whatever the backward pass reads of it: over the step little else is temporary. New state that is not donated is state."""
    function, args = program(batch=4096) if program is mlp else program(batch=512)
    found = autoshard.search(function, *args, cluster="h100:8", mesh={"data": 8}, searcher="data_parallel", microbatches=None, remat=None)
    curve = found.report().content.memory
    assert curve is not None
    most = {group: max(moment.bytes[k] for moment in curve.moments) for k, group in enumerate(GROUPS)}
    assert most["activations"] > 3 * most["temporaries"]
    kinds = {each.kind: each.bytes for each in found.explain().data.memory}
    assert kinds["activations"] > kinds.get("temporaries", 0.0)


def test_an_optimizers_moments_are_its_state():
    """Parameters, moments and the batch are told apart by what mirrors what and what is replaced, not by their names."""
    curve = report_of("gpt").content.memory
    assert curve is not None
    groups = {each.name: each.group for each in curve.alive if each.name.startswith(("state", "tokens", "batch"))}
    assert {group for name, group in groups.items() if "params" in name} == {"parameters"}
    assert {group for name, group in groups.items() if ".mu" in name or ".nu" in name} == {"optimizer state"}


def test_the_program_is_folded():
    """Layers that repeat are one node with their number; a child's row is below those that it reads; seconds add up."""
    report = report_of("gpt")
    root = report.content.program
    assert root is not None

    def walk(node: Node):
        yield node
        for child in node.children:
            yield from walk(child)

    nodes = list(walk(root))
    assert [node.name for node in root.children] == ["forward", "backward", "update"]
    assert any(node.kind == "layer" and node.repeats == 2 and node.name == "_block" for node in nodes)
    assert len(nodes) < 250
    for node in nodes:
        if node.children:
            assert sum(child.compute_seconds for child in node.children) == pytest.approx(node.compute_seconds)
        assert all(0 <= share <= 1 for share in node.axes)
        forward = [(a, b) for a, b, _ in node.edges if node.children[a].row != node.children[b].row]
        assert all(node.children[a].row < node.children[b].row for a, b in forward)


def test_devices_are_numbered_as_the_mesh_is_placed():
    """An axis that is placed along the first physical dimension has its neighbours there; rings close where links do."""
    cluster = Cluster.parse("v5e:4x4")
    mesh = Mesh((("data", 4), ("model", 4)), Placement((4, 4), (1, 0), (0, 1)))  # data along the last dimension
    found = devices_of(cluster, mesh)
    at = dict(zip(found.places, found.coordinates, strict=True))
    assert at[0, 1] == (1, 0) and at[1, 0] == (0, 1)
    assert {axis for a, b, axis in found.links if found.places[a][0] == found.places[b][0]} == {0}
    assert len(found.links) == 24  # lines: v5e closes rings from 16 on
    rings = devices_of(Cluster.parse("v5p:4x4x4"), Mesh.of({"a": 4, "b": 4, "c": 4}))
    assert len(rings.links) == 3 * 64


def test_stages_stand_on_their_parts():
    """Devices of a pipeline have their stage as the first coordinate, part after part of the cluster."""
    stages = [Mesh.of({"data": 4})] * 2
    found = devices_of_stages(Cluster.parse("h100:4x2"), Mesh.of({"stage": 2, "data": 4}), stages)
    assert found is not None
    assert [at[0] for at in found.coordinates] == [0] * 4 + [1] * 4
    assert all(found.coordinates[a][0] == found.coordinates[b][0] for a, b, _ in found.links)


def test_the_report_of_a_file_is_that_of_the_search(tmp_path):
    """Timeline, memory and graph with it; and what is loaded is saved as the same file."""
    found = strategy_of("mlp")
    found.save(tmp_path / "s.json")
    loaded = autoshard.load(tmp_path / "s.json")
    assert to_data(loaded.report().content) == json.loads(json.dumps(to_data(found.report().content)))
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_text() == (tmp_path / "s.json").read_text()
    one, other = (each.report().trace["traceEvents"] for each in (loaded, found))
    assert [each["name"] for each in one] == [each["name"] for each in other]
    assert all(each["ts"] == pytest.approx(there["ts"], abs=2e-3) for each, there in zip(one, other, strict=True) if "ts" in each)
    assert autoshard.compare(loaded, loaded).data.layers == autoshard.compare(found, found).data.layers != ()


def test_a_record_without_its_program_says_what_is_missing(tmp_path):
    """Tables and devices are there; timeline, memory and graph are not, and a trace is refused with the command that gives it."""
    report = autoshard.Strategy(strategy_of("mlp").record).report()
    data = to_data(report.content)
    assert data["timeline"] is data["memory"] is data["graph"] is None
    assert data["tensors"] and data["mesh"] and data["collectives"]
    assert "--html" in report.html
    with pytest.raises(StrategyError, match="--trace"):
        report.save_trace(tmp_path / "trace.json")
    with pytest.raises(StrategyError, match=r"cannot be: No such file or directory\. Choose another path"):
        report.save_html(tmp_path / "nowhere" / "report.html")


def test_a_program_of_nothing_has_a_report():
    """On one device, without a collective or an operation."""
    data = to_data(autoshard.search(lambda x: x, abstract((8,)), cluster="cpu:1").report().content)
    assert data["timeline"]["start"] == [] and data["collectives"] == []
    assert len(data["mesh"]["coordinates"]) == 1
    assert "i" not in data["graph"] and data["memory"]["peak"] < len(data["memory"]["moment"])


def test_equal_layers_add_little_to_a_report():
    """Four times the layers are less than four times the bytes, but for the timeline, which has events of each."""
    function, args = gpt(n_layers=8)
    options = {"cluster": "v5e:4x4", "mesh": {"data": 4, "model": 4}, "searcher": "tensor_parallel", "donate_argnums": 0}
    deep = to_data(autoshard.search(function, *args, **options).report().content)
    shallow = to_data(report_of("gpt").content)
    for part in ("graph", "tensors", "lines", "texts"):
        assert len(json.dumps(deep[part])) < 1.3 * len(json.dumps(shallow[part])), part
    assert len(json.dumps(deep)) < 250_000


def test_figures_are_the_records():
    """The page shows the numbers of the explanation, which are the record's."""
    strategy, data = strategy_of("gpt"), to_data(report_of("gpt").content)
    assert data["figures"]["step"] == strategy.cost.makespan_seconds
    assert data["figures"]["peak"] == strategy.cost.peak_bytes
    assert data["sentences"] == list(strategy.explain().data.sentences)
    assert sum(row[4] for row in data["collectives"]) == pytest.approx(
        sum(each.count * each.seconds for each in strategy.cost.collectives), rel=1e-4
    )
    paths = {tensor.path for tensor in strategy.record.arguments}
    assert sum(row[2] for row in data["tensors"] if row[1] != "activation") == len(paths)
