"""The values of a program that share memory: views, carries of loops, and what branches return."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.compilers.fusion_rules import OpKinds
from autoshard.compilers.op_patterns import is_call
from autoshard.ir import Graph, Op
from autoshard.primitives import is_control_flow


class Aliases:
    """The values that share memory, each group by one of them, its root: what is viewed, carried, or returned by a conditional.

    Attributes:
        readers: per root, the ops that read it, or a view of it.
        returned: the roots of the program's results.
    """

    def __init__(self, graph: Graph, kinds: OpKinds):
        self.graph = graph
        self._root = list(range(len(graph.values)))
        for op in graph.walk():
            self._alias(op, kinds)
        self.returned = {self.find(value) for value in graph.results}
        self.readers: list[list[Op]] = [[] for _ in graph.values]
        for op in graph.walk():
            reads = [*op.operands, *(flow.value for holder in op.holders for flow in holder.sources)]
            for value in dict.fromkeys(map(self.find, reads)):
                if not is_call(op) and not kinds.is_view(op):
                    self.readers[value].append(op)

    def find(self, value: int) -> int:
        """The root of a value."""
        while self._root[value] != value:
            value = self._root[value]
        return value

    def share(self, value: int, root: int) -> None:
        """Puts a root, and what it is the root of, in the memory of another."""
        self._root[value] = root

    def begun(self, free: Sequence[bool]) -> frozenset[int]:
        """The carries of outermost loops that begin with constants, of which all else that is ``free`` is made, too."""
        loops = (op for op in self.graph.walk() if is_control_flow(op.primitive) and op.trips == 1)
        flows = ((holder.value, flow) for loop in loops for holder in loop.holders for flow in holder.sources)
        return frozenset(self.find(value) for value, flow in flows if not flow.inside and not flow.shift and free[flow.value])

    def _alias(self, op: Op, kinds: OpKinds) -> None:
        root = self._root
        if kinds.is_view(op):
            shared, _ = kinds.added_to.get(op.index, (0, 0))
            root[op.results[0]] = self.find(op.operands[shared])
        for holder in op.holders:
            first = next((flow for flow in holder.sources if not flow.inside and not flow.shift), None)
            alone = len(holder.sources) == 1 and (not holder.views or op.primitive == "cond") and holder.value not in op.results
            if first is not None and alone:
                root[holder.value] = self.find(first.value)  # read in each trip of a loop, or by a call
            for view in holder.views:
                root[view] = holder.value
        if op.primitive == "cond":
            self._alias_results(op)

    def _alias_results(self, cond: Op) -> None:
        """Results that are one value in every branch are that; others are written where branches make them."""
        inside = {value for body in cond.bodies for op in body.ops for value in op.results}
        known: dict[tuple[int, ...], int] = {}
        for holder in cond.holders:
            if holder.value in cond.results:
                made = tuple(self.find(flow.value) for flow in holder.sources)
                self._root[holder.value] = made[0] if len({*made}) == 1 else known.setdefault(made, holder.value)
                if self._root[holder.value] == holder.value:
                    for value in inside.intersection(made):
                        self._root[value] = holder.value
