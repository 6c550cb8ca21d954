"""``autoshard reshard``: what moves between the layouts of two saved strategies, over which networks, and how long that takes."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.cli.found import record_of
from autoshard.cli.options import command
from autoshard.cli.terminal import show, show_json


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    what = "say what moves when a state goes from one saved strategy's layout to another's"
    parser = command(commands, "reshard", run, what, "autoshard reshard trained.json decode.json --part state.params")
    parser.add_argument("old", metavar="OLD", help="a file that --save wrote, or a name that autoshard strategies lists")
    parser.add_argument("new", metavar="NEW", help="another one")
    parser.add_argument("--part", metavar="PATH", help="the path in the old strategy of what the new one's first argument is")


def run(options: argparse.Namespace) -> int:
    """Loads and plans."""
    from autoshard.ask.strategy import Strategy
    from autoshard.checkpoint import reshard_plan

    plan = reshard_plan(Strategy(record_of(options.old)), Strategy(record_of(options.new)), part=options.part)
    if not options.json:
        show(plan.report())
        return 0
    show_json(
        {
            "kept_bytes": plan.kept_bytes,
            "moved_bytes": plan.moved_bytes,
            "bytes_by_link": plan.bytes_by_link,
            "seconds": plan.seconds,
            "order": list(plan.order),
        }
    )
    return 0
