"""The compute and the collectives of one step by time, as the judge schedules them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from autoshard.cost.schedule import BOTH, CARRIED, WIRES
from autoshard.explanation import Judged
from autoshard.explanation.layers import layer_of, line_of, pass_of
from autoshard.ir import Op
from autoshard.judge.evaluate import scheduled
from autoshard.judge.task_graph import Region, TaskGraph

LEAST_SECONDS = 1e-12  # tasks that only join others take no time


@dataclass(frozen=True, slots=True)
class Event:
    """A kernel or a collective, from its start in one run of its region.

    Attributes:
        start_seconds, seconds: within the region.
        name: what it does, with its source line.
        layer, stage: the layer, and the pass of the step: forward, backward, recomputed or update.
        kind: ``compute``, or the kind of collective.
        axes: the mesh axes on whose links it runs; none for compute.
        bytes: that a collective moves, of one device.
        exposed_seconds: the part in which nothing is computed.
        is_blocking: whether a collective holds up compute as long as it runs.
        loop: the trips of a loop, if it is one.
        task: in a pipeline's stage the kind of task that runs it: ``F``, ``B`` or ``W``; empty outside the loop over microbatches.
    """

    start_seconds: float
    seconds: float
    name: str
    layer: str
    stage: str
    kind: str
    axes: tuple[str, ...] = ()
    bytes: float = 0.0
    exposed_seconds: float = 0.0
    is_blocking: bool = False
    loop: Loop | None = None
    task: str = ""


@dataclass(frozen=True, slots=True)
class Loop:
    """The events of one trip, how long that takes, and how often it runs."""

    trips: int
    seconds: float
    events: tuple[Event, ...]


def timeline(judged: Judged, kinds: Mapping[int, str] | None = None) -> Loop:
    """The events of a step, which runs once; those of loops are inside them.

    A collective has one place in time, on the links of all of its axes. The step's seconds are those of the record.

    Args:
        kinds: of a pipeline's stage by operation the kind of task that runs it (`autoshard.pipeline.figures.task_kinds`).
    """
    _, tasks = scheduled(judged.facts, judged.model, judged.record.assignment)
    return _loop(tasks.region, 1, _describer(judged, tasks), kinds or {})


_Described = tuple[str, str, str, str, tuple[str, ...], float]


def _describer(judged: Judged, tasks: TaskGraph) -> Callable[[Region, int], _Described]:
    """Name, layer, pass, kind, axes and bytes of a task."""
    ops, names, mesh = judged.facts.graph.walk(), judged.facts.names, judged.model.mesh

    def described(region: Region, task: int) -> _Described:
        op: Op | None = ops[region.ops[task]] if region.ops[task] >= 0 else None
        layer, stage = (layer_of(op.origin), pass_of(op)) if op else ("new state", "update")
        position = region.sent.get(task)
        if position is None:
            return f"{op.primitive} {line_of(op.origin)}" if op else "copy", layer, stage, "compute", (), 0.0
        sent = tasks.sent[position]
        axes = tuple(mesh.names[axis] for axis in sent.step.axes)
        return names.tensor(sent.moved), layer, stage, sent.step.kind, axes, sent.nbytes or sent.step.nbytes

    return described


def _loop(region: Region, trips: int, described: Callable[[Region, int], _Described], kinds: Mapping[int, str]) -> Loop:
    times = region.times
    assert times is not None, "every region is scheduled"
    events = []
    for task, (start, seconds, stream) in enumerate(zip(times.start_seconds, region.tasks.seconds, region.tasks.streams, strict=True)):
        if seconds <= LEAST_SECONDS:
            continue
        inner = region.loops.get(task)
        loop = None if inner is None else _loop(inner, inner.runs // (region.runs or 1), described, kinds)
        exposed = times.exposed_seconds.get(task, 0.0) if stream in (WIRES, BOTH, CARRIED) else 0.0
        kind = kinds.get(region.ops[task], "")
        events.append(Event(start, seconds, *described(region, task), exposed, stream == BOTH, loop, kind))
    return Loop(trips, times.makespan_seconds, tuple(sorted(events, key=lambda event: event.start_seconds)))
