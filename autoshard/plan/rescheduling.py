"""A pipeline under another schedule: the same stages, with their tasks in another order."""

from __future__ import annotations

from dataclasses import replace

from autoshard.explanation.explain_pipeline import pieces_of, schedule_as, timeline_of
from autoshard.pipeline.schedule import alive_bytes, pieces_in_flight
from autoshard.pipeline.scheduling import Workload, scheduled
from autoshard.plan.plan import Plan
from autoshard.strategy import PipelineRecord, Record


def rescheduled(plan: Plan, name: str) -> Plan:
    """A pipeline's plan with the schedule of least makespan that a name allows, for the predicted costs of its stages; in a second or so.

    Raises:
        PipelineError: the stages have no such schedule, or no room for it.
    """
    record, pipeline = plan.record, plan.record.pipeline
    assert pipeline is not None, "of a pipeline"
    *earlier, (last, more, peak) = [_rescheduled(record, own, name) for own in pipeline.passes]
    own = replace(last, earlier=tuple(each for each, *_ in earlier))
    more += sum(seconds for _, seconds, _ in earlier)
    cost = replace(
        record.cost,
        makespan_seconds=record.cost.makespan_seconds + more,
        objective_seconds=record.cost.objective_seconds + more,
        peak_bytes=max(peak, *(other for *_, other in earlier), 0.0),
    )
    return Plan(replace(record, pipeline=own, cost=cost), plan._traced, plan._pins, plan._call, plan._known, plan._passes)


def _rescheduled(record: Record, pipeline: PipelineRecord, name: str) -> tuple[PipelineRecord, float, float]:
    """One pass under another schedule, how many seconds more it takes, and its peak in bytes."""
    before, lasting = schedule_as(record, pipeline), _lasting_bytes(record, pipeline)
    limit = record.limit_bytes
    pieces = pieces_of(pipeline)
    work = Workload(
        pipeline.n_parts,
        record.program.microbatches,
        pieces,
        pipeline.placement,
        tuple(stage.send_seconds for stage in pipeline.stages[:-1]),
        tuple(stage.send_back_seconds for stage in pipeline.stages[1:]),
        tuple(limit - own for own in lasting),
    )
    found = scheduled(work, name).schedule
    counts = zip(pipeline.stages, pieces_in_flight(before), pieces_in_flight(found), strict=True)
    stages = tuple(replace(stage, peak_bytes=stage.peak_bytes + (now - was) * stage.residual_bytes) for stage, was, now in counts)
    own = replace(pipeline, schedule=name, orders=found.words, stages=stages)
    more = timeline_of(record, own).makespan_seconds - timeline_of(record, pipeline).makespan_seconds
    return own, more, max(last + alive for last, alive in zip(lasting, alive_bytes(found, pieces), strict=True))


def _lasting_bytes(record: Record, pipeline: PipelineRecord) -> list[float]:
    """What each part of the devices has beside residuals."""
    alive = alive_bytes(schedule_as(record, pipeline), pieces_of(pipeline))
    peaks = [[pipeline.stages[k].peak_bytes for k in pipeline.stages_of(part)] for part in range(pipeline.n_parts)]
    return [max(max(own), record.cost.peak_bytes) - kept for own, kept in zip(peaks, alive, strict=True)]
