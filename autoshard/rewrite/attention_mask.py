"""What the formula of attention leaves open, read from the values of a program: its mask, the scale of its scores and their cap."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Var

from autoshard.primitives import primitive
from autoshard.rewrite.attention_region import Exit, Region
from autoshard.rewrite.dimensions import Dimension, Labels, all_resolved
from autoshard.rewrite.scopes import dtype_of, shape_of
from autoshard.rewrite.values import RANK, Given, Index, Values, made_up
from autoshard.rewrite.wiring import Wiring

UNSEEN = 1e-12  # of the largest weight: what a key has that a mask leaves out
REACH = 600  # difference of logits up to which caps are looked for, and of which exponentials are numbers in float64
MOST_MAKERS = 200  # operations that are looked through for random numbers


class Different(Exception):
    """Why a region is not attention."""


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


@dataclass(eq=False)
class Reading:
    """Values of one region of scores.

    Attributes:
        wiring: of the program.
        region: the scores.
        literals: integers of the program, as lengths of windows.
        products: the matrix products that are evaluated.
        numbers: those of variables whose values are made up.
        values, axis_of: the values so far, and the axis of each dimension.
        q, k: queries and keys, with labels.
        batch, key, others, width: dimensions of queries and keys, of keys, of queries, and that their products contract.
        query, group: of queries' own dimensions, those of positions, and the others.
        data: on which the mask depends, as given.
    """

    wiring: Wiring
    region: Region
    literals: Sequence[int]
    products: Collection[Var]
    numbers: dict[Var, int]
    values: Values = field(init=False)
    axis_of: dict[Dimension, int] = field(default_factory=dict)
    q: tuple[Any, Labels] = field(init=False)
    k: tuple[Any, Labels] = field(init=False)
    batch: tuple[Dimension, ...] = ()
    key: tuple[Dimension, ...] = ()
    others: tuple[Dimension, ...] = ()
    query: tuple[Dimension, ...] = ()
    group: tuple[Dimension, ...] = ()
    width: tuple[Dimension, ...] = ()
    data: dict[Var, Given] = field(default_factory=dict)

    # -- evaluation ---------------------------------------------------------------------------------------------------------

    def begin(self, given: Mapping[Var, Given], samples: dict[int, np.ndarray] | None = None) -> None:
        """Values from the beginning, of some variables as given, and at the chosen places of dimensions by their sizes."""
        sizes = {d.size for d in (*self.key, *self.others)}
        chosen = samples or {size: self._positions(size, max(sizes)) for size in sizes if size > 1}
        self.values = Values(self.wiring, self.products, chosen, self.region.parts, given, self.numbers)
        self.axis_of = {}
        if samples is None:
            self.axes((*self.batch, *self.others, *self.key, *self.width))  # the same ones each time

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

    def axis(self, each: Dimension) -> int:
        """The axis of an elementary dimension."""
        if each not in self.axis_of:
            self.axis_of[each] = self.values.axis(each.size, set(self.axis_of.values()))
        return self.axis_of[each]

    def axes(self, dimensions: Sequence[Dimension]) -> tuple[int, ...]:
        return tuple(self.axis(each) for each in dimensions)

    def index(self, labels: Labels) -> Index:
        found = []
        for label in all_resolved(labels):
            at = np.zeros((1,) * RANK, np.int64)
            for each in label:
                at = at * each.size + self.values.index(self.axis(each))
            found.append(at)
        return tuple(found)

    def at(self, one: tuple[Var, Labels]) -> np.ndarray:
        return self.values.at(one[0], self.index(one[1])).astype(np.float64)

    def sum(self, x: np.ndarray, dimensions: Sequence[Dimension]) -> np.ndarray:
        axes = self.axes(dimensions)
        shape = list(x.shape)
        for each, axis in zip(dimensions, axes, strict=True):
            shape[axis] = len(self.values.places(each.size))
        return np.broadcast_to(x, shape).sum(axis=axes, keepdims=True)

    # -- what the formula leaves open ---------------------------------------------------------------------------------------

    def probabilities(self) -> Exit:
        """The exit whose scores are probabilities: equal ones where all products of queries and keys are zero."""
        self.begin(self._silent())
        biased = False
        for exit in self.region.exits:
            p = self.at(exit.scores)
            if not np.all(np.isfinite(p)) or p.min() < 0 or not p.max() > 0:
                continue
            largest = np.broadcast_to(p, self._whole(p)).max(axis=self.axes(self.key), keepdims=True)
            if np.all((p < UNSEEN * largest) | (np.abs(p - largest) <= 1e-9 * largest)):
                return exit
            biased = True
        raise Different(self.random() or ("it adds a bias to its scores" if biased else "its weights are not a softmax of its scores"))

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
        for each, axis in zip(self.key, self.axes(self.key), strict=True):
            shape[axis] = len(self.values.places(each.size))
        return tuple(shape)

    def random(self) -> str:
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
        self.begin({**self._silent(), **given})
        p = self.at(exit.scores)
        p = np.broadcast_to(p, self._whole(p))
        return p > UNSEEN * p.max(axis=self.axes(self.key), keepdims=True)

    def mask(self, exit: Exit) -> tuple[Mask, np.ndarray, dict[Var, Given]]:
        """The mask, which keys it allows at the places looked at, and the data on which that depends there."""
        allowed = self._allowed(exit, {})
        depends = tuple(d for d in self.others if allowed.shape[self.axis(d)] != 1)
        self.query = depends or (max(self.others, key=lambda d: d.size),)
        self.group = tuple(d for d in self.others if d not in self.query)
        if not self.values.made_up:
            alike = all(allowed.shape[axis] == 1 for axis in self.axes(self.batch))
            interval = self._interval(allowed, np.ones((1,) * RANK, bool)) if alike else None
            if interval is not None and bool(allowed.any(axis=self.axes(self.key)).all()):
                return Mask(*interval), allowed, {}
        if reason := self.random():
            raise Different(reason)
        for given, segments, valid in self._hypotheses():
            allowed = self._allowed(exit, given)
            if self.values.made_up:  # it depends on more
                continue
            if segments is not None:
                data = self.at(segments[0]) == self.at(segments[1])
            else:
                assert valid is not None
                data = (self.at(valid[:2]) != 0) == valid[2]
            interval = self._interval(allowed, data) if data.any() and not data.all() else None
            if interval is not None and (valid is None or interval == (None, None)):
                return Mask(*interval, segments, valid), allowed, given
        raise Different("its mask is none of causal, local windows and segments")

    def _hypotheses(self) -> Iterator[tuple[dict[Var, Given], Any, Any]]:
        """Data on which the mask may depend beside positions, as given: segments, or which keys there are."""
        found = [self._of_positions(*each) for each in list(self.values.known.values())]
        queries = [each for each in found if each is not None and each[0] == "query"]
        keys = [each for each in found if each is not None and each[0] == "key"]
        for _, u, one, kind in queries:
            for _, w, other, same in keys:
                if kind == same and kind in "iu" and self.wiring.source(u) is self.wiring.source(w):  # so that each query sees itself
                    yield {u: partial(self._diverse, u), w: partial(self._diverse, w)}, ((u, one), (w, other)), None
        for _, w, other, _ in keys:
            for nonzero in (True, False):
                yield {w: partial(self._diverse, w)}, None, (w, other, nonzero)

    def _diverse(self, var: Var, index: Index) -> np.ndarray:
        """Made-up integers that are small or among those of the program, by their position; truth values of other types."""
        pool = np.array([0, 1, 2, 3, -1, *(n + d for n in self.literals for d in (0, 1))])
        made = made_up(self.numbers.setdefault(var, len(self.numbers) + 2), shape_of(var), "i", index)
        return made % 3 != 0 if np.dtype(dtype_of(var)).kind == "b" else pool[made % len(pool)]

    def _of_positions(self, var: Var, index: Index, value: np.ndarray) -> tuple | None:
        """A variable that has one value for each query or each key, with its labels; None where it has others."""
        sides = {"query": self.query, "key": self.key}
        used = {axis for axis in range(RANK) if value.shape[axis] != 1}
        name = next((name for name, mine in sides.items() if not used.isdisjoint(self.axes(mine))), "")
        axes = {self.axis(each): each for each in (*self.batch, *sides.get(name, ()))}
        if not name or not used <= set(axes) or value.dtype.kind == "f":
            return None
        labels = []
        for size, at in zip(shape_of(var), index, strict=True):
            along = [axis for axis in range(RANK) if at.shape[axis] != 1]
            if len(along) > 1 or (along and (along[0] not in axes or axes[along[0]].size != size)) or (not along and size != 1):
                return None
            if along and not np.array_equal(at, self.values.index(along[0])):
                return None
            labels.append((axes[along[0]],) if along else ())
        return name, var, tuple(labels), value.dtype.kind

    def _interval(self, allowed: np.ndarray, data: np.ndarray) -> tuple[int | None, int | None] | None:
        """The least and the largest distance of a query from a key that it sees, None without a bound; None where it is no interval."""
        if not self.query:
            one, other = np.broadcast_arrays(allowed, data)
            return (None, None) if np.array_equal(one, other) else None
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
            at = at * each.size + self.values.index(self.axis(each))
        return at

    def scale(self, exit: Exit, allowed: np.ndarray) -> tuple[float, float]:
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
            self.begin({**self.data, **self._given(lambda index: size * q(index), k)})
            x = np.full((1,) * RANK, size)
            for each in self.key:
                x = x * np.sin(self.values.index(self.axis(each)) + 1.0)
            rows = [self._rows(each) for each in np.broadcast_arrays(self.at(exit.scores), x, allowed)]
            best = int(np.argmax(rows[2].sum(axis=0)))
            p, x = (each[rows[2][:, best], best] for each in rows[:2])
            low, high = int(np.argmin(x)), int(np.argmax(x))
            return float(np.log(p[high]) - np.log(p[low])), float(x[low]), float(x[high])

        with np.errstate(all="ignore"):
            difference, low, high = logits(1e-4)
            scale = difference / (high - low) if high > low else math.nan
            if not math.isfinite(scale) or scale <= 0:
                raise Different("its weights do not grow with the products of queries and keys")
            width = math.prod(d.size for d in self.width)
            scale = next((each for each in (1.0, width**-0.5, 1 / width) if math.isclose(scale, each, rel_tol=1e-6)), float(f"{scale:.9g}"))
            difference, low, high = logits(1e-4 * REACH / (scale * (high - low)))
        return scale, _cap(difference, scale * low, scale * high)

    def _rows(self, x: np.ndarray) -> np.ndarray:
        """An array by keys and all the rest."""
        axes = self.axes(self.key)
        return np.moveaxis(x, axes, range(len(axes))).reshape(math.prod(x.shape[axis] for axis in axes), -1)


def _cap(difference: float, low: float, high: float) -> float:
    """The cap ``c`` of logits with ``c tanh(high / c) - c tanh(low / c) = difference``, by bisection; 0.0 where nothing is capped."""
    if math.isclose(difference, high - low, rel_tol=1e-6):
        return 0.0
    least, most = 1e-3, 1e6
    for _ in range(200):
        cap = math.sqrt(least * most)
        least, most = (cap, most) if cap * (math.tanh(high / cap) - math.tanh(low / cap)) < difference else (least, cap)
    return float(f"{math.sqrt(least * most):.6g}")
