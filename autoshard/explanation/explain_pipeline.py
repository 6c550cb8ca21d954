"""The part of a report that shows a pipeline: its stages, their memory, and its schedule by stage and microbatch."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.explanation import Stages
from autoshard.pipeline.drawing import draw
from autoshard.pipeline.schedule import ONE_PROGRAM, WEIGHTS_APART, Schedule, Task, pieces_in_flight
from autoshard.pipeline.scheduling import schedule_of
from autoshard.pipeline.simulation import PieceCosts, Timeline, simulate
from autoshard.pipeline.waiting import REASONS, waits
from autoshard.render import Drawing, Heading, Paragraph, Part, Table, format_bytes, format_percent, format_seconds
from autoshard.strategy import PipelineRecord, Record

WIDTH = 110  # columns of the schedule's drawing


def pipeline_parts(record: Record, stages: Stages | None) -> list[Part]:
    """The section on a pipeline's stages; none where there are none."""
    pipeline = record.pipeline
    if pipeline is None or stages is None:
        return [] if record.program.stages == 1 else _one_program(record)
    n, found = len(pipeline.passes), list[Part]()
    for number, own in enumerate(pipeline.passes, 1):
        found += [Heading("Pipeline" if n == 1 else f"Pipeline, pass {number} of {n}"), *_pass(record, own, stages)]
    if n > 1:
        why = "later parts of the step read what comes of all examples in earlier ones"
        found.insert(0, Paragraph(f"The step goes over its microbatches {n} times, one pipeline after the other, since {why}."))
    return found


def _pass(record: Record, pipeline: PipelineRecord, stages: Stages) -> list[Part]:
    """The stages of one pass over the microbatches."""
    timeline = timeline_of(record, pipeline)
    alive = pieces_in_flight(timeline.schedule)
    rows = tuple(
        (
            str(number),
            _devices(pipeline, number),
            str(stage.record.mesh),
            format_seconds(stage.forward_seconds),
            format_seconds(stage.backward_seconds + stage.weights_seconds),
            format_seconds(stage.update_seconds),
            format_seconds(stage.after_seconds),
            format_seconds(max(stage.send_seconds, stage.send_back_seconds)),
            f"{alive[number]} x {format_bytes(stage.residual_bytes)}",
            format_bytes(stage.peak_bytes),
            format_percent(stages.idle_shares[pipeline.part(number)]),
        )
        for number, stage in enumerate(pipeline.stages)
    )
    columns = ("stage", "devices", "mesh", ">forward", ">backward", ">update", ">after", ">sending", ">kept", ">peak", ">waiting")
    notes = (
        "forward, backward and sending are of one microbatch; update: what follows for gradients and state once a step (U); after: what "
        "else runs once a step, such as updates that wait for a norm of all gradients.",
        "kept: the most microbatches that wait for their backward pass, and what each keeps in memory; peak: of memory in all.",
        "waiting: the share of the step in which the devices have nothing to do until other stages are done.",
    )
    several = f", {pipeline.chunks} chunks a stage" if pipeline.chunks > 1 else ""
    said = f"Schedule {pipeline.schedule}: {record.program.microbatches} microbatches{several}."
    drawn = Drawing(draw(timeline, WIDTH))
    return [Paragraph(said), drawn, Table(columns, rows, notes), _waiting(timeline, pieces_of(pipeline))]


def _waiting(timeline: Timeline, pieces: Sequence[PieceCosts]) -> Table:
    """What each stage waits for, and its longest wait."""
    found = waits(timeline, pieces)
    rows = []
    for stage in range(len(timeline.spans)):
        own = [wait for wait in found if wait.stage == stage]
        shares = (sum(wait.seconds for wait in own if wait.reason == reason) / (timeline.makespan_seconds or 1.0) for reason in REASONS)
        longest = max((wait for wait in own if wait.reason != "end"), key=lambda wait: wait.seconds, default=None)
        told = "" if longest is None else f"{longest}, {format_seconds(longest.seconds)} from {format_seconds(longest.start_seconds)}"
        rows.append((str(stage), *map(format_percent, shares), told))
    columns = ("devices of stage", ">for stages", ">for transfers", ">for memory", ">at the end", "longest wait")
    notes = ("for memory: a forward task is ready, and what it keeps has no room until a backward task is done.",)
    return Table(columns, tuple(rows), notes)


def _one_program(record: Record) -> list[Part]:
    """The section on stages that are one program: their ticks."""
    n, m, rounds, apart = record.program.stages, record.program.microbatches, record.program.rounds, record.program.weights_apart
    forward = _in_groups(n, m, rounds)
    name = WEIGHTS_APART if apart else next(name for name, tried in ONE_PROGRAM.items() if rounds in tried)
    backward = [*reversed(forward)]
    order = [Task(kind, *task) for kind, tasks in (("F", forward), ("B", backward), ("W", backward if apart else [])) for task in tasks]
    timeline = simulate(Schedule(name, (tuple(order),) * n), PieceCosts(1.0, 1.0, 1.0 if apart else 0.0))
    ticks = len(forward) + n - 1
    late = "; gradients of weights come after the last one, where no stage waits" if apart else ""
    through = f", through which they go {rounds} times, each time through other layers," if rounds > 1 else ", which"
    said = (
        f"Schedule {name}: {m} microbatches in {n} stages of the scanned layers{through} run in {ticks} ticks forward and as many "
        f"backward. A stage computes in all of them, and in {format_percent((n - 1) / ticks)} of them nothing that counts{late}; the rest "
        "of the step is shared among all stages' devices."
    )
    return [Heading("Pipeline"), Paragraph(said), Drawing(draw(timeline, WIDTH))]


def schedule_as(record: Record, pipeline: PipelineRecord) -> Schedule:
    """The schedule of a record."""
    if pipeline.orders:
        return Schedule.of_words(pipeline.schedule, pipeline.orders, pipeline.chunks, pipeline.placement)
    return schedule_of(pipeline.schedule, pipeline.n_parts, record.program.microbatches, pipeline.chunks)


def pieces_of(pipeline: PipelineRecord) -> tuple[PieceCosts, ...]:
    """The costs of the tasks of a record's stages."""
    return tuple(
        PieceCosts(*tasks, each.residual_bytes, each.residual_bytes, each.update_seconds)
        for each in pipeline.stages
        for tasks in ((each.forward_seconds, each.backward_seconds, each.weights_seconds),)
    )


def timeline_of(record: Record, pipeline: PipelineRecord) -> Timeline:
    """The predicted start and end of every task."""
    stages = pipeline.stages
    sends = [stage.send_seconds for stage in stages[:-1]], [stage.send_back_seconds for stage in stages[1:]]
    return simulate(schedule_as(record, pipeline), pieces_of(pipeline), *sends)


def _in_groups(n_stages: int, n_microbatches: int, n_chunks: int) -> list[tuple[int, int]]:
    """Microbatch and chunk of each forward task of a stage: chunk by chunk in groups of as many microbatches as there are stages."""
    groups = [range(first, min(first + n_stages, n_microbatches)) for first in range(0, n_microbatches, n_stages)]
    return [(i, c) for group in groups for c in range(n_chunks) for i in group]


def _devices(pipeline: PipelineRecord, number: int) -> str:
    part = pipeline.part(number)
    first = sum(stage.record.mesh.size for stage in pipeline.stages[:part])
    last = first + pipeline.stages[part].record.mesh.size - 1
    return str(first) if first == last else f"{first} to {last}"
