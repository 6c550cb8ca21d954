"""``autoshard compare``: saved strategies side by side."""

from __future__ import annotations

import argparse

from autoshard.cli.found import record_of
from autoshard.cli.options import command
from autoshard.cli.terminal import show, show_json


def add(commands) -> None:
    """Adds the subcommand's options."""
    parser = command(commands, "compare", run, "put saved strategies side by side", "autoshard compare found.json data_parallel.json")
    parser.add_argument("strategies", metavar="FILE", nargs="+", help="files that --save wrote, or names that autoshard strategies lists")


def run(options: argparse.Namespace) -> int:
    """Loads and compares."""
    from autoshard.api.explain import compare, summary

    records = {name: record_of(name) for name in options.strategies}
    if options.json:
        show_json([{"strategy": name, **summary(record)} for name, record in records.items()])
    else:
        show(compare(records))
    return 0
