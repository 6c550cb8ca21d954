"""Shardy's passes on a lowered program: explicit collectives, and propagated layouts.

Shardy is the partitioner in jaxlib. The passes run on a copy of the lowered module, in milliseconds and without compilation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, jaxpr_as_fun
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from autoshard.analysis.values import free_values
from autoshard.ir import Collective, Graph, Layout, Mesh, Op, ServedOp
from autoshard.ir.naming import runs_rarely
from autoshard.lower.interpret import Interpreter, Path, apply, ops_by_path
from autoshard.lower.mesh import lowering_mesh, to_named_sharding
from autoshard.lower.opaque import without_kernels
from autoshard.primitives import is_call
from autoshard.trace import constraint_spec
from autoshard.trace.mapped import LEAVING
from autoshard.verify import manual

PROPAGATE = "builtin.module(sdy-propagation-pipeline)"
RESHARD = "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))"
EXPLICIT = "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true},sdy-reshard-to-collectives))"

KINDS = {
    "sdy.all_gather": ("all_gather", "gathering_axes"),
    "sdy.all_reduce": ("all_reduce", "reduction_axes"),
    "sdy.reduce_scatter": ("reduce_scatter", "reduce_scatter_axes"),
    "sdy.all_to_all": ("all_to_all", "params"),
    "sdy.collective_permute": ("collective_permute", ""),
}
_AXIS = re.compile(r'"([^"]*)"(:\(\d+\)\d+)?')
_SHARDING = re.compile(r"<@[^<>]*>")

Dims = Sequence[Sequence[tuple[str, str]]]
"""Per dimension of a Shardy sharding its axes, as ``(name, sub-axis suffix)``."""


def explicit_collectives(lowered: jax.stages.Lowered | ir.Module, mesh: Mesh) -> tuple[Collective, ...]:
    """The collectives that Shardy inserts into a lowered program: exact in kind, axes and bytes.

    An all_reduce whose readers all slice this device's part over the same axes counts as the reduce_scatter that it becomes
    on TPU and GPU. A program that is one manual computation has its collectives already, and is read as it is.
    """
    module: Any = lowered.compiler_ir("stablehlo") if isinstance(lowered, jax.stages.Lowered) else lowered
    return collectives_in(module.operation if _is_manual(module) else explicit(module), mesh)


def _is_manual(module: Any) -> bool:
    """Whether the module's main function is one manual computation."""
    functions = {_text(op.attributes["sym_name"]): op for op in _operations(module) if op.name == "func.func"}
    done = [op.name for op in _operations(functions["main"])]
    return done.count("sdy.manual_computation") == 1 and {*done} <= {"sdy.manual_computation", "stablehlo.constant", "func.return"}


def explicit(lowered: jax.stages.Lowered | ir.Module | ir.Operation) -> Any:
    """A copy of the module after propagation, with all reshards as explicit collectives."""
    return _run(lowered, PROPAGATE, EXPLICIT)


def collectives_in(module: Any, mesh: Mesh) -> tuple[Collective, ...]:
    """The collectives of a module with explicit ones, in program order."""
    found = []
    for op, count in _executed(module):
        if op.name in KINDS:
            found.append(_record(op, count, mesh))
        elif op.name in manual.KINDS:
            made = manual.collective(op, count, mesh)
            scattered = made.kind == "all_reduce" and _is_scattered(manual.returned_as(op.results[0]), made.mesh_axes, mesh)
            found.append(replace(made, kind="reduce_scatter") if scattered else made)
    return tuple(collective for collective in found if collective.bytes)  # empty arrays are not sent


def made_bytes(module: Any, mesh: Mesh) -> float:
    """The bytes of all op results on one device in a step, a measure of how far ops are sharded."""
    return sum(
        count * _local_bytes(result.type, _dims_of(result), mesh)
        for op, count in _executed(module)
        if op.name.startswith("stablehlo.") and op.name not in ("stablehlo.constant", "stablehlo.while", "stablehlo.case")
        for result in op.results
        if isinstance(result.type, ir.RankedTensorType)
    )


def _run(lowered: jax.stages.Lowered | ir.Module | ir.Operation, *pipelines: str) -> ir.Operation:
    """A copy of the module after the passes, which work in place."""
    module: Any = lowered.compiler_ir("stablehlo") if isinstance(lowered, jax.stages.Lowered) else lowered
    copy = module.operation.clone()
    _drop_single_device(copy)
    return _passed(copy, *pipelines)


def _passed(module: Any, *pipelines: str) -> ir.Operation:
    """The module, changed by the passes."""
    with module.context:
        for pipeline in pipelines:
            PassManager.parse(pipeline).run(module.operation)
    return module.operation


def _drop_single_device(op: Any) -> None:
    """Removes single-device shardings, as of callbacks, from which Shardy has no reshard."""
    for inner in _operations(op):
        if "@maximal_mesh" in str(inner.attributes.get("sdy.sharding", "")):
            del inner.attributes["sdy.sharding"]
        _drop_single_device(inner)


def _operations(op: Any) -> Iterator[Any]:
    for region in op.operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation


def _executed(module: Any) -> Iterator[tuple[Any, int]]:
    """Every operation that the module's main function reaches, with its executions."""
    functions = {_text(op.attributes["sym_name"]): op for op in _operations(module) if op.name == "func.func"}
    return _walk(functions["main"], functions, 1)


def _walk(op: Any, functions: Mapping[str, Any], count: int) -> Iterator[tuple[Any, int]]:
    for inner in _operations(op):
        yield inner, count
        if inner.name == "func.call":
            yield from _walk(functions[_text(inner.attributes["callee"]).lstrip("@")], functions, count)
        else:
            yield from _walk(inner, functions, count * (_trips(inner) if inner.name == "stablehlo.while" else 1))


def _record(op: Any, count: int, mesh: Mesh) -> Collective:
    kind, attribute = KINDS[op.name]
    after = _dims(str(op.attributes["out_sharding"]))
    axes = _moved(_dims_of(op.operands[0]), after, mesh) if kind == "collective_permute" else _axes(str(op.attributes[attribute]), mesh)
    local = _local_bytes(op.results[0].type, after, mesh)
    if kind == "reduce_scatter":
        local *= _parts(axes, mesh)  # the operand is larger
    if kind == "all_reduce" and _is_scattered(op.results[0], axes, mesh):
        kind = "reduce_scatter"
    named = re.match(r'loc\("([^"]*)"', str(op.location))
    return Collective(kind, axes, local, count, ServedOp(name=named[1]) if named else None)


def _dims_of(value: Any) -> list[list[tuple[str, str]]]:
    """The sharding of a value by dimension, from its defining operation, function or loop."""
    owner = value.owner
    if isinstance(owner, ir.Block):
        outer: Any = owner.owner.operation
        position = ir.BlockArgument(value).arg_number
        attributes = outer.attributes
        if outer.name == "func.func":  # the list is missing where no argument has attributes
            attributes = attributes["arg_attrs"][position] if "arg_attrs" in attributes else {}
    else:
        position, attributes = ir.OpResult(value).result_number, owner.attributes
        for name in ("out_sharding", "sharding"):  # of explicit collectives, and of reshards
            if name in attributes:
                return _dims(str(attributes[name]))
    if "sdy.sharding" not in attributes:
        return [[] for _ in ir.RankedTensorType(value.type).shape]
    text = str(attributes["sdy.sharding"])
    return _dims(_SHARDING.findall(text)[position] if "sharding_per_value" in text else text)


def _moved(before: Dims, after: Dims, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes along which a permute between two shardings sends: those with another dimension, or another position in it."""
    places = [_places(dims, mesh) for dims in (before, after)]
    return tuple(name for name in mesh.names if places[0].get(name) != places[1].get(name))


def _places(dims: Dims, mesh: Mesh) -> dict[str, set[tuple[int, int, str]]]:
    """Per axis its dimension, the number of parts into which the axes before it split that, and its sub-axis suffix."""
    sizes = dict(mesh.shape)
    places: dict[str, set[tuple[int, int, str]]] = {}
    for dim, axes in enumerate(dims):
        parts = 1
        for name, suffix in axes:
            places.setdefault(name, set()).add((dim, parts, suffix))
            parts *= int(suffix.rpartition(")")[2]) if suffix else sizes[name]
    return places


def _is_scattered(value: Any, axes: tuple[str, ...], mesh: Mesh) -> bool:
    readers = [use.owner for use in value.uses]
    return bool(readers) and all(
        reader.name == "sdy.all_slice" and _axes(str(reader.attributes["slicing_axes"]), mesh) == axes for reader in readers
    )


def _trips(loop: Any) -> int:
    """The trip count of a while loop whose counter has constant start, step and bound, 0 of one that `runs_rarely`; else 1."""
    if runs_rarely(str(loop.location)):
        return 0
    condition, body = (next(iter(region.blocks)) for region in loop.regions)
    test, entering, leaving = _returned(condition)[0].owner, loop.operands, _returned(body)
    if getattr(test, "name", "") != "stablehlo.compare" or not isinstance(test.operands[0].owner, ir.Block):
        return 1
    bound, position = test.operands[1], ir.BlockArgument(test.operands[0]).arg_number
    if isinstance(bound.owner, ir.Block):  # a carry, constant if the body returns it unchanged
        carry = ir.BlockArgument(bound).arg_number
        bound = entering[carry] if leaving[carry] == body.arguments[carry] else bound
    addition = leaving[position].owner
    if getattr(addition, "name", "") != "stablehlo.add" or addition.operands[0] != body.arguments[position]:
        return 1
    start, limit, step = map(_integer, (entering[position], bound, addition.operands[1]))
    direction = re.search(r"\bL[TE]\b", str(test.attributes["comparison_direction"]))
    if start is None or limit is None or step is None or step <= 0 or direction is None:
        return 1
    return max(0, math.ceil((limit - start + (direction[0] == "LE")) / step))


def _returned(block: Any) -> Any:
    *_, end = block.operations
    return end.operation.operands


def _integer(value: Any) -> int | None:
    """The value of an integer constant, or None."""
    owner = value.owner
    if getattr(owner, "name", "") not in ("sdy.constant", "stablehlo.constant"):
        return None
    found = re.match(r"dense<(-?\d+)>", str(owner.attributes["value"]))
    return int(found[1]) if found else None


def _axes(text: str, mesh: Mesh) -> tuple[str, ...]:
    """The mesh axes of a Shardy attribute, in mesh order, sub-axes as their axis."""
    named = {name for name, _ in _AXIS.findall(text)}
    return tuple(name for name in mesh.names if name in named)


def _parts(axes: Sequence[str], mesh: Mesh) -> int:
    return math.prod(size for name, size in mesh.axes if name in axes)


def _dims(sharding: str) -> list[list[tuple[str, str]]]:
    """Per dimension of a Shardy sharding its axes, as ``(name, sub-axis suffix)``."""
    inside = sharding[sharding.index("[") : sharding.rindex("]")]
    return [_AXIS.findall(dim) for dim in re.findall(r"\{([^}]*)\}", inside)]


def _local_bytes(kind: Any, dims: Dims, mesh: Mesh) -> float:
    """The bytes of one shard of a tensor, padding included."""
    sizes = dict(mesh.shape)
    elements = 1
    for size, axes in zip(ir.RankedTensorType(kind).shape, dims, strict=True):
        parts = math.prod(int(suffix.rpartition(")")[2]) if suffix else sizes[name] for name, suffix in axes)
        elements *= -(-size // parts)
    return elements * manual.itemsize(str(ir.RankedTensorType(kind).element_type))


def _text(attribute: Any) -> str:
    return str(attribute).strip('"')


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
    module = _run(lowered, PROPAGATE)
    values = _marked(module, mesh)
    constrained = {op.index: op.results[0] for op in graph.walk() if op.primitive == "sharding_constraint" and op.results[0] in values}
    pinned = {index: ((values[value],), (values[value],)) for index, value in constrained.items()}
    return values, pinned | _sides(_passed(module, RESHARD), graph, mesh)


def lowered_flat(
    function: Callable[..., list[Any]], jaxpr: ClosedJaxpr, in_shardings: Sequence[Any], out_shardings: Sequence[Any]
) -> jax.stages.Lowered:
    """A function of the flat arguments of ``jaxpr``, lowered for Shardy; no devices are needed."""
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in jaxpr.in_avals]
    program = without_kernels(jax.make_jaxpr(function)(*avals))
    jitted = jax.jit(jaxpr_as_fun(program), in_shardings=tuple(in_shardings), out_shardings=[*out_shardings], keep_unused=True)
    return jitted.trace(*avals).lower(lowering_platforms=("cpu",))  # any platform: Shardy runs before platform-specific passes


def _marked(module: Any, mesh: Mesh) -> dict[int, Layout]:
    found: dict[int, Layout] = {}
    for op in _operations(module):
        mark = _MARKED.search(str(op.location)) if op.name == "sdy.reshard" else None
        if mark:
            found[int(mark[1])] = _layout(_dims(str(op.attributes["sharding"])), mesh)
        found |= _marked(op, mesh)
    return found


def _sides(module: Any, graph: Graph, mesh: Mesh) -> dict[int, Sides]:
    """Per op that is lowered to one operation, the layouts of its resharded operands and of its results."""
    made: dict[int, list[Any]] = {}

    def collect(op: Any) -> None:
        for inner in _operations(op):
            if (mark := _OP_MARKED.search(str(inner.location))) and inner.name.startswith(("stablehlo.", "chlo.")):
                made.setdefault(int(mark[1]), []).append(inner)
            collect(inner)

    collect(module)
    ops, found = graph.walk(), {}
    for index, (operation, *others) in made.items():
        tensors = [*operation.operands][: len(ops[index].operands)], [*operation.results]
        shapes = [[graph.values[value].shape for value in side] for side in (ops[index].operands, ops[index].results)]
        if not others and [[tuple(ir.RankedTensorType(tensor.type).shape) for tensor in side] for side in tensors] == shapes:
            operands, results = (tuple(_layout(_dims_of(tensor), mesh) for tensor in side) for side in tensors)
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
