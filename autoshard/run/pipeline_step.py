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
from autoshard.judge.model import CostModel
from autoshard.lower.opaque import ANY_PLATFORM
from autoshard.pipeline import Cut, Staged, stages_of, with_state_on_hosts
from autoshard.pipeline.programs import StagePlan
from autoshard.pipeline.run import Pipelined
from autoshard.pipeline.schedule import Schedule, Task, schedule_of
from autoshard.rules import rules_of
from autoshard.run.collecting import rarely_collecting
from autoshard.run.padded import PaddedArguments, in_own_sizes, own_sharding
from autoshard.run.placing import put
from autoshard.run.saved_graphs import save_plan
from autoshard.run.step import Program, Step, check_effects, program_of
from autoshard.strategy import BY_ROWS, PipelineRecord, Record, check_program
from autoshard.trace import Traced, held, outside_mesh
from autoshard.verify import Options


class PipelineStep(Step):
    """``fn`` as a pipeline: each stage's tasks are programs of their own on the stage's devices, and arrays are sent between them."""

    def __init__(
        self,
        fn: Callable,
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
        self._running: Pipelined | None = None
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
        """The stages of the latest call."""
        return None if self._running is None else self._running.staged

    def lower(self, *args: Any, platform: str = ANY_PLATFORM) -> jax.stages.Lowered:
        """Raises `StrategyError`: there is no one program to lower."""
        raise StrategyError("a pipeline has a program for each task, and no one to lower. Use autoshard.verify, which compiles them all.")

    def runs(self, args: tuple) -> bool:
        """Whether the function is its strategy's program for these arguments too."""
        try:
            program_of(self._fn, held(self._plain, args), self._record, before=self._traced)
        except StrategyError:
            return False
        return True

    @rarely_collecting()
    @outside_mesh(keep_auto=True)
    def _lowered(self, args: tuple, differentiable: bool, around: Mesh | None) -> Program:
        if differentiable:
            raise StrategyError(
                "a pipeline starts programs on several meshes, and was called inside jax.jit, jax.grad or another transformation. Call it "
                "outside, or search with stages=None."
            )
        record = self._record
        traced, _, _ = program_of(self._fn, args, record, self._weak_before(args), self._traced)
        pipeline = record.pipeline
        assert pipeline is not None
        check_effects(traced.graph, record.mesh.size)
        staged = staged_as(traced, record, pipeline)
        plans = [plan_of(staged, number, record, mesh) for number, mesh in enumerate(self._meshes)]
        if self._graphs is not None:
            for stage, saved in zip(staged.stages, pipeline.stages, strict=True):
                save_plan(self._graphs, saved.record, stage.traced.graph, rules_of(stage.traced.graph))
        with outside_mesh():  # programs of stages are on meshes of their own
            run = self._running = Pipelined(staged, plans, schedule_as(record, pipeline), self._compiler_options)

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
        return Program(traced, step, in_shardings, is_state)


def plan_of(staged: Staged, number: int, record: Record, mesh: Mesh | AbstractMesh) -> StagePlan:
    """What a record has of a stage, on a mesh.

    Raises:
        StrategyError: the record's stage is another program.
    """
    assert record.pipeline is not None
    stage, own = staged.stages[number], record.pipeline.stages[number].record
    graph = stage.traced.graph
    check_program(own, graph, rules_of(graph))
    cluster = Cluster.from_dict(own.cluster)
    path = CostModel(cluster, own.mesh).reshard_paths(graph.values)
    return StagePlan(own.assignment, mesh, path, compiler_of(cluster).demotes_operands)  # pyright: ignore[reportArgumentType]


def staged_as(traced: Traced, record: Record, pipeline: PipelineRecord) -> Staged:
    """The stages of a program as a record has them."""
    n, rows = len(pipeline.stages), [k for k, stage in enumerate(pipeline.argument_stages) if stage == BY_ROWS]
    staged = stages_of(traced, n, record.program.microbatches, Cut(n, pipeline.cut), rows)
    return with_state_on_hosts(staged, record.program.offload)


def schedule_as(record: Record, pipeline: PipelineRecord) -> Schedule:
    """The schedule of a record."""
    return schedule_of(pipeline.schedule, pipeline.n_parts, record.program.microbatches, pipeline.chunks)
