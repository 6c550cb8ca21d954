"""Trace files keep the rules of Chrome's Trace Event Format and of Perfetto, and have the events of the step."""

from __future__ import annotations

import json
from collections import defaultdict
from functools import cache

import pytest
from programs import gpt, gpt_scan, mlp

import autoshard
from autoshard.cluster import Cluster
from autoshard.pipeline.scheduling import NAMES, schedule_of
from autoshard.pipeline.simulation import PieceCosts, simulate
from autoshard.report.timeline import Event, Loop
from autoshard.report.trace import Drawn, pipeline_trace, step_trace

PROGRAMS = {"gpt": (gpt, "v5e:4x4"), "gpt_scan": (gpt_scan, "h100:4x2"), "mlp": (mlp, "cpu:8")}


@cache
def report_of(name):
    program, cluster = PROGRAMS[name]
    function, args = program()
    axes = {"data": 4, "model": Cluster.parse(cluster).n_devices // 4}
    return autoshard.search(function, *args, cluster=cluster, mesh=axes, searcher="tensor_parallel", donate_argnums=0).report()


def violations(trace):
    """What breaks the rules: of the Trace Event Format (required fields, phases, units) and of Perfetto's importer (ids, nesting)."""
    found = []
    if set(trace) - {"traceEvents", "displayTimeUnit", "otherData"} or trace.get("displayTimeUnit") not in ("ms", "ns"):
        found.append("top level")
    named, used, rows, sort = defaultdict(list), set(), defaultdict(list), set()
    for event in trace["traceEvents"]:
        if not all(isinstance(event.get(key), int) and event[key] > 0 for key in ("pid", "tid")):
            found.append(f"ids are positive whole numbers: {event}")
        if event["ph"] == "M":
            if set(event) != {"ph", "pid", "tid", "name", "args"} or used:
                found.append(f"metadata has its fields, and comes first: {event}")
            if event["name"] == "thread_name":
                named[event["pid"], event["tid"]].append(event["args"]["name"])
            elif event["name"] == "process_name":
                named[event["pid"]].append(event["args"]["name"])
            elif event["name"] == "thread_sort_index" and isinstance(event["args"]["sort_index"], int):
                sort.add((event["pid"], event["tid"]))
            else:
                found.append(f"unknown metadata: {event}")
        elif event["ph"] == "X":
            used.add((event["pid"], event["tid"]))
            times = event["ts"], event["dur"]
            if not all(isinstance(time, int | float) and time >= 0 for time in times) or not (event["name"] and event["cat"]):
                found.append(f"a complete event has a name, a category, and times of at least 0: {event}")
            rows[event["pid"], event["tid"]].append(times)
        else:
            found.append(f"unknown phase: {event}")
    found += [f"one name each: {key}" for key, names in named.items() if len(names) != 1 or not names[0]]
    found += [f"row without a name: {row}" for row in used if row not in named or row not in sort or row[0] not in named]
    if len({names[0] for key, names in named.items() if isinstance(key, tuple)}) < sum(isinstance(key, tuple) for key in named):
        found.append("rows of one name")
    for row, events in rows.items():
        ends, before = [], 0.0
        for start, length in events:
            while ends and ends[-1] <= start + 1e-5:
                ends.pop()
            if start < before - 1e-9:
                found.append(f"starts of row {row} go back: {start}")
            if ends and start + length > ends[-1] + 1e-5:
                found.append(f"events of row {row} overlap at {start}")
            before = start
            ends.append(start + length)
    return found


def pipeline():
    """A pipeline whose transfers take longer than its tasks."""
    pieces = [PieceCosts(1e-3, 1e-3, 0.0)] * 2
    return pipeline_trace([Drawn(simulate(schedule_of("gpipe", 2, 4, 1), pieces, [3e-3], [3e-3]))], "pipeline")


@cache
def staged(schedule):
    """The strategy of a pipeline of two parts, whose stages split their batch and their weights."""
    function, args = mlp(4)
    options = {"stages": 2, "schedule": schedule, "microbatches": 2, "mesh": {"data": 2, "model": 2}}
    return autoshard.search(function, *args, cluster="cpu:8", searcher="dynamic_programming", donate_argnums=0, **options)


@pytest.mark.parametrize("name", [*PROGRAMS, "pipeline", "1f1b", "zero_bubble", "interleaved"])
def test_a_trace_keeps_the_rules_of_the_format(name):
    """Of steps, of loops, of pipelines, with and without what is inside their stages; as it is read back from JSON."""
    own = staged(name).report() if name in NAMES else None
    trace = pipeline() if name == "pipeline" else report_of(name).trace if own is None else own.trace
    assert violations(json.loads(json.dumps(trace, allow_nan=False))) == []


def broken(kind):
    trace = json.loads(json.dumps(report_of("gpt").trace))
    events = [event for event in trace["traceEvents"] if event["ph"] == "X" and event["tid"] == 1]
    match kind:
        case "starts of row":
            events[-1]["ts"] = 0.0
        case "overlap":
            longest = max(range(1, len(events)), key=lambda k: events[k]["dur"])
            events[longest - 1]["dur"] = events[longest]["ts"] + events[longest]["dur"] / 2 - events[longest - 1]["ts"]
        case "times of at least 0":
            events[3]["dur"] = -1.0
        case "row without a name":
            events[-1]["tid"] = 77
        case "ids are positive":
            events[0]["tid"] = 0
        case "comes first":
            trace["traceEvents"].append(trace["traceEvents"].pop(0))
        case "rows of one name":
            next(e for e in trace["traceEvents"] if e["name"] == "thread_name" and e["tid"] == 2)["args"]["name"] = "compute"
    return trace


@pytest.mark.parametrize(
    "kind",
    ["starts of row", "overlap", "times of at least 0", "row without a name", "ids are positive", "comes first", "rows of one name"],
)
def test_a_broken_trace_is_seen(kind):
    """The check of the rules finds each kind of damage, so that it would find one in a trace that is written."""
    assert any(kind in each for each in violations(broken(kind)))


def unrolled(loop):
    """The events of a step, those of every trip of a loop instead of the loop."""
    found = []
    for event in loop.events:
        found += [event] if event.loop is None else [inner for _ in range(event.loop.trips) for inner in unrolled(event.loop)]
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_trace_has_every_event_on_the_rows_of_its_axes(name):
    """Rows are compute and the links of each axis, events lie within the step, a collective is on each of its axes' rows."""
    report = report_of(name)
    events = report.trace["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert rows == {1: "compute", 2: "links of axis data", 3: "links of axis model"}
    complete = [event for event in events if event["ph"] == "X"]
    end = report.content.record.cost.makespan_seconds * 1e6
    assert all(event["ts"] + event["dur"] <= end * (1 + 1e-6) + 1e-3 for event in complete)
    shown = [event for event in complete if event["cat"] != "loop"]
    assert len(shown) == sum(max(len(event.axes), 1) for event in unrolled(report.content.step))


def test_a_collective_over_several_axes_is_on_the_links_of_each():
    """In the trace as on the page: it keeps all of them busy."""
    sent = Event(0.0, 1e-3, "w", "block", "forward", "all_gather", ("data", "model"), 8.0)
    complete = [event for event in step_trace(Loop(1, 1e-3, (sent,)), ("data", "model"), "t")["traceEvents"] if event["ph"] == "X"]
    assert [(event["tid"], event["ts"], event["dur"]) for event in complete] == [(2, 0.0, 1000.0), (3, 0.0, 1000.0)]


def test_a_loop_of_too_many_trips_is_one_event_of_the_trace():
    """Viewers stay usable."""
    inner = Loop(10**6, 1e-6, (Event(0.0, 1e-6, "dot", "block", "forward", "compute"),))
    step = Loop(1, 1.0, (Event(0.0, 1.0, "scan", "block", "forward", "compute", loop=inner),))
    assert sum(event["ph"] == "X" for event in step_trace(step, (), "t")["traceEvents"]) == 1


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble", "interleaved"])
def test_the_tasks_of_a_pipeline_have_their_compute_and_collectives_below_them(schedule):
    """Each from its task's start to its end, on rows of the stage; all events of a microbatch, in the tasks of its stage's pieces."""
    report = staged(schedule).report()
    events = report.trace["traceEvents"]
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    assert [*rows.values()][:4] == ["stage 0", "stage 0: compute", "stage 0: links of axis data", "stage 0: links of axis model"]
    complete = [event for event in events if event["ph"] == "X"]
    for stage in (0, 1):
        inside = [event for event in complete if rows[event["tid"]].startswith(f"stage {stage}: ")]
        for task in (event for event in complete if rows[event["tid"]] == f"stage {stage}" and event["dur"] and event["cat"] != "U"):
            middle = [(event, event["ts"] + event["dur"] / 2) for event in inside]
            own = [event for event, at in middle if task["ts"] < at < task["ts"] + task["dur"]]
            assert min(event["ts"] for event in own) == pytest.approx(task["ts"], abs=1e-3)
            assert max(event["ts"] + event["dur"] for event in own) == pytest.approx(task["ts"] + task["dur"], abs=1e-3)
            passes = {event["args"]["pass"] for event in own if event["cat"] != "loop"}
            assert ("backward" in passes) == (task["cat"] != "F")
        pieces = report.content.stages[stage::2]
        loops = [event.loop for piece in pieces for event in piece.step.events if event.loop and event.loop.trips == 2]
        shown = sum(max(len(event.axes), 1) for loop in loops for _ in range(loop.trips) for event in unrolled(loop))
        assert len([event for event in inside if event["cat"] != "loop"]) == shown


def test_a_pipeline_without_its_program_has_the_rows_of_its_schedule():
    """That is all a file has."""
    events = autoshard.Strategy(staged("1f1b").record).report().trace["traceEvents"]
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert names == ["stage 0", "stage 1", "stage 0 sends to 1", "stage 1 sends to 0"]


def test_of_too_many_events_the_first_microbatches_are_shown(monkeypatch):
    """At least one, however many events it has."""
    monkeypatch.setattr("autoshard.report.trace.MOST_EVENTS", 1)
    events = staged("1f1b").report().trace["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    second = next(event for event in complete if (event["name"], event["tid"]) == ("F1", 1))
    middles = [event["ts"] + event["dur"] / 2 for event in complete if event["tid"] == 2]
    assert middles and not any(second["ts"] < middle < second["ts"] + second["dur"] for middle in middles)
