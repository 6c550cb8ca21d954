"""How one compiler fuses, and what the ops of a program are by these rules."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.analysis.vector_products import is_outer_product
from autoshard.compilers.grouped import is_grouped
from autoshard.compilers.op_patterns import added_to, is_one_hot, looked_up_in_two_orders, stands_alone, trims
from autoshard.ir import Graph, Op
from autoshard.primitives import is_matrix, is_reduction, is_view


@dataclass(frozen=True, slots=True)
class FusionRules:
    """How one compiler fuses.

    Attributes:
        patience: vector operations on an element, for each of its bytes, from which a value is kept that several kernels would compute.
        heavier: vector operations an element, by primitive, where the compiler weighs them otherwise than the table of primitives.
        hides: a kernel's memory traffic beside the value hides work: this times as much work as traffic.
        fuses_products: whether products compute their operands as they read them, and have epilogues, and outer ones are fused as
            multiplications are; else they are calls of libraries.
        fuses_gathers: whether gathers, strided slices and pads between elements are fused with the ops around them.
        fuses_scatters: whether scatters compute their updates, and add to the summand that their result would be added to.
        expands_one_hots: whether scatters of one number a row become comparisons of positions.
        widens_for_readers: whether the readers of a stored value that only widens another one, or that gathers read, too, read what it is
            made of instead.
        repeats_sliced: whether values of which several slices are read are computed for each, but for slices of slices.
        stores_values_of_many: whether values that are computed from `MOST` large ones or more are stored.
        stores_transposed: whether values are stored that a kernel reads next to products in another order of dimensions.
    """

    patience: float = math.inf
    heavier: Mapping[str, float] = field(default_factory=dict)
    hides: float = 0.0
    fuses_products: bool = True
    fuses_gathers: bool = False
    fuses_scatters: bool = False
    expands_one_hots: bool = True
    widens_for_readers: bool = True
    repeats_sliced: bool = False
    stores_values_of_many: bool = False
    stores_transposed: bool = False


class OpKinds:
    """What the ops of a program are by a compiler's rules.

    Attributes:
        trims: as `op_patterns.trims` has them, where products are fused.
        added_to: as `op_patterns.added_to` has them, where scatters are.
        in_place: the scatters that write in place of another summand.
        apart: transposes that are arrays of their own.
        products: products that are no multiplications, by their indices.
    """

    def __init__(self, graph: Graph, free: Sequence[bool], rules: FusionRules):
        self.values, self.rules = graph.values, rules
        self.apart = frozenset() if rules.fuses_gathers else looked_up_in_two_orders(graph)
        self.trims = trims(graph) if rules.fuses_products else {}
        self.added_to = added_to(graph, free) if rules.fuses_scatters else {}
        self.in_place = {scatter for _, scatter in self.added_to.values()}
        matrices = (op for op in graph.walk() if is_matrix(op.primitive))
        self.products = {op.index for op in matrices if not (rules.fuses_products and is_outer_product(graph, op))}

    def is_view(self, op: Op) -> bool:
        """Whether an op's result is in the memory of an operand."""
        if op.index in self.trims or op.index in self.added_to:
            return True
        if op.index in self.apart:
            return False
        return is_view(op.primitive) and not op.bodies and len(op.results) == 1 and bool(op.operands)

    def is_product(self, op: Op) -> bool:
        """Whether an op is a product that is no multiplication."""
        return op.index in self.products

    def computes_operands(self, op: Op) -> bool:
        """Whether an op is a product whose kernel may compute what it reads, and what is made of its result: not of groups.

        evidence: operands of grouped products
        """
        return op.index in self.products and not is_grouped(op)

    def stands_alone(self, op: Op) -> bool:
        """Whether an op stands outside fusions."""
        if is_matrix(op.primitive):
            return op.index in self.products
        return stands_alone(op) and not (self.rules.fuses_gathers and op.primitive in ("gather", "slice", "pad"))

    def is_one_hot(self, op: Op) -> bool:
        """Whether an op is a scatter that becomes comparisons of positions."""
        return self.rules.expands_one_hots and is_one_hot(op, self.values)

    def is_elementwise(self, op: Op) -> bool:
        """Whether an op can be fused with those around it, and makes one value."""
        return not (op.bodies or self.stands_alone(op) or is_reduction(op.primitive)) and len(op.results) == 1
