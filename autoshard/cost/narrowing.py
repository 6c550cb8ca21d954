"""What compilers narrow before they send it: operands of products that the matrix unit rounds anyway.

A float32 product at JAX's default precision is one bfloat16 pass on a TPU (docs.jax.dev, "Matmul precision"). XLA:TPU rounds its operands
beforehand, and where nothing else reads what is sent, rounds before it sends: half the bytes (modules compiled by libtpu 0.0.42: gathered
float32 weights of fully sharded steps). Results keep their width, and so do what reduces them and what loops read from outside.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.ir import Graph, Op

NARROW_SHARE = 0.5  # of a float32's bytes
# Rounding first gives the same. XLA's convert-mover pass lists most of them (openxla/xla, xla/hlo/transforms/simplifiers/convert_mover.cc);
# XLA:TPU was seen to round embedding tables, too, whose rows products read.
_REARRANGING = (
    *("broadcast_in_dim", "concatenate", "copy", "gather", "pad", "reshape", "rev"),
    *("select_n", "sharding_constraint", "slice", "squeeze", "stack", "transpose"),
)
_PRODUCTS = ("dot_general", "conv_general_dilated")


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
    """Whether an op without bodies rounds its operands or multiplies them, rounded, or rearranges them for what does."""
    if op.primitive in _PRODUCTS:
        return _rounded(graph, op)
    if op.primitive == "convert_element_type":
        return graph.values[op.results[0]].dtype == "bfloat16"
    return op.primitive in _REARRANGING and rounded[op.results[0]]


def single_rows(graph: Graph) -> frozenset[int]:
    """The values that become one row of each matrix of a batched product, beside others: what an all_to_all brings of them is not rounded.

    Rows of bfloat16 lie in pairs, so XLA:TPU puts single ones beside each other in float32: ``f32[2048,8,16] all-to-all`` before
    ``bf16[16384,7,16] concatenate`` in a recommender; two rows, those of a plain product and what is gathered are rounded first
    (libtpu 0.0.42).
    """
    values = graph.values
    rows: set[tuple[int, int]] = set()  # values, with the dimension that numbers the rows
    found: set[int] = set()
    for op in reversed(graph.walk()):
        if op.primitive == "dot_general":
            for value, contracted, batch in zip(op.operands, *op.params["dimension_numbers"], strict=True):
                free = set(range(values[value].rank)) - {*contracted, *batch}
                if batch and len(free) == 1:
                    rows.add((value, free.pop()))
        elif op.primitive == "stack":
            found.update(op.operands if (op.results[0], op.params["axis"]) in rows else ())
        elif op.primitive in ("concatenate", "pad"):
            sides = [(value, dim) for value in op.operands for dim, size in enumerate(values[value].shape) if size == 1]
            found.update(value for value, dim in sides if (op.results[0], dim) in rows)
        elif op.primitive in _REARRANGING and op.results[0] in found and values[op.operands[0]].size == values[op.results[0]].size:
            found.add(op.operands[0])
    return frozenset(found)


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
