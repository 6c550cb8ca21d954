"""``autoshard explain``: what a saved strategy does, and where the time of a step goes."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from autoshard.cli.found import record_of
from autoshard.cli.options import SPEC_HELP, command
from autoshard.cli.options import spec as layout
from autoshard.cli.program import load
from autoshard.cli.terminal import show, show_json

EXAMPLE = "autoshard explain found.json train:train_step --args train:example_args"


def add(commands) -> None:
    """Adds the subcommand's options."""
    parser = command(commands, "explain", run, "say what a saved strategy does, and where the time of a step goes", EXAMPLE)
    parser.add_argument("strategy", metavar="FILE", help="a file that --save wrote, or a name that autoshard strategies lists")
    parser.add_argument(
        "program", metavar="MODULE:FUNCTION", nargs="?", help="its program, for compute by layer and line, and memory by group"
    )
    parser.add_argument("--args", metavar="MODULE:NAME", help="the program's arguments, as for autoshard search")
    parser.add_argument("--devices", metavar="N", type=int, help="give JAX N virtual CPU devices, for a program that builds its own mesh")
    parser.add_argument(
        "--tensor",
        metavar="NAME",
        help="why a tensor is sharded as it is, and what other layouts cost: a path, a pattern, or the end of one, as layers/0/up; of a "
        "computed value its checkpoint_name, source line (model.py:41), layer or operation (op 57)",
    )
    parser.add_argument("--spec", metavar="SPEC", type=layout, help=f"with --tensor: why it is not sharded like this. {SPEC_HELP}")
    parser.add_argument(
        "--details", action="store_true", help="add pictures of shards, results, the proof of optimality, and what the searcher did"
    )
    parser.add_argument("--html", metavar="FILE", help="write a report that browsers open offline: timeline, memory, mesh, tables, graph")
    parser.add_argument("--trace", metavar="FILE.json", help="write the timeline of a step for ui.perfetto.dev")


def run(options: argparse.Namespace) -> int:
    """Loads and explains; writes the report and the trace instead, where they are asked for."""
    from jax.sharding import PartitionSpec

    strategy = strategy_of(options)
    if options.html is not None or options.trace is not None:
        page = strategy.report()
        for path, save in ((options.html, page.save_html), (options.trace, page.save_trace)):
            if path is not None:
                save(path)
                print(f"saved to {path}", file=sys.stderr)
        return 0
    report = strategy.explain(options.tensor, details=options.details, spec=None if options.spec is None else PartitionSpec(*options.spec))
    show_json(report.to_json()) if options.json else show(report)
    return 0


def strategy_of(options: argparse.Namespace):
    """The strategy of the options, with its program where they name one."""
    from autoshard.ask.strategy import Strategy

    record = record_of(options.strategy)
    if options.program is None:
        return Strategy(record)
    function, arguments = load(options.program, options.args, options.devices)
    with redirect_stdout(sys.stderr):  # stdout is for our output, not the program's
        return Strategy(record).with_program(function, *arguments)
