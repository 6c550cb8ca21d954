"""The networks that join equal parts of a cluster: slices over a data centre, pods of hosts over a spine.

A cluster is a tree. Its leaves are devices, which an `Interconnect` joins to a slice, or to hosts on one network; each `Level` joins
several equal trees to a larger one. All devices send at once, so each has its share of the endpoint that it uses with others.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.errors import ClusterError

WAYS = ("switch", "rails")

WIDTHS = ("bfloat16", "int8")
"""Types in which sums may cross a level."""


@dataclass(frozen=True, slots=True)
class Level:
    """A network between the parts of a cluster.

    Attributes:
        name: of the parts, as in ``slices``.
        size: how many parts it joins.
        bandwidth_bytes_per_second: one way, of an endpoint, such as a host's network cards.
        latency_seconds: of a message between two parts.
        sharing: how many devices share an endpoint.
        oversubscription: the bandwidth of all endpoints over what the network carries between the parts at once, at least 1.
        kind: ``switch``: each device reaches every other; ``rails``: those of its own number in other parts, and the rest through these.
        source: where the figures come from.
        sums: the type in which sums of large arrays of floats cross it, ``bfloat16`` or ``int8``; empty: their own.
    """

    name: str
    size: int
    bandwidth_bytes_per_second: float
    latency_seconds: float
    sharing: int = 1
    oversubscription: float = 1.0
    kind: str = "switch"
    source: str = ""
    sums: str = ""

    def __post_init__(self) -> None:
        if not self.bandwidth_bytes_per_second > 0:
            raise ClusterError(
                f"a level of a cluster's network has a bandwidth: bandwidth_bytes_per_second of {self.name!r} is one way, of an endpoint "
                f"such as a host's network cards, got {self.bandwidth_bytes_per_second}. Give the cards' rate, 25e9 for 200 Gb/s, say."
            )
        if self.kind not in WAYS:
            raise ClusterError(f"a level's kind is one of {WAYS}, got {self.kind!r} for {self.name!r}.")
        if self.sums not in ("", *WIDTHS):
            raise ClusterError(f"sums cross a level as they are, or in one of {WIDTHS}, got {self.sums!r} for {self.name!r}. Use one.")
        if self.size < 1 or self.sharing < 1 or self.oversubscription < 1 or self.latency_seconds < 0:
            raise ClusterError(
                f"a level joins parts, whose endpoints devices share: size, sharing and oversubscription of {self.name!r} are at least 1, "
                f"its latency is not negative; got size={self.size}, sharing={self.sharing}, oversubscription={self.oversubscription}, "
                f"latency_seconds={self.latency_seconds}. Correct these."
            )

    @property
    def device_bytes_per_second(self) -> float:
        """The rate at which each device sends to other parts while all devices do."""
        return self.bandwidth_bytes_per_second / self.sharing / self.oversubscription
