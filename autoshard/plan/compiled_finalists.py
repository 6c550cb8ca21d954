"""Finalists in the order of what a compiler makes of them, ahead of time and without devices.

All are compiled until memory is assigned, which is a matter of seconds; those that do not fit, and those that the compiler fails on, are
out. Each of the others gets its *corrected* time: the prediction with compute scaled by compiled FLOPs and communication by compiled
collectives under the link model. That decides, but for TPUs: whoever's time is within `MARGIN` of the least time known, predicted or
corrected, is compiled to the end, and the time of its schedule counts instead, until nobody else is as close. So the fastest is always
compiled to the end there, and corrects the predictions of its kernels (`autoshard.plan.corrections`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

from autoshard.cluster import Cluster
from autoshard.concurrency import cores
from autoshard.cost.collectives import Communication
from autoshard.errors import AutoshardError, CompilerError
from autoshard.pipeline.lowered import LoweredProgram
from autoshard.plan.corrections import differences, learned
from autoshard.plan.finalists import Board
from autoshard.run.stage_programs import LoweredPart
from autoshard.verify import (
    COMPILERS,
    NO_OP,
    Ahead,
    AheadCompiler,
    Clock,
    Compilation,
    Topology,
    collectives_of,
    compiled_kernels,
    compiled_topology,
    corrected_seconds,
    dot_flops,
    scheduled_seconds,
)

MARGIN = 0.1  # python -m benchmarks.cost_model ranking: the median prediction is 5 to 6 % off the schedule, and here two are compared
COMPILING_BYTES = 2 * 2**30  # of memory for a compiler's process: XLA:TPU took 0.8 GB for a GPT of 6 unrolled layers (libtpu 0.0.42)
POLL_SECONDS = 0.02


Results = Generator[tuple[int, Sequence[Ahead] | Exception], None, None]
"""By number what the compiler makes of each program of a finalist, or how it fails."""


Lowered = dict[int, Sequence[LoweredPart]]
"""By number the programs of a finalist."""


class _Compiling:
    """The compilation of a finalist's programs, one after the other; of a pipeline each task's is one."""

    def __init__(self, parts: Sequence[LoweredPart], cycles: bool):
        self._left, self._done, self._cycles = deque((part, each.lowered) for part in parts for each in part.programs), [], cycles
        self._begin()

    def _begin(self) -> None:
        part, lowered = self._left.popleft()
        self._running = Compilation(lowered, part.record.mesh, compiled_topology(part.cluster), self._cycles)

    def over(self) -> bool:
        """Whether all are compiled, or one does not fit."""
        if not self._running.over():
            return False
        self._done.append(self._running.result())
        if not self._left or not self._done[-1].hlo:
            return True
        self._running.stop()
        self._begin()
        return False

    def result(self) -> Sequence[Ahead]:
        """What was compiled; to be called once `over` is true."""
        return self._done

    def stop(self) -> None:
        """Ends the process and removes its files."""
        self._running.stop()


@dataclass(frozen=True, slots=True)
class FinalistCompiler:
    """The compiler of a cluster.

    Attributes:
        topology: its devices.
        clock: of one that counts cycles; None of others.
    """

    topology: Topology
    clock: Clock | None

    @property
    def compiler(self) -> AheadCompiler:
        return COMPILERS[self.topology.platform]

    @property
    def name(self) -> str:
        """As the strategy records it."""
        return self.compiler.name

    @property
    def version(self) -> str:
        """As the strategy records it."""
        return self.compiler.version

    def decide(self, board: Board) -> None:
        """Records what is compiled, until it is decided who is the fastest.

        Raises:
            OutOfTime: the time is over; what is recorded by then holds.
        """
        lowered: Lowered = {}
        numbers, least = list(range(len(board.found))), min(each.predicted_seconds for each in board.found)
        near = [k for k in numbers if self.clock and board.found[k].predicted_seconds <= least * (1 + MARGIN)]
        self._decide(board, numbers, near, lowered)
        while close := self._close(board):
            self._decide(board, close, close, lowered)

    def _decide(self, board: Board, numbers: list[int], to_the_end: list[int], lowered: Lowered) -> None:
        """Compiles some finalists, of them some to the end."""
        scheduled: dict[int, float] = {}
        with closing(self._compiled(board, numbers, to_the_end, lowered)) as results:
            for number, ahead in results:
                parts = lowered.get(number, ())
                if self._read(board, number, parts, ahead) and not isinstance(ahead, Exception) and number in to_the_end:
                    scheduled[number] = self._scheduled(board, number, parts, ahead)
        for number, seconds in scheduled.items():  # all at once: times of two kinds are not compared where the time is over in between
            board.note(number, measure="scheduled", seconds=seconds)

    def _close(self, board: Board) -> list[int]:
        """Who is still to be compiled to the end, so that it is known who is the fastest."""
        seconds = {number: board.found[number].seconds or 0.0 for number in board.accepted}
        if not self.clock or not seconds:
            return []
        near = min(seconds.values()) * (1 + MARGIN)
        return [number for number in seconds if seconds[number] <= near and board.found[number].measure != "scheduled"]

    def _compiled(self, board: Board, numbers: list[int], to_the_end: list[int], lowered: Lowered) -> Results:
        """What the compiler makes of finalists as it comes; as many processes at once as there is room for."""

        def start(number: int) -> Callable[[], _Compiling]:
            def begin() -> _Compiling:
                if number not in lowered:
                    lowered[number] = board.programs(number, self.topology.platform)
                board.compilations += 1
                return _Compiling(lowered[number], number in to_the_end)

            return begin

        doing, done = f"compiling for {board.cluster.name}", len(board.found) - len(numbers)
        return _in_parallel({number: start(number) for number in numbers}, board, doing, done)

    def _read(self, board: Board, number: int, parts: Sequence[LoweredPart], ahead: Sequence[Ahead] | Exception) -> bool:
        """Records what was compiled, and says whether the finalist is accepted."""
        if isinstance(ahead, Exception):
            board.failed(number, ahead)
            return False
        by_part = _by_part(parts, ahead)
        compiled = [pair for _, own in by_part for pair in own]
        needed = max(program.held_bytes + each.needed_bytes for program, each in compiled)
        if not all(each.hlo for each in ahead):
            board.note(number, outcome="does not fit", needed_bytes=needed)
            return False
        try:
            seconds, nbytes, flops = zip(*(_corrected(*each) for each in by_part), strict=True)
        except AutoshardError as error:
            board.failed(number, error)
            return False
        peak = max(program.held_bytes + (each.peak_bytes or 0.0) for program, each in compiled)
        fits = all(each.fits for each in ahead) and not board.exceeds(peak)
        board.note(
            number,
            outcome="slower" if fits else "does not fit",
            measure="corrected",
            seconds=board.of_parts(number, seconds),
            collective_bytes=max(nbytes),
            flops=max(flops),
            peak_bytes=peak,
            needed_bytes=needed,
        )
        return fits

    def _scheduled(self, board: Board, number: int, parts: Sequence[LoweredPart], ahead: Sequence[Ahead]) -> float:
        """The step time by the schedules of a finalist's programs; notes what its kernels take beyond the prediction."""
        assert self.clock is not None, "to the end are only compiled those of a compiler that counts cycles"
        judged = board.strategies[number]._judged
        kernels = [] if judged is None else compiled_kernels(ahead[0].hlo)
        if judged is not None and any(kernel.leader != NO_OP for kernel in kernels):
            of = judged.facts, judged.model, judged.record.assignment, kernels, self.clock
            board.differences[number] = differences(*of)
            board.corrections = board.corrections.merged([learned(*of)])
        seconds = []
        for part, own in _by_part(parts, ahead):
            mesh, communication = part.record.mesh, Communication(part.cluster.links(part.record.mesh))
            seconds.append(sum(program.count * scheduled_seconds(each.hlo, mesh, communication, self.clock) for program, each in own))
        return board.of_parts(number, seconds)


Compiled = list[tuple[LoweredProgram, Ahead]]


def _by_part(parts: Sequence[LoweredPart], ahead: Sequence[Ahead]) -> list[tuple[LoweredPart, Compiled]]:
    """Each part of a finalist with its programs, and what was compiled of them."""
    left = iter(ahead)
    return [(part, list(zip(part.programs, left, strict=False))) for part in parts]


def _corrected(part: LoweredPart, compiled: Compiled) -> tuple[float, float, float]:
    """The corrected seconds of a part, its collective bytes and FLOPs: sums over its programs, each as often as it runs in a step."""
    mesh, communication = part.record.mesh, Communication(part.cluster.links(part.record.mesh))
    sent = [replace(one, count=one.count * own.count) for own, each in compiled for one in collectives_of(each.hlo, mesh)]
    flops = sum(own.count * dot_flops(each.hlo).total for own, each in compiled)
    return corrected_seconds(part.record.cost, sent, flops, mesh, communication), sum(one.bytes * one.count for one in sent), flops


def finalist_compiler_of(cluster: Cluster) -> FinalistCompiler:
    """The compiler for a cluster's devices.

    Raises:
        ClusterError: no compiler compiles for such devices without them.
        CompilerError: it is not installed.
    """
    topology = compiled_topology(cluster)
    COMPILERS[topology.platform].required()
    return FinalistCompiler(topology, Clock.of(cluster.device) if COMPILERS[topology.platform].counts_cycles else None)


def _in_parallel(begins: dict[int, Callable[[], _Compiling]], board: Board, doing: str, done: int) -> Results:
    """Results by number as they come; what still runs is stopped where nobody waits for it any more."""
    waiting, running = deque(begins), dict[int, _Compiling]()
    most = cores(COMPILING_BYTES)
    try:
        while waiting or running:
            while waiting and len(running) < most:
                number = waiting.popleft()
                board.tell(doing, number, done)
                try:
                    running[number] = begins[number]()
                except Exception as error:  # whatever lowering meets, the others may do
                    done += 1
                    yield number, error
            over: dict[int, Sequence[Ahead] | Exception] = {}
            for number, compilation in running.items():
                try:
                    if compilation.over():
                        over[number] = compilation.result()
                except CompilerError as error:
                    over[number] = error
            for number, result in over.items():
                running.pop(number).stop()
                done += 1
                yield number, result
            board.check_time()
            if running and not over:
                time.sleep(POLL_SECONDS)
    finally:
        for compilation in running.values():
            compilation.stop()
