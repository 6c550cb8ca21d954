"""The lowered programs of a stage, for compilation without running them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from autoshard.lower import HOST
from autoshard.lower.opaque import ANY_PLATFORM, traced_without_kernels
from autoshard.pipeline.programs import StagePlan, StagePrograms, parted
from autoshard.pipeline.stages import Stage


@dataclass(frozen=True, slots=True, eq=False)
class LoweredProgram:
    """One program of a stage.

    Attributes:
        name: ``F``, ``B`` or ``W``; or ``before`` or ``after`` the loop over microbatches.
        count: how often it runs in a step.
        lowered: as `jax.jit` lowers it.
        held_bytes: what a device has in memory while it runs, beside its arguments and results: other arguments of the stage, other
            totals, and the residuals of other microbatches.
    """

    name: str
    count: int
    lowered: jax.stages.Lowered
    held_bytes: float


def lowered_programs(
    stage: Stage, plan: StagePlan, programs: StagePrograms, n_microbatches: int, in_flight: int, platform: str | None
) -> list[LoweredProgram]:
    """All programs of a stage, in the order in which they first run.

    Args:
        in_flight: how many microbatches wait for their backward task at most.
        platform: JAX's name of the platform that they are lowered for; None: that of the plan's mesh.
    """
    return list(_Lowering(stage, plan, programs, n_microbatches, in_flight, platform).all())


class _Lowering:
    """The types of what a stage's programs hand on, as far as they are known."""

    def __init__(self, stage: Stage, plan: StagePlan, programs: StagePrograms, n: int, in_flight: int, platform: str | None):
        self.stage, self.plan, self.programs, self.n, self.in_flight, self.platform = stage, plan, programs, n, in_flight, platform
        avals = [variable.aval for variable in stage.traced.jaxpr.jaxpr.invars]
        n_args = len(stage.arguments)
        shardings = programs.argument_shardings
        self.arguments = [_type(aval.shape, aval.dtype, where) for aval, where in zip(avals, shardings, strict=False)]
        messages = zip(stage.receives, avals[n_args:], programs.receive_shardings, strict=True)
        self.messages = [_type(m.shape if m.kind == "loop" else aval.shape, aval.dtype, where) for m, aval, where in messages]
        tasks = programs.tasks.values()
        self._direct = {k - n_args for task in tasks for k in task.arguments if k >= n_args}  # messages that tasks read as constants
        self.handed: list[Any] = []
        self.constants: tuple = ()
        self.totals: dict[str, tuple] = {}
        self.residuals: dict[str, tuple] = {}

    def all(self) -> Iterator[LoweredProgram]:
        """The programs; each one's types come of those before."""
        for outer in self.programs.before:
            yield self._outer("before", outer)
        for kind in (kind for kind in "FBW" if kind in self.programs.tasks):
            yield self._task(kind)
        for outer in self.programs.after:
            yield self._outer("after", outer)

    def _outer(self, name: str, outer: Any) -> LoweredProgram:
        read, donated = ([self.arguments[k] for k in positions] for positions in (outer.arguments, outer.donated))
        groups = (
            (*read, *(self.messages[k] for k in outer.receives)),
            tuple(donated),
            tuple(self.handed[k] for k in outer.reads),
            tuple(self.totals[kind] for kind in outer.kinds),
        )
        lowered, (_, handed, *loop) = self._lowered(outer.call, groups, outer.makes)
        self.handed.append(handed)
        beside = self._bytes(self.arguments) - self._bytes([*read, *donated])
        if outer.makes_constants:
            self.constants, *totals = loop
            self.totals = dict(zip("FBW", totals, strict=True))
        else:
            beside += sum(self._bytes(total) for kind, total in self.totals.items() if kind not in outer.kinds)
        return LoweredProgram(name, 1, lowered, beside)

    def _task(self, kind: str) -> LoweredProgram:
        task = self.programs.tasks[kind]
        whole = NamedSharding(self.plan.mesh, PartitionSpec())
        inputs = [*self.arguments, *self.messages]
        read = tuple(inputs[k] for k in task.arguments)
        groups = (
            _type((), np.dtype(np.int32), whole),
            read,
            self.constants,
            self.totals[kind],
            tuple(self.messages[k] for k in task.receives),
            tuple(self.residuals[other] for other in task.reads),
        )
        lowered, (_, _, self.residuals[kind]) = self._lowered(task.call, groups, task.makes)
        tasks = self.programs.tasks.values()
        readers = Counter(k for other in tasks for k in other.receives)
        own = sum(other.residual_bytes for other in tasks) + self._bytes([self.messages[k] for k, n in readers.items() if n > 1])
        kept = [self.messages[k] for k in sorted({k for outer in self.programs.before for k in outer.receives}.union(self._direct))]
        beside = self._bytes([*self.arguments, *kept]) - self._bytes(read) + (self.in_flight - 1) * own
        beside += sum(self._bytes(total) for other, total in self.totals.items() if other != kind)
        return LoweredProgram(kind, self.n, lowered, beside)

    def _lowered(self, call: Callable, groups: tuple, makes: Sequence[int]) -> tuple[jax.stages.Lowered, list[tuple]]:
        given = jax.tree.leaves(groups)
        traced = call.trace(*given)  # pyright: ignore[reportFunctionMemberAccess]
        if self.platform is None:
            lowered = traced.lower()
        elif self.platform == ANY_PLATFORM:
            lowered = traced_without_kernels(traced, given).lower(lowering_platforms=(self.platform,))
        else:
            lowered = traced.lower(lowering_platforms=(self.platform,))
        spec, host = PartitionSpec(tuple(self.plan.mesh.axis_names)), jax.memory.Space.Host
        on_device, on_host = (NamedSharding(self.plan.mesh, spec, memory_kind=kind) for kind in (None, HOST))
        where = [on_host if aval.memory_space == host else on_device for aval in traced.jaxpr.out_avals]
        made = [_type(x.shape, x.dtype, at) if x.shape else x for x, at in zip(traced.out_info, where, strict=True)]  # scalars are results
        return lowered, parted(made, makes)

    def _bytes(self, types: Sequence[Any]) -> float:
        """Bytes on each device."""
        return float(sum(map(_device_bytes, jax.tree.leaves(types))))


def _device_bytes(type_: jax.ShapeDtypeStruct) -> float:
    if jnp.issubdtype(type_.dtype, jax.dtypes.extended) or type_.sharding.memory_kind == HOST:  # pyright: ignore[reportOptionalMemberAccess]
        return 0.0
    shard = type_.sharding.shard_shape(type_.shape)  # pyright: ignore[reportOptionalMemberAccess]
    return float(np.prod(shard, dtype=np.float64) * np.dtype(type_.dtype).itemsize)


def _type(shape: tuple[int, ...], dtype: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
