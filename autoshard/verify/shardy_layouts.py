"""The layouts that Shardy's propagation gives the values and the operations of a program."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir import ir

from autoshard.analysis.values import free_values
from autoshard.ir import Graph, Layout, Mesh, Op
from autoshard.lower.interpret import Interpreter, Path, apply, ops_by_path
from autoshard.lower.mesh import lowering_mesh, to_named_sharding
from autoshard.primitives import is_call
from autoshard.trace import constraint_spec
from autoshard.trace.mapped import LEAVING
from autoshard.verify.shardy_passes import PROPAGATE, RESHARD, Dims, dims, dims_of, lowered_flat, operations, passed, run

MARK = "autoshard.value="
OP_MARK = "autoshard.op="
_MARKED = re.compile(re.escape(MARK) + r"(\d+)")
_OP_MARKED = re.compile(re.escape(OP_MARK) + r"(\d+)")

Sides = tuple[tuple[Layout, ...], tuple[Layout, ...]]
"""The layouts of an op's operands and results."""


def propagated(
    jaxpr: ClosedJaxpr,
    graph: Graph,
    in_layouts: Sequence[Layout | None],
    mesh: Mesh,
    out_layouts: Sequence[Layout | None] | None = None,
) -> tuple[dict[int, Layout], dict[int, Sides]]:
    """The layout of each value by Shardy's propagation, and the layouts of each op's operands and results.

    Bodies of loops, branches and checkpoints are included. Scalars, dead values and values of constants alone are absent; so are ops
    that are lowered to several operations. An axis that a layout cannot express, because it is split or against mesh order, is dropped.

    Args:
        jaxpr, graph: the program.
        in_layouts: per argument its layout, or None for the propagation's.
        mesh: that of the layouts.
        out_layouts: per result its layout, or None for the propagation's.
    """
    ranks = [graph.values[value].rank for value in (*graph.arguments, *graph.results)]
    given = [*in_layouts, *([None] * len(graph.results) if out_layouts is None else out_layouts)]
    everything, n_arguments = lowering_mesh(mesh, graph), len(graph.arguments)
    shardings = [
        None if layout is None else to_named_sharding(layout, rank, mesh.names, everything)
        for layout, rank in zip(given, ranks, strict=True)
    ]
    free = tuple(free_values(graph))

    def function(*arguments: Any) -> list[Any]:
        marker = _Marker(ops_by_path(graph), everything, free)
        return marker.run(jaxpr.jaxpr, jaxpr.consts, marker.marks(arguments, graph.arguments))

    lowered = lowered_flat(function, jaxpr, shardings[:n_arguments], shardings[n_arguments:])
    module = run(lowered, PROPAGATE)
    values = _marked(module, mesh)
    constrained = {op.index: op.results[0] for op in graph.walk() if op.primitive == "sharding_constraint" and op.results[0] in values}
    pinned = {index: ((values[value],), (values[value],)) for index, value in constrained.items()}
    return values, pinned | _sides(passed(module, RESHARD), graph, mesh)


def _marked(module: Any, mesh: Mesh) -> dict[int, Layout]:
    found: dict[int, Layout] = {}
    for op in operations(module):
        mark = _MARKED.search(str(op.location)) if op.name == "sdy.reshard" else None
        if mark:
            found[int(mark[1])] = _layout(dims(str(op.attributes["sharding"])), mesh)
        found |= _marked(op, mesh)
    return found


def _sides(module: Any, graph: Graph, mesh: Mesh) -> dict[int, Sides]:
    """Per op that is lowered to one operation, the layouts of its resharded operands and of its results."""
    made: dict[int, list[Any]] = {}

    def collect(op: Any) -> None:
        for inner in operations(op):
            if (mark := _OP_MARKED.search(str(inner.location))) and inner.name.startswith(("stablehlo.", "chlo.")):
                made.setdefault(int(mark[1]), []).append(inner)
            collect(inner)

    collect(module)
    ops, found = graph.walk(), {}
    for index, (operation, *others) in made.items():
        tensors = [*operation.operands][: len(ops[index].operands)], [*operation.results]
        shapes = [[graph.values[value].shape for value in side] for side in (ops[index].operands, ops[index].results)]
        if not others and [[tuple(ir.RankedTensorType(tensor.type).shape) for tensor in side] for side in tensors] == shapes:
            operands, results = (tuple(_layout(dims_of(tensor), mesh) for tensor in side) for side in tensors)
            found[index] = operands, results
    return found


def _layout(dims: Dims, mesh: Mesh) -> Layout:
    """The layout of a Shardy sharding, with each dimension's axes up to the first that a layout cannot express."""
    layout = [-1] * len(mesh.axes)
    for dim, axes in enumerate(dims):
        last = -1
        for name, suffix in axes:
            if name not in mesh.names:  # of size 1
                continue
            axis = mesh.names.index(name)
            if suffix or axis < last:
                break
            layout[axis] = dim
            last = axis
    return tuple(layout)


class _Marker(Interpreter):
    """An interpreter that marks every value with its number: as the name of an open constraint, which propagation fills in."""

    def __init__(self, ops: Mapping[tuple[int, ...], Op], mesh: Any, free: tuple[bool, ...]):
        super().__init__(ops)
        self.mesh = mesh
        self.free = free

    def region(self) -> _Marker:
        return _Marker(self.ops, self.mesh, self.free)

    def marks(self, arrays: Sequence[Any], values: Sequence[int]) -> list[Any]:
        return [self._mark(x, value) for x, value in zip(arrays, values, strict=True)]

    def _mark(self, x: Any, value: int, spec: PartitionSpec | None = None) -> Any:
        """The array under a constraint named after its value: open, so that propagation fills it in, unless the user has a spec for it."""
        rank = getattr(x, "ndim", 0)
        if not rank or self.free[value]:
            return x
        with jax.named_scope(f"{MARK}{value}"):
            return self._constrain(x, PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * rank) if spec is None else spec)

    def _constrain(self, x: Any, spec: PartitionSpec) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if op.primitive == "sharding_constraint":  # its result has the user's spec, whatever the layout of those that read it
            return [self._mark(operands[0], op.results[0], self._known(constraint_spec(op)[0]))]
        with jax.named_scope(f"{OP_MARK}{op.index}"):
            results = apply(eqn, operands)
        return self.marks(results, op.results)

    def mapped(self, eqn: JaxprEqn, operands: list[Any], path: Path) -> list[Any]:
        leaving = [self.ops.get((*path, LEAVING, k)) for k in range(len(eqn.outvars))]
        results = zip(super().mapped(eqn, operands, path), leaving, strict=True)
        return [x if op is None else self._mark(x, op.results[0]) for x, op in results]

    def _known(self, spec: tuple) -> PartitionSpec:
        """The user's spec without the axes that this mesh lacks."""
        names = self.mesh.axis_names

        def known(entry: Any) -> Any:
            axes = (entry,) if isinstance(entry, str) else entry
            return tuple(name for name in axes if name in names) or None if isinstance(axes, tuple) else entry

        return PartitionSpec(*map(known, spec))

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        results = self.rebound(op, eqn, operands)
        return results if is_call(op.primitive) else self.marks(results, op.results)

    def enter(self, op: Op, number: int, arguments: Sequence[Any]) -> Sequence[Any]:
        return self.marks(arguments, op.bodies[number].inputs)
