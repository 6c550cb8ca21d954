"""Tables of memory: the bytes of values by label, and the labels under which values and their shared copies keep their present layouts.

Labels are those of tables with all mesh axes free, given by their positions there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.compilers.buffer_assignment import Peak
from autoshard.problem.problem import Problem
from autoshard.problem.variables import Edge

Positions = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class Copied:
    """A value's shared copy under some labels; masks are by the label of a variable.

    Attributes:
        copy, home: the variables that decide where it lies, and the value itself.
        nbytes: what a device holds of it.
        same, like_copy: labels of `copy` under which it lies as now, and of `home` under which the value lies so itself.
        reads: the first and the last variable that read the copy as it lies now, with their labels under which they do.
    """

    copy: int
    home: int
    nbytes: float
    same: np.ndarray
    like_copy: np.ndarray
    reads: Mapping[int, np.ndarray]


class MemoryTables:
    """A problem's values in memory; `Problem.remembered` keeps it."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._reads: defaultdict[int, list[Edge]] = defaultdict(list)
        for edge in problem.structure.edges:
            self._reads[edge.source].append(edge)
        home = problem.structure.home
        inputs = ((op.index, value) for op in problem.graph.walk() for body in op.bodies for value in body.inputs)
        self._owners = {home[value][0]: op for op, value in inputs if value in home}  # by variable of a body's input, the op of the body

    def alive(self, moment: int) -> set[int]:
        """The values that are alive at a moment of the program under any labels."""
        times = self.problem.profile.lifetimes
        return {value for value, born, dies in zip(times.values, times.born, times.dies, strict=True) if born <= moment < dies}

    def least_bytes(self, peak: Peak, labels: Positions, only: Collection[int] | None = None) -> tuple[dict[int, np.ndarray], float]:
        """The least that values take at a peak's moment, per variable by its label; and what those take that no variable decides on.

        Where a value lies as it does now it takes what it takes now; elsewhere padding can only add, and rounding to bfloat16 halve.

        Args:
            peak: what the judge says of the labels.
            only: the values that count; all unless given.
        """
        problem, always = self.problem, self.alive(peak.moment)
        narrow, home = problem.profile.fusion.narrow, problem.structure.home
        found: dict[int, np.ndarray] = {}
        whole = 0.0
        for value, nbytes in zip(peak.alive, peak.held, strict=True):
            if value not in always or (only is not None and value not in only):
                continue
            if value not in home:
                whole += nbytes
                continue
            variable, slot = home[value]
            numbers = problem.slots(variable)[slot]
            held, now = problem.held_bytes(value, numbers), labels[variable]
            least = min(0.5 if narrow[value] else 1.0, nbytes / held[now]) * held
            found[variable] = found.get(variable, 0.0) + (least if narrow[value] else np.where(numbers == numbers[now], nbytes, least))
        return found, whole

    def lying_alike(self, value: int, labels: Positions) -> dict[int, np.ndarray]:
        """Per variable that holds or reads a value, the labels under which it lies there as under the given ones."""
        concerned: list[tuple[int, tuple[int, ...]]] = [(variable, (slot,)) for variable, slot in self.problem.places(value)]
        concerned.extend((edge.target, edge.target_slots) for edge in self.problem.structure.edges if edge.value == value)
        alike: dict[int, np.ndarray] = {}
        for variable, slots in concerned:
            numbers = self.problem.slots(variable)
            same = np.all([numbers[slot] == numbers[slot][labels[variable]] for slot in slots], axis=0)
            alike[variable] = alike.get(variable, True) & same
        return alike

    def copied_alike(self, value: int, labels: Positions, moment: int) -> Copied | None:
        """The shared copy of a value under given labels; None where nothing keeps one alive at the moment."""
        problem = self.problem
        if value not in problem.structure.copies:
            return None
        copy, (home, slot) = problem.structure.copies[value], problem.structure.home[value]
        numbers, lies = problem.slots(copy)[0], problem.slots(home)[slot]
        layout = numbers[labels[copy]]
        if layout == lies[labels[home]]:
            return None
        reads: dict[int, np.ndarray] = {}
        for edge in self._reads[copy]:
            slots = problem.slots(edge.target)
            reads[edge.target] = np.all([slots[slot] == layout for slot in edge.target_slots], axis=0) & reads.get(edge.target, True)
        spans = {variable: self._span(variable, value) for variable, same in reads.items() if same[labels[variable]]}
        if not spans or not min(start for start, _ in spans.values()) <= moment < max(end for _, end in spans.values()):
            return None
        ends = {min(spans, key=lambda variable: spans[variable][0]), max(spans, key=lambda variable: spans[variable][1])}
        nbytes = float(problem.held_bytes(value, numbers[labels[copy] : labels[copy] + 1])[0])
        return Copied(copy, home, nbytes, numbers == layout, lies == layout, {variable: reads[variable] for variable in sorted(ends)})

    def _span(self, variable: int, value: int) -> tuple[int, int]:
        """The first moment in which ops of a variable read a value, and the one after the last."""
        found, ops, times = self.problem.structure.variables[variable], self.problem.graph.walk(), self.problem.profile.lifetimes
        deciding = found.leader if found.leader >= 0 else self._owners.get(variable, -1)
        readers = [op for op in (deciding, *(op for op, _, _ in found.members)) if op >= 0 and value in ops[op].operands]
        return min((times.starts[op] for op in readers), default=times.moments), max((times.ends[op] for op in readers), default=0)
