"""The plan of a lowering to sharding constraints: what is constrained late, or not at all, and what is computed again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, NamedSharding

from autoshard.analysis.values import free_values
from autoshard.cost.reshard import ReshardPath
from autoshard.ir import (
    Assignment,
    Dims,
    Graph,
    Layout,
    Op,
    Rule,
    computed_layout,
    exchanges,
    operand_layout,
    reductions,
    replicated,
    result_layout,
    result_layouts,
)
from autoshard.lower.interpret import ops_by_path
from autoshard.lower.mesh import to_named_sharding
from autoshard.lower.plan import Plan, holder_values

Constrain = Callable[[Any, NamedSharding, int], Any]
"""``(array, sharding, value number)`` to the array with the constraint."""

# Primitives that are lowered to nothing where the type stays: the result is the operand's array.
ALIASING = frozenset({"name", "copy", "convert_element_type", "device_put", "reshard", "sharding_constraint"})


@dataclass(frozen=True, slots=True, eq=False)
class ConstraintPlan(Plan):
    """The plan of a lowering to constraints.

    Attributes:
        mesh, constrain: JAX's mesh, and the function that makes a constraint.
        recomputed: free values with several free readers, with all their free descendants and ancestors; see `_Region._constant`.
        constants: values that the function captured.
        differentiable: whether custom derivatives are kept.
        resharded: values that are read in another layout than their own.
        late: partial products, and transposes of them, that only a transpose reads: the layout in which each is computed, and whether
            that transpose makes it the product with swapped operands.
        loop_constants: loops' inputs that are computed from constants and read in one layout; unconstrained, XLA fuses them into readers.
    """

    mesh: jax.sharding.Mesh | AbstractMesh
    constrain: Constrain
    recomputed: frozenset[int]
    constants: frozenset[int]
    differentiable: bool
    resharded: frozenset[int] = frozenset()
    late: Mapping[int, tuple[Layout, bool]] = field(default_factory=dict)
    loop_constants: frozenset[int] = frozenset()

    def own(self, value: int, layout: Layout) -> bool:
        """Whether the value's own array has this layout; a free value has no own array."""
        return not self.free[value] and layout == self.layout(value)

    def constrained(self, x: Any, value: int, layout: Layout) -> Any:
        rank = np.ndim(x)
        names = self.assignment.mesh.names
        return self.constrain(x, to_named_sharding(layout, rank, names, self.mesh), value) if rank else x

    def reshard(self, x: Any, value: int, source: Layout, target: Layout) -> Any:
        for step in self.reshard_path(value, source, target):
            x = self.constrained(x, value, step.target)
        return x


def constraint_plan(
    graph: Graph,
    rules: tuple[Rule | None, ...],
    assignment: Assignment,
    mesh: jax.sharding.Mesh | AbstractMesh,
    reshard_path: ReshardPath,
    constrain: Constrain,
    differentiable: bool,
) -> ConstraintPlan:
    """The plan of a program; arguments are those of `autoshard.lower.constrain.constrained`."""
    free = tuple(free_values(graph))
    own = free, mesh, constrain, _recomputed(graph, free), frozenset(graph.constants), differentiable
    plan = ConstraintPlan(ops_by_path(graph), rules, assignment, reshard_path, holder_values(graph), *own)
    plan = replace(plan, resharded=_resharded(graph, plan, result_layouts(graph, assignment)))
    return replace(plan, late=_late(graph, plan), loop_constants=_loop_constants(graph, plan))


def _resharded(graph: Graph, plan: ConstraintPlan, leaving: Iterable[Layout]) -> frozenset[int]:
    """The values that are read in another layout than their own, by an op, an output of a body or a result of the program.

    Aliases of these are included, since a constraint is on the array, for all its readers.
    """

    def reads() -> Iterator[tuple[int, Layout]]:
        yield from zip(graph.results, leaving, strict=True)
        for op in graph.walk():
            if op.bodies:
                flows = plan.flows(op)
                yield from zip(op.operands, flows.operands, strict=True)
                for body, outputs in zip(op.bodies, flows.outputs, strict=True):
                    yield from zip(body.outputs, outputs, strict=True)
            elif (rule := plan.rules[op.index]) is not None:
                choice = plan.assignment.choice(op.index)
                yield from ((value, operand_layout(rule, choice, k)) for k, value in enumerate(op.operands))
            else:
                yield from ((value, replicated(plan.assignment.mesh)) for value in op.operands)

    resharded = {value for value, target in reads() if target != plan.layout(value)}
    for op in reversed(graph.walk()):
        if op.primitive in ALIASING and op.results[0] in resharded and graph.values[op.operands[0]] == graph.values[op.results[0]]:
            resharded.add(op.operands[0])
    return frozenset(resharded)


def _loop_constants(graph: Graph, plan: ConstraintPlan) -> frozenset[int]:
    """The inputs of loops' bodies that are computed from constants outside, and read in their own layout only."""
    alone = (holder for holder in graph.loop_constants() if not holder.views and holder.value not in plan.resharded)
    return frozenset(holder.value for holder in alone if plan.free[holder.sources[0].value])


def _swapped_order(product: Op, rank: int, made: int) -> tuple[int, ...]:
    """The permutation of a ``dot_general``'s dimensions that swaps its operands, by the first operand's rank and the result's."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    first = rank - len(contracted)  # the dimensions of the result that are the batch's and the first operand's
    return (*range(len(batch)), *range(first, made), *range(len(batch), first))


def _late(graph: Graph, plan: ConstraintPlan) -> dict[int, tuple[Layout, bool]]:
    """The `ConstraintPlan.late` of a program.

    The transpose is constrained instead of the product: a constraint between the two would keep XLA from fusing them, and the gradient,
    with all state that it updates, would be stored in the other dimension order.
    """
    reads = Counter(graph.results)
    for op in graph.walk():
        reads.update(op.operands)
        reads.update(flow.value for holder in op.holders for flow in holder.sources)
        reads.update(value for body in op.bodies for value in body.outputs)
    # Per value: the layout in which it is computed, the order of its product's dimensions, the two orders that a product can compute, and
    # the late values before it.
    chains: dict[int, tuple[Layout, tuple[int, ...], tuple[tuple[int, ...], ...], dict[int, tuple[Layout, bool]]]] = {}
    late: dict[int, tuple[Layout, bool]] = {}
    for op in graph.walk():
        rule, choice = plan.rules[op.index], plan.assignment.choice(op.index)
        if op.primitive == "dot_general" and rule and reductions(rule, choice) and not exchanges(rule, choice, plan.assignment.mesh.sizes):
            layout, order = computed_layout(rule, choice, 0), tuple(range(len(rule.results[0])))
            made, before = (order, _swapped_order(op, len(rule.operands[0]), len(order))), {}
        elif op.primitive == "transpose" and rule and op.operands[0] in chains:
            layout, order, made, before = chains[op.operands[0]]
            order = tuple(order[dim] for dim in op.params["permutation"])
            before = {**before, op.operands[0]: (layout, order != made[0])}
            layout = carried(rule.operands[0], rule.results[0], layout)
            if order in made:
                late.update(before)
        else:
            continue
        (value,) = op.results
        if reads[value] == 1 and value not in plan.resharded and result_layout(rule, choice, 0) == plan.layout(value):
            chains[value] = layout, order, made, before
    return late


def _recomputed(graph: Graph, free: Sequence[bool]) -> frozenset[int]:
    """The `ConstraintPlan.recomputed` of a program."""
    makers = [op for op in graph.walk() if op.results and not op.bodies and all(free[value] for value in op.results)]
    read = Counter(value for op in makers for value in op.operands if graph.values[value].rank)
    found: set[int] = set()
    for op in makers:
        made_of_such = any(value in found for value in op.operands)
        found.update(value for value in op.results if made_of_such or read[value] > 1)
    for op in reversed(makers):
        if any(value in found for value in op.results):
            found.update(op.operands)
    return frozenset(found)


def carried(source: Dims, target: Dims, layout: Layout) -> Layout:
    """A tensor's layout propagated through an op to another of its tensors, each dimension by its major factor."""
    where = {factor: dim for dim, factors in enumerate(target) for factor in factors}
    return tuple(where.get(next(iter(source[dim]), -1), -1) if dim >= 0 else -1 for dim in layout)
