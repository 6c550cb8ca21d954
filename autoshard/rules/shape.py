"""Rules of primitives that rearrange elements without arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autoshard.ir import Factor, Rule, Send, Value
from autoshard.rules.registry import Dim, assemble, free, free_but, resized, rule, whole


@rule("broadcast_in_dim")
def broadcast_in_dim(x: Value, /, *_sizes: Value, results: tuple[Value, ...], broadcast_dimensions: tuple[int, ...], **_) -> Rule:
    """Kept dimensions are shared, new and broadcast ones are factors of the result alone: ``([j])->([i, j])``."""
    dims = free(results[0].shape)
    operand = [dims[d] if dims[d].size == n else () for d, n in zip(broadcast_dimensions, x.shape, strict=True)]
    return assemble([operand, *([] for _ in _sizes)], [dims])


@rule("reshape")
def reshape(x: Value, /, *_sizes: Value, results: tuple[Value, ...], dimensions: tuple[int, ...] | None = None, **_) -> Rule:
    """The common refinement of both shapes: ``([i, j])->([ij])`` merges, ``([ij])->([i, j])`` splits, major factors first.

    ``dimensions`` is the order in which the operand's dimensions are read, None for their own.
    """
    order = list(range(x.rank) if dimensions is None else dimensions)
    read, result = _refine([x.shape[d] for d in order], results[0].shape)
    return assemble([[read[order.index(d)] for d in range(x.rank)], *([] for _ in _sizes)], [result])


def _refine(left: Sequence[int], right: Sequence[int]) -> tuple[Sequence[Dim], Sequence[Dim]]:
    """The factors of two shapes of equal size in row-major order.

    Both are consumed from the major end, at equal products. A common divisor of the remainders of the current dimensions is
    then a digit of the element's position in both shapes, a shared factor. Without one the dimensions interleave, and need
    replication up to where the products are equal again.
    """
    if 0 in left:
        return whole(left), whole(right)
    shapes, factors = (left, right), tuple([[] for _ in shape] for shape in (left, right))
    position, rest = [-1, -1], [1, 1]

    def advance(side: int) -> None:
        while rest[side] == 1 and position[side] + 1 < len(shapes[side]):
            position[side] += 1
            rest[side] = shapes[side][position[side]]

    def keep_whole(side: int) -> int:
        size = rest[side]
        factors[side][position[side]].append(Factor(size, "need_replication"))
        rest[side] = 1
        advance(side)
        return size

    advance(0)
    advance(1)
    while rest[0] > 1:
        common = math.gcd(*rest)
        if common > 1:
            shared = Factor(common)
            for side in (0, 1):
                factors[side][position[side]].append(shared)
                rest[side] //= common
                advance(side)
            continue
        product = [keep_whole(0), keep_whole(1)]
        while product[0] != product[1]:
            behind = int(product[1] < product[0])
            product[behind] *= keep_whole(behind)
    return [tuple(dim) for dim in factors[0]], [tuple(dim) for dim in factors[1]]


@rule("transpose")
def transpose(x: Value, /, *, results: tuple[Value, ...], permutation: tuple[int, ...], **_) -> Rule:
    """Dimensions are permuted with their factors: ``([j, i])->([i, j])``."""
    dims = free(x.shape)
    return assemble([dims], [[dims[d] for d in permutation]])


@rule("squeeze")
def squeeze(x: Value, /, *, results: tuple[Value, ...], dimensions: tuple[int, ...], **_) -> Rule:
    """Dimensions of size one are removed, the others keep their factors."""
    dims = free(x.shape)
    return assemble([dims], [[dim for d, dim in enumerate(dims) if d not in dimensions]])


@rule("rev")
def rev(x: Value, /, *, results: tuple[Value, ...], dimensions: tuple[int, ...], **_) -> Rule:
    """Shards of a reversed dimension swap places, each reversed in itself."""
    swap = (Send("collective_permute", 0, 0),)
    dims = [Factor(n, "permutation", sends=swap) if d in dimensions else Factor(n) for d, n in enumerate(x.shape)]
    return assemble([dims], [dims])


@rule("concatenate")
def concatenate(*operands: Value, results: tuple[Value, ...], dimension: int, **_) -> Rule:
    """The concatenated dimension stays whole in every operand and the result: ``([i, j], [i, k])->([i, l])``."""
    dims = free_but(results[0].shape, (dimension,))
    return assemble([resized(dims, operand.shape) for operand in operands], [dims])


@rule("split")
def split(x: Value, /, *, results: tuple[Value, ...], axis: int, **_) -> Rule:
    """The divided dimension stays whole in the operand and every result, unless there is only one result."""
    dims = free_but(x.shape, (axis,) if len(results) > 1 else ())
    return assemble([dims], [resized(dims, result.shape) for result in results])


@rule("stack")
def stack(*operands: Value, results: tuple[Value, ...], axis: int, **_) -> Rule:
    """The new dimension stays whole, the others pass through."""
    dims = free_but(results[0].shape, (axis,))
    return assemble([[dim for d, dim in enumerate(dims) if d != axis]] * len(operands), [dims])


@rule("unstack")
def unstack(x: Value, /, *, results: tuple[Value, ...], axis: int, **_) -> Rule:
    """The removed dimension stays whole, the others pass through."""
    dims = free_but(x.shape, (axis,))
    return assemble([dims], [[dim for d, dim in enumerate(dims) if d != axis]] * len(results))


@rule("tile")
def tile(x: Value, /, *, results: tuple[Value, ...], reps: tuple[int, ...], **_) -> Rule:
    """A repeated dimension is the product of its repetitions, a factor of the result alone, and itself: ``([j])->([ij])``."""
    dims = free(x.shape)
    padded = [()] * (len(reps) - x.rank) + [(dim,) for dim in dims]
    return assemble([dims], [[(Factor(n), *dim) for n, dim in zip(reps, padded, strict=True)]])


@rule("pad")
def pad(x: Value, value: Value, /, *, results: tuple[Value, ...], padding_config: tuple[tuple[int, int, int], ...], **_) -> Rule:
    """Padded dimensions stay whole, the others pass through; shards of one that is shifted, cropped behind as it is padded before or the
    other way round, receive what enters them from their neighbours."""
    factors = free_but(x.shape, [d for d, config in enumerate(padding_config) if any(config)])
    dims: list[Dim] = [*factors]
    made: list[Dim] = [*resized(factors, results[0].shape)]
    for d, config in enumerate(padding_config):
        if (moved := shift(config)) and abs(moved) <= x.shape[d]:
            dims[d] = made[d] = Factor(x.shape[d], "permutation", sends=(Send("collective_permute", 0, abs(moved)),))
    return assemble([dims, []], [made])


def shift(padding: tuple[int, int, int]) -> int:
    """By how many positions a dimension is shifted that is padded and cropped so; 0 where it is not.

    >>> shift((1, -1, 0)), shift((-2, 2, 0)), shift((1, 0, 0))
    (1, -2, 0)
    """
    low, high, interior = padding
    return low if low + high == 0 and not interior else 0


@rule("slice")
def slice_(x: Value, /, *, results: tuple[Value, ...], **_) -> Rule:
    """Dimensions taken whole pass through, the others stay whole; a stride or an offset always changes the size."""
    dims = free_but(x.shape, [d for d, (n, m) in enumerate(zip(x.shape, results[0].shape, strict=True)) if n != m])
    return assemble([dims], [resized(dims, results[0].shape)])
