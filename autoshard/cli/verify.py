"""``autoshard verify``: a strategy's predicted collectives next to what the partitioner or a compiler makes of the program."""

from __future__ import annotations

import argparse
from typing import Any

from autoshard.cli.found import record_of
from autoshard.cli.options import add_saved, command
from autoshard.cli.program import load
from autoshard.cli.terminal import show, show_json, working

PARTS = 8
"""CPU devices on which parts of kernels run."""

EXAMPLE = "autoshard verify train:train_step --args train:example_args --strategy s.json --target shardy"


def add(commands: Any) -> None:
    """Adds the subcommand's options."""
    parser = command(commands, "verify", run, "hold a saved strategy against the partitioner or a compiler", EXAMPLE)
    parser.description = (
        f"{parser.description} The exit code is 0 where collectives are the predicted ones (compiled for TPUs or GPUs: within 3 % of the "
        "bytes and 1 % of the FLOPs), the program fits, and kernels compute what is written, else 1."
    )
    add_saved(parser)
    parser.add_argument(
        "--target",
        choices=("shardy", "cpu", "tpu", "gpu"),
        default="shardy",
        help="shardy (default): the partitioner's own collectives, without compiling; cpu: the program compiled for virtual CPU devices; "
        "tpu, gpu: compiled ahead of time for the strategy's cluster, without one (gpu: for the GPUs of this machine, if there are enough)",
    )
    parser.add_argument("--cycles", action="store_true", help="of tpu, also the compiler's schedule against the predicted compute: minutes")
    parser.add_argument(
        "--no-numbers", action="store_true", help="do not compare the numbers of kernels with those of the program as it is written"
    )
    parser.add_argument(
        "--bucket-bytes", metavar="BYTES", type=int, help="of tpu and gpu, how many bytes of gradients one collective combines at most"
    )
    parser.add_argument(
        "--save-graphs", metavar="FOLDER", help="write the program's graph (GraphML), its plan, and its lowered and compiled text there"
    )


def run(options: argparse.Namespace) -> int:
    """Verifies and reports; the exit code is 1 where the two differ, of a TPU or GPU program by more than compilers add."""
    record = record_of(options.strategy)
    devices = options.devices or (record.mesh.size if options.target == "cpu" else None)
    if devices is None and not options.no_numbers:
        from autoshard.demo.devices import spare_cpu_devices

        spare_cpu_devices(PARTS)
    function, arguments = load(options.program, options.args, devices)
    import autoshard

    with working(quiet=options.json) as callback:
        found = autoshard.verify(
            autoshard.Strategy(record),
            function,
            *arguments,
            target=options.target,
            cycles=options.cycles,
            bucket_bytes=options.bucket_bytes,
            save_graphs=options.save_graphs,
            numbers=not options.no_numbers,
            progress=callback,
        )
    show_json(found.to_json()) if options.json else show(found.report())
    return 0 if found.as_predicted else 1
