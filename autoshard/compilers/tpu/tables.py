"""Tables of short rows: when XLA:TPU stores their rows one by one to look up or add to some, and what copying them so costs.

A table whose rows do not fill the lanes of a tile is handed in, and returned, in an order that pads less, as column by column.
"""

from __future__ import annotations

import math

from autoshard.compilers.fused_program import Fusion
from autoshard.compilers.tpu.tiling import LANES, MOST_WASTED_BYTES, by_rows, padding, tiled
from autoshard.ir import Graph, Op

# Tables that rows are added to are stored row by row up to this share of the memory.
# evidence: largest tables that rows are added to
MOST_ADDED_TO = 0.05
# And where their tiles waste more than lookups allow, only if a row is added for each 30 tiles of 1,024 numbers that are wasted.
WASTED_BY_ROW = 30 * 1024  # evidence: rows that are added to large tables
# What a copy between the two orders costs, as bytes at the rate that memory reaches: each number that is read or written, in rows also
# those that only fill tiles, as much as 5.7 whatever its type, since copies are fused with nothing and work on float32.
COPIED_BYTES = 5.7  # evidence: copies of tables of short rows
NEAR_COPIED_BYTES = 1.0  # in rows that fit into the core's own memory; evidence: near copies of tables of short rows
# Rows that are added to zeros are sorted first if there is one for each so many bytes of the table, in rows of whole tiles; a kernel writes
# all of the table then. Else the zeros are filled in before.
SORTED_BYTES = 17_200  # evidence: rows that are sorted before they are added
FILLED_BYTES = 10.0  # evidence: zeros in rows of whole tiles


def are_looked_up_by_rows(local: tuple[float, ...], itemsize: float) -> bool:
    """Whether a table is copied to look up its rows; ``local`` is the shape of a device's part."""
    return math.prod(local[:-1]) >= LANES and by_rows(local, itemsize) > padding(local)


def are_added_to_by_rows(local: tuple[float, ...], itemsize: float, added: float, memory_bytes: float) -> bool:
    """Whether rows are added to a copy of a table in a device's memory.

    Args:
        local: the shape of a device's part.
        added: how many rows the device adds; infinite where an update shares an array with their sum.
    """
    padded, own, size = tiled(local[-1], math.prod(local[:-1])), padding(local), math.prod(local)
    wasted = (padded - own) * size
    worth = padded < 2 or wasted * itemsize <= MOST_WASTED_BYTES or wasted <= added * WASTED_BY_ROW
    return math.prod(local[:-1]) >= LANES and padded != own and size * itemsize * padded <= MOST_ADDED_TO * memory_bytes and worth


def are_sorted(local: tuple[float, ...], itemsize: float, added: float) -> bool:
    """Whether rows that are added to zeros are sorted; ``local`` is the shape of a device's part of the table."""
    return math.prod(local) * tiled(local[-1], math.prod(local[:-1])) * itemsize <= added * SORTED_BYTES


def row_bytes(local: tuple[float, ...], itemsize: float, added: float, fast_memory_bytes: float) -> float:
    """What a copy of a table costs whose part on a device has this shape, and filling it with zeros before rows are added, in bytes.

    Args:
        local: the shape.
        itemsize: of a number of the copy.
        added: how many rows are added; 0 where they are looked up.
        fast_memory_bytes: the core's own memory.
    """
    own = math.prod(local) * padding(local)
    in_rows = math.prod(local) * tiled(local[-1], math.prod(local[:-1]))
    if in_rows * itemsize <= fast_memory_bytes:
        return in_rows * NEAR_COPIED_BYTES + own * COPIED_BYTES
    filled = FILLED_BYTES * (in_rows - own) if added and not are_sorted(local, itemsize, added) else 0.0
    return in_rows * COPIED_BYTES + own * COPIED_BYTES + filled


def tables_by_rows(graph: Graph, fusion: Fusion) -> dict[int, tuple[tuple[int, float, float], ...]]:
    """Per op that looks up whole rows of an argument, or adds to the gradient of one, what `Traffic.by_rows` has of it.

    A table is copied once for all lookups, and once for all trips of a loop, rounded where what is looked up is. Computed tables are made
    in rows, and read so: nodes' features in a graph network, before and after sums over edges (``f32[60000,32]{1,0:T(8,128)}``, libtpu
    0.0.52).
    """
    found: dict[int, tuple[tuple[int, float, float], ...]] = {}
    arguments, looked_up = frozenset(graph.arguments), set[int]()
    for op in graph.walk():
        root = fusion.root[op.operands[0]] if op.primitive == "gather" else -1
        if root in arguments and root not in looked_up and _looks_up_rows(graph, op):
            looked_up.add(root)
            itemsize = graph.values[root].itemsize
            found[op.index] = ((0, min(itemsize, 2.0) if fusion.narrow[op.results[0]] else itemsize, 1 / max(op.trips, 1)),)
    shapes = {graph.values[table].shape for table in looked_up}
    for op in graph.walk():
        if op.primitive == "scatter-add" and fusion.stored[fusion.root[op.results[0]]] and adds_rows(graph, op):
            total = graph.values[op.results[0]]
            if total.shape in shapes:
                found[op.index] = ((len(op.operands), total.itemsize, 1 / max(op.trips, 1)),)
    return found


def _looks_up_rows(graph: Graph, op: Op) -> bool:
    table = graph.values[op.operands[0]]
    return table.rank > 1 and op.params["slice_sizes"][-1] == table.shape[-1]


def adds_rows(graph: Graph, op: Op) -> bool:
    """Whether a scatter adds whole rows, along a table's last dimension."""
    total, added = (graph.values[value] for value in (op.results[0], op.operands[2]))
    inserted = op.params["dimension_numbers"].inserted_window_dims
    return total.rank > 1 and added.shape[-1:] == total.shape[-1:] and total.rank - 1 not in inserted
