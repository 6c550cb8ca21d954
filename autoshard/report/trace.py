"""A step's timeline as a trace file of Chrome's format, which ui.perfetto.dev and chrome://tracing open.

The format is "Trace Event Format" of the Catapult project: complete events (``"ph": "X"``) with times in microseconds, of each row in the
order of their starts, which follow or enclose each other. The process and rows count from 1: Perfetto takes 0 for an idle process.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from autoshard.pipeline.simulation import Timeline
from autoshard.report.timeline import Event, Loop

MOST_EVENTS = 200_000  # viewers stay quick; loops beyond it are shown as one event
PROCESS = 1
COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class _Span:
    """An event before it has a row: the row's name, what it is, and when, in microseconds."""

    row: str
    name: str
    category: str
    begin: float
    end: float
    more: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, row: str, name: str, category: str, start: float, seconds: float, **more: Any) -> _Span:
        return cls(row, name, category, _us(start), _us(start + seconds), more)


def step_trace(step: Loop, axes: Sequence[str], title: str) -> dict[str, Any]:
    """The trace of a step: a row for compute, and one for the links of each mesh axis."""
    return _trace(title, [COMPUTE, *map(_links, axes)], _events(step, 0.0, [MOST_EVENTS]))


def _links(axis: str) -> str:
    return f"links of axis {axis}"


def _events(loop: Loop, start: float, budget: list[int]) -> Iterator[_Span]:
    for event in loop.events:
        begin, inner = start + event.start_seconds, event.loop
        budget[0] -= 1
        if inner is not None:
            yield _Span.of(COMPUTE, f"{event.name}, {inner.trips} trips", "loop", begin, event.seconds, layer=event.layer)
            if inner.trips * _size(inner) <= budget[0]:
                for trip in range(inner.trips):
                    yield from _events(inner, begin + trip * inner.seconds, budget)
            continue
        more: dict[str, Any] = {"layer": event.layer, "pass": event.stage}
        if not event.axes:
            yield _Span.of(COMPUTE, event.name, "compute", begin, event.seconds, **more)
            continue
        more |= {"bytes": event.bytes, "axes": ", ".join(event.axes), "waiting_us": _us(event.exposed_seconds)}
        for axis in event.axes:
            yield _Span.of(_links(axis), f"{event.kind} of {event.name}", event.kind, begin, event.seconds, **more)


def _size(loop: Loop) -> int:
    return sum(1 if event.loop is None else event.loop.trips * _size(event.loop) for event in loop.events)


@dataclass(frozen=True, slots=True)
class Inside:
    """What is inside a stage: the axes of its mesh, and the events of its program, each with the kind of task that runs it."""

    axes: tuple[str, ...]
    step: Loop


@dataclass(frozen=True, slots=True)
class Drawn:
    """The schedule of a pipeline, or of one of several that follow each other.

    Attributes:
        timeline: of its tasks.
        insides: of each stage's program; the compute of each task, and its collectives by mesh axis, then have rows below the stage's. Of
            more events than viewers take, those of the first microbatches.
        start_seconds: when it begins.
        name: which of several it is; empty of one alone.
    """

    timeline: Timeline
    insides: Sequence[Inside] = ()
    start_seconds: float = 0.0
    name: str = ""


def pipeline_trace(passes: Sequence[Drawn], title: str) -> dict[str, Any]:
    """The trace of the schedules of a step's pipelines: a row for each stage, and one for what each stage sends to another."""
    rows, pairs = dict[str, None](), dict[str, None]()
    for each in passes:
        for stage in range(len(each.timeline.spans)):
            axes = each.insides[stage].axes if each.insides else ()
            inner = [COMPUTE, *map(_links, axes)] if each.insides else []
            rows |= dict.fromkeys([f"stage {stage}", *(f"stage {stage}: {row}" for row in inner)])
        pairs |= dict.fromkeys(_sends(*pair) for pair in sorted({(sent.source, sent.target) for sent in each.timeline.transfers}))
    return _trace(title, [*rows, *pairs], [span for each in passes for span in _drawn(each)])


def _drawn(one: Drawn) -> Iterator[_Span]:
    """The events of one pipeline, from its start."""
    timeline, more = one.timeline, {"of": one.name} if one.name else {}
    tasks = (
        _Span.of(f"stage {stage}", str(span.task), span.task.kind, span.start_seconds, span.end_seconds - span.start_seconds, **more)
        for stage, spans in enumerate(timeline.spans)
        for span in spans
    )
    sent = (
        _Span.of(_sends(each.source, each.target), f"result of {each.task}", "send", start, each.end_seconds - start, **more)
        for each in timeline.transfers
        for start in (each.start_seconds,)
    )
    moved = _us(one.start_seconds)
    for span in (*tasks, *_inside(timeline, one.insides), *sent):
        yield replace(span, begin=span.begin + moved, end=span.end + moved)


def _inside(timeline: Timeline, insides: Sequence[Inside]) -> Iterator[_Span]:
    """The events of each task, in the time of the task; of so many microbatches as viewers take."""
    loops = [_of_microbatch(inside.step) for inside in insides]
    most = max(1, MOST_EVENTS // max(1, sum(map(_size, loops))))
    splits = any(span.task.kind == "W" for spans in timeline.spans for span in spans)
    for stage, spans in enumerate(timeline.spans if insides else ()):
        for span in spans:
            kinds = "BW" if span.task.kind == "B" and not splits else span.task.kind  # the backward task has the gradients of weights, too
            events = tuple(event for event in loops[timeline.schedule.piece(stage, span.task.chunk)].events if event.task in kinds)
            if span.task.microbatch < most and events:
                yield from _squeezed(f"stage {stage}: ", events, span.start_seconds, span.end_seconds - span.start_seconds)


def _of_microbatch(step: Loop) -> Loop:
    """The trip of the loop over microbatches, whose events are parts of tasks; one without events where there is none."""
    loops = (event.loop for event in step.events if event.loop is not None and any(inner.task for inner in event.loop.events))
    return next(loops, Loop(1, 0.0, ()))


def _squeezed(row: str, events: Sequence[Event], start: float, seconds: float) -> Iterator[_Span]:
    """The events in so many seconds from a start, in proportion, without the time in which there is none of them."""
    edges, places = [0.0], [0.0]  # of the time in which there are some: moments in seconds, and how much of it is before each
    for event in sorted(events, key=lambda event: event.start_seconds):
        begin, end = max(event.start_seconds, edges[-1]), event.start_seconds + event.seconds
        if end > begin:
            edges += [begin, end]
            places += [places[-1], places[-1] + end - begin]
    scale = seconds / places[-1] if places[-1] else 0.0
    for span in _events(Loop(1, edges[-1], tuple(events)), 0.0, [MOST_EVENTS]):
        begin, end = (_us(start + scale * float(np.interp(moment * 1e-6, edges, places))) for moment in (span.begin, span.end))
        yield replace(span, row=row + span.row, begin=begin, end=end)


def _sends(source: int, target: int) -> str:
    return f"stage {source} sends to {target}"


def _trace(title: str, rows: Sequence[str], spans: Iterable[_Span]) -> dict[str, Any]:
    """The file's contents: names of rows, then events by row and time."""
    of_row: dict[str, list[_Span]] = {row: [] for row in rows}
    for span in spans:
        of_row[span.row].append(span)
    named, events = [_metadata("process_name", PROCESS, {"name": title})], []
    for number, (row, own) in enumerate(of_row.items(), 1):
        named.append(_metadata("thread_name", number, {"name": row}))
        named.append(_metadata("thread_sort_index", number, {"sort_index": number}))
        events += [_complete(span, number) for span in sorted(own, key=lambda span: (span.begin, -span.end))]
    return {"displayTimeUnit": "ms", "traceEvents": [*named, *events]}


def _metadata(name: str, row: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": PROCESS, "tid": row, "name": name, "args": args}


def _complete(span: _Span, row: int) -> dict[str, Any]:
    length = round(max(0.0, span.end - span.begin), 6)
    return {
        "ph": "X", "pid": PROCESS, "tid": row, "name": span.name, "cat": span.category, "ts": span.begin, "dur": length, "args": span.more
    }  # fmt: skip


def _us(seconds: float) -> float:
    """Microseconds, to the picosecond."""
    return round(seconds * 1e6, 6) if math.isfinite(seconds) else 0.0
