"""Strategies of mixed-precision programs held against what compilers make of them: collective bytes, FLOPs and peak memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from typing import Any

import jax.numpy as jnp

import autoshard
from autoshard import Cluster
from autoshard.ask.verified import BYTES_WITHIN, FLOPS_WITHIN
from autoshard.errors import AutoshardError, CompilerError
from autoshard.ir import Collective
from autoshard.render import Heading, Paragraph, Part, Report, Table, format_bytes, format_count, format_flops
from autoshard.verify import topology_of
from autoshard.verify.aot import COMPILERS
from benchmarks.cost_model import compiled
from benchmarks.cost_model.compared import Compared, compared
from benchmarks.cost_model.findings import Target, quantile
from benchmarks.exact_programs import PROGRAMS
from benchmarks.outside import OUTSIDE

TARGETS = ("v5e:2x4", "v5p:2x2x2", "h100:8x1", "cpu:8")
SEARCHERS = ("auto", "data_parallel", "fully_sharded", "tensor_parallel")
OF_ONE_AXIS = ("data_parallel", "fully_sharded")  # which take every device anyway: no mesh of two axes is given
PEAK_WITHIN, PEAK_SHARE = 0.10, 0.9
SHOWN = 6  # collectives of each side, of a program that differs


@dataclass(frozen=True, slots=True)
class Case:
    """A program, a searcher, a mesh that is given or searched, and the devices that it is compiled for."""

    program: str
    searcher: str
    given: bool
    target: str

    def __str__(self) -> str:
        return f"{self.program}, {self.searcher}, mesh {'given' if self.given else 'free'}, {self.target}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a case.

    Attributes:
        mesh: the strategy's, as text; empty where the search failed.
        compared: predictions next to the compiled program; None where there is none.
        failure: why there is none.
    """

    case: Case
    mesh: str
    compared: Compared | None
    failure: str = ""

    @property
    def missed(self) -> tuple[str, ...]:
        """What differs by more than is allowed."""
        if self.compared is None:
            return ("compiled",)
        errors = ("bytes", self.compared.bytes_error, BYTES_WITHIN), ("FLOPs", self.compared.flops_error, FLOPS_WITHIN)
        peak = ("peak", self.compared.peak_error or 0.0, PEAK_WITHIN)
        return tuple(name for name, error, within in (*errors, peak) if abs(error) > within)

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {**asdict(self.case), "mesh": self.mesh, "missed": self.missed}
        if self.compared is None:
            return found | {"failure": self.failure}
        one = self.compared
        found["bytes"] = {"predicted": one.predicted_bytes, "compiled": one.compiled_bytes, "error": one.bytes_error}
        found["flops"] = {"predicted": one.predicted_flops, "compiled": one.compiled_flops, "error": one.flops_error}
        found["peak"] = {"predicted": one.predicted_peak_bytes, "compiled": one.peak_bytes, "error": one.peak_error}
        if "bytes" in self.missed:
            found["rows"] = [asdict(row) for row in one.rows if not row.agrees]
            found["unmatched"] = {side: [_json(each) for each in each_side] for side, each_side in zip(SIDES, one.unmatched, strict=True)}
        return found


SIDES = ("only predicted", "only compiled")


def _json(collective: Collective) -> dict[str, Any]:
    kept = ("kind", "mesh_axes", "count", "bytes", "tensor", "source")
    return {name: getattr(collective, name) for name in kept}


def cases(targets: Sequence[str], programs: Sequence[str], searchers: Sequence[str], quick: bool) -> list[Case]:
    """All of them, target by target; quick: no meshes are given."""
    return [
        Case(program, searcher, given, target)
        for target in targets
        for program in programs
        for searcher in searchers
        for given in ((False,) if quick or searcher in OF_ONE_AXIS else (False, True))
    ]


def lacking(target: str) -> str:
    """Which compiler a target lacks here, with the command that installs it; empty where it is installed."""
    if target.startswith("cpu"):
        return ""
    compiler = COMPILERS[topology_of(Cluster.parse(target)).platform]
    return "" if compiler.installed else f"{compiler.name} is not installed: pip install 'autoshard[{compiler.extra}]'"


def given_mesh(n_devices: int) -> dict[str, int]:
    """A mesh of two axes, four devices of the inner one where that divides.

    >>> given_mesh(8), given_mesh(6)
    ({'data': 2, 'model': 4}, {'data': 3, 'model': 2})
    """
    inner = next(size for size in (4, 2, 1) if n_devices % size == 0)
    return {"data": n_devices // inner, "model": inner}


def measure(case: Case) -> Outcome:
    """Searches, lowers and compiles a case, and reads what the compiler made."""
    # XLA:CPU computes, sends and holds bfloat16 as float32: there the programs are of float32.
    options = {"dtype": jnp.float32} if case.target.startswith("cpu") else {}
    function, args = (PROGRAMS | OUTSIDE)[case.program](**options)
    mesh = given_mesh(Cluster.parse(case.target).n_devices) if case.given else None
    found = None
    try:
        found = autoshard.search(function, *args, cluster=case.target, searcher=case.searcher, mesh=mesh, donate_argnums=0)
        ahead = compiled.compiled(compiled.Case(case.program, case.searcher, case.target, function, args, found))
        if not ahead.hlo:
            raise CompilerError(f"does not fit: the compiler needs {format_bytes(ahead.needed_bytes)}.")
        return Outcome(case, str(found.record.mesh), compared(found, ahead))
    except AutoshardError as error:
        return Outcome(case, str(found.record.mesh) if found else "", None, str(error))


# --- report ------------------------------------------------------------------------------------------------------------


def report(outcomes: Sequence[Outcome], skipped: Sequence[str]) -> Report:
    """A table for each target, of each program that differs by its collectives or FLOPs which, and a summary."""
    parts: list[Part] = []
    for target, found in _by_target(outcomes).items():
        columns = (target, "searcher", "mesh", ">bytes", ">compiled", "", ">FLOPs", ">peak", ">compiled", "")
        parts.append(Table(columns, tuple(map(_row, found)), ("An exclamation mark: by more than is allowed.",)))
    for outcome in outcomes:
        parts += _differences(outcome)
    parts += [Heading("Summary"), _summary(outcomes)]
    parts += [Heading("Targets"), Table(("", "number", "wanted", ">found", ""), tuple((name, *goal.row) for name, goal in goals(outcomes)))]
    parts += [Paragraph(f"Skipped: {words}.") for words in skipped]
    return Report("Predictions held against compiled programs", tuple(parts))


def _by_target(outcomes: Sequence[Outcome]) -> dict[str, list[Outcome]]:
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        found.setdefault(outcome.case.target, []).append(outcome)
    return found


def _row(outcome: Outcome) -> tuple[str, ...]:
    case, one = outcome.case, outcome.compared
    sizes = " x ".join(part.partition("=")[2] for part in outcome.mesh.split(" x ")) if outcome.mesh else ""
    named = (case.program, case.searcher, f"{sizes}{', given' if case.given else ''}")
    if one is None:
        return (*named, *[""] * 6, "not compiled")
    sent = format_bytes(one.predicted_bytes), format_bytes(one.compiled_bytes), _percent(one.bytes_error, BYTES_WITHIN)
    work = _percent(one.flops_error, FLOPS_WITHIN)
    if one.peak_error is None or one.peak_bytes is None:
        return (*named, *sent, work, format_bytes(one.predicted_peak_bytes), "", "")
    peaks = format_bytes(one.predicted_peak_bytes), format_bytes(one.peak_bytes), _percent(one.peak_error, PEAK_WITHIN)
    return (*named, *sent, work, *peaks)


def _percent(error: float, within: float) -> str:
    """An error in per cent, marked where it is more than is allowed."""
    return f"{100 * error:+.1f} %{' !' if abs(error) > within else ''}"


def _differences(outcome: Outcome) -> list[Part]:
    """What else differs than the peak; of collectives which: by kind and axes, then those that only one side has."""
    one = outcome.compared
    if one is None:
        return [Heading(str(outcome.case)), Paragraph(outcome.failure)]
    if not {"bytes", "FLOPs"} & set(outcome.missed):
        return []
    parts: list[Part] = [Heading(f"{outcome.case}: {', '.join(outcome.missed)}")]
    if "FLOPs" in outcome.missed:
        parts.append(Paragraph(f"FLOPs: {format_flops(one.predicted_flops)} predicted, {format_flops(one.compiled_flops)} compiled."))
    if "bytes" not in outcome.missed:
        return parts
    rows = [
        (row.kind, ", ".join(row.mesh_axes), *map(format_count, (row.predicted_count, row.actual_count)))
        + (format_bytes(row.predicted_bytes), format_bytes(row.actual_bytes))
        for row in one.rows
        if not row.agrees
    ]
    parts.append(Table(("kind", "mesh axes", ">predicted", ">compiled", ">predicted bytes", ">compiled bytes"), tuple(rows)))
    only = [
        (side, each.kind, ", ".join(each.mesh_axes), f"{each.count} x {format_bytes(each.bytes)}", f"{each.tensor} {each.source}".strip())
        for side, found in zip(SIDES, one.unmatched, strict=True)
        for each in found[:SHOWN]
    ]
    return [*parts, Table(("", "kind", "mesh axes", ">bytes", "of"), tuple(only))]


def _summary(outcomes: Sequence[Outcome]) -> Table:
    """A line for each target: how many are within, the worst, and quantiles of peaks."""
    rows = []
    for target, found in _by_target(outcomes).items():
        ones = [outcome.compared for outcome in found if outcome.compared]
        peaks = [one.peak_error for one in ones if one.peak_error is not None]
        sizes = [abs(error) for error in peaks]
        cells = [str(len(found)), str(len(found) - len(ones))]
        for errors, within in (([one.bytes_error for one in ones], BYTES_WITHIN), ([one.flops_error for one in ones], FLOPS_WITHIN)):
            cells += [str(sum(abs(error) <= within for error in errors)), _signed(max(errors, key=abs, default=0.0))]
        cells += [str(sum(size <= PEAK_WITHIN for size in sizes)), *(f"{100 * quantile(sizes, share):.1f} %" for share in (0.5, 0.9))]
        cells += [_signed(min(peaks, default=0.0)), _signed(max(peaks, default=0.0))]
        rows.append((target, *cells))
    columns = ("", ">cases", ">failed", ">bytes within 3 %", ">worst", ">FLOPs within 1 %", ">worst")
    return Table((*columns, ">peaks within 10 %", ">median", ">nine in ten", ">lowest", ">highest"), tuple(rows))


def _signed(error: float) -> str:
    return f"{100 * error:+.1f} %"


def goals(outcomes: Sequence[Outcome]) -> list[tuple[str, Target]]:
    """The numbers to reach on each target; a case that was not compiled reaches none."""
    wanted = (
        ("bytes", "cases whose bytes are within 3 %, in %", 1.0),
        ("FLOPs", "cases whose FLOPs are within 1 %, in %", 1.0),
        ("peak", "cases whose peak is within 10 %, in %", PEAK_SHARE),
    )
    found = []
    for target, those in _by_target(outcomes).items():
        for name, words, least in wanted:
            share = sum(not {name, "compiled"} & set(one.missed) for one in those) / len(those)
            bound = f"{'>= ' if least < 1 else ''}{100 * least:.0f}"
            found.append((target, Target(words, bound, 100 * share, share >= least)))
    return found


def to_json(outcomes: Sequence[Outcome], skipped: Sequence[str]) -> dict[str, Any]:
    """All of it as plain JSON values, with the versions that were asked."""
    packages = ("jax", "jaxlib", "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin")
    return {
        "versions": {name: version for name in packages if (version := _version(name))},
        "cases": [outcome.to_json() for outcome in outcomes],
        "goals": [{"target": target, **asdict(goal)} for target, goal in goals(outcomes)],
        "skipped": list(skipped),
    }


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""
