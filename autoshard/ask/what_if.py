"""A strategy compared with what it would be otherwise: the same program, searched again under one change.

What the strategy's own search knows serves the new one: the facts of the program where the compiler is the same, all cost tables where the
mesh is, and the messages of its bound as a warm start. Other pins of arguments leave all tables but those of the pinned arguments.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import ProgramFacts, program_facts
from autoshard.errors import InfeasibleError, PipelineError, ShardingError, StrategyError, TraceError
from autoshard.explanation.tensor import by_first_that_holds
from autoshard.ir import Mesh
from autoshard.ir.naming import matching
from autoshard.ir.rewrites import OneProgram
from autoshard.judge.model import CostModel
from autoshard.options import checked
from autoshard.pipeline.schedule import ONE_PROGRAM
from autoshard.plan.argument_shardings import some
from autoshard.plan.attempts import Attempts, Found
from autoshard.plan.forms import PLAIN, Form
from autoshard.plan.meshes import given_mesh, meshes_of
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import Prepared, cluster_of, limit_of, searched_on_meshes, traced_of, within
from autoshard.plan.refusals import with_untried
from autoshard.plan.request import Request
from autoshard.plan.rescheduling import rescheduled
from autoshard.plan.stage_searches import Call as StageCall
from autoshard.plan.stage_searches import in_stages
from autoshard.plan.user_pins import Asked, Pins, UserPins, user_pins
from autoshard.problem import Problem
from autoshard.progress import silent
from autoshard.render import format_bytes
from autoshard.run.collecting import rarely_collecting
from autoshard.run.recorded import Call
from autoshard.run.step import plain
from autoshard.search import Searcher, Solution, batch_dims
from autoshard.trace import SplitModules, Traced, held, outside_mesh

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
    if microbatches is not None and strategy._call is None:
        raise StrategyError("a stage of a pipeline has its microbatches. Call what_if(microbatches=...) of the pipeline's strategy.")
    own_cluster = Cluster.from_dict(record.cluster)
    there = own_cluster if cluster is None else cluster_of(cluster)
    limit = memory_limit_bytes if memory_limit_bytes is not None else _own_limit(strategy, own_cluster, there)
    limit_of(there, limit)
    asked = Asked.of(pins)
    words = _asked_words(strategy, pins, cluster, mesh, batch, microbatches, memory_limit_bytes)
    parts = _parts(stages, chunks, schedule)
    if parts:
        told = ", ".join(f"{name}={value}" for name, value in parts.items())
        words = told if words == AGAIN else f"{words}, {told}"
    if record.pipeline is not None and parts.keys() == {"schedule"} and words == told:
        return words, rescheduled(strategy, parts["schedule"])
    if record.pipeline is not None or parts:
        with _told_of_batch(strategy, batch):
            if record.pipeline is not None and (stages, mesh, cluster) == (None, None, None):
                mesh = dict(record.pipeline.stages[0].record.mesh.shape)
            after = _pipeline(strategy, parts, asked, there, mesh, batch, microbatches, limit)
        return words, after
    given = record.mesh if mesh is None and cluster is None else mesh
    wanted = None if given is None or isinstance(given, int) else given_mesh(given)
    if wanted is not None:
        there.check(wanted)
    with _told_of_batch(strategy, batch):
        question = _Question(strategy, asked, there, given, wanted, batch, microbatches, limit, own_axes=mesh is None)
        (prepared, solution, problem), searcher = by_first_that_holds(lambda searcher: (question.found(searcher), searcher))
    [solution] = prepared.overlapped([_with_notes(solution, strategy)], problem)
    return words, prepared.plan(problem.mesh, solution, searcher, problem)


@dataclass(frozen=True, slots=True)
class _Question:
    """A search of a strategy's program under one change.

    Attributes:
        strategy: the strategy.
        asked, there, given, limit: the pins, the cluster, the mesh or the number of axes, and the memory limit; None: the cluster's.
        wanted: the mesh, where it is given.
        batch: the size of the batch; None: as it is.
        microbatches: their number, which is then kept; None: the strategy's.
        own_axes: whether a mesh that is searched may have as many axes as the strategy's.
    """

    strategy: Plan
    asked: Asked
    there: Cluster
    given: Any
    wanted: Mesh | None
    batch: int | None
    microbatches: int | None
    limit: float | None
    own_axes: bool

    def found(self, searcher: Searcher) -> Found:
        """The best in the strategy's own microbatches and recomputation, or in the microbatches that are asked for; where nothing fits so,
        in those that a search finds, if none are asked for.

        Raises:
            InfeasibleError: nothing fits.
        """
        program, warm = self.strategy.record.program, replace(self.strategy._searched.hints, least=math.inf, start=None)
        n, reserves = self.microbatches or program.microbatches, self.limit is None
        own = Form(n, program.remat, bool(program.offload))
        if self.strategy._call is None or own != PLAIN or self.microbatches is not None:
            prepared = self.prepared(own)
            searched = partial(searched_on_meshes, prepared, searcher, silent, (), 1, None, warm=warm)
            try:
                return prepared, *within(prepared, searched, reserves, self.given)
            except InfeasibleError as error:
                if self.strategy._call is None or program.stages > 1 or self.microbatches is not None:
                    raise with_untried(error, ["other numbers of microbatches", "other recomputation"]) from None
        offload = "optimizer" if program.offload else None
        return Attempts(
            self.prepared, searcher, "fit", "fit", offload, self.given, None, reserves, silent, (), None, 1, warm=warm
        ).found()  # fmt: skip

    def prepared(self, form: Form, whole: Traced | None = None) -> Prepared:
        """The program in a form; what is known serves."""
        strategy, there, record = self.strategy, self.there, self.strategy.record
        program, call, seconds = record.program, strategy._call, {}
        if self.batch is None and form == Form(program.microbatches, program.remat, bool(program.offload)):
            traced, facts = strategy._traced, _facts(strategy, there)
        else:
            call = strategy._call if self.batch is None else with_batch_size(strategy, self.batch)
            assert call is not None, "a stage of a pipeline is searched as it is"
            axes = (*(record.mesh if self.wanted is None else self.wanted).all_names, *self.asked.axes)
            staged = (each for each in program.rewrites if isinstance(each, OneProgram))
            ticking = next((replace(each, microbatches=form.microbatches) for each in staged), None)
            how = form, whole, ticking, program.batch
            traced, facts, seconds = traced_of(*call, record.donate_argnums, axes, there, *how)
        assert traced is not None, "a strategy with its program"
        both = _with(strategy._pins, self.asked, traced, self.wanted is None)
        most = self.given if isinstance(self.given, int) else 2
        meshes, is_free = meshes_of(there, both, self.wanted, most, program.stages)
        n_axes = len(record.mesh.axes)
        finest = n_axes if is_free and n_axes > 2 and self.own_axes else 0  # a strategy on three axes is compared with one on three
        known = strategy._searched
        tables = known.problem if facts is known.facts else None
        bytes_limit = limit_of(there, self.limit)
        return Prepared(traced, facts, there, meshes, finest, both, bytes_limit, seconds, call, tables, self.limit is not None)


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


def _pipeline(
    strategy: Plan, parts: dict[str, Any], asked: Asked, there: Cluster, mesh: Any, batch: int | None, n: int | None, limit: float | None
) -> Plan:
    """The pipeline of as many stages and chunks, on the same schedule, in ``n`` microbatches, with its stages searched again.

    Where nothing fits and no number is asked for, in those that a search finds.

    Args:
        parts: stages, chunks and schedule, where they are other ones.
    """
    traced, call, record = strategy._traced, strategy._call, strategy.record
    pipeline = record.pipeline
    if pipeline is None and "stages" not in parts:
        raise StrategyError("chunks and schedules are of a pipeline's stages, and the strategy has none. Ask for stages= too.")
    usual = {} if pipeline is None else {"stages": pipeline.n_parts, "chunks": pipeline.chunks, "schedule": pipeline.schedule}
    if usual and "schedule" in parts:
        usual["chunks"] = None
    wanted = usual | parts
    assert traced is not None and call is not None, "a strategy with its program"
    fn, args = call if batch is None else with_batch_size(strategy, batch)
    own, remat = strategy._pins, record.program.remat
    pins = asked if own is None else replace(own.asked, specs={**own.asked.specs, **asked.specs})
    known, cuts = None, {}
    if batch is None and remat is None:
        if (found := strategy._searched.cuts) is not None:
            cuts[traced, found.n] = found
        known = traced, _facts(strategy, there), {"trace_seconds": 0.0, "n_ops": len(traced.graph.walk())}

    same = Request(
        cluster=there, mesh=mesh, asked=pins, memory_limit_bytes=limit, donate_argnums=record.donate_argnums,
        microbatches=n or (record.program.microbatches if pipeline is not None else "fit"), remat=None if remat is None else remat.mode,
        schedule=wanted.get("schedule"), chunks=wanted.get("chunks"),
        offload="optimizer" if record.program.offload else None,
    )  # fmt: skip

    def by(request: Request) -> Plan:
        def searched(searcher: Searcher) -> Plan:
            again = StageCall(fn, args, replace(request, searcher=searcher), silent, remat, earlier=own, cuts=cuts)
            return in_stages(again, wanted["stages"], known)[0]

        return by_first_that_holds(searched)

    try:
        return by(same)
    except PipelineError:  # hardly as many chunks of more stages
        if "chunks" in parts or same.chunks in (None, 1):
            raise
        return by(replace(same, chunks=None))
    except InfeasibleError:
        if n is not None:
            raise
        return by(replace(same, microbatches="fit", remat="fit"))


def _own_limit(strategy: Plan, before: Cluster, there: Cluster) -> float | None:
    """The limit that the strategy was searched with, on devices of the same memory; None: the cluster's."""
    same = before.device.memory_bytes == there.device.memory_bytes
    return strategy.record.memory_limit_bytes if same else None


def _facts(strategy: Plan, there: Cluster) -> ProgramFacts:
    """The program's facts for a cluster's compiler."""
    known = strategy._searched.facts
    compiler = compiler_of(there)
    return known if known.compiler == compiler else program_facts(known.graph, known.rules, compiler)


def _with_notes(solution: Solution, strategy: Plan) -> Solution:
    """The solution with a note on pins that a strategy from a file does not have."""
    n = strategy.record.stats.get("pins", 0) if strategy._pins is None else 0
    pins = "the pin of its search, which is" if n == 1 else f"the {n} pins of its search, which are"
    note = f"the strategy's file does not have {pins} not kept here: pass pins="
    return replace(solution, notes=(*solution.notes, note)) if n else solution


def _with(own: UserPins | None, asked: Asked, traced: Traced, is_searched: bool) -> UserPins:
    """The strategy's own pins, and those of the question, which come before."""
    graph = traced.graph
    if own is None:
        return user_pins(asked, graph, [()] * len(graph.arguments), is_searched)
    given = {at: spec for pattern, spec in asked.specs.items() for at in matching(pattern, graph.argument_paths)}
    kept = {at: each for at, each in own.kept.items() if at not in given}
    both = replace(own.asked, specs={**own.asked.specs, **asked.specs})
    return replace(own, asked=both, graph=graph, given={**own.given, **given}, kept=kept)


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
