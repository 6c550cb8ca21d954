"""How many days does GPT-3 take on 300 billion tokens, by the number of devices?

``python -m benchmarks.gpt3_days`` sweeps the train step of GPT-3 175B (96 layers, mixed precision, AdamW, each layer recomputed in the
backward pass, 1,536 sequences of 2,048 tokens a step) over 8, 512 and 1,024 A100 of 80 GB, in hosts of 8. On 8 of them its parameters and
optimizer state alone are too large, so its time there is that of a search without a memory limit: what the work takes, were there room.

Megatron-LM was measured on 512 and 1,024 A100 (MegaScale, arXiv 2402.15627, table 2), with a plan of its own in stages and without
XLA's fusion: what is predicted of that plan is beside what was measured of it. The older figures to compare with are 36 years on 8 V100,
7 months on 512 V100, and a month on 1,024 A100. None counts failures or restarts. A search takes about a minute a cluster, and so does a
prediction of Megatron-LM's plan that is not kept from before; ``--layers 4`` tries it out, without these.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace

import autoshard
from autoshard import Cluster
from autoshard.cli.terminal import progress, show
from autoshard.render import Paragraph, Report, Table, format_bytes
from benchmarks.models import gpt
from benchmarks.published.board import Cache, row
from benchmarks.published.runs import read

TOKENS, BATCH, LENGTH, LAYERS = 3e11, 1536, 2048, 96
CLUSTERS = {"a100:8x1": "36 years (V100)", "a100:8x64": "7 months (V100)", "a100:8x128": "1 month"}
MEASURED = {"a100:8x64": 46.9, "a100:8x128": 26.2}  # days of Megatron-LM: MegaScale, arXiv 2402.15627, table 2; 768 sequences a step
DAY = 86_400


def megatron() -> dict[str, tuple[str, str]]:
    """By cluster the days that Megatron-LM's plan was measured to take, and those that are predicted of it."""
    run, found = next(run for run in read() if run.release == "MegaScale table 2"), {}
    for cluster, days in MEASURED.items():
        topology = cluster.partition(":")[2]
        devices = Cluster.parse(cluster).n_devices
        parts = run.microbatches * run.devices // devices
        there = row(replace(run, topology=topology, devices=devices, microbatches=parts), Cache()).found
        predicted = there.seconds * TOKENS / (run.batch * run.length) / DAY if there else math.nan
        found[cluster] = f"{days:.1f}", f"{predicted:.1f}"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=LAYERS)
    parser.add_argument("--clusters", nargs="+", default=list(CLUSTERS))
    parser.add_argument("--save", metavar="FOLDER", help="keep strategies, and go on from those that are there")
    options = parser.parse_args()
    fn, args = gpt(options.layers, width=12288, heads=96, vocabulary=50_304, batch=BATCH, length=LENGTH, remat=True)
    asked = {"tokens_per_example": LENGTH, "batches": [BATCH], "total": TOKENS, "donate_argnums": 0, "save": options.save}
    asked |= {"microbatches": None, "remat": None, "searcher": "recursive_programming"}
    with progress() as callback:
        swept = autoshard.sweep(fn, lambda _: args, clusters=options.clusters, progress=callback, **asked)
        large = [point.cluster for point in swept if point.refusal]
        unlimited = autoshard.sweep(fn, lambda _: args, clusters=large, memory_limit_bytes=math.inf, **asked) if large else ()
    rows, theirs = [], megatron() if options.layers == LAYERS else {}
    for point in sorted([*(point for point in swept if not point.refusal), *unlimited], key=lambda point: point.n_devices):
        fits = "no" if point.cluster in large else "yes"
        mesh = ", ".join(f"{name}={size}" for name, size in point.mesh.items())
        rows.append((point.cluster, mesh, f"{point.step_seconds:.2f} s", format_bytes(point.peak_bytes), fits, point.days(TOKENS)))
        rows[-1] += (f"{TOKENS * point.device_hours_per_item:,.0f}", CLUSTERS.get(point.cluster, ""))
        rows[-1] += theirs.get(point.cluster, ("", ""))
    columns = ("cluster", "mesh", ">step", ">peak memory", "fits", ">days", ">device-hours", "quoted")
    columns += (">Megatron-LM, measured", ">predicted")
    words = "Predicted, and between which days eight in ten published runs on such devices would end."
    note = Paragraph(f"{words} Where it does not fit, the time is that of a search without a memory limit.")
    show(Report(f"GPT-3 of {options.layers} layers on {TOKENS:,.0f} tokens", (Table(columns, tuple(rows)), note)))


if __name__ == "__main__":
    main()
