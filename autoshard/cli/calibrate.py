"""``autoshard calibrate``: measures the devices of this machine and writes a cluster file that searches use."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.cli.options import check_writable, command, positive
from autoshard.cli.terminal import progress, show, show_json

OUT = "cluster.toml"


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    what = "measure this machine's devices, and write a file for --cluster with the constants that fit"
    parser = command(commands, "calibrate", run, what, "autoshard calibrate --quick --out cluster.toml")
    parser.add_argument("--out", metavar="FILE", default=OUT, help=f"where the cluster goes (default {OUT})")
    parser.add_argument("--quick", action="store_true", help="fewer sizes and repetitions: some ten seconds instead of a minute")
    parser.add_argument("--devices", metavar="N", type=positive, help="measure N virtual CPU devices instead")


def run(options: argparse.Namespace) -> int:
    """Measures, saves, reports."""
    check_writable(options.out, "--out")
    if options.devices is not None:
        from autoshard.demo.devices import virtual_devices

        virtual_devices(options.devices)  # before anything else: JAX takes its devices when it starts
    from autoshard.probe import calibrate

    with progress(quiet=options.json) as callback:
        found = calibrate(quick=options.quick, progress=callback)
    found.cluster.save(options.out)
    if options.json:
        show_json(found.to_json())
        return 0
    show(found.report())
    if found.cluster.n_devices == 1:
        print("\nTo measure collectives between virtual CPU devices as well: autoshard calibrate --devices 8")
    print(f"\nWritten to {options.out}: autoshard search ... --cluster {options.out}")
    return 0
