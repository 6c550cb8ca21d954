"""Rematerialisation on TPUs: the kernels that run again where a program would not fit, and the peak memory then.

*Mechanism* (``HloRematerialization`` of openxla/xla, xla/hlo/transforms/simplifiers, as libtpu 0.0.42 runs it). The scheduled kernels are
walked in order. As long as more bytes are live than the goal, values that are live for later readers are freed and made twice: of all
kernels that have run, those of the one whose results have most bytes, less its operands that are dead already and have to be kept. It runs
again before the next kernel that reads its results, or its operands: of layers that share a mask, all before the first that is
differentiated. The operands that this keeps live may exceed the goal in turn.

*Values that cannot be made twice* are those that a loop reads, carries or computes, the program's results, those that other devices have a
part in, and the operands of the kernel at hand. Scanned layers' stacks stay where they are.

*On the safe side.* Only products, sums and elementwise kernels count, each of them once, and one at a time, not with those that it reads;
the goal must be reached, though the compiler takes programs up to a twentieth above it; and as scheduled a program exceeds the memory by
a fifth at most: buffers that are made twice leave holes between the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from autoshard.compilers.base import Recomputed
from autoshard.compilers.buffers import Buffers
from autoshard.compilers.fused_program import Kernel
from autoshard.compilers.op_patterns import stands_alone
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.primitives import is_matrix

# Of a device's memory what the compiler aims at: "rematerialization limit 14.89G = 95% hbm (14.96G) - (arguments (2.07G) -
# aliased_output(2.07G)) - overlays (74.83M)" in the log of libtpu 0.0.42 (TPU_MIN_LOG_LEVEL=0). Overlays are the program's code.
# evidence: rematerialisation goal
GOAL = 0.95

# Times a device's memory that a program may hold as scheduled. An estimate: of 117 programs for v5e, v5p and v6e that hold up to 1.25 times
# the memory and reach the goal here the compiler (libtpu 0.0.42) refused none, of 55 that hold more 13: a transformer whose scores are
# a quarter of the memory took 36.3 GB where 29.5 were held at once, holes included. evidence: rematerialisation limit
MOST = 1.2


def recomputed(facts: ProgramFacts, buffers: Buffers, alone: Callable[[Kernel], bool], memory_bytes: float) -> Recomputed | None:
    """The kernels that run again until no more bytes are live than the goal; None where it is not reached.

    Args:
        buffers: as scheduled.
        alone: whether a kernel needs no other devices.
        memory_bytes: the memory of a device.
    """
    if buffers.usage.max() > MOST * memory_bytes:
        return None
    return _Walk(facts, buffers, alone).down_to(GOAL * memory_bytes)


class _Walk:
    """The walk; kernels are numbered in their order, buffers as in `Buffers`."""

    def __init__(self, facts: ProgramFacts, buffers: Buffers, alone: Callable[[Kernel], bool]):
        times = buffers.times
        self.times, self.held, self.usage = times, buffers.held.tolist(), buffers.usage.copy()
        self.born, self.dies = buffers.born.tolist(), buffers.dies.tolist()
        self.kernels = sorted(facts.fusion.kernels, key=lambda kernel: times.starts[kernel.op])
        self.reads = [self._places(kernel.reads) for kernel in self.kernels]
        self.makes = [self._places(kernel.makes) for kernel in self.kernels]
        self.read_at: dict[int, list[int]] = {}  # per buffer the moments in which kernels start that read it
        for kernel, read in zip(self.kernels, self.reads, strict=True):
            for buffer in read:
                self.read_at.setdefault(buffer, []).append(times.starts[kernel.op])
        self.fixed = set(self._places((*facts.graph.arguments, *facts.graph.constants)))
        self.copies: dict[int, list[int]] = {}  # per value that is read in other layouts the buffers of its copies
        for position, value in enumerate(buffers.copies, len(times.values)):
            self.copies.setdefault(facts.fusion.root[value], []).append(position)
        self.masked = _masked(facts, self.kernels)
        self.masks_at = [times.starts[kernel.op] for kernel, masked in zip(self.kernels, self.masked, strict=True) if masked]
        largest_first = sorted(range(len(self.kernels)), key=lambda k: -sum(self.held[buffer] for buffer in self.makes[k]))
        repeatable = self._repeatable(facts, alone)
        self.left = [k for k in largest_first if k in repeatable]

    def _places(self, values: Iterable[int]) -> list[int]:
        return [self.times.places[value] for value in values if value in self.times.places]

    def _repeatable(self, facts: ProgramFacts, alone: Callable[[Kernel], bool]) -> set[int]:
        ops, passed = facts.graph.walk(), self.times.passed
        in_loops = {
            buffer
            for kernel, read, made in zip(self.kernels, self.reads, self.makes, strict=True)
            if ops[kernel.op].bodies
            for buffer in (*read, *made)
        }

        def repeats(kernel: Kernel, made: list[int]) -> bool:
            main = ops[kernel.main]
            plain = not main.bodies and (is_matrix(main.primitive) or not stands_alone(main))
            return plain and all(not passed[buffer] and buffer not in in_loops for buffer in made) and alone(kernel)

        return {k for k, kernel in enumerate(self.kernels) if self.makes[k] and repeats(kernel, self.makes[k])}

    def down_to(self, goal_bytes: float) -> Recomputed | None:
        again: list[int] = []
        for k, kernel in enumerate(self.kernels):
            start, end = self.times.starts[kernel.op], self.times.ends[kernel.op]
            while self.usage[start:end].max() > goal_bytes:
                best = self._best(k, start)
                if best is None:
                    return None
                self._repeat(best, start)
                self.left.remove(best)
                again.append(best)
        peak = float(self.usage.max())
        if peak > goal_bytes:
            return None
        return Recomputed(peak, tuple(self.kernels[k] for k in again))

    def _best(self, at: int, moment: int) -> int | None:
        """The kernel that frees most at a moment if it runs again; None where none frees anything."""
        busy = {*self.reads[at], *self.makes[at]}
        best, most = None, 0.0
        for k in self.left:
            made = self.makes[k]
            if sum(self.held[buffer] for buffer in made) <= most:
                break  # those after it hold no more
            if busy.isdisjoint(made) and any(self._later(buffer, moment) for buffer in made):
                freed = sum(self.held[buffer] for buffer in made if self.born[buffer] < moment < self.dies[buffer])
                freed -= sum(self.held[buffer] for buffer in self._needed(k) if not self.born[buffer] <= moment < self.dies[buffer])
                if freed > most:
                    best, most = k, freed
        return best

    def _needed(self, k: int) -> list[int]:
        """The buffers of a kernel's operands, which have to be kept for it; arguments are anyway."""
        copies = (copy for buffer in self.reads[k] for copy in self.copies.get(self.times.values[buffer], ()))
        return [*(buffer for buffer in self.reads[k] if buffer not in self.fixed), *copies]

    def _later(self, buffer: int, moment: int) -> list[int]:
        """When a buffer is read after a moment, if it has been made before."""
        return [read for read in self.read_at.get(buffer, ()) if read > moment] if self.born[buffer] < moment else []

    def _repeat(self, k: int, moment: int) -> None:
        """Frees a kernel's results until it runs again, and keeps its operands until then."""
        others = [self._later(buffer, moment) for buffer in (*self.makes[k], *self.reads[k])]
        if self.masked[k]:
            others.append([start for start in self.masks_at if start > moment])
        again = min(start for found in others for start in found)
        for buffer in self.makes[k]:
            before = [read for read in self.read_at.get(buffer, ()) if read <= moment]
            end = max(self.born[buffer], *before, 0) + 2
            if end < again:
                self.usage[end:again] -= self.held[buffer]
                self.born[buffer], self.read_at[buffer] = again, self._later(buffer, moment)
        for buffer in self._needed(k):
            if self.dies[buffer] <= again:
                self.usage[self.dies[buffer] : again + 1] += self.held[buffer]
                self.dies[buffer] = again + 1
        for buffer in self.reads[k]:
            self.read_at.setdefault(buffer, []).append(again)


def _masked(facts: ProgramFacts, kernels: list[Kernel]) -> list[bool]:
    """Per kernel whether it reads what is made of constants and is not one number everywhere: equal masks are one value to a compiler."""
    graph, fusion = facts.graph, facts.fusion
    uniform, reads = set(graph.literals), [False] * len(graph.values)
    for op in graph.walk():
        if op.operands and all(value in uniform for value in op.operands):
            uniform.update(op.results)
        elif not op.bodies:
            found = any(
                value not in uniform if facts.free[value] else reads[value] and not fusion.materialised[value] for value in op.operands
            )
            for value in op.results:
                reads[value] = found
    ops = graph.walk()
    return [any(reads[value] for value in (*ops[kernel.op].results, *ops[kernel.main].results)) for kernel in kernels]
