"""Plans of a step as a search over stages and microbatches compares them: what is asked for, and what is found."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, Protocol

from autoshard.cluster import Cluster
from autoshard.ir import Mesh
from autoshard.pipeline.layer_costs import LayerCosts
from autoshard.pipeline.layer_search import LayerSearch
from autoshard.pipeline.layering import Layering
from autoshard.problem import Problem
from autoshard.trace import Traced

FILL = {"1f1b": 1.0, "gpipe": 1.0, "interleaved": 0.5, "zero_bubble": 1 / 3, "auto": 1 / 6}
"""Per schedule the share of the other stages' time for one microbatch in which a stage waits.

Two chunks a stage halve it; ZB-H1 fills what the gradients of weights take, a third forward and backward (Qi et al., 2023); both are
among what is found by itself, and more chunks.
"""

ESTIMATE_ERROR = 0.1  # of a pipeline's step time: its stages, searched one by one, take less than is estimated by no more

Recomputing = Callable[[Traced], "Traced | None"]
"""From the step, or one of fewer layers, to a program that computes again what it does not keep; None where that saves little."""


class Layers(Protocol):
    """The equal layers of a program, scanned (`ScannedLayers`) or written one after the other (`RepeatedLayers`)."""

    @property
    def count(self) -> int:
        """The number of layers."""
        ...

    @property
    def handed_on_bytes(self) -> float:
        """The bytes of what a layer computes and the next one reads."""
        ...

    @property
    def are_scanned(self) -> bool:
        """Whether they are a scan, whose trips all compute the same again."""
        ...

    def shorter(self, traced: Traced, /) -> Shorter | None:
        """The program with two smaller numbers of its layers, or the greater one its own; None where layers cannot be taken out."""
        ...


class Problems(Protocol):
    """The search problems of a program on some devices, without a memory limit: one a mesh and placement, in an order of its own."""

    def __call__(self, traced: Traced, cluster: Cluster, /) -> Sequence[Problem]: ...


@dataclass(frozen=True, slots=True, eq=False)
class Shorter:
    """A program with two numbers of its layers, the smaller one first."""

    numbers: tuple[int, int]
    programs: tuple[Traced, Traced]


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """A number of stages, and one of microbatches."""

    n_stages: int
    n_microbatches: int

    def __str__(self) -> str:
        return f"{self.n_stages} stages, {self.n_microbatches} microbatches"


@dataclass(frozen=True, slots=True)
class Estimate:
    """A candidate with its predicted costs.

    Attributes:
        candidate: the numbers.
        schedule: the schedule's name.
        mesh: of a stage's devices, in its best placement.
        layering: the layers of each stage.
        options: the plans that a stage may have.
        again: per stage the number of the recomputation among those asked for; None: nothing is computed again.
        objective_seconds: the makespan without overlap, to compare with bounds.
        hosted: per stage whether its optimizer state is in the memory of hosts.
    """

    candidate: Candidate
    schedule: str
    mesh: Mesh
    layering: Layering
    options: tuple[LayerCosts, ...]
    again: tuple[int | None, ...]
    objective_seconds: float
    hosted: tuple[bool, ...]

    @property
    def makespan_seconds(self) -> float:
        """Of a step, as predicted."""
        return self.layering.makespan_seconds

    @property
    def parts(self) -> list[tuple[float, int | None]]:
        """Per stage with which share of all layers it ends, and its recomputation."""
        before = accumulate(self.layering.layers)
        return [(n / sum(self.layering.layers), again) for n, again in zip(before, self.again, strict=True)]


class Bounds(NamedTuple):
    """Lower bounds of a candidate's makespan: of computing alone, and of the time without overlap; and its number of stages."""

    computing_seconds: float
    objective_seconds: float
    n_stages: int = 1


@dataclass(slots=True, eq=False)
class Known:
    """What is known of a candidate.

    Attributes:
        work, floor: lower bounds: of all layers on all microbatches with the devices of one stage, and of computing one microbatch.
        computing: as ``work``, of computing alone.
        meshes: per mesh the bound of the program of few layers.
        search: its search, once there was one.
        again: those of the programs that compute again, once there were any.
        found: its best estimates, one a schedule.
        price: seconds a byte at which something fitted.
        is_raised: whether its bound heeds memory.
        needs_less: whether one of fewer microbatches is so far from fitting that this one is not tried.
    """

    work: float
    floor: float
    computing: float
    meshes: list[float] = field(default_factory=list)
    search: LayerSearch | None = None
    again: list[LayerSearch] | None = None
    found: list[Estimate] = field(default_factory=list)
    price: float = 0.0
    is_raised: bool = False
    needs_less: bool = False


@dataclass(frozen=True, slots=True)
class Plans:
    """What a search over candidates found.

    Attributes:
        ranked: what fits, fastest first.
        bounds: of each candidate.
        n_searched: how many candidates were searched.
        ended_early: whether an exception ended the search.
    """

    ranked: tuple[Estimate, ...]
    bounds: tuple[Bounds, ...]
    n_searched: int
    ended_early: bool = False

    def promised(self, candidate: Candidate) -> float:
        """Seconds than which a candidate is hardly faster: by its own estimates, or else by computing alone in as many stages."""
        if own := [each.makespan_seconds for each in self.ranked if each.candidate == candidate]:
            return min(own) * (1 - ESTIMATE_ERROR)
        return min((each.computing_seconds for each in self.bounds if each.n_stages == candidate.n_stages), default=0.0)

    @property
    def least_seconds(self) -> float:
        """The least makespan without overlap; infinity where nothing fits."""
        return min((found.objective_seconds for found in self.ranked), default=math.inf)

    @property
    def computing_seconds(self) -> float:
        """A lower bound of the makespan of every candidate: of computing alone."""
        return min((each.computing_seconds for each in self.bounds), default=0.0)

    def bound_of_faster(self, makespan_seconds: float) -> float:
        """A lower bound of the makespan without overlap of the candidates that may have a lesser makespan than this."""
        faster = (each.objective_seconds for each in self.bounds if each.computing_seconds < makespan_seconds)
        return min(faster, default=math.inf)

    @property
    def bound_seconds(self) -> float:
        """A lower bound of the makespan without overlap of every candidate that may be faster than what was found."""
        fastest = self.ranked[0].makespan_seconds if self.ranked else math.inf
        return min(self.bound_of_faster(fastest), self.least_seconds)

    @property
    def gap(self) -> float:
        """`gap_of` the fastest; 1 where nothing fits."""
        return self.gap_of(self.ranked[0].makespan_seconds, self.least_seconds) if self.ranked else 1.0

    def gap_of(self, makespan_seconds: float, objective_seconds: float) -> float:
        """The share of a plan's makespan, with overlap or without, that is above the bound: the lesser of the two."""
        overlapped = 1 - self.computing_seconds / makespan_seconds if makespan_seconds else 0.0
        alone = 1 - self.bound_of_faster(makespan_seconds) / objective_seconds if objective_seconds else 0.0
        return max(min(overlapped, alone), 0.0)


@dataclass(frozen=True, slots=True)
class Asked:
    """What is searched.

    Attributes:
        limit_bytes: that a device may hold.
        schedules: names to choose from.
        stages: numbers to try; None: all with which the cluster has equal parts.
        microbatches: the only number to try; None: several.
        recomputing: the recomputations, from little time to little memory; called where memory binds.
        hosting: makes of a program one with its optimizer state in the memory of hosts; None where it has none, or it is to stay.
        ends: exceptions after which the search ends with what it has.
        least_gain: of the makespan, with overlap or without, that is worth a search.
    """

    limit_bytes: float
    schedules: Sequence[str] = ("1f1b",)
    stages: Sequence[int] | None = None
    microbatches: int | None = None
    recomputing: Sequence[Recomputing] = ()
    hosting: Recomputing | None = None
    ends: tuple[type[BaseException], ...] = ()
    least_gain: float = 0.01
