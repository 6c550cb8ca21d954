"""Buffers of sorts in a TPU's memory, beyond those of their operands and results.

- A stable sort has the positions of what it sorts as one more operand, 32-bit integers, unless it has them already.
- A result that nothing reads, as the sorted positions, is in the device's memory even where it would fit into the core's own.
- The sorted dimension is the second innermost: operands in another order are copied, and results copied back, unless that order takes more
  memory. Copies are sorted in place, and so are operands that nothing else reads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import permutations

from autoshard.compilers.buffer_assignment import read_in
from autoshard.compilers.buffers import Held
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.compilers.tpu.tiling import tiled
from autoshard.ir import Assignment, Op, local_shape

POSITION_BYTES = 4  # evidence: sorts of positions


@dataclass(frozen=True, slots=True)
class SortBuffers:
    """The bytes of one sort: of results that nothing reads, and of operands in the order in which they are sorted."""

    unread: float
    copied: float


def of_sorts(facts: ProgramFacts, assignment: Assignment, fast_memory_bytes: float) -> tuple[list[Held], list[Held]]:
    """The buffers of sorts that are in the device's memory, and those that may be in the core's own."""
    unread, copied = [], []
    for op in facts.sorts:
        found = _buffers(facts, assignment, op, fast_memory_bytes)
        lives = facts.lifetimes.starts[op.index], facts.lifetimes.ends[op.index]
        unread.append((found.unread, *lives))
        copied.append((found.copied, *lives))
    return unread, copied


def _buffers(facts: ProgramFacts, assignment: Assignment, op: Op, fast_memory_bytes: float) -> SortBuffers:
    values, times, root = facts.graph.values, facts.lifetimes, facts.fusion.root
    layout = next(iter(read_in(facts, assignment, op, op.operands[0])), assignment.layout(op.operands[0]))
    local = local_shape(values[op.operands[0]].shape, layout, assignment.mesh.sizes)
    reordered, padded = _order(local, op.params["dimension"])

    def nbytes(itemsize: float) -> float:
        return math.prod(local) * itemsize * padded

    unread = copied = others = replaced = 0.0
    returned = {root[value] for value in facts.graph.results}
    for operand, result in zip(op.operands, op.results, strict=True):
        place, size = times.places.get(root[operand]), nbytes(values[operand].itemsize)
        kept = place is not None and (times.passed[place] or times.dies[place] > times.ends[op.index])
        fixed = root[result] in returned
        if not facts.wanted[result]:
            unread += size if size <= fast_memory_bytes else 0.0
        elif facts.free[operand]:  # positions, which are made in the sort's own order
            copied += size if fixed else 0.0
        elif not kept and not fixed:
            replaced += size if size > fast_memory_bytes else 0.0
        elif reordered:
            copied += size if kept and fixed else 0.0
            others += 0.0 if kept and fixed else size
    positions = nbytes(POSITION_BYTES) if _adds_positions(facts, op) else 0.0
    return SortBuffers(unread + max(positions - replaced, 0.0), copied + max(others - positions, 0.0))


def _order(local: tuple[float, ...], dim: int) -> tuple[bool, float]:
    """Whether operands with this shape of a device's part are copied to be sorted, and how many times their size they take then."""
    if len(local) < 2:
        return False, 1.0
    orders: Iterator[tuple[int, int]] = permutations(reversed(range(len(local))), 2)
    lanes, rows = min(orders, key=lambda order: tiled(local[order[0]], local[order[1]]))
    own = tiled(local[lanes], local[rows])
    sorted_order = tiled(local[-2 if dim == len(local) - 1 else -1], local[dim])
    reordered = rows != dim and sorted_order <= own
    return reordered, sorted_order if reordered else own


def _adds_positions(facts: ProgramFacts, op: Op) -> bool:
    """Whether a sort is stable and has no positions along its dimension among its operands."""
    ops = facts.graph.walk()
    makers = (facts.makers[operand] for operand in op.operands)
    given = (ops[maker] for maker in makers if maker is not None and ops[maker].primitive == "iota")
    return op.params["is_stable"] and all(maker.params["dimension"] != op.params["dimension"] for maker in given)
