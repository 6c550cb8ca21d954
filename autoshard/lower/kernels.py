"""Parameters of a user's kernel on the shards of one device: a smaller grid over smaller arrays, in blocks of the same sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from autoshard.rules import grid_axes

Shape = tuple[int, ...]


def on_shards(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> dict[str, Any]:
    """The parameters of a `pl.pallas_call` that differ on a shard, by the shapes of the operands and results there.

    A grid axis shrinks with the dimension that it indexes; index maps stay, since a program's blocks are counted from the shard's first.
    """
    mapping = params["grid_mapping"]
    shapes = (*operands[len(operands) - mapping.num_inputs :], *results)
    blocks = tuple(
        each.replace(array_aval=each.array_aval.update(shape=shape)) for each, shape in zip(mapping.block_mappings, shapes, strict=True)
    )
    grid, split = list(mapping.grid), grid_axes(params)
    for axis, (tensor, dim) in split.items():
        grid[axis] = grid[axis] * shapes[tensor][dim] // mapping.block_mappings[tensor].array_aval.shape[dim]
    made = tuple(aval.update(shape=shape) for aval, shape in zip(params["out_avals"], results, strict=True))
    parts = math.prod(mapping.grid[axis] // grid[axis] for axis in split)
    return {
        "grid_mapping": mapping.replace(grid=tuple(grid), block_mappings=blocks),
        "out_avals": made,
        "cost_estimate": _part(params["cost_estimate"], parts),
    }


def _part(estimate: Any, parts: int) -> Any:
    """The estimate of one of several equal parts of the work."""
    return estimate and replace(estimate, **{field.name: getattr(estimate, field.name) // parts for field in fields(estimate)})
