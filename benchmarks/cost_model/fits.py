"""Does the model know what fits?

Programs around the limits of three chips' memories, grown in steps from what fits to what the TPU compiler refuses. Never should one be
predicted to fit that is refused; at most one in ten that compiles may be predicted not to.

Near the limit XLA computes some of what it stored again, and so makes programs fit that would not: instructions named ``.remat``. That
takes time which nobody predicted, so the model does not count on it: what fits as it is stands apart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import jax.numpy as jnp

import autoshard
from autoshard.cluster import Cluster
from autoshard.render import Table, format_bytes
from autoshard.search.searcher import Progress
from benchmarks.cost_model.compiled import NO_LIMIT, Case, compiled
from benchmarks.cost_model.findings import Findings, Target
from benchmarks.models import Program, gpt, gpt_scan, llama, lstm, moe, resnet, unet

MESH = {"data": 8}
REMATERIALISED = ".remat"  # in the names that XLA gives what it computes again
DP, FS = "data_parallel", "fully_sharded"

Grown = tuple[str, Callable[[int], Program], str, str, tuple[int, ...]]
"""A name, the model's maker by its size, a strategy, a cluster and the sizes."""

SMALL_LLAMA = partial(llama, 4, width=2048, heads=16, kv_heads=4, ffn=5504, vocabulary=32_768)
GROWN: tuple[Grown, ...] = (
    ("gpt_scan, batch", lambda n: gpt_scan(batch=n), DP, "v5e:2x4", (72, 80, 88, 96)),
    ("gpt_scan, batch", lambda n: gpt_scan(batch=n), FS, "v5e:2x4", (80, 88, 96)),
    ("gpt_scan remat, batch", lambda n: gpt_scan(layers=16, batch=n, remat=True), FS, "v5e:2x4", (512, 544, 576)),
    ("gpt, batch", lambda n: gpt(6, width=2048, batch=n, length=512), DP, "v5e:2x4", (384, 416, 448)),
    ("gpt, batch", lambda n: gpt(6, width=2048, batch=n, length=512), FS, "v5e:2x4", (416, 448, 480)),
    ("gpt f32, width", lambda n: gpt(4, width=n, heads=n // 128, batch=16, dtype=jnp.float32), DP, "v5e:2x4", (3584, 3840, 4096)),
    ("moe, batch", lambda n: moe(2, batch=n), DP, "v5e:2x4", (352, 384, 416)),
    ("moe, batch", lambda n: moe(4, batch=n), FS, "v5e:2x4", (256, 272, 288)),
    ("resnet, batch", lambda n: resnet((1, 2, 2, 1), batch=n), DP, "v5e:2x4", (7168, 8192, 9216)),
    ("resnet, batch", lambda n: resnet(batch=n), FS, "v5e:2x4", (9216, 10_240, 11_264)),
    ("unet, batch", lambda n: unet(batch=n), DP, "v5e:2x4", (1792, 2048, 2304)),
    ("unet, batch", lambda n: unet(3, batch=n), FS, "v5e:2x4", (1408, 1536, 1664)),
    ("lstm, batch", lambda n: lstm(batch=n), DP, "v5e:2x4", (512, 576, 640)),
    ("lstm, batch", lambda n: lstm(batch=n), FS, "v5e:2x4", (832, 896, 960)),
    ("llama, batch", lambda n: SMALL_LLAMA(batch=n), FS, "v5e:2x4", (256, 288, 320)),
    ("llama scan, batch", lambda n: llama(8, batch=n, scan=True), FS, "v5p:2x2x2", (416, 448, 480)),
    ("gpt_scan, batch", lambda n: gpt_scan(batch=n), DP, "v6e:2x4", (160, 176, 192)),
    ("gpt, batch", lambda n: gpt(6, width=2048, batch=n, length=512), FS, "v6e:2x4", (832, 896, 960)),
)


def cases(quick: bool) -> Iterator[Case]:
    """Each program of each size."""
    for name, make, how, cluster, sizes in _rows(quick):
        for size in sizes:
            function, args = make(size)
            found = autoshard.search(
                function, *args, cluster=cluster, mesh=MESH, searcher=how, donate_argnums=0, memory_limit_bytes=NO_LIMIT
            )
            yield Case(f"{name} {size}", how, cluster, function, args, found)


def _rows(quick: bool) -> tuple[Grown, ...]:
    return GROWN[:1] if quick else GROWN


def run(quick: bool, progress: Progress) -> Findings:
    """Every program, predicted to fit or not, compiled or refused."""
    rows, numbers = [], []
    total = sum(len(sizes) for *_, sizes in _rows(quick))
    for number, case in enumerate(cases(quick)):
        progress(case.title, number / total)
        ahead = compiled(case)
        predicted, limit = case.strategy.cost.peak_bytes, Cluster.parse(case.cluster).memory_limit_bytes
        said = predicted <= limit
        again = REMATERIALISED in ahead.hlo
        compiler = "computes again" if again else "compiles" if ahead.fits else "refused"
        words = "right" if said == ahead.fits else "WRONG: does not fit" if said else "wrong: it fits"
        sizes = (format_bytes(nbytes) for nbytes in (limit, predicted, ahead.needed_bytes))
        rows.append((case.title, *sizes, compiler, words))
        found = {"limit": limit, "predicted": predicted, "needed": ahead.needed_bytes, "again": again}
        numbers.append({"case": case.title, "fits": ahead.fits, "said": said, **found})
    count = Counter((one["said"], one["fits"]) for one in numbers)
    wrong = count[True, False]
    targets = (
        Target("programs", ">= 40", len(numbers), len(numbers) >= 40),
        Target("predicted to fit, refused", "0", wrong, wrong == 0),
        _spurned("those that compile", [one["said"] for one in numbers if one["fits"]]),
        _spurned("those that compile as they are", [one["said"] for one in numbers if one["fits"] and not one["again"]]),
    )
    tables = (
        Table(("program", ">limit", ">predicted", ">needed", "compiler", "prediction"), tuple(rows)),
        Table(("", ">compiles", ">refused"), (("predicted to fit", str(count[True, True]), str(wrong)),
                                              ("predicted not to", str(count[False, True]), str(count[False, False])))),
    )  # fmt: skip
    return Findings("what fits a chip", tables, targets, {"cases": numbers})


def _spurned(which: str, said: list[bool]) -> Target:
    share = 100 * said.count(False) / max(len(said), 1)
    return Target(f"predicted not to fit, of {which}, %", "<= 10", share, share <= 10)
