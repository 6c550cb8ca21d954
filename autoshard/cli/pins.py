"""``autoshard pins``: a saved strategy as the few lines of Python that make JAX do the same by itself."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.cli.found import record_of
from autoshard.cli.options import add_saved, command
from autoshard.cli.program import load
from autoshard.cli.terminal import show_json, working

EXAMPLE = "autoshard pins train:train_step --args train:example_args --strategy s.json"


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    parser = command(commands, "pins", run, "print a saved strategy as specs and constraints to paste", EXAMPLE)
    add_saved(parser)
    parser.add_argument(
        "--seconds", metavar="N", type=float, default=30.0, help="how long to look for constraints that can go (default 30)"
    )


def run(options: argparse.Namespace) -> int:
    """Finds the lines and prints them; the exit code is 1 where they do not make the same program."""
    record = record_of(options.strategy)
    function, arguments = load(options.program, options.args, options.devices)
    from autoshard.ask.strategy import Strategy

    with working(quiet=options.json) as callback:
        found = Strategy(record).pins(function, *arguments, budget_seconds=options.seconds, progress=callback)
    show_json(found.to_json()) if options.json else print(found)
    return 0 if found.exact else 1
