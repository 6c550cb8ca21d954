"""``autoshard evaluate``: what a sharding that somebody chose will cost."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.cli.asked import add_asked, asked
from autoshard.cli.found import finish
from autoshard.cli.options import add_in_specs, add_program, check_request, command, mesh
from autoshard.cli.program import load
from autoshard.cli.terminal import working

EXAMPLE = "autoshard evaluate train:train_step --args train:example_args --cluster cpu:8 --mesh data=4,model=2 --in-spec 'batch*=data'"


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    parser = command(commands, "evaluate", run, "say what a sharding of your own will cost", EXAMPLE)
    add_program(parser)
    parser.add_argument("--mesh", metavar="NAME=SIZE,...", type=mesh, required=True, help="mesh axes, outermost first")
    add_in_specs(parser, "what none mentions is replicated")
    add_asked(parser, "microbatches", "remat", "offload")


def run(options: argparse.Namespace) -> int:
    """Evaluates, saves, reports."""
    check_request(options)
    from jax.sharding import PartitionSpec

    import autoshard

    function, arguments = load(options.program, options.args, options.devices)
    with working():
        strategy = autoshard.evaluate(
            function,
            *arguments,
            in_specs={path: PartitionSpec(*spec) for path, spec in options.in_spec},
            **asked(options),
        )
    return finish(strategy, options)
