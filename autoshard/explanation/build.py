"""An `Explanation` from a record and, where it is at hand, its judged program."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoshard.cluster import Cluster, Link, Span
from autoshard.explanation.breakdown import collective_groups, layers, lines, memory_groups, merged, repeated_work
from autoshard.explanation.data import Axis, Explanation, Stages, StepTime, TensorGroup
from autoshard.explanation.groups import activation_groups, argument_groups, shard_bytes, state_positions
from autoshard.explanation.program import Judged
from autoshard.explanation.sentences import sentences
from autoshard.explanation.stored import unpacked
from autoshard.ir import Collective, Mesh, Spec, as_compiled, entry_axes
from autoshard.strategy import PipelineRecord, Record, TensorRecord

ROUNDING = 1e-9  # of figures that are sums, in another order perhaps


def explanation_of(record: Record, programs: Sequence[Judged] = ()) -> Explanation:
    """The explanation of a strategy.

    Args:
        record: the strategy's.
        programs: its program, or those of a pipeline's stages in their order, pass by pass; () where only the record is at hand, which may
            keep the explanation.
    """
    if not programs and record.report:
        return replace(unpacked(record.report)[0], notes=record.assumptions)
    found = _built(record, programs)
    return replace(found, sentences=sentences(found))


def _built(record: Record, programs: Sequence[Judged]) -> Explanation:
    """The explanation without its sentences."""
    cluster, pipeline = Cluster.from_dict(record.cluster), record.pipeline
    own, parts = programs, None if pipeline is None else stages_of(record, pipeline)
    if programs and pipeline and parts:
        left = iter(programs)
        of_passes = [[next(left) for _ in each.stages] for each in pipeline.passes]
        own = [found[k] for each, found in zip(pipeline.passes, of_passes, strict=True) for k in each.stages_of(parts.busiest)]
    judged = own[0] if own and pipeline is None else None
    records = [(each.record, each) for each in own] or [(record, None)]
    activations = () if judged is None else activation_groups(judged)
    return Explanation(
        title=f"Strategy of {record.program.name} on {cluster.name}, mesh {record.mesh}",
        program=record.program.name,
        cluster=cluster.name,
        mesh_words=str(record.mesh),
        n_devices=record.mesh.size,
        sentences=(),
        time=_time(record, cluster),
        peak_bytes=record.cost.peak_bytes,
        limit_bytes=record.limit_bytes,
        memory=() if judged is None else memory_groups(judged),
        mesh=_axes(record, cluster, judged, activations),
        arguments=argument_groups(record.arguments, record.mesh),
        activations=activations,
        layers=merged(layers(*each) for each in records),
        lines=merged(lines(*each) for each in records),
        collectives=tuple(group for each in records for group in collective_groups(*each)),
        sent_bytes=_bytes_of(each for one, _ in records for each in one.cost.collectives),
        compiled_bytes=_bytes_of(each for one, _ in records for each in as_compiled(one.cost.collectives)),
        repeated=repeated_work(own),
        notes=record.assumptions,
        has_program=bool(own),
        stages=parts,
    )


def _bytes_of(collectives: Iterable[Collective]) -> float:
    return sum(each.count * each.bytes for each in collectives)


def stages_of(record: Record, pipeline: PipelineRecord) -> Stages:
    """How the stages of a pipeline share a step."""
    m, n = record.program.microbatches, pipeline.n_parts
    of_parts = [0.0] * n
    for own in pipeline.passes:
        for k, each in enumerate(own.stages):
            tasks = each.forward_seconds + each.backward_seconds + each.weights_seconds
            of_parts[own.part(k)] += m * tasks + each.update_seconds + each.after_seconds
    return Stages(pipeline.schedule, m, pipeline.chunks, tuple(of_parts), record.cost.makespan_seconds, pipeline.placement)


def _time(record: Record, cluster: Cluster) -> StepTime:
    cost = record.cost
    rate = cluster.device.matrix_rate(_activation_dtype(record)) * (cost.makespan_seconds or 1.0)
    hidden = cost.communication_seconds - cost.exposed_communication_seconds
    return StepTime(
        step_seconds=cost.makespan_seconds,
        compute_seconds=cost.compute_seconds,
        exposed_seconds=cost.exposed_communication_seconds,
        hidden_seconds=rounded(hidden, cost.communication_seconds),
        waiting_seconds=max(0.0, cost.makespan_seconds - cost.compute_seconds - cost.exposed_communication_seconds),
        matrix_share=min(1.0, cost.flops / rate) if rate else 0.0,
        interval_seconds=cost.interval_seconds,
    )


def rounded(seconds: float, whole: float) -> float:
    """Seconds that are left of a difference; 0.0 where that is rounding."""
    return seconds if seconds > ROUNDING * whole else 0.0


def _activation_dtype(record: Record) -> str:
    """The narrowest float that the program sends, which products are likely to have; float32 where it sends none."""
    sent = {each.value.dtype for each in record.cost.collectives if each.value is not None}
    held = {tensor.dtype for tensor in record.arguments}
    return "bfloat16" if "bfloat16" in sent | held else "float16" if "float16" in sent | held else "float32"


def _axes(record: Record, cluster: Cluster, judged: Judged | None, activations: Sequence[TensorGroup]) -> tuple[Axis, ...]:
    mesh, state = record.mesh, state_positions(record, judged)
    held = [tensor for at, tensor in enumerate(record.arguments) if at in state]
    inputs = [tensor for at, tensor in enumerate(record.arguments) if at not in state]
    total = sum(shard_bytes(t.shape, t.dtype, (), mesh) for t in held) or 1.0
    stored = sum(group.whole_bytes for group in activations) or 1.0
    links = {} if mesh.placement is None else dict(zip(mesh.names, cluster.links(mesh), strict=True))
    found = []
    for name, size in mesh.axes:
        along = [each for each in record.cost.collectives if name in each.mesh_axes]
        share = sum(shard_bytes(t.shape, t.dtype, (), mesh) for t in held if splits(t.spec, name)) / total
        found.append(
            Axis(
                name=name,
                size=size,
                place=place_words(links[name]) if name in links else "",
                splits_inputs=any(splits(tensor.spec, name) for tensor in inputs),
                state_share=share,
                gathered_share=_gathered_share(held, name, along, mesh),
                communication_seconds=sum(each.count * each.seconds for each in along),
                exposed_seconds=sum(each.count * each.exposed_seconds for each in along),
                divides_program=record.pipeline is not None and not found,
                activation_share=sum(group.whole_bytes for group in activations if splits(group.spec, name)) / stored,
            )
        )
    return tuple(found)


def splits(spec: Spec, axis: str) -> bool:
    """Whether a spec has the axis."""
    return any(axis in entry_axes(entry) for entry in spec)


def _gathered_share(state: list[TensorRecord], axis: str, along: list[Collective], mesh: Mesh) -> float:
    """The share of the bytes of state that an axis splits which all_gathers along it gather."""
    gathered = {each.value.name for each in along if each.kind == "all_gather" and each.value and each.value.kind == "argument"}
    groups = argument_groups([tensor for tensor in state if splits(tensor.spec, axis)], mesh)
    total = sum(group.whole_bytes for group in groups) or 1.0
    return sum(group.whole_bytes for group in groups if not gathered.isdisjoint(group.paths)) / total


def place_words(link: Link) -> str:
    """Which physical dimensions, counted from the outermost, an axis runs along."""

    def run(span: Span) -> str:
        apart = f", {span.stride} apart" if span.stride > 1 else ""
        if span.dim < len(link.levels):
            return f"{span.extent} of {link.length[span.dim][0]} {link.levels[span.dim].name}{apart}"
        return f"{span.extent} of {link.length[span.dim][0]} in dimension {span.dim}{apart}"

    return " and ".join(run(span) for span in link.spans) or "nowhere"


def placement_words(mesh: Mesh, cluster: Cluster) -> str:
    """Where all axes run."""
    return "; ".join(f"{name}: {place_words(link)}" for name, link in zip(mesh.names, cluster.links(mesh), strict=True))
