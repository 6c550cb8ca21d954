"""A pipelined step: the tasks of all stages, started in the order of a schedule.

Everything that a step does is decided before the first one: the order in which tasks are started, which arrays each one reads, what is sent
to which devices, and after which task an array is no longer needed. A call walks through that list. JAX starts programs and transfers
without waiting for them, so that stages run at the same time, each in the order of its tasks. Of several processes each walks through the
same list and starts the programs of the stages that have devices of its own (`autoshard.pipeline.sending`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.errors import PipelineError
from autoshard.pipeline.instructions import Instruction, Recorder, Send, in_words
from autoshard.pipeline.programs import Options, Outer, StagePlan
from autoshard.pipeline.rows import RowsOfChunks, RowsOfStages, rows_of_stages
from autoshard.pipeline.schedule import UPDATE, Schedule, Task
from autoshard.pipeline.sending import Copies, Sending, absent, is_alone, is_here, put, sending, to_everyone
from autoshard.pipeline.stages import Staged
from autoshard.pipeline.tasks import all_programs
from autoshard.progress import Progress


class Pipelined:
    """A step on flat arguments and results that runs as a pipeline.

    Attributes:
        staged, plans, schedule: what it was made of.
        in_shardings, out_shardings: of the step's flat arguments and results, on the devices of the stages that have them: of all, where
            each has some of the rows.
        order: the tasks in the order in which they are started, each with its stage.
        executed: the tasks that the last call started, in order; in several processes those that this one takes part in.
        residual_bytes: per piece what a device holds of one microbatch between its tasks.
    """

    def __init__(self, staged: Staged, plans: Sequence[StagePlan], schedule: Schedule, options: Options = None):
        """``plans`` has one plan a piece, on the mesh of the stage that has it; ``options`` are of the compiler.

        Raises:
            PipelineError: stages, plans and schedule do not fit each other, or its orders wait for each other.
            ShardingError: a stage has no manual lowering.
        """
        _check(staged, plans, schedule)
        self.staged, self.plans, self.schedule = staged, tuple(plans), schedule
        wholes = [NamedSharding(plan.mesh, PartitionSpec()) for plan in plans]
        self.is_here, self.is_alone = [is_here(whole) for whole in wholes], is_alone(wholes)
        self._programs = all_programs(staged, plans, schedule, options)
        self.residual_bytes = tuple(sum(task.residual_bytes for task in programs.tasks.values()) for programs in self._programs)
        self._route()
        self._copies: dict[tuple[int, tuple[int, ...]], tuple[tuple[Send, ...], Copies]] = {}
        self.order: tuple[tuple[int, Task], ...] = tuple(self._ordered())
        self.executed: tuple[tuple[int, Task], ...] = ()
        self._executed = tuple((stage, task) for stage, task in self.order if self.is_here[schedule.piece(stage, task.chunk)])
        self._places = [self._place(k) for k in range(len(staged.argument_homes))]
        divided, aliases = staged.divided, dict(staged.traced.graph.aliases)
        rows = {k: self._rows(k, dim) for k, dim in divided.argument_dims.items()}
        self._rows_in, self.in_shardings = _of_step(divided.arguments, rows, self._places)
        self._results = [self._result(k) for k in range(len(staged.result_homes))]
        replaced = {k: rows[aliases[k]] for k in divided.result_dims}  # new rows are where the next call takes them
        self._rows_out, self.out_shardings = _of_step(divided.results, replaced, [sharding for sharding, _ in self._results])
        self._record()

    # -- what is known before the first call ----------------------------------------------------------------------------------

    def _route(self) -> None:
        """Finds where the messages of each piece go."""
        stages = self.staged.stages
        places = {(s.number, message.key): k for s in stages for k, message in enumerate(s.receives)}
        self._sends: list[list[list[Send]]] = [[[] for _ in stage.sends] for stage in stages]
        for stage in stages:
            for k, message in enumerate(stage.sends):
                for target in message.targets:
                    position = places[target, message.key]
                    sharding = self._programs[target].receive_shardings[position]
                    source = NamedSharding(self.plans[stage.number].mesh, self._programs[stage.number].send_specs[k])
                    receiver = stages[target]
                    dtype = receiver.traced.jaxpr.jaxpr.invars[len(receiver.arguments) + position].aval.dtype
                    self._sends[stage.number][k].append(Send(0, target, position, sending(source, sharding, message.shape, dtype)))

    def _of_program(self, piece: int, sends: Sequence[int]) -> tuple[Send, ...]:
        """The messages of a program, with their places among what it sends."""
        found = ((place, send) for place, k in enumerate(sends) for send in self._sends[piece][k])
        return tuple(replace(send, place=place) for place, send in found)

    def _ordered(self) -> Iterator[tuple[int, Task]]:
        """All tasks in an order in which each comes after what it reads, and each stage's in its schedule's order."""
        n_stages, orders = self.schedule.n_stages, self.schedule.orders
        at, arrived = [0] * n_stages, set()
        while any(at[stage] < len(orders[stage]) for stage in range(n_stages)):
            before = list(at)
            for stage in range(n_stages):
                if at[stage] == len(orders[stage]):
                    continue
                task = orders[stage][at[stage]]
                piece = self.schedule.piece(stage, task.chunk)
                program = self._programs[piece].tasks.get(task.kind)
                if program is None or all((piece, position, task.microbatch) in arrived for position in program.receives):
                    sends = () if program is None else self._sent_by(piece, program.sends)[0]
                    arrived.update((send.target, send.position, task.microbatch) for send in sends)
                    yield stage, task
                    at[stage] += 1
            if at == before:
                waiting = ", ".join(f"stage {s} for {orders[s][at[s]]}" for s in range(n_stages) if at[s] < len(orders[s]))
                raise PipelineError(
                    f"A schedule starts each task after those whose messages it reads; in {self.schedule.name!r} they wait for each other: "
                    f"{waiting}. Use one of the library's schedules."
                )

    def _sent_by(self, piece: int, sends: tuple[int, ...]) -> tuple[tuple[Send, ...], Copies]:
        """What a program sends, and the way of it all."""
        if (piece, sends) not in self._copies:
            own = self._of_program(piece, sends)
            self._copies[piece, sends] = own, Copies([send.placed for send in own])
        return self._copies[piece, sends]

    def _record(self) -> None:
        """Finds what is done in a step, and the arrays that are there before the first call: the numbers of microbatches."""
        staged, n = self.staged, len(self.staged.argument_homes)
        indices = [range(n + piece * staged.n_microbatches, n + (piece + 1) * staged.n_microbatches) for piece in range(len(staged.stages))]
        numbers = [
            jax.device_put(np.int32(i), NamedSharding(plan.mesh, PartitionSpec())) if here else None
            for plan, here in zip(self.plans, self.is_here, strict=True)
            for i in range(staged.n_microbatches)
        ]
        recorder = Recorder(staged, self._programs, self.is_here, indices, n + len(numbers))
        recorder.arguments(
            [(piece, k, at, self._way_of(piece, k)) for piece, stage in enumerate(staged.stages) for k, at in enumerate(stage.arguments)]
        )
        for piece, number, outer in self._by_level("before"):
            recorder.outer(piece, number, outer)
            recorder.send(piece, number, *self._sent_by(piece, outer.sends))
        after = self._by_level("after")
        updates = {piece: (number, outer) for piece, number, outer in after if self.schedule.updates and outer.level == staged.loop_level}
        for stage, task in self.order:
            piece = self.schedule.piece(stage, task.chunk)
            if task.kind == UPDATE and piece in updates:
                recorder.outer(piece, *updates[piece])
            elif (program := self._programs[piece].tasks.get(task.kind)) is not None:
                recorder.task(piece, task, program, *self._sent_by(piece, program.sends))
        for piece, number, outer in after:  # between processes a transfer is a program: it comes after all tasks
            if updates.get(piece) != (number, outer):
                recorder.outer(piece, number, outer)
            recorder.send(piece, number, *self._sent_by(piece, outer.sends))
        self._instructions: list[Instruction] = recorder.instructions()
        self._blank = [*numbers, *[None] * (recorder.n - n - len(numbers))]
        self._made = [recorder.made[k] for k in range(len(staged.result_homes))]

    def _by_level(self, side: str) -> list[tuple[int, int, Outer]]:
        """The programs before or after the loop, level by level: the piece, the number among its own, and the program."""
        found = [
            (piece, number, outer)
            for piece, programs in enumerate(self._programs)
            for number, outer in enumerate([*programs.before, *programs.after])
            if (outer.level < self.staged.loop_level) == (side == "before")
        ]
        return sorted(found, key=lambda each: (each[2].level, *each[:2]))

    def _place(self, k: int) -> NamedSharding:
        """The sharding of an argument of the divided step, on the stage that has it."""
        home = self.staged.argument_homes[k]
        stage, programs = self.staged.stages[home], self._programs[home]
        if k in stage.arguments:
            return programs.argument_shardings[stage.arguments.index(k)]
        return NamedSharding(self.plans[home].mesh, PartitionSpec())

    def _rows(self, k: int, dim: int) -> RowsOfStages | RowsOfChunks:
        """Where an argument of the step is of which each piece has some rows."""
        parts, step = self.staged.divided.arguments[k], self.staged.divided.traced.jaxpr.jaxpr
        places = [self._places[part] for part in parts]
        if self.schedule.n_chunks == 1:
            return rows_of_stages(places, dim)
        return RowsOfChunks(places, self.schedule.n_stages, dim, step.invars[parts[0]].aval, k in self.staged.traced.graph.donated)

    def _way_of(self, piece: int, k: int) -> Sending | None:
        """How a stage gets its argument ``k`` of the stage that has it; None where that is itself."""
        position = self.staged.stages[piece].arguments[k]
        if self.staged.argument_homes[position] == piece:
            return None
        aval = self.staged.divided.traced.jaxpr.jaxpr.invars[position].aval
        return sending(self._places[position], self._programs[piece].argument_shardings[k], aval.shape, aval.dtype)

    def _result(self, k: int) -> tuple[NamedSharding, Callable[[Any], Any]]:
        """Where a result is, and how it is made of what its stage returns, or of None in processes that have no part of it.

        A loss, or other result that no call takes again and that is whole on its stage's devices, is for every process to read.
        """
        home = self.staged.result_homes[k]
        stage, programs = self.staged.stages[home], self._programs[home]
        step = self.staged.divided.traced
        sharding, aval = programs.result_shardings[stage.results.index(k)], step.jaxpr.jaxpr.outvars[k].aval
        is_number = not jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        if self.is_alone or not is_number or not sharding.is_fully_replicated or k in dict(step.graph.aliases):
            return sharding, lambda x: absent(aval.shape, aval.dtype, sharding) if x is None else x
        meshes = [plan.mesh for plan in self.plans]
        return to_everyone(sharding, meshes, aval.shape, aval.dtype)

    # -- a call -----------------------------------------------------------------------------------------------------------------

    def __call__(self, *arguments: Any) -> list[Any]:
        """The step's flat results for flat arguments, which are moved to their stages where they are not there.

        Raises:
            PipelineError: a task fails; the message has its stage, microbatch and lines of the user's program.
        """
        return self.of_placed([self._placed(k, x) for k, x in enumerate(arguments)])

    def checked(self, *arguments: Any) -> list[Any]:
        """The same, one task after the other: an error is that of the task that it happens in.

        Programs run while the host goes on, so that in a usual call an error inside one may come up in a later task, or where results are
        read.

        Raises:
            PipelineError: a task fails; the message has its stage, microbatch and lines of the user's program.
        """
        return self.of_placed([self._placed(k, x) for k, x in enumerate(arguments)], waits=True)

    def _placed(self, k: int, x: Any) -> Any:
        """An argument where ``in_shardings`` says; as it is in processes that have none of it."""
        return put(x, self.in_shardings[k]) if is_here(self.in_shardings[k]) else x

    def of_placed(self, arguments: Sequence[Any], waits: bool = False, progress: Progress | None = None) -> list[Any]:
        """The same as a call, or with ``waits`` as `checked`, for arguments of which all arrays are where ``in_shardings`` says.

        ``progress`` is called before each program runs for the first time, and so is compiled; None: nobody is told.
        """
        there = [x if isinstance(x, jax.Array) else self._placed(k, x) for k, x in enumerate(arguments)]
        parts = [part for x, rows in zip(there, self._rows_in, strict=True) for part in (rows.apart(x) if rows else [x])]
        if not self.is_alone:
            parts = [part if self.is_here[home] else None for part, home in zip(parts, self.staged.argument_homes, strict=True)]
        arrays = parts + self._blank
        if waits or progress is not None:
            self._run_slowly(arrays, waits, progress)
        else:
            self._run(arrays)
        self.executed = self._executed
        results = [given(arrays[k]) for k, (_, given) in zip(self._made, self._results, strict=True)]
        made = zip(self.staged.divided.results, self._rows_out, strict=True)
        return [rows.together([results[k] for k in parts]) if rows else results[parts[0]] for parts, rows in made]

    def _run(self, arrays: list[Any]) -> None:
        """Starts all programs."""
        each = self._instructions[0]
        try:
            for each in self._instructions:
                each.run(arrays)
        except Exception as error:
            raise self._failure(each, error, arrays) from error

    def _run_slowly(self, arrays: list[Any], waits: bool, progress: Progress | None) -> None:
        """The same; with ``waits`` each program ends before the next is started, and ``progress`` is told what is compiled."""
        met: set[Any] = set()
        n = len({id(each.call) for each in self._instructions})
        for each in self._instructions:
            if progress is not None and each.call is not None and each.call not in met:
                progress(f"compiling {each.compiled} of {in_words(each.piece, self.schedule)}", len(met) / n)
                met.add(each.call)
            try:
                each.run_alone(arrays) if waits else each.run(arrays)
            except Exception as error:
                raise self._failure(each, error, arrays) from error

    def _failure(self, each: Instruction, error: Exception, arrays: Sequence[Any]) -> PipelineError:
        return each.failure(error, arrays, in_words(each.piece, self.schedule), self.staged.stages[each.piece].lines)


def _check(staged: Staged, plans: Sequence[StagePlan], schedule: Schedule) -> None:
    """Raises `PipelineError` where stages, plans and schedule have other numbers."""
    n = len(staged.stages)
    if (schedule.n_stages * schedule.n_chunks, schedule.n_microbatches, len(plans)) != (n, staged.n_microbatches, n):
        raise PipelineError(
            f"A pipeline has as many pieces as its schedule has stages times chunks, and a plan for each: got {n} pieces of "
            f"{staged.n_microbatches} microbatches, {len(plans)} plans, and a schedule of {schedule.n_stages} x {schedule.n_chunks} "
            f"pieces and {schedule.n_microbatches} microbatches. Make the schedule with the numbers of the stages."
        )


def _of_step(
    leaves: Sequence[Sequence[int]], rows: Mapping[int, RowsOfStages | RowsOfChunks], places: Sequence[NamedSharding]
) -> tuple[list[RowsOfStages | RowsOfChunks | None], tuple[NamedSharding, ...]]:
    """Per argument or result of a step its rows, None where it is whole; and its sharding, of the divided step's ``places``."""
    found = [rows.get(k) for k in range(len(leaves))]
    return found, tuple(places[parts[0]] if each is None else each.sharding for each, parts in zip(found, leaves, strict=True))
