"""Values of a program: what makes and reads them, their bytes over time, which are expansions of constants, which loops only add up."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np
from numpy.typing import ArrayLike

from autoshard.ir import Graph, Holder, Op
from autoshard.primitives import is_computed_once, primitive


def readers_of(graph: Graph) -> list[list[int]]:
    """Per value the indices of the ops that read it; control flow reads the values that it hands to its bodies."""
    found: list[list[int]] = [[] for _ in graph.values]
    for op in graph.walk():
        for value in dict.fromkeys((*op.operands, *(flow.value for holder in op.holders for flow in holder.sources))):
            found[value].append(op.index)
    return found


def makers_of(ops: Iterable[Op]) -> dict[int, Op]:
    """Per value the op that makes it, of some ops without those of their bodies."""
    return {value: op for op in ops for value in op.results}


def operand_readers(ops: Iterable[Op]) -> dict[int, list[Op]]:
    """Per value the ops, in order, that have it as an operand, of some ops without those of their bodies."""
    found: dict[int, list[Op]] = {}
    for op in ops:
        for value in dict.fromkeys(op.operands):
            found.setdefault(value, []).append(op)
    return found


def usage(moments: int, sizes: ArrayLike, born: ArrayLike, dies: ArrayLike) -> np.ndarray:
    """Bytes alive at each moment, ``(moments + 1,)``, of values of these sizes that are alive from one moment until before another."""
    change = np.zeros(moments + 1)
    np.add.at(change, np.asarray(born, np.int64), sizes)
    np.subtract.at(change, np.asarray(dies, np.int64), sizes)
    return np.cumsum(change)


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


def accumulators(loop: Op) -> Iterator[Holder]:
    """What a loop carries and a trip reads only to update it element by element, such as sums of gradients over microbatches."""
    inputs = {value for body in loop.bodies for value in body.inputs}
    carries = [holder for holder in loop.holders if holder.value in inputs and any(flow.inside for flow in holder.sources)]
    # Per value the carry of which it is made element by element.
    made_of = {value: holder.value for holder in carries for value in (holder.value, *holder.views)}
    otherwise = set[int]()  # the carries that are read in another way
    for body in loop.bodies:
        _follow(body.ops, made_of, otherwise)
        returned = {flow.value for holder in loop.holders for flow in holder.sources if flow.inside and holder.value not in made_of}
        otherwise.update(made_of[value] for value in returned & made_of.keys())
    for holder in carries:
        if holder.value not in otherwise and all(made_of.get(flow.value) == holder.value for flow in holder.sources if flow.inside):
            yield holder


def _follow(ops: Iterable[Op], made_of: dict[int, int], otherwise: set[int]) -> None:
    """Adds what ops make of carries element by element, and the carries that they read otherwise."""
    for op in ops:
        if op.bodies:
            _hand_on(op, made_of)
            for body in op.bodies:
                _follow(body.ops, made_of, otherwise)
            _hand_on(op, made_of)
            continue
        read = {made_of[value] for value in op.operands if value in made_of}
        if len(read) == 1 and primitive(op.primitive).kind in ("elementwise", "identity"):
            made_of.update(dict.fromkeys(op.results, *read))
        else:
            otherwise |= read


def _hand_on(op: Op, made_of: dict[int, int]) -> None:
    """Adds what flows into bodies, or out of them."""
    for holder in op.holders:
        for flow in holder.sources:
            if flow.value in made_of:
                made_of.update(dict.fromkeys((holder.value, *holder.views), made_of[flow.value]))
