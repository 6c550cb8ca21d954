"""Is the peak memory that of the compiler?

Predicted peak bytes of a device next to XLA:TPU's own buffer assignment (``memory_analysis().peak_memory_in_bytes``), on programs of a
gigabyte and more. The model was designed on one half of them; the others are of sizes, meshes, slices and dtypes that it had not seen.
Those are compiled for v5p, too, whose compiler keeps more in its faster memory.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from functools import partial

import jax.numpy as jnp

import autoshard
from autoshard.progress import Progress
from autoshard.render import Table, format_bytes
from benchmarks.cost_model.compiled import NO_LIMIT, Case, compiled
from benchmarks.cost_model.findings import Findings, Target, quantile
from benchmarks.other_models import graph_network, state_space, windows
from benchmarks.single_dtype import dlrm, encoder_decoder, gpt, gpt_scan, llama, lstm, mlp, moe, resnet, unet, vit

F32 = jnp.float32
HOW = ("data_parallel", "fully_sharded", "recursive_programming")
SMALLEST_BYTES = 1e9

Program = tuple[str, Callable, str, dict[str, int]]
"""A name, the model's maker, a cluster and a mesh."""

DESIGNED: tuple[Program, ...] = (
    ("gpt 4", partial(gpt, 4, batch=64), "v5e:2x4", {"data": 2, "model": 4}),
    ("gpt 3 f32", partial(gpt, 3, width=1536, heads=12, batch=32, dtype=F32, gathers=False), "v5e:2x4", {"data": 4, "model": 2}),
    ("gpt_scan 8", gpt_scan, "v5e:2x4", {"data": 2, "model": 4}),
    ("gpt_scan 12 remat", partial(gpt_scan, layers=12, batch=128, remat=True), "v5e:2x4", {"data": 4, "model": 2}),
    ("moe 2", moe, "v5e:2x4", {"data": 2, "model": 4}),
    ("resnet", resnet, "v5e:2x4", {"data": 4, "model": 2}),
    ("unet", unet, "v5e:2x4", {"data": 4, "model": 2}),
    ("lstm 2", lstm, "v5e:2x4", {"data": 2, "model": 4}),
    ("lstm 3 f32", partial(lstm, layers=3, batch=256, length=128, dtype=F32), "v5e:2x4", {"data": 8}),
    (
        "moe 4 of 16",
        partial(moe, layers=4, width=768, heads=12, experts=16, vocabulary=16_384, length=512),
        "v5e:2x4",
        {"data": 2, "model": 4},
    ),
    ("resnet large", partial(resnet, batch=512), "v5e:2x4", {"data": 8}),
    ("lstm 3 wide", partial(lstm, layers=3, width=1280, vocabulary=12_000, batch=256, length=160), "v5e:2x4", {"data": 8}),
    (
        "moe 4 of 32",
        partial(moe, layers=4, width=512, heads=8, experts=32, vocabulary=32_000, batch=96, length=512),
        "v5e:2x4",
        {"data": 2, "model": 4},
    ),
    ("llama 4", partial(llama, 4, 1024, 8, 8, 2816, 50_304, batch=32, remat=False, length=1024), "v5e:2x4", {"data": 8}),
    ("lstm 2 f32 wide", partial(lstm, 2, 1536, 10_000, 160, 128, dtype=F32), "v5e:2x4", {"data": 2, "model": 4}),
    ("dlrm narrow", partial(dlrm, rows=3_000_000, width=64), "v5e:2x4", {"data": 8}),
    ("windows", windows, "v5e:2x4", {"data": 8}),
    ("graph network", graph_network, "v5e:2x4", {"data": 8}),
    ("state space", state_space, "v5e:2x4", {"data": 8}),
)
UNSEEN: tuple[Program, ...] = (
    ("gpt 6 wide", partial(gpt, 6, width=2048, vocabulary=50_304, batch=64), "v5e:4x4", {"data": 4, "model": 4}),
    ("gpt 2 wider", partial(gpt, 2, width=4096, heads=32, vocabulary=16_384, batch=16, length=2048, gathers=False), "v5e:2x4", {"data": 8}),
    ("gpt_scan 24 remat", partial(gpt_scan, layers=24, batch=128, length=512, remat=True), "v5e:4x4", {"data": 4, "model": 4}),
    ("gpt_scan 6 f32", partial(gpt_scan, layers=6, width=1536, heads=12, vocabulary=24_576, batch=32, dtype=F32), "v5e:2x4", {"data": 8}),
    ("moe 2 f32", partial(moe, layers=2, dtype=F32), "v5e:4x4", {"data": 4, "model": 4}),
    ("unet resizing", partial(unet, resizes=True, batch=384), "v5e:2x4", {"data": 8}),
    ("vit 6", partial(vit, 6, 640, 10, batch=512), "v5e:2x4", {"data": 8}),
    ("encoder-decoder 4", partial(encoder_decoder, 4, 512, 8, batch=128, length=512), "v5e:2x4", {"data": 4, "model": 2}),
    ("gpt 5", partial(gpt, 5, width=1280, heads=10, vocabulary=50_000, batch=48, length=768), "v5e:2x4", {"data": 4, "model": 2}),
    ("gpt 6 remat", partial(gpt, 6, width=1152, heads=9, vocabulary=32_000, batch=64, remat=True), "v5e:2x4", {"data": 4, "model": 2}),
    (
        "gpt_scan 10",
        partial(gpt_scan, layers=10, width=1280, heads=20, batch=64, length=512, vocabulary=24_000),
        "v5e:4x4",
        {"data": 4, "model": 4},
    ),
    (
        "moe 3 sorted",
        partial(moe, 3, width=896, heads=14, experts=8, batch=64, length=512, sorts=True),
        "v5e:2x4",
        {"data": 2, "model": 4},
    ),
    ("resnet f32", partial(resnet, channels=48, batch=320, dtype=F32), "v5e:2x4", {"data": 4, "model": 2}),
    ("unet 3", partial(unet, 3, channels=96, batch=192), "v5e:2x4", {"data": 8}),
    (
        "llama_scan 6",
        partial(llama, 6, 1280, 10, 5, 3456, 32_000, batch=64, scan=True, remat=False, length=512),
        "v5e:2x4",
        {"data": 4, "model": 2},
    ),
    ("llama 5 remat", partial(llama, 5, 1536, 12, 6, 4096, 64_000, batch=32, length=1024), "v5e:4x4", {"data": 4, "model": 4}),
    ("vit 4 f32", partial(vit, 4, 896, 14, batch=192, dtype=F32), "v5e:2x4", {"data": 8}),
    (
        "encoder-decoder 3 f32",
        partial(encoder_decoder, 3, 640, 10, batch=64, length=384, vocabulary=24_000, dtype=F32),
        "v5e:2x4",
        {"data": 4, "model": 2},
    ),
    ("mlp 6", partial(mlp, 6, width=3072, hidden=12_288, batch=32_768), "v5e:2x4", {"data": 2, "model": 4}),
)


ON_V5P: tuple[Program, ...] = tuple(
    (name, make, {"v5e:2x4": "v5p:2x2x2", "v5e:4x4": "v5p:2x2x4"}[cluster], mesh) for name, make, cluster, mesh in UNSEEN
)


def cases(programs: tuple[Program, ...]) -> Iterator[Case]:
    """Each program under each strategy."""
    for name, make, cluster, mesh in programs:
        function, args = make()
        for how in HOW:
            found = autoshard.search(
                function, *args, cluster=cluster, mesh=mesh, searcher=how, donate_argnums=0, memory_limit_bytes=NO_LIMIT
            )
            yield Case(name, how, cluster, function, args, found)


def run(quick: bool, progress: Progress) -> Findings:
    """Every program's peak, predicted and compiled."""
    rows, numbers = [], []
    groups = {"designed on": DESIGNED, "unseen": UNSEEN, "on v5p": ON_V5P}
    groups = {group: programs[:2] if quick else programs for group, programs in groups.items()}
    errors: dict[str, list[float]] = {group: [] for group in groups}
    total, done = len(HOW) * sum(map(len, groups.values())), 0
    for group, programs in groups.items():
        for case in cases(programs):
            progress(case.title, done / total)
            done += 1
            ahead = compiled(case)
            if ahead.peak_bytes is None or ahead.peak_bytes < SMALLEST_BYTES:
                continue
            predicted = case.strategy.cost.peak_bytes
            error = predicted / ahead.peak_bytes - 1
            errors[group].append(error)
            rows.append((group, case.title, format_bytes(predicted), format_bytes(ahead.peak_bytes), f"{100 * error:+.1f} %"))
            numbers.append({"case": case.title, "group": group, "predicted": predicted, "compiled": ahead.peak_bytes, "error": error})
    targets = tuple(target for group, found in errors.items() for target in targets_of(group, found))
    return Findings("peak memory of a device", (Table(("", "program", ">predicted", ">compiled", ">error"), tuple(rows)),), targets,
                    {"cases": numbers})  # fmt: skip


def targets_of(group: str, errors: list[float]) -> tuple[Target, ...]:
    """The numbers to reach of a group of programs, by their errors."""
    sizes = [100 * abs(error) for error in errors]
    median, nine = statistics.median(sizes) if sizes else float("nan"), quantile(sizes, 0.9)
    below = -100 * min(errors, default=0.0)
    return (
        Target(f"median error, {group}, %", "<= 8", median, median <= 8),
        Target(f"error of nine in ten, {group}, %", "<= 15", nine, nine <= 15),
        Target(f"furthest below, {group}, %", "<= 10", below, below <= 10),
    )
