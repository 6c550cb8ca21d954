"""A pipeline as it was found: the strategies of its stages, with the schedule that is found for them, its step time and its memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from autoshard.errors import PipelineError
from autoshard.ir import Mesh, shards
from autoshard.ir.pieces import part_of, piece_of, rows_of
from autoshard.pipeline.figures import StageFigures
from autoshard.pipeline.schedule import UPDATE, Schedule, alive_bytes
from autoshard.pipeline.scheduling import Workload, scheduled
from autoshard.pipeline.simulation import PieceCosts, simulate
from autoshard.pipeline.stages import Staged
from autoshard.plan.plan import Plan

USUAL = "auto"  # the schedule where none is asked for
ESTIMATING = 5_000  # tasks that are scheduled for the estimate of a number of chunks


@dataclass(frozen=True, slots=True, eq=False)
class FoundStage:
    """A stage's strategy.

    Attributes:
        figures: of its tasks.
        send_seconds, send_back_seconds: of a microbatch's activations and gradients to other stages.
        joins: whether its forward and backward task may be one program.
        rows_seconds: of its rows of arrays by rows from another part of the devices, and of the new ones back.
    """

    strategy: Plan
    figures: StageFigures
    send_seconds: float
    send_back_seconds: float
    joins: bool
    rows_seconds: float = 0.0

    def costs(self, seconds: Mapping[str, float]) -> PieceCosts:
        """Of its tasks, which take so many seconds."""
        kept = self.figures.residual_bytes
        forward, backward, weights = (seconds.get(kind, 0.0) for kind in "FBW")
        return PieceCosts(forward, backward, weights, 0.0 if self.joins else kept, kept, seconds.get(UPDATE, 0.0))


@dataclass(frozen=True, eq=False)
class FoundPipeline:
    """A pipeline: its stages' strategies, and its schedule, which is found for them.

    Attributes:
        earlier: the pipelines of the passes before this one, where the step has several.
        beside_bytes: what a device has, beside what this pass has, of the arrays of others.
    """

    staged: Staged
    name: str
    n_parts: int
    placement: str
    stages: tuple[FoundStage, ...]
    mesh: Mesh
    limit: float
    earlier: tuple[FoundPipeline, ...] = ()
    beside_bytes: float = 0.0

    @property
    def passes(self) -> tuple[FoundPipeline, ...]:
        """The pipelines of all passes, in order."""
        return (*self.earlier, self)

    @cached_property
    def schedule(self) -> Schedule:
        """The orders of least makespan within the memory of each part of the devices."""
        work = self._work([found.figures.seconds for found in self.stages])
        try:
            return scheduled(work, self.name).schedule
        except PipelineError:  # estimates of memory are apart by what is counted twice
            least = "1f1b" if len(self.stages) == self.n_parts else "interleaved"
            return scheduled(replace(work, room_bytes=()), least if self.name == USUAL else self.name).schedule

    def _work(self, tasks: Sequence[Mapping[str, float]]) -> Workload:
        pieces = tuple(found.costs(seconds) for found, seconds in zip(self.stages, tasks, strict=True))
        sends = tuple(found.send_seconds for found in self.stages[:-1]), tuple(found.send_back_seconds for found in self.stages[1:])
        room = tuple(self.limit - self._lasting_bytes(part) for part in range(self.n_parts))
        joins = self.stages[-1].joins
        return Workload(self.n_parts, self.staged.n_microbatches, pieces, self.placement, *sends, room, joins)

    def of_few(self, chunks: int, placement: str) -> float:
        """The step time of a few microbatches if each part of the devices has so many chunks, with as large transfers between them."""
        work = self._work([found.figures.seconds for found in self.stages])
        parts = chunks * self.n_parts // len(work.pieces)
        pieces = tuple(each.divided(parts) for each in work.pieces for _ in range(parts))
        sends = tuple(max(each) for each in (work.sends, work.sends_back))
        n = len(pieces) - 1
        few = min(work.n_microbatches, 2 * self.n_parts + 2)
        rows = [found.rows_seconds / parts for found in self.stages for _ in range(parts)]
        moved = [sum(rows[piece] for piece in _moved(part, self.n_parts, chunks, placement)) for part in range(self.n_parts)]
        shares = replace(work, n_microbatches=few, pieces=pieces, placement=placement, sends=(sends[0],) * n, sends_back=(sends[1],) * n)
        try:
            return scheduled(shares, self.name, ESTIMATING).makespan_seconds + max(moved)
        except PipelineError:
            return math.inf

    def beside(self, names: Sequence[str]) -> float:
        """The most bytes that a device has of the step's arguments but for those of some names."""
        found = [0.0] * self.n_parts
        for piece, (stage, own) in enumerate(zip(self.staged.stages, self.stages, strict=True)):
            graph, layout = stage.traced.graph, own.strategy.record.assignment.layout
            for k, is_home, value, name in zip(stage.arguments, stage.homes, graph.arguments, graph.argument_paths, strict=False):
                is_there = is_home and not graph.values[value].on_host
                if is_there and name not in names and k < len(self.staged.divided.arguments):
                    nbytes = graph.values[value].nbytes / shards(layout(value), own.strategy.record.mesh.sizes)
                    found[part_of(piece, self.n_parts, self.placement)] += nbytes
        return max(found)

    def own(self, part: int) -> list[FoundStage]:
        """The stages on a part of the devices."""
        return [found for piece, found in enumerate(self.stages) if part_of(piece, self.n_parts, self.placement) == part]

    def _lasting_bytes(self, part: int) -> float:
        """What a part of the devices has beside residuals: of all its stages what lasts, and what the one that runs makes for itself.

        Of several chunks some are updated while others run.
        """
        figures = [found.figures for found in self.own(part)]
        runs = max(found.figures.own_bytes(found.joins) for found in self.own(part))
        updated = sum(each.update_bytes for each in figures)
        return sum(each.lasting_bytes for each in figures) + (max(runs, updated) if len(figures) == 1 else runs + updated)

    @property
    def makespan_seconds(self) -> float:
        """The predicted step time."""
        return sum(each._seconds([found.figures.seconds for found in each.stages]) for each in self.passes)

    @property
    def objective_seconds(self) -> float:
        """The same without overlap of communication with computing inside tasks."""
        return sum(each._seconds([found.figures.objective_seconds for found in each.stages]) for each in self.passes)

    @property
    def peak_bytes(self) -> float:
        """The peak of the device with the fullest memory: one of its chunks runs, and all keep what they hold."""
        return max(each._peak_bytes for each in self.passes)

    @property
    def _peak_bytes(self) -> float:
        pieces = [found.costs({}) for found in self.stages]
        own = max(self._lasting_bytes(part) + alive for part, alive in enumerate(alive_bytes(self.schedule, pieces)))
        return own + self.beside_bytes

    @property
    def bound_seconds(self) -> float:
        """A lower bound of the objective, whatever the shardings of the stages: the work of one of them."""
        return sum(max(found.strategy.lower_bound_seconds for found in each.stages) for each in self.passes)

    def _seconds(self, tasks: Sequence[Mapping[str, float]]) -> float:
        work = self._work(tasks)
        ends = simulate(self.schedule, work.pieces, work.sends, work.sends_back).end_seconds
        if any(message.kind != "loop" for stage in self.staged.stages for message in stage.sends):
            return max(ends) + max(self._once_seconds)
        return max(end + own for end, own in zip(ends, self._once_seconds, strict=True))

    def once_seconds(self, piece: int) -> float:
        """What a piece does once a step beside its update: what comes around the loop, and transfers of rows that another part has."""
        found, part = self.stages[piece], part_of(piece, self.n_parts, self.placement)
        is_moved = piece in _moved(part, self.n_parts, len(self.stages) // self.n_parts, self.placement)
        return found.figures.after_seconds + is_moved * found.rows_seconds

    @property
    def _once_seconds(self) -> list[float]:
        """The same of each part of the devices."""
        found = [0.0] * self.n_parts
        for piece in range(len(self.stages)):
            found[part_of(piece, self.n_parts, self.placement)] += self.once_seconds(piece)
        return found


def _moved(part: int, n_parts: int, chunks: int, placement: str) -> list[int]:
    """The pieces on a part of the devices of whose layers another one has the rows between steps."""
    own = (piece_of(part, chunk, n_parts, placement) for chunk in range(chunks))
    return [piece for piece in own if rows_of(piece, chunks) != part]
