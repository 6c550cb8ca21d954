"""Stacks that loops make for other loops: what the forward pass of a recurrence keeps of each step for the backward pass.

On a TPU an array takes tiles of 128 lanes. Of a stack of small matrices that are multiplied by vectors, such as the states of linear
attention, XLA:TPU puts the steps in the lanes where they fill them better than any dimension of a matrix: then each step reads and writes
tiles of 128 steps. As one dimension a matrix fills the lanes, and each step reads and writes its own. evidence: stacks of small matrices
"""

from __future__ import annotations

import math
from collections import defaultdict

from autoshard.analysis.vector_products import is_on_matrix_unit, is_vector_product
from autoshard.ir import Assignment, Graph, Op, local_shape
from autoshard.ir.scan import num_carry, num_consts
from autoshard.primitives import is_matrix

Shape = tuple[int, ...]


def stacks_between_loops(graph: Graph) -> dict[int, list[tuple[Op, int]]]:
    """The stacks of matrices that a scan makes and only scans read, one by one, all of which multiply matrices by vectors and no others.

    Returns:
        per stack its readers, each with its position among their operands.
    """
    readers = defaultdict[int, list[tuple[Op, int]]](list)
    for op in graph.walk():
        for position, value in enumerate(op.operands):
            readers[value].append((op, position))
    returned = {*graph.results, *(value for op in graph.walk() for body in op.bodies for value in body.outputs)}
    recurrences = {op.index for op in graph.walk() if op.primitive == "scan" and _multiplies_vectors(graph, op)}
    made = (value for op in graph.walk() if op.index in recurrences for value in op.results[num_carry(op.params) :])
    stacks = {value: readers[value] for value in made if graph.values[value].rank > 2 and value not in returned}
    return {value: own for value, own in stacks.items() if own and all(op.index in recurrences and _is_sliced(op, k) for op, k in own)}


def _is_sliced(op: Op, position: int) -> bool:
    return position >= num_consts(op.params) + num_carry(op.params)


def _multiplies_vectors(graph: Graph, loop: Op) -> bool:
    """Whether all products of a loop are of matrices with vectors, or outer ones, and there are some of the first kind."""
    products = [op for op in loop.walk() if is_matrix(op.primitive)]
    return any(is_vector_product(graph, op) for op in products) and not any(is_on_matrix_unit(graph, op) for op in products)


def merged(stack: tuple[float, ...], lanes: int) -> tuple[float, ...]:
    """A stack's shape with the last dimensions of its slices as one that fills the lanes, where its steps would fill them better.

    >>> merged((256, 8, 8, 64, 64), 128), merged((256, 8, 128, 64), 128), merged((12, 8, 64, 64), 128)
    ((256, 8, 8, 4096), (256, 8, 128, 64), (12, 8, 64, 64))
    """
    steps, *slices = stack
    if min(_filled(size, lanes) for size in slices) <= _filled(steps, lanes):
        return stack
    fits = (n for n in range(2, len(stack)) if math.prod(stack[-n:]) % lanes == 0)
    return next(((*stack[:-n], math.prod(stack[-n:])) for n in fits), stack)


def _filled(size: float, lanes: int) -> float:
    """How many times its size a dimension takes in whole tiles."""
    return math.ceil(size / lanes) * lanes / size


def merged_stacks(graph: Graph, assignment: Assignment, lanes: int) -> dict[int, Shape]:
    """The stacks between loops of which a device's part is stored in another shape, with that shape; lanes of 0: none."""
    found = dict[int, Shape]()
    for value in stacks_between_loops(graph) if lanes else ():
        local = local_shape(graph.values[value].shape, assignment.layout(value), assignment.mesh.sizes)
        if (shape := merged(local, lanes)) != local:
            found[value] = tuple(map(int, shape))
    return found
