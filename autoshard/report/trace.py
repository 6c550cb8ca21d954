"""A step's timeline as a trace file of Chrome's format, which ui.perfetto.dev and chrome://tracing open.

The format is "Trace Event Format" of the Catapult project: complete events (``"ph": "X"``) with times in microseconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from autoshard.pipeline.schedule import Timeline
from autoshard.report.timeline import Loop

MOST_EVENTS = 200_000  # viewers stay quick; loops beyond it are shown as one event
COMPUTE = 0  # the number of compute's row; each axis has the next


def step_trace(step: Loop, axes: Sequence[str], title: str) -> dict[str, Any]:
    """The trace of a step: one row for compute, and one for the links of each mesh axis."""
    rows = {COMPUTE: "compute"} | {k: f"links of axis {axis}" for k, axis in enumerate(axes, COMPUTE + 1)}
    numbers = {axis: k for k, axis in enumerate(axes, COMPUTE + 1)}
    budget = [MOST_EVENTS]
    return _trace([*_named(0, title, rows), *_events(step, 0.0, numbers, budget)])


def _events(loop: Loop, start: float, rows: dict[str, int], budget: list[int]) -> Iterator[dict[str, Any]]:
    for event in loop.events:
        begin, inner = start + event.start_seconds, event.loop
        budget[0] -= 1
        if inner is not None:
            yield _complete(f"{event.name}, {inner.trips} trips", "loop", begin, event.seconds, COMPUTE, layer=event.layer)
            if inner.trips * _size(inner) <= budget[0]:
                for trip in range(inner.trips):
                    yield from _events(inner, begin + trip * inner.seconds, rows, budget)
            continue
        more: dict[str, Any] = {"layer": event.layer, "pass": event.stage}
        if not event.axes:
            yield _complete(event.name, "compute", begin, event.seconds, COMPUTE, **more)
            continue
        more |= {"bytes": event.bytes, "axes": ", ".join(event.axes), "waiting_us": _us(event.exposed_seconds)}
        for axis in event.axes:
            yield _complete(f"{event.kind} of {event.name}", event.kind, begin, event.seconds, rows[axis], **more)


def _size(loop: Loop) -> int:
    return sum(1 if event.loop is None else event.loop.trips * _size(event.loop) for event in loop.events)


def pipeline_trace(timeline: Timeline, title: str) -> dict[str, Any]:
    """The trace of a pipeline's schedule: one row for each stage, and one for what each stage sends to another."""
    stages = {k: f"stage {k}" for k in range(len(timeline.spans))}
    pairs = sorted({(each.source, each.target) for each in timeline.transfers})
    rows = {pair: len(stages) + k for k, pair in enumerate(pairs)}
    named = _named(0, title, stages | {row: f"stage {source} sends to {target}" for (source, target), row in rows.items()})
    tasks = (
        _complete(str(span.task), span.task.kind, span.start_seconds, span.end_seconds - span.start_seconds, stage)
        for stage, spans in enumerate(timeline.spans)
        for span in spans
    )
    sent = (
        _complete(
            f"result of {each.task}", "send", each.start_seconds, each.end_seconds - each.start_seconds, rows[each.source, each.target]
        )
        for each in timeline.transfers
    )
    return _trace([*named, *tasks, *sent])


def _trace(events: list[dict[str, Any]]) -> dict[str, Any]:
    return {"displayTimeUnit": "ms", "traceEvents": events}


def _named(process: int, title: str, rows: dict[int, str]) -> Iterator[dict[str, Any]]:
    yield {"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": title}}
    for row, name in rows.items():
        yield {"ph": "M", "pid": process, "tid": row, "name": "thread_name", "args": {"name": name}}
        yield {"ph": "M", "pid": process, "tid": row, "name": "thread_sort_index", "args": {"sort_index": row}}


def _complete(name: str, category: str, start: float, seconds: float, row: int, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "pid": 0, "tid": row, "name": name, "cat": category, "ts": _us(start), "dur": _us(seconds), "args": more}


def _us(seconds: float) -> float:
    """Microseconds, to the picosecond."""
    return round(seconds * 1e6, 6) if math.isfinite(seconds) else 0.0
