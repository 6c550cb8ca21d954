"""Softmax attention in a traced program, recognised by its values.

A region of scores (`attention_region`) is attention where its results are, as numbers, those of the formula

    p = softmax over s of (cap(scale q k^T) where the mask allows), o = p v,

and its gradients those of the formula's. Everything that the formula leaves open is read from the region's own values (`attention_mask`).
Then all results are compared for made-up queries, keys, values and cotangents, at some places of each dimension, in float64 (`values`). So
it does not matter how attention, its mask or its backward pass are written.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from autoshard.rewrite.attention_mask import Different, Mask, Reading
from autoshard.rewrite.attention_region import Exit, Region, region_of
from autoshard.rewrite.dimensions import Dimension, Labels, Mismatch, flattened, unify
from autoshard.rewrite.scopes import Scope, dtype_of, shape_of
from autoshard.rewrite.values import RANK
from autoshard.rewrite.wiring import Wiring

EXACT = 1e-6  # relative difference of values in float64, of which a formula that is the same differs by rounding alone
NOT_ITS_RESULT = "its result is not the product of a softmax and values"
NOT_ITS_GRADIENT = "its backward pass is not the derivative of softmax attention"
NEAR = 60  # values that are looked at for the exponentials of a softmax, after the product of its scores
MOST_LITERALS = 12  # numbers in comparisons of positions that are looked at, as lengths of windows


@dataclass(frozen=True, slots=True, eq=False)
class Attention:
    """Softmax attention of a program.

    Attributes:
        region: what computes it.
        batch, group, query, key: the dimensions of queries, keys and values alike; of queries that share keys; of positions.
        width, value_width: those of queries and keys, and of values.
        q, k, v: the variables of queries, keys and values, with their labels.
        output: where they are multiplied with the probabilities; None where only the backward pass is here.
        backward: the variables of queries, keys, values and of the output's cotangent that the backward pass reads, with labels.
        gradients: the products that make gradients of queries, keys and values; None where there is none.
        mask, scale, softcap: of the formula; no cap is 0.0.
        reading: what evaluates it.
    """

    region: Region
    batch: tuple[Dimension, ...]
    group: tuple[Dimension, ...]
    query: tuple[Dimension, ...]
    key: tuple[Dimension, ...]
    width: tuple[Dimension, ...]
    value_width: tuple[Dimension, ...]
    q: tuple[Var, Labels]
    k: tuple[Var, Labels]
    v: tuple[Var, Labels]
    output: Exit | None
    backward: tuple[tuple[Var, Labels], ...]
    gradients: tuple[Exit | None, Exit | None, Exit | None]
    mask: Mask
    scale: float
    softcap: float
    reading: Reading


@dataclass(frozen=True, slots=True)
class Refused:
    """What looks like attention and is not replaced: its first product, and why."""

    eqn: JaxprEqn
    reason: str


def attentions(root: Scope, wiring: Wiring) -> Iterator[Attention | Refused]:
    """The attention of a program, and what looks like it and is another thing."""
    eqns = [step for scope in root.walk() for step in scope.steps if isinstance(step, JaxprEqn)]
    order = {id(eqn): k for k, eqn in enumerate(eqns)}
    literals = sorted({n for eqn in eqns for n in _literals(eqn)})[:MOST_LITERALS]
    first = [eqn for eqn in eqns if eqn.primitive.name == "dot_general" and _has_two_sides(eqn) and _has_exponential(wiring, eqn)]
    regions = [region for region in (region_of(wiring, order, eqn) for eqn in first) if region.exits]
    products = {each.eqn.outvars[0] for region in regions for each in (*region.roots, *region.exits)}
    products |= {eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "dot_general" and _has_no_side(eqn)}
    numbers: dict[Var, int] = {}
    taken: set[Var] = set()
    for region in regions:
        if (start := region.roots[0].eqn).outvars[0] in taken:
            continue
        try:
            found = _Matching(wiring, region, literals, products, numbers).attention()
        except (Different, Mismatch, NotImplementedError) as error:
            through = f"its scores go through {region.blocked.primitive.name}" if region.blocked is not None else ""
            found = Refused(start, through or str(error) or "its dimensions are not followed") if _is_like(region) else None
        if found is not None:
            taken.update(each.eqn.outvars[0] for each in region.roots)
            yield found


def _has_two_sides(eqn: JaxprEqn) -> bool:
    """Whether a product contracts something, and both operands have dimensions of their own."""
    contracted, batch = eqn.params["dimension_numbers"]
    return bool(contracted[0]) and all(len(contracted[k]) + len(batch[k]) < len(shape_of(x)) for k, x in enumerate(eqn.invars))


def _has_exponential(wiring: Wiring, eqn: JaxprEqn) -> bool:
    """Whether exponentials of as many numbers are among the operations that come next after a product."""
    count, waiting, seen = math.prod(shape_of(eqn.outvars[0])), [eqn.outvars[0]], set[Var]()
    while waiting and len(seen) < NEAR:
        var = waiting.pop(0)
        if var in seen:
            continue
        seen.add(var)
        waiting += wiring.others(var)
        for reader in wiring.readers.get(var, ()):
            if reader.primitive.name in ("exp", "exp2") and math.prod(shape_of(reader.outvars[0])) == count:
                return True
            if reader.primitive.name != "dot_general":
                waiting += reader.outvars
    return False


def _has_no_side(eqn: JaxprEqn) -> bool:
    """Whether a product is one of vectors, in batches."""
    contracted, batch = eqn.params["dimension_numbers"]
    return all(len(contracted[k]) + len(batch[k]) == len(shape_of(x)) for k, x in enumerate(eqn.invars))


def _is_like(region: Region) -> bool:
    """Whether someone may take a region for attention: a product of batches of matrices, whose result is contracted again."""
    (_, batch), first = region.roots[0].eqn.params["dimension_numbers"], region.roots[0]
    own = _free_of(first.eqn, first.labels, 0) | _free_of(first.eqn, first.labels, 1)
    return bool(batch[0]) and any(own.intersection(flattened(exit.contracted)) for exit in region.exits)


def _free_of(eqn: JaxprEqn, labels: Labels, side: int) -> set[Dimension]:
    """The dimensions that one operand of a product alone gives its result."""
    contracted, batch = eqn.params["dimension_numbers"]
    counts = [len(shape_of(x)) - len(contracted[k]) - len(batch[k]) for k, x in enumerate(eqn.invars)]
    start = len(batch[0]) + (counts[0] if side else 0)
    return set(flattened(labels[start : start + counts[side]]))


def _literals(eqn: JaxprEqn) -> Iterator[int]:
    """The integers that an operation has among its operands."""
    for x in eqn.invars:
        if isinstance(x, Literal) and np.ndim(x.val) == 0 and np.dtype(dtype_of(x)).kind in "iu" and 2 < abs(int(x.val)) < 2**31:
            yield abs(int(x.val))


@dataclass(eq=False)
class _Matching(Reading):
    """The comparison of one region with attention."""

    allowed: np.ndarray = field(init=False)
    known: tuple[float, float] = (1.0, 0.0)

    def attention(self) -> Attention:
        """The attention that the region is.

        Raises:
            Different, Mismatch, NotImplementedError: it is none.
        """
        root = self.region.roots[0]
        sides = [_free_of(root.eqn, root.labels, side) for side in (0, 1)]
        reduced = [set(flattened(labels)) for labels in self.region.reduced]
        possible = [side for side in (1, 0) if all(each == sides[side] for each in reduced)]
        if not possible:
            raise Different("its scores are summed over other dimensions than those of keys")
        for side in possible[:-1]:
            try:
                return self._with_keys(side, sides)
            except (Different, Mismatch):
                continue
        return self._with_keys(possible[-1], sides)

    def _with_keys(self, side: int, sides: Sequence[set[Dimension]]) -> Attention:
        """The attention whose keys are one operand of the first product."""
        region, root, key, others = self.region, self.region.roots[0], sides[side], sides[1 - side]
        if not others or not key:
            raise Different("it has one query or one key")
        batch = set(flattened(root.labels)) - key - others
        in_order = flattened(root.labels)
        self.batch, self.key, self.others = (tuple(d for d in in_order if d in each) for each in (batch, key, others))
        self.k, self.q = ((root.eqn.invars[k], root.operands[k]) for k in (side, 1 - side))
        self.width = tuple(d for d in flattened(self.k[1]) if d not in batch | key)
        if not isinstance(self.q[0], Var) or not isinstance(self.k[0], Var):
            raise Different("it is of constants")
        mask_of = self.probabilities()
        exits = [(exit, set(flattened(exit.contracted))) for exit in region.exits]
        over_keys = [exit for exit, contracted in exits if contracted == key]
        over_queries = [exit for exit, contracted in exits if contracted == others]
        if len(over_keys) + len(over_queries) < len(exits):
            raise Different("its scores are contracted over other dimensions than those of queries or keys")
        mask, allowed, self.data = self.mask(mask_of)
        scale, softcap = self.scale(mask_of, allowed)
        self.known = scale, softcap
        return self._assigned(mask, allowed, over_keys, over_queries)

    # -- proof --------------------------------------------------------------------------------------------------------------

    def _assigned(self, mask: Mask, allowed: np.ndarray, over_keys: list[Exit], over_queries: list[Exit]) -> Attention:
        """The attention of these exits, compared with the formula in all its results."""
        self.allowed = allowed
        self.begin(self.data)
        output: Exit | None = None
        for exit in over_keys:
            if not set(self.others).isdisjoint(flattened(exit.other[1])):  # values are not those of one query
                continue
            if self._same(self.at(exit.result), self.sum(self._softmax()[0] * self.at(exit.other), self.key)):
                output = exit
                break
        gradients: Any = (None, None, None)
        rest = [exit for exit in (*over_keys, *over_queries) if exit is not output]
        backward: tuple[tuple[Var, Labels], ...] = ()
        v = output.other if output is not None else None
        if rest:
            gradients, backward = self._gradients(v, rest)
            v = v or backward[2]
        if v is None:
            raise Different(self.random() or NOT_ITS_RESULT)
        value_width = tuple(d for d in flattened(v[1]) if d not in {*self.batch, *self.key})
        return Attention(
            self.region, self.batch, self.group, self.query, self.key, self.width, value_width, self.q, self.k, v, output, backward,
            gradients, mask, *self.known, self,
        )  # type: ignore[arg-type]  # fmt: skip

    def _softmax(self) -> tuple[np.ndarray, np.ndarray]:
        """The formula's probabilities, and the derivative of its logits."""
        scale, cap = self.known
        y = scale * self.sum(self.at(self.q) * self.at(self.k), self.width)
        slope = np.ones((1,) * RANK)
        if cap:
            y = cap * np.tanh(y / cap)
            slope = 1 - (y / cap) ** 2
        y, allowed = np.broadcast_arrays(y, self.allowed)
        e = np.where(allowed, np.exp(y - np.where(allowed, y, -np.inf).max(axis=self.axes(self.key), keepdims=True)), 0.0)
        return e / e.sum(axis=self.axes(self.key), keepdims=True), slope

    def _gradients(self, v: tuple[Var, Labels] | None, exits: list[Exit]) -> tuple[tuple[Exit | None, ...], tuple]:
        """The exits that are gradients of queries, keys and values; what the backward pass reads for them."""
        p, slope = self._softmax()
        scale = self.known[0]
        q, k = self.at(self.q), self.at(self.k)
        for mine, cotangent in self._cotangents(v, exits):
            values, do = self.at(mine), self.at(cotangent)
            width = tuple(d for d in flattened(mine[1]) if d not in {*self.batch, *self.key})
            dp = self.sum(values * do, width)
            ds = p * (dp - self.sum(p * dp, self.key)) * slope * scale
            expected = (self.sum(ds * k, self.key), self.sum(ds * q, self.others), self.sum(p * do, self.others))
            widths = (self.width, self.width, width)
            found: list[Exit | None] = [None, None, None]
            for exit in exits:  # others may be on the way, as an output before it is normalised
                which = (n for n in range(3) if found[n] is None and self._is(exit, expected[n], widths[n]))
                if (n := next(which, None)) is not None:
                    found[n] = exit
            if any(found):
                if v is not None:
                    _aligned(*(tuple((d,) for d in flattened(x) if d not in {*self.batch, *self.key}) for x in (mine[1], v[1])))
                for exit, own in zip(found, widths, strict=True):
                    if exit is not None:
                        _aligned(tuple((d,) for d in self._own(exit)), tuple((d,) for d in own))
                return tuple(found), (self._read(found[1], self.q), self._read(found[0], self.k), mine, cotangent)
        is_backward = len(self.region.roots) > 1
        raise Different(self.random() or (NOT_ITS_GRADIENT if is_backward else NOT_ITS_RESULT))

    def _own(self, exit: Exit) -> list[Dimension]:
        """The dimensions of an exit's result that its scores have not."""
        return [d for d in flattened(exit.result[1]) if d not in {*self.batch, *self.others, *self.key}]

    def _is(self, exit: Exit, expected: np.ndarray, width: Sequence[Dimension]) -> bool:
        """Whether an exit makes these values, with this width."""
        own = self._own(exit)
        if [d.size for d in own] != [d.size for d in width]:
            return False
        before = self.axis_of
        self.axis_of = {**before, **dict(zip(own, self.axes(width), strict=True))}
        try:
            return self._same(self.at(exit.result), expected)
        finally:
            self.axis_of = before

    def _read(self, exit: Exit | None, other: tuple[Var, Labels]) -> tuple[Var, Labels]:
        """What a gradient's product reads: keys for that of queries, and queries for that of keys."""
        return other if exit is None else exit.other

    def _cotangents(self, v: tuple[Var, Labels] | None, exits: list[Exit]) -> Iterator[tuple[tuple[Var, Labels], tuple[Var, Labels]]]:
        """What may be the values and the output's cotangent, with the same labels of their width."""
        made = []
        for root in self.region.roots[1:]:
            for side in (0, 1):
                one, other = ((root.eqn.invars[k], root.operands[k]) for k in (side, 1 - side))
                if isinstance(one[0], Var) and isinstance(other[0], Var) and set(self.key) & set(flattened(one[1])):
                    made.append((one, other))
        for values, cotangent in made:
            yield values, cotangent
            for outside in self.region.outside:
                if sorted(d.size for d in flattened(outside[1])) == sorted(d.size for d in flattened(cotangent[1])):
                    try:
                        _aligned(outside[1], cotangent[1])
                    except Mismatch:
                        continue
                    yield values, outside

    def _same(self, one: np.ndarray, other: np.ndarray) -> bool:
        try:
            one, other = np.broadcast_arrays(one, other)
        except ValueError:
            return False
        return bool(np.allclose(one, other, rtol=EXACT, atol=EXACT * max(float(np.abs(other).max(initial=0)), 1e-300)))


def _aligned(one: Labels, other: Labels) -> None:
    """Makes the free dimensions of one array those of another that has them in any order."""
    mine, theirs = flattened(one), flattened(other)
    rest = [d for d in theirs if d not in mine]
    for each in mine:
        if each not in theirs:
            if not rest or rest[0].size != each.size:
                raise Mismatch
            unify(((each,),), ((rest.pop(0),),))
