"""``autoshard sweep``: a program on several clusters and batch sizes, by time and by cost."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.cli.asked import add_asked, asked
from autoshard.cli.options import add_function, cluster_of, command, mesh_or_axes, numbers, path_price
from autoshard.cli.terminal import show, show_json, working
from autoshard.options import OPTIONS

PER_POINT = ("cluster", "mesh", "batch")  # of which a sweep has several
EXAMPLE = "autoshard sweep train:train_step --args train:example_args --clusters v5e:4x4,h100:8x8 --batch 64,128 --donate 0"


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    parser = command(commands, "sweep", run, "compare clusters and batch sizes by time and by cost", EXAMPLE)
    add_function(parser, "; with --batch a function of the batch size")
    parser.add_argument("--clusters", metavar="CLUSTER,...", required=True, help="such as v5e:4x4,h100:8x8, or .toml files")
    parser.add_argument("--batch", metavar="N,...", type=numbers, default=(), help="batch sizes, in examples of a step on all devices")
    parser.add_argument(
        "--mesh", metavar="NAME=SIZE,...", type=mesh_or_axes, action="append", help="mesh axes, or a number of them; repeatable"
    )
    parser.add_argument("--tokens-per-example", metavar="N", type=int, help="costs are then those of a token, else of an example")
    parser.add_argument("--total", metavar="N", type=float, help="tokens or examples of a whole training, such as 3e11")
    parser.add_argument(
        "--price", metavar="DEVICE=PRICE", type=path_price, action="append", help="of a device-hour, such as h100=2.5; repeatable"
    )
    add_asked(parser, *(name for name in OPTIONS if name not in PER_POINT))
    parser.add_argument("--on", metavar="ray|ADDRESS", help="search on a Ray cluster: that which is there, else one on this machine")
    parser.add_argument("--save", metavar="FOLDER", help="write strategies as they are found; those of an earlier sweep are kept")


def run(options: argparse.Namespace) -> int:
    """Sweeps, and prints the table; Ctrl-C ends the sweep and prints what there is."""
    import autoshard
    from autoshard.cli.program import load, load_maker

    clusters = [cluster.strip() for cluster in options.clusters.split(",")]
    for cluster in clusters:  # before the program is loaded
        cluster_of(cluster)
    if options.batch:
        function, arguments = load_maker(options.program, options.args, options.devices)
    else:
        function, arguments = load(options.program, options.args, options.devices)
    with working(quiet=options.json) as callback:
        result = autoshard.sweep(
            function,
            arguments,
            clusters=clusters,
            batches=options.batch,
            meshes=options.mesh or (None,),
            tokens_per_example=options.tokens_per_example,
            total=options.total,
            prices=dict(options.price) if options.price else None,
            save=options.save,
            on=options.on,
            progress=callback,
            **asked(options, without=PER_POINT),
        )
    show_json(result.to_json()) if options.json else show(result.report())
    return 0
