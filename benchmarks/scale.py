"""How do the seconds and the memory of a search grow with devices, layers and operations?

``python -m benchmarks.scale`` searches train steps, AdamW included, and prints a line for each point of each curve, with the exponent by
which seconds and memory grow:

- *devices*: one scanned Llama-3-8B of a batch that they all divide, on 4 to 65,536 H100;
- *layers*: an unrolled Llama of 4 to 64 layers on v5e:8x8, each layer computed again;
- *operations*: an unrolled network of dense layers on v5e:8x8, of about 1,000 to 100,000 operations;
- *large*: programs and clusters as they are built, with ``plan="full"``: Llama-3 405B on 16,384 H100, GPT-3 175B on 1,024 A100, and a
  mixture of experts of 816B (61 layers of 56 heads and 32 experts) on 2,048 H100;
- *others*: by their layers, T5-XXL of 24 and 24, Gemma-2 27B of 46, a state-space model of 48, an image transformer of 40, all unrolled
  but Gemma-2 and on free meshes, and a Llama of 32 on three given axes;
- *long*: one sequence of 32k to 1M tokens of a scanned Llama-3-8B on v5p:4x4x8.

Each point runs in a process of its own, as in `benchmarks.search`. *trace* is JAX's tracing, *search* what follows, both by the clock;
*CPU* is of this process in both, without its copies. Nothing is compiled, so any machine will do; ``--curves`` and
``--most`` take some of the points.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial

from autoshard.cli.terminal import show
from autoshard.render import Paragraph, Part, Report, Table, format_bytes, format_count, format_percent, format_seconds
from benchmarks.models import encoder_decoder, gpt_scan, llama, mlp, moe
from benchmarks.models.decoder import decoder
from benchmarks.other_models import diffusion, state_space
from benchmarks.progress import progress_bar
from benchmarks.search import ROOT, Case, Sample, exponent, measure

SUMMARY = "How do the seconds and the memory of a search grow with devices, layers and operations?"
BATCH, LENGTH = 65_536, 2048
Point = tuple[str, int]
"""A curve, and a place on it."""


def _on_h100(n: int) -> Case:
    cluster = f"h100:{min(n, 8)}x{max(n // 8, 1)}"
    return Case(f"{n} devices", partial(llama, 32, batch=BATCH, length=LENGTH, scan=True), cluster, {})


def _deep(n: int) -> Case:
    return Case(f"{n} layers", partial(llama, n), "v5e:8x8", {})


def _long(n: int) -> Case:
    return Case(f"{n} dense layers", partial(mlp, n, 1024, 4096), "v5e:8x8", {})


def _large(n: int) -> Case:
    full = {"plan": "full"}
    if n == 405:
        sizes = {"width": 16_384, "heads": 128, "ffn": 53_248, "batch": 2048, "length": 8192}
        return Case("Llama-3 405B, 16,384 H100", partial(llama, 126, scan=True, remat=False, **sizes), "h100:8x2048", full)
    if n == 816:
        program = partial(moe, 61, 7168, 56, 32, 129_280, 4096, 4096, scan=True, remat=True, sorts=True)
        return Case("816B mixture of experts, 2,048 H100", program, "h100:8x256", full)
    program = partial(gpt_scan, 96, 12_288, 96, 50_304, 1536, 2048, remat=True)
    return Case("GPT-3 175B, 1,024 A100", program, "a100:8x128", full)


def _other(n: int) -> Case:
    gemma = {"kv_heads": 16, "head": 128, "gated": True, "tied": True, "keeps": ()}
    axes = {"mesh": {"data": 4, "model": 4, "third": 4}}
    return {
        24: Case("T5-XXL, batch 256", partial(encoder_decoder, 24, 4096, 64, batch=256), "v5e:16x16", {}),
        46: Case("Gemma-2 27B", partial(decoder, 46, 4608, 32, 36_864, 256_128, 128, 8192, **gemma), "v5p:4x4x8", {}),
        48: Case("state spaces, 48 layers", partial(state_space, 48, 2048, 16, 256, 2048), "v5e:8x8", {}),
        40: Case("image transformer, 40 layers", partial(diffusion, 40, 1408, 16, 1024), "v5e:8x8", {}),
        32: Case("Llama on 4 x 4 x 4", partial(llama, 32), "v5p:4x4x4", axes),
    }[n]


def _of_length(n: int) -> Case:
    return Case(f"{n} tokens", partial(llama, 32, batch=1, length=n, scan=True), "v5p:4x4x8", {"kernels": "auto"})


CURVES = {
    "devices": (_on_h100, (4, 8, 64, 512, 4096, 65_536)),
    "layers": (_deep, (4, 8, 16, 32, 64)),
    "operations": (_long, (8, 25, 80, 250, 820)),
    "large": (_large, (405, 175, 816)),
    "others": (_other, (24, 46, 48, 40, 32)),
    "long": (_of_length, (1 << 15, 1 << 17, 1 << 20)),
}


def measured(point: Point, memory: float) -> Sample:
    """A search in a process of its own."""
    curve, place = point
    command = [sys.executable, "-m", "benchmarks.scale", "--one", curve, str(place), "--memory", str(memory)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True)
    return Sample(**json.loads(done.stdout.splitlines()[-1]))


def report(samples: Mapping[Point, Sample]) -> Report:
    """A table for each curve, and its exponents."""
    parts: list[Part] = []
    columns = ("point", "mesh", ">operations", ">trace", ">search", ">CPU", ">gap", ">memory")
    for curve, (case_of, _) in CURVES.items():
        own = {place: sample for (name, place), sample in samples.items() if name == curve}
        if not own:
            continue
        rows = [_row(case_of(place), sample) for place, sample in own.items()]
        parts.append(Table(columns, tuple(rows)))
        if curve not in ("large", "others"):
            slopes = {what: exponent(list(own), [getattr(one, what) for one in own.values()]) for what in ("search", "cpu", "nbytes")}
            said = ", ".join(f"{what} {slope:.2f}" for what, slope in slopes.items())
            least, most = min(one.search for one in own.values()), max(one.search for one in own.values())
            parts.append(Paragraph(f"By {curve} to the power of: {said}. The longest search is {most / least:.1f} times the shortest."))
    return Report(SUMMARY, tuple(parts))


def _row(case: Case, sample: Sample) -> tuple[str, ...]:
    mesh = " x ".join(map(str, sample.mesh.values()))
    seconds = map(format_seconds, (sample.trace, sample.search, sample.cpu))
    return case.name, mesh, format_count(sample.n_ops), *seconds, format_percent(sample.gap), format_bytes(sample.nbytes)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=SUMMARY)
    parser.add_argument("--curves", nargs="+", choices=tuple(CURVES), default=[*CURVES], help="some of them")
    parser.add_argument("--most", type=int, metavar="N", help="points up to so many devices, layers and dense layers only")
    parser.add_argument("--memory", type=float, default=12.0, metavar="GB", help="address space that a search may use (default 12)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    parser.add_argument("--one", nargs=2, metavar=("CURVE", "N"), help="measure one point in this process, and print it as JSON")
    options = parser.parse_args(argv)
    if options.one:
        limit = int(options.memory * 1e9)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        curve, place = options.one
        print(json.dumps(asdict(measure(CURVES[curve][0](int(place))))))
        return 0
    points = [(curve, place) for curve in options.curves for place in CURVES[curve][1] if options.most is None or place <= options.most]
    samples: dict[Point, Sample] = {}
    with progress_bar(options.json) as progress:
        task = progress.add_task("", total=len(points))
        for point in points:
            progress.update(task, description=f"{point[0]}: {point[1]}")
            samples[point] = measured(point, options.memory)
            progress.advance(task)
    if options.json:
        print(json.dumps([{"curve": curve, "place": place, **asdict(sample)} for (curve, place), sample in samples.items()], indent=1))
    else:
        show(report(samples))
    return 0


if __name__ == "__main__":
    sys.exit(main())
