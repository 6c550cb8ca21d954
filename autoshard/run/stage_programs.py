"""The lowered programs of a step, one or those of each stage's tasks, for compilation without running them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from jax.sharding import AbstractMesh, Mesh

from autoshard.cluster import Cluster
from autoshard.explanation.explain_pipeline import schedule_as
from autoshard.lower import abstract_mesh
from autoshard.lower.opaque import ANY_PLATFORM
from autoshard.pipeline.lowered import LoweredProgram, lowered_programs
from autoshard.pipeline.schedule import pieces_in_flight
from autoshard.pipeline.tasks import all_programs
from autoshard.run.pipeline_step import passes_as, plan_of
from autoshard.run.program import program_of
from autoshard.run.step import Step
from autoshard.strategy import Record
from autoshard.trace import Traced


@dataclass(frozen=True, slots=True, eq=False)
class LoweredPart:
    """The lowered programs of a stage, or the one of a step without stages, with its record and predicted peak."""

    record: Record
    peak_bytes: float
    programs: Sequence[LoweredProgram]

    @property
    def cluster(self) -> Cluster:
        """The devices that they run on."""
        return Cluster.from_dict(self.record.cluster)


def lowered_parts(
    fn: Callable,
    args: tuple,
    record: Record,
    traced: Traced | None,
    platform: str | None,
    meshes: Sequence[Mesh | AbstractMesh] | None = None,
) -> Iterator[LoweredPart]:
    """The programs of a step; of several passes over the microbatches those of each stage, one after the other.

    Args:
        args: as they are stored.
        platform: as for `lowered_programs`.
        meshes: of the stages; None: of no devices in particular.

    Raises:
        StrategyError: the function is not the strategy's program.
    """
    if (pipeline := record.pipeline) is None:
        lowered = Step(fn, record, None).lower(*args, platform=platform or ANY_PLATFORM)
        yield LoweredPart(record, record.cost.peak_bytes, [LoweredProgram("step", 1, lowered, 0.0)])
        return
    meshes = meshes or [abstract_mesh(stage.record.mesh) for stage in pipeline.stages]
    whole, _, _ = program_of(fn, args, record, before=traced)
    for _, staged, own in passes_as(whole, record, pipeline):
        schedule = schedule_as(record, own)
        alive, n = pieces_in_flight(schedule), schedule.n_microbatches
        plans = [plan_of(staged, number, own, mesh) for number, mesh in enumerate(meshes)]
        for number, programs in enumerate(all_programs(staged, plans, schedule)):
            stage, plan, saved = staged.stages[number], plans[number], own.stages[number]
            yield LoweredPart(saved.record, saved.peak_bytes, lowered_programs(stage, plan, programs, n, alive[number], platform))
