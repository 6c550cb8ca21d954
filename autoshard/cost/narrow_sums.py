"""Sums between parts of a cluster in fewer bits: what is sent, and in which collectives.

Where a level has `Level.sums`, arrays of floats of `LEAST_BYTES` or more are first added up within each part of the cluster, as usual, each
device its share. Of that share each part of the cluster gets a piece from every other in the narrow type, by an all_to_all, adds these in
float32, and what is added is gathered in the narrow type. Integers have a scale for each block of `BLOCK` numbers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.cluster import Level, Link

LEAST_BYTES = 2**16  # of a device's partial sum: losses and norms are added up as they are
BLOCK = 256  # numbers with one scale: 1.6 % of the bytes
NUMBER_BYTES = {"bfloat16": 2.0, "int8": 1.0 + 4 / BLOCK}
SUMS = ("all_reduce", "reduce_scatter")


@dataclass(frozen=True, slots=True)
class Crossing:
    """A mesh axis that crosses levels with narrow sums.

    Attributes:
        parts: how many parts of the cluster it joins.
        inside: its devices in each part; they are neighbours on the axis.
        sums: the narrow type.
    """

    parts: int
    inside: int
    sums: str


def crossings(links: Sequence[Link], names: Sequence[str]) -> dict[str, Crossing]:
    """The mesh axes along which sums are narrow, by name."""
    found = {}
    for name, link in zip(names, links, strict=True):
        levels = [level for level, _ in link.crossed if level.sums]
        if levels:
            parts = math.prod(extent for _, extent in link.crossed)
            found[name] = Crossing(parts, link.size // parts, levels[0].sums)
    return found


def share(level: Level, itemsize: float) -> float:
    """The share of a sum's bytes that cross a level, given the bytes of a number; 0: of a sum that stays as it is."""
    return min(NUMBER_BYTES[level.sums] / itemsize, 1.0) if level.sums and itemsize else 1.0


def is_narrow(nbytes: float, itemsize: float, axes: Sequence[str], narrow: Mapping[str, Crossing]) -> bool:
    """Whether a sum of floats of so many bytes over some axes is narrow."""
    widths = [NUMBER_BYTES[narrow[axis].sums] for axis in axes if axis in narrow]
    return bool(widths) and max(widths) < itemsize and nbytes >= LEAST_BYTES


def phases(
    kind: str, nbytes: float, itemsize: float, sizes: Mapping[str, int], narrow: Mapping[str, Crossing]
) -> Iterator[tuple[str, tuple[str, ...], float]]:
    """The collectives of a narrow sum: kind, axes, and the larger of a device's operand and result in bytes.

    Args:
        kind: ``all_reduce`` or ``reduce_scatter``.
        nbytes: of a device's operand.
        sizes: of the axes, in mesh order.
        narrow: the axes that cross levels, all of one type.
    """
    numbers, width = nbytes / itemsize, next(iter(narrow.values())).sums
    if kind == "all_reduce":
        numbers = _padded(numbers, math.prod(sizes.values()) * BLOCK)
    wide = 4.0 if itemsize < 4 else itemsize
    for axis, n in sizes.items():
        crossing = narrow.get(axis)
        inside = n if crossing is None else crossing.inside
        if inside > 1:
            yield "reduce_scatter", (axis,), numbers * wide
            numbers /= inside
        if crossing is not None:
            row = _padded(numbers / crossing.parts, BLOCK)
            yield from (("all_to_all", (axis,), row * crossing.parts * each) for each in _arrays(width))
            numbers /= crossing.parts
    if kind == "all_reduce":
        yield from (("all_gather", tuple(sizes), numbers * math.prod(sizes.values()) * each) for each in _arrays(width))


def _arrays(width: str) -> tuple[float, ...]:
    """Bytes a number of each array that stands for narrow numbers."""
    return (2.0,) if width == "bfloat16" else (1.0, 4 / BLOCK)


def _padded(numbers: float, multiple: int) -> float:
    return math.ceil(numbers / multiple) * multiple
