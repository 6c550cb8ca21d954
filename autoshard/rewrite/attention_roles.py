"""Operands and results of attention by what a kernel calls them, keys and values before they are repeated for the queries of a group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax.extend.core import Var

from autoshard.primitives import is_rearrangement
from autoshard.rewrite.attention_kernels import Problem
from autoshard.rewrite.attention_match import Attention
from autoshard.rewrite.dimensions import Dimension, Label, Labels, Mismatch, backward, flattened, forward, split_dimension
from autoshard.rewrite.scopes import dtype_of, shape_of
from autoshard.rewrite.wiring import Wiring

Operand = tuple[Var, Labels]

@dataclass(frozen=True, eq=False)
class Roles:
    """The operands and results of one attention, by what the kernel calls them.

    Attributes:
        problem: what the kernel is to compute.
        batch, dimensions: the dimensions of its layout.
        q, k, v, cotangent, output, gradients: variables with their labels, of keys and values before they are repeated.
        segments: of queries and of keys: the variable, its labels, and whether keys that are not zero are there, if that is what it says.
        scale: of scores.
        repeats: of each key head, for devices that are more than key heads: dimensions of the group, which the kernel has with the last of
            the batch, as heads of keys of their own.
    """

    problem: Problem
    batch: tuple[Dimension, ...]
    dimensions: Mapping[str, tuple[Dimension, ...]]
    q: Operand
    k: Operand
    v: Operand
    cotangent: Operand
    output: Operand
    gradients: tuple[Operand | None, Operand | None, Operand | None]
    segments: tuple[tuple[Var, Labels, bool | None], ...]
    scale: float
    repeats: tuple[Dimension, ...] = ()

    @property
    def times(self) -> int:
        """How often the kernel has each key head."""
        return _size(self.repeats)

    def groups(self, names: Sequence[str]) -> list[tuple[Dimension, ...]]:
        """The dimensions of one of the kernel's arrays: those of the batch, and then these; of keys before they are repeated."""
        batch: list[tuple[Dimension, ...]] = [(each,) for each in self.batch]
        if "group" in names and self.repeats:
            batch[-1] = (*batch[-1], *self.repeats)
        return [*batch, *(self.dimensions[name] for name in names)]

    @property
    def segmented(self) -> tuple[str, ...]:
        """What each array of segments is of."""
        return SEGMENTED[len(SEGMENTED) - len(self.segments) :]

    def own(self, labels: Labels) -> tuple[str, ...]:
        """The roles of a result's dimensions beside the batch."""
        has = set(flattened(labels))
        if not has.isdisjoint(self.dimensions["key"]):
            first: tuple[str, ...] = ("key",)
        else:
            first = ("group", "query")
        width = "width" if not has.isdisjoint(self.dimensions["width"]) else "value_width"
        return (*first, width)

    @classmethod
    def of(cls, wiring: Wiring, found: Attention, parts: int = 1) -> Roles:
        """The roles in an attention, in a kernel whose heads of keys so many devices divide, where its heads are as many."""
        q, k, v = (_narrowed(wiring, each) for each in (found.q, found.k, found.v))
        batch, group, gradients = found.batch, found.group, list(exit and exit.result for exit in found.gradients)
        shared = [_unrepeated(wiring, each, set(batch)) for each in (k, v)]
        ungrouped = [_summed(wiring, made, repeated) for made, (_, repeated) in zip(gradients[1:], shared, strict=True)]
        batch = flattened((batch,))  # in dimensions as they are now: those of heads may be split
        shared = [(operand, set(flattened((tuple(repeated),)))) for operand, repeated in shared]
        repeats, others = (dims for _, dims in shared)
        if repeats and repeats == others and all(a is not None or b is None for a, b in zip(ungrouped, gradients[1:], strict=True)):
            (k, repeated), (v, _) = shared
            batch = tuple(d for d in batch if d not in repeated)
            group = (*(d for d in flattened((found.batch,)) if d in repeated), *group)
            gradients[1:] = ungrouped
        output = found.output.result if found.output is not None else q
        cotangent = _narrowed(wiring, found.backward[3]) if found.backward else q
        own: tuple[Dimension, ...] = ()
        if parts > 1:
            q, cotangent = (_before_rearranged(wiring, each) for each in (q, cotangent))
            output, gradients[0] = (_rearranged(wiring, each) for each in (output, gradients[0]))
            batch, group, own = _for_parts(batch, group, flattened(q[1]), parts)
        roles = {"group": group, "query": found.query, "key": found.key, "width": found.width, "value_width": found.value_width}
        dimensions = {role: flattened((dims,)) for role, dims in roles.items()}
        size = {role: _size(dims) for role, dims in dimensions.items()}
        mask = found.mask
        segments: tuple[tuple[Var, Labels, bool | None], ...] = ()
        if mask.segments is not None:
            segments = tuple((*each, None) for each in mask.segments)
        elif mask.valid is not None:
            segments = (mask.valid,)
        dtype = jnp.result_type(*(dtype_of(x) for x, _ in (q, k, v))).name
        has = [{*flattened(labels)} for _, labels, _ in segments]
        named = zip(has, SEGMENTED[len(SEGMENTED) - len(segments) :], strict=True)
        times = [1] * (len(batch) - 1) + [_size(own)] if batch else []
        shapes = tuple((*(d.size * n if d in mine else 1 for d, n in zip(batch, times, strict=True)), size[name]) for mine, name in named)
        seen: dict[str, Any] = {"lowest": mask.lowest, "highest": mask.highest, "segments": shapes}
        sizes: dict[str, Any] = {"batch": tuple(d.size * n for d, n in zip(batch, times, strict=True)), **size}
        problem = Problem(**sizes, dtype=dtype, **seen, scale=found.scale, softcap=found.softcap)
        made = output, tuple(gradients), segments, found.scale, own
        return cls(problem, batch, dimensions, q, k, v, cotangent, *made)  # type: ignore[arg-type]


def _for_parts(
    batch: tuple[Dimension, ...], group: tuple[Dimension, ...], q: Label, parts: int
) -> tuple[tuple[Dimension, ...], tuple[Dimension, ...], tuple[Dimension, ...]]:
    """The batch with the key heads last, the group, and the part of it that has key heads of its own, so that parts divide these.

    Key heads come right before the group among the dimensions of queries; they are repeated as little as that takes.
    """
    group = flattened((group,))
    place = q.index(group[0]) if group and group[0] in q else 0
    heads = q[place - 1] if place else None
    if heads not in batch or heads.size % parts == 0:
        return batch, group, ()
    first = group[0]
    times = next((n for n in range(2, first.size + 1) if first.size % n == 0 and heads.size * n % parts == 0), 1)
    if times == 1:
        return batch, group, ()
    halves = flattened((split_dimension(first, times),)) if times < first.size else (first,)
    return (*(d for d in batch if d is not heads), heads), (*halves[1:], *group[1:]), halves[:1]


def _before_rearranged(wiring: Wiring, operand: Operand) -> Operand:
    """An operand before its dimensions were split, merged or ordered."""
    var, labels = operand
    while (eqn := wiring.maker.get(var)) is not None and is_rearrangement(eqn.primitive.name):
        try:
            ((var, labels),) = backward(eqn, labels)
        except (Mismatch, ValueError):
            break
    return var, labels


def _rearranged(wiring: Wiring, result: Operand | None) -> Operand | None:
    """A result after its dimensions are split, merged or ordered, where nothing reads it before."""
    if result is None:
        return None
    var, labels = result
    while len(readers := wiring.readers.get(var, ())) == 1 and not (wiring.outputs.get(var) or wiring.entries.get(var)):
        (eqn,) = readers
        made = forward(eqn, [labels]) if is_rearrangement(eqn.primitive.name) else None
        if made is None:
            break
        var, labels = eqn.outvars[0], made
    return var, labels


def _size(dimensions: Sequence[Dimension]) -> int:
    return math.prod(d.size for d in dimensions)


def _narrowed(wiring: Wiring, operand: Operand) -> Operand:
    """An operand before it was made wider."""
    var, labels = operand
    while (eqn := wiring.maker.get(var)) is not None and eqn.primitive.name == "convert_element_type":
        (before,) = eqn.invars
        if not isinstance(before, Var) or not _is_wider(dtype_of(var), dtype_of(before)):
            break
        var = before
    return var, labels


def _is_wider(one: Any, other: Any) -> bool:
    """Whether a type has every number of another one."""
    return jnp.issubdtype(other, jnp.floating) and one != other and jnp.promote_types(one, other) == one


def _unrepeated(wiring: Wiring, operand: Operand, batch: set[Dimension]) -> tuple[Operand, set[Dimension]]:
    """Keys or values before they were repeated for the queries of a group, and the dimensions along which they are."""
    (var, labels), best, repeated = operand, operand, set[Dimension]()
    while (eqn := wiring.maker.get(var)) is not None:
        try:
            if eqn.primitive.name == "broadcast_in_dim" and isinstance(eqn.invars[0], Var):
                made, shape = labels, shape_of(eqn.invars[0])
                dims = eqn.params["broadcast_dimensions"]
                labels = tuple(made[to] if size == shape_of(eqn.outvars[0])[to] else () for size, to in zip(shape, dims, strict=True))
                var = eqn.invars[0]
                lost = set(flattened(made)) - set(flattened(labels))
                if not lost <= batch:
                    break
                repeated |= lost
                best = (var, labels) if repeated else best
            elif is_rearrangement(eqn.primitive.name):
                ((var, labels),) = backward(eqn, labels)
            else:
                break
        except (Mismatch, ValueError):
            break
    return (_narrowed(wiring, best), repeated) if repeated else (operand, set())


def _summed(wiring: Wiring, result: Operand | None, repeated: set[Dimension]) -> Operand | None:
    """A gradient summed over the dimensions along which its operand was repeated; None where it is not."""
    if result is None:
        return None
    (var, labels), left = result, set(repeated)
    while left:
        readers = wiring.readers.get(var, ())
        if len(readers) != 1 or wiring.outputs.get(var) or wiring.entries.get(var):
            return None
        (eqn,) = readers
        try:
            made = forward(eqn, [labels])
        except Mismatch:
            return None
        if made is None or not (is_rearrangement(name := eqn.primitive.name) or name in ("reduce_sum", "convert_element_type")):
            return None
        lost = set(flattened(labels)) - set(flattened(made))
        if not lost <= left:
            return None
        left -= lost
        var, labels = eqn.outvars[0], made
    return var, labels


SEGMENTED = ("query", "key")
