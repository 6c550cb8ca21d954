"""Softmax attention in a traced program, recognised by its values.

A region of scores (`attention_region`) is attention where its results are, as numbers, those of the formula

    p = softmax over s of (cap(scale q k^T) where the mask allows), o = p v,

and its gradients those of the formula's. Everything that the formula leaves open is read from the region's own values: the mask from scores of
equal queries, the scale and the cap of logits from scores of keys that grow. Then all results are compared for made-up queries, keys, values
and cotangents, at some places of each dimension, in float64 (`values`). So it does not matter how attention, its mask or its backward
pass are written.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from autoshard.primitives import primitive
from autoshard.rewrite.attention_region import Exit, Region, region_of
from autoshard.rewrite.dimensions import Dimension, Labels, Mismatch, all_resolved, flattened, unify
from autoshard.rewrite.scopes import Scope, Wiring
from autoshard.rewrite.values import RANK, Given, Index, Values, made_up

EXACT = 1e-6  # relative difference of values in float64, of which a formula that is the same differs by rounding alone
UNSEEN = 1e-12  # of the largest weight: what a key has that a mask leaves out
REACH = 600  # difference of logits up to which caps are looked for, and of which exponentials are numbers in float64
NOT_ITS_RESULT = "its result is not the product of a softmax and values"
NOT_ITS_GRADIENT = "its backward pass is not the derivative of softmax attention"
MOST_MAKERS = 200  # operations that are looked through for random numbers
MOST_LITERALS = 12  # numbers in comparisons of positions that are looked at, as lengths of windows


@dataclass(frozen=True, slots=True)
class Mask:
    """The keys that a query sees: those at ``lowest <= query - key <= highest``, None without an end, of its own segment.

    Attributes:
        segments: the segment of each query, and of each key, as variables with their labels.
        valid: which keys there are, as a variable with its labels, and whether keys that are not zero are there.
    """

    lowest: int | None = None
    highest: int | None = None
    segments: tuple[tuple[Var, Labels], tuple[Var, Labels]] | None = None
    valid: tuple[Var, Labels, bool] | None = None

    @property
    def of_positions(self) -> bool:
        return self.lowest is not None or self.highest is not None


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


@dataclass(frozen=True, slots=True)
class Refused:
    """What looks like attention and is not replaced: its first product, and why."""

    eqn: JaxprEqn
    reason: str


class _Different(Exception):
    """Why a region is not attention."""


def attentions(root: Scope, wiring: Wiring) -> Iterator[Attention | Refused]:
    """The attention of a program, and what looks like it and is another thing."""
    eqns = [step for scope in root.walk() for step in scope.steps if isinstance(step, JaxprEqn)]
    order = {id(eqn): k for k, eqn in enumerate(eqns)}
    literals = sorted({n for eqn in eqns for n in _literals(eqn)})[:MOST_LITERALS]
    regions = [region_of(wiring, order, eqn) for eqn in eqns if eqn.primitive.name == "dot_general" and _has_two_sides(eqn)]
    regions = [region for region in regions if region.exits and region.functions & {"exp", "exp2", "logistic"}]
    products = {each.eqn.outvars[0] for region in regions for each in (*region.roots, *region.exits)}
    products |= {eqn.outvars[0] for eqn in eqns if eqn.primitive.name == "dot_general" and _has_no_side(eqn)}
    numbers: dict[Var, int] = {}
    taken: set[Var] = set()
    for region in regions:
        if (first := region.roots[0].eqn).outvars[0] in taken:
            continue
        try:
            found = _Matching(wiring, region, literals, products, numbers).attention()
        except (_Different, Mismatch, NotImplementedError) as error:
            through = f"its scores go through {region.blocked.primitive.name}" if region.blocked is not None else ""
            found = Refused(first, through or str(error) or "its dimensions are not followed") if _is_like(region) else None
        if found is not None:
            taken.update(each.eqn.outvars[0] for each in region.roots)
            yield found


def _has_two_sides(eqn: JaxprEqn) -> bool:
    """Whether both operands of a product have dimensions of their own."""
    contracted, batch = eqn.params["dimension_numbers"]
    return all(len(contracted[k]) + len(batch[k]) < x.aval.ndim for k, x in enumerate(eqn.invars))


def _has_no_side(eqn: JaxprEqn) -> bool:
    """Whether a product is one of vectors, in batches."""
    contracted, batch = eqn.params["dimension_numbers"]
    return all(len(contracted[k]) + len(batch[k]) == x.aval.ndim for k, x in enumerate(eqn.invars))


def _is_like(region: Region) -> bool:
    """Whether someone may take a region for attention: a product of batches of matrices, exponentials that are summed up, another product."""
    (_, batch), first = region.roots[0].eqn.params["dimension_numbers"], region.roots[0]
    return bool(batch[0]) and any(set(flattened(exit.contracted)) & _free_of(first.eqn, first.labels, side) for exit in region.exits for side in (0, 1))


def _free_of(eqn: JaxprEqn, labels: Labels, side: int) -> set[Dimension]:
    """The dimensions that one operand of a product alone gives its result."""
    contracted, batch = eqn.params["dimension_numbers"]
    counts = [x.aval.ndim - len(contracted[k]) - len(batch[k]) for k, x in enumerate(eqn.invars)]
    start = len(batch[0]) + (counts[0] if side else 0)
    return set(flattened(labels[start : start + counts[side]]))


def _literals(eqn: JaxprEqn) -> Iterator[int]:
    """The integers that an operation has among its operands."""
    for x in eqn.invars:
        if isinstance(x, Literal) and np.ndim(x.val) == 0 and np.dtype(x.aval.dtype).kind in "iu" and 2 < abs(int(x.val)) < 2**31:
            yield abs(int(x.val))


@dataclass(eq=False)
class _Matching:
    """The comparison of one region with attention."""

    wiring: Wiring
    region: Region
    literals: Sequence[int]
    products: Collection[Var]
    numbers: dict[Var, int]
    values: Values = field(init=False)
    axis_of: dict[Dimension, int] = field(default_factory=dict)

    def attention(self) -> Attention:
        """The attention that the region is.

        Raises:
            _Different, Mismatch, NotImplementedError: it is none.
        """
        root = self.region.roots[0]
        sides = [_free_of(root.eqn, root.labels, side) for side in (0, 1)]
        reduced = [set(flattened(labels)) for labels in self.region.reduced]
        possible = [side for side in (1, 0) if all(each == sides[side] for each in reduced)]
        if not possible or not _is_like(self.region):
            raise _Different("its scores are summed over other dimensions than those of keys")
        for side in possible[:-1]:
            try:
                return self._with_keys(side, sides)
            except (_Different, Mismatch):
                continue
        return self._with_keys(possible[-1], sides)

    def _with_keys(self, side: int, sides: Sequence[set[Dimension]]) -> Attention:
        """The attention whose keys are one operand of the first product."""
        region, root, key, others = self.region, self.region.roots[0], sides[side], sides[1 - side]
        if not others or not key:
            raise _Different("it has one query or one key")
        batch = set(flattened(root.labels)) - key - others
        in_order = flattened(root.labels)
        self.batch, self.key, self.others = (tuple(d for d in in_order if d in each) for each in (batch, key, others))
        self.k, self.q = ((root.eqn.invars[k], root.operands[k]) for k in (side, 1 - side))
        self.width = tuple(d for d in flattened(self.k[1]) if d not in batch | key)
        if not isinstance(self.q[0], Var) or not isinstance(self.k[0], Var):
            raise _Different("it is of constants")
        mask_of = self._probabilities()
        exits = [(exit, set(flattened(exit.contracted))) for exit in region.exits]
        over_keys = [exit for exit, contracted in exits if contracted == key]
        over_queries = [exit for exit, contracted in exits if contracted == others]
        if len(over_keys) + len(over_queries) < len(exits):
            raise _Different("its scores are contracted over other dimensions than those of queries or keys")
        mask, allowed, self.data = self._mask(mask_of)
        scale, softcap = self._scale(mask_of, allowed)
        self.known = scale, softcap
        return self._assigned(mask, allowed, over_keys, over_queries)

    # -- evaluation ---------------------------------------------------------------------------------------------------------

    def _begin(self, given: Mapping[Var, Given]) -> None:
        """Values from the beginning, of some variables as given."""
        sizes = {d.size for d in (*self.key, *self.others)}
        samples = {size: self._positions(size, max(sizes)) for size in sizes if size > 1}
        self.values = Values(self.wiring, self.products, samples, self.region.parts, given, self.numbers)
        self.axis_of = {}
        self._axes((*self.batch, *self.others, *self.key, *self.width))  # the same ones each time

    def _positions(self, size: int, largest: int) -> np.ndarray:
        """The places that are looked at along positions: ends, the middle, those about the lengths of windows, and some others."""
        if size <= 48:
            return np.arange(size)
        base = [0, 1, 2, size // 2, size // 2 + 1, size - 3, size - 2, size - 1]
        rng = np.random.default_rng(size)
        more = [*base, *(p for n in rng.integers(0, size - 1, 6) for p in (n, n + 1))]
        for n in self.literals:
            if n < largest:
                more += [p for at in (0, size // 2, size - 1) for d in (-1, 0, 1) for p in (at - n + d, at + n + d)]
        return np.unique([int(p) for p in more if 0 <= p < size])

    def _axis(self, each: Dimension) -> int:
        """The axis of an elementary dimension."""
        if each not in self.axis_of:
            self.axis_of[each] = self.values.axis(each.size, set(self.axis_of.values()))
        return self.axis_of[each]

    def _axes(self, dimensions: Sequence[Dimension]) -> tuple[int, ...]:
        return tuple(self._axis(each) for each in dimensions)

    def _index(self, labels: Labels) -> Index:
        found = []
        for label in all_resolved(labels):
            at = np.zeros((1,) * RANK, np.int64)
            for each in label:
                at = at * each.size + self.values.index(self._axis(each))
            found.append(at)
        return tuple(found)

    def _at(self, one: tuple[Var, Labels]) -> np.ndarray:
        return self.values.at(one[0], self._index(one[1])).astype(np.float64)

    def _sum(self, x: np.ndarray, dimensions: Sequence[Dimension]) -> np.ndarray:
        axes = self._axes(dimensions)
        shape = list(x.shape)
        for each, axis in zip(dimensions, axes, strict=True):
            shape[axis] = len(self.values.places(each.size))
        return np.broadcast_to(x, shape).sum(axis=axes, keepdims=True)

    # -- what the formula leaves open ---------------------------------------------------------------------------------------

    def _probabilities(self) -> Exit:
        """The exit whose scores are probabilities: equal ones where all products of queries and keys are zero."""
        self._begin(self._silent())
        biased = False
        for exit in self.region.exits:
            p = self._at(exit.scores)
            if not np.all(np.isfinite(p)) or p.min() < 0 or not p.max() > 0:
                continue
            largest = np.broadcast_to(p, self._whole(p)).max(axis=self._axes(self.key), keepdims=True)
            if np.all((p < UNSEEN * largest) | (np.abs(p - largest) <= 1e-9 * largest)):
                return exit
            biased = True
        raise _Different(self._random() or ("it adds a bias to its scores" if biased else "its weights are not a softmax of its scores"))

    def _silent(self) -> dict[Var, Given]:
        """Products of queries and keys that are zero, the same ones in other passes too."""
        root = self.region.roots[0].eqn
        alike = [v for v in self.products if (eqn := self.wiring.maker.get(v)) is not None and self._key(eqn) == self._key(root)]
        return dict.fromkeys(alike, lambda index: np.zeros((1,) * RANK))

    def _key(self, eqn: JaxprEqn) -> tuple:
        return eqn.params["dimension_numbers"], *(self.wiring.source(x) if isinstance(x, Var) else None for x in eqn.invars)

    def _given(self, q: Given, k: Given) -> dict[Var, Given]:
        """Queries and keys as given, under all their names."""
        return {x: given for (var, _), given in ((self.q, q), (self.k, k)) for x in (var, self.wiring.source(var)) if isinstance(x, Var)}

    def _whole(self, x: np.ndarray) -> tuple[int, ...]:
        """The shape of an array over keys, whatever it depends on."""
        shape = list(x.shape)
        for each, axis in zip(self.key, self._axes(self.key), strict=True):
            shape[axis] = len(self.values.places(each.size))
        return tuple(shape)

    def _random(self) -> str:
        """Whether random numbers are in the scores, as those of dropout, in words."""
        waiting, seen = list(self.values.made_up), set[Var]()
        while waiting and len(seen) < MOST_MAKERS:
            var = self.wiring.source(waiting.pop())
            if not isinstance(var, Var) or var in seen:
                continue
            seen.add(var)
            if (eqn := self.wiring.maker.get(var)) is not None:
                if primitive(eqn.primitive.name).kind == "random":
                    return "random numbers are in its scores, as those of dropout"
                waiting[:0] = [] if eqn.primitive.name == "dot_general" else [x for x in eqn.invars if isinstance(x, Var)]
        return ""

    def _allowed(self, exit: Exit, given: Mapping[Var, Given]) -> np.ndarray:
        """Which keys the mask allows at the places looked at, of an axis of size one where it does not depend on that dimension."""
        self._begin({**self._silent(), **given})
        p = self._at(exit.scores)
        p = np.broadcast_to(p, self._whole(p))
        return p > UNSEEN * p.max(axis=self._axes(self.key), keepdims=True)

    def _mask(self, exit: Exit) -> tuple[Mask, np.ndarray, dict[Var, Given]]:
        """The mask, which keys it allows at the places looked at, and the data on which that depends there."""
        allowed = self._allowed(exit, {})
        depends = tuple(d for d in self.others if allowed.shape[self._axis(d)] != 1)
        self.query = depends or (max(self.others, key=lambda d: d.size),)
        self.group = tuple(d for d in self.others if d not in self.query)
        if not self.values.made_up:
            alike = all(allowed.shape[axis] == 1 for axis in self._axes(self.batch))
            interval = self._interval(allowed, np.ones((1,) * RANK, bool)) if alike else None
            if interval is not None and self._sees(allowed):
                return Mask(*interval), allowed, {}
        if reason := self._random():
            raise _Different(reason)
        for given, segments, valid in self._hypotheses():
            allowed = self._allowed(exit, given)
            if self.values.made_up:  # it depends on more
                continue
            if segments is not None:
                data = self._at(segments[0]) == self._at(segments[1])
            else:
                assert valid is not None
                data = (self._at(valid[:2]) != 0) == valid[2]
            interval = self._interval(allowed, data) if data.any() and not data.all() else None
            if interval is not None and (valid is None or interval == (None, None)):
                return Mask(*interval, segments, valid), allowed, given
        raise _Different("its mask is none of causal, local windows and segments")

    def _sees(self, allowed: np.ndarray) -> bool:
        """Whether each query sees a key."""
        return bool(allowed.any(axis=self._axes(self.key)).all())

    def _hypotheses(self) -> Iterator[tuple[dict[Var, Given], Any, Any]]:
        """Data on which the mask may depend beside positions, as given: segments, or which keys there are."""
        found = [self._of_positions(*each) for each in list(self.values.known.values())]
        queries = [each for each in found if each is not None and each[0] == "query"]
        keys = [each for each in found if each is not None and each[0] == "key"]
        for _, u, one, kind in queries:
            for _, w, other, same in keys:
                if kind == same and kind in "iu" and self.wiring.source(u) is self.wiring.source(w):  # so that each query sees itself
                    yield {u: partial(self._diverse, u), w: partial(self._diverse, w)}, ((u, one), (w, other)), None
        for _, w, other, kind in keys:
            for nonzero in (True, False):
                yield {w: partial(self._diverse, w)}, None, (w, other, nonzero)

    def _diverse(self, var: Var, index: Index) -> np.ndarray:
        """Made-up integers that are small or among those of the program, by their position; truth values of other types."""
        pool = np.array([0, 1, 2, 3, -1, *(n + d for n in self.literals for d in (0, 1))])
        made = made_up(self.numbers.setdefault(var, len(self.numbers) + 2), var.aval.shape, "i", index)
        return made % 3 != 0 if np.dtype(var.aval.dtype).kind == "b" else pool[made % len(pool)]

    def _of_positions(self, var: Var, index: Index, value: np.ndarray) -> tuple | None:
        """A variable that has one value for each query or each key, with its labels; None where it has others."""
        sides = {"query": self.query, "key": self.key}
        used = {axis for axis in range(RANK) if value.shape[axis] != 1}
        name = next((name for name, mine in sides.items() if not used.isdisjoint(self._axes(mine))), "")
        axes = {self._axis(each): each for each in (*self.batch, *sides.get(name, ()))}
        if not name or not used <= set(axes) or value.dtype.kind == "f":
            return None
        labels = []
        for size, at in zip(var.aval.shape, index, strict=True):
            along = [axis for axis in range(RANK) if at.shape[axis] != 1]
            if len(along) > 1 or (along and (along[0] not in axes or axes[along[0]].size != size)) or (not along and size != 1):
                return None
            if along and not np.array_equal(at, self.values.index(along[0])):
                return None
            labels.append((axes[along[0]],) if along else ())
        return name, var, tuple(labels), value.dtype.kind

    def _interval(self, allowed: np.ndarray, data: np.ndarray) -> tuple[int | None, int | None] | None:
        """The least and the largest distance of a query from a key that it sees, None where there is no bound; None where it is no interval."""
        if not self.query:
            return (None, None) if np.array_equal(*np.broadcast_arrays(allowed, data)) else None
        distance = self._flat(self.query) - self._flat(self.key)
        allowed, data, distance = np.broadcast_arrays(allowed, data, distance)
        if np.any(allowed & ~data):
            return None
        if not np.any(data & ~allowed):
            return None, None
        seen, hidden = distance[allowed], distance[data & ~allowed]
        low, high = int(seen.min()), int(seen.max())
        if np.any((hidden >= low) & (hidden <= high)):
            return None
        bounds: list[int | None] = [low if np.any(hidden < low) else None, high if np.any(hidden > high) else None]
        exact = (bounds[0] is None or np.any(hidden == low - 1)) and (bounds[1] is None or np.any(hidden == high + 1))
        return (bounds[0], bounds[1]) if exact else None

    def _flat(self, dimensions: Sequence[Dimension]) -> np.ndarray:
        at = np.zeros((1,) * RANK, np.int64)
        for each in dimensions:
            at = at * each.size + self.values.index(self._axis(each))
        return at

    def _scale(self, exit: Exit, allowed: np.ndarray) -> tuple[float, float]:
        """The factor of scores, and the cap of logits."""

        def logits(size: float) -> tuple[float, float, float]:
            """The difference of logits of two keys that a query sees, and the products of query and key of both."""

            def at(labels: Labels, is_query: bool, index: Index) -> np.ndarray:
                found = np.ones((1,) * RANK)
                for label, place in zip(all_resolved(labels), index, strict=True):
                    for k, each in enumerate(label):
                        one = place // math.prod(d.size for d in label[k + 1 :]) % each.size
                        if each in self.width:
                            found = found * (one == 0)
                        elif each in self.key and not is_query:
                            found = found * np.sin(one + 1.0)
                return found

            q, k = partial(at, self.q[1], True), partial(at, self.k[1], False)
            self._begin({**self.data, **self._given(lambda index: size * q(index), k)})
            x = np.full((1,) * RANK, size)
            for each in self.key:
                x = x * np.sin(self.values.index(self._axis(each)) + 1.0)
            rows = [self._rows(each) for each in np.broadcast_arrays(self._at(exit.scores), x, allowed)]
            best = int(np.argmax(rows[2].sum(axis=0)))
            p, x = (each[rows[2][:, best], best] for each in rows[:2])
            low, high = int(np.argmin(x)), int(np.argmax(x))
            return float(np.log(p[high]) - np.log(p[low])), float(x[low]), float(x[high])

        with np.errstate(all="ignore"):
            difference, low, high = logits(1e-4)
            scale = difference / (high - low) if high > low else math.nan
            if not math.isfinite(scale) or scale <= 0:
                raise _Different("its weights do not grow with the products of queries and keys")
            width = math.prod(d.size for d in self.width)
            scale = next((each for each in (1.0, width**-0.5, 1 / width) if math.isclose(scale, each, rel_tol=1e-6)), float(f"{scale:.9g}"))
            difference, low, high = logits(1e-4 * REACH / (scale * (high - low)))
        return scale, _cap(difference, scale * low, scale * high)

    def _rows(self, x: np.ndarray) -> np.ndarray:
        """An array by keys and all the rest."""
        axes = self._axes(self.key)
        return np.moveaxis(x, axes, range(len(axes))).reshape(math.prod(x.shape[axis] for axis in axes), -1)

    # -- proof --------------------------------------------------------------------------------------------------------------

    def _assigned(self, mask: Mask, allowed: np.ndarray, over_keys: list[Exit], over_queries: list[Exit]) -> Attention:
        """The attention of these exits, compared with the formula in all its results."""
        self.allowed = allowed
        self._begin(self.data)
        output: Exit | None = None
        for exit in over_keys:
            if self._same(self._at(exit.result), self._output(self._at(exit.other))):
                output = exit
                break
        gradients: tuple[Exit | None, ...] = (None, None, None)
        rest = [exit for exit in (*over_keys, *over_queries) if exit is not output]
        backward: tuple[tuple[Var, Labels], ...] = ()
        v = output.other if output is not None else None
        if rest:
            gradients, backward = self._gradients(v, rest)
            v = v or backward[2]
        if v is None:
            raise _Different(self._random() or NOT_ITS_RESULT)
        value_width = tuple(d for d in flattened(v[1]) if d not in {*self.batch, *self.key})
        return Attention(
            self.region, self.batch, self.group, self.query, self.key, self.width, value_width, self.q, self.k, v, output, backward,
            gradients, mask, *self.known,
        )  # type: ignore[arg-type]  # fmt: skip

    def _softmax(self) -> tuple[np.ndarray, np.ndarray]:
        """The formula's probabilities, and the derivative of its logits."""
        scale, cap = self.known
        y = scale * self._sum(self._at(self.q) * self._at(self.k), self.width)
        slope = np.ones((1,) * RANK)
        if cap:
            y = cap * np.tanh(y / cap)
            slope = 1 - (y / cap) ** 2
        y, allowed = np.broadcast_arrays(y, self.allowed)
        e = np.where(allowed, np.exp(y - np.where(allowed, y, -np.inf).max(axis=self._axes(self.key), keepdims=True)), 0.0)
        return e / e.sum(axis=self._axes(self.key), keepdims=True), slope

    def _output(self, v: np.ndarray) -> np.ndarray:
        return self._sum(self._softmax()[0] * v, self.key)

    def _gradients(self, v: tuple[Var, Labels] | None, exits: list[Exit]) -> tuple[tuple[Exit | None, ...], tuple]:
        """The exits that are gradients of queries, keys and values; what the backward pass reads for them."""
        p, slope = self._softmax()
        scale = self.known[0]
        q, k = self._at(self.q), self._at(self.k)
        for mine, cotangent in self._cotangents(v, exits):
            values, do = self._at(mine), self._at(cotangent)
            width = tuple(d for d in flattened(mine[1]) if d not in {*self.batch, *self.key})
            dp = self._sum(values * do, width)
            ds = p * (dp - self._sum(p * dp, self.key)) * slope * scale
            expected = (self._sum(ds * k, self.key), self._sum(ds * q, self.others), self._sum(p * do, self.others))
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
        raise _Different(self._random() or (NOT_ITS_GRADIENT if is_backward else NOT_ITS_RESULT))

    def _own(self, exit: Exit) -> list[Dimension]:
        """The dimensions of an exit's result that its scores have not."""
        return [d for d in flattened(exit.result[1]) if d not in {*self.batch, *self.others, *self.key}]

    def _is(self, exit: Exit, expected: np.ndarray, width: Sequence[Dimension]) -> bool:
        """Whether an exit makes these values, with this width."""
        own = self._own(exit)
        if [d.size for d in own] != [d.size for d in width]:
            return False
        before = self.axis_of
        self.axis_of = {**before, **dict(zip(own, self._axes(width), strict=True))}
        try:
            return self._same(self._at(exit.result), expected)
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


def _cap(difference: float, low: float, high: float) -> float:
    """The cap ``c`` of logits with ``c tanh(high / c) - c tanh(low / c) = difference``, by bisection; 0.0 where nothing is capped."""
    if math.isclose(difference, high - low, rel_tol=1e-6):
        return 0.0
    least, most = 1e-3, 1e6
    for _ in range(200):
        cap = math.sqrt(least * most)
        least, most = (cap, most) if cap * (math.tanh(high / cap) - math.tanh(low / cap)) < difference else (least, cap)
    return float(f"{math.sqrt(least * most):.6g}")
