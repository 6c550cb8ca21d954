"""The measure by which the batch of a step is chosen, and what waits for all examples is weighed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.cost.compute import op_flops
from autoshard.ir import Graph, Op, Rule
from autoshard.primitives import is_matrix


@dataclass(frozen=True, slots=True)
class Work:
    """FLOPs of products, or where a program has none the elements that operations make.

    Attributes:
        in_elements: whether it is the elements that all operations make, as of a program without matrix products and convolutions.
    """

    in_elements: bool

    @classmethod
    def of(cls, graph: Graph) -> Work:
        """The measure of a program."""
        return cls(not any(is_matrix(op.primitive) for op in graph.walk()))

    @property
    def unit(self) -> str:
        """What is counted, in a word."""
        return "operation" if self.in_elements else "product"

    def of_ops(self, ops: Sequence[Op], rules: Sequence[Rule | None], graph: Graph) -> float:
        """The work of operations, their bodies included, in one step."""
        if not self.in_elements:
            return product_flops(ops, rules, graph)
        inner = (inner for op in ops for inner in op.walk() if not inner.bodies)
        return float(sum(op.trips * sum(graph.values[value].size for value in op.results) for op in inner))


def product_flops(ops: Sequence[Op], rules: Sequence[Rule | None], graph: Graph) -> float:
    """The FLOPs of the matrix products and convolutions of ops, their bodies included, in one step."""
    total = 0.0
    for op in ops:
        if is_matrix(op.primitive):
            total += op.trips * op_flops(op, rules[op.index], graph.values)
        total += sum(product_flops(body.ops, rules, graph) for body in op.bodies)
    return total
