"""Extents: sizes of a dimension before and after padding.

A dimension that merges others is padded in parts: of 12 heads of 64 elements padded to 16 heads, the last 256 of 1,024 elements are
padding; of 3 x 12 x 64 elements, the last 256 of each third are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from autoshard.ir.rewrites import Extent

Extents = tuple[Extent, ...]
"""An extent for each dimension of an array."""


def extent(parts: Sequence[tuple[int, int]]) -> Extent:
    """The extent of these parts: an unpadded one is merged into the part before it, so that equal paddings are equal extents.

    >>> extent([(12, 16), (64, 64)]), extent([(3, 3), (12, 16), (64, 64)]), extent([(3, 3), (64, 64)])
    (((768, 1024),), ((3, 3), (768, 1024)), ())
    """
    found: list[tuple[int, int]] = []
    for size, padded in parts:
        if found and size == padded:
            found[-1] = found[-1][0] * size, found[-1][1] * size
        elif (size, padded) != (1, 1):
            found.append((size, padded))
    return tuple(found) if any(size != padded for size, padded in found) else ()


def merged(extents: Sequence[Extent], sizes: Sequence[int]) -> Extent:
    """The extent of a dimension that merges others of these extents and sizes."""
    return extent([part for each, size in zip(extents, sizes, strict=True) for part in each or ((size, size),)])


def divided(whole: Extent, sizes: Sequence[int]) -> list[Extent] | None:
    """The extents of the dimensions of these sizes that one is taken apart into; None where its padding is of no whole ones.

    >>> divided(((768, 1024),), (12, 64)), divided(((768, 772),), (12, 64))
    ([((12, 16),), ()], None)
    """
    if not whole:
        return [()] * len(sizes)
    parts, found = list(whole), list[Extent]()
    for wanted in reversed(sizes):
        taken: list[tuple[int, int]] = []
        while wanted > 1:
            if not parts:
                return None
            size, padded = parts.pop()
            if wanted % size == 0:
                taken.insert(0, (size, padded))
                wanted //= size
            elif size % wanted == 0 and padded % wanted == 0:
                taken.insert(0, (wanted, wanted))
                parts.append((size // wanted, padded // wanted))
                wanted = 1
            else:
                return None
        found.insert(0, extent(taken))
    return None if parts else found


def padded_size(size: int, of: Extent) -> int:
    """The size of a dimension with its padding."""
    return math.prod(padded for _, padded in of) if of else size


def padded_shape(shape: Sequence[int], extents: Extents) -> tuple[int, ...]:
    """The shape of an array with its padding."""
    return tuple(map(padded_size, shape, extents))


def is_suffix(of: Extent) -> bool:
    """Whether all padding is at the end, so that every element keeps its position."""
    return len(of) <= 1


def resized(x: Any, have: Extents, want: Extents) -> Any:
    """An array with the padding that is wanted, of zeros where it is new, in place of the one that it has."""
    for dim, (before, after) in enumerate(zip(have, want, strict=True)):
        if before != after:
            x = _padded(_cropped(x, dim, before), dim, after)
    return x


def _cropped(x: Any, dim: int, of: Extent) -> Any:
    """The elements of a dimension without its padding."""
    if is_suffix(of):
        return lax.slice_in_dim(x, 0, of[0][0], axis=dim) if of else x
    x = lax.reshape(x, (*x.shape[:dim], *(padded for _, padded in of), *x.shape[dim + 1 :]))
    for k, (size, _) in enumerate(of):
        x = lax.slice_in_dim(x, 0, size, axis=dim + k)
    return lax.reshape(x, (*x.shape[:dim], math.prod(size for size, _ in of), *x.shape[dim + len(of) :]))


def _padded(x: Any, dim: int, of: Extent) -> Any:
    if not of:
        return x
    x = jnp.asarray(x)
    parts = lax.reshape(x, (*x.shape[:dim], *(size for size, _ in of), *x.shape[dim + 1 :])) if len(of) > 1 else x
    config = [(0, 0, 0)] * parts.ndim
    config[dim : dim + len(of)] = [(0, padded - size, 0) for size, padded in of]
    parts = lax.pad(parts, np.zeros((), x.dtype), config)
    return parts if len(of) == 1 else lax.reshape(parts, (*x.shape[:dim], padded_size(0, of), *x.shape[dim + 1 :]))


def inside(size: int, of: Extent) -> Any:
    """Which positions of a dimension, of this size with its padding, are no padding."""
    positions = lax.iota(np.int32, size)
    found, minor = None, 1
    for part, padded in reversed(of):
        if part != padded:
            digit = positions if is_suffix(of) else positions // np.int32(minor) % np.int32(padded)
            within = lax.lt(digit, np.int32(part))
            found = within if found is None else found & within
        minor *= padded
    return found


def masked(x: Any, dim: int, within: Any, value: Any) -> Any:
    """An array with one value in the padding of a dimension, of which ``within`` says what is none."""
    return lax.select(lax.broadcast_in_dim(within, x.shape, (dim,)), x, lax.full(x.shape, value, x.dtype))
