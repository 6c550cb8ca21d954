"""What the devices of a process are, by their own attributes: slices, coordinates, hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.cluster.catalogue import Entry


def slices_of(devices: Sequence[Any]) -> list[list[Any]]:
    """The devices of each slice."""
    by_slice: dict[int, list[Any]] = {}
    for device in devices:
        by_slice.setdefault(getattr(device, "slice_index", None) or 0, []).append(device)
    return list(by_slice.values())


def local_topology(entry: Entry, devices: Sequence[Any]) -> tuple[int, ...]:
    if entry.topologies:
        corners = [(min(place), max(place)) for place in zip(*(device.coords for device in devices), strict=True)]
        sizes = [high - low + 1 for low, high in corners][: len(entry.topologies[0])]
        written = tuple(size for size in entry.topologies if sorted(size) == sorted(sizes))
        return written[0] if written else tuple(sorted(sizes))
    hosts = len({device.process_index for device in devices}) if entry.per_host else 1
    return (len(devices) // hosts, hosts) if hosts > 1 else (len(devices),)
