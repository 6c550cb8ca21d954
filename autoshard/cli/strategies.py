"""``autoshard strategies``: the reviewed strategies that come with autoshard."""

from __future__ import annotations

import argparse

from autoshard.cli.options import command
from autoshard.cli.terminal import show, show_json


def add(commands) -> None:
    """Adds the subcommand's options."""
    what = "list the strategies that come with autoshard, or show some"
    parser = command(commands, "strategies", run, what, "autoshard strategies demo_gpt_auto")
    parser.add_argument("names", metavar="NAME", nargs="*", help="strategies to show; all are listed unless given")


def run(options: argparse.Namespace) -> int:
    """Lists or shows."""
    from autoshard import library
    from autoshard.api.explain import compare, explain, summary

    records = {name: library.load(name) for name in options.names or library.names()}
    if options.json:
        show_json([{"strategy": name, **summary(record)} for name, record in records.items()])
    elif options.names:
        for record in records.values():
            show(explain(record))
    else:
        show(compare(records, "Strategies of the library"))
    return 0
