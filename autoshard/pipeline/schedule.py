"""Schedules of pipelines: which task each stage runs after which, and what that takes of memory.

A step on a pipeline has one forward task (``F``) and one backward task (``B``) per piece of the program and microbatch. Where a schedule
splits the backward pass, ``B`` computes the gradient of the piece's input, which the previous piece needs, and ``W`` the gradient of its
weights, which is needed at the end of the step alone. A schedule is one order of tasks per stage; a stage runs one task at a time. Piece
``p`` is on stage ``p mod S``: with one chunk a stage, pieces and stages are the same.

- ``gpipe``: all forward tasks, then all backward tasks (Huang et al., GPipe, 2019). Every microbatch is in flight.
- ``1f1b``: at most ``S - s`` microbatches in flight on stage ``s`` (Narayanan et al., PipeDream, 2019).
- ``interleaved``: 1F1B with several chunks a stage, whose bubble is smaller (Narayanan et al., Efficient Large-Scale Language Model
  Training on GPU Clusters Using Megatron-LM, 2021).
- ``zero_bubble``: ``W`` tasks fill the time in which a stage would be idle, within the memory of 1F1B's first stage: ZB-H1 (Qi et al.,
  Zero Bubble Pipeline Parallelism, 2023).

Laws: every task runs once on every stage; no task waits for one that waits for it (`autoshard.pipeline.simulation`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.errors import PipelineError

KINDS = ("F", "B", "W")
SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")

ONE_PROGRAM = {"one_program": (1,), "one_program_interleaved": (1, 2)}
"""The schedules of stages that are one program, with the numbers of rounds that are tried (`autoshard.pipeline.one_program`)."""


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One task of a stage: ``F``, ``B`` or ``W``, the number of its microbatch, and the chunk of the stage that it belongs to."""

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.microbatch}" + (f" of chunk {self.chunk}" if self.chunk else "")


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of tasks of each stage.

    Attributes:
        name: one of `SCHEDULES`, or a name of one's own.
        orders: one order a stage.

    Raises:
        PipelineError: a task is missing, or is there twice. Orders that wait for each other are refused where they are simulated or run.
    """

    name: str
    orders: tuple[tuple[Task, ...], ...]

    def __post_init__(self):
        everything = {Task(kind, i, c) for kind in self.kinds for i in range(self.n_microbatches) for c in range(self.n_chunks)}
        for stage, order in enumerate(self.orders):
            if len(order) != len(everything) or set(order) != everything:
                wrong = sorted(everything.symmetric_difference(order)) or [task for task in order if order.count(task) > 1]
                raise PipelineError(
                    f"A schedule has each task of each microbatch once on every stage; stage {stage} of {self.name!r} has it otherwise for "
                    f"{wrong[0] if wrong else 'nothing'}. Give every stage the same tasks."
                )

    @property
    def n_stages(self) -> int:
        """The number of stages."""
        return len(self.orders)

    @property
    def n_chunks(self) -> int:
        """The number of chunks that each stage has."""
        return 1 + max((task.chunk for order in self.orders for task in order), default=0)

    @property
    def n_microbatches(self) -> int:
        """The number of microbatches."""
        return 1 + max((task.microbatch for order in self.orders for task in order), default=-1)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of its tasks: without ``W``, the backward tasks compute the gradients of weights as well."""
        return KINDS if any(task.kind == "W" for order in self.orders for task in order) else KINDS[:2]


# -- orders ---------------------------------------------------------------------------------------------------------------


def schedule_of(name: str, n_stages: int, n_microbatches: int, n_chunks: int | None = None) -> Schedule:
    """The schedule of a name from `SCHEDULES`.

    ``n_chunks`` is the number of chunks a stage: 2 for ``interleaved`` where not given, and 1 for every other schedule.

    Raises:
        PipelineError: the name is unknown, a number is not positive, or the schedule has no such number of chunks or microbatches.

    >>> [str(task) for task in schedule_of("1f1b", 2, 3).orders[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    chunks = n_chunks if n_chunks is not None else 2 if name == "interleaved" else 1
    _check(name, n_stages, n_microbatches, chunks)
    if name == "gpipe":
        orders = [_gpipe(n_microbatches)] * n_stages
    elif name == "1f1b":
        orders = [_one_forward_one_backward(n_stages - 1 - s, n_microbatches) for s in range(n_stages)]
    elif name == "interleaved":
        orders = [_interleaved(s, n_stages, n_microbatches, chunks) for s in range(n_stages)]
    else:
        orders = [_zero_bubble(s, n_stages, n_microbatches) for s in range(n_stages)]
    return Schedule(name, tuple(tuple(order) for order in orders))


def has_schedule(name: str, n_stages: int, n_microbatches: int) -> bool:
    """Whether there is a schedule of these numbers."""
    return name != "interleaved" or n_microbatches % n_stages == 0


def _check(name: str, n_stages: int, n_microbatches: int, n_chunks: int) -> None:
    if name not in SCHEDULES:
        raise PipelineError(f"A schedule is one of {', '.join(SCHEDULES)}; got {name!r}.")
    for what, n in (("stages", n_stages), ("microbatches", n_microbatches), ("chunks", n_chunks)):
        if n < 1:
            raise PipelineError(f"A pipeline has at least one of its {what}; got {n}.")
    if name != "interleaved" and n_chunks != 1:
        raise PipelineError(f"Schedule {name!r} has one chunk a stage; got {n_chunks}. Use 'interleaved' for several.")
    if n_chunks > 1 and not has_schedule(name, n_stages, n_microbatches):
        raise PipelineError(
            f"An interleaved schedule needs a number of microbatches that its stages divide; got {n_microbatches} microbatches on "
            f"{n_stages} stages. Use a multiple of {n_stages}, or another schedule."
        )


def _gpipe(n_microbatches: int) -> list[Task]:
    return [Task(kind, i) for kind in ("F", "B") for i in range(n_microbatches)]


def _one_forward_one_backward(warm: int, n_microbatches: int) -> list[Task]:
    """``warm`` forward tasks, then forward and backward in turns, then what is left of backward tasks."""
    forward = [Task("F", i) for i in range(n_microbatches)]
    backward = [Task("B", i) for i in range(n_microbatches)]
    return _in_turns(forward, backward, min(warm, n_microbatches))


def _interleaved(stage: int, n_stages: int, n_microbatches: int, n_chunks: int) -> list[Task]:
    """Chunk by chunk in groups of as many microbatches as there are stages; backward tasks have the chunks in reverse."""
    if n_chunks == 1:
        return _one_forward_one_backward(n_stages - 1 - stage, n_microbatches)
    order = in_groups(n_stages, n_microbatches, n_chunks)
    forward = [Task("F", i, c) for i, c in order]
    backward = [Task("B", i, n_chunks - 1 - c) for i, c in order]
    warm = 2 * (n_stages - 1 - stage) + (n_chunks - 1) * n_stages
    return _in_turns(forward, backward, min(warm, len(forward)))


def in_groups(n_stages: int, n_microbatches: int, n_chunks: int) -> list[tuple[int, int]]:
    """Microbatch and chunk of each forward task of a stage: chunk by chunk in groups of as many microbatches as there are stages.

    >>> in_groups(2, 4, 2)
    [(0, 0), (1, 0), (0, 1), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)]
    """
    groups = [range(first, min(first + n_stages, n_microbatches)) for first in range(0, n_microbatches, n_stages)]
    return [(i, c) for group in groups for c in range(n_chunks) for i in group]


def _in_turns(forward: list[Task], backward: list[Task], warm: int) -> list[Task]:
    turns = [task for pair in zip(forward[warm:], backward, strict=False) for task in pair]
    return [*forward[:warm], *turns, *backward[len(forward) - warm :]]


def _zero_bubble(stage: int, n_stages: int, n_microbatches: int) -> list[Task]:
    """ZB-H1: 1F1B in which stage ``s`` computes the gradients of weights ``s`` microbatches later, until no forward task is left.

    So every stage has ``S`` microbatches at most without them, and those left over fill the time in which it waits at the end.
    """
    warm, late = min(n_stages - stage, n_microbatches), 0
    order = [Task("F", i) for i in range(warm)]
    for i in range(n_microbatches):
        order.append(Task("B", i))
        has_forward = warm + i < n_microbatches
        if i - late >= stage or not has_forward:
            order.append(Task("W", late))
            late += 1
        if has_forward:
            order.append(Task("F", warm + i))
    return [*order, *(Task("W", i) for i in range(late, n_microbatches))]


# -- memory ---------------------------------------------------------------------------------------------------------------


def in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage the most microbatches whose residuals are alive at once, those of all its chunks added up.

    They are alive from the microbatch's forward task to the end of its last backward task.

    >>> in_flight(schedule_of("1f1b", 4, 8)), in_flight(schedule_of("gpipe", 4, 8))
    ((4, 3, 2, 1), (8, 8, 8, 8))
    """
    ones = [1.0] * (schedule.n_stages * schedule.n_chunks)
    return tuple(round(n) for n in residual_bytes(schedule, ones))


def pieces_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per piece the most microbatches of its own whose residuals are alive at once.

    >>> pieces_in_flight(schedule_of("interleaved", 2, 4))
    (4, 3, 2, 1)
    """
    n = schedule.n_stages * schedule.n_chunks
    found = (residual_bytes(schedule, [float(piece == own) for piece in range(n)])[own % schedule.n_stages] for own in range(n))
    return tuple(map(round, found))


def stages_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per stage the most microbatches whose residuals are alive at once, where those of all its chunks count as one microbatch.

    >>> stages_in_flight(schedule_of("interleaved", 2, 4))
    (3, 2)
    """
    return tuple(-(-n // schedule.n_chunks) for n in in_flight(schedule))


def residual_bytes(schedule: Schedule, piece_bytes: Sequence[float]) -> tuple[float, ...]:
    """Per stage the most bytes of residuals that are alive at once; ``piece_bytes[p]`` are those of piece ``p`` for one microbatch."""
    check_length("piece_bytes", piece_bytes, schedule)
    return tuple(max(_alive(schedule, s, piece_bytes), default=0.0) for s in range(schedule.n_stages))


def check_length(what: str, values: Sequence, schedule: Schedule) -> None:
    """Raises `ValueError` where there is not one entry for each piece of a schedule."""
    n_pieces = schedule.n_stages * schedule.n_chunks
    if len(values) != n_pieces:
        raise ValueError(f"{what} has one entry for each of {n_pieces} pieces ({schedule.n_chunks} on each stage); got {len(values)}.")


def _alive(schedule: Schedule, stage: int, piece_bytes: Sequence[float]) -> Iterator[float]:
    """Bytes alive after each task of a stage."""
    frees = schedule.kinds[-1]
    alive = 0.0
    for task in schedule.orders[stage]:
        change = piece_bytes[task.chunk * schedule.n_stages + stage]
        alive += change if task.kind == "F" else -change if task.kind == frees else 0.0
        yield alive
