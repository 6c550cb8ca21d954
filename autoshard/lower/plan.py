"""The view of an assignment that both lowerings share: layouts of values, layouts at bodies, and the source of each reshard."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.cost.reshard import ReshardPath, path_seconds
from autoshard.ir import Assignment, Graph, Layout, Op, Rule, served_from
from autoshard.lower.control_flow import FLOWS, Flows
from autoshard.lower.interpret import Path


def holder_values(graph: Graph) -> dict[int, int]:
    """Per value that shares a holder's layout, the holder's value."""
    return {view: holder.value for op in graph.walk() for holder in op.holders for view in holder.views}


def stored_layout(assignment: Assignment, holders: Mapping[int, int], value: int) -> Layout:
    """The layout in which a value is stored: its own, or its holder's."""
    while value not in assignment.layouts and value in holders:
        value = holders[value]
    return assignment.layout(value)


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """An assignment with the facts of the program that a lowering needs.

    Attributes:
        ops: per path of an equation, its op.
        rules, assignment: the sharding rules, and the choices and layouts.
        reshard_path: the cheapest collectives from one layout of a value to another.
        holders: see `holder_values`.
        free: per value, whether it is computed from constants alone, and so recomputed wherever it is read.
    """

    ops: Mapping[Path, Op]
    rules: tuple[Rule | None, ...]
    assignment: Assignment
    reshard_path: ReshardPath
    holders: Mapping[int, int]
    free: tuple[bool, ...]

    def layout(self, value: int) -> Layout:
        """The layout in which a value is stored."""
        return stored_layout(self.assignment, self.holders, value)

    def flows(self, op: Op) -> Flows:
        """The layouts of the operands, inputs and outputs of an op's bodies."""
        return FLOWS[op.primitive](op, self.layout)

    def source(self, value: int, target: Layout) -> Layout:
        """The layout from which a value is resharded for a reader: its own, or its copy's where that is cheaper."""

        def seconds(source: Layout, target: Layout) -> float:
            return path_seconds(self.reshard_path(value, source, target))

        return served_from(self.layout(value), self.assignment.copies.get(value), target, seconds)
