"""Demanded precision: per value the kinds of readers that it has, and whether those need more of it than bfloat16.

A backward dataflow analysis. A demand is a set of kinds of readers; a value's is the union over its readers. Ops that commute with casts,
and views, pass the demand on their results on to their operands, and control flow passes it through the bodies. The result is the least
fixed point, also for values that loops carry. Linear in the program's size: a demand grows at most as often as there are kinds.

A float32 product at JAX's default precision is one bfloat16 pass on a TPU (docs.jax.dev, "Matmul precision"). XLA:TPU then stores as
bfloat16 what slices, gathers, broadcasts, pads, selections, bounds and barriers turn into its operands, and sums that are broadcast and
rounded; values that are only reduced it stores as float32 (11 programs, libtpu 0.0.42).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from autoshard.analysis.vector_products import is_outer_product, is_vector_product
from autoshard.ir import Graph, Holder, Op
from autoshard.primitives import commutes_with_casts, is_dense_product, is_reduction, is_view

Demand = int
"""A set of kinds of readers, as bits."""

PRODUCT = 1  # a matrix product of float32 at default precision
CAST = 2  # from float32 to bfloat16
REDUCTION = 4  # compilers compute it along with its operand, before that is rounded
CARRY = 8  # a loop that hands it from trip to trip, in a buffer of its own type
EXACT = 16  # any other op, and the program's caller

ROUNDING = PRODUCT | CAST


@dataclass(frozen=True, slots=True)
class Demands:
    """The demanded precision of a program.

    Attributes:
        on_values: per value the union over its readers.
        by_ops: per op index the demand on its operands; none where it has bodies, which have holders instead.
    """

    on_values: tuple[Demand, ...]
    by_ops: tuple[Demand, ...]

    def by_holder(self, holder: Holder) -> Demand:
        """The demand of control flow on the values that flow into a holder."""
        return _union(self.on_values[value] for value in (holder.value, *holder.views))


def is_narrow(demand: Demand, others: Demand = 0) -> bool:
    """Whether only bfloat16 is demanded: some readers round, and all that do not are of the other kinds.

    >>> is_narrow(PRODUCT | CAST), is_narrow(PRODUCT | REDUCTION), is_narrow(PRODUCT | REDUCTION, others=REDUCTION), is_narrow(REDUCTION)
    (True, False, True, False)
    """
    return demand & ROUNDING > 0 and not demand & ~(ROUNDING | others)


def precision_demands(graph: Graph) -> Demands:
    """The demanded precision of a program's values."""
    demands = [0] * len(graph.values)
    sources: list[list[int]] = [[] for _ in graph.values]  # per value those of which as much is demanded
    for value in graph.results:
        demands[value] |= EXACT
    ops = graph.walk()
    own = [_demand(graph, op) for op in ops]
    for op, demand in zip(ops, own, strict=True):
        for value in op.operands:
            demands[value] |= demand
        for made, value in _passed(graph, op):
            sources[made].append(value)
        for holder in op.holders:
            if any(flow.inside and not flow.shift for flow in holder.sources):
                demands[holder.value] |= CARRY
    raised = [value for value, demand in enumerate(demands) if demand]
    while raised:
        made = raised.pop()
        for value in sources[made]:
            if demands[made] & ~demands[value]:
                demands[value] |= demands[made]
                raised.append(value)
    by_ops = (_union(demands[value] for value in op.results) if _passes(op) else demand for op, demand in zip(ops, own, strict=True))
    return Demands(tuple(demands), tuple(by_ops))


def _demand(graph: Graph, op: Op) -> Demand:
    """The kind of reader that an op is; none where its results' readers count instead."""
    if op.bodies or _passes(op):
        return 0
    if is_vector_product(graph, op):
        return REDUCTION
    if is_dense_product(op.primitive):
        return PRODUCT if _rounds_operands(graph, op) else EXACT
    if op.primitive == "convert_element_type":
        dtypes = [graph.values[value].dtype for value in (*op.operands, *op.results)]
        return CAST if dtypes == ["float32", "bfloat16"] else EXACT
    return REDUCTION if is_reduction(op.primitive) else EXACT


def _passed(graph: Graph, op: Op) -> Iterator[tuple[int, int]]:
    """Pairs of values: the demand on the first is also one on the second."""
    for holder in op.holders:
        for value in (holder.value, *holder.views):
            yield from ((value, flow.value) for flow in holder.sources)
    if not _passes(op):
        return
    each = op.primitive == "optimization_barrier"
    pairs = zip(op.results, op.operands, strict=True) if each else ((made, value) for made in op.results for value in op.operands)
    for made, value in pairs:
        if graph.values[made].dtype == graph.values[value].dtype:  # no index, no predicate
            yield made, value


def _passes(op: Op) -> bool:
    """Whether an op passes the demand on its results on to its operands."""
    return not op.bodies and (is_view(op.primitive) or commutes_with_casts(op.primitive))


def _rounds_operands(graph: Graph, op: Op) -> bool:
    """Whether a product is of float32 at default precision."""
    if is_outer_product(graph, op):
        return False
    precision = op.params.get("precision")
    default = all(str(each) in ("None", "DEFAULT") for each in (precision if isinstance(precision, tuple) else (precision,)))
    wanted = op.params.get("preferred_element_type")
    return default and all(graph.values[value].dtype == "float32" for value in op.operands) and str(wanted) in ("None", "float32")


def _union(demands: Iterable[Demand]) -> Demand:
    found = 0
    for demand in demands:
        found |= demand
    return found
