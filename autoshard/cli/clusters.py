"""``autoshard clusters``: the devices that the catalogue knows."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.cli.options import command
from autoshard.cli.terminal import show, show_json


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    command(commands, "clusters", run, "list the devices that --cluster knows", "autoshard clusters")


def run(options: argparse.Namespace) -> int:
    """Lists the catalogue."""
    from autoshard.cluster import CATALOGUE
    from autoshard.render import Paragraph, Report, Table, format_bytes, format_flops

    if options.json:
        show_json([{"name": name, "example": _example(entry), "source": entry.device.source} for name, entry in CATALOGUE.items()])
        return 0
    rows = tuple(
        (
            name,
            _example(entry),
            format_bytes(entry.device.memory_bytes),
            f"{format_flops(dict(entry.device.flops_per_second)['bf16'])}/s",
            f"{format_bytes(entry.device.memory_bandwidth_bytes_per_second)}/s",
            f"{format_bytes(entry.interconnect.bandwidth_bytes_per_second)}/s",
            entry.interconnect.kind,
        )
        for name, entry in CATALOGUE.items()
    )
    columns = ("device", "as in", ">memory", ">bf16", ">memory bandwidth", ">a link, one way", "links")
    note = Paragraph('Another cluster is described in a .toml file: cluster = "h100:8x4" and below it what differs.')
    show(Report("Devices of the catalogue", (Table(columns, rows), note)))
    return 0


def _example(entry) -> str:
    """A cluster of this device as ``--cluster`` takes it: a middling slice, four hosts, or 8 devices."""
    hosts = f"{entry.per_host}x4" if entry.per_host else "8"
    size = "x".join(map(str, entry.topologies[len(entry.topologies) // 2])) if entry.topologies else hosts
    return f"{entry.device.name}:{size}"
