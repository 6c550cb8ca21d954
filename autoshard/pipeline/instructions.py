"""What the host does in a step, program by program: which arrays each one reads, and where its results go.

All arrays of a call are in one list. Where each of them is there, and after which program it is no longer needed, is known before the first
call, so that the host looks nothing up while it starts programs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from autoshard.errors import PipelineError
from autoshard.pipeline.programs import Outer, StagePrograms, TaskProgram, parted
from autoshard.pipeline.schedule import Schedule, Task
from autoshard.pipeline.sending import Copies, Sending
from autoshard.pipeline.stages import Staged

AROUND = "what comes around the loop over microbatches"
_NOTHING, _NO_COPIES = range(0), Copies(())


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
class Instruction:
    """A program to be started, and what it sends; all arrays are places in the list of a call's arrays.

    Attributes:
        piece: of the step that the program is of.
        what: is started, as errors say it.
        compiled: what is compiled where it runs for the first time.
        call: the program; None where other processes run it, or where arguments are sent alone.
        keeping: the same, which uses up no totals.
        reads: what it is given.
        makes: the places of its results.
        copies: how messages are sent.
        sent: the messages.
        arrived: the places of the messages as they are received.
        frees: what no later instruction reads.
    """

    piece: int
    what: str
    compiled: str
    call: Callable[..., Any] | None
    keeping: Callable[..., Any] | None
    reads: tuple[int, ...]
    makes: range
    copies: Copies
    sent: tuple[int, ...]
    arrived: range
    frees: tuple[int, ...] = ()

    def run(self, arrays: list[Any]) -> None:
        """Starts the program, and sends what it makes."""
        if self.call is not None:
            arrays[self.makes.start : self.makes.stop] = self.call(*[arrays[k] for k in self.reads])
        if self.sent:
            arrays[self.arrived.start : self.arrived.stop] = self.copies([arrays[k] for k in self.sent])
        for k in self.frees:
            arrays[k] = None

    def run_alone(self, arrays: list[Any]) -> None:
        """The same; the program ends before anything is sent."""
        if self.keeping is not None:
            made = jax.block_until_ready(self.keeping(*[arrays[k] for k in self.reads]))
            arrays[self.makes.start : self.makes.stop] = made
        replace(self, call=None).run(arrays)

    def failure(self, error: Exception, arrays: Sequence[Any], where: str, lines: str) -> PipelineError:
        """The error of the program, which may be that of an earlier one: what this one reads tells."""
        if _has_failed([arrays[k] for k in (*self.reads, *self.sent) if k not in self.makes]):
            return PipelineError(
                f"Every task of a pipeline has to succeed: one that was started before {self.what} on {where} failed: "
                f"{type(error).__name__}: {error} Use step.checked(...), which runs one task after the other, for its stage and lines."
            )
        return PipelineError(
            f"Every task of a pipeline has to succeed: {self.what} failed on {where}, which computes {lines}: "
            f"{type(error).__name__}: {error}"
        )


def _has_failed(arrays: Iterable[Any]) -> bool:
    """Whether a program that makes one of these arrays failed."""
    try:
        jax.block_until_ready([x for x in arrays if x is not None and not x.is_deleted()])
    except Exception:
        return True
    return False


class Recorder:
    """The instructions of a step, one after the other; places begin with the step's arguments and ``indices``.

    Attributes:
        n: how many places there are.
        made: per result of the step its place.
    """

    def __init__(
        self, staged: Staged, programs: Sequence[StagePrograms], is_here: Sequence[bool], indices: Sequence[Sequence[int]], n: int
    ):
        """``indices`` has per piece and microbatch the place of the microbatch's number; ``n`` is the number of places until now."""
        self.staged, self.programs, self.is_here, self.indices = staged, programs, is_here, indices
        self.n, self._first = n, n
        self.made: dict[int, int] = {}
        self._found: list[Instruction] = []
        self._placed: dict[tuple[int, int], int] = {}  # arguments, and messages outside the loop
        self._arrived: dict[tuple[int, int, int], int] = {}  # of the loop: per piece, position and microbatch
        self._handed: dict[tuple[int, int], tuple[int, ...]] = {}
        self._given: dict[tuple[int, int], tuple[int, ...]] = {}  # messages of programs outside the loop
        self._constants: dict[int, tuple[int, ...]] = {}
        self._totals: dict[tuple[int, str], tuple[int, ...]] = {}
        self._residuals: dict[tuple[int, str, int], tuple[int, ...]] = {}

    def arguments(self, ways: Sequence[tuple[int, int, int, Sending | None]]) -> None:
        """What pieces get of the step's arguments: the piece, the number among its own, the step's number and how it gets there."""
        self._placed.update(((piece, k), position) for piece, k, position, way in ways if way is None)
        moved = [(piece, k, position, way) for piece, k, position, way in ways if way is not None]
        if moved:
            arrived, sent = self._take(len(moved)), tuple(position for *_, position, _ in moved)
            copies = Copies([way for *_, way in moved])
            self._found.append(Instruction(moved[0][0], "what is sent of arguments", "", None, None, (), _NOTHING, copies, sent, arrived))
            self._placed.update(((piece, k), at) for (piece, k, *_), at in zip(moved, arrived, strict=True))

    def outer(self, piece: int, number: int, outer: Outer) -> None:
        """A program before or after the loop."""
        stage = self.staged.stages[piece]
        own = (*outer.arguments, *(len(stage.arguments) + k for k in outer.receives), *outer.donated)
        reads = [self._placed[piece, k] for k in own]
        reads += [at for k in outer.reads for at in self._handed[piece, k]]
        reads += [at for kind in outer.kinds for at in self._totals[piece, kind]]
        made = self._take(sum(outer.makes))
        gives, self._handed[piece, number], *loop = parted(made, outer.makes)
        if loop:
            self._constants[piece], *totals = loop
            self._totals.update(((piece, kind), each) for kind, each in zip("FBW", totals, strict=True))
        n_results = len(outer.results)
        self.made.update((stage.results[k], at) for k, at in zip(outer.results, gives[:n_results], strict=True))
        self._given[piece, number] = gives[n_results:]
        self._add(Instruction(piece, AROUND, AROUND, outer.call, outer.call, tuple(reads), made, _NO_COPIES, (), _NOTHING))

    def send(self, piece: int, number: int, sends: Sequence[Send], copies: Copies) -> None:
        """What such a program sends."""
        sent, arrived = tuple(self._given[piece, number][send.place] for send in sends), self._take(len(sends))
        if sent:
            self._add(Instruction(piece, AROUND, AROUND, None, None, (), _NOTHING, copies, sent, arrived))
        for send, at in zip(sends, arrived, strict=True):
            self._placed[send.target, len(self.staged.stages[send.target].arguments) + send.position] = at

    def task(self, piece: int, task: Task, program: TaskProgram, sends: Sequence[Send], copies: Copies) -> None:
        """A task of a microbatch."""
        i, kind, words = task.microbatch, program.kind, (f"{task.kind} of microbatch {task.microbatch}", f"task {program.kind}")
        reads = [self.indices[piece][i], *(self._placed[piece, k] for k in program.arguments)]
        reads += [*self._constants[piece], *self._totals[piece, kind], *(self._arrived[piece, k, i] for k in program.receives)]
        reads += [at for other in program.reads for at in self._residuals[piece, other, i]]
        made = self._take(sum(program.makes))
        self._totals[piece, kind], messages, self._residuals[piece, kind, i] = parted(made, program.makes)
        sent, arrived = tuple(messages[send.place] for send in sends), self._take(len(sends))
        self._add(Instruction(piece, *words, program.call, program.keeping, tuple(reads), made, copies, sent, arrived))
        self._arrived.update(((send.target, send.position, i), at) for send, at in zip(sends, arrived, strict=True))

    def instructions(self) -> list[Instruction]:
        """All of them, each with what it frees; results are kept."""
        for piece, programs in enumerate(self.programs):
            stage = self.staged.stages[piece]
            self.made.update((stage.results[k], self._placed[piece, argument]) for k, argument in programs.passed.items())
        kept, found = {*range(self._first), *self.made.values()}, []
        for each in reversed(self._found):
            met = {*each.reads, *each.makes, *each.sent, *each.arrived}
            found.append(replace(each, frees=tuple(sorted(met - kept))))
            kept |= met
        return found[::-1]

    def _take(self, n: int) -> range:
        """Places for arrays."""
        first, self.n = self.n, self.n + n
        return range(first, self.n)

    def _add(self, each: Instruction) -> None:
        """Adds an instruction, as far as this process takes part in it."""
        if self.is_here[each.piece]:
            self._found.append(each)
        elif each.sent:
            self._found.append(replace(each, call=None, keeping=None, reads=()))


def in_words(piece: int, schedule: Schedule) -> str:
    """A piece of a step in words."""
    return f"stage {schedule.stage(piece)}" + (f", chunk {schedule.chunk(piece)}" if schedule.n_chunks > 1 else "")
