"""Operands that keep XLA from mistakes in sharded programs, seen in jaxlib 0.10.2.

The partitioner does not clamp where an update is written, and the simplifier after it merges an operation with the reshard before it
without a care for what both mean. An `optimization_barrier` stands between the two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax import lax

from autoshard.ir import Choice, Rule, operand_layout
from autoshard.primitives import of_kind


def guarded(primitive: str, rule: Rule, choice: Choice, operands: list[Any]) -> list[Any]:
    """The operands of an op from which XLA computes what the op means; as they are where its choice splits nothing."""
    guard = GUARDS.get(primitive)
    if guard is None or all(factor < 0 for factor, _ in choice):
        return operands
    return guard(rule, choice, *operands)


def _start_clamped(rule: Rule, choice: Choice, x: Any, update: Any, *start: Any) -> list[Any]:
    """An update that starts too far out is moved inside by XLA, but by none of the shards: a sharded dimension's start is clamped."""
    split = set(operand_layout(rule, choice, 0))
    return [x, update, *(_clamp(i, x.shape[d] - update.shape[d]) if d in split else i for d, i in enumerate(start))]


def _clamp(index: Any, last: int) -> Any:
    dtype = np.result_type(index)
    return lax.clamp(np.array(0, dtype), index, np.array(min(last, np.iinfo(dtype).max), dtype))


def _single_update_apart(rule: Rule, choice: Choice, x: Any, indices: Any, updates: Any) -> list[Any]:
    """A single update becomes a slice that is written back. Of a slice of a slice, as the one that cuts out the shard, XLA makes one.

    It forgets that the inner position is clamped to the shard, and every other shard copies an element of its neighbour.
    """
    single = math.prod(indices.shape[:-1]) == 1
    return [lax.optimization_barrier(x) if single else x, indices, updates]


def _apart(rule: Rule, choice: Choice, *operands: Any) -> list[Any]:
    """A reduction of what was put together of pieces, as an all_to_all does, becomes one of each piece: the initial value counts twice."""
    return [lax.optimization_barrier(x) if np.ndim(x) else x for x in operands]


Guard = Callable[..., list[Any]]

GUARDS: Mapping[str, Guard] = {
    "dynamic_update_slice": _start_clamped,
    "reduce": _apart,
    **dict.fromkeys(of_kind("scatter"), _single_update_apart),
}
