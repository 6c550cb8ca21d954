"""Collectives that a program has itself, inside the manual computations to which `jax.shard_map` is lowered."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
from jaxlib.mlir import ir

from autoshard.ir import Collective, Mesh, ServedOp
from autoshard.verify.groups import axes_of_groups, axes_of_pairs

KINDS = {
    "stablehlo.all_gather": "all_gather",
    "stablehlo.all_reduce": "all_reduce",
    "stablehlo.reduce_scatter": "reduce_scatter",
    "stablehlo.all_to_all": "all_to_all",
    "stablehlo.collective_permute": "collective_permute",
}


def collective(op: Any, count: int, mesh: Mesh) -> Collective:
    """The record of an operation of `KINDS`, whose types are those of shards."""
    if op.name == "stablehlo.collective_permute":
        axes = axes_of_pairs(np.array(ir.DenseIntElementsAttr(op.attributes["source_target_pairs"])), mesh)
    else:
        groups = op.attributes["replica_groups"]
        named = re.findall(r'axis_ref<name = "([^"]*)"', str(groups))  # jax 0.11 names axes
        axes = tuple(name for name in mesh.names if name in named) if named else _spanned(groups, mesh)
    local = max(type_bytes(value.type) for value in (op.operands[0], op.results[0]))
    named = re.match(r'loc\("([^"]*)"', str(op.location))
    return Collective(KINDS[op.name], axes, local, count, ServedOp(name=named[1]) if named else None)


def _spanned(groups: Any, mesh: Mesh) -> tuple[str, ...]:
    return axes_of_groups(np.array(ir.DenseIntElementsAttr(groups)), mesh)


def returned_as(value: Any) -> Any:
    """The result of the manual computation that returns the value, where that is its only use; else the value."""
    uses = list(value.uses)
    if len(uses) != 1 or uses[0].owner.name != "sdy.return":
        return value
    return uses[0].owner.operation.parent.results[uses[0].operand_number]


def type_bytes(kind: Any) -> float:
    """The bytes of a tensor type."""
    tensor = ir.RankedTensorType(kind)
    return math.prod(tensor.shape) * itemsize(str(tensor.element_type))


def itemsize(element: str) -> float:
    """Bytes per element of an MLIR type: ``f32``, ``bf16``, ``ui8``, ``i1``, ``f8E4M3FN``, ``complex<f32>``."""
    if element == "i1":
        return 1.0
    bits = re.search(r"\d+", element)
    assert bits, element
    return int(bits[0]) / 8 * (2 if element.startswith("complex") else 1)
