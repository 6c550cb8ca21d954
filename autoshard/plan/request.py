"""The request of a search: what a user asks for, checked once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax

from autoshard.cluster import Cluster
from autoshard.mesh_search.anytime import checked_seconds, endings
from autoshard.plan.confirm import Confirm, confirm_of
from autoshard.plan.full_plan import checked_plan, checked_schedule
from autoshard.plan.meshes import given_mesh
from autoshard.plan.microbatching import Microbatches, checked_number
from autoshard.plan.offloading import checked_offload
from autoshard.plan.pipelining import check_pipeline
from autoshard.plan.plan import Plan
from autoshard.plan.recomputing import checked_remat
from autoshard.plan.start import checked
from autoshard.plan.ticking import is_one_program
from autoshard.plan.user_pins import Asked, Pins
from autoshard.rewrite import Padding, Rewriting
from autoshard.search import Searcher, searcher_of
from autoshard.trace import Batch

SEARCHING = 0.5  # of a search that is confirmed: its share of the progress, and of a time limit


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """The options of a search, as `autoshard.search` has them.

    Attributes:
        asked: pins, batch axes and batch.
        seconds: the time limit; None: there is none.
        rewriting: kernels, balance and padding.
        asks: whether a compiler is asked once of a plan near the memory limit that nobody confirms.
    """

    cluster: Cluster | str | Path | None
    searcher: Searcher
    mesh: Mapping[str, int] | jax.sharding.Mesh | int | None
    asked: Asked
    memory_limit_bytes: float | None
    donate_argnums: int | Sequence[int]
    seconds: float | None
    interruptible: bool
    confirm: Confirm | None
    microbatches: Microbatches
    remat: str | None
    offload: str | None
    stages: int | None
    schedule: str | None
    plan: str
    start: Plan | None
    rewriting: Rewriting
    asks: bool = False

    @classmethod
    def of(
        cls,
        *,
        searcher: str | Searcher,
        pins: Pins | None,
        batch_axes: str | Sequence[str] | None,
        batch: Batch,
        time_limit_seconds: float | None,
        confirm: str | Confirm | bool | None,
        kernels: str | None,
        balance: float | None,
        padding: bool | Padding,
        microbatches: Microbatches,
        remat: str | None,
        offload: str | None,
        start: Plan | None,
        **others: Any,
    ) -> Request:
        """The request of a call's options.

        Raises:
            AutoshardError: an option is none of its values, or does not go with another.
        """
        chosen, mesh = searcher_of(searcher), others["mesh"]
        axes = () if mesh is None or isinstance(mesh, int) else given_mesh(mesh).sizes
        request = cls(
            searcher=chosen,
            asked=replace(Asked.of(pins, batch_axes, batch), padding=padding if isinstance(padding, Padding) else Padding()),
            seconds=checked_seconds(time_limit_seconds),
            confirm=confirm_of(confirm),
            microbatches=checked_number(microbatches),
            remat=checked_remat(remat),
            offload=checked_offload(offload, remat),
            start=checked(start, chosen),
            rewriting=Rewriting.of(kernels, balance, padding, axes),
            **others,
        )
        is_pipeline = request.is_pipeline
        checked_schedule(request.schedule, request.is_full or request.stages is not None)
        if is_pipeline:
            stages, option = (2, "plan") if request.is_full else (request.stages, "stages")
            check_pipeline(stages, request.schedule, request.confirm, request.start, request.asked, option, request.offload)
        return request

    @property
    def is_full(self) -> bool:
        """Whether pipelines are searched too."""
        return checked_plan(self.plan, self.stages, self.mesh)

    @property
    def stages_of_one_program(self) -> int:
        """The number of stages that are one program; 1: there are none."""
        return self.stages or 1 if is_one_program(self.schedule, self.stages, self.plan) else 1

    @property
    def is_pipeline(self) -> bool:
        """Whether stages may be programs of their own."""
        return self.stages_of_one_program == 1 and (self.is_full or self.stages is not None)

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that are named, which constraints inside the function may name too."""
        given = () if self.mesh is None or isinstance(self.mesh, int) else given_mesh(self.mesh).all_names
        return *self.asked.axes, *given

    @property
    def searching_seconds(self) -> float | None:
        """The part of the time limit that is for searching."""
        return self.seconds if self.confirm is None or self.seconds is None else self.seconds * SEARCHING

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

    def without_stages(self) -> Request:
        """The request of the step as one program on all devices."""
        return replace(self, plan="sharding", stages=None, schedule=None)
