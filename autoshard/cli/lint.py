"""``autoshard lint``: what looks wrong about a sharding that somebody wrote; an exit code for continuous integration."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.cli.options import add_function, add_in_specs, cluster_of, command, mesh, numbers
from autoshard.cli.program import load
from autoshard.cli.terminal import show, show_json, working

EXAMPLE = "autoshard lint train:train_step --args train:example_args --cluster v5e:4x4 --mesh data=16 --in-spec 'batch*=data' --fail-on any"

FAILED = 1  # the exit code


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    parser = command(commands, "lint", run, "check a sharding of your own, with source lines and costs", EXAMPLE)
    add_function(parser)
    parser.add_argument("--cluster", metavar="CLUSTER", required=True, help="such as cpu:8, v5e:4x4, h100:8x4, or a .toml file")
    parser.add_argument("--mesh", metavar="NAME=SIZE,...", type=mesh, help="mesh axes, outermost first; unless given that of the arguments")
    add_in_specs(parser, "unless given those that the arguments have")
    parser.add_argument("--donate", metavar="N,...", type=numbers, default=(), help="positions of donated arguments, as donate_argnums")
    parser.add_argument(
        "--fail-on",
        metavar="RULE,...",
        type=lambda text: tuple(part.strip() for part in text.split(",")),
        default=(),
        help="exit with code 1 where one of these rules finds something: unsharded-batch, unsharded-parameter, replicated-activation, "
        "repeated-work, whole-kernel, undivided-dimension, uneven-padding, silent-resharding, or any",
    )


def run(options: argparse.Namespace) -> int:
    """Checks and reports."""
    from jax.sharding import PartitionSpec

    from autoshard.ask.linting import check_rules, lint

    check_rules(options.fail_on)
    function, arguments = load(options.program, options.args, options.devices)
    specs = {path: PartitionSpec(*spec) for path, spec in options.in_spec}
    with working():
        found = lint(
            function,
            *arguments,
            cluster=cluster_of(options.cluster),
            mesh=options.mesh,
            donate_argnums=options.donate,
            **({"in_specs": specs} if specs else {}),
        )
    show_json(found.to_dict()) if options.json else show(found)
    return FAILED if found.failing(options.fail_on) else 0
