"""How long does a search take, how much memory, and how far from optimal is its answer?

``python -m benchmarks.search`` searches whole train steps, AdamW included, and holds seconds, gaps and memory against targets:

- Llama-3-8B, 32 layers, on a mesh of 8 x 8: unrolled and scanned;
- GPT-3 175B of 12 to 96 unrolled layers on 512 devices, the mesh searched; and how the seconds grow with depth, as an exponent;
- a GPT so small that latency decides, and one that is not, of 2 and 4 layers on 2 x 4;
- a GPT of 48 layers with the fast heuristics, on 8 and 64 devices;
- random small programs on which dynamic programming, integer programming and brute force must agree.

Each case runs in a process of its own, which has searched a small program before, so that imports do not count; one that is to take under a
second in three, the fastest of which counts, since whatever else the machine does only adds. *trace* is JAX's tracing,
with what happens before the search: flattening, fingerprint, rules, unsharded facts; *search* is all that follows: other placements and
meshes, the baseline, the bound; *solve* what of it the searcher takes on the mesh of the answer. *peak* is the memory of the process.
Nothing is allocated or compiled, so any machine will do; all of it takes about three minutes, ``--quick`` half a minute.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import autoshard
from autoshard.cli.terminal import show
from autoshard.render import Heading, Paragraph, Part, Report, Table, format_bytes, format_count, format_percent, format_seconds
from benchmarks.models import MODELS, Program
from benchmarks.progress import progress_bar
from benchmarks.single_dtype import gpt, llama

ROOT = Path(__file__).resolve().parents[1]
DEPTHS = (12, 24, 48, 96)
RUNS = 3  # of what is to take under a second
SMALL_PROGRAMS = 360  # random ones, of which most are small enough for brute force
SQUARE, WIDE = {"data": 8, "model": 8}, {"data": 2, "model": 4}


@dataclass(frozen=True, slots=True)
class Case:
    """A search, and what it should reach.

    Attributes:
        name: in words.
        program, cluster, options: what is searched, and how.
        total, search, solve: seconds, at most: from the function to the strategy; what of it follows tracing; what the searcher takes.
        gap: at most.
        nbytes: of the process, at most.
    """

    name: str
    program: Callable[[], Program]
    cluster: str
    options: dict[str, Any]
    total: float | None = None
    search: float | None = None
    solve: float | None = None
    gap: float | None = None
    nbytes: float | None = None


def cases() -> dict[str, Case]:
    """All of them, by a short name."""
    large = partial(gpt, width=12288, heads=96, vocabulary=50_304, batch=1536, length=2048, remat=True)
    middle = partial(gpt, 48, 1024, 16, 32_000, 32, 512, dtype=jnp.float32)
    dynamic, recursive = {"searcher": "dynamic_programming"}, {"searcher": "recursive_programming"}
    megatron = {"searcher": "sharding_propagation", "pins": MODELS["gpt"].tensor_parallel}
    found = {
        "llama": Case("Llama-3-8B, 32 layers", partial(llama, 32), "v5p:4x4x4", dynamic | {"mesh": SQUARE}, 8.0, gap=0.01, nbytes=2e9),
        "llama_recursive": Case("the same", partial(llama, 32), "v5p:4x4x4", recursive | {"mesh": SQUARE}, solve=3.0, nbytes=2e9),
        "llama_scan": Case("the same, scanned", partial(llama, 32, scan=True), "v5p:4x4x4", dynamic | {"mesh": SQUARE}, 2.0, gap=0.01),
    }
    for layers in DEPTHS:
        total, gap = (30.0, 0.02) if layers == DEPTHS[-1] else (None, None)
        found[f"gpt3_{layers}"] = Case(f"GPT-3 175B, {layers} layers", partial(large, layers), "v5p:8x8x8", dynamic, total, gap=gap)
    tiny = partial(gpt, width=512, heads=8, batch=8, length=128)
    for layers in (2, 4):
        found[f"tiny_{layers}"] = Case(
            f"tiny GPT, {layers} layers", partial(tiny, layers), "v5e:2x4", dynamic | {"mesh": WIDE}, search=0.5, gap=0.005
        )
        found[f"gpt_{layers}"] = Case(
            f"GPT, {layers} layers", partial(gpt, layers, batch=64), "v5e:2x4", dynamic | {"mesh": WIDE}, search=0.5, gap=0.005
        )
    for devices, cluster, mesh in ((8, "v5p:2x2x2", WIDE), (64, "v5p:4x4x4", SQUARE)):
        found[f"middle_{devices}"] = Case("GPT, 48 layers", middle, cluster, recursive | {"mesh": mesh}, solve=0.5)
        found[f"pinned_{devices}"] = Case("the same, pinned", middle, cluster, megatron | {"mesh": mesh}, solve=0.8)
    return found


QUICK = ("tiny_2", "gpt_4")


@dataclass(frozen=True, slots=True)
class Sample:
    """What a case took.

    Attributes:
        trace, search, solve: seconds, those of the searcher itself on the mesh that is best; cpu: of the processor, in the first
            two, without what copies of the process compute.
        gap: of the answer.
        nbytes: of the process at its peak.
        n_ops, mesh: of the program, and of the answer.
    """

    trace: float
    search: float
    solve: float
    cpu: float
    gap: float
    nbytes: float
    n_ops: int
    mesh: dict[str, int] = field(default_factory=dict)

    @property
    def total(self) -> float:
        return self.trace + self.search


def measure(case: Case) -> Sample:
    """Searches once, in this process."""
    weight, x = jnp.zeros((64, 64)), jnp.zeros((512, 64))
    autoshard.search(lambda w, x: jnp.tanh(x @ w), weight, x, cluster=case.cluster)
    function, args = case.program()
    started, busy = time.perf_counter(), time.process_time()
    strategy = autoshard.search(function, *args, cluster=case.cluster, donate_argnums=0, **case.options)
    total, cpu = time.perf_counter() - started, time.process_time() - busy
    trace, solve, n_ops = (strategy.stats[name] for name in ("trace_seconds", "solve_seconds", "n_ops"))
    nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return Sample(trace, total - trace, solve, cpu, strategy.gap, nbytes, int(n_ops), dict(strategy.mesh_shape))


def measured(name: str, case: Case, memory: float) -> Sample:
    """Searches in a process of its own; of what is to take under a second the fastest of some runs."""
    command = [sys.executable, "-m", "benchmarks.search", "--one", name, "--memory", str(memory)]
    samples = []
    for _ in range(RUNS if min(case.search or math.inf, case.solve or math.inf) < 1.0 else 1):
        done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
        samples.append(Sample(**json.loads(done.stdout.splitlines()[-1])))
    return min(samples, key=lambda sample: sample.search)


def exponent(xs: Sequence[float], ys: Sequence[float]) -> float:
    """The slope of log y against log x by least squares; nan of fewer than two points.

    >>> round(exponent([1, 2, 4], [3, 6, 12]), 6)
    1.0
    """
    if len(xs) < 2:
        return math.nan
    return statistics.linear_regression([math.log(x) for x in xs], [math.log(max(y, 1e-9)) for y in ys]).slope


def agreeing(n: int) -> int:
    """On how many of some random programs the exact searchers all find and prove the same; an AssertionError where they do not."""
    sys.path.insert(0, str(ROOT / "tests"))
    from exact_searchers import agree

    return agree(range(n))


def report(samples: dict[str, Sample], agreed: int | None) -> Report:
    """A line for each case, the exponents, and how many exact answers agree."""
    known = cases()
    rows = [_row(known[name], sample) for name, sample in samples.items()]
    columns = ("program", "mesh", "searcher", ">ops", ">trace", ">search", ">solve", ">CPU", ">gap", ">peak", "target", "")
    parts: list[Part] = [Table(columns, tuple(rows))]
    deep = {layers: samples[f"gpt3_{layers}"] for layers in DEPTHS if f"gpt3_{layers}" in samples}
    if len(deep) > 1:
        slopes = {what: exponent(list(deep), [getattr(sample, what) for sample in deep.values()]) for what in ("total", "trace", "search")}
        said = ", ".join(f"{what} {slope:.2f}" for what, slope in slopes.items())
        parts += [
            Heading("GPT-3: seconds grow with layers to the power of"),
            Paragraph(f"{said}; wanted <= 1: {_reached(slopes['total'] <= 1)}"),
        ]
    if agreed is not None:
        said = f"Dynamic programming, integer programming and brute force find and prove the same optimum on {agreed} random programs"
        parts += [Heading("Exactness"), Paragraph(f"{said}; wanted 200: {_reached(agreed >= 200)}")]
    return Report("Searching whole train steps, AdamW included", tuple(parts))


def _row(case: Case, sample: Sample) -> tuple[str, ...]:
    wanted, reached = [], []
    for limit, found, what, shown in (
        (case.total, sample.total, "both", format_seconds),
        (case.search, sample.search, "search", format_seconds),
        (case.solve, sample.solve, "solve", format_seconds),
        (case.gap, sample.gap, "gap", format_percent),
        (case.nbytes, sample.nbytes, "peak", format_bytes),
    ):
        if limit is not None:
            wanted.append(f"{what} {shown(limit)}")
            reached.append(found <= limit)
    mesh = " x ".join(map(str, sample.mesh.values()))
    searcher = case.options["searcher"].split("_")[0] + ("" if "mesh" in case.options else ", meshes too")
    seconds = map(format_seconds, (sample.trace, sample.search, sample.solve, sample.cpu))
    figures = (format_count(sample.n_ops), *seconds, format_percent(sample.gap), format_bytes(sample.nbytes))
    return case.name, mesh, searcher, *figures, ", ".join(wanted), _reached(all(reached)) if reached else ""


def _reached(reached: bool) -> str:
    return "reached" if reached else "NOT reached"


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    known = cases()
    question = "How long does a search take, and how far from optimal is its answer?"
    parser = argparse.ArgumentParser(prog="python -m benchmarks.search", description=question)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(QUICK)}, and few random programs")
    parser.add_argument("--cases", help=f"some of {', '.join(known)}, separated by commas")
    parser.add_argument("--memory", type=float, default=12.0, metavar="GB", help="address space that a search may use (default 12)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    parser.add_argument("--one", choices=list(known), help="measure one case in this process, and print it as JSON")
    options = parser.parse_args(argv)
    if options.one:
        limit = int(options.memory * 1e9)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        print(json.dumps(asdict(measure(known[options.one]))))
        return 0
    chosen = options.cases.split(",") if options.cases else QUICK if options.quick else tuple(known)
    if unknown := sorted(set(chosen) - set(known)):
        parser.error(f"cases are of {', '.join(known)}; got {', '.join(unknown)}")
    n_random = None if options.cases else 20 if options.quick else SMALL_PROGRAMS
    samples = {}
    with progress_bar(options.json) as progress:
        task = progress.add_task("", total=len(chosen) + (n_random is not None))
        for name in chosen:
            progress.update(task, description=f"{known[name].name}, {known[name].options['searcher']}")
            samples[name] = measured(name, known[name], options.memory)
            progress.advance(task)
        progress.update(task, description="random small programs")
        agreed = None if n_random is None else agreeing(n_random)
    if options.json:
        found = {name: asdict(sample) for name, sample in samples.items()}
        print(json.dumps({"samples": found, "agreed": agreed}, indent=1))
    else:
        show(report(samples, agreed))
    return 0


if __name__ == "__main__":
    sys.exit(main())
