"""Dimensions of arrays, followed through a program's operations.

A dimension of an array is a sequence of elementary ones, major first: one that a reshape makes of two has both. Elementary dimensions are
split where a reshape splits them, and a new one, as of a broadcast, becomes the one that it is combined with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from jax.extend.core import JaxprEqn, Var

from autoshard.rewrite.scopes import shape_of
from autoshard.rewrite.values import ELEMENTWISE, IDENTITIES, REDUCTIONS


@dataclass(eq=False)
class Dimension:
    """An elementary dimension.

    Attributes:
        size: number of elements.
        is_free: whether it may be the same as any other one.
        same: the dimensions that it is, once it was split or found to be another one.
    """

    size: int
    is_free: bool = False
    same: tuple[Dimension, ...] | None = None


Label = tuple[Dimension, ...]
Labels = tuple[Label, ...]
"""Per dimension of an array the elementary ones; none of a dimension of size one."""


class Mismatch(Exception):
    """Dimensions that are not the same."""


def fresh(size: int, is_free: bool = True) -> Label:
    return () if size == 1 else (Dimension(size, is_free),)


def resolved(label: Label) -> Label:
    """The label in dimensions as they are now."""
    return tuple(part for each in label for part in ((each,) if each.same is None else resolved(each.same)))


def all_resolved(labels: Labels) -> Labels:
    return tuple(map(resolved, labels))


def flattened(labels: Labels) -> Label:
    return tuple(each for label in labels for each in resolved(label))


def _split(each: Dimension, major: int) -> None:
    each.same = (Dimension(major, each.is_free), Dimension(each.size // major, each.is_free))


def split_dimension(each: Dimension, major: int) -> Label:
    """A dimension as two, of which the first has this size."""
    _split(each, major)
    return resolved((each,))


def unify(one: Labels, other: Labels) -> None:
    """Makes two arrays' dimensions the same.

    Raises:
        Mismatch: they are not.
    """
    if len(one) != len(other):
        raise Mismatch
    for a, b in zip(one, other, strict=True):
        _unify(a, b)


def _unify(one: Label, other: Label) -> None:
    while True:
        a, b = resolved(one), resolved(other)
        differing = next(((x, y) for x, y in zip(a, b, strict=False) if x is not y), None)
        if differing is None:
            if len(a) != len(b):
                raise Mismatch
            return
        x, y = differing
        if x.size == y.size:
            if x.is_free:
                x.same = (y,)
            elif y.is_free:
                y.same = (x,)
            else:
                raise Mismatch
        elif x.size % y.size == 0:
            _split(x, y.size)
        elif y.size % x.size == 0:
            _split(y, x.size)
        else:
            raise Mismatch


def reshaped(labels: Labels, shape: Sequence[int]) -> Labels:
    """The labels of an array of the same elements in another shape.

    Raises:
        Mismatch: a dimension is neither split nor merged.
    """
    waiting, found = list(flattened(labels)), list[Label]()
    for size in shape:
        parts = list[Dimension]()
        while (left := size // math.prod(part.size for part in parts)) > 1:
            if not waiting:
                raise Mismatch
            first = waiting.pop(0)
            if first.size > left and first.size % left == 0:
                _split(first, left)
                assert first.same is not None
                waiting[:0] = first.same[1:]
                first = first.same[0]
            if left % first.size:
                raise Mismatch
            parts.append(first)
        found.append(tuple(parts))
    return tuple(found)


def forward(eqn: JaxprEqn, operands: Sequence[Labels | None]) -> Labels | None:
    """The labels of an equation's result, from those of operands that are known; None where the operation is not followed.

    Raises:
        Mismatch: operands that are combined have different dimensions.
    """
    name, params, made = eqn.primitive.name, eqn.params, shape_of(eqn.outvars[0])
    known = next((labels for labels in operands if labels is not None), None)
    if known is None:
        return None
    if name in ELEMENTWISE or name in IDENTITIES:
        return _combined([labels for labels in operands if labels is not None and len(labels) == len(made)], made)
    operand = shape_of(eqn.invars[0])
    match name:
        case "broadcast_in_dim":
            found = [fresh(size) for size in made]
            for dim, to in enumerate(params["broadcast_dimensions"]):
                if operand[dim] == made[to]:
                    found[to] = known[dim]
            return tuple(found)
        case "reshape" | "squeeze" | "expand_dims":
            return reshaped(known, made)
        case "transpose":
            return tuple(known[dim] for dim in params["permutation"])
        case _ if name in REDUCTIONS:
            return tuple(label for dim, label in enumerate(known) if dim not in params["axes"])
    return None


def _combined(operands: Sequence[Labels], shape: Sequence[int]) -> Labels:
    """The labels of operands that are combined element by element; dimensions of size one are broadcast."""
    found: list[Label] = [()] * len(shape)
    for labels in operands:
        for dim, label in enumerate(labels):
            if label and found[dim]:
                _unify(found[dim], label)
            found[dim] = found[dim] or label
    return tuple(label or fresh(size) for label, size in zip(found, shape, strict=True))


def backward(eqn: JaxprEqn, made: Labels) -> Iterator[tuple[Var, Labels]]:
    """The operands that have the dimensions of an equation's result, with their labels."""
    name, params = eqn.primitive.name, eqn.params
    if name in ELEMENTWISE or name in IDENTITIES:
        for x in eqn.invars:
            if isinstance(x, Var) and shape_of(x) == shape_of(eqn.outvars[0]):
                yield x, made
        return
    if not eqn.invars or not isinstance(x := eqn.invars[0], Var):
        return
    if name == "transpose":
        places = dict(zip(params["permutation"], made, strict=True))
        yield x, tuple(places[dim] for dim in range(len(made)))
    elif name in ("reshape", "squeeze", "expand_dims"):
        yield x, reshaped(made, shape_of(x))


def product(eqn: JaxprEqn, made: Labels) -> tuple[Labels, Labels]:
    """The labels of a product's operands, from those of its result; contracted dimensions are new."""
    ((left, right), (left_batch, right_batch)), (a, b) = eqn.params["dimension_numbers"], eqn.invars
    one: dict[int, Label] = dict(zip(left_batch, made, strict=False))
    other: dict[int, Label] = dict(zip(right_batch, made, strict=False))
    for i, j in zip(left, right, strict=True):
        one[i] = other[j] = fresh(shape_of(a)[i])
    rest = iter(made[len(left_batch) :])
    for known, x in ((one, a), (other, b)):
        for dim in range(len(shape_of(x))):
            if dim not in known:
                known[dim] = next(rest)
    return tuple(one[dim] for dim in range(len(shape_of(a)))), tuple(other[dim] for dim in range(len(shape_of(b))))


def product_of(eqn: JaxprEqn, side: int, labels: Labels) -> tuple[Labels, Labels]:
    """The labels of a product's other operand and of its result, from those of one operand; what that lacks is new."""
    contracted, batch = eqn.params["dimension_numbers"]
    theirs, mine = eqn.invars[1 - side], eqn.invars[side]
    known: dict[int, Label] = {j: labels[i] for group in (contracted, batch) for i, j in zip(group[side], group[1 - side], strict=True)}
    other = tuple(known.get(dim, fresh(size)) for dim, size in enumerate(shape_of(theirs)))
    used = [{*contracted[k], *batch[k]} for k in (0, 1)]
    rest = {side: [labels[d] for d in range(len(shape_of(mine))) if d not in used[side]]}
    rest[1 - side] = [other[d] for d in range(len(shape_of(theirs))) if d not in used[1 - side]]
    return other, (*(labels[dim] for dim in batch[side]), *rest[0], *rest[1])
