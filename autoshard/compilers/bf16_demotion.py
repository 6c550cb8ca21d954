"""Demotion to bfloat16 before collectives: of values of which only bfloat16 is demanded.

XLA:TPU rounds operands of float32 products beforehand, and where nothing else reads a collective's result, before the collective: half
the bytes (modules compiled by libtpu 0.0.42: gathered float32 weights of fully sharded steps). Results of products keep their width, and so
do values that are also reduced.
"""

from __future__ import annotations

from autoshard.analysis.demanded_precision import CARRY, Demand, is_narrow
from autoshard.ir import Graph
from autoshard.primitives import commutes_with_casts, is_dense_product

NARROW_SHARE = 0.5  # of a float32's bytes; evidence: operands are sent as bfloat16


def is_demoted(demand: Demand) -> bool:
    """Whether a collective for readers of this demand moves bfloat16: a loop's carry, too, is gathered apart from its buffer."""
    return is_narrow(demand, others=CARRY)


def single_rows(graph: Graph) -> dict[int, frozenset[int]]:
    """The values that become one row of each matrix of a batched product, each with the gathered values that others are computed from.

    Where such a value is put beside one that is gathered and not sent, XLA:TPU rounds the rows once they are together, and an all_to_all
    before that moves float32: ``f32[2048,8,16] all-to-all`` before ``bf16[16384,7,16] concatenate`` in a recommender. It rounds two rows
    first, those of a plain product, and those beside arguments, products, sums, or rows that are sent, too (21 programs, libtpu 0.0.42).
    """
    # evidence: single rows are sent wide
    values = graph.values
    rows: set[tuple[int, int]] = set()  # values, with the dimension that numbers the rows
    found: dict[int, frozenset[int]] = {}
    gathered: dict[int, int] = {}
    for op in graph.walk():
        if op.primitive == "gather":
            gathered[op.results[0]] = op.results[0]
        elif not op.bodies and not is_dense_product(op.primitive):
            for value in op.results:
                looked_up = (gathered[v] for v in op.operands if v in gathered and values[v].size == values[value].size)
                if (first := next(looked_up, None)) is not None:
                    gathered[value] = first
    for op in reversed(graph.walk()):
        if op.primitive == "dot_general":
            for value, contracted, batch in zip(op.operands, *op.params["dimension_numbers"], strict=True):
                free = set(range(values[value].rank)) - {*contracted, *batch}
                if batch and len(free) == 1:
                    rows.add((value, free.pop()))
        elif op.primitive in ("stack", "concatenate", "pad"):
            stacked = op.primitive == "stack" and (op.results[0], op.params["axis"]) in rows
            sides = ((value, dim) for value in op.operands for dim, size in enumerate(values[value].shape) if size == 1)
            single = op.operands if stacked else [value for value, dim in sides if (op.results[0], dim) in rows]
            found |= {value: frozenset(gathered[v] for v in op.operands if v in gathered and v != value) for value in single}
        elif commutes_with_casts(op.primitive) and op.results[0] in found and values[op.operands[0]].size == values[op.results[0]].size:
            found[op.operands[0]] = found[op.results[0]]
    return found
