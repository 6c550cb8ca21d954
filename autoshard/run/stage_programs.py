"""The lowered programs of a pipeline's stages, for compilation without running them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from autoshard.explanation.explain_pipeline import schedule_as
from autoshard.pipeline.lowered import LoweredProgram, lowered_programs
from autoshard.pipeline.schedule import pieces_in_flight
from autoshard.pipeline.tasks import all_programs
from autoshard.run.pipeline_step import passes_as, plan_of
from autoshard.run.step import program_of
from autoshard.strategy import Record
from autoshard.trace import Traced


@dataclass(frozen=True, slots=True, eq=False)
class StagePrograms:
    """A stage's record, predicted peak, and lowered programs."""

    record: Record
    peak_bytes: float
    programs: Sequence[LoweredProgram]


def stage_programs(
    fn: Callable, args: tuple, record: Record, traced: Traced | None, meshes: Sequence[Mesh | AbstractMesh], platform: str | None
) -> Iterator[StagePrograms]:
    """Each stage's programs, lowered; of several passes over the microbatches those of each, one after the other.

    Args:
        meshes: of the stages.
        platform: as for `lowered_programs`.

    Raises:
        StrategyError: the function is not the strategy's program.
    """
    pipeline = record.pipeline
    assert pipeline is not None
    whole, _, _ = program_of(fn, args, record, before=traced)
    for _, staged, own in passes_as(whole, record, pipeline):
        schedule = schedule_as(record, own)
        alive, n = pieces_in_flight(schedule), schedule.n_microbatches
        plans = [plan_of(staged, number, own, mesh) for number, mesh in enumerate(meshes)]
        for number, programs in enumerate(all_programs(staged, plans, schedule)):
            stage, plan, saved = staged.stages[number], plans[number], own.stages[number]
            yield StagePrograms(saved.record, saved.peak_bytes, lowered_programs(stage, plan, programs, n, alive[number], platform))
