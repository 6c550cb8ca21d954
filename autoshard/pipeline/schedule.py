"""Schedules of pipelines: which task each stage runs after which, and what that takes of memory.

A step on a pipeline has one forward task (``F``) and one backward task (``B``) per piece of the program and microbatch. Where a schedule
splits the backward pass, ``B`` computes the gradient of the piece's input, which the previous piece needs, and ``W`` the gradient of its
weights, which is needed at the end of the step alone. After the last of these a piece may have one task more, ``U``: what follows for its
gradients and state without anything of other pieces, such as reductions over devices and updates. A schedule is one order of tasks per
stage; a stage runs one task at a time. A stage is a part of the devices, and has one piece of the program or several, its chunks
(`autoshard.ir.pieces`).

Orders are found by `autoshard.pipeline.scheduling`, and timed by `autoshard.pipeline.simulation`. Laws: every task runs once on every
stage, the microbatches of a chunk in order, and its ``U`` after them; no task waits for one that waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from autoshard.errors import PipelineError
from autoshard.ir.pieces import part_of, piece_of

KINDS = ("F", "B", "W")

UPDATE = "U"
"""The kind of task that a chunk has once."""

ONE_PROGRAM = {"one_program": (1,), "one_program_interleaved": (1, 2), "one_program_zero_bubble": (1, 2)}
"""The schedules of stages that are one program, with the numbers of rounds that are tried (`autoshard.rewrite.one_program`)."""

WEIGHTS_APART = "one_program_zero_bubble"
"""The one of these in which gradients of weights wait for those of inputs."""


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One task of a stage: ``F``, ``B`` or ``W``, the number of its microbatch, and the chunk of the stage that it belongs to.

    ``U`` is of all microbatches; its number is 0.
    """

    kind: str
    microbatch: int
    chunk: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.number}" + (f" of chunk {self.chunk}" if self.chunk else "")

    @property
    def number(self) -> str:
        """The number of its microbatch in words; none for what is of all."""
        return "" if self.kind == UPDATE else str(self.microbatch)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The order of tasks of each stage.

    Attributes:
        name: of the schedule.
        orders: one order a stage.
        placement: of the chunks on the stages, of `autoshard.ir.pieces.PLACEMENTS`.
        n_stages, n_chunks, n_microbatches: the number of stages, of chunks that each has, and of microbatches.
        kinds: of each microbatch's tasks: without ``W``, the backward tasks compute the gradients of weights as well.
        updates: whether each chunk has a task ``U``; without, what it does comes after all tasks.

    Raises:
        PipelineError: a task is missing, or is there twice. Orders that wait for each other are refused where they are simulated or run.
    """

    name: str
    orders: tuple[tuple[Task, ...], ...]
    placement: str = "loop"
    n_chunks: int = field(init=False, compare=False)
    n_microbatches: int = field(init=False, compare=False)
    kinds: tuple[str, ...] = field(init=False, compare=False)
    updates: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        tasks = {task for order in self.orders for task in order}
        n, chunks = (1 + max((getattr(task, name) for task in tasks), default=least) for name, least in (("microbatch", -1), ("chunk", 0)))
        kinds = KINDS if any(task.kind == "W" for task in tasks) else KINDS[:2]
        updates = [Task(UPDATE, 0, c) for c in range(chunks)] if any(task.kind == UPDATE for task in tasks) else []
        for name, value in (("n_microbatches", n), ("n_chunks", chunks), ("kinds", kinds), ("updates", bool(updates))):
            object.__setattr__(self, name, value)
        everything = {Task(kind, i, c) for kind in kinds for i in range(n) for c in range(chunks)}.union(updates)
        for stage, order in enumerate(self.orders):
            if len(order) != len(everything) or set(order) != everything:
                wrong = sorted(everything.symmetric_difference(order)) or [task for task in order if order.count(task) > 1]
                raise PipelineError(
                    f"A schedule has each task of each microbatch once on every stage; stage {stage} of {self.name!r} has it otherwise for "
                    f"{wrong[0] if wrong else 'nothing'}. Give every stage the same tasks."
                )
            last = {task.chunk: task for task in order}
            if early := [task for task in updates if last[task.chunk] != task]:
                raise PipelineError(
                    f"A schedule updates a chunk after its last gradients; stage {stage} of {self.name!r} has other tasks of the chunk "
                    f"after {early[0]}. Put it after them."
                )

    @property
    def n_stages(self) -> int:
        """The number of stages."""
        return len(self.orders)

    @property
    def n_pieces(self) -> int:
        """The number of pieces of the program: of all chunks of all stages."""
        return self.n_stages * self.n_chunks

    def piece(self, stage: int, chunk: int) -> int:
        """The piece of the program that is a chunk of a stage."""
        return piece_of(stage, chunk, self.n_stages, self.placement)

    def stage(self, piece: int) -> int:
        """The stage that has a piece."""
        return part_of(piece, self.n_stages, self.placement)

    def chunk(self, piece: int) -> int:
        """The chunk of its stage that a piece is."""
        return piece // self.n_stages

    # -- as text --------------------------------------------------------------------------------------------------------------

    @property
    def words(self) -> tuple[str, ...]:
        """Per stage its order as a word: the letter of each task, and where there are several chunks that of its chunk.

        >>> Schedule.of_words("mine", ["FFBFBB", "FBFBFB"]).words
        ('FFBFBB', 'FBFBFB')
        """
        chunk = [chr(ord("a") + c) if self.n_chunks > 1 else "" for c in range(self.n_chunks)]
        return tuple("".join(task.kind + chunk[task.chunk] for task in order) for order in self.orders)

    @classmethod
    def of_words(cls, name: str, words: Sequence[str], n_chunks: int = 1, placement: str = "loop") -> Schedule:
        """The schedule of such words; the microbatches of each chunk and kind of task are in order.

        Raises:
            PipelineError: as for the schedule, or a word has other letters.
        """
        return cls(name, tuple(tuple(_tasks(word, n_chunks)) for word in words), placement)


def _tasks(word: str, n_chunks: int) -> Iterator[Task]:
    """The tasks of an order's word."""
    counts: dict[tuple[str, int], int] = {}
    for k in range(0, len(word), 1 if n_chunks == 1 else 2):
        kind, chunk = word[k], 0 if n_chunks == 1 else ord(word[k + 1 : k + 2] or "?") - ord("a")
        if kind not in (*KINDS, UPDATE) or not 0 <= chunk < n_chunks:
            got = word[k : k + 2]
            raise PipelineError(f"An order is written in the letters F, B, W and U, each with one of {n_chunks} chunks; got {got!r}.")
        i = counts[kind, chunk] = counts.get((kind, chunk), -1) + 1
        yield Task(kind, i, chunk)


# -- memory ---------------------------------------------------------------------------------------------------------------


class Kept(Protocol):
    """What a microbatch keeps of a piece: from its forward task to the backward one, and between that and the one of weights."""

    @property
    def kept_bytes(self) -> float: ...

    @property
    def late_bytes(self) -> float: ...


def alive_bytes(schedule: Schedule, pieces: Sequence[Kept]) -> tuple[float, ...]:
    """Per stage the most bytes of residuals that are alive at once."""
    splits, found = "W" in schedule.kinds, [0.0] * schedule.n_stages
    for stage, order in enumerate(schedule.orders):
        alive = 0.0
        for task in order:
            piece = pieces[schedule.piece(stage, task.chunk)]
            late = piece.late_bytes if splits else 0.0
            alive += {"F": piece.kept_bytes, "B": late - piece.kept_bytes, "W": -late, UPDATE: 0.0}[task.kind]
            found[stage] = max(found[stage], alive)
    return tuple(found)


def pieces_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Per piece the most microbatches whose residuals are alive at once: from their forward task to the end of their last backward task.

    >>> pieces_in_flight(Schedule.of_words("mine", ["FFBFBB", "FBFBFB"]))
    (2, 1)
    """
    found = [0] * schedule.n_pieces
    for stage, order in enumerate(schedule.orders):
        alive = [0] * schedule.n_chunks
        for task in order:
            alive[task.chunk] += (task.kind == "F") - (task.kind == schedule.kinds[-1])
            piece = schedule.piece(stage, task.chunk)
            found[piece] = max(found[piece], alive[task.chunk])
    return tuple(found)
