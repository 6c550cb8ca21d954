"""The request of a search: what a user asks for, checked once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax

from autoshard.cluster import Cluster
from autoshard.errors import ShardingError
from autoshard.ir import Mesh
from autoshard.mesh_search.anytime import checked_seconds, endings
from autoshard.options import OPTIONS, checked
from autoshard.pipeline.cuts import Cuts
from autoshard.pipeline.schedule import ONE_PROGRAM
from autoshard.plan.confirm import Confirm, confirm_of
from autoshard.plan.meshes import given_mesh
from autoshard.plan.microbatching import Microbatches
from autoshard.plan.plan import Plan
from autoshard.plan.start import checked as checked_start
from autoshard.plan.user_pins import Asked, Pins
from autoshard.problem import Hints
from autoshard.rewrite import Padding, Rewriting
from autoshard.search import Auto, Searcher, searcher_of
from autoshard.trace import Batch, Traced

LEAST_SECONDS = 1e-3  # of a search that comes when the time is over: it has its first answer
SEARCHING = 0.5  # of a search that is confirmed: its share of the progress, and of a time limit
CHECKED = ("microbatches", "remat", "offload", "stages", "schedule")  # words and numbers


def given(values: Mapping[str, Any]) -> dict[str, Any]:
    """The options among a function's arguments by name, such as ``locals()`` where it begins."""
    return {name: values[name] for name in OPTIONS if name in values}


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The options of a search, as `autoshard.search` has them.

    Attributes:
        asked: pins, batch axes and batch.
        seconds: the time limit; None: there is none.
        rewriting: kernels, balance and padding.
        chunks: stages on each part of the devices; None: as many as is fastest.
        earlier: a plan of the same function, whose pins of arguments, facts, tables and messages serve; None: none is known.
        asks: whether a compiler is asked of a plan near the memory limit that nobody confirms.
        is_thorough: whether the step without stages is no slower than with each number of microbatches and recomputation alone.
    """

    cluster: Cluster | str | Path | None = None
    searcher: Searcher = field(default_factory=Auto)
    mesh: Mapping[str, int] | jax.sharding.Mesh | Mesh | int | None = None
    asked: Asked = field(default_factory=Asked)
    memory_limit_bytes: float | None = None
    donate_argnums: int | Sequence[int] = ()
    seconds: float | None = None
    interruptible: bool = False
    confirm: Confirm | None = None
    microbatches: Microbatches = "fit"
    remat: str | None = "fit"
    offload: str | None = None
    stages: int | None = None
    schedule: str | None = None
    chunks: int | None = None
    plan: str = "sharding"
    start: Plan | None = None
    earlier: Plan | None = None
    rewriting: Rewriting = field(default_factory=Rewriting)
    asks: bool = False
    is_thorough: bool = False

    @classmethod
    def of(
        cls,
        *,
        searcher: str | Searcher = "auto",
        pins: Pins | None = None,
        batch_axes: str | Sequence[str] | None = None,
        batch: Batch = None,
        time_limit_seconds: float | None = None,
        confirm: str | Confirm | bool | None = None,
        plan: str = "sharding",
        start: Plan | None = None,
        kernels: str | None = None,
        slow_reduction: str | None = None,
        balance: float | None = 1.0,
        padding: bool | Padding = True,
        **others: Any,
    ) -> Request:
        """The request of a call's options, by their names in `autoshard.options.OPTIONS`; those left out have their defaults.

        Raises:
            AutoshardError: an option is none of its values, or does not go with another.
        """
        chosen, mesh = searcher_of(searcher), others.get("mesh")
        if checked("slow_reduction", slow_reduction) is not None:
            described = others.get("cluster")
            others["cluster"] = (Cluster.local() if described is None else Cluster.of(described)).with_sums(str(slow_reduction))
        axes = () if mesh is None or isinstance(mesh, int) else given_mesh(mesh).sizes
        request = cls(
            searcher=chosen,
            asked=replace(Asked.of(pins, batch_axes, batch), padding=padding if isinstance(padding, Padding) else Padding()),
            seconds=checked_seconds(time_limit_seconds),
            confirm=confirm_of(confirm),
            plan=checked("plan", plan) or "sharding",
            start=checked_start(start, chosen),
            rewriting=Rewriting.of(kernels, balance, padding, axes),
            **{name: checked(name, value) if name in CHECKED else value for name, value in others.items()},
        )
        if (parts := request._parts) and request.stages is None and not request.is_full:
            request = replace(request, stages=len(parts))
        request._check_together()
        return request

    def _check_together(self) -> None:
        """Raises `ShardingError` for options that contradict each other."""
        if self.offload == "activations" and self.remat is None:
            raise ShardingError(
                "offload='activations' is a third choice for what remat keeps or computes again, and with remat=None nothing is chosen. "
                "Use remat='fit', 'auto' or 'full' with it."
            )
        if self._parts and (self.is_full or self.mesh is not None or self.schedule in ONE_PROGRAM):
            asked = "plan='full'" if self.is_full else "mesh=" if self.mesh is not None else f"schedule='{self.schedule}'"
            raise ShardingError(
                f"stages of a mixed cluster are on unequal devices, each on its own mesh, and {asked} is for equal ones. Leave it out; "
                f"stages={len(self._parts)} or a multiple says how many."
            )
        if self.is_full and self.stages is not None:
            raise ShardingError(f"plan='full' searches numbers of stages, got stages={self.stages!r}. Leave out stages, or plan.")
        if self.is_pipeline and isinstance(self.cluster, Cluster) and any(level.sums for level in self.cluster.levels):
            raise ShardingError(
                "stages that are programs of their own send activations between slices and add up gradients within them: slow_reduction "
                "has nothing to do. Leave it out, or stages."
            )
        if self.schedule is not None and not self.is_full and self.stages is None:
            raise ShardingError(
                f"a schedule is the order of a pipeline's tasks, got schedule={self.schedule!r} without one. Add stages=, or plan='full'."
            )

    @property
    def _parts(self) -> Sequence[Cluster]:
        """The parts of a mixed cluster; none of another one."""
        given = self.cluster
        is_mixed = isinstance(given, Cluster) or (isinstance(given, str) and "+" in given)
        return Cluster.of(given).parts if given is not None and is_mixed else ()

    @property
    def is_full(self) -> bool:
        """Whether pipelines are searched too."""
        return self.plan == "full"

    @property
    def stages_of_one_program(self) -> int:
        """The number of stages that are one program; 1: there are none."""
        return self.stages or 1 if self.schedule in ONE_PROGRAM else 1

    @property
    def is_pipeline(self) -> bool:
        """Whether stages may be programs of their own."""
        return self.schedule not in ONE_PROGRAM and (self.is_full or self.stages is not None)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that are named, which constraints inside the function may name too."""
        return *self.asked.axes, *(self.given_mesh.all_names if self.given_mesh is not None else ())

    @property
    def given_mesh(self) -> Mesh | None:
        """The mesh that is given, of all devices or of each stage; None: it is searched."""
        return None if self.mesh is None or isinstance(self.mesh, int) else given_mesh(self.mesh)

    @property
    def searching_seconds(self) -> float | None:
        """The part of the time limit that is for searching."""
        return self.seconds if self.confirm is None or self.seconds is None else self.seconds * SEARCHING

    @property
    def warm(self) -> Hints | None:
        """What the search of an earlier plan of the function found; None: there is none."""
        return None if self.earlier is None else replace(self.earlier._searched.hints, least=math.inf, start=None)

    @property
    def cuts(self) -> dict[tuple[Traced, int], Cuts]:
        """The cuts of an earlier plan's program into stages, as `autoshard.plan.stage_planner.Pipeline` takes them."""
        known = None if self.earlier is None else self.earlier._searched.cuts
        return {} if known is None else {(known.traced, known.n): known}

    @property
    def limited(self) -> Searcher:
        """The searcher, within the time limit."""
        return self.searcher if self.searching_seconds is None else self.searcher.limited(self.searching_seconds)

    @property
    def ends(self) -> tuple[type[BaseException], ...]:
        """The exceptions that end a search early."""
        return endings(self.searching_seconds, self.interruptible)

    def within(self, seconds: float | None, confirm: Confirm | None) -> Request:
        """The request with another time limit and confirmation."""
        return replace(self, seconds=seconds, confirm=confirm)

    @property
    def every_form(self) -> Request:
        """The request of a full plan without stages, in any form that options leave open."""
        number, again = ("auto" if each == "fit" else each for each in (self.microbatches, self.remat))
        return replace(self, plan="sharding", stages=None, schedule=None, microbatches=number, remat=again, is_thorough=True)
