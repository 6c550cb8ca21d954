"""Cost of a collective over mesh axes, in seconds: launch, latency of a ring's steps, bytes over bandwidth.

With ``n`` devices, ``b`` the larger of a device's operand and result, ``w`` the ring's bandwidth, ``l`` the latency of one pass::

    all_gather, reduce_scatter   launch + l + (n - 1) / n * b / w
    all_reduce                   launch + 2 (l + (n - 1) / n * b / w)
    all_to_all                   launch + l + b / exchange bandwidth
    collective_permute           launch + l + b / the lesser of exchange and shift bandwidth

(Thakur, Rabenseifner and Gropp, Optimization of Collective Communication Operations in MPICH, 2005; bandwidths and latencies are those
of `autoshard.cluster.interconnect`.) Laws: monotone in bytes; 0 on one device; an all_reduce costs no more than a reduce_scatter and an
all_gather; more bandwidth is never slower.

*GPUs.* NCCL takes the fastest of several protocols and algorithms, each linear in the bytes by its tuning model (NCCL,
src/graph/tuning.cc); the cost is their minimum. That model omits the last step of a ring, in which each device copies what it received
last to its destination while it sends nothing (src/device/all_reduce.h, runRing: "Make final copy from buffer to dest"; Hu et al.,
Demystifying NCCL, 2025, section on non-pipelined patterns). This adds ``b / n / copy bandwidth`` to a ring, a tenth on two devices, and
``b / copy bandwidth`` to a permute. A switch that reduces receives the ``b`` bytes of every device, and then each device's reduced n-th:
``(1 + 1 / n) b / w``.

*TPUs.* As in the scaling book (Austin et al., How to Scale Your Model, "Sharded Matrices and How to Multiply Them"): rings are used in
both directions, an all_to_all on one costs a quarter of an all_gather, small messages about a microsecond a hop. XLA's own scheduler
is simpler: a time independent of the group's size, an all_reduce at 46.65 GB/s with v5e's 45 a link, an all_gather at twice that,
and half of it where a group spans a box of 8 or more chips in two dimensions (from its compiled schedules at 16 MiB).

*Levels.* Between ``e`` parts of a cluster, ``m`` devices of each of which take part, a collective runs within, across and within them, or
only across and within, each across step among devices of the same number, in ``ceil(log2 e)`` messages (`autoshard.cost.levels`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np

from autoshard.cluster import Link, Protocol, join
from autoshard.cost.levels import PERMUTES, SHIFT, Line, fastest, lines_on_levels
from autoshard.cost.narrow_sums import LEAST_BYTES

COLLECTIVES = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "collective_permute")

Bytes = TypeVar("Bytes", float, np.ndarray)
Groups = tuple[int, int]
"""Of groups of devices of an axis, how many are in each, and how far apart they are on it."""


@dataclass(frozen=True, slots=True, eq=False)
class Communication:
    """The cost of collectives on a mesh.

    Attributes:
        links: one per mesh axis, in mesh order; see `Cluster.links`.
        shares: per kind, the share of its seconds that is charged; 1 by default.
    """

    links: tuple[Link, ...]
    shares: Mapping[str, float] = field(default_factory=dict)
    _lines: dict[tuple[str, frozenset[int], Groups | None, float], tuple[Line, ...]] = field(default_factory=dict, repr=False)

    def seconds(self, kind: str, nbytes: Bytes, axes: tuple[int, ...], groups: Groups | None = None, itemsize: float = 0.0) -> Bytes:
        """Seconds of one collective over the given axes jointly; elementwise where ``nbytes`` is an array.

        Args:
            kind: one of `COLLECTIVES`, or `SHIFT`.
            nbytes: the larger of operand and result of one device.
            axes: numbers of the mesh axes, in any order.
            groups: of a collective in each of several groups of one axis' devices; None: among all of them.
            itemsize: bytes of a number of a sum that may cross levels in a narrow type; 0: it stays as it is.
        """
        if itemsize and self.is_narrow:
            is_small = np.asarray(nbytes) < LEAST_BYTES
            if is_small.any() and not is_small.all():
                narrow = self.seconds(kind, np.maximum(nbytes, LEAST_BYTES), axes, groups, itemsize)
                return np.where(is_small, self.seconds(kind, nbytes, axes, groups), narrow)  # pyright: ignore[reportReturnType] (both are arrays)
            itemsize = 0.0 if is_small.any() else itemsize
        else:
            itemsize = 0.0
        key = (kind, frozenset(axes), groups, itemsize)
        lines = self._lines.get(key)
        if lines is None:
            share = self.shares.get(kind, 1.0)
            found = self._find(kind, sorted(key[1]), groups, itemsize)
            lines = self._lines[key] = tuple((fixed * share, each * share) for fixed, each in found)
        if not isinstance(nbytes, np.ndarray):
            return min([_on(line, nbytes) for line in lines])
        is_sent = nbytes > 0
        least = nbytes * lines[0][1] + lines[0][0] * is_sent
        for fixed, each in lines[1:]:
            least = np.minimum(least, nbytes * each + fixed * is_sent)
        return least

    @property
    def is_narrow(self) -> bool:
        """Whether sums cross a level in a narrow type."""
        return bool(self.links) and any(level.sums for level in self.links[0].levels)

    def link(self, axes: Iterable[int]) -> Link:
        """The link of a collective over the given axes jointly."""
        return join([self.links[axis] for axis in axes])

    def _find(self, kind: str, axes: list[int], groups: Groups | None, itemsize: float) -> tuple[Line, ...]:
        """The lines of the protocols of a collective, without dominated ones."""
        if kind not in (*COLLECTIVES, SHIFT):
            raise ValueError(f"a collective is one of {COLLECTIVES}, got {kind!r}.")
        sending = [axis for axis in axes if self.links[axis].size > 1]
        if not sending:
            return ((0.0, 0.0),)
        link = self.link(sending)
        if groups is not None:
            link = link.part(*groups) or link
        return lines_on_levels(kind, link, lines_within, itemsize)


def lines_within(kind: str, link: Link) -> tuple[Line, ...]:
    """The lines of the protocols of a collective within one part of a cluster, without dominated ones."""
    if link.size == 1:
        return ((0.0, 0.0),)
    if kind in ("all_to_all", *PERMUTES):
        return (_exchange(kind, link),)
    protocols = [_protocol(kind, link, protocol) for protocol in link.interconnect.protocols]
    return fastest([_ring(kind, link, link.bandwidth_bytes_per_second), *filter(None, protocols)])


def _on(line: Line, nbytes: Bytes) -> Bytes:
    fixed, each = line
    return nbytes * each + fixed * (nbytes > 0)  # empty arrays are not sent


def _exchange(kind: str, link: Link) -> Line:
    wires = link.interconnect
    # NCCL sends to all peers at once, in one kernel; elsewhere data moves in steps
    steps = max(wires.latency_seconds, wires.network_latency_seconds if link.hosts > 1 else 0.0)
    latency = steps if wires.kind == "switch" else link.latency_seconds
    if kind == "all_to_all":
        arrives = (link.size - 1) / link.size
        return link.launch_seconds + latency, 1 / link.exchange_bandwidth_bytes_per_second + arrives * _copy(link)
    if kind == SHIFT:
        hop = wires.latency_seconds if wires.kind == "torus" else latency
        return link.launch_seconds + hop, 1 / link.shift_bandwidth_bytes_per_second + _copy(link)
    # the permutation is unknown here: half of the data is taken to cross the bisection, as in an all_to_all
    slowest = min(link.exchange_bandwidth_bytes_per_second, link.shift_bandwidth_bytes_per_second)
    return link.launch_seconds + latency, 1 / slowest + _copy(link)


def _ring(kind: str, link: Link, bandwidth: float, protocol: Protocol | None = None) -> Line:
    passes = 2 if kind == "all_reduce" else 1
    each = passes * (link.size - 1) / link.size / bandwidth + _copy(link) / link.size
    if protocol is None:
        return link.launch_seconds + passes * link.latency_seconds, each
    outside = link.hosts - 1
    latency = protocol.latency_seconds * (link.size - 1 - outside) + protocol.network_latency_seconds * outside
    return protocol.launch_seconds + passes * latency, each


def _protocol(kind: str, link: Link, protocol: Protocol) -> Line | None:
    """The line of a collective by a protocol; None where the protocol does not support it."""
    limit = (protocol.network_most_bytes_per_second if link.hosts > 1 else protocol.most_bytes_per_second) or math.inf
    if protocol.algorithm == "ring":
        return _ring(kind, link, min(link.bandwidth_bytes_per_second * protocol.share, limit), protocol)
    if kind != "all_reduce" or (protocol.algorithm == "switch" and link.per_host < 2):
        return None
    inside = link.interconnect.bandwidth_bytes_per_second * protocol.share
    steps = protocol.latency_seconds * (2 * (link.per_host - 1) if protocol.algorithm == "tree" else 1)
    seconds = [2 / limit]
    if protocol.algorithm == "switch":
        seconds.append((1 + 1 / link.per_host) / inside)
    elif link.per_host > 1:
        seconds.append(2 / inside)  # up the chain and down again
    if link.hosts > 1:
        # two trees share the data, and each host is a leaf in one of them; with two hosts it sends up in one and down in the other
        seconds.append((1 if link.hosts == 2 else 2) / (link.cards_bytes_per_second * protocol.share))
        steps += 2 * math.log2(link.hosts) * protocol.network_latency_seconds
    return protocol.launch_seconds + steps, max(seconds)


def _copy(link: Link) -> float:
    """Seconds per byte of the final copy out of the receive buffer."""
    copying = link.interconnect.copy_bandwidth_bytes_per_second
    return 1 / copying if copying else 0.0
