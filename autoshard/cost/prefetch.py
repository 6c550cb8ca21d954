"""Prefetching of a loop's weights: each trip of a scan gathers the weights of the next one while it computes.

A scan slices its stacked weights trip by trip. Sharded weights are gathered before the trip's first product, and that gather is exposed.
With prefetching the gathered arrays are carried: each trip computes on those that the one before has gathered, and gathers the next
one's beside its own compute. This costs one more gather, before the loop, a second buffer during the loop (double buffering), and a copy of
the carried arrays in every trip.

Only values that are known before the trip begins can be prefetched: slices of scanned arrays, and values computed from those alone (a cast
to bfloat16, a transpose).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autoshard.cost.reshard import ReshardPath
from autoshard.ir import Assignment, Body, Graph, Layout, Op, Rule, operand_layout, reductions, replicated, result_layout, view_of
from autoshard.ir.scan import num_carry, num_consts


@dataclass(frozen=True, slots=True)
class Prefetch:
    """A value that a scan's body reads gathered, and that the trip before can gather.

    Attributes:
        operand: the position of the stacked array among the scan's operands.
        chain: the ops that compute the value from its slice.
        value: its number.
        target: the layout in which it is read.
    """

    operand: int
    chain: tuple[Op, ...]
    value: int
    target: Layout


def scans(graph: Graph) -> Iterator[Op]:
    """The loops that scan stacked arrays."""
    return (op for op in graph.walk() if op.primitive == "scan" and op.params["length"] > 1)


def candidates(graph: Graph, rules: Sequence[Rule | None], assignment: Assignment, op: Op, path: ReshardPath) -> tuple[Prefetch, ...]:
    """The values that a scan can prefetch, in the order of their first readers; linear in the size of its body."""
    return tuple(_Finder(graph, rules, assignment, path).found(op))


def prefetches(graph: Graph, rules: Sequence[Rule | None], assignment: Assignment, op: Op, path: ReshardPath) -> tuple[Prefetch, ...]:
    """The values that a scan prefetches under the assignment."""
    if not assignment.ahead or op.primitive != "scan":
        return ()
    found = candidates(graph, rules, assignment, op, path)
    return tuple(each for each in found if assignment.ahead.get(each.value) == each.target)


class _Finder:
    def __init__(self, graph: Graph, rules: Sequence[Rule | None], assignment: Assignment, path: ReshardPath):
        self.graph, self.rules, self.assignment, self.path = graph, rules, assignment, path
        self.made: dict[int, tuple[int, tuple[Op, ...]]] = {}  # per value the scanned operand it comes from, and the ops in between
        self.seen: dict[tuple[int, Layout], Prefetch] = {}

    def found(self, op: Op) -> Iterator[Prefetch]:
        body, first = op.bodies[0], num_consts(op.params) + num_carry(op.params)
        self.made = {value: (first + k, ()) for k, value in enumerate(body.inputs[first:])}
        self._run(body)
        return iter(self.seen.values())

    def _run(self, body: Body) -> None:
        for op in body.ops:
            if op.primitive == "remat2":
                for holder in op.holders:
                    (flow,) = holder.sources
                    if flow.value in self.made and self._layout(holder.value) == self._layout(flow.value):
                        self.made[holder.value] = self.made[flow.value]
                self._run(op.bodies[0])
            elif not op.bodies:
                self._op(op)

    def _layout(self, value: int) -> Layout:
        return self.assignment.layout(value)

    def _op(self, op: Op) -> None:
        rule, choice = self.rules[op.index], self.assignment.choice(op.index)
        whole = replicated(self.assignment.mesh)
        for k, value in enumerate(op.operands):
            if value in self.made and self.graph.values[value].rank:
                self._read(value, whole if rule is None else operand_layout(rule, choice, k))
        if rule is None or len(op.operands) != 1 or len(op.results) != 1 or op.operands[0] not in self.made or reductions(rule, choice):
            return
        (value,), (result,) = op.operands, op.results
        no_reshard = operand_layout(rule, choice, 0) == self._layout(value) and result_layout(rule, choice, 0) == self._layout(result)
        if no_reshard and not any(factor.sends for factor in rule.factors):
            operand, chain = self.made[value]
            self.made[result] = operand, (*chain, op)

    def _read(self, value: int, target: Layout) -> None:
        own = self._layout(value)
        if target == own or (value, target) in self.seen or value in self.assignment.copies:
            return
        operand, chain = self.made[value]
        if chain:  # a view of a gathered value needs no gather of its own
            before = view_of(chain[-1].primitive, self.rules[chain[-1].index], target, self.assignment.mesh.sizes)
            if before is not None and (chain[-1].operands[0], before) in self.seen:
                return
        if any(step.kind == "all_gather" and step.nbytes for step in self.path(value, own, target)):
            self.seen[value, target] = Prefetch(operand, chain, value, target)
