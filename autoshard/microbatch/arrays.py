"""Arrays in microbatches: every ``n``-th example taken, parts put together again, and totals of parts.

Sums are accumulated in float32 at least, and rounded to their type once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.ir import Graph
from autoshard.microbatch.status import Status

WIDE = jnp.float32  # at least so wide are sums of floating point numbers


def parts_of(x: Any, sliced: Status, n: int) -> Any:
    """All the slices that `taken` takes, ``(n, ...)``; the inverse of `put_together`."""
    dim, inner = sliced.dim, sliced.inner
    apart = x.reshape(*x.shape[:dim], x.shape[dim] // (n * inner), n, inner, *x.shape[dim + 1 :])
    return jnp.moveaxis(apart, dim + 1, 0).reshape(n, *x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])


def taken(x: Any, sliced: Status, index: Any, n: int) -> Any:
    """The ``index``-th slice of an array: along a dimension every ``n``-th example."""
    dim, inner = sliced.dim, sliced.inner
    apart = x.reshape(*x.shape[:dim], x.shape[dim] // (n * inner), n, inner, *x.shape[dim + 1 :])
    part = lax.dynamic_index_in_dim(apart, index, dim + 1, keepdims=False)
    return part.reshape(*x.shape[:dim], x.shape[dim] // n, *x.shape[dim + 1 :])


def put_together(parts: Any, sliced: Status) -> Any:
    """The array of which `taken` takes ``parts[index]``."""
    n, shape, dim, inner = parts.shape[0], parts.shape[1:], sliced.dim, sliced.inner
    apart = parts.reshape(n, *shape[:dim], shape[dim] // inner, inner, *shape[dim + 1 :])
    return jnp.moveaxis(apart, 0, dim + 1).reshape(*shape[:dim], shape[dim] * n, *shape[dim + 1 :])


COMBINED: Mapping[str, Callable[[Any, Any], Any]] = {
    "sum": jnp.add,
    "prod": jnp.multiply,
    "max": jnp.maximum,
    "min": jnp.minimum,
    "and": jnp.bitwise_and,
    "or": jnp.bitwise_or,
    "xor": jnp.bitwise_xor,
}


def neutral(graph: Graph, value: int, operator: str) -> Any:
    """The total before the first microbatch."""
    found = graph.values[value]
    dtype = jnp.dtype(found.dtype)
    if operator in ("sum", "prod"):
        is_narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < jnp.dtype(WIDE).itemsize
        return jnp.full(found.shape, operator == "prod", WIDE if is_narrow else dtype)
    if operator in ("max", "min"):
        info = None if dtype == jnp.bool_ or jnp.issubdtype(dtype, jnp.inexact) else jnp.iinfo(dtype)
        least, most = (False, True) if dtype == jnp.bool_ else (-np.inf, np.inf) if info is None else (info.min, info.max)
        return jnp.full(found.shape, least if operator == "max" else most, dtype)
    ones = True if dtype == jnp.bool_ else jnp.iinfo(dtype).max if jnp.issubdtype(dtype, jnp.unsignedinteger) else -1
    return jnp.full(found.shape, ones if operator == "and" else 0, dtype)
