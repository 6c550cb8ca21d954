"""What compilers narrow before they send it: operands of products that the matrix unit rounds anyway.

A float32 product at JAX's default precision is one bfloat16 pass on a TPU (docs.jax.dev, "Matmul precision"). XLA:TPU rounds its operands
beforehand, and where nothing else reads what is sent, rounds before it sends: half the bytes (modules compiled by libtpu 0.0.42: gathered
float32 weights of fully sharded steps). Results keep their width, and so do what reduces them and what loops read from outside.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir import Graph, Op
from autoshard.primitives import commutes_with_casts, is_dense_product

NARROW_SHARE = 0.5  # of a float32's bytes; evidence: operands are sent as bfloat16


def rounded_values(graph: Graph, readers: Sequence[Sequence[int]]) -> tuple[bool, ...]:
    """Per value whether all that is done with it is to multiply it, rounded, rearranged or in a loop that does.

    Args:
        readers: per value, the op indices that read it.
    """
    ops, returned = graph.walk(), frozenset(graph.results)
    rounded = [False] * len(graph.values)

    def rounds(op: Op, value: int) -> bool:
        if op.bodies:
            held = [holder for holder in op.holders if any(flow.value == value for flow in holder.sources)]
            return all(len(holder.sources) == 1 and rounded[holder.value] for holder in held)
        return rounds_operands(graph, op, rounded)

    def settle(value: int) -> None:
        rounded[value] = len(readers[value]) > 0 and value not in returned and all(rounds(ops[reader], value) for reader in readers[value])

    for op in reversed(ops):
        for value in (*op.results, *(made for body in op.bodies for made in body.inputs)):
            settle(value)
    return tuple(rounded)


def rounds_operands(graph: Graph, op: Op, rounded: Sequence[bool]) -> bool:
    """Whether an op without bodies rounds its operands or multiplies them, rounded, or hands them on to what does."""
    if is_dense_product(op.primitive):
        return _rounded(graph, op)
    if op.primitive == "convert_element_type":
        return graph.values[op.results[0]].dtype == "bfloat16"
    return commutes_with_casts(op.primitive) and rounded[op.results[0]]


def single_rows(graph: Graph) -> dict[int, frozenset[int]]:
    """The values that become one row of each matrix of a batched product, each with the gathered values that others are computed from.

    Where such a value stands beside one that is gathered and not sent, XLA:TPU rounds the rows when they lie beside each other, and what an
    all_to_all brings is float32: ``f32[2048,8,16] all-to-all`` before ``bf16[16384,7,16] concatenate`` in a recommender. It rounds two rows
    first, those of a plain product, and those beside arguments, products, sums, or what is sent itself (21 programs, libtpu 0.0.42).
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


def _rounded(graph: Graph, op: Op) -> bool:
    """Whether a product is of float32 at default precision; one that sums nothing is no product to XLA, which multiplies at full width."""
    if op.primitive == "dot_general":
        (contracted, _), _ = op.params["dimension_numbers"]
        if all(graph.values[op.operands[0]].shape[dim] == 1 for dim in contracted):
            return False
    precision = op.params.get("precision")
    default = all(str(each) in ("None", "DEFAULT") for each in (precision if isinstance(precision, tuple) else (precision,)))
    wanted = op.params.get("preferred_element_type")
    return default and all(graph.values[value].dtype == "float32" for value in op.operands) and str(wanted) in ("None", "float32")
