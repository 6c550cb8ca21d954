"""Tables of memory: bytes of values by label, and the labels that keep the present layouts of values and of their shared copies.

Labels are positions in the domains with all mesh axes free.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from autoshard.compilers.buffer_assignment import stored_partials
from autoshard.compilers.buffers import Peak
from autoshard.ir import layout_of
from autoshard.primitives import is_rearrangement
from autoshard.problem.problem import Problem, leading_variables
from autoshard.problem.variables import Edge

Positions = Sequence[int] | np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class SharedCopy:
    """The shared copy of a value under some labels. Masks are by the labels of a variable.

    Attributes:
        copy, home: the variables that determine the layouts of the copy and of the value.
        nbytes: bytes of the copy on a device.
        same: mask of the labels of `copy` that keep the copy's layout.
        like_copy: mask of the labels of `home` under which the value has the copy's layout, and needs no copy.
        reads: by variable, of the first and the last that read the copy in its layout, the mask of the labels under which they do.
    """

    copy: int
    home: int
    nbytes: float
    same: np.ndarray
    like_copy: np.ndarray
    reads: Mapping[int, np.ndarray]


class MemoryTables:
    """The memory tables of a problem; `Problem.cached` keeps them."""

    def __init__(self, problem: Problem):
        self.problem = problem
        self._reads: defaultdict[int, list[Edge]] = defaultdict(list)
        self._read_by: defaultdict[int, list[Edge]] = defaultdict(list)
        for edge in problem.decisions.edges:
            self._reads[edge.source].append(edge)
            self._read_by[edge.target].append(edge)
        home = problem.decisions.home
        inputs = ((op.index, value) for op in problem.graph.walk() for body in op.bodies for value in body.inputs)
        self._owners = {home[value][0]: op for op, value in inputs if value in home}  # by variable of a body's input
        self._partials: dict[int, np.ndarray] = {}
        self._copies: dict[tuple[int, int], np.ndarray] = {}

    def alive(self, moment: int) -> set[int]:
        """The values that are live at a moment of the program, which labels do not change."""
        times = self.problem.facts.lifetimes
        return {value for value, born, dies in zip(times.values, times.born, times.dies, strict=True) if born <= moment < dies}

    def held_bytes(self, peak: Peak, labels: Positions) -> dict[tuple[int, int], float]:
        """The bytes of values at a peak, padding included, by value and the number of its layout; none of what may be rounded elsewhere."""
        problem, always, home = self.problem, self.alive(peak.moment), self.problem.decisions.home
        held = {value: nbytes for value, nbytes in zip(peak.alive, peak.held, strict=True) if value in always and value in home}
        return {
            (value, int(problem.slots(home[value][0])[home[value][1]][labels[home[value][0]]])): nbytes
            for value, nbytes in held.items()
            if not problem.facts.fusion.narrow[value]
        }

    def least_bytes(
        self,
        peak: Peak,
        labels: Positions,
        only: Collection[int] | None = None,
        known: Mapping[tuple[int, int], float] = MappingProxyType({}),
    ) -> tuple[dict[int, np.ndarray], float]:
        """A lower bound of the bytes at a peak's moment: per variable by its label ``(n,)``, and of the values that have no variable.

        In its present layout a value takes its present bytes; in others its shard's, which padding can only increase and rounding to
        bfloat16 halve.

        Args:
            peak: as judged for the labels.
            labels: the position of each variable's label.
            only: the values that count; all unless given.
            known: bytes in other layouts, as `held_bytes` has them of other peaks.
        """
        problem, always = self.problem, self.alive(peak.moment)
        narrow, home = problem.facts.fusion.narrow, problem.decisions.home
        bytes_of: dict[int, np.ndarray] = {}
        undecided = 0.0
        for value, nbytes in zip(peak.alive, peak.held, strict=True):
            if value not in always or (only is not None and value not in only):
                continue
            if value not in home:
                undecided += nbytes
                continue
            variable, slot = home[value]
            numbers = problem.slots(variable)[slot]
            shard, now = problem.device_bytes(value, numbers), labels[variable]
            least = min(0.5 if narrow[value] else 1.0, nbytes / shard[now]) * shard
            taken = least if narrow[value] else np.where(numbers == numbers[now], nbytes, least)
            if not narrow[value]:
                taken = np.array([known.get((value, number), least) for number, least in zip(numbers.tolist(), taken, strict=True)])
            bytes_of[variable] = bytes_of.get(variable, 0.0) + taken
        return bytes_of, undecided

    def running(self, moment: int) -> dict[int, int]:
        """The ops that lead a variable and run at a moment, each with its variable."""
        times = self.problem.facts.lifetimes
        leaders = self.problem.cached_for_all_meshes(leading_variables)
        return {op: variable for op, variable in leaders.items() if times.starts[op] <= moment < times.ends[op]}

    def partial_bytes(self, op: int) -> np.ndarray:
        """The bytes ``(n,)`` of the partial result that a device stores while an op runs, by the labels of the variable that it leads."""
        if (found := self._partials.get(op)) is None:
            problem, one = self.problem, self.problem.graph.walk()[op]
            domain = problem.costs.whole_domain(problem.cached_for_all_meshes(leading_variables)[op])
            found = self._partials[op] = np.zeros(len(domain.labels))
            (variable, slot) = problem.decisions.home.get(one.results[0], (-1, -1))
            if len(one.results) == 1 and variable >= 0 and not problem.facts.idle[op]:
                held = problem.device_bytes(one.results[0], problem.slots(variable)[slot])
                for k, label in enumerate(domain.labels):
                    for step in problem.model.reduction_path(problem.facts, one, label, 0)[:1]:
                        stored = stored_partials(problem.facts, {op: step}, lambda _, k=k: float(held[k]), problem.mesh.sizes)
                        found[k] = step.nbytes if op in stored else 0.0
        return found

    def copies_read(self, moment: int, labels: Positions) -> dict[int, tuple[int, int, np.ndarray]]:
        """By value, a lower bound of the bytes of copies in other layouts that an op which runs at a moment reads.

        They are by the labels of two variables: that of the value, and the one that the op leads. Of several ops that read a value then it
        is the one whose copies take the most under given labels, since they may share a copy. Values are left out whose copies may serve
        others.
        """
        found: dict[int, tuple[int, int, np.ndarray]] = {}
        for op, variable in self.running(moment).items():
            for edge in self._read_by.get(variable, ()):
                if edge.value in self.problem.graph.walk()[op].operands and self._has_own_copies(edge.value):
                    table = self._copied(edge)
                    other = found.get(edge.value)
                    now = table[labels[edge.source], labels[variable]]
                    if other is None or now > other[2][labels[other[0]], labels[other[1]]]:
                        found[edge.value] = edge.source, variable, table
        return found

    def _has_own_copies(self, value: int) -> bool:
        """Whether each layout in which a value is read and not stored is a copy that is live while any op reads it.

        So it is if the value has no shared copy, is no view of what is read in other layouts, and those that read it or a view of it run
        in the program's order.
        """
        problem, facts, ops, times = self.problem, self.problem.facts, self.problem.graph.walk(), self.problem.facts.lifetimes
        home, maker, readers = problem.decisions.home, facts.makers[value], set(facts.readers[value])
        if value in problem.decisions.copies or facts.settled[value] or any(ops[op].bodies for op in readers):
            return False
        if maker is not None and is_rearrangement(ops[maker].primitive):
            viewed = ops[maker].operands[0]
            if set(facts.readers[viewed]) != {maker} or viewed not in home or home[viewed][0] != home[value][0]:
                return False
        views = [result for op in readers if is_rearrangement(ops[op].primitive) for result in ops[op].results]
        order = sorted(readers.union(*(facts.readers[view] for view in views)))
        return all(list(map(at.__getitem__, order)) == sorted(map(at.__getitem__, order)) for at in (times.starts, times.ends))

    def _copied(self, edge: Edge) -> np.ndarray:
        """The bytes of copies ``(n_source, n_target)`` that a read makes of its value."""
        key = edge.value, edge.target
        if (found := self._copies.get(key)) is None:
            problem, one = self.problem, self.problem.graph.values[edge.value]
            rounded = problem.facts.compiler.demotes_operands and one.dtype == "float32"
            stored = problem.slots(edge.source)[edge.source_slot]
            found = np.zeros((len(stored), len(problem.slots(edge.target)[0])))
            before: list[np.ndarray] = []
            for read in (problem.slots(edge.target)[slot] for slot in edge.target_slots):
                nbytes = problem.device_bytes(edge.value, read) / (2 if rounded else 1)
                sent = {(a, b): self._is_sent(edge.value, a, b) for a in set(stored.tolist()) for b in set(read.tolist())}
                mask = np.array([[sent[a, b] for b in read.tolist()] for a in stored.tolist()])
                found = found + mask * nbytes * np.all([read != other for other in before] or [True], axis=0)
                before.append(read)
            self._copies[key] = found
        return found

    def _is_sent(self, value: int, source: int, target: int) -> bool:
        """Whether a copy of a value in another layout is made of what others send, and not a slice of what a device has."""
        mesh, one = self.problem.mesh, self.problem.graph.values[value]
        before, after = (layout_of(number, one.rank, len(mesh.axes)) for number in (source, target))
        apart = any(a != b and size > 1 for a, b, size in zip(before, after, mesh.sizes, strict=True))
        return apart and any(step.kind != "slice" for step in self.problem.model.reshard_path(one, before, after))

    def same_layout(self, value: int, labels: Positions) -> dict[int, np.ndarray]:
        """Per variable that stores or reads a value, the mask of the labels that keep its layouts under the given ones."""
        uses: list[tuple[int, tuple[int, ...]]] = [(variable, (slot,)) for variable, slot in self.problem.places(value)]
        uses.extend((edge.target, edge.target_slots) for edge in self.problem.decisions.edges if edge.value == value)
        masks: dict[int, np.ndarray] = {}
        for variable, slots in uses:
            numbers = self.problem.slots(variable)
            same = np.all([numbers[slot] == numbers[slot][labels[variable]] for slot in slots], axis=0)
            masks[variable] = masks.get(variable, True) & same
        return masks

    def shared_copy(self, value: int, labels: Positions, moment: int) -> SharedCopy | None:
        """The shared copy of a value under given labels; None where none is live at the moment."""
        problem = self.problem
        if value not in problem.decisions.copies:
            return None
        copy, (home, slot) = problem.decisions.copies[value], problem.decisions.home[value]
        numbers, own = problem.slots(copy)[0], problem.slots(home)[slot]
        layout = numbers[labels[copy]]
        if layout == own[labels[home]]:
            return None
        reads: dict[int, np.ndarray] = {}
        for edge in self._reads[copy]:
            slots = problem.slots(edge.target)
            reads[edge.target] = np.all([slots[slot] == layout for slot in edge.target_slots], axis=0) & reads.get(edge.target, True)
        spans = {variable: self._span(variable, value) for variable, same in reads.items() if same[labels[variable]]}
        if not spans or not min(start for start, _ in spans.values()) <= moment < max(end for _, end in spans.values()):
            return None
        ends = {min(spans, key=lambda variable: spans[variable][0]), max(spans, key=lambda variable: spans[variable][1])}
        nbytes = float(problem.device_bytes(value, numbers[labels[copy] : labels[copy] + 1])[0])
        return SharedCopy(copy, home, nbytes, numbers == layout, own == layout, {variable: reads[variable] for variable in sorted(ends)})

    def _span(self, variable: int, value: int) -> tuple[int, int]:
        """The first moment at which ops of a variable read a value, and the one after the last."""
        one, ops, times = self.problem.decisions.variables[variable], self.problem.graph.walk(), self.problem.facts.lifetimes
        first = one.leader if one.leader >= 0 else self._owners.get(variable, -1)
        readers = [op for op in (first, *(op for op, _, _ in one.followers)) if op >= 0 and value in ops[op].operands]
        return min((times.starts[op] for op in readers), default=times.moments), max((times.ends[op] for op in readers), default=0)
