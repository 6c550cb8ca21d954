"""Does the model know what fits?

Programs around the limits of three chips' memories, grown in steps from what fits to what the TPU compiler refuses. Never should one be
predicted to fit that is refused; at most one in ten that compiles may be predicted not to. As for a search, what is predicted to leave
less than the reserve does not fit.

Near the limit XLA computes some of what it stored again, and so makes programs fit that would not: instructions named ``.remat``. So does
the model (`compilers.tpu.rematerialisation`): a program fits as scheduled, or once that is done. What compiles as it is stands apart, and
so do programs that were added later: what else is trained, other chips, and further above their memory.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import jax.numpy as jnp

import autoshard
from autoshard.cluster import Cluster
from autoshard.plan.prepared import RESERVE
from autoshard.progress import Progress
from autoshard.render import Table, format_bytes
from benchmarks.cost_model.compiled import NO_LIMIT, Case, compiled
from benchmarks.cost_model.findings import Findings, Target
from benchmarks.models import Program
from benchmarks.single_dtype import encoder_decoder, gpt, gpt_scan, llama, lstm, mlp, moe, resnet, unet, vit
from benchmarks.unseen_models import gan

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


# Added once what is computed again was modelled, and sized to be around what that reaches; no rule was changed for them.
UNSEEN: tuple[Grown, ...] = (
    ("vit, batch", lambda n: vit(batch=n), DP, "v5e:2x4", (8064, 8640)),
    ("vit, batch", lambda n: vit(batch=n), FS, "v6e:2x4", (16_000, 17_152, 18_432)),
    ("encoder-decoder, batch", lambda n: encoder_decoder(batch=n), DP, "v5e:2x4", (512, 552, 592)),
    ("encoder-decoder, batch", lambda n: encoder_decoder(batch=n), FS, "v6e:2x4", (1048, 1120, 1200)),
    ("gan, batch", lambda n: gan(batch=n), DP, "v5e:2x4", (199_488, 214_336)),
    ("gan, batch", lambda n: gan(batch=n), FS, "v6e:2x4", (353_472, 378_176, 406_464)),
    ("mlp, batch", lambda n: mlp(6, batch=n), DP, "v5e:2x4", (200_704, 221_184)),
    ("mlp of wide layers, batch", lambda n: mlp(3, width=2048, hidden=32_768, batch=n), FS, "v5p:2x2x2", (3_006_464, 3_178_496)),
    ("gpt f32, batch", lambda n: gpt(4, batch=n, dtype=jnp.float32), DP, "v5e:2x4", (200, 216)),
    ("gpt remat, batch", lambda n: gpt(6, batch=n, remat=True), DP, "v5e:2x4", (560, 600, 640)),
    ("gpt of long texts, batch", lambda n: gpt(1, batch=n, length=4096), DP, "v5e:2x4", (88, 96, 104)),
    ("gpt, batch", lambda n: gpt(4, width=2048, batch=n), FS, "v5p:2x2x2", (1600, 1664, 1792)),
    ("moe, batch", lambda n: moe(4, batch=n), FS, "v5p:2x2x2", (1600, 1728, 1856)),
    ("moe that sorts, batch", lambda n: moe(2, batch=n, sorts=True), DP, "v5e:2x4", (336, 360, 392)),
    ("lstm, batch", lambda n: lstm(4, batch=n), DP, "v6e:2x4", (6528, 6632, 7216)),
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
    return GROWN[:1] if quick else (*GROWN, *UNSEEN)


def run(quick: bool, progress: Progress) -> Findings:
    """Every program, predicted to fit or not, compiled or refused."""
    rows, numbers = [], []
    total = sum(len(sizes) for *_, sizes in _rows(quick))
    designed = sum(len(sizes) for *_, sizes in GROWN)
    for number, case in enumerate(cases(quick)):
        progress(case.title, number / total)
        ahead = compiled(case)
        predicted, limit = case.strategy.cost.peak_bytes, Cluster.parse(case.cluster).memory_limit_bytes
        computed_again = case.strategy.cost.recomputation
        said = predicted <= (1 - RESERVE) * limit or computed_again is not None
        again = REMATERIALISED in ahead.hlo
        compiler = "computes again" if again else "compiles" if ahead.fits else "refused"
        words = "right" if said == ahead.fits else "WRONG: does not fit" if said else "wrong: it fits"
        reached = format_bytes(computed_again.peak_bytes) if computed_again else ""
        sizes = format_bytes(limit), format_bytes(predicted), reached, format_bytes(ahead.needed_bytes)
        rows.append((case.title, *sizes, compiler, words))
        found = {"limit": limit, "predicted": predicted, "needed": ahead.needed_bytes, "again": again}
        numbers.append({"case": case.title, "fits": ahead.fits, "said": said, "unseen": number >= designed, **found})
    seen, unseen = ([one for one in numbers if one["unseen"] == there] for there in (False, True))
    as_they_are = [one for one in seen if one["fits"] and not one["again"]]
    targets = (
        Target("programs", ">= 40", len(seen), len(seen) >= 40),
        *_told("", seen),
        _spurned("those that compile as they are", as_they_are),
        *(_told("added later: ", unseen) if unseen else ()),
    )
    columns = "program", ">limit", ">predicted", ">again", ">needed", "compiler", "prediction"
    tables = Table(columns, tuple(rows)), _counted("", seen), *([_counted("added later", unseen)] if unseen else [])
    return Findings("what fits a chip", tables, targets, {"cases": numbers})


def _counted(which: str, numbers: list[dict]) -> Table:
    count = Counter((one["said"], one["fits"]) for one in numbers)
    rows = (
        (words, str(count[said, True]), str(count[said, False]))
        for said, words in ((True, "predicted to fit"), (False, "predicted not to"))
    )
    return Table((which, ">compiles", ">refused"), tuple(rows))


def _told(which: str, numbers: list[dict]) -> tuple[Target, ...]:
    """What is asked of a set of programs."""
    wrong = sum(one["said"] and not one["fits"] for one in numbers)
    return (
        Target(f"{which}predicted to fit, refused", "0", wrong, wrong == 0),
        _spurned("those that compile", [one for one in numbers if one["fits"]], which),
    )


def _spurned(what: str, numbers: list[dict], which: str = "") -> Target:
    share = 100 * sum(not one["said"] for one in numbers) / max(len(numbers), 1)
    return Target(f"{which}predicted not to fit, of {what}, %", "<= 10", share, share <= 10)
