"""Clusters: devices with datasheet figures, and the interconnect as each mesh axis uses it."""

from autoshard.cluster.catalogue import CATALOGUE, Entry
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.cluster.interconnect import Interconnect, Link, Protocol, Span, join, place

__all__ = ["CATALOGUE", "Cluster", "Device", "Entry", "Interconnect", "Link", "Protocol", "Span", "join", "place"]
