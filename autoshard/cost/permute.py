"""Senders, receivers and pieces of a collective_permute from one layout to another that splits every dimension at least as often.

Each device needs one piece of a source shard, and as many devices have that shard as need pieces of it, so each sends one piece. A device
that has its piece keeps it. The others are paired within their shard in mesh order, with senders that differ from their receivers along
`exchange_axes` alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

import numpy as np

from autoshard.ir import Layout, shard_counts


@dataclass(frozen=True, slots=True, eq=False)
class Exchange:
    """The pieces that a collective_permute moves.

    Attributes:
        pairs: ``(n_devices, 2)`` sender and receiver of each piece, as device numbers in mesh order, by sender.
        starts: ``(n_devices, rank)`` per sender and dimension, the offset of its piece in its shard, in pieces.
    """

    pairs: np.ndarray
    starts: np.ndarray


@cache
def exchange_axes(source: Layout, target: Layout, rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The axes along which senders and receivers differ, in O(axes), however many devices there are.

    The shard that a device has along a dimension, and the one that it needs a piece of, are numbers whose digits are its places on axes.
    Digits are compared from the greatest down, in the parts that both numbers have. Equal ones are of the same part of the same axis.

    >>> exchange_axes((0, -1, -1), (-1, 0, 0), 1, (2, 2, 2))  # the third axis divides what was sent along the first two
    (0, 1)
    """
    moved: set[int] = set()
    for dim in range(rank):
        has, needs = (
            [[axis, sizes[axis]] for axis, at in enumerate(layout) if at == dim and sizes[axis] > 1] for layout in (source, target)
        )
        pieces = math.prod(size for _, size in needs) // math.prod(size for _, size in has)
        while pieces > 1 and pieces % needs[-1][1] == 0:  # axes that only say which piece of a shard
            pieces //= needs.pop()[1]
        while has:
            (one, first), (other, second) = has[0], needs[0]
            part = min(first, second)
            if first % part or second % part:  # no common digits
                moved.update(axis for axis, _ in (*has, *needs))
                break
            if (one, first) != (other, second):
                moved |= {one, other}
            for digits in (has, needs):
                digits[0][1] //= part
                if digits[0][1] == 1:
                    digits.pop(0)
    return tuple(sorted(moved))


def exchange(source: Layout, target: Layout, rank: int, sizes: tuple[int, ...]) -> Exchange:
    """The exchange between two layouts of an array of this rank, in O(devices log devices): for programs, not for their costs.

    Args:
        source, target: the layouts.
        rank: of the array.
        sizes: of the mesh's axes.
    """
    places = np.indices(sizes).reshape(len(sizes), -1)
    has, needs = (_positions(places, layout, rank, sizes) for layout in (source, target))
    before, after = (shard_counts(layout, rank, sizes) for layout in (source, target))
    pieces = np.array(after).reshape(rank, 1) // np.array(before).reshape(rank, 1)  # of a shard, per dimension
    shard = needs // pieces
    alike = [place for axis, place in enumerate(places) if axis not in exchange_axes(source, target, rank, sizes)]
    moves = np.flatnonzero((shard != has).any(axis=0))
    givers, takers = (moves[np.lexsort([row[moves] for row in (*alike, *shards)])] for shards in (has, shard))
    senders = np.arange(places.shape[1])
    senders[takers] = givers
    order = np.argsort(senders)
    return Exchange(np.stack([senders, np.arange(len(senders))], axis=1)[order], (needs - has[:, senders] * pieces).T[order])


def _positions(places: np.ndarray, layout: Layout, rank: int, sizes: tuple[int, ...]) -> np.ndarray:
    """The index ``(rank, n_devices)`` of each device's shard along each dimension, from its places ``(n_axes, n_devices)``."""
    position = np.zeros((rank, places.shape[1]), int)
    for axis, dim in enumerate(layout):
        if dim >= 0:
            position[dim] = position[dim] * sizes[axis] + places[axis]
    return position
