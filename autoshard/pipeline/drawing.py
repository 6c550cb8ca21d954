"""Timelines of pipelines as text."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.pipeline.schedule import UPDATE, Task
from autoshard.pipeline.simulation import Span, Timeline

_MOST_UNEQUAL = 8  # tasks shorter than this part of the longest one lose their label, so that lines do not grow with the ratio
_CUT = " ~ "
_NOTHING = 1e-15  # seconds; a timeline of nothing longer is empty


def draw(timeline: Timeline, width: int = 100) -> str:
    """The timeline as text: a line for each stage, time from left to right, at most ``width`` columns.

    ``F3`` is the forward task of microbatch 3 and lasts to the end of its dashes, ``B3`` its backward task, ``W3`` the gradient of its
    weights, ``U`` what follows once for gradients and state; dots are idle time. Letters after these are chunks. Where a line is too long,
    its middle is left out.

    >>> from autoshard.pipeline.schedule import Schedule
    >>> from autoshard.pipeline.simulation import simulate, PieceCosts
    >>> print(draw(simulate(Schedule.of_words("1f1b", ["FFBB", "FBFB"]), PieceCosts(1.0, 2.0))))
    stage 0  F0 F1 ......B0--- ...B1---
    stage 1  ...F0 B0--- F1 B1--- ......
    """
    spans = [span for each in timeline.spans for span in each]
    seconds = [span.end_seconds - span.start_seconds for span in spans if span.task.kind != UPDATE]
    longest = max(seconds, default=0.0)
    label = max((len(_label(span.task, timeline)) for span in spans), default=0)
    shortest = min((x for x in seconds if x >= longest / _MOST_UNEQUAL and x > _NOTHING), default=1.0)
    rows = [_row(each, timeline, (label + 1) / shortest) for each in timeline.spans]
    names = [f"stage {s}" for s in range(len(rows))]
    left = max(map(len, names), default=0) + 2
    return "\n".join((name.ljust(left) + _without_middle(row, width - left)).rstrip() for name, row in zip(names, rows, strict=True))


def _label(task: Task, timeline: Timeline) -> str:
    chunk = chr(ord("a") + task.chunk) if timeline.schedule.n_chunks > 1 else ""
    return f"{task.kind}{task.number}{chunk}"


def _row(spans: Sequence[Span], timeline: Timeline, columns_per_second: float) -> str:
    """One stage's line."""
    row = ""
    for span in spans:
        start, end = round(span.start_seconds * columns_per_second), round(span.end_seconds * columns_per_second)
        room = end - max(start, len(row))
        row = row.ljust(start, ".")
        row += (_label(span.task, timeline)[:room].ljust(room - 1, "-") + " ")[:room] if room > 0 else ""
    return row.ljust(round(timeline.makespan_seconds * columns_per_second), ".")


def _without_middle(row: str, width: int) -> str:
    if len(row) <= width:
        return row
    tail = (width - len(_CUT)) // 2
    return row[: width - len(_CUT) - tail] + _CUT + row[len(row) - tail :]
