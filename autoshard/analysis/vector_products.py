"""Products that XLA:TPU makes on the vector unit, at full width: outer ones, and those of matrices with vectors."""

from __future__ import annotations

import math

from autoshard.ir import Graph, Op
from autoshard.primitives import is_matrix


def is_outer_product(graph: Graph, op: Op) -> bool:
    """Whether a product sums nothing: XLA multiplies."""
    # evidence: outer products
    if op.primitive != "dot_general":
        return False
    (contracted, _), _ = op.params["dimension_numbers"]
    return all(graph.values[op.operands[0]].shape[dim] == 1 for dim in contracted)


def is_vector_product(graph: Graph, op: Op) -> bool:
    """Whether a product is of a single row or column, which XLA:TPU multiplies and sums: alone, or in each of a batch within a loop.

    Outside of loops it leaves most batches of them to the matrix unit.
    """
    # evidence: products with vectors
    if op.primitive != "dot_general":
        return False
    contracted, batch = op.params["dimension_numbers"]
    shapes = [graph.values[value].shape for value in op.operands]
    rows = (
        math.prod(size for dim, size in enumerate(shape) if dim not in {*summed, *each})
        for shape, summed, each in zip(shapes, contracted, batch, strict=True)
    )
    return 1 in rows and (op.trips > 1 or all(shapes[0][dim] == 1 for dim in batch[0]))


def is_on_matrix_unit(graph: Graph, op: Op) -> bool:
    """Whether an op is a product or a convolution that XLA:TPU makes on the matrix unit."""
    return is_matrix(op.primitive) and not is_vector_product(graph, op) and not is_outer_product(graph, op)
