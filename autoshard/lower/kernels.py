"""A user's kernel on the shards of one device: a smaller grid over smaller arrays, in blocks of the same sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import jax.numpy as jnp

from autoshard.rules import grid_of

Shape = tuple[int, ...]
Place = tuple[int, int]


def split_axes(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> dict[int, Place]:
    """Per grid axis of a `pl.pallas_call` that is split, a tensor, inputs counted first and then results, and its dimension that is.

    Args:
        operands, results: the shapes of the shards.
    """
    mapping = params["grid_mapping"]
    shapes = (*operands[len(operands) - mapping.num_inputs :], *results)
    found: dict[int, tuple[float, int, Place]] = {}
    for tensor, dims in enumerate(grid_of(params).indices):
        for dim, index in enumerate(dims):
            left = shapes[tensor][dim] / index.size
            if len(index.axes) == 1 and left < 1:  # of several the one that is split most: heads that share another are split within groups
                axis, place = next(iter(index.axes)), (left, index.shared, (tensor, dim))
                found[axis] = min(found.get(axis, place), place)
    return {axis: place for axis, (_, _, place) in found.items()}


def on_shards(params: Any, operands: Sequence[Shape], results: Sequence[Shape]) -> dict[str, Any]:
    """The parameters of a `pl.pallas_call` that differ on a shard, by the shapes of the operands and results there.

    A grid axis shrinks with the dimension that it indexes; index maps stay, since a program's blocks are counted from the shard's first.
    """
    mapping = params["grid_mapping"]
    shapes = (*operands[len(operands) - mapping.num_inputs :], *results)
    blocks = tuple(
        each.replace(array_aval=each.array_aval.update(shape=shape)) for each, shape in zip(mapping.block_mappings, shapes, strict=True)
    )
    grid, split = list(mapping.grid), split_axes(params, operands, results)
    for axis, (tensor, dim) in split.items():
        grid[axis] = max(1, grid[axis] * shapes[tensor][dim] // mapping.block_mappings[tensor].array_aval.shape[dim])
    made = tuple(aval.update(shape=shape) for aval, shape in zip(params["out_avals"], results, strict=True))
    parts = math.prod(mapping.grid[axis] // grid[axis] for axis in split)
    return {
        "grid_mapping": mapping.replace(grid=tuple(grid), block_mappings=blocks),
        "out_avals": made,
        "cost_estimate": _part(params["cost_estimate"], parts),
    }


def shifted(params: Any, shards: Sequence[Any], results: Sequence[Shape], positions: Callable[[int, int], Any]) -> list[Any]:
    """The operands of a shard's call, in which each program finds the scalars that it looks up where its position on the shard says.

    They are as many as in the whole call, whose body expects them.

    Args:
        results: the shapes of the shards.
        positions: of a tensor, operands counted first and then results, and a dimension the positions in the whole of the shard's elements.
    """
    mapping, grid, found = params["grid_mapping"], grid_of(params), list(shards)
    first = len(shards) - mapping.num_inputs
    start, dims_of = first - mapping.num_index_operands, (*grid.scalars, *grid.indices)
    for axis, (tensor, dim) in split_axes(params, [x.shape for x in shards], results).items():
        index, period = grid.indices[tensor][dim], grid.period[axis]
        for number, drifts in grid.drifts[axis].items():
            programs = max(period, index.shared)
            elements = index.size * programs // mapping.grid[axis]
            parts = positions(first + tensor, dim)[::elements] // elements
            for at, drift in enumerate(drifts):
                if drift and dims_of[number][at].axes != {axis}:
                    found[start + number] = _taken(found[start + number], at, parts, drift * programs // period)
    for number in grid.looked_up:
        shard = found[start + number]
        missing = [(0, index.size - size) for index, size in zip(dims_of[number], shard.shape, strict=True)]
        found[start + number] = jnp.pad(shard, missing) if any(map(any, missing)) else shard
    return found


def _taken(x: Any, dim: int, parts: Any, size: int) -> Any:
    """An array whose parts of some size along a dimension are those with these numbers, and after them the next ones."""
    place = jnp.arange(x.shape[dim])
    number = place // size
    number = parts[jnp.minimum(number, len(parts) - 1)] + jnp.maximum(number - len(parts) + 1, 0)
    return jnp.take(x, (number * size + place % size) % x.shape[dim], dim)


def _part(estimate: Any, parts: int) -> Any:
    """The estimate of one of several equal parts of the work."""
    return estimate and replace(estimate, **{field.name: getattr(estimate, field.name) // parts for field in fields(estimate)})
