"""What a manual lowering needs to know of a program: what stays partial, what is stored how, and what runs apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from autoshard.analysis.partial_sums import late_sums, partial_sums
from autoshard.analysis.stacks import merged_stacks, stacks_between_loops
from autoshard.analysis.updates import deep_updates
from autoshard.analysis.values import free_values, readers_of
from autoshard.compilers import Compiler
from autoshard.cost.narrow_sums import Crossing, is_narrow
from autoshard.cost.reshard import ReshardPath, Step
from autoshard.cost.windows import Window, Windows
from autoshard.ir import (
    Assignment,
    Graph,
    Layout,
    Op,
    Rule,
    operand_layout,
    reductions,
    replicated,
    result_layout,
)
from autoshard.lower.collectives import combined, moved
from autoshard.lower.interpret import ops_by_path
from autoshard.lower.narrow import narrow_all_reduce, narrow_reduce_scatter
from autoshard.lower.nested import Mesh
from autoshard.lower.plan import Plan, holder_values


@dataclass(frozen=True, slots=True, eq=False)
class ManualPlan(Plan):
    """The plan of a manual lowering.

    Attributes:
        graph, mesh: the program, and JAX's mesh.
        late: values that stay partial: products that only a transpose reads, so that XLA fuses both into one product, and sums that are
            added up before they are combined (`autoshard.analysis.partial_sums`).
        loops: per value that a scan carries partial, the mesh axes over which it is combined after the loop.
        windows: the windowed products, by op index.
        narrow: the mesh axes along which sums cross levels in a narrow type.
        apart: the gradients that are stored before state is updated, so that XLA does not fuse both.
        stacks: per stack between loops that is stored in another shape than its own, that shape.
    """

    graph: Graph
    mesh: Mesh
    late: frozenset[int] = frozenset()
    loops: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    windows: Mapping[int, Window] = field(default_factory=dict)
    narrow: Mapping[str, Crossing] = field(default_factory=dict)
    apart: frozenset[int] = frozenset()
    stacks: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    def stored_otherwise(self, lanes: int) -> dict[int, tuple[int, ...]]:
        """The stacks between loops that tiles of so many lanes are filled with, if none of the loops reads them in another layout."""
        if not (found := merged_stacks(self.graph, self.assignment, lanes)):
            return {}
        readers = stacks_between_loops(self.graph)

        def is_as_stored(value: int) -> bool:
            return all(self.flows(op).operands[position] == self.layout(value) for op, position in readers[value])

        return {k: shape for k, shape in found.items() if not self.free[k] and k not in self.late and is_as_stored(k)}

    def needs_no_barrier(self, op: Op) -> bool:
        """Whether an op computes again what another loop computed: all of it in the backward pass of a scan.

        A barrier before that would hold nothing back, and has slices of the stacks that it reads copied first.
        """
        # evidence: barriers in loops
        if op.primitive != "remat2" or not op.params["differentiated"]:
            return False
        around = (self.ops.get(op.path[:n]) for n in range(len(op.path) - 2, 0, -2))
        loop = next((each for each in around if each is not None), None)
        if loop is None or loop.primitive != "scan" or not loop.params["reverse"]:
            return False
        return [each.primitive for each in loop.bodies[0].ops].count("remat2") == 1

    @property
    def whole(self) -> Layout:
        return replicated(self.assignment.mesh)

    def layout(self, value: int) -> Layout:
        """The layout in which a value is stored; captured constants are replicated."""
        if value in self.graph.constants:
            return self.whole
        return Plan.layout(self, value)

    def combined(self, x: Any, operator: str, axes: Sequence[int], scatter: Step | None = None) -> Any:
        """The combination of partial results over some axes: on each device, or each its part after a reduce_scatter."""
        mesh = self.assignment.mesh
        sizes = {mesh.names[axis]: mesh.sizes[axis] for axis in axes if mesh.sizes[axis] > 1}
        narrow = {name: each for name, each in self.narrow.items() if name in sizes}
        is_float = operator == "sum" and jnp.issubdtype(x.dtype, jnp.floating)
        if is_float and is_narrow(x.nbytes, x.dtype.itemsize, tuple(sizes), narrow):
            if scatter is None:
                return narrow_all_reduce(x, sizes, narrow)
            return narrow_reduce_scatter(x, sizes, scatter.target[axes[0]], narrow)
        return combined(x, operator, tuple(sizes)) if scatter is None else moved(x, scatter, mesh)

    def resharded(self, x: Any, value: int, source: Layout, target: Layout) -> Any:
        """An array of the value, resharded from one layout to another."""
        for step in self.reshard_path(value, source, target) if source != target else ():
            x = moved(x, step, self.assignment.mesh)
        return x


def manual_plan(
    graph: Graph,
    rules: tuple[Rule | None, ...],
    assignment: Assignment,
    mesh: Mesh,
    reshard_path: ReshardPath,
    narrow: Mapping[str, Crossing],
    compiler: Compiler | None,
) -> ManualPlan:
    """The plan of a manual lowering; its arguments are those of `autoshard.lower.manual.manual_program`."""
    readers = readers_of(graph)
    late = late_sums(graph, rules, assignment, partial_sums(graph, readers))
    windows = Windows(graph, rules, assignment, reshard_path, readers, late.values).assigned()
    free, holders = tuple(free_values(graph)), holder_values(graph)
    apart = deep_updates(graph, rules, assignment, readers, math.inf if compiler is None else compiler.deepest_update)
    common = ops_by_path(graph), rules, assignment, reshard_path, holders, free
    plan = ManualPlan(*common, graph, mesh, late.values, late.loops, windows, narrow, apart)
    plan = replace(plan, late=late.values | _late_transposes(plan))
    return plan if compiler is None else replace(plan, stacks=plan.stored_otherwise(compiler.stack_lanes))


def _late_transposes(plan: ManualPlan) -> frozenset[int]:
    """Partial products, and transposes of them, whose only reader is a transpose that reads them in their combined layout."""
    graph = plan.graph
    readers: dict[int, list[Op | None]] = {value: [None] for value in graph.results}
    for op in graph.walk():
        for value in (*op.operands, *(flow.value for holder in op.holders for flow in holder.sources)):
            readers.setdefault(value, []).append(None if op.bodies else op)
        for value in (value for body in op.bodies for value in body.outputs):
            readers.setdefault(value, []).append(None)
    found: set[int] = set()
    for op in graph.walk():
        rule, choice = plan.rules[op.index], plan.assignment.choice(op.index)
        partial = op.primitive == "dot_general" and rule is not None and bool(reductions(rule, choice))
        if rule is None or not (partial or (op.primitive == "transpose" and op.operands[0] in found)):
            continue
        (value,), layout = op.results, plan.layout(op.results[0])
        (reader, *others) = readers.get(value, [None])
        if reader is None or others or reader.primitive != "transpose" or result_layout(rule, choice, 0) != layout:
            continue
        following, after = plan.rules[reader.index], plan.assignment.choice(reader.index)
        if following is not None and operand_layout(following, after, 0) == layout:
            found.add(value)
    return frozenset(found)
