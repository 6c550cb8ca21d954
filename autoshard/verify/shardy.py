"""What Shardy, the partitioner in every jaxlib, makes of a program: its explicit collectives, and the layouts it propagates.

Both run on a copy of the lowered module, in milliseconds and without compiling anything.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from autoshard.cost.profile import profile
from autoshard.ir import Collective, Graph, Layout, Mesh, Op
from autoshard.lower.interpret import Interpreter, apply, ops_by_path
from autoshard.lower.mesh import to_named_sharding
from autoshard.trace import CALLS, constraint_spec

PROPAGATE = "builtin.module(sdy-propagation-pipeline)"
EXPLICIT = "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives))"

KINDS = {
    "sdy.all_gather": ("all_gather", "gathering_axes"),
    "sdy.all_reduce": ("all_reduce", "reduction_axes"),
    "sdy.reduce_scatter": ("reduce_scatter", "reduce_scatter_axes"),
    "sdy.all_to_all": ("all_to_all", "params"),
    "sdy.collective_permute": ("collective_permute", "out_sharding"),
}
_AXIS = re.compile(r'"([^"]*)"(:\(\d+\)\d+)?')


def explicit_collectives(lowered: jax.stages.Lowered | ir.Module, mesh: Mesh) -> tuple[Collective, ...]:
    """The collectives Shardy itself would insert into a lowered program: exact in kind, axes and bytes.

    An all_reduce of which every reader takes this device's slice over the same axes counts as the reduce_scatter it
    becomes on TPU and GPU.
    """
    module = _run(lowered, PROPAGATE, EXPLICIT)
    functions = {_text(op.attributes["sym_name"]): op for op in _operations(module) if op.name == "func.func"}
    return tuple(_collectives(functions["main"], functions, 1, mesh))


def _run(lowered: jax.stages.Lowered | ir.Module, *pipelines: str) -> ir.Operation:
    """The module after the passes; they work in place, so on a copy."""
    module: Any = lowered if isinstance(lowered, ir.Module) else lowered.compiler_ir("stablehlo")
    copy = module.operation.clone()
    with module.context:
        for pipeline in pipelines:
            PassManager.parse(pipeline).run(copy.operation)
    return copy.operation


def _operations(op: Any) -> Iterator[Any]:
    for region in op.operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation


def _collectives(op: Any, functions: Mapping[str, Any], count: int, mesh: Mesh) -> Iterator[Collective]:
    for inner in _operations(op):
        if inner.name in KINDS:
            yield _record(inner, count, mesh)
        elif inner.name == "func.call":
            callee = _text(inner.attributes["callee"]).lstrip("@")
            yield from _collectives(functions[callee], functions, count, mesh)
        elif inner.regions:
            trips = _trips(inner) if inner.name == "stablehlo.while" else 1
            yield from _collectives(inner, functions, count * trips, mesh)


def _record(op: Any, count: int, mesh: Mesh) -> Collective:
    kind, attribute = KINDS[op.name]
    axes = _axes(str(op.attributes[attribute]), mesh)
    local = _local_bytes(op.results[0].type, _dims(str(op.attributes["out_sharding"])), mesh)
    if kind == "reduce_scatter":
        local *= _parts(axes, mesh)  # the operand is larger
    if kind == "all_reduce" and _is_scattered(op, axes, mesh):
        kind = "reduce_scatter"
    named = re.match(r'loc\("([^"]*)"', str(op.location))
    return Collective(kind, axes, local, count, named[1] if named else "")


def _is_scattered(op: Any, axes: tuple[str, ...], mesh: Mesh) -> bool:
    readers = [use.owner for use in op.results[0].uses]
    return bool(readers) and all(
        reader.name == "sdy.all_slice" and _axes(str(reader.attributes["slicing_axes"]), mesh) == axes for reader in readers
    )


def _trips(loop: Any) -> int:
    """How often a while loop runs, where its condition compares with a constant; else once."""
    condition = next(iter(loop.regions[0].blocks))
    for op in condition.operations:
        if op.operation.name == "stablehlo.compare":
            bound = op.operation.operands[1].owner
            value = re.match(r"dense<(\d+)>", str(bound.attributes["value"])) if _is_constant(bound) else None
            return int(value[1]) if value else 1
    return 1


def _is_constant(owner: Any) -> bool:
    return getattr(owner, "name", "") in ("sdy.constant", "stablehlo.constant")


def _axes(text: str, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes a Shardy attribute names, in mesh order, sub-axes as their axis."""
    named = {name for name, _ in _AXIS.findall(text)}
    return tuple(name for name in mesh.names if name in named)


def _parts(axes: Sequence[str], mesh: Mesh) -> int:
    return math.prod(size for name, size in mesh.axes if name in axes)


def _dims(sharding: str) -> list[list[tuple[str, str]]]:
    """Per dimension of a Shardy sharding its axes, as ``(name, sub-axis suffix)``."""
    inside = sharding[sharding.index("[") : sharding.rindex("]")]
    return [_AXIS.findall(dim) for dim in re.findall(r"\{([^}]*)\}", inside)]


def _local_bytes(kind: Any, dims: Sequence[Sequence[tuple[str, str]]], mesh: Mesh) -> float:
    """The bytes one device holds of a tensor, padding included."""
    sizes = dict(mesh.axes)
    elements = 1
    for size, axes in zip(ir.RankedTensorType(kind).shape, dims, strict=True):
        parts = math.prod(int(suffix.rpartition(")")[2]) if suffix else sizes[name] for name, suffix in axes)
        elements *= -(-size // parts)
    return elements * _itemsize(str(ir.RankedTensorType(kind).element_type))


def _itemsize(element: str) -> float:
    """Bytes an element of an MLIR type: ``f32``, ``bf16``, ``ui8``, ``i1``, ``f8E4M3FN``, ``complex<f32>``."""
    if element == "i1":
        return 1.0
    bits = re.search(r"\d+", element)
    assert bits, element
    return int(bits[0]) / 8 * (2 if element.startswith("complex") else 1)


def _text(attribute: Any) -> str:
    return str(attribute).strip('"')


MARK = "autoshard.value="
_MARKED = re.compile(re.escape(MARK) + r"(\d+)")


def propagated(
    jaxpr: ClosedJaxpr,
    graph: Graph,
    in_layouts: Sequence[Layout | None],
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
    out_layouts: Sequence[Layout | None] | None = None,
) -> dict[int, Layout]:
    """The layout that Shardy's propagation gives each value, bodies of loops, branches and checkpoints included.

    Values of rank 0, dead ones and those made of constants alone are absent. An axis that a layout cannot express, as
    it stands against mesh order or is split, counts as unused.

    Args:
        in_layouts: per argument its layout; None leaves it to the propagation, as it does a result's in ``out_layouts``.
    """
    ranks = [graph.values[value].rank for value in (*graph.arguments, *graph.results)]
    given = [*in_layouts, *([None] * len(graph.results) if out_layouts is None else out_layouts)]
    shardings = [None if layout is None else to_named_sharding(layout, rank, mesh) for layout, rank in zip(given, ranks, strict=True)]
    n_arguments = len(graph.arguments)
    free = profile(graph, (None,) * len(graph.walk())).free

    def function(*arguments: Any) -> list[Any]:
        marker = _Marker(ops_by_path(graph), mesh, free)
        return marker.run(jaxpr.jaxpr, jaxpr.consts, marker.marks(arguments, graph.arguments))

    jitted = jax.jit(function, in_shardings=tuple(shardings[:n_arguments]), out_shardings=shardings[n_arguments:], keep_unused=True)
    avals = (jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in jaxpr.in_avals)
    lowered = jitted.trace(*avals).lower(lowering_platforms=("cpu",))  # any will do: Shardy runs before a platform's passes
    found = _marked(_run(lowered, PROPAGATE), Mesh(tuple(mesh.shape.items())))
    return found


def _marked(module: Any, mesh: Mesh) -> dict[int, Layout]:
    found: dict[int, Layout] = {}
    for op in _operations(module):
        mark = _MARKED.search(str(op.location)) if op.name == "sdy.reshard" else None
        if mark:
            found[int(mark[1])] = _layout(_dims(str(op.attributes["sharding"])), mesh)
        found |= _marked(op, mesh)
    return found


def _layout(dims: Sequence[Sequence[tuple[str, str]]], mesh: Mesh) -> Layout:
    """The layout of a Shardy sharding; of a dimension's axes, those up to the first that a layout cannot express."""
    layout = [-1] * len(mesh.axes)
    for dim, axes in enumerate(dims):
        last = -1
        for name, suffix in axes:
            axis = mesh.names.index(name)
            if suffix or axis < last:
                break
            layout[axis] = dim
            last = axis
    return tuple(layout)


class _Marker(Interpreter):
    """Writes every value's number on it: as the name of a constraint that constrains nothing, which propagation fills in."""

    def __init__(self, ops: Mapping[tuple[int, ...], Op], mesh: Any, free: tuple[bool, ...]):
        super().__init__(ops)
        self.mesh = mesh
        self.free = free

    def region(self) -> _Marker:
        return _Marker(self.ops, self.mesh, self.free)

    def marks(self, arrays: Sequence[Any], values: Sequence[int]) -> list[Any]:
        return [self._mark(x, value) for x, value in zip(arrays, values, strict=True)]

    def _mark(self, x: Any, value: int) -> Any:
        rank = getattr(x, "ndim", 0)
        if not rank or self.free[value]:
            return x
        with jax.named_scope(f"{MARK}{value}"):
            return self._constrain(x, PartitionSpec(*[PartitionSpec.UNCONSTRAINED] * rank))

    def _constrain(self, x: Any, spec: PartitionSpec) -> Any:
        return jax.lax.with_sharding_constraint(x, NamedSharding(self.mesh, spec))

    def op(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        if op.primitive == "sharding_constraint":
            operands = [self._constrain(operands[0], self._known(constraint_spec(op)[0]))]
        return self.marks(apply(eqn, operands), op.results)

    def _known(self, spec: tuple) -> PartitionSpec:
        """The user's spec without the axes that this mesh lacks."""
        names = self.mesh.axis_names

        def known(entry: Any) -> Any:
            axes = (entry,) if isinstance(entry, str) else entry
            return tuple(name for name in axes if name in names) or None if isinstance(axes, tuple) else entry

        return PartitionSpec(*map(known, spec))

    def control_flow(self, op: Op, eqn: JaxprEqn, operands: list[Any]) -> list[Any]:
        results = self.rebound(op, eqn, operands)
        return results if op.primitive in CALLS else self.marks(results, op.results)

    def enter(self, op: Op, number: int, arguments: Sequence[Any]) -> Sequence[Any]:
        return self.marks(arguments, op.bodies[number].inputs)
