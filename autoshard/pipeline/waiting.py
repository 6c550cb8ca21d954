"""Bubbles of a pipeline's schedule, and what each stage waits for in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.pipeline.schedule import UPDATE, Kept, Task, alive_bytes
from autoshard.pipeline.simulation import Span, Timeline

REASONS = {
    "stage": "another stage's task",
    "transfer": "a transfer",
    "memory": "memory: a forward task is ready, and what it keeps has no room",
    "end": "the end of the step: all its tasks are done",
}
_SHORTEST = 1e-12  # seconds: rounding


@dataclass(frozen=True, slots=True)
class Wait:
    """A time in which a stage has nothing to do.

    Attributes:
        stage: the stage that waits.
        start_seconds, end_seconds: when.
        reason: one of `REASONS`.
        task: the task that it waits to start; None at the end.
        source: the stage whose task, or transfer, it waits for; None where it is none.
    """

    stage: int
    start_seconds: float
    end_seconds: float
    reason: str
    task: Task | None = None
    source: int | None = None

    @property
    def seconds(self) -> float:
        """How long."""
        return self.end_seconds - self.start_seconds

    def __str__(self) -> str:
        if self.reason in ("memory", "end"):
            return REASONS[self.reason]
        return f"{self.task} waits for {'a transfer from' if self.reason == 'transfer' else 'a task of'} stage {self.source}"


def waits(timeline: Timeline, pieces: Sequence[Kept]) -> tuple[Wait, ...]:
    """All bubbles of a timeline, stage by stage, in order; those with two reasons one after the other are two.

    Args:
        pieces: what a microbatch keeps of each.
    """
    return tuple(wait for stage in range(len(timeline.spans)) for wait in _Stage(timeline, pieces, stage).waits())


class _Stage:
    """The bubbles of one stage."""

    def __init__(self, timeline: Timeline, pieces: Sequence[Kept], stage: int):
        self.timeline, self.pieces, self.stage, self.schedule = timeline, pieces, stage, timeline.schedule
        self.sent = {(each.target, each.task.kind, each.task.microbatch): each for each in timeline.transfers}
        self.ends = {
            (self.schedule.piece(span.stage, span.task.chunk), span.task.kind, span.task.microbatch): span.end_seconds
            for spans in timeline.spans
            for span in spans
        }
        self.most = alive_bytes(self.schedule, pieces)[stage]

    def waits(self) -> Iterator[Wait]:
        spans, before, alive = self.timeline.spans[self.stage], 0.0, 0.0
        for k, span in enumerate(spans):
            if span.start_seconds - before > _SHORTEST:
                yield from self._before(span, before, spans[k:], alive)
            before, alive = span.end_seconds, alive + self._change(span.task)
        if self.timeline.makespan_seconds - before > _SHORTEST:
            yield Wait(self.stage, before, self.timeline.makespan_seconds, "end")

    def _change(self, task: Task) -> float:
        """Bytes that a task keeps, or frees."""
        piece = self.pieces[self.schedule.piece(self.stage, task.chunk)]
        late = piece.late_bytes if "W" in self.schedule.kinds else 0.0
        return {"F": piece.kept_bytes, "B": late - piece.kept_bytes, "W": -late, UPDATE: 0.0}[task.kind]

    def _before(self, span: Span, start: float, left: Sequence[Span], alive: float) -> Iterator[Wait]:
        """What a stage waits for before a task."""
        end, task = span.start_seconds, span.task
        held = (each.task for each in left[1:] if each.task.kind == "F" and self._arrival(each.task) <= start)
        if task.kind != "F" and any(alive + self._change(each) > self.most * (1 + 1e-9) for each in held):
            yield Wait(self.stage, start, end, "memory", task)
            return
        piece = self.schedule.piece(self.stage, task.chunk)
        source = self.schedule.stage(piece - 1 if task.kind == "F" else min(piece + 1, self.schedule.n_pieces - 1))
        sent = self.sent.get((piece, task.kind, task.microbatch))
        turn = end if sent is None else min(max(sent.start_seconds, start), end)
        if turn - start > _SHORTEST:
            yield Wait(self.stage, start, turn, "stage", task, source)
        if end - turn > _SHORTEST:
            yield Wait(self.stage, turn, end, "transfer", task, source)

    def _arrival(self, task: Task) -> float:
        """When what a forward task reads is there."""
        piece = self.schedule.piece(self.stage, task.chunk)
        sent = self.sent.get((piece, "F", task.microbatch))
        return sent.end_seconds if sent is not None else self.ends.get((piece - 1, "F", task.microbatch), 0.0)
