"""Values of a traced program at chosen places of its arrays, in float64, from made-up inputs.

A value is asked for at an index of each of its dimensions, as arrays that broadcast against each other, one axis of which runs through the
chosen places of one dimension of the computation. Rearrangements then only change indices; a sum or a product runs through the chosen
places of what it contracts, as if there were no others. So what a part of a program computes, and a formula that it is compared with, are
evaluated in a few thousand numbers, whatever the sizes of the arrays. Roundings to narrower types are left out.

What is not evaluated (arguments, products that are not asked for, and operations that have no line below) has made-up values: one for
each element, a function of its position alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal, Var

from autoshard.primitives import of_kind
from autoshard.recompute.flat import Atom
from autoshard.rewrite.scopes import dtype_of, shape_of
from autoshard.rewrite.wiring import Wiring
from autoshard.rules.exact_functions import EXACT, quotient

RANK = 30  # axes of the arrays of values; numpy has up to 64
MOST = 8  # places of a dimension that are looked at, where positions along it do not matter

Index = tuple[np.ndarray, ...]
Given = Callable[[Index], np.ndarray]


class Values:
    """Values of a program's variables.

    Args:
        wiring: of the program.
        products: the matrix products that are evaluated.
        samples: the chosen places of dimensions, by their sizes; a few of others.
        parts: the dimensions into which one of a variable is split somewhere, by variable and dimension.
        given: the values of some variables, in place of their own.
        numbers: those of variables whose values are made up, which depend on them; it takes new ones.
    """

    def __init__(
        self,
        wiring: Wiring,
        products: Collection[Var],
        samples: dict[int, np.ndarray],
        parts: Callable[[Any, int], Sequence[int]],
        given: Mapping[Var, Given],
        numbers: dict[Var, int],
    ):
        self._wiring, self._products, self._samples, self._parts, self._given = wiring, products, samples, parts, given
        self._axes: list[int] = []
        self.known: dict[tuple, tuple[Var, Index, np.ndarray]] = {}
        self.made_up: set[Var] = set()
        self._numbers = numbers

    def axis(self, size: int, used: Collection[int] = ()) -> int:
        """An axis of the chosen places of a dimension that is not among the used ones."""
        for axis, length in enumerate(self._axes):
            if length == size and axis not in used:
                return axis
        self._axes.append(size)
        if len(self._axes) > RANK:
            raise NotImplementedError("too many dimensions")
        return len(self._axes) - 1

    def places(self, size: int) -> np.ndarray:
        """The chosen places of a dimension."""
        if size not in self._samples:
            few = np.arange(size) if size <= MOST else np.unique(np.linspace(0, size - 1, 3).astype(np.int64))
            self._samples[size] = few
        return self._samples[size]

    def index(self, axis: int) -> np.ndarray:
        """The places along an axis, as an index."""
        places = self.places(self._axes[axis])
        return places.reshape([len(places) if each == axis else 1 for each in range(RANK)])

    def at(self, atom: Atom, index: Index) -> np.ndarray:
        """The values of a variable at these places, as an array that broadcasts to all of them."""
        if isinstance(atom, Literal):
            return np.asarray(_wide(np.asarray(atom.val))).reshape((1,) * RANK)
        key = (atom, *((x.shape, x.tobytes()) for x in index))
        if (found := self.known.get(key)) is None:
            with np.errstate(all="ignore"):
                found = self.known[key] = (atom, index, self._value(atom, index))
        return found[2]

    def _value(self, var: Var, index: Index) -> np.ndarray:
        if (given := self._given.get(var)) is not None:
            return given(index)
        wiring = self._wiring
        if (entry := wiring.entry.get(var)) is not None and entry.outer is not None:
            if entry.passing == "whole":
                return self.at(entry.outer, index)
            if entry.passing == "slice":
                assert entry.scope.eqn is not None
                return self.at(entry.outer, (_constant(min(1, entry.scope.eqn.params["length"] - 1)), *index))
        if (leaving := wiring.leaving.get(var)) is not None and leaving.passing != "carry":
            if leaving.passing == "whole":
                return self.at(leaving.inner, index)
            assert leaving.scope.eqn is not None
            if np.all(index[0] == min(1, leaving.scope.eqn.params["length"] - 1)):
                return self.at(leaving.inner, index[1:])
        home = wiring.home.get(var)
        if home is not None and var in home.constants:
            return _wide(np.asarray(home.constants[var]))[index] if index else _wide(np.asarray(home.constants[var])).reshape((1,) * RANK)
        eqn = wiring.maker.get(var)
        found = None if eqn is None else self._made(eqn, var, index)
        if found is None:
            self.made_up.add(var)
            kind = "f" if dtype_of(var).name == "bfloat16" else np.dtype(dtype_of(var)).kind
            return made_up(self._numbers.setdefault(var, len(self._numbers) + 2), shape_of(var), kind, index)
        return found

    def _made(self, eqn: JaxprEqn, var: Var, index: Index) -> np.ndarray | None:
        """The values of an equation's result; None where they are not evaluated."""
        name, params, operands = eqn.primitive.name, eqn.params, eqn.invars
        if name in IDENTITIES:
            return self.at(operands[eqn.outvars.index(var)], index)
        if name in ELEMENTWISE:
            read = [self.at(x, _narrowed(shape_of(x), index)) for x in operands]
            return np.asarray(ELEMENTWISE[name](dtype_of(var), params, *read))
        if name in MOVES:
            return self.at(operands[0], MOVES[name](params, shape_of(operands[0]), shape_of(var), index))
        if name in REDUCTIONS:
            return self._reduced(eqn, index)
        match name:
            case "iota":
                return index[params["dimension"]] + np.zeros((1,) * RANK, np.int64)
            case "dot_general" if var in self._products:
                return self._product(eqn, index)
            case "concatenate":
                return self._concatenated(eqn, index)
        return None

    def _reduced(self, eqn: JaxprEqn, index: Index) -> np.ndarray:
        (x,), axes = eqn.invars, eqn.params["axes"]
        rest = iter(index)
        own = {dim: self._along(x, dim, used) for used in [set(_used(index))] for dim in axes}
        whole = tuple(own[dim][0] if dim in own else next(rest) for dim in range(len(shape_of(x))))
        along = [axis for _, axes_of in own.values() for axis in axes_of]
        return REDUCTIONS[eqn.primitive.name](self._spread(self.at(x, whole), along), axis=tuple(along), keepdims=True)

    def _along(self, x: Any, dim: int, used: set[int]) -> tuple[np.ndarray, list[int]]:
        """An index of a whole dimension that runs along axes of its own; these are used then."""
        index, axes = _constant(0), []
        for size in self._parts(x, dim):
            axis = self.axis(size, used)
            used.add(axis)
            axes.append(axis)
            index = index * size + self.index(axis)
        return index, axes

    def _spread(self, x: np.ndarray, axes: Sequence[int]) -> np.ndarray:
        shape = list(x.shape)
        for axis in axes:
            shape[axis] = len(self.places(self._axes[axis]))
        return np.broadcast_to(x, shape)

    def _product(self, eqn: JaxprEqn, index: Index) -> np.ndarray:
        ((left, right), (left_batch, right_batch)), (a, b) = eqn.params["dimension_numbers"], eqn.invars
        used, along = set(_used(index)), list[int]()
        at: list[dict[int, np.ndarray]] = [dict(zip(left_batch, index, strict=False)), dict(zip(right_batch, index, strict=False))]
        for one, other in zip(left, right, strict=True):
            source = a if isinstance(a, Var) and len(self._parts(a, one)) >= len(self._parts(b, other)) else b
            found, axes = self._along(source, one if source is a else other, used)
            at[0][one] = at[1][other] = found
            along += axes
        rest = iter(index[len(left_batch) :])
        for known, x in zip(at, (a, b), strict=True):
            for dim in range(len(shape_of(x))):
                if dim not in known:
                    known[dim] = next(rest)
        one, other = (self.at(x, tuple(known[dim] for dim in range(len(shape_of(x))))) for known, x in zip(at, (a, b), strict=True))
        return self._spread(one * other, along).sum(axis=tuple(along), keepdims=True)

    def _concatenated(self, eqn: JaxprEqn, index: Index) -> np.ndarray:
        dim, start, found = eqn.params["dimension"], 0, None
        for x in eqn.invars:
            size = shape_of(x)[dim]
            inner = np.clip(index[dim] - start, 0, size - 1)
            part = self.at(x, (*index[:dim], inner, *index[dim + 1 :]))
            found = part if found is None else np.where(index[dim] >= start, part, found)
            start += size
        assert found is not None
        return found


def _narrowed(shape: Sequence[int], index: Index) -> Index:
    """The index of an operand that is broadcast where its dimensions are of size one."""
    return tuple(_constant(0) if size == 1 else at for size, at in zip(shape, index, strict=True)) if shape else ()


def _used(index: Index) -> list[int]:
    """The axes along which an index runs."""
    return [axis for axis in range(RANK) if any(x.shape[axis] != 1 for x in index)]


def _constant(value: int) -> np.ndarray:
    return np.full((1,) * RANK, value, np.int64)


def _wide(x: np.ndarray) -> np.ndarray:
    kind = x.dtype.kind
    return x if kind == "b" else x.astype(np.int64) if kind in "iu" else x.astype(np.float64)


def made_up(seed: int, shape: Sequence[int], kind: str, index: Index) -> np.ndarray:
    """Values that depend on the position of an element alone: numbers from -3 to 3, positive integers, or truth values."""
    place = np.zeros((1,) * RANK, np.uint64)
    for size, at in zip(shape, index, strict=True):
        place = place * np.uint64(size) + at.astype(np.uint64)
    mixed = place + np.uint64((seed * 0x9E3779B97F4A7C15) % 2**64)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):  # splitmix64 (Steele et al., OOPSLA 2014)
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    if kind == "f":
        return 3 * ((mixed >> np.uint64(11)).astype(np.float64) / 2**52 - 1)
    whole = (mixed >> np.uint64(40)).astype(np.int64)
    return whole % 4 != 0 if kind == "b" else whole


# -- operations ------------------------------------------------------------------------------------------------------------


def _divided(dtype: Any, params: dict, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Division; of integers one that rounds toward zero, as XLA's does."""
    if np.dtype(dtype).kind in "iu":
        return quotient(a, b)
    return a / b


def _converted(dtype: Any, params: dict, x: np.ndarray) -> np.ndarray:
    new = params["new_dtype"]
    kind = "f" if np.dtype(new).name == "bfloat16" else np.dtype(new).kind
    return x.astype({"b": np.bool_, "i": np.int64, "u": np.int64}.get(kind, np.float64))


def _selected(dtype: Any, params: dict, which: np.ndarray, *cases: np.ndarray) -> np.ndarray:
    found = cases[0]
    for k, case in enumerate(cases[1:], 1):
        found = np.where(which.astype(np.int64) == k, case, found)
    return found


def _plain(function: Callable) -> Callable:
    return lambda dtype, params, *operands: function(*operands)


ELEMENTWISE: dict[str, Callable] = {
    **{
        name: _plain(function)
        for name, function in {
            **EXACT,
            "add_any": np.add,
            "ceil": np.ceil,
            "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
            "cos": np.cos,
            "exp": np.exp,
            "expm1": np.expm1,
            "floor": np.floor,
            "is_finite": np.isfinite,
            "log": np.log,
            "log1p": np.log1p,
            "logistic": lambda x: 1 / (1 + np.exp(-x)),
            "one_minus_square": lambda x: 1 - x * x,
            "pow": lambda a, b: np.power(a.astype(np.float64), b),
            "rsqrt": lambda x: 1 / np.sqrt(x),
            "sin": np.sin,
            "sqrt": np.sqrt,
            "square": np.square,
            "tanh": np.tanh,
            "xor": np.bitwise_xor,
        }.items()
    },
    "convert_element_type": _converted,
    "div": _divided,
    "exp2": lambda dtype, params, x: np.exp2(x),
    "integer_pow": lambda dtype, params, x: np.asarray(x, np.float64) ** params["y"],
    "rem": lambda dtype, params, a, b: np.fmod(a, np.where(b == 0, 1, b)),
    "select_n": _selected,
}
"""Operations of elements, of a result of this type."""

IDENTITIES = frozenset({*of_kind("identity"), *of_kind("placement"), "reduce_precision"})
"""Operations whose results are their operands, roundings aside."""


def _broadcast(params: dict, operand: tuple, result: tuple, index: Index) -> Index:
    dims = params["broadcast_dimensions"]
    return tuple(index[to] if size == result[to] else _constant(0) for size, to in zip(operand, dims, strict=True))


def _transposed(params: dict, operand: tuple, result: tuple, index: Index) -> Index:
    found = dict(zip(params["permutation"], index, strict=True))
    return tuple(found[dim] for dim in range(len(operand)))


def _reshaped(params: dict, operand: tuple, result: tuple, index: Index) -> Index:
    """Indices of the operand; dimensions that stay keep theirs, so that an index runs along no more axes than it has to."""
    found, at, one, other = list[np.ndarray](), _constant(0), 0, 0
    while one < len(operand) or other < len(result):
        n = m = 1
        first, at = one, _constant(0)
        while one < len(operand) and operand[one] == 1 and (other >= len(result) or result[other] != 1):
            found.append(_constant(0))
            one += 1
            first = one
        if one >= len(operand):
            break
        n, one = operand[one], one + 1
        if other < len(result):
            m, at, other = result[other], index[other], other + 1
        while n != m:
            if n < m:
                n, one = n * operand[one], one + 1
            else:
                m, at, other = m * result[other], at * result[other] + index[other], other + 1
        for dim in range(first, one):
            below = int(np.prod(operand[dim + 1 : one], dtype=np.int64))
            found.append(at // below % operand[dim] if one - first > 1 else at)
    return tuple(found)


def _squeezed(params: dict, operand: tuple, result: tuple, index: Index) -> Index:
    gone, rest = {dim % len(operand) for dim in params["dimensions"]}, iter(index)
    return tuple(_constant(0) if dim in gone else next(rest) for dim in range(len(operand)))


def _expanded(params: dict, operand: tuple, result: tuple, index: Index) -> Index:
    new = {dim % len(result) for dim in params["dimensions"]}
    return tuple(at for dim, at in enumerate(index) if dim not in new)


def _sliced(params: dict, operand: tuple, result: tuple, index: Index) -> Index:
    strides = params["strides"] or (1,) * len(operand)
    return tuple(start + step * at for start, step, at in zip(params["start_indices"], strides, index, strict=True))


def _reversed(params: dict, operand: tuple, result: tuple, index: Index) -> Index:
    return tuple(operand[dim] - 1 - at if dim in params["dimensions"] else at for dim, at in enumerate(index))


MOVES: dict[str, Callable[[dict, tuple, tuple, Index], Index]] = {
    "broadcast_in_dim": _broadcast,
    "expand_dims": _expanded,
    "reshape": _reshaped,
    "rev": _reversed,
    "slice": _sliced,
    "squeeze": _squeezed,
    "transpose": _transposed,
}
"""Operations that move elements: the index in the operand of an index in the result."""

REDUCTIONS: dict[str, Callable] = {
    "reduce_and": np.all,
    "reduce_max": np.max,
    "reduce_min": np.min,
    "reduce_or": np.any,
    "reduce_sum": np.sum,
}
