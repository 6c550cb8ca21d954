"""Clusters: devices with datasheet figures, and the interconnect as each mesh axis uses it."""

from autoshard.cluster.catalogue import Entry
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.cluster.devices import CATALOGUE
from autoshard.cluster.interconnect import Interconnect, Link, Protocol, Span, join, place
from autoshard.cluster.level import Level

__all__ = ["CATALOGUE", "Cluster", "Device", "Entry", "Interconnect", "Level", "Link", "Protocol", "Span", "join", "place"]
