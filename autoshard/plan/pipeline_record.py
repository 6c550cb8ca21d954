"""The record of a pipeline that was found."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax

from autoshard.cluster import Cluster
from autoshard.cost.record import Cost
from autoshard.ir.rewrites import Microbatches, Offload, variant
from autoshard.lower import rows_spec
from autoshard.microbatch import Pass
from autoshard.pipeline.passes import homes_of
from autoshard.pipeline.schedule import UPDATE, pieces_in_flight
from autoshard.pipeline.stages import Stage, Staged
from autoshard.plan.argument_shardings import some
from autoshard.plan.found_pipelines import FoundPipeline, FoundStage
from autoshard.plan.meshes import with_stage_axis
from autoshard.plan.stage_planner import Pipeline
from autoshard.recompute.replacing import CHECKPOINT
from autoshard.run.recorded import result_structure
from autoshard.run.structure import describe
from autoshard.strategy import BY_ROWS, PipelineRecord, Program, Provenance, Record, SearcherRecord, StageRecord, TensorRecord
from autoshard.trace import Traced
from autoshard.version import __version__


def record_of(
    traced: Traced,
    passes: Sequence[Pass],
    cluster: Cluster,
    asked: Pipeline,
    plan: FoundPipeline,
    searcher: Any,
    spent: Mapping[str, float],
) -> Record:
    """The record of a step's pipeline; of several passes, ``plan`` is the last one's."""
    graph, staged, homes = traced.graph, plan.staged, homes_of(passes)
    mesh = plan.mesh if cluster.parts else with_stage_axis(plan.mesh, asked.n_parts)
    arguments = [_leaf(plan.passes[number], "arguments", k) for number, k in homes]
    results = [_leaf(plan, "results", k) for k in range(len(graph.results))]
    options = SearcherRecord(searcher.name, plan.stages[0].strategy.record.searcher.options)
    return Record(
        name=f"{graph.name}_{searcher.name}",
        program=Program(
            graph.name,
            graph.fingerprint,
            len(graph.walk()),
            len(graph.values),
            (*traced.rewrites, *Microbatches.of(plan.schedule.n_microbatches), *Offload.of(_on_hosts(staged))),
            traced.batch,
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
        assumptions=(*(rewrite.describe() for rewrite in variant(traced.rewrites)), *_notes(plan)),
        stats={**_stats(plan), **spent},
        provenance=Provenance(autoshard=__version__, jax=jax.__version__),
        pipeline=replace(
            _pipeline(plan, len(passes) > 1),
            argument_stages=tuple(_place(plan.passes[number], "arguments", k) for number, k in homes),
            result_stages=tuple(_place(plan, "results", k) for k in range(len(graph.results))),
            earlier=tuple(_pipeline(each, True) for each in plan.earlier),
        ),
    )


def _pipeline(plan: FoundPipeline, is_pass: bool) -> PipelineRecord:
    """The record of one pass, without the leaves of the step."""
    stages = enumerate(zip(plan.stages, pieces_in_flight(plan.schedule), strict=True))
    return PipelineRecord(
        schedule=plan.schedule.name,
        chunks=plan.schedule.n_chunks,
        cut=plan.staged.cut.stages,
        stages=tuple(
            _stage_record(found, plan.once_seconds(piece), found.figures.peak_bytes(n, found.joins)) for piece, (found, n) in stages
        ),
        argument_stages=(),
        result_stages=(),
        placement=plan.placement,
        orders=plan.schedule.words,
        rows=tuple(sorted(plan.staged.divided.argument_dims)) if is_pass else (),
    )


def _on_hosts(staged: Staged) -> tuple[int, ...]:
    """The argument leaves of which all stages that have some are on hosts."""
    places = [(stage, dict(zip(stage.arguments, stage.traced.graph.arguments, strict=False))) for stage in staged.stages]
    hosted = {k for stage, values in places for k, v in values.items() if stage.traced.graph.values[v].on_host}
    return tuple(leaf for leaf, parts in enumerate(staged.divided.arguments) if hosted.issuperset(parts))


def _notes(plan: FoundPipeline) -> tuple[str, ...]:
    """The notes of all stages, each with the stages that have it where not all do; and what is stacked along layers but whole."""
    stages: dict[str, list[int]] = {}
    for number, found in enumerate(plan.stages):
        for note in found.strategy.record.assumptions:
            stages.setdefault(note, []).append(number)
    n, chosen = len(plan.stages), dict[str, list[int]]()
    for number, stage in enumerate(plan.staged.stages):
        for note in _choices(stage):
            chosen.setdefault(note, []).append(number)
    stages |= {note: at for note, at in chosen.items() if len(at) < n}  # what all stages have is told of the step
    found = [note if len(at) == n else f"stage{'s' * (len(at) > 1)} {', '.join(map(str, at))}: {note}" for note, at in stages.items()]
    return (*found, *_left_whole(plan.staged))


def _choices(stage: Stage) -> Iterator[str]:
    """What a stage does to need less memory."""
    graph = stage.traced.graph
    if any(op.primitive in CHECKPOINT for op in graph.walk()):
        yield "the backward pass computes again what is not kept for it"
    if any(graph.values[value].on_host for op in graph.walk() if op.trips > 1 for value in op.results):
        yield "some of what is kept for the backward pass is in the memory of hosts"
    if any(graph.values[value].on_host for value in graph.arguments):
        yield "optimizer state is in the memory of hosts between steps"


def _left_whole(staged: Staged) -> Iterator[str]:
    """Which stacked arguments are whole on one stage, and why."""
    if staged.divided.whole:
        yield (
            "each stage has the rows of its own layers of an array stacked along scanned layers where all stages have equally many of "
            "them; whole on one stage, which sends the others theirs in every step: "
            f"{some([staged.traced.graph.argument_paths[k] for k in staged.divided.whole])}"
        )


def _leaf(plan: FoundPipeline, kind: str, leaf: int) -> TensorRecord:
    """An argument or result as its stage has it, or as all stages have it in parts along a dimension."""
    staged = plan.staged
    parts = getattr(staged.divided, kind)[leaf]
    dim = (staged.divided.argument_dims if kind == "arguments" else staged.divided.result_dims).get(leaf)
    position = parts[0]
    home = (staged.argument_homes if kind == "arguments" else staged.result_homes)[position]
    tensor = getattr(plan.stages[home].strategy.record, kind)[getattr(staged.stages[home], kind).index(position)]
    if dim is None:
        return tensor
    shape = tuple(size * len(parts) if d == dim else size for d, size in enumerate(tensor.shape))
    return replace(tensor, shape=shape, spec=tuple(rows_spec(tensor.spec, dim)))


def _place(plan: FoundPipeline, kind: str, leaf: int) -> int:
    """The stage of an argument or result, or `BY_ROWS`."""
    parts = getattr(plan.staged.divided, kind)[leaf]
    homes = plan.staged.argument_homes if kind == "arguments" else plan.staged.result_homes
    return homes[parts[0]] if len(parts) == 1 else BY_ROWS


def _stage_record(found: FoundStage, once_seconds: float, peak_bytes: float) -> StageRecord:
    seconds = found.figures.seconds
    return StageRecord(
        record=found.strategy.record,
        forward_seconds=seconds.get("F", 0.0),
        backward_seconds=seconds.get("B", 0.0),
        weights_seconds=seconds.get("W", 0.0),
        update_seconds=found.figures.seconds[UPDATE],
        after_seconds=once_seconds,
        send_seconds=found.send_seconds,
        send_back_seconds=found.send_back_seconds,
        residual_bytes=found.figures.residual_bytes,
        peak_bytes=peak_bytes,
    )


def _cost(plan: FoundPipeline) -> Cost:
    """The cost of the step: its makespan is the schedule's, all else that of the devices with most to do, all their stages together."""
    parts = [[found.strategy.cost for each in plan.passes for found in each.own(part)] for part in range(plan.n_parts)]
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
        late_share=busiest[0].late_share,
    )


def _stats(plan: FoundPipeline) -> dict[str, Any]:
    """The stages' counts and seconds: sums, and of widths the greatest."""
    found: dict[str, Any] = {}
    for each in {id(found.strategy): found.strategy for own in plan.passes for found in own.stages}.values():
        for name, value in each.record.stats.items():
            before = found.get(name, 0)
            found[name] = max(before, value) if name in ("induced_width", "meshes") else before + value
    return found
