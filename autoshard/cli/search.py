"""``autoshard search``: the best strategy a searcher finds for a program on a cluster."""

from __future__ import annotations

import argparse
import sys
from contextlib import redirect_stdout

from autoshard.cli.found import finish, finish_frontier, record_of
from autoshard.cli.options import (
    add_program,
    add_specs,
    argument,
    check_writable,
    cluster_of,
    command,
    mesh_or_axes,
    microbatches,
    names,
    positive,
    seconds,
    size,
)
from autoshard.cli.program import load
from autoshard.cli.terminal import progress

EXAMPLE = "autoshard search train:train_step --args train:example_args --cluster v5e:4x4 --donate 0 --save s.json"


def add(commands) -> None:
    """Adds the subcommand's options."""
    parser = command(commands, "search", run, "find how to shard a program over a cluster", EXAMPLE)
    add_program(parser)
    parser.add_argument(
        "--name", metavar="NAME", help="name the strategy, and leave times out of its file, which is then the same each time"
    )
    parser.add_argument(
        "--like",
        metavar="FILE",
        help="start from a strategy, a file that --save wrote or a name that autoshard strategies lists: carried over to this program and "
        "cluster it is one of the candidates; what has no place here is said",
    )
    parser.add_argument(
        "--searcher",
        metavar="NAME",
        default="auto",
        help="auto (default: the best of several), dynamic_programming (proven optimal), recursive_programming (for three mesh axes), "
        "integer_programming (memory as a constraint), data_parallel, fully_sharded, tensor_parallel; sharding_propagation (spreads pins), "
        "manual (keeps pins, replicates other arguments)",
    )
    parser.add_argument(
        "--mesh",
        metavar="NAME=SIZE,...",
        type=mesh_or_axes,
        help="mesh axes, outermost first; searched unless given: two axes at most and a third where it pays, or as many as a number says",
    )
    add_specs(parser, "--pin", "keep an argument's sharding; repeatable")
    parser.add_argument(
        "--pins-from",
        choices=("arguments",),
        help="keep the shardings that the arguments have, as arrays on a mesh or by Flax's metadata; what --pin says comes first",
    )
    parser.add_argument(
        "--batch-axes", metavar="NAME,...", type=names, help="split the batch over these mesh axes and no others, such as data or data,fsdp"
    )
    parser.add_argument(
        "--batch",
        metavar="ARGUMENT",
        type=argument,
        action="append",
        help="an argument that holds examples, by path, pattern or position, such as batch or 1, where it is taken for state; repeatable",
    )
    parser.add_argument(
        "--memory-limit", metavar="SIZE", type=size, help="memory a device may use, such as 12GB; the cluster's unless given"
    )
    parser.add_argument(
        "--time-limit",
        metavar="SECONDS",
        type=seconds,
        help="search no longer than this; what is printed and saved is then the best met so far, with its gap",
    )
    parser.add_argument(
        "--interruptible", action="store_true", help="Ctrl-C ends the search alone: the best met so far is printed and saved, with its gap"
    )
    parser.add_argument(
        "--confirm",
        choices=("compiler", "devices", "off"),
        nargs="?",
        const="compiler",
        help="compile the three best strategies for the cluster, without its devices, and take the fastest of those that fit; "
        "devices: run them on this machine's devices instead; off: no compiler is asked, not even of a plan near the memory limit",
    )
    parser.add_argument(
        "--microbatches",
        metavar="N",
        type=microbatches,
        default="fit",
        help="compute gradients of so many parts of the batch, one after the other; fit (default): of more than one where memory binds "
        "and that is fastest; auto: of 1, 2, 4 or 8, whichever is fastest",
    )
    parser.add_argument(
        "--remat",
        choices=("none", "fit", "auto", "full", "replace"),
        default="fit",
        help="compute values of the forward pass again in the backward pass; fit (default) or auto: where memory binds and that is "
        "fastest; full: all repeated layers; replace: instead of what the program's "
        "own checkpoints do, if that is faster; none: never",
    )
    parser.add_argument(
        "--offload",
        choices=("none", "optimizer", "activations", "auto"),
        default="none",
        help="what is in the memory of hosts while it is not used; optimizer: moments and the like; activations: what the backward pass "
        "reads, a further choice of --remat; auto: either where nothing fits otherwise or it is faster; none (default): nothing",
    )
    parser.add_argument(
        "--stages", metavar="N", type=positive, help="a pipeline: divide the devices into so many parts, each of which computes a stage"
    )
    parser.add_argument(
        "--schedule",
        choices=("1f1b", "gpipe", "interleaved", "zero_bubble", "one_program", "one_program_interleaved"),
        help="the order of a pipeline's tasks (1f1b, or with --full the fastest); one_program: scanned layers, in stages of one program",
    )
    parser.add_argument(
        "--full",
        action="store_true",
        help="search pipelines too: numbers of stages and of microbatches, schedules, and the shardings of each stage",
    )
    parser.add_argument(
        "--kernels",
        choices=("none", "auto"),
        default="none",
        help="auto: plain attention becomes the fused kernel that JAX has for these devices, where that is faster; none (default): never",
    )
    parser.add_argument(
        "--balance",
        metavar="RATIO",
        type=lambda text: None if text == "none" else float(text),
        default=1.0,
        help="rows of the fullest expert over the mean (1.0) that experts without a capacity are planned for; none: they stay as written",
    )
    parser.add_argument(
        "--no-padding", action="store_true", help="keep dimensions that no mesh axis divides at their size, and so whole on every device"
    )
    parser.add_argument(
        "--frontier",
        metavar="POINTS",
        type=positive,
        nargs="?",
        const=8,
        help="print up to so many strategies (8), from the least memory to the least time, instead of one; --save then takes the fastest",
    )


MAY_STAND_ALONE = {"--confirm": "compiler", "--frontier": "8"}  # a program after them is no value of theirs


def _check_frontier(options: argparse.Namespace) -> None:
    """Raises `SearcherError` for options that strategies of a frontier do not have."""
    import autoshard

    given = {"--stages": options.stages, "--schedule": options.schedule, "--full": options.full}
    given["--remat"] = options.remat not in ("fit", "none")
    if names := [name for name, is_given in given.items() if is_given]:
        raise autoshard.SearcherError(
            f"--frontier is of shardings, --microbatches and --offload, and has no {', '.join(names)}. Leave out --frontier, and give "
            "--memory-limit for one strategy at a peak."
        )


def run(options: argparse.Namespace) -> int:
    """Searches, saves, reports."""
    from jax.sharding import PartitionSpec

    import autoshard

    if options.like and options.frontier:
        raise autoshard.SearcherError("--like is one more candidate for one strategy, and --frontier makes several. Leave out one of them.")
    if options.confirm and options.frontier:
        raise autoshard.SearcherError("one strategy is confirmed, and --frontier makes several. Leave out --frontier or --confirm.")
    if options.frontier:
        _check_frontier(options)
    check_writable(options.save, "--save")
    function, arguments = load(options.program, options.args, options.devices)
    with redirect_stdout(sys.stderr), progress(quiet=options.json) as callback:  # stdout is for our output, not the program's
        asked = {
            "cluster": cluster_of(options.cluster),
            "searcher": options.searcher,
            "mesh": options.mesh,
            "pins": (*filter(None, [options.pins_from]), {path: PartitionSpec(*spec) for path, spec in options.pin}),
            "batch_axes": options.batch_axes,
            "batch": options.batch,
            "memory_limit_bytes": options.memory_limit,
            "donate_argnums": options.donate,
            "progress": callback,
            "time_limit_seconds": options.time_limit,
            "interruptible": options.interruptible,
            "microbatches": options.microbatches,
            "offload": None if options.offload == "none" else options.offload,
        }
        if options.frontier is None:
            of_time = {"remat": None if options.remat == "none" else options.remat, "stages": options.stages, "schedule": options.schedule}
            of_time |= {"kernels": None if options.kernels == "none" else options.kernels, "balance": options.balance}
            of_time["padding"] = not options.no_padding
            of_time["plan"] = "full" if options.full else "sharding"
            if options.like:
                of_time["start"] = autoshard.Strategy(record_of(options.like))
            of_time["confirm"] = False if options.confirm == "off" else options.confirm
            strategy = autoshard.search(function, *arguments, **of_time, **asked)
        else:
            frontier = autoshard.frontier(function, *arguments, points=options.frontier, **asked)
    if options.like:
        print(_carried(options.like, of_time["start"].record, strategy), file=sys.stderr)
    return finish(strategy, options) if options.frontier is None else finish_frontier(frontier, options)


def _carried(name: str, start, strategy) -> str:
    """Whether the answer is made of the strategy that a search started from, and what of that has no place here, in words."""
    from autoshard.plan.start import use_of

    here = {tensor.path: len(tensor.shape) for tensor in strategy.record.arguments}
    missing = [tensor.path for tensor in start.arguments if here.get(tensor.path) != len(tensor.shape)]
    used = f"--like {name}: {use_of(strategy) or 'not used, since something else was found before it was tried'}."
    if not missing:
        return f"{used} All its arguments are arguments here."
    more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
    return (
        f"{used} Of its {len(start.arguments)} arguments {len(missing)} have no place here, as no argument of that path and rank "
        f"is there: {', '.join(missing[:3])}{more}."
    )
