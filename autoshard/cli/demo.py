"""``autoshard demo``: two train steps, their shardings found, run on 8 virtual CPU devices and checked."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from autoshard.cli.options import command, positive
from autoshard.cli.terminal import progress, show, show_json

STEPS = 30

NEXT = """Next, the GPT in GPT-2's sizes on 16 TPU chips, which need not be there:
  autoshard search autoshard.demo.gpt:train_step --args autoshard.demo.gpt:gpt_2_arguments --cluster v5e:4x4 --donate 0,1 --save found.json
  autoshard explain found.json --html report.html --open
Or your own: for a train.py with a function train_step and a tuple example_args of its arguments
  autoshard search train:train_step --args train:example_args --cluster v5e:4x4
`autoshard clusters` lists the devices that --cluster knows.
"""


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    what = "shard and train a small GPT and LeNet-5 on 8 virtual CPU devices"
    parser = command(commands, "demo", run, what, "autoshard demo --steps 10")
    parser.add_argument("--steps", metavar="N", type=positive, default=STEPS, help=f"training steps of each model (default {STEPS})")
    parser.add_argument("--only", metavar="NAME", help="one of the models: gpt or lenet")


def run(options: argparse.Namespace) -> int:
    """Runs the demo; 1 where the losses disagree."""
    from autoshard.demo.devices import virtual_devices

    virtual_devices(8)  # before anything else: JAX takes its devices when it starts
    from autoshard.demo.programs import named
    from autoshard.demo.run import report, summary, train

    programs = named(options.only)
    outcomes = []
    for program in programs:
        with progress(options.json) as callback:
            outcomes.append(train(program, options.steps, callback))
        if not options.json:
            show(report(outcomes[-1]))
            print()
    if options.json:
        show_json([summary(outcome) for outcome in outcomes])
    wrong = [outcome.program.name for outcome in outcomes if not outcome.agrees]
    if wrong:
        print(f"autoshard demo: the sharded losses of {', '.join(wrong)} differ from the single-device ones.", file=sys.stderr)
    elif not options.json:
        print(NEXT)
    return 1 if wrong else 0
