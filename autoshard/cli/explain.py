"""``autoshard explain``: the report on a saved strategy."""

from __future__ import annotations

import argparse

from autoshard.cli.found import record_of
from autoshard.cli.options import command
from autoshard.cli.terminal import show, show_json


def add(commands) -> None:
    """Adds the subcommand's options."""
    parser = command(commands, "explain", run, "report on a saved strategy", "autoshard explain s.json")
    parser.add_argument("strategy", metavar="FILE", help="a file that --save wrote, or a name that autoshard strategies lists")


def run(options: argparse.Namespace) -> int:
    """Loads and reports."""
    from autoshard.api.explain import explain
    from autoshard.strategy import to_json

    record = record_of(options.strategy)
    show_json(to_json(record)) if options.json else show(explain(record))
    return 0
