"""What both lowerings read of a plan: layouts of values, flows into bodies, and which copy serves a reader."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autoshard.cost.reshard import ReshardPath, path_seconds
from autoshard.ir import Assignment, Graph, Layout, Op, Rule, served_from
from autoshard.lower.control_flow import FLOWS, Flows
from autoshard.lower.interpret import Path


def homes(graph: Graph) -> dict[int, int]:
    """Per value that shares a holder's layout, the holder's value."""
    return {view: holder.value for op in graph.walk() for holder in op.holders for view in holder.views}


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """An assignment as a lowering reads it.

    Attributes:
        ops: per path of an equation, its op.
        rules, assignment: how each op may be split, and how it is.
        reshard_path: the cheapest collectives from one layout of a value to another.
        home: as `homes` has it.
        free: per value, whether it is made of constants alone, and so computed wherever it is read.
    """

    ops: Mapping[Path, Op]
    rules: tuple[Rule | None, ...]
    assignment: Assignment
    reshard_path: ReshardPath
    home: Mapping[int, int]
    free: tuple[bool, ...]

    def layout(self, value: int) -> Layout:
        """The layout in which a value's own array is kept."""
        while value not in self.assignment.layouts and value in self.home:
            value = self.home[value]
        return self.assignment.layout(value)

    def flows(self, op: Op) -> Flows:
        """What enters and leaves an op's bodies."""
        return FLOWS[op.primitive](op, self.layout)

    def source(self, value: int, target: Layout) -> Layout:
        """The layout that a reader in another layout is served from: the value's, or its shared copy's where that is cheaper."""

        def seconds(source: Layout, target: Layout) -> float:
            return path_seconds(self.reshard_path(value, source, target))

        return served_from(self.layout(value), self.assignment.copies.get(value), target, seconds)
