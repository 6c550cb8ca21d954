"""Cost of a collective between the parts of a cluster, which the levels of its network join: within, across, within.

With ``e`` parts, ``m`` devices of each, ``b`` the larger of a device's operand and result, ``w`` the rate of a device across, ``l`` the
latency of a message there, and ``f(kind, b)`` the seconds within a part::

    all_reduce           f(reduce_scatter, b) + across(all_reduce, b / m) + f(all_gather, b), or f(all_reduce, b) + across(all_reduce, b)
    all_gather           across(all_gather, b / m) + f(all_gather, b)
    reduce_scatter       f(reduce_scatter, b) + across(reduce_scatter, b / m)
    all_to_all           f(all_to_all, b) + across(all_to_all, b)
    collective_permute   the slower of l + b / w and f(collective_permute, b)

    across(all_gather, c), across(reduce_scatter, c)   log2(e) l + (e - 1) / e c / w, and twice that for an all_reduce
    across(all_to_all, c)                              l + (e - 1) / e c / w

(Thakur, Rabenseifner and Gropp, 2005, recursive halving and doubling; NVIDIA, "Doubling all2all performance with NCCL 2.12" for rails: what
goes to other parts first moves to the device of the same number, within.) Several levels are joined from the innermost outwards. Where a
collective has several ways, the fastest is taken for its size.

*Slices of tori.* XLA:TPU (libtpu 0.0.42) divides collectives over several slices so itself, but for two: a reduce_scatter is an all_reduce
within, of which each device sends its part; and an all_to_all sends everything between hosts, also what stays in its slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from autoshard.cluster import Level, Link
from autoshard.cost.narrow_sums import SUMS
from autoshard.cost.narrow_sums import share as share_of

SHIFT = "shift"
"""A collective_permute to the next device."""

PERMUTES = ("collective_permute", SHIFT)

Line = tuple[float, float]
"""Seconds of an empty collective, and seconds a byte."""
Lines = tuple[Line, ...]
"""Those of several ways, of which the fastest is taken."""
Within = Callable[[str, Link], Lines]


def lines_on_levels(kind: str, link: Link, within: Within, itemsize: float = 0.0) -> Lines:
    """The lines of a collective on a link.

    Args:
        kind: of the collective.
        link: that may cross levels.
        within: gives the lines on a link that crosses none.
        itemsize: bytes of a number of a sum that crosses levels in the type that they have for sums; 0: it stays as it is.
    """
    inside, crossed = link.inside, link.crossed
    m, is_torus = inside.size, link.interconnect.kind == "torus"

    def lines(kind: str, n: int) -> Lines:
        """The lines on the ``n`` innermost of the crossed levels."""
        if n == 0:
            return within(kind, inside)
        level, e = crossed[-n]
        below = m * math.prod(extent for _, extent in crossed[len(crossed) - n + 1 :])
        across = _across(kind, level, e, link)
        if kind in SUMS:
            across = across[0], across[1] * share_of(level, itemsize)
        if kind in PERMUTES:
            return fastest((max(one[0], across[0]), max(one[1], across[1])) for one in lines(kind, n - 1))
        if kind == "all_to_all" and is_torus:
            return ((across[0], (below * e - 1) / (below * e) / level.device_bytes_per_second),)
        if kind == "all_to_all":
            return _sums(lines(kind, n - 1), (across,))
        share = across[0], across[1] / below
        if kind == "all_reduce":
            halves = _sums(lines("reduce_scatter", n - 1), lines("all_gather", n - 1))
            return fastest([*_sums(halves, (share,)), *_sums(lines(kind, n - 1), (across,))])
        return _sums(lines("all_reduce" if kind == "reduce_scatter" and is_torus else kind, n - 1), (share,))

    return lines(kind, len(crossed))


def fastest(lines: Iterable[Line]) -> Lines:
    """The lower envelope of the lines, by increasing fixed cost.

    >>> fastest([(1.0, 3.0), (2.0, 1.0), (3.0, 2.0)])
    ((1.0, 3.0), (2.0, 1.0))
    """
    kept: list[Line] = []
    for fixed, each in sorted(set(lines)):
        if not kept or each < kept[-1][1]:
            kept.append((fixed, each))
    return tuple(kept)


def _across(kind: str, level: Level, e: int, link: Link) -> Line:
    """The line of a collective among one device of each of ``e`` parts."""
    rate = level.device_bytes_per_second
    launch = link.launch_seconds
    if kind in PERMUTES:
        return launch + level.latency_seconds, 1 / rate
    passes = 2 if kind == "all_reduce" else 1
    steps = 1 if kind == "all_to_all" else math.ceil(math.log2(e))
    return launch + passes * steps * level.latency_seconds, passes * (e - 1) / e / rate


def _sums(some: Iterable[Line], others: Iterable[Line]) -> Lines:
    """The lines of one collective after another."""
    others = tuple(others)
    return fastest((one[0] + other[0], one[1] + other[1]) for one in some for other in others)
