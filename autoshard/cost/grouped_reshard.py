"""Reshards on meshes of so many axes that those between all layouts cannot be tabulated: one pair of layouts at a time.

*Groups.* Few axes of a pair change, and only these and the axes behind them on the same dimensions can move; the array is taken as what the
others leave of it. Neighbours of these that split the same dimension before, and the same one after, move as one axis. On the mesh of such
groups the path is that of `autoshard.cost.reshard`, which is the cheapest one where no group is better moved in parts.

*Many groups.* Where even their layouts are too many, each dimension is gathered up to the first axis that changes, and sliced again.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import groupby, takewhile

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.cost.collectives import Communication
from autoshard.cost.reshard import Reshards, Step, path_seconds
from autoshard.ir import Layout, Mesh, divides, layout_of, shard_counts

Move = tuple[str, tuple[int, ...], Layout, Layout]
"""A kind of step, its axes, and the layouts before and after."""


class GroupedReshards:
    """The reshards of one mesh, pair by pair; paths are cached.

    Args:
        mesh, communication: the mesh, and the cost of its collectives.
        whole: the reshards of the mesh, of which the steps of single moves are used.
        copying_seconds_per_byte, gathers_tori: as for `Reshards`.
    """

    def __init__(self, mesh: Mesh, communication: Communication, whole: Reshards, copying_seconds_per_byte: float, gathers_tori: bool):
        self._sizes = mesh.sizes
        self._communication = communication
        self._whole = whole
        self._options = copying_seconds_per_byte, gathers_tori
        self._groups: dict[tuple[tuple[int, ...], ...], Reshards] = {}
        self._seconds: dict[tuple, dict[tuple[int, int], float]] = {}

    def seconds(self, shape: tuple[int, ...], itemsize: float, sources: np.ndarray, targets: np.ndarray) -> np.ndarray:
        """The seconds between layouts of these numbers, which broadcast; infinite where one does not divide the shape."""
        known = self._seconds.setdefault((shape, itemsize), {})
        first, last = (numbers.ravel() for numbers in np.broadcast_arrays(sources, targets))
        pairs = list(zip(first.tolist(), last.tolist(), strict=True))
        for source, target in set(pairs).difference(known):
            layouts = [layout_of(number, len(shape), len(self._sizes)) for number in (source, target)]
            is_legal = all(divides(layout, shape, self._sizes) for layout in layouts)
            known[source, target] = path_seconds(self.path(shape, itemsize, *layouts)) if is_legal else math.inf
        return np.array([known[pair] for pair in pairs]).reshape(np.broadcast_shapes(sources.shape, targets.shape))

    def path(self, shape: Sequence[int], itemsize: float, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The steps from one layout to another; none where they are equal."""
        moves = self._moves(shape, itemsize, source, target)
        return tuple(step for move in moves for step in self._whole.move(shape, itemsize, *move))

    def _moves(self, shape: Sequence[int], itemsize: float, source: Layout, target: Layout) -> Iterator[Move]:
        """The moves of the path, on the mesh's own axes."""
        moving = _moving(source, target)
        dims = sorted({layout[axis] for layout in (source, target) for axis in moving} - {-1})
        groups = tuple(tuple(group) for _, group in groupby(moving, lambda axis: (source[axis], target[axis])))
        if (len(dims) + 1) ** len(groups) > BUDGETS.reshard_layouts:
            yield from _gathered(len(shape), source, target)
            return
        stays = tuple(-1 if axis in moving else dim for axis, dim in enumerate(source))
        local = [n // count for n, count in zip(shape, shard_counts(stays, len(shape), self._sizes), strict=True)]
        held = math.prod(n for dim, n in enumerate(local) if dim not in dims)
        number = {-1: -1} | {dim: number for number, dim in enumerate(dims)}
        before, after = (tuple(number[layout[group[0]]] for group in groups) for layout in (source, target))
        at = source
        for step in self._reshards(groups).path([local[dim] for dim in dims], itemsize * held, before, after):
            if step.source == step.target:  # the first of two phases, which the move has too
                continue
            place = {axis: dims[dim] if dim >= 0 else -1 for group, dim in zip(groups, step.target, strict=True) for axis in group}
            found = tuple(place.get(axis, dim) for axis, dim in enumerate(source))
            yield step.kind, tuple(axis for number in step.axes for axis in groups[number]), at, found
            at = found

    def _reshards(self, groups: tuple[tuple[int, ...], ...]) -> Reshards:
        """Those of the mesh of these groups of axes."""
        if (found := self._groups.get(groups)) is None:
            mesh = Mesh(tuple((str(number), math.prod(self._sizes[axis] for axis in group)) for number, group in enumerate(groups)))
            links = tuple(self._communication.link(group) for group in groups)
            found = self._groups[groups] = Reshards(mesh, Communication(links, self._communication.shares), *self._options)
        return found


def _moving(source: Layout, target: Layout) -> list[int]:
    """The axes that change, and those behind the first of these on one of their dimensions, in mesh order."""
    changing = [axis for axis, (before, after) in enumerate(zip(source, target, strict=True)) if before != after]
    first: dict[int, int] = {}
    for axis in changing:
        for dim in (source[axis], target[axis]):
            first.setdefault(dim, axis)
    behind = (axis for axis, dim in enumerate(source) if dim >= 0 and dim == target[axis] and axis > first.get(dim, axis))
    return sorted({*changing, *behind})


def _gathered(rank: int, source: Layout, target: Layout) -> Iterator[Move]:
    """The moves that gather every dimension up to the first axis that changes there, and slice it again."""
    at = source
    for dim in range(rank):
        old, new = ([axis for axis, entry in enumerate(layout) if entry == dim] for layout in (source, target))
        kept = len([*takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False))])
        if tail := tuple(old[kept:]):
            after = tuple(-1 if axis in tail else entry for axis, entry in enumerate(at))
            yield "all_gather", tail, at, after
            at = after
    for axis, dim in enumerate(target):
        if at[axis] != dim:
            after = tuple(dim if number == axis else entry for number, entry in enumerate(at))
            yield "slice", (axis,), at, after
            at = after
