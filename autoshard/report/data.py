"""Everything that a report shows, as JSON: columns of numbers, and each text once.

The page's script reads it as it is: ``DATA`` in the files of ``autoshard/report/assets``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.cluster import Cluster
from autoshard.explanation import Explanation, Judged, TensorGroup
from autoshard.explanation.build import stages_of
from autoshard.explanation.explain_pipeline import pieces_of, timeline_of
from autoshard.explanation.groups import argument_groups, state_positions
from autoshard.explanation.stored import unpacked
from autoshard.ir import entry_axes
from autoshard.ir.words import spec_words
from autoshard.pipeline.waiting import waits
from autoshard.report.devices import devices_of, devices_of_stages
from autoshard.report.memory import GROUPS, MemoryCurve, memory_curve
from autoshard.report.program import Node, program
from autoshard.report.timeline import Event, Loop, timeline
from autoshard.strategy import PipelineRecord, Record


@dataclass(frozen=True, slots=True)
class Content:
    """What a report is made of.

    Attributes:
        record: the strategy.
        explanation: its sentences and tables.
        step: the events of a step; None where the program is not at hand.
        memory, program: as `step`.
        stages: what is inside each stage of a pipeline, whose programs are at hand, pass by pass over the microbatches.
        page: the data of its page, where a file kept it; None: made of the rest.
    """

    record: Record
    explanation: Explanation
    step: Loop | None = None
    memory: MemoryCurve | None = None
    program: Node | None = None
    stages: tuple[Content, ...] = ()
    page: Mapping[str, Any] | None = None


Programs = Sequence[tuple[Judged, Mapping[int, str]]]
"""The program of a step, or those of a pipeline's stages, each with the kind of task that runs an operation of it, if one does."""


def content_of(record: Record, explanation: Explanation, programs: Programs = ()) -> Content:
    """What a report on a strategy is made of; of a loaded record, whose programs are not known, what its file keeps."""
    if not programs and record.report:
        return _stored(record, explanation, {**unpacked(record.report)[1], "notes": list(record.assumptions)})
    inside = tuple(Content(each.record, explanation, timeline(each, kinds), memory_curve(each), program(each)) for each, kinds in programs)
    return inside[0] if inside and record.pipeline is None else Content(record, explanation, stages=inside)


def _stored(record: Record, explanation: Explanation, page: Mapping[str, Any]) -> Content:
    """What a report is made of whose page a file kept, with its events, of which a trace is made."""

    def steps(inside: Mapping[str, Any]) -> Loop | None:
        return None if inside["timeline"] is None else _events(inside["timeline"], page["texts"])

    saved = () if record.pipeline is None else [stage for own in record.pipeline.passes for stage in own.stages]
    parts = zip(saved[-len(page["stages"]) :], page["stages"], strict=False)  # of the last pass alone in files of earlier versions
    stages = tuple(Content(stage.record, explanation, steps(inside)) for stage, inside in parts)
    return Content(record, explanation, steps(page), stages=stages, page=page)


def to_data(content: Content) -> dict[str, Any]:
    """The data of a report."""
    if content.page is not None:
        return dict(content.page)
    record, found = content.record, content.explanation
    texts = Texts()
    data = {
        "title": found.title,
        "program": found.program,
        "cluster": found.cluster,
        "n_devices": found.n_devices,
        "has_program": found.has_program,
        "axes": [[name, size] for name, size in record.mesh.axes],
        "sentences": list(found.sentences),
        "figures": _figures(found),
        "notes": list(found.notes),
        **_inside(content, found, texts),
        "mesh": _mesh(record),
        "tensors": _tensors(record, found),
        "collectives": _collectives(found),
        "layers": _places(found.layers),
        "lines": _places(found.lines),
        "stages": [_inside(stage, found, texts) for stage in content.stages],
        "busiest": None if found.stages is None else found.stages.busiest_words,
        "schedule": None if record.pipeline is None else _schedules(record, record.pipeline),
    }
    return data | {"texts": texts.all}


def _inside(content: Content, found: Explanation, texts: Texts) -> dict[str, Any]:
    """What a program has inside: its timeline, memory and graph."""
    return {
        "meshAxes": [[name, size] for name, size in content.record.mesh.axes],
        "timeline": None if content.step is None else _loop(content.step, texts),
        "memory": None if content.memory is None else _memory(content.memory, found, texts),
        "graph": None if content.program is None else _graph(content.program, texts),
    }


class Texts:
    """Texts by number: each is written once."""

    def __init__(self):
        self._numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self._numbers.setdefault(text, len(self._numbers))

    @property
    def all(self) -> list[str]:
        """The texts in the order of their numbers."""
        return list(self._numbers)


def _short(number: float, digits: int = 6) -> float:
    """The number with so many significant digits, whole if it is."""
    rounded = float(f"{number:.{digits}g}")
    return int(rounded) if rounded == int(rounded) else rounded


def _figures(found: Explanation) -> dict[str, float]:
    time = found.time
    low, high = time.interval_seconds or (0.0, 0.0)
    return {
        "step": time.step_seconds,
        "low": low,
        "high": high,
        "compute": time.compute_seconds,
        "exposed": time.exposed_seconds,
        "hidden": time.hidden_seconds,
        "waiting": time.waiting_seconds,
        "matrix_share": time.matrix_share,
        "peak": found.peak_bytes,
        "limit": found.limit_bytes,
    }


def _loop(loop: Loop, texts: Texts) -> dict[str, Any]:
    """A loop's events in columns: start and duration in nanoseconds, and texts by their numbers."""
    events = loop.events
    return {
        "trips": loop.trips,
        "ns": _ns(loop.seconds),
        "start": [_ns(event.start_seconds) for event in events],
        "duration": [_ns(event.seconds) for event in events],
        "name": [texts(event.name) for event in events],
        "layer": [texts(event.layer) for event in events],
        "pass": [texts(event.stage) for event in events],
        "kind": [texts(event.kind) for event in events],
        "axes": [texts(",".join(event.axes)) for event in events],
        "bytes": [_short(event.bytes) for event in events],
        "exposed": [_ns(event.exposed_seconds) for event in events],
        "blocking": [int(event.is_blocking) for event in events],
        "loops": {str(k): _loop(event.loop, texts) for k, event in enumerate(events) if event.loop is not None},
    }


def _events(columns: Mapping[str, Any], texts: Sequence[str]) -> Loop:
    """The inverse of `_loop`, in whole nanoseconds."""
    words = ([texts[number] for number in columns[name]] for name in ("name", "layer", "pass", "kind", "axes"))
    rows = zip(columns["start"], columns["duration"], *words, columns["bytes"], columns["exposed"], columns["blocking"], strict=True)
    events = []
    for k, (start, duration, name, layer, stage, kind, axes, nbytes, exposed, blocking) in enumerate(rows):
        loop = _events(columns["loops"][str(k)], texts) if str(k) in columns["loops"] else None
        told = name, layer, stage, kind, tuple(axes.split(",")) if axes else ()
        events.append(Event(start / 1e9, duration / 1e9, *told, nbytes, exposed / 1e9, bool(blocking), loop))
    return Loop(columns["trips"], columns["ns"] / 1e9, tuple(events))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _memory(curve: MemoryCurve, found: Explanation, texts: Texts) -> dict[str, Any]:
    return {
        "groups": list(GROUPS),
        "limit": found.limit_bytes,
        "n_moments": curve.n_moments,
        "moment": [moment.number for moment in curve.moments],
        "at": [texts(moment.at) for moment in curve.moments],
        "bytes": [[_short(moment.bytes[k]) for moment in curve.moments] for k in range(len(GROUPS))],
        "fixed": [_short(nbytes, 3) for nbytes in curve.fixed],
        "peak": curve.peak,
        "alive": [[each.name, each.group, _short(each.bytes), each.n] for each in curve.alive[:400]],
    }


def _mesh(record: Record) -> dict[str, Any] | None:
    cluster, meshes = Cluster.from_dict(record.cluster), record.part_meshes
    found = devices_of(cluster, record.mesh) if record.pipeline is None else devices_of_stages(cluster, record.mesh, meshes)
    return found and {
        "wiring": found.wiring,
        "dimensions": list(found.dimensions),
        "rings": list(found.rings),
        "coordinates": [list(each) for each in found.coordinates],
        "links": [list(each) for each in found.links],
    }


def _tensors(record: Record, found: Explanation) -> list[list[Any]]:
    """Arguments, those that differ by indices on one row: name, kind, number, shape, dtype, spec, bytes of a device and of all, axes."""
    state = {record.arguments[at].path for at in state_positions(record, None)}
    rows = []
    for group in argument_groups(record.arguments, record.mesh):
        kind = "state" if not state.isdisjoint(group.paths) else "input"
        rows.append(_tensor(group, kind))
    return rows + [_tensor(group, "activation") for group in found.activations]


def _tensor(group: TensorGroup, kind: str) -> list[Any]:
    axes = [axis for entry in group.spec for axis in entry_axes(entry)]
    shape = " x ".join(map(str, group.shape)) or "scalar"
    known = group.name, kind, group.n + group.alike, shape, group.dtype, spec_words(group.spec)
    return [*known, _short(group.bytes), _short(group.whole_bytes), axes]


def _collectives(found: Explanation) -> list[list[Any]]:
    """Kind, axes, bytes, count, seconds, exposed seconds, tensor, source, cause and layer of each group."""
    return [
        [each.kind, list(each.axes), _short(each.bytes), each.count, _short(each.seconds), _short(each.exposed_seconds)]
        + [each.tensor, each.source, each.cause, each.layer]
        for each in found.collectives
    ]


def _places(places: Iterable[Any]) -> list[list[Any]]:
    """Name, compute, communication and exposed seconds of each place."""
    return [[each.name, _short(each.compute_seconds), _short(each.communication_seconds), _short(each.exposed_seconds)] for each in places]


def _graph(node: Node, texts: Texts) -> dict[str, Any]:
    """A node with its children; fields that say nothing are left out."""
    whole: Mapping[str, Any] = {
        "n": texts(node.name),
        "k": node.kind,
        "r": node.row,
        "x": node.repeats,
        "c": _short(node.compute_seconds, 4),
        "s": _short(node.communication_seconds, 4),
        "a": [_short(share, 3) for share in node.axes],
        "v": node.result,
        "e": [[a, b, _short(nbytes, 3)] for a, b, nbytes in node.edges],
        "i": [_graph(child, texts) for child in node.children],
    }
    return {key: value for key, value in whole.items() if value or key == "n"}


def _schedules(record: Record, pipeline: PipelineRecord) -> dict[str, Any]:
    """A pipeline's schedule, with those of earlier passes over the microbatches where there are some."""
    earlier = [_schedule(record, own) for own in pipeline.earlier]
    return _schedule(record, pipeline) | ({"earlier": earlier} if earlier else {})


def _schedule(record: Record, pipeline: PipelineRecord) -> dict[str, Any]:
    """The schedule of one pass: per stage its tasks, and what they need of memory."""
    timeline = timeline_of(record, pipeline)
    return {
        "name": timeline.schedule.name,
        "n_microbatches": timeline.schedule.n_microbatches,
        "n_chunks": timeline.schedule.n_chunks,
        "parts": [pipeline.part(stage) for stage in range(len(pipeline.stages))],
        "waiting": list(stages_of(record, pipeline).idle_shares),
        "ns": _ns(timeline.makespan_seconds),
        "stages": [
            {
                "kind": "".join(span.task.kind for span in spans),
                "microbatch": [span.task.microbatch for span in spans],
                "chunk": [span.task.chunk for span in spans],
                "start": [_ns(span.start_seconds) for span in spans],
                "duration": [_ns(span.end_seconds - span.start_seconds) for span in spans],
            }
            for spans in timeline.spans
        ],
        "waits": [[wait.stage, _ns(wait.start_seconds), _ns(wait.seconds), str(wait)] for wait in waits(timeline, pieces_of(pipeline))],
        "pieces": [
            [str(stage.record.mesh), stage.record.mesh.size, stage.forward_seconds, stage.backward_seconds + stage.weights_seconds]
            + [stage.after_seconds, max(stage.send_seconds, stage.send_back_seconds), stage.residual_bytes, stage.peak_bytes]
            + [stage.update_seconds]
            for stage in pipeline.stages
        ],
    }
