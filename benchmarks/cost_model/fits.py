"""Does the model know what fits?

Programs around the limit of a v5e's memory, grown in steps from what fits easily to what the TPU compiler refuses. Never should one be
predicted to fit that is refused; at most one in ten that compiles may be predicted not to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import jax.numpy as jnp

import autoshard
from autoshard.cluster import Cluster
from autoshard.render import Table, format_bytes
from autoshard.search.searcher import Progress
from benchmarks.cost_model.compiled import NO_LIMIT, Case, compiled
from benchmarks.cost_model.findings import Findings, Target
from benchmarks.models import gpt, gpt_scan, lstm

CLUSTER = "v5e:2x4"
MESH = {"data": 8}
HOW = ("data_parallel", "fully_sharded")
GROWN: tuple[tuple[str, Callable, tuple[int, ...]], ...] = (
    ("gpt_scan, batch", lambda n: gpt_scan(batch=n), (64, 72, 80, 88, 96)),
    ("gpt_scan remat, batch", lambda n: gpt_scan(layers=16, batch=n, remat=True), (256, 320, 384, 448)),
    ("gpt, batch", lambda n: gpt(8, width=2048, batch=n, length=512), (256, 272, 304, 336)),
    ("gpt f32, width", lambda n: gpt(4, width=n, heads=n // 128, batch=16, dtype=jnp.float32), (3072, 3328, 3584, 4096)),
    ("lstm, batch", lambda n: lstm(batch=n), (512, 576, 640)),
)


def cases(quick: bool) -> Iterator[Case]:
    """Each program of each size under each strategy."""
    for name, make, sizes in GROWN[:1] if quick else GROWN:
        for size in sizes:
            function, args = make(size)
            search = partial(autoshard.search, cluster=CLUSTER, mesh=MESH, donate_argnums=0, memory_limit_bytes=NO_LIMIT)
            for how in HOW:
                yield Case(f"{name} {size}", how, CLUSTER, function, args, search(function, *args, searcher=how))


def run(quick: bool, progress: Progress) -> Findings:
    """Every program, predicted to fit or not, compiled or refused."""
    limit = Cluster.parse(CLUSTER).memory_limit_bytes
    rows, numbers = [], []
    total = len(HOW) * sum(len(sizes) for _, _, sizes in (GROWN[:1] if quick else GROWN))
    for number, case in enumerate(cases(quick)):
        progress(case.title, number / total)
        ahead = compiled(case)
        predicted = case.strategy.cost.peak_bytes
        said = predicted <= limit
        words = "right" if said == ahead.fits else "WRONG: does not fit" if said else "wrong: it fits"
        rows.append((case.title, format_bytes(predicted), format_bytes(ahead.needed_bytes), "compiles" if ahead.fits else "refused", words))
        numbers.append({"case": case.title, "predicted": predicted, "needed": ahead.needed_bytes, "fits": ahead.fits, "said": said})
    wrong = sum(one["said"] and not one["fits"] for one in numbers)
    compiles = [one for one in numbers if one["fits"]]
    spurned = sum(not one["said"] for one in compiles) / max(len(compiles), 1)
    targets = (
        Target("programs", ">= 40", len(numbers), len(numbers) >= 40),
        Target("predicted to fit, refused", "0", wrong, wrong == 0),
        Target("predicted not to fit, of those that compile, %", "<= 10", 100 * spurned, spurned <= 0.1),
    )
    return Findings("what fits a v5e", (Table(("program", ">predicted", ">needed", "compiler", "prediction"), tuple(rows)),), targets,
                    {"limit": limit, "cases": numbers})  # fmt: skip
