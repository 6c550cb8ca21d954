"""Workarounds for XLA's miscompilations of sharded programs (jaxlib 0.10.2).

XLA's partitioner does not clamp the start of an update, and its simplifier merges an operation with the reshard before it although
this changes the result. The first is clamped by hand, an `optimization_barrier` prevents the second.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax import lax

from autoshard.ir import Choice, Rule, operand_layout
from autoshard.primitives import of_kind


def with_workarounds(primitive: str, rule: Rule, choice: Choice, operands: list[Any]) -> list[Any]:
    """The operands of an op for which XLA computes the right result; unchanged where the choice splits nothing."""
    workaround = WORKAROUNDS.get(primitive)
    if workaround is None or all(factor < 0 for factor, _ in choice):
        return operands
    return workaround(rule, choice, *operands)


def _start_clamped(rule: Rule, choice: Choice, x: Any, update: Any, *start: Any) -> list[Any]:
    """An update whose start is clamped in sharded dimensions: XLA clamps it in the whole array, but not in shards."""
    split = set(operand_layout(rule, choice, 0))
    return [x, update, *(_clamp(i, x.shape[d] - update.shape[d]) if d in split else i for d, i in enumerate(start))]


def _clamp(index: Any, last: int) -> Any:
    dtype = np.result_type(index)
    return lax.clamp(np.array(0, dtype), index, np.array(min(last, np.iinfo(dtype).max), dtype))


def _single_update_apart(rule: Rule, choice: Choice, x: Any, indices: Any, updates: Any) -> list[Any]:
    """A scatter of one update, separated from the slice that cuts out the shard.

    XLA turns the scatter into a dynamic slice that is written back, and merges this slice with the shard's. It loses the clamping of
    the position to the shard, and every other shard copies an element of its neighbour.
    """
    single = math.prod(indices.shape[:-1]) == 1
    return [lax.optimization_barrier(x) if single else x, indices, updates]


def _apart(rule: Rule, choice: Choice, *operands: Any) -> list[Any]:
    """A reduction, separated from the concatenation before it, as in an all_to_all.

    XLA would reduce each concatenated piece by itself, and so count the initial value more than once.
    """
    return [lax.optimization_barrier(x) if np.ndim(x) else x for x in operands]


Workaround = Callable[..., list[Any]]

WORKAROUNDS: Mapping[str, Workaround] = {
    "dynamic_update_slice": _start_clamped,
    "reduce": _apart,
    **dict.fromkeys(of_kind("scatter"), _single_update_apart),
}
