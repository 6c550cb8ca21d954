"""How much throughput do published runs lose on more devices, and how much is predicted?

``python -m benchmarks.scaling`` takes runs of one model in one plan on more and more devices, with the same work for each device or the
same batch for all: MaxText's on several TPU slices, Megatron-LM's on more hosts (MegaScale, table 2). A run on several slices is planned
on all of them: the batch is split over slices too, state is sharded within each and its gradients are summed across. Printed is the
throughput of a device over that of the smallest run, measured and predicted. A point of it is half to two thirds of a point of MFU.
``--slices`` leaves out pipelines, which take some minutes.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jax.sharding import PartitionSpec as P

from autoshard.cli.terminal import show
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Mesh
from autoshard.judge.model import CostModel
from autoshard.plan.forms import Form
from autoshard.plan.prepared import traced_of
from autoshard.plan.user_pins import Asked as Pins
from autoshard.plan.user_pins import user_pins
from autoshard.problem import Problem
from autoshard.render import Paragraph, Report, Table, format_percent
from autoshard.rules import rules_of
from autoshard.search import DynamicProgramming, solve
from benchmarks.models import F32
from benchmarks.models.decoder import decoder
from benchmarks.progress import progress_bar
from benchmarks.published.predicted import _mesh, _specs, predicted
from benchmarks.published.runs import SIZES, Run, read

SUMMARY = "How much throughput do published runs lose on more devices, and how much is predicted?"


@dataclass(frozen=True, slots=True)
class Scaled:
    """A run beside the smallest one of its group; throughputs of a device over that one's."""

    run: Run
    of: Run
    measured: float
    predicted: float


def groups(runs: Iterable[Run]) -> list[list[Run]]:
    """Runs that differ in their devices alone, on several slices or in a pipeline, the smallest first."""
    found: dict[tuple, list[Run]] = {}
    for run in runs:
        if run.devices > run.cluster.n_devices or run.family in ("v4", "v5e", "v5p"):
            per_device = run.batch / run.devices
            found.setdefault((run.release, run.model, run.topology, run.tensor, per_device), []).append(run)
        elif run.release == "MegaScale table 2":
            found.setdefault((run.release, run.model, run.batch), []).append(run)
    return [sorted(group, key=lambda run: run.devices) for group in found.values() if len(group) > 1]


def seconds(run: Run) -> float:
    """Predicted seconds of a run's step, on all of its slices."""
    n = run.devices // run.cluster.n_devices
    return predicted(run).seconds if run.stages > 1 else on_slices(run, n)


def on_slices(run: Run, n: int) -> float:
    """Predicted seconds of a step on so many slices, whose state is sharded within each."""
    one = run.cluster
    cluster = run.of(Cluster.parse(f"{n}*{one.name}"))
    shape = {"slice": n, **_mesh(run, one)} if n > 1 else _mesh(run, one)
    traced = traced_of(*_program(run), 0, (), cluster, Form(run.microbatches))[0]
    facts = program_facts(traced.graph, rules_of(traced.graph), compiler_of(cluster))
    specs = _slice_specs(run, one.n_devices // run.tensor) | ({"batch*": P(("slice", "data"))} if n > 1 else {})
    mesh = Mesh.of(shape)
    pins = user_pins(Pins.of(specs, None), traced.graph, [], False)
    problem = Problem(facts, CostModel(cluster, mesh), pins.on(mesh), None)
    return solve(DynamicProgramming(second_opinion=False), problem).judgement.cost.makespan_seconds


def _slice_specs(run: Run, n_data: int) -> dict[str, P]:
    """The specs of state within a slice, where heads or the vocabulary may be no multiple of the devices that share a batch."""
    vocabulary = run.tensor == 1 and SIZES[run.model]["vocabulary"] % n_data
    width = {"['embed']": P(None, "data"), "['head']": P("data")} if vocabulary else {}
    width |= {"['out']": P(None, None, None, "data")} if run.tensor == 1 else {}
    return {path: next((own for end, own in width.items() if path.endswith(end)), spec) for path, spec in _specs(run, stacked=1).items()}


def _program(run: Run) -> tuple[Any, Any]:
    keeps = {"all": None, "none": ()}.get(run.keeps, tuple(run.keeps.split()))
    return decoder(**SIZES[run.model], batch=run.batch, length=run.length, keeps=keeps, params=F32)


def scaled(group: Sequence[Run]) -> list[Scaled]:
    """The runs of a group beside its smallest one."""
    first, found = group[0], {run: seconds(run) for run in group}

    def over(run: Run, times: dict[Run, float]) -> float:
        return (run.batch / run.devices / times[run]) / (first.batch / first.devices / times[first])

    measured = {run: run.seconds for run in group}
    return [Scaled(run, first, over(run, measured), over(run, found)) for run in group[1:]]


def report(rows: Sequence[Scaled]) -> Report:
    """All rows, and how far predictions are off."""
    columns = ("run", ">devices", ">over", ">measured", ">predicted", ">off by")
    lines = tuple(
        (
            f"{row.run.release}: {row.run.model}",
            str(row.run.devices),
            str(row.of.devices),
            format_percent(row.measured),
            format_percent(row.predicted),
            f"{100 * (row.predicted - row.measured):+.1f} points",
        )
        for row in rows
    )
    off = sorted(abs(row.predicted - row.measured) for row in rows)
    half, most = (100 * off[len(off) // 2], 100 * off[-1]) if off else (0.0, 0.0)
    text = f"Half of the {len(rows)} are within {half:.1f} points, all within {most:.1f}."
    return Report("Throughput of a device, over that on the fewest devices", (Table(columns, lines), Paragraph(text)))


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluates and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scaling", description=SUMMARY)
    parser.add_argument("--slices", action="store_true", help="runs on several slices alone, without pipelines")
    options = parser.parse_args(argv)
    rows: list[Scaled] = []
    chosen = [group for group in groups(read()) if not (options.slices and group[0].stages > 1)]
    with progress_bar(False) as progress:
        task = progress.add_task("", total=len(chosen))
        for group in chosen:
            progress.update(task, description=f"{group[0].model}, {group[0].chip}")
            rows += scaled(group)
            progress.advance(task)
    show(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
