"""How do the seconds of tracing, of building the graph and of searching grow with a model's depth and with the number of devices?

``python -m benchmarks.search`` takes unrolled GPT train steps (AdamW included) of 1 to 96 layers, on TPU v5p slices of 8, 64 and 512
devices, and shows for each the least, the median and the largest seconds of

- *trace*: JAX's own tracing;
- *graph*: what else happens before the search: flattening, fingerprint, rules, unsharded facts;
- *search*: what the searcher takes, all mesh shapes included and memory not limited.

An exponent fitted in logarithms says how each grows with depth: 1 is linear. Nothing is allocated or compiled, so any machine will do.
All of it takes about a quarter of an hour, ``--quick`` half a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import jax

import autoshard
from autoshard.cli.terminal import show
from autoshard.cost.profile import profile
from autoshard.render import Heading, Report, Table, format_count
from autoshard.rules import rules_of
from autoshard.trace import trace
from autoshard.trace.build import build
from autoshard.trace.fingerprint import fingerprint
from benchmarks.models import gpt
from benchmarks.progress import progress_bar

CLUSTERS = {8: "v5p:2x2x2", 64: "v5p:4x4x4", 512: "v5p:8x8x8"}
DEPTHS = (1, 2, 4, 8, 16, 32, 64, 96)
NO_LIMIT = 1e15  # bytes; where memory binds a search repeats itself, which is another question
PHASES = ("trace", "graph", "search")


@dataclass(frozen=True, slots=True)
class Sample:
    """One depth on one cluster: sizes, and per phase the seconds of each repetition."""

    layers: int
    devices: int
    n_ops: int
    meshes: int
    trace: tuple[float, ...]
    graph: tuple[float, ...]
    search: tuple[float, ...]


def measure(layers: int, devices: int, searcher: str, repeats: int) -> Sample:
    """The seconds of every phase; each repetition takes a new function, since JAX remembers those that it traced."""
    traces, graphs, searches = [], [], []
    for _ in range(repeats):
        function, args = gpt(layers)
        strategy = autoshard.search(function, *args, cluster=CLUSTERS[devices], searcher=searcher, memory_limit_bytes=NO_LIMIT)
        searches.append(strategy.stats["search_seconds"])
        tracing, building = _phases(*gpt(layers))
        traces.append(tracing)
        graphs.append(building)
    stats = strategy.stats
    return Sample(layers, devices, stats["n_ops"], stats["meshes"], tuple(traces), tuple(graphs), tuple(searches))


def _phases(function: Callable, args: tuple) -> tuple[float, float]:
    """Seconds of JAX's tracing, and of what autoshard makes of the jaxpr."""
    started = time.perf_counter()
    jaxpr = jax.make_jaxpr(function)(*args)
    traced = time.perf_counter()
    fingerprint(build(jaxpr), ())
    built = time.perf_counter()
    graph = trace(function, *args).graph
    resumed = time.perf_counter()
    profile(graph, rules_of(graph))
    return traced - started, built - traced + time.perf_counter() - resumed


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of log y against log x by least squares; nan of fewer than two points.

    >>> round(exponent([1, 2, 4], [3, 6, 12]), 6)
    1.0
    """
    if len(xs) < 2:
        return math.nan
    return statistics.linear_regression([math.log(x) for x in xs], [math.log(max(y, 1e-9)) for y in ys]).slope


def exponents(samples: Sequence[Sample]) -> dict[int, dict[str, float]]:
    """Per number of devices and phase, the exponent of the median seconds in the number of ops."""
    found = {}
    for devices in sorted({sample.devices for sample in samples}):
        chosen = [sample for sample in samples if sample.devices == devices]
        ops = [sample.n_ops for sample in chosen]
        found[devices] = {phase: exponent(ops, [statistics.median(getattr(sample, phase)) for sample in chosen]) for phase in PHASES}
    return found


def report(samples: Sequence[Sample], searcher: str) -> Report:
    """The table of all samples, and the exponents."""
    rows = tuple(
        (
            f"{sample.devices}",
            f"{sample.layers}",
            format_count(sample.n_ops),
            *(_spread(getattr(sample, phase)) for phase in PHASES),
            f"{sample.meshes}",
        )
        for sample in samples
    )
    columns = (">devices", ">layers", ">ops", *(f">{phase} s: min median max" for phase in PHASES), ">meshes")
    slopes = tuple((f"{devices}", *(f"{slopes[phase]:.2f}" for phase in PHASES)) for devices, slopes in exponents(samples).items())
    parts = (
        Table(columns, rows),
        Heading("Exponents: seconds grow with ops to the power of"),
        Table((">devices", ">trace", ">graph", ">search"), slopes),
    )
    return Report(f"Seconds to trace and search a GPT train step ({searcher})", parts)


def _spread(seconds: Sequence[float]) -> str:
    return " ".join(f"{value:#.3g}" for value in (min(seconds), statistics.median(seconds), max(seconds)))


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=__doc__.split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="1 to 4 layers on 8 and 64 devices")
    parser.add_argument("--depths", type=_numbers, help=f"layers; {','.join(map(str, DEPTHS))} unless given")
    parser.add_argument("--devices", type=_numbers, help=f"some of {', '.join(map(str, CLUSTERS))}; all unless given")
    parser.add_argument("--repeats", type=int, default=2, help="how often each is measured (default 2)")
    parser.add_argument("--searcher", default="recursive_programming")
    parser.add_argument("--memory", type=float, default=12.0, metavar="GB", help="address space this process may use (default 12)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args(argv)
    options.depths = options.depths or ((1, 2, 4) if options.quick else DEPTHS)
    options.devices = options.devices or ((8, 64) if options.quick else tuple(CLUSTERS))
    if not set(options.devices) <= set(CLUSTERS) or min(options.depths) < 1 or options.repeats < 1:
        parser.error(f"devices are of {tuple(CLUSTERS)}, depths and repeats are 1 or more")
    resource.setrlimit(resource.RLIMIT_AS, (int(options.memory * 1e9),) * 2)

    _phases(*gpt(1))  # the first time pays for imports
    samples = []
    with progress_bar(options.json) as progress:
        runs = [(layers, devices) for devices in options.devices for layers in options.depths]
        task = progress.add_task("", total=len(runs))
        for layers, devices in runs:
            progress.update(task, description=f"{layers} layers on {devices} devices")
            samples.append(measure(layers, devices, options.searcher, options.repeats))
            progress.advance(task)
    if options.json:
        print(json.dumps({"samples": [asdict(sample) for sample in samples], "exponents": exponents(samples)}, indent=1))
    else:
        show(report(samples, options.searcher))
    return 0


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
