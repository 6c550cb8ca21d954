"""Finalists in the order of what a compiler makes of them, ahead of time and without devices.

All are compiled until memory is assigned, which is a matter of seconds; those that do not fit, and those that the compiler fails on, are
out. Each of the others gets its *corrected* time: the prediction with compute scaled by compiled FLOPs and communication by compiled
collectives under the link model. That decides, but for TPUs: whoever's time is within `MARGIN` of the least time known, predicted or
corrected, is compiled to the end, and the time of its schedule counts instead, until nobody else is as close. So the fastest is always
compiled to the end there, and corrects the predictions of its kernels (`autoshard.plan.corrections`).
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from jax.stages import Lowered

from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.errors import AutoshardError, CompilerError
from autoshard.plan.corrections import differences, learned
from autoshard.plan.finalists import Board
from autoshard.verify import (
    COMPILERS,
    NO_OP,
    Ahead,
    AheadCompiler,
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


Results = Generator[tuple[int, Ahead | Exception], None, None]
"""By number what the compiler makes of a finalist, or how it fails."""


@dataclass(frozen=True, slots=True)
class FinalistCompiler:
    """The compiler of a cluster.

    Attributes:
        topology: its devices.
        clock_hertz: of one that counts cycles; 0 of others.
    """

    topology: Topology
    clock_hertz: float

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
        lowered: dict[int, Lowered] = {}
        numbers, least = list(range(len(board.found))), min(each.predicted_seconds for each in board.found)
        near = [k for k in numbers if self.clock_hertz and board.found[k].predicted_seconds <= least * (1 + MARGIN)]
        self._decide(board, numbers, near, lowered)
        while close := self._close(board):
            self._decide(board, close, close, lowered)

    def _decide(self, board: Board, numbers: list[int], to_the_end: list[int], lowered: dict[int, Lowered]) -> None:
        """Compiles some finalists, of them some to the end."""
        scheduled: dict[int, float] = {}
        with closing(self._compiled(board, numbers, to_the_end, lowered)) as results:
            for number, ahead in results:
                if self._read(board, number, ahead) and isinstance(ahead, Ahead) and number in to_the_end:
                    scheduled[number] = self._scheduled(board, number, ahead)
        for number, seconds in scheduled.items():  # all at once: times of two kinds are not compared where the time is over in between
            board.note(number, measure="scheduled", seconds=seconds)

    def _close(self, board: Board) -> list[int]:
        """Who is still to be compiled to the end, so that it is known who is the fastest."""
        seconds = {number: board.found[number].seconds or 0.0 for number in board.accepted}
        if not self.clock_hertz or not seconds:
            return []
        near = min(seconds.values()) * (1 + MARGIN)
        return [number for number in seconds if seconds[number] <= near and board.found[number].measure != "scheduled"]

    def _compiled(self, board: Board, numbers: list[int], to_the_end: list[int], lowered: dict[int, Lowered]) -> Results:
        """What the compiler makes of finalists as it comes; as many processes at once as there is room for."""

        def start(number: int) -> Callable[[], Compilation]:
            def begin() -> Compilation:
                if number not in lowered:
                    lowered[number] = board.lowered(number, self.topology.platform)
                board.compilations += 1
                return Compilation(lowered[number], board.strategies[number].record.mesh, self.topology, number in to_the_end)

            return begin

        doing, done = f"compiling for {board.cluster.name}", len(board.found) - len(numbers)
        return _in_parallel({number: start(number) for number in numbers}, board, doing, done)

    def _read(self, board: Board, number: int, ahead: Ahead | Exception) -> bool:
        """Records what was compiled, and says whether the finalist is accepted."""
        if isinstance(ahead, Exception):
            board.failed(number, ahead)
            return False
        if not ahead.hlo:
            board.note(number, outcome="does not fit", needed_bytes=ahead.needed_bytes)
            return False
        record = board.strategies[number].record
        try:
            sent, flops = collectives_of(ahead.hlo, record.mesh), dot_flops(ahead.hlo).total
        except AutoshardError as error:
            board.failed(number, error)
            return False
        fits = ahead.fits and not board.exceeds(ahead.peak_bytes)
        board.note(
            number,
            outcome="slower" if fits else "does not fit",
            measure="corrected",
            seconds=corrected_seconds(record.cost, sent, flops, record.mesh, _links(board, number)),
            collective_bytes=sum(one.bytes * one.count for one in sent),
            flops=flops,
            peak_bytes=ahead.peak_bytes,
            needed_bytes=ahead.needed_bytes,
        )
        return fits

    def _scheduled(self, board: Board, number: int, ahead: Ahead) -> float:
        """The seconds of the compiled schedule; notes what its kernels take beyond the prediction."""
        kernels, judged = compiled_kernels(ahead.hlo), board.strategies[number]._judged
        if judged is not None and any(kernel.leader != NO_OP for kernel in kernels):
            of = judged.facts, judged.model, judged.record.assignment, kernels, self.clock_hertz
            board.differences[number] = differences(*of)
            board.corrections = board.corrections.merged([learned(*of)])
        return scheduled_seconds(ahead.hlo, board.strategies[number].record.mesh, _links(board, number), self.clock_hertz)


def finalist_compiler_of(cluster: Cluster) -> FinalistCompiler:
    """The compiler for a cluster's devices.

    Raises:
        ClusterError: no compiler compiles for such devices without them.
        CompilerError: it is not installed.
    """
    topology = compiled_topology(cluster)
    COMPILERS[topology.platform].required()
    return FinalistCompiler(topology, cluster.device.clock_hertz if COMPILERS[topology.platform].counts_cycles else 0.0)


def _links(board: Board, number: int) -> Communication:
    return Communication(board.cluster.links(board.strategies[number].record.mesh))


def _in_parallel(begins: dict[int, Callable[[], Compilation]], board: Board, doing: str, done: int) -> Results:
    """Results by number as they come; what still runs is stopped where nobody waits for it any more."""
    waiting, running = deque(begins), dict[int, Compilation]()
    most = _processes(len(begins))
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
            over = [number for number, compilation in running.items() if compilation.over()]
            for number in over:
                try:
                    result: Ahead | Exception = running[number].result()
                except CompilerError as error:
                    result = error
                running.pop(number).stop()
                done += 1
                yield number, result
            board.check_time()
            if running and not over:
                time.sleep(POLL_SECONDS)
    finally:
        for compilation in running.values():
            compilation.stop()


def _processes(wanted: int) -> int:
    """How many compilers may run at once: no more than there are cores, and memory for."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(wanted, cores, _free_bytes() // COMPILING_BYTES))


def _free_bytes() -> int:
    """Memory that programs may still take, as Linux says it; where there is no saying, enough for one compiler."""
    meminfo = Path("/proc/meminfo")
    lines = meminfo.read_text().splitlines() if meminfo.exists() else []
    available = next((line for line in lines if line.startswith("MemAvailable:")), "")
    return int(available.split()[1]) * 1024 if available else COMPILING_BYTES
