"""Workarounds for XLA's miscompilations of sharded programs (jaxlib 0.10.2).

XLA's simplifier merges a slice of a slice, and an update of an updated slice, into one with the sum of both starts, which is then clamped
once (openxla/xla#49121); and its partitioner does not clamp the start of an update. A shard is such a slice, so starts are clamped by hand.
Other operations are merged with the reshard before them although this changes the result; an `optimization_barrier` prevents that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn

from autoshard.ir import Choice, Rule
from autoshard.lower.interpret import bind_unplaced
from autoshard.primitives import of_kind


def in_range(primitive: str, params: Mapping[str, Any], operands: Sequence[Any], devices: int = 1) -> Sequence[Any]:
    """The operands of an op with the starts of slices and updates clamped to where these are inside the array, as the op clamps them.

    A gather of a single window is such a slice. Where XLA has yet to divide it among ``devices``, one of as many windows is, too.
    """
    if primitive == "dynamic_slice":
        x, *starts = operands
        return [x, *_clamped(x.shape, params["slice_sizes"], starts)]
    if primitive == "dynamic_update_slice":
        x, update, *starts = operands
        return [x, update, *_clamped(x.shape, update.shape, starts)]
    if primitive == "gather" and lax.GatherScatterMode.from_any(params["mode"]) != lax.GatherScatterMode.FILL_OR_DROP:
        x, indices = operands
        if math.prod(indices.shape[:-1]) <= devices:
            whole, window = ([n[d] for d in params["dimension_numbers"].start_index_map] for n in (x.shape, params["slice_sizes"]))
            columns = [lax.index_in_dim(indices, k, axis=-1) for k in range(indices.shape[-1])]
            return [x, lax.concatenate(_clamped(whole, window, columns), indices.ndim - 1)] if columns else operands
    return operands


def _clamped(shape: Sequence[int], sizes: Sequence[int], starts: Sequence[Any]) -> list[Any]:
    """The starts of windows, each clamped in its own type, in one in which XLA can add others to them; what is constant stays so."""
    wide = np.int32 if max(shape, default=0) <= np.iinfo(np.int32).max else np.int64
    return [_between(start, n - size).astype(wide) for start, n, size in zip(starts, shape, sizes, strict=True)]


def _between(index: Any, last: int) -> Any:
    """An index clamped to 0 ... ``last``."""
    dtype, shape = jax.typeof(index).dtype, np.shape(index)
    if not last:
        return np.zeros(shape, dtype)
    if not (shape or isinstance(index, jax.Array)):
        return np.array(min(max(int(index), 0), last))
    return lax.clamp(np.zeros((), dtype), index, np.array(min(last, jnp.iinfo(dtype).max), dtype))  # the type may end before the array


def bind_in_range(eqn: JaxprEqn, operands: Sequence[Any], **replaced: Any) -> list[Any]:
    """The equation's results on one device, computed by operands `in_range`."""
    params = {**eqn.params, **replaced}
    return bind_unplaced(eqn, in_range(eqn.primitive.name, params, operands), **replaced)


def with_workarounds(primitive: str, rule: Rule, choice: Choice, operands: Sequence[Any]) -> Sequence[Any]:
    """The operands of an op for which XLA computes the right result; unchanged where the choice splits nothing."""
    workaround = WORKAROUNDS.get(primitive)
    if workaround is None or all(factor < 0 for factor, _ in choice):
        return operands
    return workaround(rule, choice, *operands)


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
    "reduce": _apart,
    **dict.fromkeys(of_kind("scatter"), _single_update_apart),
}
