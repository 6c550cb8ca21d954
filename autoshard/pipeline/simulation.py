"""Schedules of pipelines in time: a simulation from the seconds of tasks and transfers.

Laws: every task runs once; no task starts before what it needs has arrived; the makespan is at least the work of each stage and the
longest chain.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule import UPDATE, Schedule, Task


@dataclass(frozen=True, slots=True)
class PieceCosts:
    """Costs of the tasks of one piece of the program for one microbatch.

    Attributes:
        forward: seconds of ``F``.
        backward: of ``B``, the gradient of its input.
        weights: of ``W``, the gradient of its weights; a schedule without ``W`` tasks adds it to ``B``.
        kept_bytes: what ``F`` keeps for later tasks; without ``W`` tasks ``B`` frees it.
        late_bytes: what there is between ``B`` and ``W``, where the schedule has both.
        update: seconds of ``U``, once a step.
    """

    forward: float
    backward: float
    weights: float = 0.0
    kept_bytes: float = 1.0
    late_bytes: float = 1.0
    update: float = 0.0

    def divided(self, n: int) -> PieceCosts:
        """The costs of one of ``n`` equal parts of the piece."""
        return PieceCosts(*(getattr(self, field.name) / n for field in fields(self)))


@dataclass(frozen=True, slots=True)
class Span:
    """A task of a stage with its start and end in seconds."""

    stage: int
    task: Task
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Transfer:
    """What a task sends to a neighbouring piece, with the start and end of the transfer in seconds."""

    source: int
    target: int
    task: Task
    start_seconds: float
    end_seconds: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """A simulated schedule.

    Attributes:
        schedule: what was simulated.
        spans: the tasks of each stage, in order.
        transfers: what is sent between pieces, by start.
        dispatch_order: all tasks as (stage, task) by start, each after what it needs: an order in which one process can start them.
    """

    schedule: Schedule
    spans: tuple[tuple[Span, ...], ...]
    transfers: tuple[Transfer, ...]
    dispatch_order: tuple[tuple[int, Task], ...]

    @property
    def makespan_seconds(self) -> float:
        """The end of the last task."""
        return max(self.end_seconds, default=0.0)

    @property
    def end_seconds(self) -> tuple[float, ...]:
        """Per stage the end of its last task."""
        return tuple(spans[-1].end_seconds if spans else 0.0 for spans in self.spans)

    @property
    def busy_seconds(self) -> tuple[float, ...]:
        """Per stage the sum of its tasks."""
        return tuple(sum(span.end_seconds - span.start_seconds for span in spans) for spans in self.spans)

    @property
    def bubble_fraction(self) -> float:
        """The share of all stages' time until the makespan in which they are idle."""
        whole = self.makespan_seconds * len(self.spans)
        return max(1.0 - sum(self.busy_seconds) / whole, 0.0) if whole else 0.0


def simulate(
    schedule: Schedule,
    costs: Sequence[PieceCosts] | PieceCosts,
    transfer_seconds: Sequence[float] | float = 0.0,
    backward_transfer_seconds: Sequence[float] | float | None = None,
) -> Timeline:
    """The start and end of every task and transfer; O(number of tasks).

    Each stage runs its order, each task as soon as what it needs has arrived. Transfers run beside tasks, one at a time from one stage to
    another. Between pieces of the same stage nothing is sent.

    Args:
        schedule: the orders.
        costs: per piece, or one for all.
        transfer_seconds: per pair of neighbouring pieces (``p``, ``p + 1``) the seconds in which an activation is sent, or one for all.
        backward_transfer_seconds: the same for gradients of activations; as ``transfer_seconds`` where not given.

    Raises:
        PipelineError: the orders wait for each other in a circle.

    >>> timeline = simulate(Schedule.of_words("gpipe", ["FFFBBB"] * 2), PieceCosts(1.0, 2.0))
    >>> timeline.makespan_seconds, timeline.bubble_fraction
    (12.0, 0.25)
    """
    n_pieces = schedule.n_pieces
    pieces = [costs] * n_pieces if isinstance(costs, PieceCosts) else list(costs)
    if len(pieces) != n_pieces:
        raise ValueError(f"costs are of each of {n_pieces} pieces ({schedule.n_chunks} on each stage); got {len(pieces)}.")
    forward = per_boundary(transfer_seconds, n_pieces)
    backward = forward if backward_transfer_seconds is None else per_boundary(backward_transfer_seconds, n_pieces)
    return _Simulation(schedule, pieces, forward, backward).run()


def per_boundary(seconds: Sequence[float] | float, n_pieces: int) -> list[float]:
    """One number for each pair of neighbouring pieces."""
    each = [float(seconds)] * (n_pieces - 1) if isinstance(seconds, int | float) else [float(x) for x in seconds]
    if len(each) != n_pieces - 1:
        raise ValueError(f"one transfer for each of {n_pieces - 1} pairs of neighbouring pieces; got {len(each)}.")
    return each


class _Simulation:
    """The state of one simulation: where each stage is in its order, and when what was sent arrives."""

    def __init__(self, schedule: Schedule, pieces: list[PieceCosts], forward: list[float], backward: list[float]):
        self.schedule, self.pieces, self.sends = schedule, pieces, (forward, backward)
        self.n_stages, self.split = schedule.n_stages, "W" in schedule.kinds
        self.at = [0] * self.n_stages  # the next task of each stage's order
        self.free = [0.0] * self.n_stages
        self.link_free: dict[tuple[int, int], float] = {}
        self.arrived: dict[tuple[str, int, int], float] = {}  # (kind of the task that reads it, piece, microbatch): seconds
        self.spans: list[list[Span]] = [[] for _ in range(self.n_stages)]
        self.transfers: list[Transfer] = []
        self.started: list[Span] = []  # after those that each needs

    def run(self) -> Timeline:
        waiting = set(range(self.n_stages))
        while waiting:
            s = waiting.pop()
            order = self.schedule.orders[s]
            while self.at[s] < len(order) and (ready := self.ready(s, order[self.at[s]])) is not None:
                waiting.update(self.start(s, order[self.at[s]], ready))
                self.at[s] += 1
        if any(at < len(order) for at, order in zip(self.at, self.schedule.orders, strict=True)):
            self.refuse()
        transfers = sorted(self.transfers, key=lambda t: (t.start_seconds, t.source, t.target, t.task))
        order = sorted(self.started, key=lambda span: span.start_seconds)  # stable: tasks without duration stay after what they need
        return Timeline(self.schedule, tuple(map(tuple, self.spans)), tuple(transfers), tuple((span.stage, span.task) for span in order))

    def ready(self, stage: int, task: Task) -> float | None:
        """When what a task needs is there; None if that is not known yet."""
        piece = self.schedule.piece(stage, task.chunk)
        if task.kind == UPDATE or (task.kind == "F" and piece == 0):
            return 0.0  # an order has each U after what it needs
        return self.arrived.get((task.kind, piece, task.microbatch))

    def start(self, stage: int, task: Task, ready: float) -> list[int]:
        """Runs a task; returns the stages for which it makes something arrive."""
        piece = self.schedule.piece(stage, task.chunk)
        start = max(self.free[stage], ready)
        self.free[stage] = end = start + self.seconds(piece, task.kind)
        self.started.append(Span(stage, task, start, end))
        self.spans[stage].append(self.started[-1])
        if task.kind == "F" and piece == len(self.pieces) - 1:
            self.arrived["B", piece, task.microbatch] = end
            return [stage]
        if task.kind == "B":
            self.arrived["W", piece, task.microbatch] = end
        target = piece + 1 if task.kind == "F" else piece - 1
        if task.kind in ("W", UPDATE) or target < 0:
            return [stage]
        self.arrived[task.kind, target, task.microbatch] = self.send(piece, target, task, end)
        return [self.schedule.stage(target)]

    def seconds(self, piece: int, kind: str) -> float:
        times = self.pieces[piece]
        if kind in ("F", UPDATE):
            return times.forward if kind == "F" else times.update
        return times.weights if kind == "W" else times.backward + (0.0 if self.split else times.weights)

    def send(self, source: int, target: int, task: Task, end: float) -> float:
        """When what a task sends arrives: one transfer at a time from one stage to another."""
        seconds = self.sends[source > target][min(source, target)]
        link = self.schedule.stage(source), self.schedule.stage(target)
        if link[0] == link[1] or not seconds:
            return end
        start = max(end, self.link_free.get(link, 0.0))
        self.link_free[link] = start + seconds
        self.transfers.append(Transfer(source, target, task, start, start + seconds))
        return start + seconds

    def refuse(self) -> None:
        stuck = [
            f"stage {s} at {order[at]}" for s, (at, order) in enumerate(zip(self.at, self.schedule.orders, strict=True)) if at < len(order)
        ]
        raise PipelineError(
            f"A task of a schedule may only wait for tasks that come first; in {self.schedule.name!r} these wait for each other: "
            f"{', '.join(stuck)}. Change the order of one of these stages."
        )
