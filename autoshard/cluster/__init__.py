"""Clusters: devices with datasheet figures, and the interconnect as each mesh axis uses it."""

from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device
from autoshard.cluster.devices import CATALOGUE
from autoshard.cluster.interconnect import Link, Protocol, Span, join
from autoshard.cluster.level import Level
