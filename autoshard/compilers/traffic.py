"""Traffic of ops between a device's memory and its units.

Without more knowledge of a compiler an op moves those of its operands and results that are in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.compilers.fused_program import Fusion
from autoshard.ir import Graph, Op
from autoshard.primitives import is_matrix


@dataclass(frozen=True, slots=True)
class Traffic:
    """The memory traffic of one op.

    Attributes:
        tensors: pairs of a tensor, operands first, then results, and bytes of a value that is split as it is.
        passes: the same of tensors that never stay on the chip: results that go through buffers of float32, and slices of stacks.
        starts: how many kernels' starts it costs; 0 where it is part of another op's kernel.
        sent: the same of operands that are computed as they are read, but for where shards send parts of them: a kernel stores them then.
        before: the same of operands that another kernel makes ready, before the op reads them.
        filled: the same of results that are filled with zeros before rows are added to them, unless the compiler sorts the rows first.
        by_rows: of each tensor of which whole rows are looked up or added to its position, the bytes of a number of a copy whose rows are
            stored one by one, where the compiler makes one, and how often it does in an execution of the op.
    """

    tensors: tuple[tuple[int, float], ...] = ()
    passes: tuple[tuple[int, float], ...] = ()
    starts: int = 0
    sent: tuple[tuple[int, float], ...] = ()
    before: tuple[tuple[int, float], ...] = ()
    filled: tuple[tuple[int, float], ...] = ()
    by_rows: tuple[tuple[int, float, float], ...] = ()


def widened_bytes(itemsize: float, wide_bytes: int) -> int:
    """The bytes an element that a kernel's result costs beside itself where it is narrower than the buffer that it passes through."""
    return wide_bytes if itemsize < wide_bytes else 0


def traffic_by_op(graph: Graph, fusion: Fusion) -> tuple[Traffic, ...]:
    """Per op its traffic where every op that touches memory is a kernel.

    A scatter that could write in place of the summand of its zeros writes all of them: it does where the two are not sharded alike.
    """
    written = {graph.walk()[scatter].results[0] for scatter, _ in fusion.scattered}
    added = {op for _, op in fusion.scattered}

    def of(op: Op) -> Traffic:
        if op.index in added:
            return Traffic()
        tensors = enumerate((*op.operands, *op.results))
        moved = tuple(
            (position, graph.values[value].nbytes) for position, value in tensors if fusion.materialised[value] or value in written
        )
        if op.primitive == "gather":  # reads the elements that it takes, not the whole operand
            taken = graph.values[op.results[0]].size * graph.values[op.operands[0]].itemsize
            moved = tuple((position or len(op.operands), min(nbytes, taken) if not position else nbytes) for position, nbytes in moved)
        return Traffic(moved, starts=int(bool(moved) or is_matrix(op.primitive)))

    return tuple(Traffic() if op.bodies else of(op) for op in graph.walk())


def sent_by_op(
    graph: Graph, fusion: Fusion, sending: Sequence[tuple[Op, Sequence[int]]], wide_bytes: int
) -> dict[int, tuple[tuple[int, float], ...]]:
    """Per op that sends parts of its operands, if it is sharded so, the bytes of storing those: once, for the first op that sends them.

    Args:
        sending: ops, and the positions of the operands that they may send parts of.
        wide_bytes: of the buffers through which the compiler passes narrower values.
    """
    stored: set[int] = set()
    found: dict[int, tuple[tuple[int, float], ...]] = {}
    for op, positions in sending:
        moved = []
        for position in positions:
            value, root = graph.values[op.operands[position]], fusion.root[op.operands[position]]
            if not fusion.stored[root] and root not in stored:
                stored.add(root)
                moved.append((position, value.size * (2 * value.itemsize + widened_bytes(value.itemsize, wide_bytes))))
        if moved:
            found[op.index] = tuple(moved)
    return found
