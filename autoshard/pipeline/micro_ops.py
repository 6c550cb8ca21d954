"""The operations of one microbatch: its backward pass, what is cheap enough to compute twice, and the arguments behind its values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush

import numpy as np

from autoshard.analysis.values import operand_readers, usage
from autoshard.ir import Graph, Op
from autoshard.pipeline.micro import Micro
from autoshard.primitives import is_matrix


def is_backward(micro: Micro) -> tuple[bool, ...]:
    """Per op of the body whether it belongs to the backward pass: JAX names it a transposed one, or it depends on such an op.

    So does what comes back from the memory of hosts, where the forward pass sends what is read by the backward pass alone.

    Where JAX names none so, nor any one as differentiated, it is what comes after the op at which most bytes are alive, if the program adds
    up arrays at all. Where some are named as differentiated, this is a pass over the microbatches without gradients.
    """
    made, values = set[int](), micro.graph.values
    found = []
    for op in micro.body.ops:
        backward = "transpose(" in op.origin.name_stack or any(value in made or values[value].on_host for value in op.operands)
        backward = backward and not all(micro.free[value] for value in op.results)
        found.append(backward)
        if backward:
            made.update(op.results)
    arrays = any(micro.graph.values[each.part].rank for each in micro.sums)
    if any(found) or not arrays or any("jvp(" in op.origin.name_stack for op in micro.body.ops):
        return tuple(found)
    turn = _fullest(micro)
    return tuple(k > turn for k in range(len(micro.body.ops)))


def _fullest(micro: Micro) -> int:
    """The op of the body after which most bytes of what it made are alive."""
    ops, values = micro.body.ops, micro.graph.values
    last = {value: k for k, op in enumerate(ops) for value in op.operands}
    made = {value: k for k, op in enumerate(ops) for value in op.results if value in last and not micro.free[value]}
    return int(np.argmax(usage(len(ops), [values[v].nbytes for v in made], [*made.values()], [last[v] for v in made])))


def light_ops(micro: Micro) -> tuple[bool, ...]:
    """Per op of the body whether each stage that reads it computes it: of constants, or cheap and of the microbatch's inputs alone."""
    ops = micro.body.ops
    index = micro.index
    readers = operand_readers(ops)

    def is_sliced(value: int) -> bool:
        reads = readers.get(value, [])
        inner = [reader for op in reads if op.primitive == "reshape" for reader in readers.get(op.results[0], [])]
        direct = [op for op in reads if op.primitive != "reshape"]
        return bool(reads) and all(op.primitive == "dynamic_slice" for op in (*direct, *inner))

    light = {value for value in micro.entering if is_sliced(value)} | {value for value, free in enumerate(micro.free) if free}
    light.update(() if index is None else (index,))
    found = []
    for op in ops:
        effects = getattr(op.equation, "effects", ())
        found.append(not op.bodies and not is_matrix(op.primitive) and not effects and all(value in light for value in op.operands))
        if found[-1]:
            light.update(op.results)
    return tuple(found)


def roots_of(micro: Micro) -> dict[int, int]:
    """Per input of the body the largest argument that it is computed of, and per sum the argument that it updates."""
    graph = micro.graph
    of: dict[int, int] = {value: value for value in graph.arguments}
    for op in graph.ops:
        if op is not micro.loop:
            roots = [of[value] for value in op.operands if value in of]
            if roots:
                of.update(dict.fromkeys(op.results, max(roots, key=lambda root: graph.values[root].nbytes)))
    found = {inner: of[outer] for inner, outer in micro.entering.items() if outer in of}
    read = set(found.values())
    updated = {graph.results[result]: graph.arguments[argument] for result, argument in graph.aliases if graph.arguments[argument] in read}
    readers = operand_readers(graph.ops)
    for each in micro.sums:
        if (argument := _updated(graph, micro.loop.results[each.position], updated, readers)) is not None:
            found[each.update.results[0]] = argument
    return found


def _updated(graph: Graph, total: int, updated: Mapping[int, int], readers: Mapping[int, Sequence[Op]]) -> int | None:
    """The argument that is replaced by what is computed of a sum, element by element; None where there is none.

    Args:
        updated: per result that replaces an argument, the argument.
        readers: per value the ops that read it.
    """
    values, size = graph.values, graph.values[total].size
    if size <= 1:
        return None
    waiting = [op.index for op in readers.get(total, ())]  # ordered, and so a heap
    seen = set(waiting)
    while waiting:
        for value in graph.walk()[heappop(waiting)].results:
            if values[value].size != size:
                continue
            if value in updated:
                return updated[value]
            for op in readers.get(value, ()):
                if op.index not in seen:
                    seen.add(op.index)
                    heappush(waiting, op.index)
    return None
