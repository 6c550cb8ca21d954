"""The catalogue of all devices, by name."""

from __future__ import annotations

from autoshard.cluster import accelerators, catalogue
from autoshard.cluster.catalogue import Entry

CATALOGUE: dict[str, Entry] = {entry.device.name: entry for entry in (*catalogue.ENTRIES, *accelerators.ENTRIES)}
