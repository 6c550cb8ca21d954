"""A plan: how one program is sharded over one cluster, as a search found it or a file has it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import chain
from types import FunctionType
from typing import Any, Self

from jax.sharding import PartitionSpec

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.cost.record import Cost
from autoshard.explanation import Judged
from autoshard.explanation.program import Searched
from autoshard.ir.rewrites import variant
from autoshard.judge.model import CostModel
from autoshard.plan.user_pins import Asked, UserPins, stage_pins
from autoshard.rules import rules_of
from autoshard.run.pipeline_step import passes_as
from autoshard.run.program import program_of
from autoshard.run.recorded import WRITTEN_BACK, Call, abstract_call, lasting
from autoshard.run.structure import rebuild
from autoshard.strategy import Confirmation, Record
from autoshard.trace import Traced, outside_mesh


class Plan:
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
        passes: tuple[tuple[Self, ...], ...] = (),
    ):
        self.record = record
        self._traced = traced
        self._pins = pins  # those of the search
        self._call = call  # what was searched, with abstract arguments, for another trace; None of a strategy without its program
        self._known = searched  # what later questions need not compute again
        self._passes = passes  # the strategies of a pipeline's stages, with their programs

    def __repr__(self) -> str:
        record = self.record
        return f"Strategy({record.name!r}, mesh {record.mesh}, {record.cost.makespan_seconds:.3g} s a step, gap {self.gap:.1%})"

    def __eq__(self, other: object) -> bool:
        """Whether the other would be saved as the same file."""
        return lasting(self.record) == lasting(other.record) if isinstance(other, Plan) else NotImplemented

    def __hash__(self) -> int:
        return hash((self.record.name, self.record.mesh, self.record.cost.objective_seconds, self.record.cost.peak_bytes))

    @property
    def mesh_shape(self) -> dict[str, int]:
        """Axis sizes by name, outermost first."""
        return dict(self.record.mesh.shape)

    @property
    def in_specs(self) -> tuple[Any, ...]:
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

    @property
    def stages(self) -> tuple[Self, ...]:
        """The strategies of a pipeline's stages, each of the stage's own program on its part of the devices.

        Of several passes over the microbatches those of the first one come first, then those of the next. () where there are none, also
        where stages are one program: this strategy is all of theirs.
        """
        return tuple(chain.from_iterable(self.passes))

    @cached_property
    def passes(self) -> tuple[tuple[Self, ...], ...]:
        """The same, those of each pass over the microbatches by themselves."""
        pipeline = self.record.pipeline
        if pipeline is None or self._passes:
            return self._passes
        if self._traced is None:
            return tuple(tuple(type(self)(stage.record) for stage in own.stages) for own in pipeline.passes)
        return tuple(
            tuple(
                type(self)(saved.record, stage.traced, stage_pins(Asked(), stage, False))
                for saved, stage in zip(own.stages, staged.stages, strict=True)
            )
            for _, staged, own in passes_as(self._traced, self.record, pipeline)
        )

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

    @property
    def _programs(self) -> list[Judged]:
        """The judged program, or those of a pipeline's stages, as in `stages`; none of a strategy from a file."""
        return [each._judged for each in (self.stages or (self,)) if each._judged is not None]

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

    def with_program(self, fn: Callable[..., Any], *args: Any) -> Self:
        """The same strategy with its program, which one from a file lacks: `explain` then has compute by layer and memory by group.

        Args:
            fn, args: the program that the strategy is for; arrays may be `jax.ShapeDtypeStruct`.

        Raises:
            StrategyError: ``fn`` is not the program the strategy is for.
        """
        with outside_mesh(keep_auto=True):
            traced, _, _ = program_of(fn, args, self.record, before=self._traced)
        return type(self)(self.record, traced, call=abstract_call(fn, args, variant(traced.rewrites)))

    def with_record(self, record: Record) -> Self:
        """The strategy of another record of the same program."""
        passes = self._passes if record.pipeline == self.record.pipeline else ()
        return type(self)(record, self._traced, self._pins, self._call, self._known, passes)


def named_as_strategies(cls: type[Any]) -> type[Any]:
    """The class, with methods that Python's own errors name by the class that users know."""
    for method in vars(cls).values():
        if isinstance(method, FunctionType):
            method.__qualname__ = f"Strategy.{method.__name__}"
    return cls


named_as_strategies(Plan)
