"""Pictures of a strategy's mesh and tensors: which devices have which part."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from autoshard.explanation.groups import runs
from autoshard.explanation.text import format_spec
from autoshard.ir import Mesh, shard_counts, spec_to_layout
from autoshard.render import Cell, Picture
from autoshard.strategy import TensorRecord

PICTURE_SIDE = 8  # blocks shown a side; of more, the first and the last ones


def mesh_picture(mesh: Mesh) -> Picture:
    """The mesh as a grid of device numbers, its last axis from left to right."""
    ids = mesh.devices.reshape(-1, mesh.sizes[-1]) if mesh.axes else np.zeros((1, 1), dtype=int)
    caption = "" if len(mesh.axes) < 2 else f"down: {', '.join(mesh.names[:-1])}; across: {mesh.names[-1]}"
    return Picture(f"mesh {mesh}", _grid([[frozenset((int(i),)) for i in row] for row in ids], mesh.size), caption)


def tensor_picture(tensor: TensorRecord, mesh: Mesh) -> Picture:
    """The blocks a tensor is cut into, each with the devices that hold it; the first two sharded dimensions are shown."""
    layout = spec_to_layout(tensor.spec, mesh, len(tensor.shape), tensor.path)
    counts = shard_counts(layout, len(tensor.shape), mesh.sizes)
    sharded = [dim for dim, count in enumerate(counts) if count > 1]
    down, across = _shown_dims(sharded)
    holders: dict[tuple[int, int], set[int]] = defaultdict(set)
    for place, device in np.ndenumerate(mesh.devices):
        block = [0] * len(tensor.shape)
        for dim, at, size in zip(layout, place, mesh.sizes, strict=True):
            if dim >= 0:
                block[dim] = block[dim] * size + at
        holders[0 if down is None else block[down], 0 if across is None else block[across]].add(device)
    n_rows, n_columns = (1 if dim is None else counts[dim] for dim in (down, across))
    grid = [[frozenset(holders[row, column]) for column in range(n_columns)] for row in range(n_rows)]
    block = "x".join(str(n // count) for n, count in zip(tensor.shape, counts, strict=True))
    sides = [f"{word}: dim {dim}" for word, dim in (("down", down), ("across", across)) if dim is not None]
    caption = "; ".join((*sides, f"blocks of {block}")) if sides else "every device holds it whole"
    whole = "x".join(map(str, tensor.shape))
    return Picture(f"{tensor.path} {whole}\n{format_spec(tensor.spec)}", _grid(grid, mesh.size), caption)


def _shown_dims(sharded: list[int]) -> tuple[int | None, int | None]:
    """The dimensions drawn from top to bottom and from left to right."""
    if len(sharded) > 1:
        return sharded[0], sharded[1]
    if not sharded:
        return None, None
    return (sharded[0], None) if sharded[0] == 0 else (None, sharded[0])


def _grid(holders: list[list[frozenset[int]]], n_devices: int) -> tuple[tuple[Cell, ...], ...]:
    """The cells of a grid, a middle too long to show left out; a block's hue says where its first device stands."""
    rows, columns = (_shown(len(side)) for side in (holders, holders[0]))
    return tuple(
        tuple(
            Cell("…") if row is None or column is None else Cell(runs(holders[row][column]), min(holders[row][column]) / n_devices)
            for column in columns
        )
        for row in rows
    )


def _shown(n: int) -> list[int | None]:
    return list(range(n)) if n <= PICTURE_SIDE else [*range(PICTURE_SIDE - 2), None, n - 1]
