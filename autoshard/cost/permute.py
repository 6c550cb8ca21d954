"""Senders, receivers and pieces of a collective_permute from one layout to another that splits every dimension at least as often.

Each device needs one piece of a source shard, and as many devices have that shard as need pieces of it, so each sends one piece. A device
that has its piece keeps it. The others are paired within their shard in mesh order, preferably with a sender that differs from the receiver
along the given axes alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

from autoshard.ir import Layout


@dataclass(frozen=True, slots=True)
class Exchange:
    """The pieces that a collective_permute moves.

    Attributes:
        pairs: sender and receiver of each piece, as device numbers in mesh order.
        starts: per sender and dimension, the offset of its piece in its shard, in pieces.
        axes: the axes along which some sender and receiver differ.
    """

    pairs: tuple[tuple[int, int], ...]
    starts: tuple[tuple[int, ...], ...]
    axes: tuple[int, ...]


@cache
def exchange(source: Layout, target: Layout, rank: int, axes: tuple[int, ...], sizes: tuple[int, ...]) -> Exchange:
    """The exchange between two layouts of an array of this rank, in O(devices x replicas of a shard).

    Args:
        source, target: the layouts.
        rank: of the array.
        axes: the axes along which pairs should differ.
        sizes: of the mesh's axes.
    """
    places = list(product(*map(range, sizes)))
    have, want = ([_position(place, layout, rank, sizes) for place in places] for layout in (source, target))
    parts = [_counts(layout, rank, sizes) for layout in (source, target)]
    pieces = [after // before for before, after in zip(*parts, strict=True)]  # of a shard, per dimension
    inside = [tuple(at // n for at, n in zip(position, pieces, strict=True)) for position in want]
    holders: dict[tuple[int, ...], list[int]] = {}
    for device, part in enumerate(have):
        if inside[device] != part:
            holders.setdefault(part, []).append(device)

    def fixed(device: int) -> tuple[int, ...]:
        return tuple(index for axis, index in enumerate(places[device]) if axis not in axes)

    senders = [device if inside[device] == part else -1 for device, part in enumerate(have)]
    for device, part in enumerate(inside):
        if senders[device] < 0:
            senders[device] = min(holders[part], key=lambda other: (fixed(other) != fixed(device), other))
            holders[part].remove(senders[device])
    starts: list[tuple[int, ...]] = [()] * len(places)
    for device, sender in enumerate(senders):
        starts[sender] = tuple(b - a * n for a, b, n in zip(have[sender], want[device], pieces, strict=True))
    moved = {axis for device, sender in enumerate(senders) for axis in range(len(sizes)) if places[device][axis] != places[sender][axis]}
    return Exchange(tuple(sorted(zip(senders, range(len(places)), strict=True))), tuple(starts), tuple(sorted(moved)))


def _counts(layout: Layout, rank: int, sizes: Sequence[int]) -> list[int]:
    counts = [1] * rank
    for dim, size in zip(layout, sizes, strict=True):
        if dim >= 0:
            counts[dim] *= size
    return counts


def _position(place: Sequence[int], layout: Layout, rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The index of the shard of the device at a place of the mesh, along each dimension."""
    position = [0] * rank
    for axis, dim in enumerate(layout):
        if dim >= 0:
            position[dim] = position[dim] * sizes[axis] + place[axis]
    return tuple(position)
