"""The record of a strategy: what was decided about a program, what it costs, and where it comes from.

Everything is plain: names, numbers and tuples. A record neither knows JAX nor needs the program it was made for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np

from autoshard.cost.record import Cost
from autoshard.ir import Assignment, Choice, Layout, Mesh, Spec

SCHEMA = 2
"""Version of the file format as it is written; 1, which has words for what collectives move, for which op and why, is still read."""


@dataclass(frozen=True, slots=True)
class Program:
    """Which program a strategy is for.

    Attributes:
        name: the function's name.
        fingerprint: the graph's fingerprint: equal for equal programs.
        n_ops, n_values: sizes of the graph; choices and layouts are numbered within them.
    """

    name: str
    fingerprint: str
    n_ops: int
    n_values: int


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

    def __post_init__(self):
        object.__setattr__(self, "options", plain(self.options))


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where a strategy comes from.

    Attributes:
        command: what reproduces it, as typed in a shell; empty where it was searched from Python.
        autoshard, jax: the versions that made it.
        date: ISO date, or None: a file without it is the same bytes every time it is made.
    """

    command: str = ""
    autoshard: str = ""
    jax: str = ""
    date: str | None = None


OUTCOMES = ("taken", "slower", "does not fit", "failed", "not reached")
"""What may become of a finalist; one that was not reached was neither accepted nor refused by the time the confirmation ended."""

MEASURES = ("scheduled", "corrected", "timed")
"""How a finalist's seconds were found: the compiled schedule's, the prediction corrected by what was compiled, or the devices' own."""


@dataclass(frozen=True, slots=True)
class Finalist:
    """One of the strategies that a compiler, or devices, decided among. What was not compiled or not said is None.

    Attributes:
        found_by: the searcher whose answer it is.
        mesh: axis sizes by name.
        predicted_seconds: the step time that the cost model predicts.
        outcome: what became of it, one of `OUTCOMES`.
        reason: why it failed, in words.
        measure: how its seconds were found, one of `MEASURES`.
        seconds: the step time by that measure.
        collective_bytes: bytes of all collectives of one device in a step, as compiled.
        flops: of matrix products and convolutions of one device in a step, as compiled.
        peak_bytes: memory of a device at the fullest moment, as compiled.
        needed_bytes: what the compiler's allocator takes of a device, fragmentation included.
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
    """What confirmed a strategy, and among which finalists.

    Attributes:
        by: ``"compiler"`` or ``"devices"``.
        name: the compiler, such as ``XLA:TPU``, or the devices' kind, as JAX names it.
        version: the package that has it and its version, such as ``libtpu 0.0.42``.
        finalists: in the order of their predicted step times, one of them taken.
    """

    by: str
    name: str
    version: str
    finalists: tuple[Finalist, ...]

    @property
    def taken(self) -> Finalist:
        """The strategy's own figures."""
        return next(each for each in self.finalists if each.outcome == "taken")

    @property
    def seconds(self) -> float | None:
        """The step time, as scheduled, corrected or timed; None in a file of what was timed, since that varies from run to run."""
        return self.taken.seconds

    @property
    def collective_bytes(self) -> float | None:
        """Bytes of all collectives of one device in a step, as compiled."""
        return self.taken.collective_bytes

    @property
    def flops(self) -> float | None:
        """Of matrix products and convolutions of one device in a step, as compiled."""
        return self.taken.flops

    @property
    def peak_bytes(self) -> float | None:
        """Memory of a device at the fullest moment, as compiled."""
        return self.taken.peak_bytes


@dataclass(frozen=True, slots=True)
class Record:
    """A strategy as it is saved.

    Attributes:
        name: what people call it.
        program: which program it is for.
        cluster: the devices, as `Cluster.to_dict` gives them.
        mesh: the logical mesh, and how it is placed on the cluster.
        arguments, results: the leaves of the program's arguments and results, in order.
        argument_structure, result_structure: the pytrees as JSON: a leaf's index, None, ``{"tuple": [...]}``, ``{"list": [...]}``,
            ``{"dict": {...}}``, or ``{"node": type name, "keys": [...], "children": [...]}``.
        choices: per op index its choice.
        layouts: per value number its layout.
        copies: per value number the second layout that its readers share.
        cost: what the judge says.
        searcher: what found it.
        lower_bound_seconds: proven lower bound of the objective on this mesh; 0.0 where nothing is proven.
        donate_argnums: which arguments' memory the program may reuse, as in `jax.jit`.
        assumptions: what tracing and costing had to assume, and what the searcher noted, in words.
        stats: what the search took: counts and seconds by name.
        provenance: where it comes from.
        confirmation: which compiler or devices confirmed it, and what they say; None where none was asked.
        ahead: per value number the layout in which a scan gathers it one trip ahead.
        windows: per op index of a windowed product the operand whose blocks go round, or -1 for its result.
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

    def __post_init__(self):
        for name in ("cluster", "argument_structure", "result_structure", "stats"):
            object.__setattr__(self, name, plain(getattr(self, name)))

    @property
    def assignment(self) -> Assignment:
        """The layouts and choices; `check_program` says whether they fit a graph."""
        return Assignment(self.mesh, self.choices, self.layouts, self.copies, self.ahead, self.windows)

    @property
    def gap(self) -> float:
        """``(objective - lower bound) / objective``: how far from optimal the strategy can be; 0.0 where it is proven optimal."""
        objective = self.cost.objective_seconds
        return max(0.0, (objective - self.lower_bound_seconds) / objective) if objective > 0 else 0.0


def plain(value: Any) -> Any:
    """The value as JSON would give it back: mappings and dataclasses as dicts, sequences as lists, numpy scalars as numbers.

    >>> plain({"mesh": (4, np.int64(2))})
    {'mesh': [4, 2]}
    """
    if isinstance(value, np.generic):
        return value.item()
    if is_dataclass(value) and not isinstance(value, type):
        name = getattr(value, "name", None)  # of searchers their class's own, no field
        return ({"name": name} if isinstance(name, str) else {}) | {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(child) for key, child in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(child) for child in (sorted(value) if isinstance(value, set | frozenset) else value)]
    return value
