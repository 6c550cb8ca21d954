"""One call of a pipelined step: the arrays that it has, and the programs that it starts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
from jax.sharding import NamedSharding

from autoshard.errors import PipelineError
from autoshard.pipeline.programs import Outer, StagePrograms, TaskProgram
from autoshard.pipeline.schedule import Schedule, Task
from autoshard.pipeline.sending import Copies, Sending
from autoshard.pipeline.stages import Staged
from autoshard.progress import Progress


class Run(Protocol):
    """What a call reads of the step that is called (`autoshard.pipeline.run.Pipelined`)."""

    staged: Staged
    schedule: Schedule
    is_here: list[bool]
    _programs: list[StagePrograms]
    _indices: list[list[Any]]
    _arguments: list[tuple[int, int, int, Sending | None]]
    _moved: Copies
    _results: list[tuple[NamedSharding, Callable[[Any], Any]]]


@dataclass(frozen=True, slots=True, eq=False)
class Send:
    """A message among the results of a program.

    Attributes:
        place: its position there.
        target, position: the stage that receives it, and the position among what that receives.
        placed: its way there.
    """

    place: int
    target: int
    position: int
    placed: Sending


@dataclass(frozen=True, slots=True, eq=False)
class Start:
    """A task as it is started: its program, where it runs, and what is dropped after it."""

    piece: int
    stage: int
    task: Task
    program: TaskProgram | None
    sends: tuple[Send, ...]
    copies: Copies
    drops: tuple[int, ...]  # positions of messages that no later task reads
    frees: tuple[str, ...]  # kinds of tasks whose residuals no later task reads


@dataclass(frozen=True, slots=True, eq=False)
class StartAround:
    """A program around the loop as it is started: the piece that has it, its number among the piece's own, and what it sends."""

    piece: int
    number: int
    outer: Outer
    sends: tuple[Send, ...]
    copies: Copies


class Call:
    """The arrays of one call."""

    def __init__(self, run: Run, arguments: Sequence[Any], waits: bool, progress: Progress | None = None):
        self.run, self.waits, self.progress = run, waits, progress
        self.met: set[Any] = set()  # programs that were compiled, where somebody is told
        self.placed: dict[tuple[int, int], Any] = {}  # arguments, and messages outside the loop
        homes = run.staged.argument_homes
        moved = [(piece, k, arguments[at] if run.is_here[homes[at]] else None) for piece, k, at, way in run._arguments if way is not None]
        for (piece, k, _), x in zip(moved, run._moved([x for *_, x in moved]), strict=True):
            self.placed[piece, k] = x
        for piece, k, position, way in run._arguments:
            if way is None and run.is_here[piece]:
                self.placed[piece, k] = arguments[position]
        n = len(run.staged.stages)
        self.arrived: list[dict[tuple[int, int], Any]] = [{} for _ in range(n)]  # per position and microbatch
        self.handed: list[dict[int, tuple]] = [{} for _ in range(n)]
        self.sent: dict[tuple[int, int], Sequence[Any]] = {}  # by programs around the loop, until it is
        self.constants: list[tuple] = [()] * n
        self.totals: list[dict[str, tuple]] = [{} for _ in range(n)]
        self.residuals: list[dict[tuple[str, int], tuple]] = [{} for _ in range(n)]
        self.made: dict[int, Any] = {}

    def around(self, start: StartAround) -> None:
        """Runs a program before or after the loop, and sends what it makes."""
        self.compute(start)
        self.send(start)

    def compute(self, start: StartAround) -> None:
        """Runs such a program."""
        run, piece, outer = self.run, start.piece, start.outer
        if not run.is_here[piece]:
            return
        if self.progress is not None:
            self._tell(piece, "what comes around the loop over microbatches", outer.call)
        n_own = len(run.staged.stages[piece].arguments)
        read = (*outer.arguments, *(n_own + position for position in outer.receives))
        arguments = tuple(self.placed[piece, position] for position in read)
        before = tuple(self.handed[piece][number] for number in outer.reads)
        totals = tuple(self.totals[piece][kind] for kind in outer.kinds)
        try:
            donated = tuple(self.placed.pop((piece, position)) for position in outer.donated)
            gives, self.handed[piece][start.number], *loop = outer.call(arguments, donated, before, totals)
            if outer.makes_constants:
                self.constants[piece], sums = loop
                self.totals[piece] = dict(zip("FBW", sums, strict=True))
            n_results = len(outer.results)
            for position, x in zip(outer.results, gives[:n_results], strict=True):
                self.made[run.staged.stages[piece].results[position]] = x
            self.sent[piece, start.number] = gives[n_results:]
            if self.waits:
                jax.block_until_ready((gives, loop))
        except Exception as error:
            raise self._failure(piece, "what comes around the loop over microbatches", error, (arguments, before)) from error

    def send(self, start: StartAround) -> None:
        """Sends what such a program made."""
        if not self.run.is_here[start.piece]:
            for send in start.sends:
                self._receive(send, send.placed(None))
            return
        made = self.sent.pop((start.piece, start.number))
        try:
            for send, x in zip(start.sends, start.copies([made[send.place] for send in start.sends]), strict=True):
                self._receive(send, x)
        except Exception as error:
            raise self._failure(start.piece, "what comes around the loop over microbatches", error, made) from error

    def _receive(self, send: Send, x: Any) -> None:
        """Receives a message outside the loop, which the stage then has after its arguments."""
        self.placed[send.target, len(self.run.staged.stages[send.target].arguments) + send.position] = x

    def start(self, start: Start) -> None:
        """Starts a task, and what it sends."""
        program, piece, i = start.program, start.piece, start.task.microbatch
        if program is None:
            return
        run, arrived, residuals = self.run, self.arrived[piece], self.residuals[piece]
        if not run.is_here[piece]:
            for send in start.sends:
                self.arrived[send.target][send.position, i] = send.placed(None)
            return
        if self.progress is not None:
            self._tell(piece, f"task {program.kind}", program.call)
        messages = tuple([arrived[k, i] for k in program.receives])
        before = tuple([residuals[kind, i] for kind in program.reads])
        try:
            self.totals[piece][program.kind], sent, handed = (program.keeping if self.waits else program.call)(
                run._indices[piece][i],
                tuple([self.placed[piece, k] for k in program.arguments]),
                self.constants[piece],
                self.totals[piece][program.kind],
                messages,
                before,
            )
            if self.waits:
                jax.block_until_ready((self.totals[piece][program.kind], sent, handed))
            for send, x in zip(start.sends, start.copies([sent[send.place] for send in start.sends]), strict=True):
                self.arrived[send.target][send.position, i] = x
        except Exception as error:
            raise self._failure(piece, f"{start.task.kind} of microbatch {i}", error, (messages, before, self.totals[piece])) from error
        if handed:
            residuals[program.kind, i] = handed
        for k in start.drops:
            del arrived[k, i]
        for kind in start.frees:
            residuals.pop((kind, i), None)

    def _tell(self, piece: int, what: str, program: Any) -> None:
        """Tells that a program is compiled, where it runs for the first time."""
        if program in self.met or self.progress is None:
            return
        n = sum(len(own.tasks) + len(own.before) + len(own.after) for own in self.run._programs)
        self.progress(f"compiling {what} of {self._where(piece)}", len(self.met) / n)
        self.met.add(program)

    def _where(self, piece: int) -> str:
        """A piece of the program in words."""
        schedule = self.run.schedule
        return f"stage {schedule.stage(piece)}" + (f", chunk {schedule.chunk(piece)}" if schedule.n_chunks > 1 else "")

    def results(self) -> list[Any]:
        """The divided step's results."""
        for piece, programs in enumerate(self.run._programs):
            stage = self.run.staged.stages[piece]
            for k, argument in programs.passed.items() if self.run.is_here[piece] else ():
                self.made[stage.results[k]] = self.placed[piece, argument]
        return [given(self.made.get(k)) for k, (_, given) in enumerate(self.run._results)]

    def _failure(self, piece: int, what: str, error: Exception, read: Any) -> PipelineError:
        """The error of a program, which may be that of an earlier one: what this one ``read`` tells."""
        stage, where = self.run.staged.stages[piece], self._where(piece)
        if _has_failed(read):
            return PipelineError(
                f"Every task of a pipeline has to succeed: one that was started before {what} on {where} failed: "
                f"{type(error).__name__}: {error} Use step.checked(...), which runs one task after the other, for its stage and lines."
            )
        return PipelineError(
            f"Every task of a pipeline has to succeed: {what} failed on {where}, which computes {stage.lines}: "
            f"{type(error).__name__}: {error}"
        )


def _has_failed(arrays: Any) -> bool:
    """Whether a program that makes one of these arrays failed."""
    try:
        jax.block_until_ready([x for x in jax.tree.leaves(arrays) if not x.is_deleted()])
    except Exception:
        return True
    return False
