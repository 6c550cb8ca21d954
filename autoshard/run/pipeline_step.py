"""A function with a pipeline applied: called like a jitted function, it starts the tasks of all stages by the schedule."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.errors import StrategyError
from autoshard.explanation.explain_pipeline import schedule_as
from autoshard.judge.model import CostModel
from autoshard.lower.opaque import ANY_PLATFORM
from autoshard.microbatch import Pass, passes_of
from autoshard.pipeline.cut import Cut
from autoshard.pipeline.passes import PipelinedPasses
from autoshard.pipeline.programs import StagePlan
from autoshard.pipeline.run import Pipelined
from autoshard.pipeline.schedule import Task
from autoshard.pipeline.stages import Staged, stages_of, with_state_on_hosts
from autoshard.rules import rules_of
from autoshard.run.calls import Alike, Repeat
from autoshard.run.collecting import rarely_collecting
from autoshard.run.padded import PaddedArguments, in_own_sizes, own_sharding
from autoshard.run.placing import put
from autoshard.run.program import check_effects, program_of
from autoshard.run.saved_graphs import save_plan
from autoshard.run.step import Program, Step
from autoshard.strategy import BY_ROWS, PipelineRecord, Record, check_program
from autoshard.trace import Traced, held, outside_mesh
from autoshard.verify import Options


class PipelineStep(Step):
    """``fn`` as a pipeline: each stage's tasks are programs of their own on the stage's devices, and arrays are sent between them."""

    def __init__(
        self,
        fn: Callable[..., Any],
        record: Record,
        meshes: Sequence[Mesh],
        lowering: str = "manual",
        traced: Traced | None = None,
        compiler_options: Options | None = None,
        save_graphs: str | os.PathLike[str] | None = None,
    ):
        """``meshes`` has the mesh of each stage; all else as for `Step`.

        Raises:
            StrategyError: as for `Step`, or the lowering is not the one that pipelines have.
        """
        super().__init__(fn, record, None, lowering, traced, compiler_options, save_graphs)
        if lowering != "manual":
            raise StrategyError(f"tasks of a pipeline are lowered by 'manual', got lowering={lowering!r}. Leave it out.")
        self._meshes = tuple(meshes)
        self._running: PipelinedPasses | None = None
        self._waits = False

    def checked(self, *args: Any) -> Any:
        """What a call returns, with one task run after the other, so that an error is that of the task in which it happens.

        Programs run while the host goes on: in a usual call an error inside one may come up in a later task, or where results are read.

        Raises:
            PipelineError: a task fails; names its stage, its microbatch and the lines of the user's program that the stage computes.
        """
        self._waits = True
        try:
            return self(*args)
        finally:
            self._waits = False

    @property
    def executed(self) -> tuple[tuple[int, Task], ...]:
        """The tasks of the latest call in the order in which they were started, each with its part of the devices."""
        return () if self._running is None else self._running.executed

    @property
    def staged(self) -> Staged | None:
        """The stages of the latest call; of several passes over the microbatches those of the last one."""
        return None if self._running is None else self._running.runs[-1].staged

    def lower(self, *args: Any, platform: str = ANY_PLATFORM) -> jax.stages.Lowered:
        """Raises `StrategyError`: there is no one program to lower."""
        raise StrategyError("a pipeline has a program for each task, and no one to lower. Use autoshard.verify, which compiles them all.")

    def runs(self, args: tuple[Any, ...]) -> bool:
        """Whether the function is its strategy's program for these arguments too."""
        try:
            program_of(self._fn, held(self._plain, args), self._record, before=self._traced)
        except StrategyError:
            return False
        return True

    def _run_of(self, traced: Traced) -> PipelinedPasses:
        """The pipelines of the step's passes."""
        record, runs = self._record, []
        assert record.pipeline is not None
        found = passes_as(traced, record, record.pipeline)
        for _, staged, pipeline in found:
            plans = [plan_of(staged, number, pipeline, mesh) for number, mesh in enumerate(self._meshes)]
            if self._graphs is not None:
                for stage, saved in zip(staged.stages, pipeline.stages, strict=True):
                    save_plan(self._graphs, saved.record, stage.traced.graph, rules_of(stage.traced.graph))
            with outside_mesh():  # programs of stages are on meshes of their own
                runs.append(Pipelined(staged, plans, schedule_as(record, pipeline), self._compiler_options))
        return PipelinedPasses([each for each, *_ in found], runs)

    @rarely_collecting()
    @outside_mesh(keep_auto=True)
    def _lowered(self, args: tuple, differentiable: bool, inside: bool, around: Mesh | None) -> Program:
        if differentiable or inside:
            raise StrategyError(
                "a pipeline starts programs on several meshes, and was called inside jax.jit, jax.grad or another transformation. Call it "
                "outside, or search with stages=None."
            )
        record = self._record
        traced, _, _ = program_of(self._fn, args, record, self._weak_before(args), self._traced)
        check_effects(traced.graph, record.mesh.size)
        run = self._running = self._run_of(traced)

        def placed(*arguments: Any) -> list[Any]:
            return run.of_placed(list(arguments), self._waits)

        def padded(*arguments: Any) -> list[Any]:
            there = put([arguments[k] for k in own], [run.in_shardings[k] for k in own], [traced.graph.argument_paths[k] for k in own])
            found = dict(zip(own, there, strict=True))
            return placed(*(found.get(k, x) for k, x in enumerate(arguments)))

        own = PaddedArguments(record).given_own(jax.tree.leaves(traced.split(args)))
        flat = in_own_sizes(padded, own, traced.graph.aliases) if own else placed
        in_shardings = tuple(own_sharding(each, own[k]) if k in own else each for k, each in enumerate(run.in_shardings))

        def step(*pure: Any) -> Any:
            return traced.pack(flat(*jax.tree.leaves(pure)))

        state = {argument for _, argument in traced.graph.aliases}
        is_state = tuple(argument in state for argument in range(len(run.in_shardings)))
        alike = Alike(lambda leaves: traced.pack(flat(*leaves)), traced.in_tree, traced.jaxpr.in_avals, in_shardings)
        paths, donates, ways = traced.graph.argument_paths, bool(record.donate_argnums), traced.ways(self._plain)
        repeat = Repeat(alike, traced.in_tree, in_shardings, is_state, paths, donates, ways)
        return Program(traced, step, in_shardings, is_state, repeat=repeat)


def step_of(fn: Callable[..., Any], record: Record, meshes: Sequence[Mesh], *how: Any) -> Step:
    """``fn`` as a record says: as one program, or as a pipeline.

    Args:
        meshes: as `autoshard.run.leaf_shardings.step_meshes` has them; () where it is never run.
        how: further arguments as for `Step`.
    """
    return PipelineStep(fn, record, meshes, *how) if record.pipeline is not None else Step(fn, record, next(iter(meshes), None), *how)


def plan_of(staged: Staged, number: int, pipeline: PipelineRecord, mesh: Mesh | AbstractMesh) -> StagePlan:
    """What a record has of a stage, on a mesh.

    Raises:
        StrategyError: the record's stage is another program.
    """
    stage, own = staged.stages[number], pipeline.stages[number].record
    graph = stage.traced.graph
    check_program(own, graph, rules_of(graph))
    cluster = Cluster.from_dict(own.cluster)
    path = CostModel(cluster, own.mesh).reshard_paths(graph.values)
    return StagePlan(own.assignment, mesh, path, compiler_of(cluster))  # pyright: ignore[reportArgumentType]


def passes_as(traced: Traced, record: Record, pipeline: PipelineRecord) -> list[tuple[Pass, Staged, PipelineRecord]]:
    """The passes over the microbatches of a program, usually one, and the stages of each, as a record has them.

    Raises:
        StrategyError: the program has another number of passes.
    """
    passes = passes_of(traced, record.program.microbatches)
    if len(passes) != len(pipeline.passes):
        raise StrategyError(
            f"a pipeline goes over the microbatches as often as its step has to: got a strategy of {len(pipeline.passes)} passes for a "
            f"step of {len(passes)}. Search again."
        )
    return [(each, _staged_as(each, record, own), own) for each, own in zip(passes, pipeline.passes, strict=True)]


def _staged_as(own: Pass, record: Record, pipeline: PipelineRecord) -> Staged:
    """The stages of one pass."""
    n = len(pipeline.stages)
    rows = pipeline.rows or [k for k, stage in enumerate(pipeline.argument_stages) if stage == BY_ROWS]
    rows = pipeline.rows if own.traced.gathers is not None else rows
    staged = stages_of(own.traced, n, record.program.microbatches, Cut(n, pipeline.cut), rows)
    return with_state_on_hosts(staged, [place for place, k in enumerate(own.operands) if k in record.program.offload])
