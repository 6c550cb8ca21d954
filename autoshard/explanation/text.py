"""An `Explanation` as the parts of a report, which a terminal and a notebook show, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

from autoshard.explanation.data import Axis, Explanation, Place, TensorGroup
from autoshard.ir.words import array_type, spec_words
from autoshard.render import Bar, Bars, Heading, Paragraph, Part, Table, format_bytes, format_count, format_percent, format_seconds
from autoshard.strategy.record import plain

TOP = 12  # rows of a table
LEAST = 1e-6  # of the step: what takes less has no row

Row = TypeVar("Row")

WITHOUT_PROGRAM = (
    "This strategy came from a file: compute by layer, activations and memory by group need its program. In Python: "
    "strategy.with_program(fn, *args).explain(); on the command line: autoshard explain FILE MODULE:FUNCTION --args MODULE:NAME."
)


def to_json(found: Explanation) -> str:
    """The explanation as JSON, its fields by name."""
    return json.dumps(plain(found), indent=1, allow_nan=False)


def body(found: Explanation, arguments: Sequence[Part]) -> list[Part]:
    """Everything else, from the whole to the details.

    Args:
        arguments: the sections on the arguments.
    """
    return [
        *_bars(found),
        *_places("By layer", "layer", found.layers, found),
        *_places("By source line", "line", found.lines, found),
        *_mesh(found),
        *arguments,
        *_activations(found.activations),
        *_memory(found),
        *_collectives(found),
        *_repeated(found),
        *([] if found.has_program else [Paragraph(WITHOUT_PROGRAM)]),
        *([Heading("Notes"), *(Paragraph(f"- {note}") for note in found.notes)] if found.notes else []),
    ]


def format_spec(spec: tuple[Any, ...]) -> str:
    """The spec as one writes it: ``P('data', None)``; ``replicated`` where nothing is sharded."""
    return spec_words(spec) if any(entry is not None for entry in spec) else "replicated"


def _bars(found: Explanation) -> list[Part]:
    time, whole = found.time, found.time.step_seconds or 1.0
    spans = [("compute", time.compute_seconds), ("communication, exposed", time.exposed_seconds)]
    waiting = "waiting" if found.stages is None else "waiting for other stages"
    more = (("communication, overlapped", time.hidden_seconds), (waiting, time.waiting_seconds))
    spans += [(label, seconds) for label, seconds in more if seconds > LEAST * whole]
    bars = (Bar(label, seconds / whole, f"{format_seconds(seconds)}  {format_percent(seconds / whole)}") for label, seconds in spans)
    of = "" if found.stages is None else f" on {found.stages.busiest_words}, the busiest"
    return [Heading(f"Where the time goes{of}"), Bars(tuple(bars))]


def _places(title: str, column: str, places: Sequence[Place], found: Explanation) -> list[Part]:
    step = found.time.step_seconds or 1.0
    shown, rest = _cut([place for place in places if max(place.seconds, place.communication_seconds) > LEAST * step])
    if not shown:
        return []

    def row(place: Place) -> tuple[str, ...]:
        compute = (format_seconds(place.compute_seconds), format_seconds(place.product_seconds)) if found.has_program else ()
        own = (format_seconds(place.communication_seconds), format_seconds(place.exposed_seconds), format_percent(place.seconds / step))
        return place.name, *compute, *own

    notes = [f"{format_count(len(rest))} more take {format_seconds(sum(place.seconds for place in rest))}."] if rest else []
    columns = (column, *((">compute", ">in products") if found.has_program else ()), ">communication", ">exposed", ">of the step")
    return [Heading(title), Table(columns, tuple(map(row, shown)), tuple(notes))]


def _mesh(found: Explanation) -> list[Part]:
    rows = tuple(
        (
            axis.name,
            str(axis.size),
            axis.place,
            "yes" if axis.splits_inputs else "no",
            _state_words(axis),
            format_seconds(axis.communication_seconds),
            format_seconds(axis.exposed_seconds),
        )
        for axis in found.mesh
    )
    columns = ("axis", ">devices", "on the cluster", "inputs split", ">state split", ">communication", ">exposed")
    note = f"'on the cluster' counts the dimensions of {found.cluster} from the outermost, the slowest."
    return [Heading("Mesh"), Table(columns, rows, (note,))] if rows else []


def _state_words(axis: Axis) -> str:
    """How much of the state an axis splits, in words."""
    if axis.divides_program:
        return "by stage"
    return format_percent(axis.state_share) if axis.state_share else "no"


def argument_parts(groups: Sequence[TensorGroup], title: str = "Arguments") -> list[Part]:
    """The section on how arguments are sharded; none where there are none."""
    rows = tuple(
        (
            f"{group.name} x {group.n}" if group.n > 1 else group.name,
            f"{group.alike}" if group.alike else "",
            array_type(group.dtype, group.shape),
            format_spec(group.spec),
            format_bytes(group.bytes),
        )
        for group in groups
    )
    notes = [f"{format_bytes(sum(group.bytes for group in groups))} a device in all. '*' stands for every index."]
    if any(group.alike for group in groups):
        notes.append("'more' are of the same ending, shape and sharding, such as an optimizer's moments of a parameter.")
    return [Heading(title), Table(("path", ">more", "whole", "sharded", ">bytes a device"), rows, tuple(notes))] if rows else []


def _activations(groups: Sequence[TensorGroup]) -> list[Part]:
    shown, rest = _cut(groups)
    rows = tuple(
        (group.name, str(group.n), array_type(group.dtype, group.shape), format_spec(group.spec), format_bytes(group.bytes))
        for group in shown
    )
    notes = [f"{format_count(len(rest))} more groups have {format_bytes(sum(group.bytes for group in rest))}."] if rest else []
    notes.append("What the forward pass stores, over the whole step; not all of it is there at once.")
    columns = ("made by", ">n", "whole", "sharded", ">bytes a device")
    return [Heading("Activations"), Table(columns, rows, tuple(notes))] if rows else []


def _memory(found: Explanation) -> list[Part]:
    limit = f"{format_percent(found.peak_bytes / found.limit_bytes)} of the {format_bytes(found.limit_bytes)} that a program may have"
    whole = f"{format_bytes(found.peak_bytes)} a device at the fullest moment, {limit}."
    shown, rest = _cut(found.memory)
    rows = tuple((group.kind, group.name, str(group.n), format_bytes(group.bytes)) for group in shown)
    notes = (f"{format_count(len(rest))} more groups have {format_bytes(sum(group.bytes for group in rest))}.",) if rest else ()
    table = [Table(("kind", "what", ">arrays", ">bytes"), rows, notes)] if rows else []
    return [Heading("Memory"), Paragraph(whole), *table]


def _collectives(found: Explanation) -> list[Part]:
    """The dearest collectives with what they move, for whom and why."""
    if not found.collectives:
        return [Heading("Collectives"), Paragraph("None are predicted.")]
    shown, rest = _cut(found.collectives)
    rows = tuple(
        (
            group.kind,
            ", ".join(group.axes),
            format_bytes(group.bytes),
            format_count(group.count),
            format_seconds(group.seconds),
            format_seconds(group.exposed_seconds),
            blame(group.tensor, group.source, group.cause),
        )
        for group in shown
    )
    count = sum(group.count for group in found.collectives)
    notes = [
        f"{format_count(count)} in a step, {format_seconds(sum(group.seconds for group in found.collectives))} in all.",
        "'exposed' is the part of the seconds that no compute hides.",
    ]
    if abs(found.compiled_bytes - found.sent_bytes) > LEAST * found.sent_bytes:
        compiled, sent = format_bytes(found.compiled_bytes), format_bytes(found.sent_bytes)
        notes.append(
            f"Bytes are of the program's own types. Compiled, {compiled} are sent in a step instead of {sent}, as verify shows: XLA:TPU "
            "sends float32 that is only read as bfloat16 as that. Seconds are those of what is sent."
        )
    if rest:
        left = f"{format_count(sum(group.count for group in rest))} more take {format_seconds(sum(group.seconds for group in rest))}."
        notes.append(left)
    columns = ("kind", "axes", ">bytes", ">count", ">seconds", ">exposed", "what, for whom, why")
    return [Heading("Collectives"), Table(columns, rows, tuple(notes))]


def blame(tensor: str, source: str, cause: str) -> str:
    """The three of them a line each, as far as they are known."""
    return "\n".join(filter(None, (tensor, f"for {source}" if tensor else source, cause)))


def _repeated(found: Explanation) -> list[Part]:
    if not found.repeated:
        return []
    rows = tuple(
        (
            work.axis,
            str(work.size),
            format_seconds(work.seconds),
            format_seconds(work.saved_seconds),
            ", ".join(f"{layer} {format_seconds(seconds)}" for layer, seconds in work.layers),
        )
        for work in found.repeated
    )
    note = "Every device of the axis computes the same there; 'saved' is what splitting all of it would save at most."
    return [Heading("Repeated work"), Table(("axis", ">devices", ">compute", ">saved", "where"), rows, (note,))]


def _cut(rows: Sequence[Row]) -> tuple[Sequence[Row], Sequence[Row]]:
    """The first rows, and those that are left out: none where only one would be."""
    return (rows, ()) if len(rows) <= TOP + 1 else (rows[:TOP], rows[TOP:])
