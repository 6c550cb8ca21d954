"""A strategy compared with what it would be otherwise: the same program, searched again under one change.

What the strategy's own search knows serves the new one: the facts of the program where the compiler is the same, all cost tables where the
mesh is, and the messages of its bound as a warm start. Other pins of arguments leave all tables but those of the pinned arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, PipelineError, ShardingError, StrategyError, TraceError
from autoshard.explanation.tensor import by_first_that_holds
from autoshard.ir import Mesh
from autoshard.ir.rewrites import KINDS, Microbatches, Offload, OneProgram, Rewrite, variant
from autoshard.judge.model import CostModel
from autoshard.options import checked
from autoshard.pipeline.schedule import ONE_PROGRAM
from autoshard.pipeline.scheduling import has_chunks
from autoshard.plan.argument_shardings import some
from autoshard.plan.confirm import noted
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import cluster_of
from autoshard.plan.request import Request
from autoshard.plan.rescheduling import rescheduled
from autoshard.plan.searching import finalists
from autoshard.plan.user_pins import Asked, Pins
from autoshard.problem import Problem
from autoshard.progress import silent
from autoshard.render import format_bytes
from autoshard.run.collecting import rarely_collecting
from autoshard.run.recorded import Call
from autoshard.run.sharded import plain
from autoshard.run.tracing import TracedOnce
from autoshard.search import Searcher, batch_dims
from autoshard.strategy import Record
from autoshard.trace import SplitModules, held, outside_mesh

AGAIN = "searched again"


@rarely_collecting()
@outside_mesh(keep_auto=True)
def what_if(
    strategy: Plan,
    *,
    pins: Pins | None = None,
    cluster: Cluster | str | Path | None = None,
    mesh: Mapping[str, int] | jax.sharding.Mesh | int | None = None,
    batch: int | None = None,
    microbatches: int | None = None,
    memory_limit_bytes: float | None = None,
    stages: int | None = None,
    chunks: int | None = None,
    schedule: str | None = None,
) -> tuple[str, Plan]:
    """The change in words, and the plan under it; as `Strategy.what_if` says."""
    record = strategy.record
    if strategy._traced is None:
        raise StrategyError(
            "what_if searches the program again, and a strategy from a file has none. Pass the function: "
            "strategy.with_program(fn, *args).what_if(...); on the command line autoshard what-if FILE module:function --args ..., or for "
            "an estimate of the same plan at another size autoshard what-if FILE --batch N."
        )
    if isinstance(checked("microbatches", microbatches), str):
        raise ShardingError(f"a what-if is of a number of microbatches, got {microbatches!r}. Use 4, for instance.")
    there = Cluster.from_dict(record.cluster) if cluster is None else cluster_of(cluster)
    words = _asked_words(strategy, pins, cluster, mesh, batch, microbatches, memory_limit_bytes)
    parts = _parts(stages, chunks, schedule)
    if strategy._call is None and (microbatches is not None or parts):
        raise StrategyError("a stage of a pipeline has its microbatches, and no stages. Call what_if of the pipeline's strategy.")
    if parts:
        told = ", ".join(f"{name}={value}" for name, value in parts.items())
        words = told if words == AGAIN else f"{words}, {told}"
    is_so = record.pipeline is not None and has_chunks(parts.get("schedule", record.pipeline.schedule), record.pipeline.chunks)
    if is_so and parts.keys() == {"schedule"} and words == told:
        return words, rescheduled(strategy, parts["schedule"])
    request = Request(
        cluster=there,
        mesh=_own_mesh(record) if (mesh, cluster, stages) == (None, None, None) else mesh,
        asked=_both(strategy, Asked.of(pins)),
        memory_limit_bytes=_own_limit(strategy, there) if memory_limit_bytes is None else memory_limit_bytes,
        donate_argnums=record.donate_argnums,
        offload="optimizer" if record.program.offload else None,
        earlier=strategy,
    )
    with _told_of_batch(strategy, batch):
        return words, _noted(_answer(strategy, request, batch, microbatches, parts), strategy)


def _answer(strategy: Plan, request: Request, batch: int | None, microbatches: int | None, parts: dict[str, Any]) -> Plan:
    """The plan in the strategy's own microbatches, recomputation and stages, or in those that are asked for; where nothing fits so, in the
    microbatches and the recomputation that a search finds, if no number is asked for.

    Args:
        request: all else.
        parts: stages, chunks and schedule, where they are asked for.

    Raises:
        InfeasibleError: nothing fits.
    """
    pipeline, traced = strategy.record.pipeline, strategy._traced
    assert traced is not None, "a strategy with its program"
    if pipeline is None and parts and "stages" not in parts:
        raise StrategyError("chunks and schedules are of a pipeline's stages, and the strategy has none. Ask for stages= too.")
    usual = {} if pipeline is None else {"stages": pipeline.n_parts, "chunks": pipeline.chunks, "schedule": pipeline.schedule}
    if "schedule" in parts:
        usual.pop("chunks", None)
    any_form = replace(request, **(usual | parts))
    if any_form.stages is None:
        forms = _in_microbatches(traced.rewrites, microbatches)
        own = replace(any_form, microbatches=1, remat=None, offload=None)  # which are the program's
    else:
        forms = tuple(each for each in traced.rewrites if not isinstance(each, Microbatches | OneProgram | Offload))
        n = microbatches or ("fit" if pipeline is None else strategy.microbatches)
        own = replace(any_form, microbatches=n, remat=None)
    program = _Program(strategy, batch)
    is_fixed = microbatches is not None or strategy._call is None or any(isinstance(each, OneProgram) for each in forms)
    if any_form.stages is None and not is_fixed and forms == variant(forms):
        return program.searched(forms, any_form)
    try:
        return program.searched(forms, own)
    except PipelineError:  # hardly as many chunks of more stages
        if "chunks" in parts or own.chunks in (None, 1):
            raise
        return program.searched(forms, replace(own, chunks=None))
    except InfeasibleError:
        if is_fixed:
            raise
        return program.searched(variant(forms), any_form)


@dataclass(frozen=True, slots=True)
class _Program:
    """The program of a strategy with a batch of some size; None: with its own, in which it is not traced again."""

    strategy: Plan
    batch: int | None

    def searched(self, rewrites: tuple[Rewrite, ...], request: Request) -> Plan:
        """The best plan of the rewritten program, by dynamic programming if that can hold it."""
        strategy, known = self.strategy, self.strategy._traced
        fn, args = (strategy._call or (None, ())) if self.batch is None else with_batch_size(strategy, self.batch)
        assert known is not None, "a strategy with its program"
        serves = self.batch is None and rewrites == known.rewrites
        once = TracedOnce(fn and plain(fn), rewrites, (known, strategy._searched.facts) if serves else None)

        def by(searcher: Searcher) -> Plan:
            own = replace(request, searcher=searcher)
            return finalists(once, args, own, silent, 1, corrections=strategy._searched.facts.corrections).strategies[0]

        return by_first_that_holds(by)


def _in_microbatches(rewrites: tuple[Rewrite, ...], n: int | None) -> tuple[Rewrite, ...]:
    """Rewrites with another number of microbatches; None: as they are."""
    if n is None:
        return rewrites
    if any(isinstance(each, OneProgram) for each in rewrites):
        return tuple(replace(each, microbatches=n) if isinstance(each, OneProgram) else each for each in rewrites)
    others = (each for each in rewrites if not isinstance(each, Microbatches))
    return tuple(sorted((*others, *Microbatches.of(n)), key=lambda each: [*KINDS].index(each.kind)))


def _parts(stages: int | None, chunks: int | None, schedule: str | None) -> dict[str, Any]:
    """What is asked of a pipeline's stages, and given.

    Raises:
        AutoshardError: there are no such stages, chunks or schedule.
    """
    if schedule in ONE_PROGRAM:
        raise PipelineError(f"a what-if is of stages that are programs of their own, got schedule={schedule!r}. Search with it instead.")
    if chunks is not None and (isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1):
        raise PipelineError(f"Each part of the devices has a whole number of chunks, 1 or more; got {chunks!r}. Use 2, for instance.")
    asked = {"stages": checked("stages", stages), "chunks": chunks, "schedule": checked("schedule", schedule)}
    return {name: value for name, value in asked.items() if value is not None}


def _own_mesh(record: Record) -> Mesh:
    """The mesh of a strategy, or of its stages, which is placed anew."""
    return record.mesh if record.pipeline is None else replace(record.part_meshes[0], placement=None)


def _own_limit(strategy: Plan, there: Cluster) -> float | None:
    """The limit that the strategy was searched with, on devices of the same memory; None: the cluster's."""
    same = Cluster.from_dict(strategy.record.cluster).device.memory_bytes == there.device.memory_bytes
    return strategy.record.memory_limit_bytes if same else None


def _both(strategy: Plan, asked: Asked) -> Asked:
    """What the strategy's search asked of pins, and what the question does, which comes last and so before it."""
    own = Asked(batch=strategy.record.program.batch) if strategy._pins is None else strategy._pins.asked
    return replace(own, specs={**{at: spec for at, spec in own.specs.items() if at not in asked.specs}, **asked.specs})


def _noted(plan: Plan, strategy: Plan) -> Plan:
    """The plan with a note on pins that a strategy from a file does not have."""
    n = strategy.record.stats.get("pins", 0) if strategy._pins is None else 0
    pins = "the pin of its search, which is" if n == 1 else f"the {n} pins of its search, which are"
    return noted(plan, f"the strategy's file does not have {pins} not kept here: pass pins=") if n else plan


def with_batch_size(strategy: Plan, batch: int) -> Call:
    """The strategy's call with a batch of another size.

    Raises:
        StrategyError: the size is no positive number, no argument has a batch, or the strategy is a stage's.
    """
    if strategy._call is None:
        raise StrategyError("a stage of a pipeline has no batch of its own. Call what_if(batch=...) of the pipeline's strategy.")
    fn, args = strategy._call
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise StrategyError(f"a batch is a positive number of examples, got {batch!r}. Use 512, for instance.")
    dims = _batch(strategy)
    split = SplitModules(held(plain(fn), args))
    leaves, tree = jax.tree.flatten(split.states)
    changed = []
    for value, leaf in zip(strategy._searched.facts.graph.arguments, leaves, strict=True):
        dim = dims.get(value)
        if dim is not None:
            leaf = jax.ShapeDtypeStruct((*leaf.shape[:dim], batch, *leaf.shape[dim + 1 :]), leaf.dtype)
        changed.append(leaf)
    return fn, split.rebuild(tree.unflatten(changed))


def _batch(strategy: Plan) -> Mapping[int, int]:
    """By value number the dimension of the batch of each argument that has it.

    Raises:
        StrategyError: none has.
    """
    known, record = strategy._searched, strategy.record
    own = record if record.pipeline is None else record.pipeline.stages[0].record  # whose mesh has no axis of stages
    dims = batch_dims(known.problem or Problem(known.facts, CostModel(Cluster.from_dict(own.cluster), own.mesh)))
    if not dims:
        name = known.facts.graph.name
        raise StrategyError(f"no argument of {name!r} has a batch that can be split. Pass other arguments to autoshard.search.")
    return dims


def _batch_words(strategy: Plan) -> str:
    """``dim 0 of batch['x'], batch['y'], 256 now``."""
    graph, dims = strategy._searched.facts.graph, _batch(strategy)
    paths = [path for value, path in zip(graph.arguments, graph.argument_paths, strict=True) if value in dims]
    value, dim = next(iter(dims.items()))
    return f"dim {dim} of {some(paths)}, {graph.values[value].shape[dim]} now"


@contextmanager
def _told_of_batch(strategy: Plan, batch: int | None) -> Iterator[None]:
    """Errors of a step that does not compute another batch say which arrays were given another size."""
    try:
        yield
    except TraceError as error:
        if batch is None:
            raise
        told = f"what_if(batch={batch}) traces the step again ({_batch_words(strategy)}), which must be able to compute such a batch."
        raise TraceError(f"{told} {error} Or ask for another size.") from error


def _asked_words(strategy: Plan, pins: Any, cluster: Any, mesh: Any, batch: Any, microbatches: Any, limit: Any) -> str:
    """``cluster=v5e:4x8, batch=1024 (dim 0 of x, 256 now)``."""
    size = None if batch is None else f"{batch} ({_batch_words(strategy)})"
    held = None if limit is None else format_bytes(limit)
    given: Sequence[tuple[str, Any]] = (("pins", pins), ("cluster", cluster), ("mesh", mesh), ("batch", size))
    asked = (*given, ("microbatches", microbatches), ("memory_limit_bytes", held))
    return ", ".join(f"{name}={value}" for name, value in asked if value is not None) or AGAIN
