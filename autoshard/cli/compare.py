"""``autoshard compare``: saved strategies side by side, and where two of them differ."""

from __future__ import annotations

import argparse

from autoshard.cli.found import record_of
from autoshard.cli.options import command
from autoshard.cli.terminal import show, show_json


def add(commands) -> None:
    """Adds the subcommand's options."""
    what = "put saved strategies side by side; of two, say what differs and what it costs"
    parser = command(commands, "compare", run, what, "autoshard compare found.json data_parallel.json")
    parser.add_argument("strategies", metavar="FILE", nargs="+", help="files that --save wrote, or names that autoshard strategies lists")


def run(options: argparse.Namespace) -> int:
    """Loads and compares."""
    from autoshard.api.comparing import compare
    from autoshard.api.explain import side_by_side, summary
    from autoshard.api.strategy import Strategy

    records = {name: record_of(name) for name in options.strategies}
    two = compare(*map(Strategy, records.values()), names=tuple(records)) if len(records) == 2 else None
    if options.json:
        rows = [{"strategy": name, **summary(record)} for name, record in records.items()]
        show_json(rows if two is None else {"strategies": rows, "difference": two.to_dict()})
        return 0
    show(side_by_side(records))
    if two is not None:
        print()
        show(two)
    return 0
