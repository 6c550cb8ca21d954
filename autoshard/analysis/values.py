"""Values of a program: which ops read them, and which are expansions of constants."""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.ir import Graph
from autoshard.primitives import is_computed_once


def readers_of(graph: Graph) -> list[list[int]]:
    """Per value the indices of the ops that read it; control flow reads the values that it hands to its bodies."""
    found: list[list[int]] = [[] for _ in graph.values]
    for op in graph.walk():
        for value in dict.fromkeys((*op.operands, *(flow.value for holder in op.holders for flow in holder.sources))):
            found[value].append(op.index)
    return found


def free_values(graph: Graph, entering: Mapping[int, int] | None = None) -> list[bool]:
    """Per value whether it is an expansion of constants: literals, iota, and values that the partitioner computes again from those.

    Args:
        entering: per input of a body, which is free where that is, the value that it is in each trip.
    """
    free, entering = [False] * len(graph.values), entering or {}
    for literal in graph.literals:
        free[literal] = True
    for op in graph.walk():
        for body in op.bodies:
            for value in entering.keys() & set(body.inputs):
                free[value] = free[entering[value]]
        if op.bodies or is_computed_once(op.primitive) or not op.results:
            continue
        if op.primitive == "iota" or (op.operands and all(free[value] for value in op.operands)):
            for result in op.results:
                free[result] = True
    return free
