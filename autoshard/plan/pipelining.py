"""The search of a pipeline: a step cut into stages, each searched as a program of its own on its part of the cluster.

All stages have meshes of the same axes and sizes: of those that a stage is fastest on, the one with the least step time of the whole
schedule. A stage's search is told how much memory the microbatches in flight leave. A step in several passes over its microbatches
(`autoshard.microbatch.passes_of`) has a pipeline for each. That of the last one is found first; the others have its mesh, and its layouts
of the arrays that they share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby
from typing import Any

from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, OutOfTime, PipelineError, SearchLimitError, TraceError
from autoshard.ir import Layout, Mesh
from autoshard.microbatch import Pass, divisors
from autoshard.pipeline.cuts import Cuts
from autoshard.pipeline.stages import Staged, with_state_on_hosts
from autoshard.plan.found_pipelines import FoundPipeline
from autoshard.plan.microbatching import found_with_each
from autoshard.plan.pipeline_record import record_of
from autoshard.plan.plan import Plan
from autoshard.plan.stage_planner import Pipeline, Planner, StageSearch, layouts_by_name
from autoshard.progress import Progress, part
from autoshard.rewrite import divisible
from autoshard.trace import Traced

CHUNK_GAIN = 0.02  # of the step time, that is worth a search of more chunks: they send more, and start more tasks
CUTS = 3  # of a step for a mixed cluster, each by the seconds of the one before
MICROBATCHES = (1, 2, 4)  # times the stages: numbers that are tried where none is given


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

    def planned(n: int, n_left: int, progress: Progress) -> FoundPipeline:
        cuts = asked.cuts_of(traced, n)
        *earlier, last = cuts.passes
        of_one = partial(_planned, cuts=cuts, cluster=cluster, search=search, n_left=n_left * len(cuts.passes))
        if not earlier:
            return of_one(last, asked, progress=progress)
        share = 1 / len(cuts.passes)
        found = of_one(last, asked, progress=part(progress, 0.0, share))
        mesh = None if cluster.parts else found.mesh  # unequal parts have meshes of their own
        return replace(found, earlier=tuple(_of_passes(of_one, earlier, found, asked, mesh, part(progress, share, 1 - share))))

    numbers = numbers_of_microbatches(traced, asked.n_parts, asked.microbatches)
    if asked.start is not None and asked.microbatches is None and asked.start.stages:
        numbers = list(dict.fromkeys([*numbers, asked.start.microbatches]))
    found = sorted(found_with_each(numbers, planned, progress, (*asked.ends, OutOfTime)), key=lambda plan: plan.makespan_seconds)
    return [
        Plan(
            record_of(traced, asked.cuts_of(traced, each.staged.n_microbatches).passes, cluster, asked, each, searcher, spent),
            traced,
            passes=tuple(tuple(stage.strategy for stage in own.stages) for own in each.passes),
        )
        for each in found
    ]


def _planned(
    own: Pass,
    asked: Pipeline,
    *,
    cuts: Cuts,
    cluster: Cluster,
    search: StageSearch,
    n_left: int,
    progress: Progress,
    layouts: Mapping[str, Layout] | None = None,
) -> FoundPipeline:
    """The pipeline of one pass; ``layouts`` are those of arrays by their names, of other passes."""
    parts = cluster.stage_parts(asked.n_parts)
    hosted = [place for place, k in enumerate(own.operands) if k in asked.hosted]

    def with_chunks(chunks: int, placement: str, progress: Progress, shares: Sequence[float] | None = None) -> FoundPipeline:
        rows = () if cluster.parts or (chunks > 1 and hosted) else None  # rows on hosts are not sent
        staged = cuts.stages(own, asked.n_parts * chunks, parts[0], rows, shares)
        on_hosts, rest = with_state_on_hosts(staged, hosted), (placement, cluster, asked, search, progress, n_left, layouts)
        if asked.hosted_by_stage and not staged.divided.argument_dims:  # rows of one array are all on hosts, or none
            return Planner(staged, *rest, on_hosts).best()
        return Planner(on_hosts, *rest).best()

    if cluster.parts:
        return _on_unequal_parts(partial(with_chunks, 1, "loop"), parts, progress)
    return _of_chunks(with_chunks, asked, progress)


def _of_passes(
    planned: Callable[..., FoundPipeline],
    earlier: Sequence[Pass],
    last: FoundPipeline,
    asked: Pipeline,
    mesh: Mesh | None,
    progress: Progress,
) -> Iterator[FoundPipeline]:
    """The pipelines of earlier passes: on the mesh of the last one, in as many chunks, and with its layouts of what both have."""
    layouts, share = layouts_by_name(last), 1 / len(earlier)
    for number, each in enumerate(earlier):
        beside = last.beside(each.traced.graph.argument_paths)
        own = replace(asked, mesh=mesh, limit=asked.limit - beside, start=None, chunks=len(last.stages) // asked.n_parts)
        yield replace(planned(each, own, progress=part(progress, number * share, share), layouts=layouts), beside_bytes=beside)


def _on_unequal_parts(search: Callable[..., FoundPipeline], parts: Sequence[Cluster], progress: Progress) -> FoundPipeline:
    """The fastest plan of a few cuts: by the rates of each stage's devices, then by the seconds that its work took them."""
    rates = [each.n_devices * each.device.matrix_rate("bfloat16") for each in parts]
    plans: list[FoundPipeline] = []
    for turn in range(CUTS):
        shares = [rate * len(rates) / sum(rates) for rate in rates]
        plans.append(search(part(progress, turn / CUTS, 1 / CUTS), shares=shares))
        if any(plans[-1].staged.cut == before.staged.cut for before in plans[:-1]):
            break
        seconds = [sum(found.figures.seconds.get(kind, 0.0) for kind in "FBW") for found in plans[-1].stages]
        rates = [own / max(took, 1e-12) for own, took in zip(shares, seconds, strict=True)]
    return min(plans, key=lambda plan: plan.makespan_seconds)


def _of_chunks(search: Callable[[int, str, Progress], FoundPipeline], asked: Pipeline, progress: Progress) -> FoundPipeline:
    """The fastest plan of the numbers of chunks that may be had: the least number is searched, and by its costs the most promising one."""
    (chunks, placement), *others = asked.layouts
    first = search(chunks, placement, part(progress, 0.0, 0.5 if others else 1.0))
    others = [layout for layout in others if layout[0] % chunks == 0 and _has_rows(first.staged, layout[0] * asked.n_parts)]
    if not others:
        return first
    best, least = None, first.of_few(chunks, placement)
    for _, layouts in groupby(others, key=lambda layout: layout[0]):
        seconds, layout = min((first.of_few(*layout), layout) for layout in layouts)
        if seconds > least - CHUNK_GAIN * first.makespan_seconds:
            break  # more chunks have ever less to gain
        best, least = layout, seconds
    if best is None:
        return first
    try:
        second = search(*best, part(progress, 0.5, 0.5))
    except (InfeasibleError, PipelineError, SearchLimitError):
        return first
    return second if second.makespan_seconds <= (1 - CHUNK_GAIN) * first.makespan_seconds else first


def _has_rows(staged: Staged, n_pieces: int) -> bool:
    """Whether the arrays of which stages have the rows of their own layers are also by rows in so many pieces."""
    graph = staged.traced.graph
    return not any(graph.values[graph.arguments[k]].shape[dim] % n_pieces for k, dim in staged.divided.argument_dims.items())


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
