"""What the devices of a process are, by their own attributes: slices, coordinates, hosts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from autoshard.cluster.catalogue import Entry
from autoshard.errors import ClusterError
from autoshard.render import format_alternatives


def slices_of(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices of each slice."""
    by_slice: dict[int, list[Any]] = {}
    for device in devices:
        by_slice.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    return list(by_slice.values())


def local_topology(entry: Entry, devices: Sequence[Any]) -> tuple[int, ...]:
    """The topology of a slice's devices, or of the hosts of all devices.

    Raises:
        ClusterError: hosts are unequal.
    """
    if entry.topologies:
        corners = [(min(place), max(place)) for place in zip(*(device.coords for device in devices), strict=True)]
        sizes = [high - low + 1 for low, high in corners][: len(entry.topologies[0])]
        written = tuple(size for size in entry.topologies if sorted(size) == sorted(sizes))
        return written[0] if written else tuple(sorted(sizes))
    if not entry.per_host:
        return (len(devices),)
    counts = Counter(map(_host, devices))
    n_hosts = -(-len(devices) // entry.per_host) if entry.tray else len(counts)
    if len(set(counts.values())) > 1 or len(devices) % n_hosts:
        raise ClusterError(
            f"a cluster's hosts have equally many devices, and these {len(devices)} are {format_alternatives([*counts.values()])} of a "
            "host. Use as many of each: Cluster.of_devices with some of them, and devices= when the strategy runs."
        )
    per_host = len(devices) // n_hosts
    return (per_host, n_hosts) if n_hosts > 1 else (per_host,)


def _host(device: Any) -> Any:
    """The host of a device: JAX numbers GPUs' by boot, since one may have several processes (xla/pjrt/distributed/topology_util.cc)."""
    found = getattr(device, "slice_index", None)
    return device.process_index if found is None or found < 0 else ("slice", found)
