"""Do stages of one program compile to what is predicted of them?

``python -m benchmarks.one_program`` searches train steps of 8 scanned layers of width 1024 (mixed precision, 64 sequences of 1,024 tokens)
with ``schedule="one_program"``, one of them in two rounds, compiles what is found for TPU slices, without one, and shows predicted steps,
and compiled FLOPs, collectives and peaks beside the predicted ones. A row takes about half a minute of one core; ``--rows`` some of them.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial

import autoshard
from autoshard.cli.terminal import show
from autoshard.render import Report, Table, format_bytes, format_seconds
from benchmarks.models import Program, gpt_scan, llama
from benchmarks.progress import progress_bar

SUMMARY = "Do stages of one program compile to what is predicted of them?"


@dataclass(frozen=True, slots=True)
class Case:
    """A program, its devices, and how it is divided."""

    program: Callable[[], Program]
    cluster: str
    mesh: tuple[int, ...]
    stages: int
    microbatches: int
    schedule: str = "one_program"


_llama = partial(llama, 8, 1024, 16, 4, 2816, 32_768, batch=64, length=1024, scan=True)
CASES: dict[str, Case] = {
    "gpt-2": Case(gpt_scan, "v5e:2x4", (4,), 2, 8),
    "gpt_remat-4": Case(partial(gpt_scan, remat=True), "v5e:2x4", (2,), 4, 8),
    "gpt_remat-4-interleaved": Case(partial(gpt_scan, remat=True), "v5e:2x4", (2,), 4, 8, "one_program_interleaved"),
    "gpt-8": Case(gpt_scan, "v5e:4x4", (2,), 8, 16),
    "llama_remat-4": Case(_llama, "v5e:4x4", (2, 2), 4, 16),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Predicted and compiled figures of a step.

    Attributes:
        collectives: whether the compiled ones are the predicted ones in kind, mesh axes, number and bytes.
        differing: those that are not, in words.
        flops_ratio: compiled over predicted.
    """

    program: str
    cluster: str
    mesh: str
    microbatches: int
    rounds: int
    step_seconds: float
    collectives: bool
    differing: tuple[str, ...]
    flops_ratio: float
    predicted_bytes: float
    compiled_bytes: float


def row(name: str, case: Case, target: str = "tpu") -> Row:
    """What is found for a case, compiled."""
    function, args = case.program()
    mesh = dict(zip(("data", "model"), case.mesh, strict=False))
    asked = {"stages": case.stages, "schedule": case.schedule, "microbatches": case.microbatches, "mesh": mesh}
    found = autoshard.search(function, *args, cluster=case.cluster, donate_argnums=0, **asked)
    compiled = autoshard.verify(found, function, *args, target=target)
    return Row(
        name,
        case.cluster,
        " x ".join(map(str, found.mesh_shape.values())),
        found.microbatches,
        found.record.program.rounds,
        found.cost.makespan_seconds,
        compiled.exact,
        tuple(str(each) for each in compiled.rows if not each.agrees),
        compiled.flops_ratio,
        found.cost.peak_bytes,
        compiled.actual_peak_bytes or 0.0,
    )


def report(rows: Sequence[Row]) -> Report:
    """The rows as a table."""
    columns = (
        "program",
        "devices",
        "stages x mesh",
        ">microbatches",
        ">rounds",
        ">step",
        "collectives",
        ">FLOPs",
        ">predicted peak",
        ">compiled",
        ">ratio",
    )
    return Report("stages of one program, compiled", (Table(columns, tuple(map(_cells, rows))),))


def _cells(one: Row) -> tuple[str, ...]:
    peaks = format_bytes(one.predicted_bytes), format_bytes(one.compiled_bytes), f"{one.compiled_bytes / one.predicted_bytes:.3f}"
    collectives = "equal" if one.collectives else "; ".join(one.differing)
    step = format_seconds(one.step_seconds)
    return one.program, one.cluster, one.mesh, str(one.microbatches), str(one.rounds), step, collectives, f"{one.flops_ratio:.3f}", *peaks


def main() -> None:
    """Compiles and prints."""
    parser = argparse.ArgumentParser(description=SUMMARY)
    parser.add_argument("--rows", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--json", action="store_true", help="print the rows as JSON")
    options = parser.parse_args()
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    rows: list[Row] = []
    with progress_bar(options.json) as bar:
        task = bar.add_task("", total=len(options.rows))
        for name in options.rows:
            bar.update(task, description=name)
            rows.append(row(name, CASES[name]))
            bar.advance(task)
    if options.json:
        json.dump([asdict(each) for each in rows], sys.stdout, indent=1)
    else:
        show(report(rows))


if __name__ == "__main__":
    main()
