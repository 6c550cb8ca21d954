"""The search of the stages of one cut: each as a program of its own on its part of the cluster, within the memory that others leave."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.errors import InfeasibleError, OutOfTime, SearchLimitError
from autoshard.ir import Layout, Mesh, shards
from autoshard.ir.pieces import part_of
from autoshard.judge.evaluate import evaluate
from autoshard.judge.model import CostModel
from autoshard.lower import STAGE_AXIS
from autoshard.pipeline.cuts import Cuts
from autoshard.pipeline.figures import stage_figures
from autoshard.pipeline.micro import loop_of
from autoshard.pipeline.schedule import pieces_in_flight
from autoshard.pipeline.scheduling import schedule_of
from autoshard.pipeline.stages import Stage, Staged
from autoshard.pipeline.tasks import may_join
from autoshard.plan.found_pipelines import FoundPipeline, FoundStage
from autoshard.plan.plan import Plan
from autoshard.problem import Problem
from autoshard.progress import Progress, part
from autoshard.render import format_bytes
from autoshard.rules import rules_of
from autoshard.trace import Traced

CHUNKS = {"interleaved": (2, 3, 4), "auto": (1, 2, 3, 4, 6, 8, 12)}  # of each part of the devices, that are compared; 1 for other schedules
TRIES = 3  # searches of a stage with less and less memory


StageSearch = Callable[[Stage, Cluster, Mesh | None, Mapping[int, Layout], float, Progress, int], tuple[Plan, Problem]]
"""The search of one stage's program on its devices: a strategy on a mesh, or on any, with some layouts fixed, within a memory limit.

The last of its arguments is how many searches are left at least, this one included, among which the time is divided.
"""


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """A pipeline as `autoshard.search` is called for it.

    Attributes:
        n_parts: of the devices.
        schedule: its name.
        chunks: stages on each part of the devices; None: any number that the schedule may have.
        microbatches: how many; None: those of `MICROBATCHES` that divide the batch.
        mesh: of each part; None: searched.
        limit: bytes that a device may hold.
        ends: the exceptions that end a search early.
        start: an earlier strategy, whose number of microbatches and mesh are tried too; None: there is none.
        hosted: the argument leaves that are in the memory of hosts between steps.
        hosted_by_stage: whether only those of stages that do not fit otherwise are.
        cuts: those of programs in so many microbatches, as far as they are known; what is made is added.
    """

    n_parts: int
    schedule: str
    microbatches: int | None
    mesh: Mesh | None
    limit: float
    ends: tuple[type[BaseException], ...] = ()
    start: Plan | None = None
    hosted: tuple[int, ...] = ()
    hosted_by_stage: bool = False
    chunks: int | None = None
    cuts: dict[tuple[Traced, int], Cuts] = field(default_factory=dict)

    def cuts_of(self, traced: Traced, n: int) -> Cuts:
        """The cuts of a program in so many microbatches."""
        if (traced, n) not in self.cuts:
            self.cuts[traced, n] = Cuts(traced, n)
        return self.cuts[traced, n]

    @property
    def layouts(self) -> list[tuple[int, str]]:
        """The numbers of chunks, and how they are placed, that are compared."""
        numbers = CHUNKS.get(self.schedule, (1,)) if self.chunks is None else (self.chunks,)
        places = ("loop",) if self.schedule != "auto" else ("v", "loop")
        return [(n, place) for n in numbers for place in places if n > 1 or place == "loop"]


class Planner:
    """The search of one cut in one number of microbatches."""

    def __init__(
        self,
        staged: Staged,
        placement: str,
        cluster: Cluster,
        asked: Pipeline,
        search: StageSearch,
        progress: Progress,
        n_planners: int = 1,
        layouts: Mapping[str, Layout] | None = None,
        hosted: Staged | None = None,
    ):
        """``n_planners`` is how many numbers of microbatches are left to search, this one included.

        ``layouts`` are those that other passes give to arrays, by their names. ``hosted`` has the stages with optimizer state in the memory
        of hosts, which those are that do not fit otherwise.
        """
        self.hosted = hosted
        self.layouts: Mapping[str, Layout] | dict[str, Layout] = layouts or {}
        self.staged, self.placement, self.cluster, self.asked, self.search = staged, placement, cluster, asked, search
        self.chunks: int = len(staged.stages) // asked.n_parts
        self.progress = progress
        self.n_left = n_planners * len(staged.stages) * (1 if asked.mesh is not None else 2)
        self.parts: tuple[Cluster, ...] = cluster.stage_parts(asked.n_parts)
        whole = Mesh(((STAGE_AXIS, asked.n_parts), ("device", self.parts[0].n_devices)))
        self.between: Communication = Communication(cluster.between(asked.n_parts).links(whole))
        n, name = staged.n_microbatches, asked.schedule
        usual = "1f1b" if name == "auto" and self.chunks == 1 else name  # needs least: the schedule that is found has what is left
        many = n if name == "gpipe" else min(n, 3 * asked.n_parts)
        self.in_flight: tuple[int, ...] = pieces_in_flight(schedule_of(usual, asked.n_parts, many, self.chunks, placement))

    def best(self) -> FoundPipeline:
        """The plan on the mesh of least step time."""
        if self.asked.mesh is not None:
            return self._plan(self.asked.mesh)
        stages = self.staged.stages
        fitting = [self._fitting(k, None, {}, part(self.progress, k / len(stages), 1 / len(stages))) for k in range(len(stages))]
        free = [found for _, found in fitting]
        if self.cluster.parts:
            mesh = _of_all([found.strategy.record.mesh for found in free])
            staged = replace(self.staged, stages=tuple(stage for stage, _ in fitting))
            return FoundPipeline(staged, self.asked.schedule, self.asked.n_parts, self.placement, tuple(free), mesh, self.asked.limit)
        plans, failure = [], None
        started = () if self.asked.start is None else (part.record.mesh for part in self.asked.start.stages)
        meshes = (*(found.strategy.record.mesh for found in free), *(mesh for mesh in started if mesh.size == self.parts[0].n_devices))
        for mesh in dict.fromkeys(replace(mesh, placement=None) for mesh in meshes):
            try:
                plans.append(self._plan(mesh))
            except (InfeasibleError, SearchLimitError) as error:
                failure = error
                if isinstance(error, OutOfTime):
                    break
        if not plans:
            assert failure is not None
            raise failure
        return min(plans, key=lambda plan: plan.makespan_seconds)

    def _plan(self, mesh: Mesh) -> FoundPipeline:
        """The plan on one mesh. What a stage sends has the layout in which another one reads it, so that no device waits for the host; and
        the rows of an array have one layout on all stages.
        """
        known: dict[tuple[Any, ...], Layout] = {("array", name): layout for name, layout in self.layouts.items()}
        stages, found, n = [], [], len(self.staged.stages)
        for k in range(n):
            stage, own = self._fitting(k, mesh, known, part(self.progress, k / n, 1 / n))
            stages.append(stage)
            found.append(own)
            layout = own.strategy.record.assignment.layout
            values = _message_values(stage) | _row_values(self.staged, stage)
            known |= {key: layout(value) for value, key in values.items() if key not in known}
        staged = replace(self.staged, stages=tuple(stages))
        return FoundPipeline(staged, self.asked.schedule, self.asked.n_parts, self.placement, tuple(found), mesh, self.asked.limit)

    def _fitting(self, k: int, mesh: Mesh | None, known: Mapping[tuple[Any, ...], Layout], progress: Progress) -> tuple[Stage, FoundStage]:
        """A stage as it is, or with its optimizer state on hosts where it does not fit otherwise.

        Args:
            known: layouts of what stages share.
        """
        stage = self.staged.stages[k]
        spare = stage if self.hosted is None else self.hosted.stages[k]
        try:
            return stage, self._stage(stage, mesh, self._fixed(stage, known), progress)
        except InfeasibleError:
            if spare.traced is stage.traced:
                raise
            return spare, self._stage(spare, mesh, self._fixed(spare, known), progress)

    def _fixed(self, stage: Stage, known: Mapping[tuple[Any, ...], Layout]) -> dict[int, Layout]:
        """The layouts of a stage's values that others have fixed."""
        if not known:
            return {}
        fixed = {value: known[key] for value, key in _message_values(stage).items() if key in known}
        fixed |= {inner: _inside(fixed[value]) for value, inner in _slices(stage).items() if value in fixed}
        return fixed | {value: known[key] for value, key in (_arrays(stage) | _row_values(self.staged, stage)).items() if key in known}

    def _stage(self, stage: Stage, mesh: Mesh | None, fixed: Mapping[int, Layout], progress: Progress) -> FoundStage:
        """A stage's strategy within what the microbatches in flight leave of the memory."""
        in_flight, share = self.in_flight[stage.number], self.asked.limit / self.chunks
        joins = may_join(stage) and self.asked.schedule != "gpipe"
        limit, smallest = share, math.inf
        devices = self.parts[part_of(stage.number, self.asked.n_parts, self.placement)]
        for _ in range(TRIES):
            strategy, problem = self._searched(stage, devices, mesh, fixed, limit, progress)
            self.n_left: int = max(self.n_left - 1, 1)
            record = strategy.record
            model = problem.model if problem.mesh == record.mesh else CostModel(devices, record.mesh)
            judgement = evaluate(problem.facts, model, record.assignment)
            figures = stage_figures(stage, self.staged.loop_level, problem.facts, model, judgement)
            peak = figures.peak_bytes(in_flight, joins)
            if peak <= share:
                sent = self._sent(stage, record.mesh, judgement.assignment.layout)
                return FoundStage(strategy, figures, *sent, joins, self._rows_seconds(stage, record.mesh, judgement.assignment.layout))
            smallest = min(smallest, peak)
            limit = 0.999 * limit - (peak - share)  # arrays of other microbatches take the rest
            if limit <= 0:
                break
        raise InfeasibleError(
            f"stage {stage.number} ({stage.lines}) does not fit: schedule {self.asked.schedule!r} has {in_flight} of "
            f"{self.staged.n_microbatches} microbatches in flight there, and the smallest peak found is {format_bytes(smallest)} of "
            f"{format_bytes(share)} a device. Use more microbatches, more stages, or another schedule.",
            smallest,
        )

    def _searched(
        self, stage: Stage, devices: Cluster, mesh: Mesh | None, fixed: Mapping[int, Layout], limit: float, progress: Progress
    ) -> tuple[Plan, Problem]:
        try:
            return self.search(stage, devices, mesh, fixed, limit, progress, self.n_left)
        except InfeasibleError as error:
            raise InfeasibleError(f"stage {stage.number} ({stage.lines}): {error}", error.smallest_peak_bytes, error.proven) from None

    def _sent(self, stage: Stage, mesh: Mesh, layout: Callable[[int], Any]) -> tuple[float, float]:
        """Seconds in which one microbatch's activations, and its gradients, are sent to other stages."""
        graph = stage.traced.graph
        forward = backward = 0.0
        for message, value in zip(stage.sends, graph.results[len(stage.results) :], strict=True):
            if message.kind == "loop":
                nbytes = graph.values[value].nbytes / shards(layout(value), mesh.sizes) / self.staged.n_microbatches
                nbytes *= len(message.targets)
                forward, backward = (forward, backward + nbytes) if message.backward else (forward + nbytes, backward)
        seconds = self.between.seconds
        return seconds("collective_permute", forward, (0,)), seconds("collective_permute", backward, (0,))

    def _rows_seconds(self, stage: Stage, mesh: Mesh, layout: Callable[[int], Any]) -> float:
        """Seconds in which a stage is sent its rows of arrays by rows from another part of the devices, and sends the new ones back."""
        graph, divided = stage.traced.graph, self.staged.divided
        new = {part for k in divided.result_dims for part in divided.results[k]}
        results = [value for k, value in zip(stage.results, graph.results, strict=False) if k in new]

        def seconds(values: Iterable[int]) -> float:
            nbytes = sum(graph.values[value].nbytes / shards(layout(value), mesh.sizes) for value in values)
            return self.between.seconds("collective_permute", nbytes, (0,)) if nbytes else 0.0

        return seconds(_row_values(self.staged, stage)) + seconds(results)


def _message_values(stage: Stage) -> dict[int, tuple]:
    """The messages of the loop by value number of a stage's program, received ones and sent ones."""
    graph = stage.traced.graph
    received = zip(graph.arguments[len(stage.arguments) :], stage.receives, strict=True)
    sent = zip(graph.results[len(stage.results) :], stage.sends, strict=True)
    return {value: message.key for value, message in (*received, *sent) if message.kind == "loop"}


def _row_values(staged: Staged, stage: Stage) -> dict[int, tuple]:
    """The arguments by rows, by value number of a stage's program."""
    values = dict(zip(stage.arguments, stage.traced.graph.arguments, strict=False))
    return {values[part]: ("rows", k) for k in staged.divided.argument_dims for part in staged.divided.arguments[k] if part in values}


def _arrays(stage: Stage) -> dict[int, tuple]:
    """The arguments of a stage's program that are no messages, and its results, by value number: each by its name."""
    graph, n, m = stage.traced.graph, len(stage.arguments), len(stage.results)
    named = [*zip(graph.arguments[:n], graph.argument_paths, strict=False), *zip(graph.results[:m], graph.result_paths, strict=False)]
    return {value: ("array", name) for value, name in named}


def layouts_by_name(found: FoundPipeline) -> dict[str, Layout]:
    """The layouts of the arrays that the stages of a pipeline read or replace, by their names."""
    layouts: dict[str, Layout] = {}
    for stage, own in zip(found.staged.stages, found.stages, strict=True):
        graph, layout = stage.traced.graph, own.strategy.record.assignment.layout
        read = {value for op in graph.ops for value in op.operands} | {graph.arguments[k] for _, k in graph.aliases}
        named = zip(graph.arguments[: len(stage.arguments)], graph.argument_paths, strict=False)
        layouts |= {name: layout(value) for value, name in named if value in read}
    return layouts


def _slices(stage: Stage) -> dict[int, int]:
    """Per message that a stage's loop reads, by value number, the slice of it that a microbatch gets."""
    graph = stage.traced.graph
    loop = loop_of(graph, rules_of(graph), stage.traced.microbatches)
    return dict(zip(loop.operands, loop.bodies[0].inputs, strict=True))


def _inside(layout: Layout) -> Layout:
    """The layout of a slice of an array along its first dimension."""
    return tuple(max(dim - 1, -1) for dim in layout)


def _of_all(meshes: Sequence[Mesh]) -> Mesh:
    """What stands for the mesh of stages with meshes of other sizes: all devices are on the axis of stages, and other axes have size 1."""
    names = dict.fromkeys(name for mesh in meshes for name in mesh.all_names if name != STAGE_AXIS)
    axis = STAGE_AXIS, sum(mesh.size for mesh in meshes)
    return Mesh((axis,), shape=(axis, *((name, 1) for name in names)))
