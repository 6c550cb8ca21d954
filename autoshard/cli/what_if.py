"""``autoshard what-if``: the difference that other devices, meshes, pins or batches would make."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from autoshard.cli.asked import add_asked, asked
from autoshard.cli.explain import strategy_of
from autoshard.cli.options import add_specs, check_writable, command, positive
from autoshard.cli.terminal import show, show_json

EXAMPLE = "autoshard what-if found.json train:train_step --args train:example_args --cluster v5e:4x8"


def add(commands) -> None:
    """Adds the subcommand's options."""
    what = "say what other devices, another mesh, pins, batch or microbatches would change"
    parser = command(commands, "what-if", run, what, EXAMPLE)
    parser.add_argument("strategy", metavar="FILE", help="a file that --save wrote, or a name that autoshard strategies lists")
    parser.add_argument("program", metavar="MODULE:FUNCTION", help="its program")
    parser.add_argument("--args", metavar="MODULE:NAME", help="the program's arguments, as for autoshard search")
    parser.add_argument("--devices", metavar="N", type=int, help="give JAX N virtual CPU devices, for a program that builds its own mesh")
    parser.add_argument("--cluster", metavar="CLUSTER", help="other devices, such as v5e:4x8; their mesh is then searched")
    add_asked(parser, "mesh", "microbatches", "memory_limit_bytes")
    parser.add_argument("--batch", metavar="N", type=positive, help="examples of the whole batch")
    add_specs(parser, "--pin", "fix a sharding; repeatable")
    parser.set_defaults(pins_from=None)
    parser.add_argument("--save", metavar="FILE", help="write the other strategy to a JSON file")


def run(options: argparse.Namespace) -> int:
    """Searches again and compares."""
    check_writable(options.save, "--save")
    with redirect_stdout(sys.stderr):  # stdout is for our output, not the program's
        found = strategy_of(options).what_if(
            batch=options.batch,
            **asked(options, without=("batch",)),
        )
    if options.save:
        found.strategy.save(options.save)
        print(f"saved to {options.save}", file=sys.stderr)
    show_json(found.to_dict()) if options.json else show(found)
    return 0
