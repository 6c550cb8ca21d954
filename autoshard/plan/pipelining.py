"""The search of a pipeline: a step cut into stages, each searched as a program of its own on its part of the cluster.

All stages have meshes of the same axes and sizes: of those that a stage is fastest on, the one with the least step time of the whole
schedule. A stage's search is told how much memory the microbatches in flight leave.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax

from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.cost.record import Cost
from autoshard.errors import InfeasibleError, OutOfTime, SearchLimitError, TraceError
from autoshard.ir import Layout, Mesh, shards
from autoshard.judge.evaluate import evaluate
from autoshard.judge.model import CostModel
from autoshard.lower import STAGE_AXIS, rows_spec
from autoshard.microbatch import divisors
from autoshard.pipeline import Stage, Staged, stages_of, with_state_on_hosts
from autoshard.pipeline.figures import StageFigures, stage_figures
from autoshard.pipeline.micro import loop_of
from autoshard.pipeline.schedule import Schedule, pieces_in_flight, schedule_of
from autoshard.pipeline.simulation import PieceSeconds, simulate
from autoshard.pipeline.tasks import joins_tasks
from autoshard.plan.argument_shardings import some
from autoshard.plan.meshes import with_stage_axis
from autoshard.plan.microbatching import found_with_each
from autoshard.plan.plan import Plan
from autoshard.problem import Problem
from autoshard.progress import Progress, part
from autoshard.render import format_bytes
from autoshard.rewrite import divisible, to_json
from autoshard.rules import rules_of
from autoshard.run.recorded import result_structure
from autoshard.run.structure import describe
from autoshard.strategy import BY_ROWS, PipelineRecord, Program, Provenance, Record, SearcherRecord, StageRecord, TensorRecord, version
from autoshard.trace import Traced

USUAL = "1f1b"  # the schedule where none is asked for
CHUNKS = 2  # of each part of the devices, where the schedule is interleaved
TRIES = 3  # searches of a stage with less and less memory
MICROBATCHES = (1, 2, 4)  # times the stages: numbers that are tried where none is given


class StageSearch(Protocol):
    """The search of one stage's program: a strategy on a mesh, or on any, with some layouts fixed, within a memory limit.

    ``n_left`` is how many searches are left at least, this one included, among which the time is divided.
    """

    def __call__(
        self, stage: Stage, mesh: Mesh | None, fixed: Mapping[int, Layout], limit: float, progress: Progress, n_left: int
    ) -> tuple[Plan, Problem]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Pipeline:
    """A pipeline as `autoshard.search` is called for it.

    Attributes:
        n_parts: of the devices.
        schedule: its name.
        microbatches: how many; None: those of `MICROBATCHES` that divide the batch.
        mesh: of each part; None: searched.
        limit: bytes that a device may hold.
        ends: the exceptions that end a search early.
        start: an earlier strategy, whose number of microbatches and mesh are tried too; None: there is none.
        hosted: the argument leaves that are in the memory of hosts between steps.
    """

    n_parts: int
    schedule: str
    microbatches: int | None
    mesh: Mesh | None
    limit: float
    ends: tuple[type[BaseException], ...] = ()
    start: Plan | None = None
    hosted: tuple[int, ...] = ()

    @property
    def chunks(self) -> int:
        """Stages on each part of the devices."""
        return CHUNKS if self.schedule == "interleaved" else 1


def pipelined(
    traced: Traced,
    cluster: Cluster,
    asked: Pipeline,
    search: StageSearch,
    searcher: Any,
    spent: Mapping[str, float],
    progress: Progress,
) -> list[Plan]:
    """The strategies of a step in stages, one for each number of microbatches, fastest first.

    Args:
        traced: the whole step.
        search: that of a stage, on its part of the cluster.
        searcher: its searcher, for the record.
        spent: what tracing took, and the number of ops.

    Raises:
        TraceError: the batch has no such microbatches.
        PipelineError: the step cannot be cut into as many stages.
        InfeasibleError: a stage does not fit; names the smallest peak found.
        SearchLimitError: the time was over before any pipeline was found.
    """

    def planned(n: int, n_left: int, progress: Progress) -> _Plan:
        schedule = schedule_of(asked.schedule, asked.n_parts, n, asked.chunks)
        rows = () if asked.chunks > 1 else None  # the chunks of a part have rows that are no neighbours
        staged = with_state_on_hosts(stages_of(traced, asked.n_parts * asked.chunks, n, rows=rows), asked.hosted)
        return _Planner(staged, schedule, cluster, asked, search, progress, n_left).best()

    numbers = numbers_of_microbatches(traced, asked.n_parts, asked.microbatches)
    if asked.start is not None and asked.microbatches is None and asked.start.stages:
        numbers = list(dict.fromkeys([*numbers, asked.start.microbatches]))
    found = sorted(found_with_each(numbers, planned, progress, (*asked.ends, OutOfTime)), key=lambda plan: plan.makespan_seconds)
    return [
        Plan(_record(traced, cluster, asked, each, searcher, spent), traced, parts=tuple(stage.strategy for stage in each.stages))
        for each in found
    ]


def numbers_of_microbatches(traced: Traced, n_stages: int, given: int | None) -> list[int]:
    """The numbers of microbatches to try: the one that is given, or as many as stages and a few times as many.

    Raises:
        TraceError: no number of them divides the batch.
    """
    if given is not None:
        return [given]
    possible = divisors(divisible(traced))
    wanted = [n_stages * times for times in MICROBATCHES]
    found = [n for n in wanted if n in possible] or [n for n in possible if n > 1][-1:]
    if not found:
        raise TraceError(
            f"a pipeline computes microbatches, whose number divides the batch, and the batch of {traced.graph.name!r} has no divisor. "
            "Use a larger batch, or leave stages out."
        )
    return found


@dataclass(frozen=True, slots=True, eq=False)
class _Found:
    """A stage's strategy, its figures, what it sends in seconds, and its memory while it runs and while others of its part do."""

    strategy: Plan
    figures: StageFigures
    send_seconds: float
    send_back_seconds: float
    peak_bytes: float
    held_bytes: float


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """A pipeline: its schedule, and its stages' strategies."""

    staged: Staged
    schedule: Schedule
    stages: tuple[_Found, ...]
    mesh: Mesh

    @property
    def makespan_seconds(self) -> float:
        """The predicted step time."""
        return self._seconds([found.figures.seconds for found in self.stages])

    @property
    def objective_seconds(self) -> float:
        """The same without overlap of communication with computing inside tasks."""
        return self._seconds([found.figures.objective_seconds for found in self.stages])

    @property
    def peak_bytes(self) -> float:
        """The peak of the device with the fullest memory: one of its chunks runs, and the others keep what they hold."""
        n = self.schedule.n_stages
        chunks = [self.stages[part::n] for part in range(n)]
        return max(found.peak_bytes - found.held_bytes + sum(other.held_bytes for other in own) for own in chunks for found in own)

    @property
    def bound_seconds(self) -> float:
        """A lower bound of the objective, whatever the shardings of the stages: the work of one of them."""
        return max(found.strategy.lower_bound_seconds for found in self.stages)

    def _seconds(self, tasks: Sequence[Mapping[str, float]]) -> float:
        pieces = [PieceSeconds(*(seconds.get(kind, 0.0) for kind in "FBW")) for seconds in tasks]
        sends = [found.send_seconds for found in self.stages[:-1]], [found.send_back_seconds for found in self.stages[1:]]
        after = max(found.figures.after_seconds for found in self.stages)
        return simulate(self.schedule, pieces, *sends).makespan_seconds + after


class _Planner:
    """The search of one cut in one number of microbatches."""

    def __init__(
        self,
        staged: Staged,
        schedule: Schedule,
        cluster: Cluster,
        asked: Pipeline,
        search: StageSearch,
        progress: Progress,
        n_planners: int = 1,
    ):
        """``n_planners`` is how many numbers of microbatches are left to search, this one included."""
        self.staged, self.schedule, self.cluster, self.asked, self.search = staged, schedule, cluster, asked, search
        self.progress = progress
        self.n_left = n_planners * len(staged.stages) * (1 if asked.mesh is not None else 2)
        self.part = cluster.part(asked.n_parts)
        whole = Mesh(((STAGE_AXIS, asked.n_parts), ("device", self.part.n_devices)))
        self.between = Communication(cluster.links(whole))
        self.in_flight = pieces_in_flight(schedule)

    def best(self) -> _Plan:
        """The plan on the mesh of least step time."""
        if self.asked.mesh is not None:
            return self._plan(self.asked.mesh)
        stages = self.staged.stages
        free = [self._stage(stage, None, {}, part(self.progress, k / len(stages), 1 / len(stages))) for k, stage in enumerate(stages)]
        plans, failure = [], None
        started = () if self.asked.start is None else (part.record.mesh for part in self.asked.start.stages)
        meshes = (*(found.strategy.record.mesh for found in free), *(mesh for mesh in started if mesh.size == self.part.n_devices))
        for mesh in dict.fromkeys(map(_unplaced, meshes)):
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

    def _plan(self, mesh: Mesh) -> _Plan:
        """The plan on one mesh. What a stage sends has the layout in which another one reads it, so that no device waits for the host; and
        the rows of an array have one layout on all stages.
        """
        known: dict[tuple, Layout] = {}
        found = []
        for k, stage in enumerate(self.staged.stages):
            values, rows = _message_values(stage), _row_values(self.staged, stage)
            fixed = {value: known[key] for value, key in values.items() if key in known}
            fixed |= {inner: _inside(fixed[value]) for value, inner in _slices(stage).items() if value in fixed}
            fixed |= {value: known[key] for value, key in rows.items() if key in known}
            n = len(self.staged.stages)
            found.append(self._stage(stage, mesh, fixed, part(self.progress, k / n, 1 / n)))
            layout = found[-1].strategy.record.assignment.layout
            known |= {key: layout(value) for value, key in (values | rows).items() if key not in known}
        return _Plan(self.staged, self.schedule, tuple(found), mesh)

    def _stage(self, stage: Stage, mesh: Mesh | None, fixed: Mapping[int, Layout], progress: Progress) -> _Found:
        """A stage's strategy within what the microbatches in flight leave of the memory."""
        part_number, in_flight = stage.number % self.asked.n_parts, self.in_flight[stage.number]
        share = self.asked.limit / self.asked.chunks
        limit, smallest = share, math.inf
        for _ in range(TRIES):
            strategy, problem = self._searched(stage, mesh, fixed, limit, progress)
            self.n_left = max(self.n_left - 1, 1)
            record = strategy.record
            model = CostModel(self.part, record.mesh)
            judgement = evaluate(problem.facts, model, record.assignment)
            figures = stage_figures(stage, problem.facts, model, judgement)
            joins = joins_tasks(stage, self.schedule.orders[part_number], stage.number // self.asked.n_parts)
            peak = figures.peak_bytes(in_flight, joins)
            if peak <= share:
                sent = self._sent(stage, record.mesh, judgement.assignment.layout)
                return _Found(strategy, figures, *sent, peak, figures.held_bytes(in_flight, joins))
            smallest = min(smallest, peak)
            limit = 0.999 * limit - (peak - share)  # arrays of other microbatches take the rest
            if limit <= 0:
                break
        raise InfeasibleError(
            f"stage {stage.number} ({stage.lines}) does not fit: schedule {self.schedule.name!r} has {in_flight} of "
            f"{self.schedule.n_microbatches} microbatches in flight there, and the smallest peak found is {format_bytes(smallest)} of "
            f"{format_bytes(share)} a device. Use more microbatches, more stages, or another schedule.",
            smallest,
        )

    def _searched(
        self, stage: Stage, mesh: Mesh | None, fixed: Mapping[int, Layout], limit: float, progress: Progress
    ) -> tuple[Plan, Problem]:
        try:
            return self.search(stage, mesh, fixed, limit, progress, self.n_left)
        except InfeasibleError as error:
            raise InfeasibleError(f"stage {stage.number} ({stage.lines}): {error}", error.smallest_peak_bytes, error.proven) from None

    def _sent(self, stage: Stage, mesh: Mesh, layout: Callable[[int], Any]) -> tuple[float, float]:
        """Seconds in which one microbatch's activations, and its gradients, are sent to other stages."""
        graph = stage.traced.graph
        forward = backward = 0.0
        for message, value in zip(stage.sends, graph.results[len(stage.results) :], strict=True):
            if message.kind == "loop":
                nbytes = graph.values[value].nbytes / shards(layout(value), mesh.sizes) / self.schedule.n_microbatches
                nbytes *= len(message.targets)
                forward, backward = (forward, backward + nbytes) if message.backward else (forward + nbytes, backward)
        seconds = self.between.seconds
        return seconds("collective_permute", forward, (0,)), seconds("collective_permute", backward, (0,))


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


def _slices(stage: Stage) -> dict[int, int]:
    """Per message that a stage's loop reads, by value number, the slice of it that a microbatch gets."""
    graph = stage.traced.graph
    loop = loop_of(graph, rules_of(graph), stage.traced.microbatches)
    return dict(zip(loop.operands, loop.bodies[0].inputs, strict=True))


def _inside(layout: Layout) -> Layout:
    """The layout of a slice of an array along its first dimension."""
    return tuple(max(dim - 1, -1) for dim in layout)


def _unplaced(mesh: Mesh) -> Mesh:
    return replace(mesh, placement=None)


# -- the record -----------------------------------------------------------------------------------------------------------


def _record(traced: Traced, cluster: Cluster, asked: Pipeline, plan: _Plan, searcher: Any, spent: Mapping[str, float]) -> Record:
    graph, staged = traced.graph, plan.staged
    mesh = with_stage_axis(plan.mesh, asked.n_parts)
    arguments = [_leaf(plan, "arguments", parts, staged.divided.argument_dims.get(k)) for k, parts in enumerate(staged.divided.arguments)]
    results = [_leaf(plan, "results", parts, staged.divided.result_dims.get(k)) for k, parts in enumerate(staged.divided.results)]
    options = SearcherRecord(searcher.name, plan.stages[0].strategy.record.searcher.options)
    return Record(
        name=f"{graph.name}_{searcher.name}",
        program=Program(
            graph.name,
            graph.fingerprint,
            len(graph.walk()),
            len(graph.values),
            plan.schedule.n_microbatches,
            traced.remat,
            _on_hosts(staged),
            batch=traced.batch,
            rewrites=to_json(traced.rewrites),
        ),
        cluster=cluster.to_dict(),
        mesh=mesh,
        arguments=tuple(replace(tensor, path=path) for tensor, path in zip(arguments, graph.argument_paths, strict=True)),
        results=tuple(replace(tensor, path=path) for tensor, path in zip(results, graph.result_paths, strict=True)),
        argument_structure=describe(traced.in_tree),
        result_structure=result_structure(traced),
        choices={},
        layouts={},
        copies={},
        cost=_cost(plan),
        searcher=options,
        lower_bound_seconds=plan.bound_seconds,
        donate_argnums=traced.donate_argnums,
        assumptions=(*(rewrite.describe() for rewrite in traced.rewrites), *_notes(plan)),
        stats={**_stats(plan), **spent},
        provenance=Provenance(autoshard=version(), jax=jax.__version__),
        pipeline=PipelineRecord(
            schedule=plan.schedule.name,
            chunks=asked.chunks,
            cut=staged.cut.stages,
            stages=tuple(map(_stage_record, plan.stages)),
            argument_stages=_places(staged.divided.arguments, staged.argument_homes),
            result_stages=_places(staged.divided.results, staged.result_homes),
        ),
    )


def _on_hosts(staged: Staged) -> tuple[int, ...]:
    """The argument leaves of which all stages that have some are on hosts."""
    places = [(stage, dict(zip(stage.arguments, stage.traced.graph.arguments, strict=False))) for stage in staged.stages]
    hosted = {k for stage, values in places for k, v in values.items() if stage.traced.graph.values[v].on_host}
    return tuple(leaf for leaf, parts in enumerate(staged.divided.arguments) if hosted.issuperset(parts))


def _notes(plan: _Plan) -> tuple[str, ...]:
    """The notes of all stages, each with the stages that have it where not all do; and what is stacked along layers but whole."""
    stages: dict[str, list[int]] = {}
    for number, found in enumerate(plan.stages):
        for note in found.strategy.record.assumptions:
            stages.setdefault(note, []).append(number)
    n = len(plan.stages)
    found = [note if len(at) == n else f"stage{'s' * (len(at) > 1)} {', '.join(map(str, at))}: {note}" for note, at in stages.items()]
    return (*found, *_left_whole(plan.staged))


def _left_whole(staged: Staged) -> Iterator[str]:
    """Which stacked arguments are whole on one stage, and why."""
    if staged.divided.whole:
        yield (
            "each stage has the rows of its own layers of an array stacked along scanned layers where all stages have equally many of "
            "them and each part of the devices has one stage; whole on one stage, which sends the others theirs in every step: "
            f"{some([staged.traced.graph.argument_paths[k] for k in staged.divided.whole])}"
        )


def _leaf(plan: _Plan, kind: str, parts: Sequence[int], dim: int | None) -> TensorRecord:
    """An argument or result of the step as its stage has it, or as all stages have it in parts along a dimension."""
    staged, position = plan.staged, parts[0]
    home = (staged.argument_homes if kind == "arguments" else staged.result_homes)[position]
    tensor = getattr(plan.stages[home].strategy.record, kind)[getattr(staged.stages[home], kind).index(position)]
    if dim is None:
        return tensor
    shape = tuple(size * len(parts) if d == dim else size for d, size in enumerate(tensor.shape))
    return replace(tensor, shape=shape, spec=tuple(rows_spec(tensor.spec, dim)))


def _places(leaves: Sequence[Sequence[int]], homes: Sequence[int]) -> tuple[int, ...]:
    """The stage of each leaf, or `BY_ROWS`."""
    return tuple(homes[parts[0]] if len(parts) == 1 else BY_ROWS for parts in leaves)


def _stage_record(found: _Found) -> StageRecord:
    seconds = found.figures.seconds
    return StageRecord(
        record=found.strategy.record,
        forward_seconds=seconds.get("F", 0.0),
        backward_seconds=seconds.get("B", 0.0),
        weights_seconds=seconds.get("W", 0.0),
        after_seconds=found.figures.after_seconds,
        send_seconds=found.send_seconds,
        send_back_seconds=found.send_back_seconds,
        residual_bytes=found.figures.residual_bytes,
        peak_bytes=found.peak_bytes,
    )


def _cost(plan: _Plan) -> Cost:
    """The cost of the step: its makespan is the schedule's, all else that of the devices with most to do, all their stages together."""
    n = plan.schedule.n_stages
    parts = [[found.strategy.cost for found in plan.stages[number::n]] for number in range(n)]
    busiest = max(parts, key=lambda costs: sum(cost.makespan_seconds for cost in costs))
    return Cost(
        objective_seconds=plan.objective_seconds,
        makespan_seconds=plan.makespan_seconds,
        compute_seconds=sum(cost.compute_seconds for cost in busiest),
        communication_seconds=sum(cost.communication_seconds for cost in busiest),
        exposed_communication_seconds=sum(cost.exposed_communication_seconds for cost in busiest),
        peak_bytes=plan.peak_bytes,
        flops=max(sum(cost.flops for cost in costs) for costs in parts),
        kernel_flops=max(sum(cost.kernel_flops for cost in costs) for costs in parts),
        collectives=tuple(sent for cost in busiest for sent in cost.collectives),
        transform_flops=max(sum(cost.transform_flops for cost in costs) for costs in parts),
        skipped_flops=max(sum(cost.skipped_flops for cost in costs) for costs in parts),
        low_share=busiest[0].low_share,
        high_share=busiest[0].high_share,
    )


def _stats(plan: _Plan) -> dict[str, Any]:
    """The stages' counts and seconds: sums, and of widths the greatest."""
    found: dict[str, Any] = {}
    for each in {id(found.strategy): found.strategy for found in plan.stages}.values():
        for name, value in each.record.stats.items():
            before = found.get(name, 0)
            found[name] = max(before, value) if name in ("induced_width", "meshes") else before + value
    return found
