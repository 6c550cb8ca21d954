"""Shardy's passes on a lowered program, and the collectives that they make explicit.

Shardy is the partitioner in jaxlib. The passes run on a copy of the lowered module, in milliseconds and without compilation.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

from autoshard.ir import Collective, Mesh, ServedOp
from autoshard.ir.naming import runs_rarely
from autoshard.lower.opaque import without_kernels
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
    functions = {_text(op.attributes["sym_name"]): op for op in operations(module) if op.name == "func.func"}
    done = [op.name for op in operations(functions["main"])]
    return done.count("sdy.manual_computation") == 1 and {*done} <= {"sdy.manual_computation", "stablehlo.constant", "func.return"}


def explicit(lowered: jax.stages.Lowered | ir.Module | ir.Operation) -> Any:
    """A copy of the module after propagation, with all reshards as explicit collectives."""
    return run(lowered, PROPAGATE, EXPLICIT)


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
        count * _local_bytes(result.type, dims_of(result), mesh)
        for op, count in _executed(module)
        if op.name.startswith("stablehlo.") and op.name not in ("stablehlo.constant", "stablehlo.while", "stablehlo.case")
        for result in op.results
        if isinstance(result.type, ir.RankedTensorType)
    )


def run(lowered: jax.stages.Lowered | ir.Module | ir.Operation, *pipelines: str) -> ir.Operation:
    """A copy of the module after the passes, which work in place."""
    module: Any = lowered.compiler_ir("stablehlo") if isinstance(lowered, jax.stages.Lowered) else lowered
    copy = module.operation.clone()
    _drop_single_device(copy)
    return passed(copy, *pipelines)


def passed(module: Any, *pipelines: str) -> ir.Operation:
    """The module, changed by the passes."""
    with module.context:
        for pipeline in pipelines:
            PassManager.parse(pipeline).run(module.operation)
    return module.operation


def _drop_single_device(op: Any) -> None:
    """Removes single-device shardings, as of callbacks, from which Shardy has no reshard."""
    for inner in operations(op):
        if "@maximal_mesh" in str(inner.attributes.get("sdy.sharding", "")):
            del inner.attributes["sdy.sharding"]
        _drop_single_device(inner)


def operations(op: Any) -> Iterator[Any]:
    for region in op.operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                yield inner.operation


def _executed(module: Any) -> Iterator[tuple[Any, int]]:
    """Every operation that the module's main function reaches, with its executions."""
    functions = {_text(op.attributes["sym_name"]): op for op in operations(module) if op.name == "func.func"}
    return _walk(functions["main"], functions, 1)


def _walk(op: Any, functions: Mapping[str, Any], count: int) -> Iterator[tuple[Any, int]]:
    for inner in operations(op):
        yield inner, count
        if inner.name == "func.call":
            yield from _walk(functions[_text(inner.attributes["callee"]).lstrip("@")], functions, count)
        else:
            yield from _walk(inner, functions, count * (_trips(inner) if inner.name == "stablehlo.while" else 1))


def _record(op: Any, count: int, mesh: Mesh) -> Collective:
    kind, attribute = KINDS[op.name]
    after = dims(str(op.attributes["out_sharding"]))
    axes = _moved(dims_of(op.operands[0]), after, mesh) if kind == "collective_permute" else _axes(str(op.attributes[attribute]), mesh)
    local = _local_bytes(op.results[0].type, after, mesh)
    if kind == "reduce_scatter":
        local *= math.prod(size for name, size in mesh.axes if name in axes)  # the operand is larger
    if kind == "all_reduce" and _is_scattered(op.results[0], axes, mesh):
        kind = "reduce_scatter"
    named = re.match(r'loc\("([^"]*)"', str(op.location))
    return Collective(kind, axes, local, count, ServedOp(name=named[1]) if named else None)


def dims_of(value: Any) -> list[list[tuple[str, str]]]:
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
                return dims(str(attributes[name]))
    if "sdy.sharding" not in attributes:
        return [[] for _ in ir.RankedTensorType(value.type).shape]
    text = str(attributes["sdy.sharding"])
    return dims(_SHARDING.findall(text)[position] if "sharding_per_value" in text else text)


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


def dims(sharding: str) -> list[list[tuple[str, str]]]:
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


def lowered_flat(
    function: Callable[..., list[Any]], jaxpr: ClosedJaxpr, in_shardings: Sequence[Any], out_shardings: Sequence[Any]
) -> jax.stages.Lowered:
    """A function of the flat arguments of ``jaxpr``, lowered for Shardy; no devices are needed."""
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type) for aval in jaxpr.in_avals]
    program = without_kernels(jax.make_jaxpr(function)(*avals))
    jitted = jax.jit(jaxpr_as_fun(program), in_shardings=tuple(in_shardings), out_shardings=[*out_shardings], keep_unused=True)
    return jitted.trace(*avals).lower(lowering_platforms=("cpu",))  # any platform: Shardy runs before platform-specific passes
