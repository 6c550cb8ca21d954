"""Does a program that autoshard lowers cost what plain ``jax.jit`` makes of the same shardings?

``python -m benchmarks.lowering`` compiles small train steps ahead of time for a TPU slice, under data parallelism, twice: as autoshard
lowers them, and as ``jax.jit`` takes them with the same shardings of arguments and results and nothing in between. Propagation has one
answer there, so every constraint that autoshard writes could only stand between the compiler and a simplification. Shown are the
schedule's time, in the compiler's order with each collective's time (`benchmarks.cost_model.ranking`), and the peak memory.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import autoshard
from autoshard import Cluster
from autoshard.cli.terminal import show
from autoshard.cost.collectives import Communication
from autoshard.errors import AutoshardError
from autoshard.render import Paragraph, Report, Table, format_bytes, format_seconds
from autoshard.verify import Clock, scheduled_seconds
from benchmarks.cost_model.compiled import compiled_ahead
from benchmarks.models import Program
from benchmarks.progress import progress_bar
from benchmarks.quality import Plan
from benchmarks.single_dtype import encoder_decoder, gpt, gpt_scan, llama, mlp, moe, resnet, unet, vit

SUMMARY = "Does a program that autoshard lowers cost what plain jax.jit makes of the same shardings?"
CLUSTER, MESH, SEARCHER = "v5e:2x4", {"data": 8}, "data_parallel"
NOISE = 0.03
PROGRAMS: dict[str, Callable[[], Program]] = {
    "mlp": partial(mlp, 2, width=2048, hidden=8192, batch=8192),
    "gpt": partial(gpt, 1, batch=32),
    "gpt remat": partial(gpt, 1, batch=32, remat=True),
    "gpt_scan": partial(gpt_scan, layers=2, batch=32),
    "llama": partial(llama, 1, 1024, 8, 4, 2816, 32_000, batch=32, remat=False, length=1024),
    "moe": partial(moe, 1, batch=32),
    "moe that sorts": partial(moe, 1, batch=32, sorts=True),
    "vit": partial(vit, 1, batch=256),
    "encoder-decoder": partial(encoder_decoder, 1, batch=32, length=512),
    "resnet": partial(resnet, (1, 1, 1, 1), batch=256, side=64),
    "resnet of group norms": partial(resnet, (1, 1, 1, 1), batch=64, side=64, groups=8),
    "unet": partial(unet, batch=128, side=64),
    "unet resizing": partial(unet, batch=64, side=64, resizes=True),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """A program as autoshard lowers it, and as plain ``jax.jit`` takes it: seconds of the schedule and bytes of the peak."""

    program: str
    seconds: float
    plain_seconds: float
    peak_bytes: float
    plain_peak_bytes: float


def compare(name: str) -> Pair:
    """Compiles a program both ways."""
    function, args = PROGRAMS[name]()
    found = autoshard.search(function, *args, cluster=CLUSTER, mesh=MESH, searcher=SEARCHER, donate_argnums=0, memory_limit_bytes=1e15)
    cluster, mesh = Cluster.parse(CLUSTER), found.record.mesh
    links = Communication(cluster.links(mesh))
    seconds, peaks = [], []
    for plain in (False, True):
        ahead = compiled_ahead(Plan(SEARCHER, function, args, found, expert=plain).lowered(), mesh, CLUSTER, cycles=True)
        seconds.append(scheduled_seconds(ahead.hlo, mesh, links, Clock(cluster.device.clock_hertz)))
        peaks.append(ahead.peak_bytes or ahead.needed_bytes)
    return Pair(name, *seconds, *peaks)


def report(pairs: Sequence[Pair]) -> Report:
    rows = tuple(
        (
            pair.program,
            format_seconds(pair.seconds),
            format_seconds(pair.plain_seconds),
            f"{pair.seconds / pair.plain_seconds:.3f}",
            format_bytes(pair.peak_bytes),
            format_bytes(pair.plain_peak_bytes),
            f"{pair.peak_bytes / pair.plain_peak_bytes:.3f}",
        )
        for pair in pairs
    )
    columns = ("program", ">autoshard's", ">plain", ">ratio", ">autoshard's peak", ">plain", ">ratio")
    slower = sum(pair.seconds > (1 + NOISE) * pair.plain_seconds for pair in pairs)
    return Report(f"{SEARCHER} on {CLUSTER}, lowered twice", (Table(columns, rows), Paragraph(f"{slower} are over {NOISE:.0%} slower.")))


def main(argv: Sequence[str] | None = None) -> int:
    """Compares and prints; the exit code is 1 where autoshard's program is slower beyond the noise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lowering", description=SUMMARY)
    parser.add_argument("--programs", nargs="+", choices=tuple(PROGRAMS), help="some programs only")
    parser.add_argument("--keep", metavar="FOLDER", help="keep what the compiler said there, and read it instead of compiling again")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    pairs: list[Pair] = []
    with tempfile.TemporaryDirectory() as folder, progress_bar(options.json) as progress:
        os.environ["AUTOSHARD_BENCHMARK_KEEP"] = options.keep or folder
        names = options.programs or tuple(PROGRAMS)
        task = progress.add_task("", total=len(names))
        try:
            for name in names:
                progress.update(task, description=name)
                pairs.append(compare(name))
                progress.advance(task)
        except AutoshardError as error:
            print(error, file=sys.stderr)
            return 1
        except KeyboardInterrupt:  # what is done is shown, and --keep has it
            print(f"interrupted after {len(pairs)} of {len(names)} programs", file=sys.stderr)
    if options.json:
        print(json.dumps([asdict(pair) for pair in pairs], indent=1))
    else:
        show(report(pairs))
    return int(any(pair.seconds > (1 + NOISE) * pair.plain_seconds for pair in pairs))


if __name__ == "__main__":
    sys.exit(main())
