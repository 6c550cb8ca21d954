"""``autoshard search``: the best strategy a searcher finds for a program on a cluster."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from autoshard.cli.asked import add_asked, asked
from autoshard.cli.found import finish, finish_frontier
from autoshard.cli.options import add_program, check_request, command, positive
from autoshard.cli.program import load
from autoshard.cli.terminal import working
from autoshard.options import OPTIONS

EXAMPLE = "autoshard search train:train_step --args train:example_args --cluster v5e:4x4 --donate 0 --save s.json"


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    parser = command(commands, "search", run, "find how to shard a program over a cluster", EXAMPLE)
    add_program(parser)
    parser.add_argument(
        "--name", metavar="NAME", help="name the strategy, and leave times out of its file, which is then the same each time"
    )
    add_asked(parser, *(name for name in OPTIONS if name not in ("cluster", "donate_argnums")))
    parser.add_argument(
        "--frontier",
        metavar="POINTS",
        type=positive,
        nargs="?",
        const=8,
        help="print up to so many strategies (8), from the least memory to the least time, instead of one; --save then takes the fastest",
    )


MAY_STAND_ALONE = {"--confirm": "compiler", "--frontier": "8"}  # a program after them is no value of theirs


def run(options: argparse.Namespace) -> int:
    """Searches, saves, reports."""
    import autoshard

    check_request(options)
    function, arguments = load(options.program, options.args, options.devices)
    with working(quiet=options.json) as callback:
        given = asked(options)
        if options.frontier is not None:
            frontier = autoshard.frontier(function, *arguments, points=options.frontier, progress=callback, **given)
        else:
            strategy = autoshard.search(function, *arguments, progress=callback, **given)
    if options.frontier is not None:
        return finish_frontier(frontier, options)
    if "start" in given:
        print(_carried(given["start"].record, strategy), file=sys.stderr)
    return finish(strategy, options)


def _carried(start, strategy) -> str:
    """What of the strategy that a search started from has no place here, in words; its notes say whether the answer is made of it."""
    here = {tensor.path: len(tensor.shape) for tensor in strategy.record.arguments}
    missing = [tensor.path for tensor in start.arguments if here.get(tensor.path) != len(tensor.shape)]
    if not missing:
        return "--like: all its arguments are arguments here."
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return f"--like: {len(missing)} of its {len(start.arguments)} arguments have no place here: {', '.join(missing[:3])}{more}."
