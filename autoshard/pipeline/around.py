"""Stages of what runs before and after the loop over microbatches: optimizer updates, casts of weights, norms of all gradients.

An operation runs where the largest of what it reads is, so that a weight, its gradients and its optimizer state are on one stage.
Scalars of several stages, such as parts of a norm, are put together by stage 0. Cheap scalars that are computed of arguments, such as a
learning rate, are computed by each stage that reads them.

*Levels* are the order in which values are sent outside the loop: a value of level 1 is computed of what was sent once, and so on. The loop
has a level as well: of what is computed after it, the first is of the loop's level.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from autoshard.ir import Op
from autoshard.pipeline.cut import EVERYWHERE
from autoshard.pipeline.micro import Micro
from autoshard.primitives import is_matrix

SMALL_BYTES = 4096  # of what each stage that reads it may compute
COLLECTOR = 0  # the stage that puts scalars of several stages together


@dataclass(frozen=True, slots=True, eq=False)
class Around:
    """Where the operations outside the loop run.

    Attributes:
        stages: per op index of the top level its stage; `EVERYWHERE` for one that each stage computes where it reads it.
        homes: per value of the top level the stage that has it: arguments and results of the loop too.
        levels: per value its level where it is computed; 0 for those that are not in it.
        loop_level: the level of the loop.
    """

    stages: Mapping[int, int]
    homes: Mapping[int, int]
    levels: Mapping[int, int]
    loop_level: int

    def home(self, value: int) -> int:
        """The stage of a value."""
        return self.homes.get(value, COLLECTOR)


def around_of(micro: Micro, reads: Mapping[int, Iterable[int]], totals: Mapping[int, tuple[int, ...]]) -> Around:
    """The stages of a step's operations outside the loop.

    Args:
        micro: the step.
        reads: per value of the top level the stages whose part of the loop reads it.
        totals: per result of the loop the stages that compute a part of it; the first one has the whole.
    """
    placer = _Placer(micro, {value: min(stages) for value, stages in reads.items()}, {value: at[0] for value, at in totals.items()})
    stages = placer.placed()
    levels, loop_level = _levels(micro, stages, placer.homes, reads, totals)
    return Around(stages, placer.homes, levels, loop_level)


class _Placer:
    def __init__(self, micro: Micro, reads: Mapping[int, int], totals: Mapping[int, int]):
        self.micro, self.values = micro, micro.graph.values
        self.ops = [op for op in micro.graph.ops if op is not micro.loop]
        self.copied = self._copied()
        graph = micro.graph
        pairs = [(graph.results[result], graph.arguments[argument]) for result, argument in graph.aliases]
        self.replaced = {one: other for pair in pairs for one, other in (pair, pair[::-1])}
        self.homes = {value: stage for value, stage in {**reads, **totals}.items() if value not in self.copied}
        self.stages: dict[int, int] = {op.index: EVERYWHERE for op in self.ops if self._is_copied(op)}

    def placed(self) -> dict[int, int]:
        waiting = [op for op in self.ops if op.index not in self.stages]
        for op in reversed(waiting):  # weights are where the loop reads what is made of them
            stages = [self.homes[value] for value in op.results if value in self.homes and op.index < self.micro.loop.index]
            if stages:
                self._place(op, min(stages))
        waiting = [op for op in waiting if op.index not in self.stages]
        before = None
        while before is None or len(waiting) < before:
            before = len(waiting)
            for op in (*waiting, *reversed(waiting)):
                if op.index not in self.stages and (stage := self._largest(op)) is not None:
                    self._place(op, stage)
            waiting = [op for op in waiting if op.index not in self.stages]
        for op in waiting:
            at = {self.homes[value] for value in op.operands if value in self.homes}
            self._place(op, at.pop() if len(at) == 1 else COLLECTOR)
        return self.stages

    def _place(self, op: Op, stage: int) -> None:
        self.stages[op.index] = stage
        self.homes.update(dict.fromkeys(op.results, stage))
        for value in op.operands:
            if value not in self.copied:
                self.homes.setdefault(value, stage)
        for value in {*op.results, *op.operands} & self.replaced.keys() & self.homes.keys():  # state stays where it is
            if (other := self.replaced[value]) not in self.copied:
                self.homes.setdefault(other, self.homes[value])

    def _largest(self, op: Op) -> int | None:
        """The stage that has the most bytes of an op's arrays; None while none is known of one."""
        bytes_at: dict[int, float] = {}
        for value in dict.fromkeys((*op.operands, *op.results)):
            if self.values[value].rank and value in self.homes:
                bytes_at[self.homes[value]] = bytes_at.get(self.homes[value], 0.0) + self.values[value].nbytes
        return max(sorted(bytes_at), key=lambda stage: bytes_at[stage], default=None)

    def _copied(self) -> set[int]:
        """The values that each stage which reads them computes: constants, and small ones of small arguments."""
        found = {value for value, free in enumerate(self.micro.free) if free} | set(self.micro.graph.constants)
        small = found | {value for value in self.micro.graph.arguments if self.values[value].nbytes <= SMALL_BYTES}
        for op in self.ops:
            effects = getattr(op.equation, "effects", ())
            light = not op.bodies and not is_matrix(op.primitive) and not effects and all(value in small for value in op.operands)
            if light and sum(self.values[value].nbytes for value in op.results) <= SMALL_BYTES:
                small.update(op.results)
                if all(not self.values[value].rank for value in (*op.operands, *op.results)) or all(v in found for v in op.operands):
                    found.update(op.results)
        return found

    def _is_copied(self, op: Op) -> bool:
        return all(value in self.copied for value in op.results) and not getattr(op.equation, "effects", ())


def _levels(
    micro: Micro,
    stages: Mapping[int, int],
    homes: Mapping[int, int],
    reads: Mapping[int, Iterable[int]],
    totals: Mapping[int, tuple[int, ...]],
) -> tuple[dict[int, int], int]:
    """Per value its level, and the loop's."""
    levels: dict[int, int] = {}
    made: set[int] = set()
    copied: dict[int, Op] = {}
    loop_level = 1

    def level_at(value: int, stage: int) -> int:
        if value in copied:  # computed on the stage itself, perhaps of what is sent to it
            return max((level_at(each, stage) for each in copied[value].operands), default=0)
        if value not in made:
            return 0
        return levels.get(value, 0) + (homes.get(value, COLLECTOR) != stage)

    for op in micro.graph.ops:
        if op is micro.loop:
            loop_level = 1 + max((level_at(value, stage) for value, at in reads.items() for stage in at), default=0)
            levels.update((value, loop_level + (len(totals.get(value, ())) > 1)) for value in op.results)
            made.update(op.results)
        elif stages[op.index] == EVERYWHERE:
            copied.update(dict.fromkeys(op.results, op))
        else:
            level = max((level_at(value, stages[op.index]) for value in op.operands), default=0)
            levels.update(dict.fromkeys(op.results, level))
            made.update(op.results)
    return levels, loop_level
