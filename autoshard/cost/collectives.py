"""Seconds of a collective on mesh axes: launch, then latency for each step of a ring, then bytes over bandwidth.

With ``n`` devices, ``b`` the larger of a device's operand and result, ``w`` a ring's bandwidth, ``l`` the latency of one pass::

    all_gather, reduce_scatter   launch + l + (n - 1) / n * b / w
    all_reduce                   launch + 2 (l + (n - 1) / n * b / w)
    all_to_all                   launch + l + b / exchange bandwidth
    collective_permute           launch + l + b / the lesser of exchange and shift bandwidth

(Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005; the wires' side is in
`autoshard.cluster.interconnect`.) Laws: monotone in bytes; nothing on one device; an all_reduce is a reduce_scatter and an
all_gather in one launch; more bandwidth is never slower.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from autoshard.cluster import Link, join

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")

Bytes = TypeVar("Bytes", float, np.ndarray)


@dataclass(frozen=True, slots=True, eq=False)
class Communication:
    """What collectives cost on a mesh.

    Attributes:
        links: one per mesh axis, in mesh order; see `Cluster.links`.
    """

    links: tuple[Link, ...]
    _lines: dict[tuple[str, frozenset[int]], tuple[float, float]] = field(default_factory=dict, repr=False)

    def seconds(self, kind: str, nbytes: Bytes, axes: tuple[int, ...]) -> Bytes:
        """Seconds of one collective over the given axes jointly; elementwise where ``nbytes`` is an array.

        Args:
            kind: one of `COLLECTIVES`.
            nbytes: the larger of operand and result of one device.
            axes: numbers of the mesh axes that take part, in any order.
        """
        key = (kind, frozenset(axes))
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = self._line(kind, sorted(key[1]))
        fixed, each = line
        return nbytes * each + fixed * (nbytes > 0)  # what is empty is not sent

    def _line(self, kind: str, axes: list[int]) -> tuple[float, float]:
        """Seconds of an empty collective, and seconds a byte."""
        if kind not in COLLECTIVES:
            raise ValueError(f"a collective is one of {COLLECTIVES}, got {kind!r}.")
        links = [self.links[axis] for axis in axes if self.links[axis].size > 1]
        if not links:
            return 0.0, 0.0
        link = join(links)
        if kind == "all_to_all":
            return link.launch_seconds + link.latency_seconds, 1 / link.exchange_bandwidth_bytes_per_second
        if kind == "collective_permute":
            # of a permutation nobody knows better, half crosses the middle of the wires, as in an all_to_all
            slowest = min(link.exchange_bandwidth_bytes_per_second, link.shift_bandwidth_bytes_per_second)
            return link.launch_seconds + link.latency_seconds, 1 / slowest
        passes = 2 if kind == "all_reduce" else 1
        each = (link.size - 1) / link.size / link.bandwidth_bytes_per_second
        return link.launch_seconds + passes * link.latency_seconds, passes * each
