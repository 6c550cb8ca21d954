"""Predicted beside measured: errors by family of chips, and the order of plans of one model and one release."""

from __future__ import annotations

import hashlib
import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path

import autoshard
from autoshard.errors import AutoshardError
from autoshard.render import Heading, Paragraph, Part, Report, Table, format_bytes, format_percent, format_seconds
from benchmarks.cost_model.findings import quantile
from benchmarks.published.predicted import Predicted, predicted
from benchmarks.published.runs import Run

CACHE = Path("build/published.json")
DIFFER = 0.1  # measured times of two plans that differ by less are not compared
GIB = 2.0**30
MODELLED = ("predicted.py", "runs.py")  # what predictions depend on, of this folder
OF_NO_PLAN = ("release", "framework", "seconds", "peak_gib", "source", "note")


@dataclass(frozen=True, slots=True)
class Row:
    """A run with what is predicted of it; None with the reason where that failed."""

    run: Run
    found: Predicted | None
    refused: str = ""

    @property
    def ratio(self) -> float:
        """Predicted over measured seconds."""
        return self.found.seconds / self.run.seconds if self.found else float("nan")


@dataclass(frozen=True, slots=True)
class Pair:
    """Two plans of one model, release, precision and length, the faster first, by device-seconds a token.

    Attributes:
        measured, predicted: the slower one's time over the faster one's.
    """

    runs: tuple[Run, Run]
    measured: float
    predicted: float

    @property
    def is_ranked(self) -> bool:
        """Whether the faster is predicted faster."""
        return self.predicted > 1


class Cache:
    """Figures of rows that were found with the same code, in a file; the key is of the library, the models and the row."""

    def __init__(self, path: Path = CACHE):
        self.path = path
        folders = Path(autoshard.__file__).parent, Path(__file__).parents[1] / "models"
        files = [*(file for folder in folders for file in sorted(folder.rglob("*.py"))), *map(Path(__file__).with_name, MODELLED)]
        self.code = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
        try:
            self.kept = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            self.kept = {}

    def found(self, run: Run, make: Callable[[Run], Predicted]) -> Predicted:
        """What is kept of a run, or is made now and kept."""
        plan = asdict(replace(run, batch=run.batch * run.cluster.n_devices // run.devices, devices=run.cluster.n_devices))
        words = sorted((name, value) for name, value in plan.items() if name not in OF_NO_PLAN)
        key = hashlib.sha256(f"{self.code} {words}".encode()).hexdigest()
        if key not in self.kept:
            made = make(run)
            self.kept[key] = [made.seconds, made.peak_bytes]
            self.path.parent.mkdir(exist_ok=True)
            self.path.write_text(json.dumps(self.kept), encoding="utf-8")
        return Predicted(*self.kept[key])


def row(run: Run, cache: Cache | None = None) -> Row:
    """A run's figures, kept ones if there are any."""
    try:
        return Row(run, cache.found(run, predicted) if cache else predicted(run))
    except (AutoshardError, ValueError) as error:
        return Row(run, None, str(error))


def pairs(rows: Iterable[Row]) -> list[Pair]:
    """The pairs of plans whose measured times differ by a tenth at least."""
    found = []
    for one, other in combinations([row for row in rows if row.found], 2):
        if not _are_compared(one.run, other.run):
            continue
        fast, slow = sorted((one, other), key=lambda row: _per_token(row.run, row.run.seconds))
        measured = _per_token(slow.run, slow.run.seconds) / _per_token(fast.run, fast.run.seconds)
        if measured >= 1 + DIFFER and fast.found and slow.found:
            ratio = _per_token(slow.run, slow.found.seconds) / _per_token(fast.run, fast.found.seconds)
            found.append(Pair((fast.run, slow.run), measured, ratio))
    return found


def pair_errors(rows: Iterable[Row]) -> list[float]:
    """How far the predicted ratio of two runs' times is off, of all pairs of one model, release, chip, precision and length, ascending.

    What a chip's predictions have in common cancels. Runs in stages are left out: the search fills in what their plans leave open.
    """
    known = [row for row in rows if row.found and row.run.stages == 1]
    return sorted(abs(math.log(one.ratio / other.ratio)) for one, other in combinations(known, 2) if _are_compared(one.run, other.run))


def _are_compared(one: Run, other: Run) -> bool:
    return all(getattr(one, name) == getattr(other, name) for name in ("release", "model", "chip", "precision", "length"))


def _per_token(run: Run, seconds: float) -> float:
    return seconds * run.devices / (run.batch * run.length)


def errors(rows: Sequence[Row]) -> list[float]:
    """How far predicted step times are from measured ones, as shares of these, without signs."""
    return [abs(row.ratio - 1) for row in rows if row.found]


def report(rows: Sequence[Row]) -> Report:
    """All rows, and what they come to by family."""
    parts: list[Part] = [_rows(rows), Heading("By family"), _families(rows)]
    if found := pairs(rows):
        wrong = [pair for pair in found if not pair.is_ranked]
        told = f"Of {len(found)} pairs that differ by a tenth {len(found) - len(wrong)} are predicted in their order."
        if off := pair_errors(rows):
            told += f" Of all {len(off)} without stages half of the ratios are predicted within {format_percent(quantile(off, 0.5))},"
            told += f" and eight in ten within {format_percent(quantile(off, 0.8))}."
        parts += [Heading("Pairs of plans"), Paragraph(told)]
        lines = tuple((str(p.runs[0]), str(p.runs[1]), f"{p.measured:.2f}", f"{p.predicted:.2f}") for p in wrong)
        parts += [Table(("faster", "slower", ">measured", ">predicted"), lines)] if wrong else []
    refused = tuple((str(row.run), row.refused) for row in rows if not row.found)
    parts += [Heading("Not predicted"), Table(("run", "why"), refused)] if refused else []
    return Report("Published runs", tuple(parts))


def _rows(rows: Sequence[Row]) -> Table:
    columns = ("release", "run", ">measured", ">predicted", ">ratio", ">peak", ">predicted", ">ratio")
    lines = []
    for row in rows:
        if not row.found:
            continue
        peak = row.run.peak_gib * GIB
        figures = [format_seconds(row.run.seconds), format_seconds(row.found.seconds), f"{row.ratio:.2f}"]
        figures += [format_bytes(peak), format_bytes(row.found.peak_bytes), f"{row.found.peak_bytes / peak:.2f}"] if peak else [""] * 3
        lines.append((row.run.release, str(row.run), *figures))
    return Table(columns, tuple(lines))


def _families(rows: Sequence[Row]) -> Table:
    names = [*dict.fromkeys(row.run.family for row in rows), "all"]
    lines = []
    for name in names:
        chosen = [row for row in rows if row.found and name in (row.run.family, "all")]
        if not chosen:
            continue
        off, bias = errors(chosen), statistics.median(row.ratio for row in chosen)
        figures = statistics.median(off), quantile(off, 0.9), max(off)
        lines.append((name, str(len(chosen)), *map(format_percent, figures), f"{bias:.2f}"))
    return Table(("family", ">runs", ">median error", ">nine in ten within", ">worst", ">median ratio"), tuple(lines))
