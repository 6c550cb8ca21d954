"""The interconnect of a cluster, and the bandwidth and latency of each mesh axis on it.

A mesh is mapped row-major to the physical topology, with the axes and dimensions in the order of its `Placement`, so each axis becomes one
or more *spans*: strides through physical dimensions. A collective over several axes joins their spans, and merges adjacent spans of one
dimension, so a collective over all axes of a 4 x 4 mesh costs as much as one over a single axis of 16.

*Torus.* A span of stride 1 has its links to itself; one of stride s shares each link with s - 1 interleaved groups. A span that
closes a ring sends in both directions. Spans in different dimensions carry parts of the data at once, and their bandwidths add up (Austin
et al., How to Scale Your Model, "Sharded Matrices and How to Multiply Them"); separate spans in one dimension take turns.

*Switch.* Devices of a host reach each other at full rate, whatever the stride; between hosts each device has its own network card. A
ring over several hosts enters and leaves a host once for every device in it, each time through another card, and runs at the rate of
the slower of switch and cards. (Five hosts of 8 H100 with four 400 Gb/s cards each: 190 GB/s of 200, NVIDIA/nccl issue 1368.)

*Host.* Virtual devices copy through shared memory.

*Levels* join equal parts that are wired so (`autoshard.cluster.level`). They are the outermost physical dimensions; where a link crosses
one, `Link.inside` is its part within one of the joined trees.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autoshard.cluster.level import Level
from autoshard.errors import ClusterError
from autoshard.ir import Placement

WIRINGS = ("torus", "switch", "host")

ALGORITHMS = ("ring", "tree", "switch")


@dataclass(frozen=True, slots=True)
class Protocol:
    """An alternative to the plain ring for a collective: of less latency and bandwidth, or for all_reduce only.

    Attributes:
        algorithm: ``ring``; ``tree``: a chain in each host and a binary tree over hosts; ``switch``: the host's switch reduces. The
            last two are for an all_reduce.
        launch_seconds, latency_seconds, network_latency_seconds: as the interconnect's.
        share: the share of the interconnect's bandwidth that it reaches.
        most_bytes_per_second: its greatest bandwidth inside a host; 0 for no limit.
        network_most_bytes_per_second: its greatest bandwidth on several hosts; 0 for no limit.
    """

    algorithm: str
    launch_seconds: float
    latency_seconds: float
    network_latency_seconds: float
    share: float
    most_bytes_per_second: float = 0.0
    network_most_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            raise ClusterError(f"a protocol's algorithm is one of {ALGORITHMS}, got {self.algorithm!r}.")
        if not self.share > 0 or min(self.launch_seconds, self.latency_seconds, self.network_latency_seconds) < 0:
            raise ClusterError(f"a protocol's share of the bandwidth is positive and its latencies are not negative, got {self}.")


@dataclass(frozen=True, slots=True)
class Interconnect:
    """The figures of the links between devices.

    Attributes:
        kind: ``torus``, ``switch`` or ``host``.
        bandwidth_bytes_per_second: one way; of one link of a torus, of one device into a switch or shared memory.
        latency_seconds: one hop or one step of a ring.
        launch_seconds: fixed cost of starting a collective.
        wrap_multiple: a torus dimension closes to a ring where its size is a multiple of this; 0: never.
        wrap_whole: whether rings close only where every dimension of the slice is such a multiple.
        network_bandwidth_bytes_per_second: one way, per device, between hosts of a ``switch``.
        network_latency_seconds: one step between hosts.
        copy_bandwidth_bytes_per_second: rate of the final copy out of the receive buffer, which overlaps no send; 0 where it is free.
        chip_bandwidth_bytes_per_second: one way, between the devices of one chip, which are the last dimension of a torus and share the
            chip's links; 0 where a chip is a device.
        protocols: alternatives to the plain ring on a ``switch``; the fastest is taken.
        source: where the figures come from.
    """

    kind: str
    bandwidth_bytes_per_second: float
    latency_seconds: float
    launch_seconds: float
    wrap_multiple: int = 0
    wrap_whole: bool = False
    network_bandwidth_bytes_per_second: float = 0.0
    network_latency_seconds: float = 0.0
    copy_bandwidth_bytes_per_second: float = 0.0
    protocols: tuple[Protocol, ...] = ()
    source: str = ""
    chip_bandwidth_bytes_per_second: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in WIRINGS:
            raise ClusterError(f"an interconnect's kind is one of {WIRINGS}, got {self.kind!r}.")
        if self.bandwidth_bytes_per_second <= 0 or min(self.latency_seconds, self.launch_seconds, self.network_latency_seconds) < 0:
            raise ClusterError(f"an interconnect's bandwidth is positive and its latencies are not negative, got {self}.")
        rates = self.network_bandwidth_bytes_per_second, self.copy_bandwidth_bytes_per_second, self.chip_bandwidth_bytes_per_second
        if min(*rates, self.wrap_multiple) < 0:
            raise ClusterError(f"an interconnect's bandwidths and wrap multiple are not negative, got {self}.")

    def rings(self, topology: Sequence[int]) -> tuple[bool, ...]:
        """Whether each physical dimension closes to a ring."""
        chips = topology[:-1] if self.chip_bandwidth_bytes_per_second else topology
        closed = tuple(self.wrap_multiple > 0 and size > 1 and size % self.wrap_multiple == 0 for size in chips)
        closed = tuple(all(closed) for _ in closed) if self.wrap_whole else closed
        return (*closed, *(False for _ in topology[len(chips) :]))


@dataclass(frozen=True, slots=True)
class Span:
    """``extent`` devices of a physical dimension, ``stride`` apart.

    Attributes:
        dim: the physical dimension, counted from the outermost.
        ring: whether the span closes a ring.
        straddles: whether it crosses physical dimensions that the mesh does not divide.
    """

    dim: int
    extent: int
    stride: int
    ring: bool = False
    straddles: bool = False


@dataclass(frozen=True, slots=True)
class Link:
    """The spans that a collective over one mesh axis (or several, joined) runs on.

    Latencies and bandwidths are those within one part of the cluster, without the levels that join several.

    Attributes:
        interconnect: the figures of the links.
        spans: the strides through physical dimensions; none for a single device.
        length: per physical dimension its size, and whether it is a ring.
        levels: the networks that the first of these dimensions are, outermost first.
    """

    interconnect: Interconnect
    spans: tuple[Span, ...]
    length: tuple[tuple[int, bool], ...]
    levels: tuple[Level, ...] = ()

    @property
    def size(self) -> int:
        """The number of devices that take part."""
        return math.prod(span.extent for span in self.spans)

    @property
    def crossed(self) -> tuple[tuple[Level, int], ...]:
        """The levels that it crosses, outermost first, and how many parts each of them joins here."""
        extents = [math.prod(span.extent for span in self.spans if span.dim == dim) for dim in range(len(self.levels))]
        return tuple((level, extent) for level, extent in zip(self.levels, extents, strict=True) if extent > 1)

    @property
    def inside(self) -> Link:
        """The link of its devices within one part, on that part's own dimensions."""
        n = len(self.levels)
        spans = tuple(replace(span, dim=span.dim - n) for span in self.spans if span.dim >= n)
        return Link(self.interconnect, spans, self.length[n:]) if n else self

    @property
    def wrap(self) -> bool:
        """Whether every span closes a ring."""
        return bool(self.spans) and all(span.ring for span in self.spans)

    @property
    def whole_torus(self) -> bool:
        """Whether it is all devices of a slice of three dimensions, each of them a ring."""
        sizes, rings = zip(*self.length, strict=True) if self.length else ((), ())
        return self.interconnect.kind == "torus" and len(sizes) > 2 and all(rings) and self.size == math.prod(sizes)

    @property
    def kind(self) -> str:
        """``torus`` (rings), ``torus_line``, ``switch``, ``network`` (leaves the host, or crosses a level) or ``host``."""
        if self.crossed:
            return "network"
        if self.interconnect.kind == "torus":
            return "torus" if self.wrap else "torus_line"
        if self.interconnect.kind == "switch":
            return "network" if self.hosts > 1 else "switch"
        return "host"

    @property
    def launch_seconds(self) -> float:
        """The fixed cost of a collective."""
        return self.interconnect.launch_seconds

    @property
    def latency_seconds(self) -> float:
        """The sum of all steps' latencies in one pass (an all_gather, say)."""
        wires = self.interconnect
        if wires.kind == "torus":
            return wires.latency_seconds * sum(s.stride * (s.extent // 2 if s.ring else s.extent - 1) for s in self.spans)
        outside = self.hosts - 1
        return wires.latency_seconds * (self.size - 1 - outside) + wires.network_latency_seconds * outside

    @property
    def bandwidth_bytes_per_second(self) -> float:
        """Bandwidth of a ring: an all_gather to ``b`` bytes on ``n`` devices moves ``(n - 1) / n * b`` at this rate."""
        wires = self.interconnect
        if wires.kind == "torus":
            dims = sorted({span.dim for span in self.spans})
            return sum(self._dim_bandwidth([s for s in self.spans if s.dim == dim]) for dim in dims) or wires.bandwidth_bytes_per_second
        if self.hosts == 1:
            return wires.bandwidth_bytes_per_second
        return min(self.cards_bytes_per_second, wires.bandwidth_bytes_per_second if self.per_host > 1 else math.inf)

    @property
    def exchange_bandwidth_bytes_per_second(self) -> float:
        """Bytes of a device's operand over the time of an all_to_all.

        A ring of n and bandwidth w moves b bytes a device in ``n * b / (4 w)``: half of everything crosses its middle.
        """
        wires = self.interconnect
        if wires.kind == "torus":
            return min((4 * self._span_bandwidth(s) / s.extent for s in self.spans), default=wires.bandwidth_bytes_per_second)
        hosts, size = self.hosts, self.size
        inside = (self.per_host - 1) / size / wires.bandwidth_bytes_per_second
        outside = (hosts - 1) / hosts / wires.network_bandwidth_bytes_per_second if hosts > 1 else 0.0
        return 1 / max(inside, outside) if size > 1 else wires.bandwidth_bytes_per_second

    @property
    def shift_bandwidth_bytes_per_second(self) -> float:
        """Bytes over the time of a collective_permute to the next device."""
        wires = self.interconnect
        if wires.kind == "torus":
            return min((self._span_bandwidth(s) / (2 if s.ring else 1) for s in self.spans), default=wires.bandwidth_bytes_per_second)
        return wires.network_bandwidth_bytes_per_second if self.hosts > 1 else wires.bandwidth_bytes_per_second

    @property
    def cards_bytes_per_second(self) -> float:
        """Bandwidth of the network cards of one host's devices together."""
        return self.interconnect.network_bandwidth_bytes_per_second * self.per_host

    @property
    def per_host(self) -> int:
        """The number of participating devices in a host."""
        return self.size // self.hosts

    @property
    def hosts(self) -> int:
        """The number of hosts that take part."""
        if self.interconnect.kind != "switch" or len(self.length) == 1:
            return 1
        return math.prod(span.extent for span in self.spans if span.dim == 0)

    def part(self, extent: int, stride: int) -> Link | None:
        """The link of every group of ``extent`` devices that are ``stride`` apart on an axis; None where they are on parts of no spans."""
        spans: list[Span] = []
        skipped, wanted = stride, extent
        for span in sorted(self.spans, key=lambda span: (-span.dim, span.stride)):  # from the innermost
            before = math.gcd(skipped, span.extent)
            skipped //= before
            taken = math.gcd(wanted, span.extent // before) if skipped == 1 else 1
            wanted //= taken
            if taken > 1:
                closes = span.ring and before * taken == span.extent
                spans.append(Span(span.dim, taken, span.stride * before, closes, span.straddles))
            if skipped > 1 and before < span.extent:
                return None
        return join([Link(self.interconnect, tuple(spans), self.length, self.levels)]) if skipped == wanted == 1 else None

    def _span_bandwidth(self, span: Span) -> float:
        share = span.stride * (2 if span.straddles else 1)
        wires = self.interconnect
        if wires.chip_bandwidth_bytes_per_second and all(each.dim == len(self.length) - 1 for each in self.spans):
            return wires.chip_bandwidth_bytes_per_second
        return wires.bandwidth_bytes_per_second * (2 if span.ring else 1) / share

    def _dim_bandwidth(self, spans: list[Span]) -> float:
        """Bandwidth of spans in one dimension that take turns; the fastest one moves the largest part of the data."""
        seconds, part = 0.0, 1.0
        for span in sorted(spans, key=self._span_bandwidth, reverse=True):
            seconds += part * (span.extent - 1) / span.extent / self._span_bandwidth(span)
            part /= span.extent
        return (1 - part) / seconds


def join(links: Sequence[Link]) -> Link:
    """The link of a collective over several mesh axes at once."""
    first = links[0]
    spans = sorted((span for link in links for span in link.spans), key=lambda s: (s.dim, s.stride))
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and last.dim == span.dim and last.stride * last.extent == span.stride:
            extent = last.extent * span.extent
            ring = first.length[span.dim] == (extent * last.stride, True) and not (span.straddles or last.straddles)
            joined[-1] = Span(span.dim, extent, last.stride, ring, span.straddles or last.straddles)
        else:
            joined.append(span)
    return Link(first.interconnect, tuple(joined), first.length, first.levels)


def place(
    interconnect: Interconnect,
    topology: Sequence[int],
    sizes: Sequence[int],
    placement: Placement | None = None,
    levels: tuple[Level, ...] = (),
) -> tuple[Link, ...]:
    """One link per mesh axis, for a mesh mapped to the physical topology by its placement; sizes of both are given outermost first.

    Where an axis does not divide the dimension it reaches, that dimension and the next one count as one, at half the bandwidth.

    Args:
        levels: the networks that the first dimensions of the topology are, outermost first.
    """
    dims, axes = (range(len(topology)), range(len(sizes))) if placement is None else (placement.dims, placement.axes)
    closed = (False,) * len(levels) + interconnect.rings(topology[len(levels) :])
    length = tuple(zip(topology, closed, strict=True))
    rings = [length[dim][1] for dim in dims]
    whole = [topology[dim] for dim in dims]
    remaining, taken, straddles = list(whole), [1] * len(whole), [False] * len(whole)
    dim = len(whole) - 1
    links = {}
    for axis in reversed(axes):
        size = sizes[axis]
        spans = []
        while size > 1:
            if remaining[dim] == 1:
                dim -= 1
                continue
            extent = math.gcd(size, remaining[dim])
            if extent == 1:
                remaining[dim - 1] *= remaining[dim]
                straddles[dim - 1] = True
                dim -= 1
                continue
            ring = rings[dim] and not straddles[dim] and extent * taken[dim] == whole[dim]
            spans.append(Span(dims[dim], extent, taken[dim], ring, straddles[dim]))
            remaining[dim] //= extent
            taken[dim] *= extent
            size //= extent
        links[axis] = join([Link(interconnect, tuple(spans), length, levels)])
    return tuple(links[axis] for axis in range(len(sizes)))
