"""Results of `benchmarks.quality`: one row a plan, kept as JSON, held against the goals, and shown as the README's table."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from autoshard.render import format_bytes, format_seconds
from benchmarks.cost_model.findings import Target

FILE = Path(__file__).parent / "results" / "quality.json"
OURS = ("auto", "auto, mesh given")
XLA = "XLA auto-sharding"
WORST, MEAN, MEAN_OF_XLA = 1.03, 0.85, 0.5  # times the best rival's seconds in any row, in the geometric mean, and times XLA's in the mean
DIGITS = 6  # of what is kept


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of a plan of a program on a cluster: seconds of a step, bytes of a device.

    Attributes:
        program, cluster, plan: the key; the mesh is not part of it.
        mesh: its axes and sizes.
        predicted_seconds, predicted_bytes: the cost model's makespan and peak; None of XLA's plan.
        scheduled_seconds: of the compiled schedule; None where the plan was not compiled, or failed.
        peak_bytes: what is live at the fullest moment, by the compiler's buffer assignment.
        needed_bytes: what its allocator takes; of a plan that it refused, too.
        search_seconds: what finding the plan took; None of experts'.
        failure: why there is no schedule that fits, if so.
        fingerprint: of the program; plans of other programs under the same name are not compared with.
        versions: what found and compiled it.
    """

    program: str
    cluster: str
    plan: str
    mesh: str
    predicted_seconds: float | None = None
    predicted_bytes: float | None = None
    scheduled_seconds: float | None = None
    peak_bytes: float | None = None
    needed_bytes: float | None = None
    search_seconds: float | None = None
    failure: str = ""
    fingerprint: str = ""
    versions: str = ""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.program, self.cluster, self.plan

    @property
    def ours(self) -> bool:
        return self.plan in OURS

    @property
    def seconds(self) -> float:
        """As scheduled, or as predicted where nothing was compiled; infinite of a plan that failed."""
        if self.failure:
            return math.inf
        found = self.predicted_seconds if self.scheduled_seconds is None else self.scheduled_seconds
        return math.inf if found is None else found


Comparison = tuple[str, str]
"""A program and a cluster."""


def compared(rows: Iterable[Row]) -> dict[Comparison, list[Row]]:
    """The rows of each program on each cluster, in the order given; only those of the same program as its last one."""
    found: dict[Comparison, list[Row]] = {}
    for row in rows:
        found.setdefault((row.program, row.cluster), []).append(row)
    return {key: [row for row in group if row.fingerprint == group[-1].fingerprint] for key, group in found.items()}


# --- the file ----------------------------------------------------------------------------------------------------------


def load(file: Path) -> list[Row]:
    """The rows of a file; none where there is no file."""
    return [Row(**row) for row in json.loads(file.read_text())["rows"]] if file.exists() else []


def merged(kept: Sequence[Row], found: Sequence[Row], covers: Callable[[Row], bool]) -> list[Row]:
    """The rows that are kept, with those found in place of all that this run covers, or that are of a program that has changed."""
    now = {row.key for row in found}
    programs = {(row.program, row.cluster): row.fingerprint for row in found}

    def stays(row: Row) -> bool:
        return row.key not in now and not covers(row) and programs.get((row.program, row.cluster), row.fingerprint) == row.fingerprint

    return sorted([*filter(stays, kept), *found], key=lambda row: row.key)


def save(file: Path, rows: Sequence[Row], command: str) -> None:
    """Writes rows, sorted, with the command of the run that wrote them last; the same rows give the same file."""
    content = {"command": command, "rows": [_plain(row) for row in sorted(rows, key=lambda row: row.key)]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


def _plain(row: Row) -> dict[str, Any]:
    defaults = {field.name: field.default for field in fields(Row)}
    rounded = {name: float(f"{value:.{DIGITS}g}") if isinstance(value, (int, float)) else value for name, value in asdict(row).items()}
    return {name: value for name, value in rounded.items() if value != defaults[name]}


# --- the goals ---------------------------------------------------------------------------------------------------------


def ratio(rows: Sequence[Row], plan: str = OURS[0], rival: str | None = None) -> float:
    """A plan's seconds in those of the fastest rival, or of the one named; infinite where the plan fails, nan where no rival is left.

    >>> rows = [Row("p", "c", plan, "", scheduled_seconds=s) for plan, s in (("auto", 3.0), ("data parallel", 4.0), (XLA, 6.0))]
    >>> ratio(rows), ratio(rows, rival=XLA)
    (0.75, 0.5)
    """
    found = min((row.seconds for row in rows if row.plan == plan), default=math.nan)
    best = min((row.seconds for row in rows if not row.ours and rival in (None, row.plan)), default=math.inf)
    return found / best if math.isfinite(best) else math.nan


def goals(comparisons: Mapping[Comparison, Sequence[Row]], plan: str = OURS[0]) -> tuple[Target, ...]:
    """The goals of a plan of ours, reached or not: those in the mean where plans were compiled, that of XLA's where it has a plan."""
    groups = [rows for rows in comparisons.values() if any(row.plan == plan for row in rows)]
    mine = [row for rows in groups for row in rows if row.plan == plan]
    if not mine:
        return ()
    failed = sum(bool(row.failure) for row in mine)
    targets = [Target(f"{plan}: plans of {len(mine)} that do not fit, or fail", "0", failed, failed == 0)]
    best = [one for rows in groups if not math.isnan(one := ratio(rows, plan))]
    xla = [one for rows in groups if not math.isnan(one := ratio(rows, plan, XLA))]
    if best:
        targets.append(Target(f"{plan} / best rival, worst of {len(best)}", f"<= {WORST}", max(best), max(best) <= WORST))
    if any(row.scheduled_seconds is not None for row in mine):
        for ratios, rival, wanted in ((best, "best rival", MEAN), (xla, XLA, MEAN_OF_XLA)):
            if ratios:
                mean = statistics.geometric_mean(ratios)
                targets.append(Target(f"{plan} / {rival}, geometric mean of {len(ratios)}", f"<= {wanted}", mean, mean <= wanted))
    return tuple(targets)


def all_goals(comparisons: Mapping[Comparison, Sequence[Row]]) -> list[Target]:
    """The goals of ``auto``, mesh free and given."""
    return [target for plan in OURS for target in goals(comparisons, plan)]


# --- the README --------------------------------------------------------------------------------------------------------

_COLUMNS = ("data parallel", "fully sharded", "tensor parallel", XLA)


def markdown(comparisons: Mapping[Comparison, Sequence[Row]]) -> str:
    """A table, one line a program and cluster: compiled steps, the fastest tensor parallelism, ratios, seconds of search and peaks."""
    compared_with = ("`auto` / best rival", "`auto` / XLA", "search: `auto`, XLA", "peak: `auto`, best rival")
    head = ["program", "cluster", "`auto`", *_COLUMNS, *compared_with]
    lines = [head, ["---"] * len(head)]
    for (program, cluster), rows in sorted(comparisons.items()):
        mine = _fastest(rows, lambda row: row.plan == OURS[0])
        rival = _fastest(rows, lambda row: not row.ours)
        xla = next((row for row in rows if row.plan == XLA), None)
        steps = [_step(mine), *(_step(_fastest(rows, lambda row, kind=kind: row.plan.startswith(kind))) for kind in _COLUMNS)]
        ratios = [_number(ratio(rows)), _number(ratio(rows, rival=XLA))]
        searches = ", ".join(format_seconds(row.search_seconds) if row and row.search_seconds is not None else "-" for row in (mine, xla))
        peaks = ", ".join(format_bytes(row.peak_bytes) if row and row.peak_bytes is not None else "-" for row in (mine, rival))
        lines.append([program, cluster, *steps, *ratios, searches, peaks])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _fastest(rows: Sequence[Row], chosen: Callable[[Row], bool]) -> Row | None:
    return min(filter(chosen, rows), key=lambda row: row.seconds, default=None)


def _step(row: Row | None) -> str:
    if row is None:
        return "-"
    return row.failure.partition(":")[0] or format_seconds(row.seconds)


def _number(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"
