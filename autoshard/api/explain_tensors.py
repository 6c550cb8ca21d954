"""Tables and pictures of a strategy's tensors: how each is split, and which devices have which part."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.ir import Mesh, Spec, shard_counts, spec_to_layout
from autoshard.ir.naming import components, itemsize, numbered, starred
from autoshard.ir.words import array_type, spec_words
from autoshard.render import (
    Cell,
    Picture,
    Table,
    format_bytes,
)
from autoshard.strategy import TensorRecord

PICTURE_SIDE = 8  # blocks shown a side; of more, the first and the last ones


@dataclass(frozen=True, slots=True)
class _Row:
    """Tensors that one line of a table stands for; ``alike`` are those counted because they mirror the line's own."""

    path: str
    tensor: TensorRecord
    n: int
    alike: int
    bytes_a_device: float


def tensor_table(rows: Sequence[_Row], notes: tuple[str, ...] = ()) -> Table:
    lines = (
        (
            row.path,
            f"{row.n}",
            array_type(row.tensor.dtype, row.tensor.shape),
            format_spec(row.tensor.spec),
            format_bytes(row.bytes_a_device),
        )
        for row in rows
    )
    return Table(("path", ">tensors", "whole", "sharded", ">bytes a device"), tuple(lines), notes)


def tensor_rows(tensors: Sequence[TensorRecord], mesh: Mesh) -> list[_Row]:
    """One row for all tensors whose paths differ by an index, and for what mirrors them deeper in the tree."""
    rows: list[_Row] = []
    for path, members in by_pattern(tensors):
        first = members[0]
        n_bytes = len(members) * bytes_a_device(first, mesh)
        like = next((i for i, row in enumerate(rows) if _mirrors(path, first, row)), None)
        if like is None:
            rows.append(_Row(path, first, len(members), 0, n_bytes))
        else:
            row = rows[like]
            rows[like] = _Row(row.path, row.tensor, row.n + len(members), row.alike + len(members), row.bytes_a_device + n_bytes)
    return rows


def by_pattern(tensors: Sequence[TensorRecord]) -> list[tuple[str, list[TensorRecord]]]:
    """Tensors of equal shape, dtype and spec whose paths are equal but for indices, under one path: ``layers[*].qkv``."""
    total = Counter(starred(tensor.path) for tensor in tensors)
    groups: dict[tuple, list[TensorRecord]] = defaultdict(list)
    for tensor in tensors:
        groups[starred(tensor.path), tensor.shape, tensor.dtype, tensor.spec].append(tensor)
    return [(_joined([t.path for t in members], len(members) == total[key[0]]), members) for key, members in groups.items()]


def _joined(paths: list[str], complete: bool) -> str:
    """One path for several that differ by indices: ``*`` where they are all there are, else the indices."""
    shown = []
    for position, alternatives in enumerate(zip(*map(numbered, paths), strict=True)):
        found = sorted(set(alternatives), key=lambda text: (len(text), text))
        shown.append(found[0] if len(found) == 1 or position % 2 == 0 else "*" if complete else _runs(map(int, found)))
    return "".join(shown)


def alike(one: TensorRecord, other: TensorRecord) -> bool:
    return (one.shape, one.dtype, one.spec) == (other.shape, other.dtype, other.spec)


def _mirrors(path: str, tensor: TensorRecord, row: _Row) -> bool:
    return alike(tensor, row.tensor) and len(components(path)) > len(components(row.path)) and common_ending(path, row.path)


def common_ending(path: str, other: str) -> bool:
    """Whether the paths end alike, but for at most two components at the start of the shorter one."""
    ours, theirs = components(path), components(other)
    common = 0
    while common < min(len(ours), len(theirs)) and ours[-1 - common] == theirs[-1 - common]:
        common += 1
    return common > 0 and min(len(ours), len(theirs)) - common <= 2


def format_spec(spec: Spec) -> str:
    """The spec as one writes it: ``P('data', None)``; ``replicated`` where nothing is sharded."""
    return spec_words(spec) if any(entry is not None for entry in spec) else "replicated"


def bytes_a_device(tensor: TensorRecord, mesh: Mesh) -> float:
    """The bytes of one device's shard of a tensor."""
    counts = shard_counts(spec_to_layout(tensor.spec, mesh, len(tensor.shape)), len(tensor.shape), mesh.sizes)
    return itemsize(tensor.dtype) * math.prod(n // count for n, count in zip(tensor.shape, counts, strict=True))


def mesh_picture(mesh: Mesh) -> Picture:
    """The mesh as a grid of device numbers, its last axis from left to right."""
    ids = np.arange(mesh.size).reshape(-1, mesh.sizes[-1]) if mesh.axes else np.zeros((1, 1), dtype=int)
    caption = "" if len(mesh.axes) < 2 else f"down: {', '.join(mesh.names[:-1])}; across: {mesh.names[-1]}"
    return Picture(f"mesh {mesh}", _grid([[frozenset((int(i),)) for i in row] for row in ids], mesh.size), caption)


def tensor_picture(tensor: TensorRecord, mesh: Mesh) -> Picture:
    """The blocks a tensor is cut into, each with the devices that hold it; the first two sharded dimensions are shown."""
    layout = spec_to_layout(tensor.spec, mesh, len(tensor.shape), tensor.path)
    counts = shard_counts(layout, len(tensor.shape), mesh.sizes)
    sharded = [dim for dim, count in enumerate(counts) if count > 1]
    down, across = _shown_dims(sharded)
    holders: dict[tuple[int, int], set[int]] = defaultdict(set)
    for device, place in enumerate(np.ndindex(*mesh.sizes)):
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
            Cell("…") if row is None or column is None else Cell(_runs(holders[row][column]), min(holders[row][column]) / n_devices)
            for column in columns
        )
        for row in rows
    )


def _shown(n: int) -> list[int | None]:
    return list(range(n)) if n <= PICTURE_SIDE else [*range(PICTURE_SIDE - 2), None, n - 1]


def _runs(numbers: Iterable[int]) -> str:
    """Whole numbers in short: ``0-3,6``; of more than four runs the ends.

    >>> _runs([0, 1, 2, 3, 6]), _runs(range(0, 16, 2))
    ('0-3,6', '0,2,…,14')
    """
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    texts = [str(low) if low == high else f"{low},{high}" if high == low + 1 else f"{low}-{high}" for low, high in runs]
    return ",".join(texts if len(texts) <= 4 else [*texts[:2], "…", texts[-1]])
