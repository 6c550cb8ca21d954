"""Where memory binds, is the default search as fast as the best of all products of options, and how long does it take?

``python -m benchmarks.limits`` searches ten train steps within 0.9, 0.6, 0.45 and 0.3 of the peak of the fastest plan without a limit, as
users do who give no other option. Beside it are all products of 1, 2, 4 and 8 microbatches, of no recomputation, half of it, all of it and
`jax.checkpoint` around each layer by hand, and of the searchers ``auto`` and ``fully_sharded``. Each product is searched without a limit
first; within one only where it would be faster than the best that fits, since a limit makes no plan faster. Shown are the step time of the
default in shares of the best product's, and its seconds of the processor in shares of a plain search's, without a limit, microbatches or
recomputation; tracing is part of both. A simpler plan that is equal to the fastest within the model's error is taken on purpose, and counts
as near. ``--products FILE`` keeps each product, which take minutes for each program, for the next run; ``--microbatches``, ``--keeping``
and ``--searchers`` take some of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import autoshard
from autoshard.cli.terminal import show
from autoshard.cluster.catalogue import PAIR_ERROR
from autoshard.errors import AutoshardError, InfeasibleError
from autoshard.ir.remat import Remat
from autoshard.plan.forms import Form
from autoshard.plan.prepared import Prepared, prepare, searched_on_meshes
from autoshard.plan.request import Request
from autoshard.recompute import Options
from autoshard.render import Paragraph, Report, Table, format_bytes, format_seconds
from autoshard.run.tracing import TracedOnce
from autoshard.search import searcher_of
from benchmarks.models import Program, dlrm, encoder_decoder, gpt, llama, moe, unet, vit
from benchmarks.other_models import diffusion, state_space

SUMMARY = "Where memory binds, is the default search as fast as the best of all products of options, and how long does it take?"
CLUSTER = "v5e:2x4"
LIMITS = (0.9, 0.6, 0.45, 0.3)  # of the plain peak
NUMBERS = (1, 2, 4, 8)
KEEPING = ("none", "half", "full", "by hand")
SEARCHERS = ("auto", "fully_sharded")
UNLIMITED_BYTES = 1e15
MOST_SHARE = 1.01  # of the best product's step time
EQUAL = "within the model's error"  # what notes say of a plan that is taken since it is simpler
PROGRAMS: dict[str, Callable[..., Program]] = {
    "gpt": partial(gpt, 2, batch=64),
    "gpt_scan": partial(gpt, 8, batch=64, scan=True),
    "llama": partial(llama, 2, 1024, 8, 4, 2816, 32_768, batch=64, length=1024),
    "moe": partial(moe, 2, batch=64),
    "t5": partial(encoder_decoder, 2, batch=64),
    "vit": partial(vit, 2, batch=512),
    "unet": partial(unet, batch=256, side=64),
    "dit": partial(diffusion, 2),
    "mamba": partial(state_space, 2),
    "dlrm": partial(dlrm, rows=50_000),
}
WITHOUT_LAYERS = ("dlrm",)  # around which there could be checkpoints
Asked = tuple[int, str, str]
"""A product by its microbatches, what it keeps, and its searcher."""


@dataclass(frozen=True, slots=True)
class Product:
    """A product of options, its step time and its peak, without a limit; and within limits, by their bytes, where it was searched there."""

    microbatches: int
    keeping: str
    searcher: str
    seconds: float
    peak_bytes: float
    within: dict[str, float] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The options, in words."""
        return f"{self.microbatches} x {self.keeping}, {self.searcher}"


@dataclass(frozen=True, slots=True)
class Row:
    """A limit: the default's step time, peak and form, seconds of the processor, those of a plain search, and the best product."""

    program: str
    share: float
    limit_bytes: float
    seconds: float
    peak_bytes: float
    form: str
    search_seconds: float
    plain_seconds: float
    best_seconds: float
    best: str
    why: str = ""
    is_equal: bool = False

    @property
    def is_near(self) -> bool:
        """Whether the default is as fast as the best product, or one of the plans that are equal to the fastest."""
        return self.ratio <= (1 + PAIR_ERROR if self.is_equal else MOST_SHARE)

    @property
    def ratio(self) -> float:
        """The default's step time in shares of the best product's; infinite where the default alone finds nothing."""
        return 1.0 if self.seconds == self.best_seconds else self.seconds / self.best_seconds


class Steps:
    """The step of a program with and without checkpoints by hand, and searches of it."""

    def __init__(self, name: str, cluster: str):
        self.name, self.cluster = name, cluster
        plain = {} if name in WITHOUT_LAYERS else {"remat": False}
        self.step, self.arguments = PROGRAMS[name](**plain)
        self.by_hand = self.step if name in WITHOUT_LAYERS else PROGRAMS[name](remat=True)[0]
        self.once = {True: TracedOnce(self.by_hand), False: TracedOnce(self.step)}

    def search(self, **options: Any) -> autoshard.Strategy:
        """A search of the step as users write it."""
        return autoshard.search(self.step, *self.arguments, cluster=self.cluster, donate_argnums=0, **options)

    def plain(self) -> autoshard.Strategy:
        """The fastest plan without a limit."""
        return self.search(microbatches=None, remat=None, memory_limit_bytes=UNLIMITED_BYTES)

    def products(self, asked: Iterable[Asked], known: Iterable[Product]) -> Iterator[Product]:
        """Each product that is asked for and not known, without a limit; of infinite seconds where there is none."""
        there = {(each.microbatches, each.keeping, each.searcher) for each in known}
        for n, kept, searcher in asked:
            if (n, kept, searcher) in there or (kept == "by hand" and self.name in WITHOUT_LAYERS):
                continue
            try:
                yield Product(n, kept, searcher, *self.searched(n, kept, searcher, math.inf))
            except AutoshardError:
                yield Product(n, kept, searcher, math.inf, math.inf)

    def searched(self, n: int, keeping: str, searcher: str, limit: float) -> tuple[float, float]:
        """The step time and the peak of a product within a limit."""
        prepared, value = self._prepared(n, keeping, searcher), searcher_of(searcher)
        solution, problem = searched_on_meshes(prepared, value, autoshard.progress.silent, (), 4, None, limit)
        best = prepared.overlapped((solution, *solution.others), problem)[0].judgement.cost
        return best.makespan_seconds, best.peak_bytes

    def _prepared(self, n: int, keeping: str, searcher: str) -> Prepared:
        once = self.once[keeping == "by hand"]
        asked = Request.of(cluster=self.cluster, searcher=searcher, memory_limit_bytes=UNLIMITED_BYTES, donate_argnums=0)
        again = None if keeping in ("none", "by hand") else _again(prepare(once, self.arguments, asked), keeping)
        return prepare(once, self.arguments, asked, Form(n, again))


def _again(prepared: Prepared, keeping: str) -> Remat:
    """The recomputation that saves most, or about half of that."""
    options = Options(prepared.traced, prepared.facts, prepared.cluster.device)
    if options.full is None:
        raise InfeasibleError("There is nothing to compute again. Leave this product out.")
    half = (options.full.kept_bytes + options.full.plain_bytes) / 2
    return options.full if keeping == "full" else min(options.all, key=lambda each: abs(each.kept_bytes - half))


def cpu_seconds() -> float:
    """The seconds of processors that this process has taken, with those of its copies that have ended."""
    return sum(os.times()[:4])


def best_within(steps: Steps, products: Sequence[Product], limit: float) -> Product | None:
    """The fastest product within a limit; None: none fits. What is searched within it is kept."""
    key = f"{limit:.0f}"
    for each in products:
        if each.peak_bytes <= limit:
            each.within[key] = each.seconds
    for each in sorted(products, key=lambda each: each.seconds):
        least = min((other.within.get(key, math.inf) for other in products), default=math.inf)
        if key not in each.within and each.seconds < least:
            each.within[key] = _within(steps, each, limit)
    best = min(products, key=lambda each: each.within.get(key, math.inf))
    return best if best.within.get(key, math.inf) < math.inf else None


def _within(steps: Steps, each: Product, limit: float) -> float:
    try:
        return steps.searched(each.microbatches, each.keeping, each.searcher, limit)[0]
    except AutoshardError:
        return math.inf


def rows(
    name: str, cluster: str, shares: Sequence[float], asked: Sequence[Asked], products: list[Product], keep: Callable[[], None]
) -> Iterator[Row]:
    """The rows of a program.

    Args:
        asked: the products by their options.
        products: those that are known, to which others are added.
        keep: is called after each of these.
    """
    steps, started = Steps(name, cluster), cpu_seconds()
    plain = steps.plain()
    plain_seconds = cpu_seconds() - started
    for each in steps.products(asked, products):
        products.append(each)
        keep()
    for share in shares:
        limit, started = share * plain.cost.peak_bytes, cpu_seconds()
        found, why = None, ""
        try:
            found = steps.search(memory_limit_bytes=limit)
        except AutoshardError as error:
            why = str(error)
        seconds = cpu_seconds() - started
        best = best_within(steps, products, limit)
        keep()
        figures = (math.inf, math.inf, "") if found is None else (found.cost.makespan_seconds, found.cost.peak_bytes, _form(found))
        others = (math.inf, "") if best is None else (best.within[f"{limit:.0f}"], best.name)
        is_equal = found is not None and any(EQUAL in note for note in found.notes)
        yield Row(name, share, limit, *figures, seconds, plain_seconds, *others, why, is_equal)


def _form(found: autoshard.Strategy) -> str:
    remat = found.record.program.remat
    return f"{found.microbatches} x {'none' if remat is None else format(remat.kept_bytes / remat.plain_bytes, '.0%')}"


def report(found: Sequence[Row], cluster: str) -> Report:
    """The table, and what of it reaches the goals."""
    columns = ("program", ">limit", ">default", "form", ">best product", "", ">ratio", ">search", ">of plain")
    cells = [
        (
            each.program,
            f"{each.share:g}, {format_bytes(each.limit_bytes)}",
            format_seconds(each.seconds) if math.isfinite(each.seconds) else "refused",
            each.form,
            format_seconds(each.best_seconds) if math.isfinite(each.best_seconds) else "refused",
            each.best,
            f"{each.ratio:.3f}",
            f"{each.search_seconds:.1f} s",
            f"{each.search_seconds / each.plain_seconds:.1f} x",
        )
        for each in found
    ]
    times = [each.search_seconds / each.plain_seconds for each in found]
    near = sum(each.is_near for each in found)
    text = f"{near} of {len(found)} are within {MOST_SHARE - 1:.0%} of the best product, or equal to it and simpler."
    if times:
        text += f" Searches take {statistics.median(times):.1f} times as long as plain ones in the median, {max(times):.1f} at most."
    return Report(f"Searches within memory limits on {cluster}", (Table(columns, tuple(cells)), Paragraph(text)))


def main(argv: Sequence[str] | None = None) -> int:
    """Searches and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.limits", description=SUMMARY)
    parser.add_argument("--programs", nargs="+", choices=tuple(PROGRAMS), default=[*PROGRAMS], help="some programs only")
    parser.add_argument("--limits", nargs="+", type=float, default=LIMITS, metavar="SHARE", help="of the plain peak")
    parser.add_argument("--cluster", default=CLUSTER)
    parser.add_argument("--searchers", nargs="+", choices=SEARCHERS, default=[*SEARCHERS], help="of the products")
    parser.add_argument("--microbatches", nargs="+", type=int, default=[*NUMBERS], help="of the products")
    parser.add_argument("--keeping", nargs="+", choices=KEEPING, default=[*KEEPING], help="of the products")
    parser.add_argument("--products", type=Path, metavar="FILE", help="products that are known, to which new ones are added")
    parser.add_argument("--json", action="store_true", help="print JSON, a line for each row")
    asked = parser.parse_args(argv)
    options = [*product(asked.microbatches, asked.keeping, asked.searchers)]
    found: list[Row] = []
    try:
        for name in asked.programs:
            products = [Product(**each) for each in _known(asked.products).get(name, [])]
            for row in rows(name, asked.cluster, asked.limits, options, products, partial(_keep, asked.products, name, products)):
                found.append(row)
                if asked.json:
                    print(json.dumps(asdict(row)), flush=True)
    except KeyboardInterrupt:
        print(f"interrupted after {len(found)} rows", file=sys.stderr)
    if not asked.json:
        show(report(found, asked.cluster))
    return 0


def _known(file: Path | None) -> dict[str, Any]:
    """The products that a file has, by program."""
    return json.loads(file.read_text()) if file is not None and file.exists() else {}


def _keep(file: Path | None, name: str, products: Sequence[Product]) -> None:
    if file is not None:
        file.write_text(json.dumps({**_known(file), name: [asdict(each) for each in products]}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
