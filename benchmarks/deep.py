"""How good are searches of deep programs under memory limits, and do they end in time?

``python -m benchmarks.deep`` searches train steps of 24 to 96 unrolled layers on 64 to 1,024 devices, mesh free, with AdamW in float32,
under limits from twice the least peak to 1.02 times of it, in one microbatch and without recomputation but the step's own. Shown are the
predicted step, peak and gap, and the CPU seconds of the search, tracing included. With ``--seconds 10`` each is searched with that time
limit, too: something that fits has to be found wherever a baseline fits, which is checked where nothing is. The least peak is the one that
refusals name: searches below the smallest peak that is known, until one finds none that is smaller. Nothing is compiled, so any machine
will do; all of it takes hours on one core, ``--programs`` and ``--limits`` some of it, and ``--most`` ends searches that take longer.

``--table`` is the table of docs/searchers.md: four limits, with a time limit of 10 s too, none longer than 240 s. Rows are printed as they
come; ``--record`` merges each into a file of results, and ``--show`` prints that.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import autoshard
from autoshard.cli.terminal import show
from autoshard.errors import InfeasibleError, SearchLimitError
from autoshard.render import Report, Table, format_bytes, format_percent, format_seconds
from benchmarks.models import Program, gpt, llama, moe
from benchmarks.progress import progress_bar

SUMMARY = "How good are searches of deep programs under memory limits, and do they end in time?"
LIMITS = (2.0, 1.5, 1.2, 1.1, 1.05, 1.02)
TABLE = {"limits": [2.0, 1.2, 1.05, 1.02], "seconds": 10.0, "most": 240.0}
FILE = Path(__file__).parent / "results" / "deep.json"
LOWER, TRIES = 0.97, 4  # of the smallest peak that is known, the next limit; and how many there are
BASELINES = ("data_parallel", "fully_sharded", "tensor_parallel")
OPTIONS: dict[str, Any] = {"donate_argnums": 0, "microbatches": None, "remat": None}


@dataclass(frozen=True, slots=True)
class Case:
    """A program and its devices."""

    program: Callable[[], Program]
    cluster: str


CASES: dict[str, Case] = {
    "gpt-24": Case(partial(gpt, 24, 2048, 16, batch=512, length=1024), "v5e:8x8"),
    "gpt-48": Case(partial(gpt, 48, 4096, 32, batch=1024, length=2048, remat=True), "v5p:4x4x8"),
    "gpt-64": Case(partial(gpt, 64, 8192, 64, batch=1024, length=2048, remat=True), "h100:8x32"),
    "gpt-96": Case(partial(gpt, 96, 12288, 96, 50_304, 1536, 2048, remat=True), "a100:8x128"),
    "llama-32": Case(partial(llama, 32, batch=128), "h100:8x8"),
    "llama-48": Case(partial(llama, 48, 6144, 48, 8, 16_384, batch=256), "v5e:8x16"),
    "llama-80": Case(partial(llama, 80, 8192, 64, 8, 28_672, batch=512), "v5p:8x8x8"),
    "moe-24": Case(partial(moe, 24, 1024, 16, 16, batch=256), "v5e:8x8"),
    "moe-48": Case(partial(moe, 48, 2048, 16, 32, batch=512, remat=True), "h100:8x16"),
    "moe-96": Case(partial(moe, 96, 4096, 32, 64, batch=1024, remat=True), "v5p:8x8x16"),
}


@dataclass(frozen=True, slots=True)
class Row:
    """A search under a limit.

    Attributes:
        times: the limit, in least peaks.
        limit_bytes, step_seconds, peak_bytes, gap: what was found; None: nothing.
        search_seconds: of the processor.
        over: whether the search was ended by then, without an answer.
        limited_step_seconds: of what was found with a time limit; None: nothing, or not tried.
        limited_seconds: how long that took.
        fits: the baselines that fit where it found nothing.
    """

    program: str
    times: float
    limit_bytes: float
    mesh: str = ""
    step_seconds: float | None = None
    peak_bytes: float | None = None
    gap: float | None = None
    search_seconds: float = 0.0
    over: bool = False
    limited_step_seconds: float | None = None
    limited_seconds: float | None = None
    fits: tuple[str, ...] = ()


class OverTimeError(Exception):
    """A search takes longer than it may."""


def capped(seconds: float | None) -> Callable[[str, float], None]:
    """A progress callback that ends a search after so many seconds of the processor from now; None: it never does."""
    until = math.inf if seconds is None else time.process_time() + seconds

    def progress(what: str, fraction: float) -> None:
        if time.process_time() > until:
            raise OverTimeError(what)

    return progress


def least_peak(case: Case, program: Program, most: float | None = None) -> float:
    """The least peak that is found by searches of at most so many seconds, in bytes; infinite where none is."""
    least = math.inf
    limit = 1.0
    search = partial(autoshard.search, program[0], *program[1], cluster=case.cluster, **OPTIONS)
    for _ in range(TRIES):
        try:
            peak = search(memory_limit_bytes=limit, progress=capped(most)).cost.peak_bytes
        except InfeasibleError as error:
            peak = error.smallest_peak_bytes or math.inf
        except OverTimeError:
            break
        if peak >= least:
            break
        least, limit = peak, LOWER * peak
    return least


def row(name: str, program: Program, times: float, limit: float, seconds: float | None, most: float | None = None) -> Row:
    """The searches under one limit, one of which ends after so many seconds, and the other after at most so many of the processor."""
    search = partial(autoshard.search, program[0], *program[1], cluster=CASES[name].cluster, memory_limit_bytes=limit, **OPTIONS)
    started, found = time.process_time(), Row(name, times, limit)
    try:
        best = search(progress=capped(most))
        mesh = " x ".join(map(str, best.mesh_shape.values()))
        found = Row(name, times, limit, mesh, best.cost.makespan_seconds, best.cost.peak_bytes, best.gap)
    except InfeasibleError:
        pass
    except OverTimeError:
        found = Row(name, times, limit, over=True)
    values = asdict(found) | {"search_seconds": time.process_time() - started}
    if seconds is not None:
        started = time.perf_counter()
        with suppress(InfeasibleError, SearchLimitError):
            values["limited_step_seconds"] = search(time_limit_seconds=seconds).cost.makespan_seconds
        values["limited_seconds"] = time.perf_counter() - started
        if values["limited_step_seconds"] is None:
            values["fits"] = tuple(filter(partial(_fits, search), BASELINES))
    return Row(**values)


def _fits(search: Callable[..., Any], baseline: str) -> bool:
    with suppress(InfeasibleError):
        return search(searcher=baseline) is not None
    return False


def report(rows: Sequence[Row], seconds: float | None) -> Report:
    """The rows as a table."""
    columns = ["program", ">limit", ">bytes", ">mesh", ">step", ">peak", ">gap", ">search"]
    limited = [f">in {seconds:g} s"] if seconds is not None else []
    cells = [_cells(one, bool(limited)) for one in rows]
    return Report("deep programs under memory limits", (Table((*columns, *limited), tuple(cells)),))


def _cells(one: Row, limited: bool) -> tuple[str, ...]:
    found = ("ended" if one.over else "refused", "", "")
    if one.step_seconds is not None and one.peak_bytes is not None:
        found = format_seconds(one.step_seconds), format_bytes(one.peak_bytes), format_percent(one.gap or 0.0)
    cells = (one.program, f"{one.times:g}", format_bytes(one.limit_bytes), one.mesh, *found, f"{one.search_seconds:.1f} s")
    if not limited:
        return cells
    if one.limited_step_seconds is not None:
        return *cells, f"{format_seconds(one.limited_step_seconds)} ({one.limited_seconds:.0f} s)"
    return *cells, f"refused, though {', '.join(one.fits)} fit" if one.fits else "refused, as by baselines"


def recorded() -> dict[tuple[str, float], Row]:
    """The rows of the file, by program and limit."""
    rows = [Row(**{**each, "fits": tuple(each["fits"])}) for each in json.loads(FILE.read_text())] if FILE.exists() else []
    return {(one.program, one.times): one for one in rows}


def record(one: Row) -> None:
    """Merges a row into the file, in the order of programs and limits."""
    rows = sorted((recorded() | {(one.program, one.times): one}).values(), key=lambda each: (each.program, -each.times))
    FILE.write_text(json.dumps([asdict(each) for each in rows], indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=SUMMARY)
    parser.add_argument("--programs", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--limits", nargs="+", type=float, default=LIMITS, metavar="TIMES", help="in least peaks")
    parser.add_argument("--seconds", type=float, metavar="S", help="search with this time limit, too")
    parser.add_argument("--most", type=float, metavar="S", help="seconds of the processor after which a search is ended without an answer")
    parser.add_argument("--table", action="store_true", help="limits, seconds and most as in the documentation")
    parser.add_argument("--record", action="store_true", help=f"merge each row into {FILE.parent.name}/{FILE.name}")
    parser.add_argument("--show", action="store_true", help="print the recorded rows, and search nothing")
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    if options.table:
        vars(options).update(TABLE)
    rows = [*recorded().values()] if options.show else []
    with progress_bar(options.json) as bar:
        task = bar.add_task("", total=len(options.programs) * (1 + len(options.limits)))
        for name in [] if options.show else options.programs:
            bar.update(task, description=f"{name}, least peak")
            program = CASES[name].program()
            least = least_peak(CASES[name], program, options.most)
            bar.advance(task)
            for times in options.limits if least < math.inf else ():
                bar.update(task, description=f"{name}, {times:g} times the least peak")
                rows.append(row(name, program, times, times * least, options.seconds, options.most))
                if options.record:
                    record(rows[-1])
                if not options.json:
                    print(*_cells(rows[-1], options.seconds is not None), sep="  ", flush=True)
                bar.advance(task)
    if options.json:
        json.dump([asdict(each) for each in rows], sys.stdout, indent=1)
    else:
        show(report(rows, 10.0 if options.show else options.seconds))


if __name__ == "__main__":
    main()
