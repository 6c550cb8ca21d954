"""``autoshard explain``: what a saved strategy does, and where the time of a step goes."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.cli.found import record_of, write_pages
from autoshard.cli.options import SPEC_HELP, add_optional_function, add_page, command
from autoshard.cli.options import spec as layout
from autoshard.cli.program import load
from autoshard.cli.terminal import show, show_json, working

EXAMPLE = "autoshard explain found.json --html report.html --open"


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    parser = command(commands, "explain", run, "say what a saved strategy does, and where the time of a step goes", EXAMPLE)
    parser.add_argument("strategy", metavar="FILE", help="a file that --save wrote, or a name that autoshard strategies lists")
    add_optional_function(parser, "its program, for --tensor, and for files without what reports show")
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
    add_page(parser)
    parser.add_argument("--trace", metavar="FILE.json", help="write the timeline of a step for ui.perfetto.dev")


def run(options: argparse.Namespace) -> int:
    """Loads and explains; writes the report and the trace instead, where they are asked for."""
    if options.program is None and (options.tensor is not None or options.spec is not None):
        from autoshard.errors import StrategyError

        raise StrategyError(
            "other layouts of a tensor are searched in its program. Name it: autoshard explain FILE MODULE:FUNCTION --args MODULE:NAME "
            "--tensor NAME."
        )
    page = options.html is not None or options.trace is not None or options.open
    if options.program is None:  # by the file alone, without JAX
        from autoshard.explanation.explain import explain
        from autoshard.report import report_of

        record = record_of(options.strategy)
        write_pages(report_of(record), options) if page else _show(explain(record, details=options.details), options)
    else:
        from jax.sharding import PartitionSpec

        strategy, spec = strategy_of(options), None if options.spec is None else PartitionSpec(*options.spec)
        if page:
            write_pages(strategy.report(), options)
        else:
            _show(strategy.explain(options.tensor, details=options.details, spec=spec), options)
    return 0


def _show(report, options: argparse.Namespace) -> None:
    show_json(report.to_json()) if options.json else show(report)


def strategy_of(options: argparse.Namespace):
    """The strategy of the options, with its program where they name one."""
    from autoshard.ask.strategy import Strategy

    record = record_of(options.strategy)
    if options.program is None:
        return Strategy(record)
    function, arguments = load(options.program, options.args, options.devices)
    with working():
        return Strategy(record).with_program(function, *arguments)
