"""Windowed matrix products: blocks circulate around a ring of devices while each multiplies the one it has.

The all_gather of a product's operand, or the reduce_scatter of its partial results, is exposed unless independent work hides it. A windowed
product (Wang et al., Overlap Communication with Dependent Computation via Decomposition, ASPLOS 2023) decomposes both into
collective_permutes: each of ``n`` devices multiplies its own block first while its neighbours' blocks arrive, and so on; or it adds its
part of a block to the partial sum that arrives, and passes that on. The bytes sent are the same, the gathered array is never stored, and
all permutes but the first are hidden by the products themselves. The cost is ``n`` smaller kernels for one large one, and a permute's
launch for each block.

Candidates: an operand that one all_gather brings and that no other op reads gathered; a result that one reduce_scatter combines.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.cost.reshard import ReshardPath, Step, combinations
from autoshard.ir import Assignment, Graph, Layout, Op, Rule, computed_layout, operand_layout, reductions, result_layout
from autoshard.primitives import is_rearrangement

MOST_BLOCKS = 16  # each is a kernel of its own in the compiled program; evidence: blocks of a ring are kernels
RESULT = -1


@dataclass(frozen=True, slots=True)
class Window:
    """A windowed product.

    Attributes:
        op: the product.
        operand: the position of the operand whose blocks circulate; `RESULT` where partial results do.
        step: the collective that the window replaces.
        dim: the dimension of that operand, or of the result, that is split into blocks.
        factor: the rule's factor of that dimension.
        blocks: the number of blocks, which is that of the ring's devices.
        made: the layout of the product, after scattering where partial results circulate.
    """

    op: Op
    operand: int
    step: Step
    dim: int
    factor: int
    blocks: int
    made: Layout

    @property
    def value(self) -> int:
        """The number of the value whose blocks circulate."""
        return self.op.results[0] if self.operand == RESULT else self.op.operands[self.operand]

    @property
    def halves(self) -> int:
        """The parts of each block that circulate: two in opposite directions for partial results on more than two devices, else one."""
        return 2 if self.operand == RESULT and self.blocks > 2 else 1


class Windows:
    """The windowed products of a program under an assignment, assigned and possible.

    Args:
        graph, rules, assignment: the program, its rules and its assignment.
        path: the steps of each reshard.
        readers: per value the indices of the ops that read it.
        late: values that stay partial (`autoshard.analysis.partial_sums`).
    """

    def __init__(
        self,
        graph: Graph,
        rules: Sequence[Rule | None],
        assignment: Assignment,
        path: ReshardPath,
        readers: Sequence[Sequence[int]],
        late: frozenset[int],
    ):
        self.graph, self.rules, self.assignment, self.path, self.readers, self.late = graph, rules, assignment, path, readers, late

    def assigned(self) -> dict[int, Window]:
        """The windows of the assignment, by op index."""
        found = {}
        for index, operand in self.assignment.windows.items():
            if (window := self.window(self.graph.walk()[index], operand)) is not None:
                found[index] = window
        return found

    def all(self) -> Iterator[Window]:
        """All possible windows, in program order."""
        for op in self.graph.walk():
            if op.primitive == "dot_general":
                yield from (window for operand in (RESULT, 0, 1) if (window := self.window(op, operand)) is not None)

    def window(self, op: Op, operand: int) -> Window | None:
        """The window of a product's operand, or of its result; None where it is not possible."""
        rule = self.rules[op.index]
        if op.primitive != "dot_general" or rule is None or len(set(op.operands)) < 2:
            return None
        step = self._scattered(op, rule) if operand == RESULT else self._gathered(op, rule, operand)
        if step is None:
            return None
        (dim,) = {(step.target if operand == RESULT else step.source)[axis] for axis in step.axes}
        factors = (rule.results[0] if operand == RESULT else rule.operands[operand])[dim]
        blocks = math.prod(self.assignment.mesh.sizes[axis] for axis in step.axes)
        made = step.target if operand == RESULT else computed_layout(rule, self.assignment.choice(op.index), 0)
        window = Window(op, operand, step, dim, factors[0], blocks, made)
        local = rule.factors[factors[0]].size / self._split(op, factors[0]) / blocks
        if len(factors) != 1 or not 2 <= blocks <= MOST_BLOCKS or local % window.halves or local < window.halves:
            return None
        return window

    def _split(self, op: Op, factor: int) -> int:
        return math.prod(n for (f, _), n in zip(self.assignment.choice(op.index), self.assignment.mesh.sizes, strict=True) if f == factor)

    def _gathered(self, op: Op, rule: Rule, operand: int) -> Step | None:
        """The all_gather of an operand that only this op reads gathered; None where there is more, or another collective."""
        value, own = op.operands[operand], self.assignment.layout(op.operands[operand])
        target = operand_layout(rule, self.assignment.choice(op.index), operand)
        if own == target or self.assignment.copies.get(value, target) != target or value in self.assignment.ahead:
            return None
        only_own = value in self.assignment.copies  # readers in other layouts would be served from the copy
        if any(self._reads(self.graph.walk()[reader], value, target, only_own) for reader in self.readers[value] if reader != op.index):
            return None
        steps = self.path(value, own, target)
        return steps[0] if len(steps) == 1 and steps[0].kind == "all_gather" and steps[0].nbytes else None

    def _reads(self, op: Op, value: int, target: Layout, only_own: bool) -> bool:
        """Whether an op may read a value in a layout (in any but its own with ``only_own``), or make a view of it in that layout."""
        rule, own = self.rules[op.index], self.assignment.layout(value)
        if op.bodies or rule is None or is_rearrangement(op.primitive):
            return True
        choice = self.assignment.choice(op.index)
        read = [operand_layout(rule, choice, k) for k, operand in enumerate(op.operands) if operand == value]
        return target in read or (only_own and any(layout != own for layout in read))

    def _scattered(self, op: Op, rule: Rule) -> Step | None:
        """The reduce_scatter of an op's partial results; None where combining them takes more, or another collective."""
        (value,), choice, sizes = op.results, self.assignment.choice(op.index), self.assignment.mesh.sizes
        partial = [each for each in reductions(rule, choice) if sizes[each[0]] > 1]
        moves = list(combinations(computed_layout(rule, choice, 0), partial))
        if len(moves) != 1 or moves[0][0] != "reduce_scatter" or value in self.late:
            return None
        if result_layout(rule, choice, 0) != self.assignment.layout(value):
            return None
        if any(self.graph.walk()[reader].primitive == "transpose" for reader in self.readers[value]):
            return None  # the lowering transposes such products before it combines them
        kind, _, axes, before, after = moves[0]
        return Step(kind, axes, before, after, 0.0, 0.0)
