"""The record of a strategy: the assignment of a program, its predicted cost, and its provenance.

A record has names, numbers and tuples only; it needs neither JAX nor the program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np

from autoshard.cluster import Cluster
from autoshard.cost.record import Cost
from autoshard.ir import Assignment, Choice, Layout, Mesh, Spec
from autoshard.ir.pieces import part_of
from autoshard.ir.rewrites import Rewrite
from autoshard.ir.rewritten import Rewritten

SCHEMA = 4
"""Version of the written file format. Read, too: 3, in which rewrites have names of their own; 2, in which nothing is folded;
and 1, in which the attribution of collectives is text."""


@dataclass(frozen=True, slots=True)
class Tried:
    """One form of a step: as it is, in microbatches, with recomputation, with arrays in the memory of hosts, or in stages.

    Attributes:
        form: in words.
        outcome: what became of it, in words: ``"taken"``, ``"slower"``, ``"does not fit"``, or why it was not searched.
        estimated_seconds, estimated_bytes: its step time and peak as they were estimated before a search; None where there is no estimate.
        seconds, peak_bytes: of the fastest strategy that was found; None: none was.
    """

    form: str
    outcome: str
    estimated_seconds: float | None = None
    estimated_bytes: float | None = None
    seconds: float | None = None
    peak_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Program(Rewritten):
    """The program of a strategy.

    Attributes:
        name: the function's name.
        fingerprint: the graph's fingerprint: equal for equal programs.
        n_ops, n_values: sizes of the graph; choices and layouts are numbered within them.
        rewrites: those that were applied, in their order. A pipeline's microbatches and offloaded leaves are those of its stages.
        batch: the paths of the arguments that hold examples, where the user names them.
    """

    name: str
    fingerprint: str
    n_ops: int
    n_values: int
    rewrites: tuple[Rewrite, ...] = ()
    batch: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One argument or result leaf: its path in the pytree, its whole shape, and its `PartitionSpec` as a tuple."""

    path: str
    shape: tuple[int, ...]
    dtype: str
    spec: Spec


@dataclass(frozen=True, slots=True)
class SearcherRecord:
    """The searcher that found a strategy, with its options as plain JSON values.

    >>> SearcherRecord("data_parallel").options
    {}
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", plain(self.options))


@dataclass(frozen=True, slots=True)
class Provenance:
    """The provenance of a strategy.

    Attributes:
        command: the shell command that reproduces it; empty where it was searched from Python.
        autoshard, jax: the versions that found it.
        date: ISO date, or None, for reproducible files.
    """

    command: str = ""
    autoshard: str = ""
    jax: str = ""
    date: str | None = None


OUTCOMES = ("taken", "slower", "does not fit", "failed", "not reached")
"""The outcomes of a finalist; one that was not reached was neither accepted nor refused when the confirmation ended."""

MEASURES = ("scheduled", "corrected", "timed")
"""The source of a finalist's seconds: the compiled schedule, the prediction corrected by the compiled module, or the devices."""


@dataclass(frozen=True, slots=True)
class Finalist:
    """One of the strategies among which a compiler, or devices, decided; figures that are not known are None.

    Attributes:
        found_by: the searcher that found it.
        mesh: its mesh.
        predicted_seconds: the predicted step time.
        outcome: one of `OUTCOMES`.
        reason: why it failed, in words.
        measure: the source of its seconds, one of `MEASURES`.
        seconds: the step time by that measure.
        collective_bytes: bytes of all collectives of one device in a step, as compiled.
        flops: of matrix products and convolutions of one device in a step, as compiled.
        peak_bytes: peak memory of a device, as compiled.
        needed_bytes: bytes that the compiler allocates on a device, fragmentation included.
    """

    found_by: str
    mesh: Mesh
    predicted_seconds: float
    outcome: str
    reason: str = ""
    measure: str | None = None
    seconds: float | None = None
    collective_bytes: float | None = None
    flops: float | None = None
    peak_bytes: float | None = None
    needed_bytes: float | None = None


@dataclass(frozen=True, slots=True)
class Confirmation:
    """The confirmation of a strategy by a compiler or by devices.

    Attributes:
        by: ``"compiler"`` or ``"devices"``.
        name: the compiler, such as ``XLA:TPU``, or JAX's name of the devices' kind.
        version: the compiler's package and version, such as ``libtpu 0.0.42``.
        finalists: of each search one after the other, in the order of their predicted step times; one of them is taken.
    """

    by: str
    name: str
    version: str
    finalists: tuple[Finalist, ...]

    @property
    def taken(self) -> Finalist:
        """The finalist that is the strategy."""
        return next(each for each in self.finalists if each.outcome == "taken")

    @property
    def seconds(self) -> float | None:
        """The step time, as scheduled, corrected or timed; None in files where it was timed, since that varies from run to run."""
        return self.taken.seconds

    @property
    def collective_bytes(self) -> float | None:
        """Bytes of all collectives of one device in a step, as compiled."""
        return self.taken.collective_bytes

    @property
    def flops(self) -> float | None:
        """FLOPs of matrix products and convolutions of one device in a step, as compiled."""
        return self.taken.flops

    @property
    def peak_bytes(self) -> float | None:
        """Peak memory of a device, as compiled."""
        return self.taken.peak_bytes


@dataclass(frozen=True, slots=True)
class StageRecord:
    """One stage of a pipeline; times and bytes are predicted, of one device.

    Attributes:
        record: the strategy of the stage's program, on its part of the cluster: all microbatches, and what the stage does after them.
        forward_seconds, backward_seconds, weights_seconds: one microbatch: forward, the gradients that are sent back, those of weights.
        after_seconds: what else runs once a step.
        send_seconds, send_back_seconds: the transfer of one microbatch's activations to the next stage, and of gradients to the one before.
        residual_bytes: what a microbatch keeps between its forward and its backward tasks.
        peak_bytes: at the fullest moment of the schedule.
        update_seconds: what follows for gradients and state once a step, and needs nothing of other stages; 0 in files of earlier versions,
            whose ``after_seconds`` have it.
    """

    record: Record
    forward_seconds: float
    backward_seconds: float
    weights_seconds: float
    after_seconds: float
    send_seconds: float
    send_back_seconds: float
    residual_bytes: float
    peak_bytes: float
    update_seconds: float = 0.0


BY_ROWS = -1
"""Stands for the stage of a leaf of which every stage has some rows."""


@dataclass(frozen=True, slots=True)
class PipelineRecord:
    """How a program runs as a pipeline of stages, each on its part of the devices.

    Attributes:
        schedule: the schedule's name.
        chunks: how many parts of the program each part of the devices has.
        cut: the numbers from which the program is cut into the same stages again.
        stages: in the order of the program.
        argument_stages, result_stages: per leaf the stage that has it between steps; `BY_ROWS` where each has the rows of its own layers:
            the leaf is then on the devices of all stages, and its first dimension is split over them.
        placement: of the stages on the parts of the devices, of `autoshard.ir.pieces.PLACEMENTS`.
        orders: per part of the devices the order of its tasks, as `autoshard.pipeline.schedule.Schedule.words` writes it; empty in files of
            earlier versions: that which the schedule's name has for equal stages.
        earlier: of a step in several passes over its microbatches, the pipelines of the passes before this one, in order, whose arguments
            and results are no leaves of the step.
        rows: of each of several passes the positions of the arguments of its program of which each stage has some rows.
    """

    schedule: str
    chunks: int
    cut: tuple[int, ...]
    stages: tuple[StageRecord, ...]
    argument_stages: tuple[int, ...]
    result_stages: tuple[int, ...]
    placement: str = "loop"
    orders: tuple[str, ...] = ()
    earlier: tuple[PipelineRecord, ...] = ()
    rows: tuple[int, ...] = ()

    @property
    def passes(self) -> tuple[PipelineRecord, ...]:
        """The pipelines of all passes, in order."""
        return (*self.earlier, self)

    @property
    def n_parts(self) -> int:
        """The number of parts of the devices."""
        return len(self.stages) // self.chunks

    def part(self, stage: int) -> int:
        """The part of the devices that has a stage."""
        return part_of(stage, self.n_parts, self.placement)

    def stages_of(self, part: int) -> tuple[int, ...]:
        """The stages that a part of the devices has."""
        return tuple(stage for stage in range(len(self.stages)) if self.part(stage) == part)


@dataclass(frozen=True, slots=True)
class Record:
    """A strategy as it is saved.

    Attributes:
        name: of the strategy.
        program: the program it is for.
        cluster: the devices, as `Cluster.to_dict` gives them.
        mesh: the logical mesh, and its placement on the cluster.
        arguments, results: the leaves of the program's arguments and results, in order.
        argument_structure, result_structure: the pytrees as JSON: a leaf's index, None, ``{"tuple": [...]}``, ``{"list": [...]}``,
            ``{"dict": {...}}``, or ``{"node": type name, "keys": [...], "children": [...]}``.
        choices: per op index its choice.
        layouts: per value number its layout.
        copies: per value number the second layout that its readers share.
        cost: the predicted cost.
        searcher: the searcher that found it.
        lower_bound_seconds: proven lower bound of the objective on this mesh; 0.0 where nothing is proven.
        donate_argnums: which arguments' memory the program may reuse, as in `jax.jit`.
        assumptions: assumptions of tracing and costing, and notes of the searcher, in words.
        stats: counts and seconds of the search by name.
        provenance: the command and versions that found it.
        confirmation: its confirmation by a compiler or devices; None where none was requested.
        ahead: per value number the layout to which a scan gathers it one trip ahead.
        windows: per op index of a windowed product the operand whose blocks circulate, or -1 for its result.
        pipeline: the stages of a pipeline; None where every device runs the whole program. With stages, the mesh has a first axis of them,
            and choices and layouts are those of each stage's own record.
        trail: the forms of the step that the search compared, fastest first; () where the step was searched in one form alone.
        report: what a report shows of the program, packed (`autoshard.explanation.stored`); empty where that is not kept. Strategies
            that differ in it alone are equal.
    """

    name: str
    program: Program
    cluster: Mapping[str, Any]
    mesh: Mesh
    arguments: tuple[TensorRecord, ...]
    results: tuple[TensorRecord, ...]
    argument_structure: Any
    result_structure: Any
    choices: Mapping[int, Choice]
    layouts: Mapping[int, Layout]
    copies: Mapping[int, Layout]
    cost: Cost
    searcher: SearcherRecord
    lower_bound_seconds: float = 0.0
    donate_argnums: tuple[int, ...] = ()
    assumptions: tuple[str, ...] = ()
    stats: Mapping[str, Any] = field(default_factory=dict)
    provenance: Provenance = Provenance()
    confirmation: Confirmation | None = None
    ahead: Mapping[int, Layout] = field(default_factory=dict)
    windows: Mapping[int, int] = field(default_factory=dict)
    pipeline: PipelineRecord | None = None
    trail: tuple[Tried, ...] = ()
    report: str = field(default="", compare=False, repr=False)

    def __post_init__(self) -> None:
        for name in ("cluster", "argument_structure", "result_structure", "stats"):
            object.__setattr__(self, name, plain(getattr(self, name)))

    @property
    def assignment(self) -> Assignment:
        """The layouts and choices; `check_program` checks them against a graph."""
        return Assignment(self.mesh, self.choices, self.layouts, self.copies, self.ahead, self.windows)

    @property
    def part_meshes(self) -> tuple[Mesh, ...]:
        """The mesh of each part of the devices: that of the stages there, or the one of a step without stages."""
        found = self.pipeline
        return (self.mesh,) if found is None else tuple(stage.record.mesh for stage in found.stages[: found.n_parts])

    @property
    def argument_places(self) -> tuple[int, ...]:
        """Per argument leaf the stage that has it between steps, or `BY_ROWS`; 0 without stages."""
        return (0,) * len(self.arguments) if self.pipeline is None else self.pipeline.argument_stages

    @property
    def memory_limit_bytes(self) -> float | None:
        """The memory limit that the search was given; None: that of the cluster."""
        return self.stats.get("memory_limit_bytes")

    @property
    def limit_bytes(self) -> float:
        """The memory that a device has for a program: the limit that the search was given, or else the cluster's."""
        return self.memory_limit_bytes or Cluster.from_dict(self.cluster).memory_limit_bytes

    @property
    def gap(self) -> float:
        """``(objective - lower bound) / objective``, the greatest possible distance to the optimum; 0.0 where it is proven optimal."""
        objective = self.cost.objective_seconds
        return max(0.0, (objective - self.lower_bound_seconds) / objective) if objective > 0 else 0.0


def plain(value: Any) -> Any:
    """The value in JSON's types: mappings and dataclasses as dicts, sequences as lists, numpy scalars as numbers.

    >>> plain({"mesh": (4, np.int64(2))})
    {'mesh': [4, 2]}
    """
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        name = getattr(value, "name", None)  # a class attribute of searchers, no field
        return ({"name": name} if isinstance(name, str) else {}) | {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(child) for child in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return value
