"""Arrays of stages by tick, of one program that runs them all at once, and which microbatch each stage has in which tick."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from autoshard.ir.rewrites import OneProgram
from autoshard.lower import STAGE_AXIS
from autoshard.microbatch.arrays import put_together
from autoshard.microbatch.status import Status, slice_along

_PLACEHOLDER = AbstractMesh((1,), (STAGE_AXIS,), axis_types=(AxisType.Auto,))


class Order(OneProgram):
    """Which microbatch a stage has in which tick, and in which round."""

    __slots__ = ()

    def task(self, tick: Any) -> Any:
        """Per stage ``(S,)`` the number of its task in a tick; outside of ``range(tasks)`` it has none."""
        return tick - lax.iota(jnp.int32, self.stages)

    def round(self, task: Any) -> Any:
        """The round of a task."""
        return jnp.zeros_like(task) if self.rounds == 1 else task // self.stages % self.rounds

    def microbatch(self, task: Any) -> Any:
        """The microbatch of a task."""
        return task if self.rounds == 1 else task // (self.stages * self.rounds) * self.stages + task % self.stages

    def of_round(self, x: Any, number: int) -> Any:
        """Of an array by tasks ``(v m, ...)`` that of a round by microbatches, ``(m, ...)``."""
        if self.rounds == 1:
            return x
        groups = x.reshape(self.microbatches // self.stages, self.rounds, self.stages, *x.shape[1:])
        return lax.index_in_dim(groups, number, 1, keepdims=False).reshape(self.microbatches, *x.shape[1:])


@dataclass(frozen=True, slots=True, eq=False)
class Ticks:
    """What a stack of layers makes of its examples, layer by layer, as it is made: ``(ticks, K, S, ...)`` of a microbatch each.

    Attributes:
        array: it.
        status: how a layer's examples are split.
        order: what stages have when.
    """

    array: Any
    status: Status
    order: Order

    @property
    def whole(self) -> Any:
        """The same layer by layer, ``(L, ...)`` of the whole batch: for other operations than another stack of as many layers."""
        per_stage = jnp.moveaxis(self.array, 2, 0)  # (S, ticks, K, ...)
        first = jnp.arange(per_stage.shape[0], dtype=jnp.int32)
        own = jax.vmap(lambda x, start: lax.dynamic_slice_in_dim(x, start, self.order.tasks))(per_stage, first)  # (S, v m, K, ...)
        rounds = [self.order.of_round(jnp.moveaxis(own, 0, 1), number) for number in range(self.order.rounds)]
        parts = jnp.concatenate(rounds, 1)  # (m, v S, K, ...)
        parts = parts.reshape(parts.shape[0], parts.shape[1] * parts.shape[2], *parts.shape[3:])
        return put_together(parts, slice_along(self.status.dim + 1, self.status.inner))


def plain(x: Any) -> Any:
    return x.whole if isinstance(x, Ticks) else x


def on_stages(x: Any, dim: int = 0) -> Any:
    """The array with its dimension of stages on their mesh axis, and all others free."""
    spec = PartitionSpec(*(STAGE_AXIS if d == dim else PartitionSpec.UNCONSTRAINED for d in range(x.ndim)))
    return lax.with_sharding_constraint(x, NamedSharding(_PLACEHOLDER, spec))


def staged(x: Any, order: Order) -> list[Any]:
    """Layers ``(L, ...)`` by their place in a stage and by stage, ``(K, S, ...)`` of each round."""
    parts = [x] if order.rounds == 1 else jnp.split(x, order.rounds)
    apart = [part.reshape(order.stages, part.shape[0] // order.stages, *part.shape[1:]) for part in parts]
    return [jnp.swapaxes(on_stages(part), 0, 1) for part in apart]


def layered(parts: Sequence[Any]) -> Any:
    """The inverse of `staged`."""
    apart = [on_stages(jnp.swapaxes(part, 0, 1)) for part in parts]
    layers = [part.reshape(part.shape[0] * part.shape[1], *part.shape[2:]) for part in apart]
    return layers[0] if len(layers) == 1 else lax.concatenate(layers, 0)


def of_own_ticks(x: Any, ticks: Any, dim: int) -> Any:
    """Of an array by ticks what each stage has in its own one ``(S,)``; ``dim``: that of stages, once a tick is taken."""
    own = jax.vmap(lambda part, tick: lax.dynamic_index_in_dim(part, tick, 0, keepdims=False), (dim + 1, 0), dim)
    return on_stages(own(x, ticks), dim)


def of_rounds(parts: Sequence[Any], rounds: Any) -> Any:
    """Of arrays ``(K, S, ...)`` by round what each stage has in its own ``(S,)``."""
    found, *others = parts
    for number, part in enumerate(others, 1):
        found = jnp.where(lax.broadcast_in_dim(rounds == number, part.shape, (1,)), part, found)
    return found
