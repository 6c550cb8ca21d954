"""Do steps in stages compute what they compute on one device, in the order of their schedule, with few sends and little work of the host?

``python -m benchmarks.pipelines`` runs small float32 train steps on 8 virtual CPU devices, in 2, 4 and 8 stages by each schedule, and on
one device. Shown are the largest difference of any result, relative to its largest element; whether each stage ran its tasks in the order
of its schedule; the most activations and gradients of a microbatch that one stage sends; and how long the thread that starts the tasks
works for each (its own CPU time). A row takes most of a minute of one core; ``--programs``, ``--stages`` and ``--schedules`` choose.

``--bubbles`` finds schedules of a GPT on 4 and 8 stages with the seconds of tasks and transfers that a search found for them, in the memory
that 1F1B needs. ``--updates`` compares step times of chunks that are updated in gaps of the schedule with those of the schedules that are
found where all updates come last, in ten minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice, product
from typing import Any

import jax
import numpy as np

import autoshard
from autoshard.cli.terminal import show
from autoshard.errors import AutoshardError
from autoshard.explanation.explain_pipeline import pieces_of, schedule_as
from autoshard.pipeline.schedule import ONE_PROGRAM, alive_bytes
from autoshard.pipeline.scheduling import NAMES, Workload, scheduled
from autoshard.pipeline.simulation import simulate
from autoshard.render import Paragraph, Report, Table
from benchmarks.microbatches import SMALL, filled
from benchmarks.models import Program, gpt, llama
from benchmarks.progress import progress_bar
from benchmarks.several import clip, muon, ppo, sam

SUMMARY = "Do steps in stages compute what they compute on one device, in the order of their schedule, with few sends?"
DEVICES, STAGES, CALLS = 8, (2, 4, 8), 5
TOLERANCE, MOST_SECONDS = 1e-5, 100e-6
BUBBLES, MICROBATCHES = (4, 8), (8, 16, 32)

DEEP = ("gpt", "gpt_scan", "gpt_scan_remat", "llama", "llama_scan", "moe", "moe_scan", "moe_sorted", "t5", "vit")
SEVERAL = {"sam": sam, "clip": clip, "ppo": ppo, "muon": muon}
PROGRAMS = (*DEEP, "unet", "resnet_groups", "gan", "codec", *SEVERAL)
SCHEDULES = (*NAMES, *ONE_PROGRAM)


def program(name: str, stages: int) -> Program:
    """A small train step with at least a layer for each stage."""
    return (SEVERAL | SMALL)[name](layers=max(4, stages)) if name in DEEP or name in SEVERAL else SMALL[name]()


@dataclass(frozen=True, slots=True)
class Row:
    """A step in stages beside the same step on one device.

    Attributes:
        difference: the largest of any result, relative to its largest element; None where the step is refused.
        in_order: whether each stage's tasks ran in its schedule's order; None where all stages are one program, which has no tasks.
        activations, gradients: the most that a stage sends of one microbatch, each to one other stage; of several passes in the last.
        task_seconds: CPU time of the thread that starts the tasks, of one task.
        refused: why there is no such pipeline.
    """

    program: str
    stages: int
    schedule: str
    difference: float | None = None
    in_order: bool | None = None
    activations: int = 0
    gradients: int = 0
    task_seconds: float = 0.0
    refused: str = ""


def compare(name: str, stages: int, schedule: str) -> Row:
    """Runs a step in stages and on one device."""
    function, args = program(name, stages)
    leaves, tree = jax.tree.flatten_with_path(args)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    inputs = tree.unflatten([filled(leaf, key, jax.tree_util.keystr(path)) for (path, leaf), key in zip(leaves, keys, strict=True)])
    n, mesh = max(4, stages), {"data": DEVICES // stages}
    try:
        found = autoshard.search(function, *args, cluster=f"cpu:{DEVICES}", mesh=mesh, stages=stages, schedule=schedule, microbatches=n)
        step = found.apply(function)
        results = jax.block_until_ready(step(*inputs))
    except AutoshardError as error:
        return Row(name, stages, schedule, refused=str(error))
    expected = jax.tree.leaves(jax.jit(function)(*inputs))
    difference = max(map(_difference, expected, jax.tree.leaves(results)))
    if found.record.pipeline is None:
        return Row(name, stages, schedule, difference)
    in_order, sent = _in_order(found.record, step.executed), _sent(step)
    placed, seconds = found.shard(*inputs), []
    for _ in range(CALLS):
        started = time.thread_time()
        results = step(*placed)
        seconds.append((time.thread_time() - started) / len(step.executed))
        jax.block_until_ready(results)
    return Row(name, stages, schedule, difference, in_order, *sent, statistics.median(seconds))


def _difference(one: Any, other: Any) -> float:
    one, other = (np.asarray(x, np.float64) for x in (one, other))
    return float(np.abs(one - other).max(initial=0.0) / (np.abs(one).max(initial=0.0) + 1e-30))


def _in_order(record: Any, executed: Sequence[tuple[int, Any]]) -> bool:
    """Whether the stages of each pass over the microbatches ran their tasks as its schedule has them."""
    started, is_so = iter(executed), True
    for own in record.pipeline.passes:
        orders = schedule_as(record, own).orders
        ran: list[list[Any]] = [[] for _ in orders]
        for stage, task in islice(started, sum(map(len, orders))):
            ran[stage].append(task)
        is_so &= tuple(map(tuple, ran)) == orders
    return is_so and next(started, None) is None


def _sent(step: Any) -> tuple[int, int]:
    """The most activations, and gradients, of one microbatch that a stage sends."""
    most = [0, 0]
    for stage in step.staged.stages:
        counts = Counter(message.backward for message in stage.sends for _ in message.targets if message.kind == "loop")
        most = [max(before, counts[backward]) for before, backward in zip(most, (False, True), strict=True)]
    return most[0], most[1]


def bubbles() -> list[tuple[float, ...]]:
    """Per number of stages and microbatches the idle shares of 1F1B and of what is found in its memory, and the least ratio."""
    found = []
    for stages in BUBBLES:
        function, args = gpt(8, width=1024, heads=16, vocabulary=32_768, batch=64, length=1024)
        strategy = autoshard.search(function, *args, cluster="v5e:2x4", stages=stages, schedule="1f1b", microbatches=8)
        parts = strategy.record.pipeline.stages
        pieces = pieces_of(strategy.record.pipeline)
        room = (stages * max(part.residual_bytes for part in parts),) * stages  # what 1F1B needs at most
        for n in MICROBATCHES:
            shares = []
            for name, chunks, placement in (("1f1b", 1, "loop"), ("auto", 1, "loop"), ("auto", 2, "v"), ("auto", 4, "v")):
                halves = tuple(each.divided(chunks) for each in pieces for _ in range(chunks))
                sends = (max(max(part.send_seconds, part.send_back_seconds) for part in parts),) * (len(halves) - 1)
                schedule = scheduled(Workload(stages, n, halves, placement, sends, sends, room), name).schedule
                shares.append(simulate(schedule, halves, sends).bubble_fraction)
            found.append((stages, n, *shares, min(shares) / shares[0]))
    return found


def updates() -> list[tuple[str, ...]]:
    """Per program and cluster the step time in milliseconds with updates last and in gaps, and the share that is gained."""
    found = []
    programs = {
        "gpt": (gpt(16, width=2048, heads=16, vocabulary=32_768, batch=128, length=1024), "interleaved", 4),
        "llama": (llama(16, 2048, 16, 8, 5632, 32_000, batch=64, length=2048), "auto", 2),
    }
    for (name, ((function, args, *_), schedule, chunks)), cluster in product(programs.items(), ("h100:8x4", "v5e:4x4")):
        asked = {"cluster": cluster, "stages": 4, "microbatches": 8, "schedule": schedule, "donate_argnums": 0}
        strategy = autoshard.search(function, *args, **asked)
        if strategy.record.pipeline.chunks != chunks:
            strategy = strategy.what_if(chunks=chunks).strategy
        pipeline, early = strategy.record.pipeline, schedule_as(strategy.record, strategy.record.pipeline)
        pieces = pieces_of(pipeline)
        later = tuple(replace(each, update=0.0) for each in pieces)
        sends = tuple(x.send_seconds for x in pipeline.stages[:-1]), tuple(x.send_back_seconds for x in pipeline.stages[1:])
        work = Workload(pipeline.n_parts, early.n_microbatches, later, pipeline.placement, *sends, alive_bytes(early, pieces))
        ends = (simulate(early, pieces, *sends).end_seconds, simulate(scheduled(work, schedule).schedule, later, *sends).end_seconds)
        after = [[pipeline.stages[k] for k in pipeline.stages_of(part)] for part in range(pipeline.n_parts)]
        one, other = (
            max(end + sum(x.after_seconds + last * x.update_seconds for x in own) for end, own in zip(of, after, strict=True))
            for last, of in enumerate(ends)
        )
        found.append((name, cluster, f"{chunks} {pipeline.placement}", f"{other * 1e3:.1f}", f"{one * 1e3:.1f}", f"{1 - one / other:.2%}"))
    return found


def report(rows: Sequence[Row]) -> Report:
    """The rows, and how many are as they should be."""
    columns = ("program", ">stages", "schedule", ">difference", "in order", ">activations", ">gradients", ">host a task", "refused")
    ran = [row for row in rows if row.difference is not None]
    equal = sum(row.difference <= TOLERANCE for row in ran if row.difference is not None)
    tasks = [row for row in ran if row.in_order is not None]
    quick, in_order = sum(row.task_seconds <= MOST_SECONDS for row in tasks), sum(row.in_order is True for row in tasks)
    words = (
        f"Of {len(ran)}, {equal} are equal within {TOLERANCE:.0e}. Of {len(tasks)} with tasks, {in_order} ran in order, and {quick} take "
    )
    return Report(
        "Steps in stages",
        (Table(columns, tuple(map(_cells, rows))), Paragraph(f"{words}the host at most {MOST_SECONDS * 1e6:.0f} us a task.")),
    )


def _cells(row: Row) -> tuple[str, ...]:
    if row.difference is None:
        return row.program, str(row.stages), row.schedule, "", "", "", "", "", row.refused
    if row.in_order is None:
        return row.program, str(row.stages), row.schedule, f"{row.difference:.1e}", "", "", "", "", ""
    counts = str(row.activations), str(row.gradients)
    order = "yes" if row.in_order else "no"
    return row.program, str(row.stages), row.schedule, f"{row.difference:.1e}", order, *counts, f"{row.task_seconds * 1e6:.0f} us", ""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.pipelines", description=SUMMARY)
    parser.add_argument("--programs", nargs="+", choices=PROGRAMS, default=PROGRAMS, help="some programs only")
    parser.add_argument("--stages", nargs="+", type=int, choices=STAGES, default=STAGES, help="some numbers of stages only")
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=SCHEDULES, help="some schedules only")
    parser.add_argument("--bubbles", action="store_true", help="find schedules for searched costs instead")
    parser.add_argument("--updates", action="store_true", help="compare updates in gaps with updates last instead")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(argv)
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={DEVICES}".strip()
    if options.updates:
        columns, found = ("program", "cluster", "chunks", ">ms, updates last", ">in gaps", ">gain"), updates()
        print(json.dumps(found)) if options.json else show(Report("Updates in gaps", (Table(columns, tuple(found)),)))
        return 0
    if options.bubbles:
        shares = [(str(s), str(n), *(f"{share:.3f}" for share in found)) for s, n, *found in bubbles()]
        columns = (">stages", ">microbatches", ">1f1b", ">found", ">2 chunks", ">4 chunks", ">least ratio")
        print(json.dumps(shares)) if options.json else show(Report("Idle shares", (Table(columns, tuple(shares)),)))
        return 0
    cases = [
        (program, stages, schedule)
        for program in options.programs
        for stages in options.stages
        for schedule in options.schedules
    ]
    rows: list[Row] = []
    with progress_bar(options.json) as progress:
        task = progress.add_task("", total=len(cases))
        try:
            for case in cases:
                progress.update(task, description=" ".join(map(str, case)))
                rows.append(compare(*case))
                progress.advance(task)
        except KeyboardInterrupt:
            print(f"interrupted after {len(rows)} of {len(cases)} rows", file=sys.stderr)
    print(json.dumps([asdict(row) for row in rows], indent=1)) if options.json else show(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
