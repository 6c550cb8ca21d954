"""The part of a report that shows a pipeline: its stages, their memory, and its schedule by stage and microbatch."""

from __future__ import annotations

from autoshard.explanation import Stages
from autoshard.pipeline.drawing import draw
from autoshard.pipeline.schedule import ONE_PROGRAM, Schedule, Task, in_flight, in_groups, schedule_of
from autoshard.pipeline.simulation import PieceSeconds, Timeline, simulate
from autoshard.render import Drawing, Heading, Paragraph, Part, Table, format_bytes, format_percent, format_seconds
from autoshard.strategy import PipelineRecord, Record

WIDTH = 110  # columns of the schedule's drawing


def pipeline_parts(record: Record, stages: Stages | None) -> list[Part]:
    """The section on a pipeline's stages; none where there are none."""
    pipeline = record.pipeline
    if pipeline is None or stages is None:
        return [] if record.program.stages == 1 else _one_program(record)
    timeline = timeline_of(record, pipeline)
    alive = in_flight(timeline.schedule)
    rows = tuple(
        (
            str(number),
            _devices(pipeline, number),
            str(stage.record.mesh),
            format_seconds(stage.forward_seconds),
            format_seconds(stage.backward_seconds + stage.weights_seconds),
            format_seconds(stage.after_seconds),
            format_seconds(max(stage.send_seconds, stage.send_back_seconds)),
            f"{alive[number % pipeline.n_parts]} x {format_bytes(stage.residual_bytes)}",
            format_bytes(stage.peak_bytes),
            format_percent(stages.idle_shares[number % pipeline.n_parts]),
        )
        for number, stage in enumerate(pipeline.stages)
    )
    columns = ("stage", "devices", "mesh", ">forward", ">backward", ">after", ">sending", ">kept", ">peak memory", ">waiting")
    notes = (
        "forward, backward and sending are of one microbatch; after: what runs once a step, such as the optimizer's update.",
        "kept: the most microbatches that wait for their backward pass, and what each keeps in memory.",
        "waiting: the share of the step in which the devices have nothing to do until other stages are done.",
    )
    several = f", {pipeline.chunks} chunks a stage" if pipeline.chunks > 1 else ""
    said = f"Schedule {pipeline.schedule}: {record.program.microbatches} microbatches{several}."
    return [Heading("Pipeline"), Paragraph(said), Drawing(draw(timeline, WIDTH)), Table(columns, rows, notes)]


def _one_program(record: Record) -> list[Part]:
    """The section on stages that are one program: their ticks."""
    n, m, rounds = record.program.stages, record.program.microbatches, record.program.rounds
    forward = in_groups(n, m, rounds)
    tasks = [Task(kind, *task) for kind, order in (("F", forward), ("B", reversed(forward))) for task in order]
    name = next(name for name, tried in ONE_PROGRAM.items() if rounds in tried)
    timeline = simulate(Schedule(name, (tuple(tasks),) * n), PieceSeconds(1.0, 1.0))
    ticks = len(forward) + n - 1
    through = f", through which they go {rounds} times, each time through other layers," if rounds > 1 else ", which"
    said = (
        f"Schedule {name}: {m} microbatches in {n} stages of the scanned layers{through} run in {ticks} ticks forward and as many "
        f"backward. A stage computes in all of them, and in {format_percent((n - 1) / ticks)} of them nothing that counts; the rest "
        "of the step is shared among all stages' devices."
    )
    return [Heading("Pipeline"), Paragraph(said), Drawing(draw(timeline, WIDTH))]


def timeline_of(record: Record, pipeline: PipelineRecord) -> Timeline:
    """The predicted start and end of every task."""
    stages = pipeline.stages
    pieces = [PieceSeconds(stage.forward_seconds, stage.backward_seconds, stage.weights_seconds) for stage in stages]
    schedule = schedule_of(pipeline.schedule, pipeline.n_parts, record.program.microbatches, pipeline.chunks)
    return simulate(schedule, pieces, [stage.send_seconds for stage in stages[:-1]], [stage.send_back_seconds for stage in stages[1:]])


def _devices(pipeline: PipelineRecord, number: int) -> str:
    part = number % pipeline.n_parts
    first = sum(stage.record.mesh.size for stage in pipeline.stages[:part])
    last = first + pipeline.stages[part].record.mesh.size - 1
    return str(first) if first == last else f"{first} to {last}"
