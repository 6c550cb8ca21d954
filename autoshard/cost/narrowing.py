"""What compilers narrow before they send it: operands of products that the matrix unit rounds anyway.

A float32 product at JAX's default precision is one bfloat16 pass on a TPU (docs.jax.dev, "Matmul precision"). XLA:TPU rounds its operands
beforehand, and where nothing else reads what is sent, rounds before it sends: half the bytes (modules compiled by libtpu 0.0.42: gathered
float32 weights of fully sharded steps). Results keep their width, and so do what reduces them and what loops read from outside.
"""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.cost.partial_sums import CARRIERS
from autoshard.ir import Graph, Op

NARROW_ITEMSIZE = 2  # bytes of a bfloat16
_PRODUCTS = ("dot_general", "conv_general_dilated")


def narrowing_ops(graph: Graph, readers: Sequence[Sequence[int]]) -> tuple[bool, ...]:
    """Per op whether all it does with its operands is to multiply them, rounded, or to rearrange them for ops that do.

    Args:
        readers: per value, the op indices that read it.
    """
    ops, returned = graph.walk(), frozenset(graph.results)
    narrows = [False] * len(ops)
    for op in reversed(ops):
        if op.primitive in _PRODUCTS:
            narrows[op.index] = _rounded(graph, op)
        elif op.primitive in CARRIERS and (result := op.results[0]) not in returned:
            narrows[op.index] = len(readers[result]) > 0 and all(narrows[reader] for reader in readers[result])
    return tuple(narrows)


def _rounded(graph: Graph, op: Op) -> bool:
    """Whether a product is of float32 at default precision."""
    precision = op.params.get("precision")
    default = all(str(each) in ("None", "DEFAULT") for each in (precision if isinstance(precision, tuple) else (precision,)))
    wanted = op.params.get("preferred_element_type")
    return default and all(graph.values[value].dtype == "float32" for value in op.operands) and str(wanted) in ("None", "float32")
