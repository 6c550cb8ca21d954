"""What a strategy says: the decided part, its explanations, and the questions that can be put to it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any, Self

import jax
from jax.sharding import PartitionSpec

from autoshard.api.explain import StrategyReport, explain
from autoshard.api.explain_pipeline import timeline_of
from autoshard.api.pipeline_step import staged_as
from autoshard.api.recorded import WRITTEN_BACK, Call, abstract_call, lasting
from autoshard.api.searched import Searched
from autoshard.api.step import program_of
from autoshard.api.structure import rebuild
from autoshard.api.tensor_report import TensorReport, explain_tensor, explain_tensor_of_stages
from autoshard.api.user_pins import Asked, UserPins, stage_pins, user_pins
from autoshard.api.user_pins import Pins as WantedPins
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.cost.record import Cost
from autoshard.errors import StrategyError
from autoshard.explanation import Judged, explanation_of
from autoshard.judge.model import CostModel
from autoshard.pipeline.figures import stage_kinds
from autoshard.problem import Problem
from autoshard.report import HtmlReport, report
from autoshard.rules import rules_of
from autoshard.strategy import Confirmation, Record, save_record
from autoshard.trace import Traced, outside_mesh

if TYPE_CHECKING:
    from autoshard.api.what_if import WhatIf


class Answer:
    """How one program is sharded over one cluster, and what that costs.

    Attributes:
        record: everything that is saved.
    """

    def __init__(
        self,
        record: Record,
        traced: Traced | None = None,
        pins: UserPins | None = None,
        call: Call | None = None,
        searched: Searched | None = None,
        parts: tuple[Self, ...] = (),
    ):
        self.record = record
        self._traced = traced
        self._pins = pins  # those of the search
        self._call = call  # what was searched, with abstract arguments, for another trace; None of a strategy without its program
        self._known = searched  # what later questions need not compute again
        self._parts = parts  # the strategies of a pipeline's stages, with their programs

    def __repr__(self) -> str:
        record = self.record
        return f"Strategy({record.name!r}, mesh {record.mesh}, {record.cost.makespan_seconds:.3g} s a step, gap {self.gap:.1%})"

    def _repr_html_(self) -> str:
        return self.explain()._repr_html_()

    def __eq__(self, other: object) -> bool:
        """Whether the other would be saved as the same file."""
        return lasting(self.record) == lasting(other.record) if isinstance(other, Answer) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.record.name, self.record.mesh, self.record.cost.objective_seconds, self.record.cost.peak_bytes))

    # -- the answer ------------------------------------------------------------------------------------------------

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Axis sizes by name, outermost first."""
        return dict(self.record.mesh.shape)

    @property
    def in_specs(self) -> tuple:
        """A `PartitionSpec` for each argument leaf, structured as the tuple of arguments.

        An NNX object's specs come as its `nnx.State`. In a strategy that was loaded, containers other than tuples, lists and dicts
        come as dicts by field name.
        """
        specs = [PartitionSpec(*tensor.spec) for tensor in self.record.arguments]
        return rebuild(self.record.argument_structure, specs) if self._traced is None else self._traced.in_tree.unflatten(specs)

    @property
    def out_specs(self) -> Any:
        """A `PartitionSpec` for each result leaf, structured as the result."""
        specs = [PartitionSpec(*tensor.spec) for tensor in self.record.results]
        if self._traced is None:
            structure = self.record.result_structure
            written = isinstance(structure, dict) and structure.get("node") == WRITTEN_BACK
            return rebuild(structure["children"][0] if written else structure, specs)
        return self._traced.out_tree.unflatten(specs[: self._traced.out_tree.num_leaves])

    @cached_property
    def stages(self) -> tuple[Self, ...]:
        """The strategies of a pipeline's stages, each of the stage's own program on its part of the devices.

        () where there are none, also where stages are one program: this strategy is all of theirs.
        """
        pipeline = self.record.pipeline
        if pipeline is None or self._parts:
            return self._parts
        if self._traced is None:
            return tuple(type(self)(stage.record) for stage in pipeline.stages)
        stages = staged_as(self._traced, self.record, pipeline).stages
        found = zip(pipeline.stages, stages, strict=True)
        return tuple(type(self)(saved.record, stage.traced, stage_pins(Asked(), stage, False)) for saved, stage in found)

    @property
    def microbatches(self) -> int:
        """In how many parts of its batch a step computes its gradients, one after the other."""
        return self.record.program.microbatches

    @property
    def remat(self) -> str | None:
        """How it was decided what the backward pass computes again, ``"fit"``, ``"auto"`` or ``"full"``; None: nothing is."""
        return None if self.record.program.remat is None else self.record.program.remat.mode

    @property
    def offload(self) -> tuple[str, ...]:
        """The paths of the argument leaves that are in the memory of hosts between steps."""
        return tuple(self.record.arguments[leaf].path for leaf in self.record.program.offload)

    @property
    def cost(self) -> Cost:
        """What the judge predicts."""
        return self.record.cost

    @property
    def lower_bound_seconds(self) -> float:
        """Proven lower bound of the objective over all strategies on this mesh in this placement; 0.0 where nothing is proven."""
        return self.record.lower_bound_seconds

    @property
    def gap(self) -> float:
        """``(objective - lower bound) / objective``; 0.0 where optimality is proven."""
        return self.record.gap

    @property
    def stats(self) -> Mapping[str, Any]:
        """What the search took: ``search_seconds``, of which the searcher ``solve_seconds``; ``trace_seconds``, ``n_ops``, ..."""
        return self.record.stats

    @property
    def confirmation(self) -> Confirmation | None:
        """Which compiler or devices confirmed the strategy, what they say of it, and what became of the other finalists."""
        return self.record.confirmation

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed, what stays replicated and why, and which pins disagree, in words; `explain` shows them too."""
        return self.record.assumptions

    def explain(self, tensor: str | None = None, details: bool = False, spec: PartitionSpec | None = None) -> StrategyReport | TensorReport:
        """A report that prints in a terminal and shows in a notebook; ``explain().data`` is the same as numbers and names.

        Args:
            tensor: the path of an argument or a result, a pattern, or the end of a path that no other has, such as ``"layers/*/up"``; or
                of a computed value the name that `jax.ad_checkpoint.checkpoint_name` gives it, its source line, as ``"model.py:41"``, its
                layer, or its operation, as ``"op 57"``. Then the report is why it is sharded so, what other layouts would cost, alone and
                with everything else chosen anew, and what makes others unavailable.
            details: whether to add pictures of the shards, the results, the proof of optimality, and what the searcher did; of a tensor
                of a large program, whether all its layouts are searched rather than a few.
            spec: a layout of which to say why the tensor does not have it.

        Raises:
            StrategyError: the strategy is from a file and has no program; or no tensor has the name, or several have.
        """
        if tensor is None:
            if spec is not None:
                raise StrategyError("spec= is a layout of one tensor, and none is named. Pass both: explain('up', spec=P('model')).")
            return explain(self.record, self._judged, details, self._judged_stages)
        if not isinstance(tensor, str):
            raise StrategyError(f"a tensor is given by its name, got {tensor!r}. Use a path that explain() prints, such as 'layers/*/up'.")
        if spec is not None and not isinstance(spec, PartitionSpec):
            raise StrategyError(f"spec= is a PartitionSpec, got {spec!r}. Write P('model', None), for instance.")
        if self._traced is None:
            raise StrategyError(
                "other layouts of a tensor are searched in its program, which a strategy from a file lacks. Pass the function: "
                "strategy.with_program(fn, *args).explain(tensor); on the command line autoshard explain FILE MODULE:FUNCTION --args "
                "MODULE:NAME --tensor NAME."
            )
        if self.record.pipeline is not None:
            judged = zip(self._judged_stages, [stage._in_question() for stage in self.stages], strict=True)
            return explain_tensor_of_stages(list(judged), tensor, spec, details)
        assert self._judged is not None, "a strategy with its program"
        return explain_tensor(self._judged, tensor, self._in_question(), spec, details)

    def _in_question(self) -> Searched:
        """What the search knows, with its problem; of a sharding that was given, or from a file, that is made for the first question."""
        known, record = self._searched, self.record
        if known.problem is None or known.problem.mesh != record.mesh:
            graph, judged = known.facts.graph, self._judged
            assert judged is not None, "a strategy with its program"
            pins = self._pins or user_pins(Asked(), graph, [()] * len(graph.arguments), False)
            limit = record.memory_limit_bytes or judged.model.cluster.memory_limit_bytes
            self._known = known = replace(known, problem=Problem(known.facts, judged.model, pins.on(record.mesh), limit))
        return known

    def what_if(
        self,
        *,
        pins: WantedPins | None = None,
        cluster: Cluster | str | Path | None = None,
        mesh: Mapping[str, int] | jax.sharding.Mesh | int | None = None,
        batch: int | None = None,
        microbatches: int | None = None,
        memory_limit_bytes: float | None = None,
    ) -> WhatIf:
        """The difference that other pins, devices, meshes, batches or microbatches would make; ``.strategy`` is the other strategy.

        The program is searched again by dynamic programming, and the function traced again for another batch only. What the strategy's own
        search computed serves again, and so do its options: pins, microbatches, recomputation, offload, donation and memory limit. Where
        nothing fits so, other numbers of microbatches and recomputation are tried, as `search` does by default.

        Args:
            pins: as for `search`, beside the strategy's own, which they override.
            cluster: other devices; its mesh is then searched, with up to two axes.
            mesh: axis sizes by name; None keeps the mesh and its placement where the devices are the same.
            batch: the size of the whole batch: of the dimension that `data_parallel` would split.
            microbatches: their number; None keeps it. Of a pipeline, that of each of its schedule's tasks.
            memory_limit_bytes: as for `search`; None: that of the strategy, where devices have as much memory.

        Raises:
            StrategyError: the strategy has no program; says to pass it by `with_program`. Or no argument has a batch.
            TraceError: the step cannot be computed with a batch of that size, or in so many microbatches.
            InfeasibleError: nothing fits the memory; says what was not tried.
        """
        from autoshard.api.what_if import what_if

        own: Any = self  # a strategy
        return what_if(
            own, pins=pins, cluster=cluster, mesh=mesh, batch=batch, microbatches=microbatches, memory_limit_bytes=memory_limit_bytes
        )

    def report(self) -> HtmlReport:
        """The strategy as a page with timeline, memory, mesh, tables and graph, which a notebook shows.

        ``report().save_html(path)`` writes it as one file that opens offline, ``report().save_trace(path)`` the timeline for
        ui.perfetto.dev. Of a strategy from a file the page has what the record has; `with_program` gives it the rest.

        >>> import jax.numpy as jnp
        >>> import autoshard
        >>> strategy = autoshard.search(lambda w, x: x @ w, jnp.ones((4, 4)), jnp.ones((8, 4)), cluster="cpu:8")
        >>> strategy.report().html[:15]
        '<!DOCTYPE html>'
        """
        pipeline = self.record.pipeline
        schedule = None if pipeline is None else timeline_of(self.record, pipeline)
        judged, stages = self._judged_stages, []
        if pipeline is not None and self._traced is not None:  # none of a file
            programs = staged_as(self._traced, self.record, pipeline).stages
            stages = [(one, stage_kinds(stage)) for one, stage in zip(judged, programs, strict=True)]
        return report(self.record, explanation_of(self.record, self._judged, judged), self._judged, schedule, stages)

    @property
    def _judged_stages(self) -> list[Judged]:
        """The judged programs of a pipeline's stages; none of a strategy from a file, nor of one without stages."""
        return [stage._judged for stage in self.stages if stage._judged is not None]

    @cached_property
    def _judged(self) -> Judged | None:
        """The program with the assignment judged; None where the strategy came from a file, or runs as a pipeline."""
        if self._traced is None or self.record.pipeline is not None:
            return None
        known, mesh = self._searched, self.record.mesh
        if known.problem is not None and known.problem.mesh == mesh:
            return Judged(self.record, known.facts, known.problem.model)
        return Judged(self.record, known.facts, CostModel(Cluster.from_dict(self.record.cluster), mesh))

    @property
    def _searched(self) -> Searched:
        """What a search leaves for questions; of a strategy from a file, made for the first of them."""
        if self._known is None:
            assert self._traced is not None, "a strategy with its program"
            graph, compiler = self._traced.graph, compiler_of(Cluster.from_dict(self.record.cluster))
            self._known = Searched(program_facts(graph, rules_of(graph), compiler))
        return self._known

    def with_program(self, fn: Callable, *args: Any) -> Self:
        """The same strategy with its program, which one from a file lacks: `explain` then has compute by layer and memory by group.

        Args:
            fn, args: the program that the strategy is for; arrays may be `jax.ShapeDtypeStruct`.

        Raises:
            StrategyError: ``fn`` is not the program the strategy is for.
        """
        with outside_mesh(keep_auto=True):
            traced, _, _ = program_of(fn, args, self.record, before=self._traced)
        return type(self)(self.record, traced, call=abstract_call(fn, args, traced.rewrites))

    def with_record(self, record: Record) -> Self:
        """The strategy of another record of the same program."""
        return type(self)(record, self._traced, self._pins, self._call, self._known, self._parts)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the strategy as canonical JSON, whole or not at all; equal strategies are equal files, so what took how long stays out."""
        save_record(lasting(self.record), path)


for _method in vars(Answer).values():  # Python's own errors name methods by the class that users know
    if isinstance(_method, FunctionType):
        _method.__qualname__ = f"Strategy.{_method.__name__}"
