"""Gradients of which new state is computed element by element."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set

from autoshard.ir import Assignment, Graph, Op, Rule, local_shape, operand_layout
from autoshard.primitives import is_view, primitive


def deep_updates(
    graph: Graph, rules: Sequence[Rule | None], assignment: Assignment, readers: Sequence[Sequence[int]], deepest: float
) -> frozenset[int]:
    """The gradients that are to be stored before new state is computed of them: products of more rows of a device than ``deepest``.

    Args:
        readers: per value the indices of the ops that read it.
    """
    if math.isinf(deepest):
        return frozenset()
    sizes, found = assignment.mesh.sizes, set[int]()
    for value, product in updating_products(graph, readers).items():
        if (rule := rules[product.index]) is not None:
            layout = operand_layout(rule, assignment.choice(product.index), 0)
            shape = local_shape(graph.values[product.operands[0]].shape, layout, sizes)
            (contracted, _), _ = product.params["dimension_numbers"]
            if math.prod(shape[dim] for dim in contracted) > deepest:
                found.add(value)
    return frozenset(found)


def updating_products(graph: Graph, readers: Sequence[Sequence[int]]) -> dict[int, Op]:
    """The products of whose results new state is computed element by element, by the result or the last view of it."""
    ops, found = graph.walk(), dict[int, Op]()
    state = frozenset(graph.results[result] for result, _ in graph.aliases)
    sizes = {graph.values[value].size for value in state}
    for op in ops:
        if op.primitive != "dot_general" or graph.values[op.results[0]].size not in sizes:
            continue
        value = op.results[0]
        while len(readers[value]) == 1 and is_view((reader := ops[readers[value][0]]).primitive) and not reader.bodies:
            (value,) = reader.results
        if _becomes(state, graph, readers, value):
            found[value] = op
    return found


def _becomes(state: Set[int], graph: Graph, readers: Sequence[Sequence[int]], gradient: int) -> bool:
    """Whether new state is made of a value by elementwise operations."""
    ops, waiting, seen = graph.walk(), [gradient], {gradient}
    while waiting:
        if (value := waiting.pop()) in state:
            return True
        made = (each for k in readers[value] if primitive(ops[k].primitive).kind == "elementwise" for each in ops[k].results)
        new = [each for each in made if each not in seen and graph.values[each].size == graph.values[gradient].size]
        seen.update(new)
        waiting += new
    return False
