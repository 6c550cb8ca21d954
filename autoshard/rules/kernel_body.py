"""A walk through a kernel's body with the integers that follow from the positions of its programs, for all programs of the grid at once.

An integer is an array with a dimension for each grid axis, of size 1 where it does not vary along the axis. What else a body computes is
not known; of that it matters which positions it was computed from. The walk finds three things: what the body does with positions, the work
of a program on average, and whether memory that programs share is overwritten before it is read.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal, jaxprs_in_params

from autoshard.ir.scan import num_consts
from autoshard.primitives import primitive
from autoshard.rules.avals import aval_of
from autoshard.rules.exact_functions import EXACT, quotient

LARGEST = 1 << 21  # elements of an integer over the grid: larger ones are not known


@dataclass(frozen=True, slots=True)
class Memory:
    """A reference to memory: that of an operand which programs have whole, as prefetched scalars, or that which they share.

    Attributes:
        number: of the kernel's argument.
        prefetched: whether it is of an operand.
    """

    number: int
    prefetched: bool


Known = np.ndarray | Memory | frozenset[Any]
"""An integer of each program, a reference, or the grid axes from whose positions something else was computed: ``~axis`` where it was looked
up there in prefetched scalars."""

NOTHING: frozenset[int] = frozenset()

Sizes = tuple[int, int, int]
"""Those of a matrix product: rows, columns, and what is contracted."""


@dataclass(slots=True)
class Walk:
    """What a walk found.

    Attributes:
        positions: by number of the kernel's own axes, the positions that are walked; those of the others are not known.
        used: the integers that vary, and on which something that is not an integer depends.
        read: by operand that programs have whole, the positions at which numbers are read: an integer, or None, for each dimension.
        products: floating point operations of matrix products in a program, on average over those that are walked, by the sizes of the
            operands: rows, columns, and what is contracted.
        vector_flops: those of everything else.
        values: by operand that programs have whole its integers, where they are known; those that are looked up are then integers, too.
        sure: whether it is known how often what is walked now runs.
        guessed: how what is not known of the work counts, in words.
        written: the arguments that are overwritten before they are read, by all programs that are walked.
        carried: the arguments that a program may read before it overwrites them.
    """

    positions: Mapping[int, np.ndarray]
    values: Mapping[int, np.ndarray] = field(default_factory=dict)
    used: list[np.ndarray] = field(default_factory=list)
    read: defaultdict[int, list[tuple[np.ndarray | None, ...]]] = field(default_factory=lambda: defaultdict(list))
    products: Counter[Sizes] = field(default_factory=Counter)
    vector_flops: float = 0.0
    guessed: set[str] = field(default_factory=set)
    sure: bool = True
    written: set[int] = field(default_factory=set)
    carried: set[int] = field(default_factory=set)

    @property
    def matrix_flops(self) -> float:
        """Floating point operations of all matrix products in a program."""
        return sum(self.products.values())

    def run(self, body: Jaxpr, operands: Sequence[Known], times: np.ndarray, consts: Sequence[Known] = ()) -> list[Known]:
        """The results of a body that each program runs so often."""
        known: dict[Any, Known] = dict(zip(body.constvars, consts, strict=False)) | dict(zip(body.invars, operands, strict=True))

        def value(atom: Any) -> Known:
            if not isinstance(atom, Literal):
                return known.get(atom, NOTHING)
            found = np.asarray(atom.val)
            return found if found.dtype.kind in "iub" and not found.ndim else NOTHING

        for eqn in body.eqns:
            made = self._equation(eqn, [value(atom) for atom in eqn.invars], times, body)
            known.update(zip(eqn.outvars, made, strict=True))
        return [value(atom) for atom in body.outvars]

    def _equation(self, eqn: JaxprEqn, operands: list[Known], times: np.ndarray, body: Jaxpr) -> Sequence[Known]:
        name = eqn.primitive.name
        inner = [] if name == "pallas_call" else [*jaxprs_in_params(eqn.params)]
        if name == "program_id":
            return [self.positions.get(eqn.params["axis"], NOTHING)]
        if (made := _integer(eqn, operands)) is not None:
            return [made]
        if name == "cond":
            return self._branch(inner, operands, times)
        if name == "scan":
            return self._scan(eqn, inner[0], operands, times)
        if name == "while":
            return self._while(eqn, operands, times)
        if len(inner) == 1 and len(inner[0].invars) == len(operands):
            return self.run(inner[0], operands, times)
        if len(inner) == 1 and len(inner[0].constvars) == len(operands):  # with memory of its own, as run_scoped
            made = self.run(inner[0], [NOTHING] * len(inner[0].invars), times, operands)
            return made if len(made) == len(eqn.outvars) else [self._use(made)] * len(eqn.outvars)
        for each in inner:
            self._unsure(each, [NOTHING] * len(each.invars), times)
        self._count(eqn, times)
        looked_up = self._touch(eqn, operands, times, body)
        return [self._use(operands) if looked_up is None else looked_up] * len(eqn.outvars)

    def _unsure(self, body: Jaxpr, operands: Sequence[Known], times: np.ndarray) -> list[Known]:
        """The results of a body of which it is not known how often it runs."""
        before, self.sure = self.sure, False
        made = self.run(body, operands, times)
        self.sure = before
        return made

    def _branch(self, branches: Sequence[Jaxpr], operands: Sequence[Known], times: np.ndarray) -> Sequence[Known]:
        which, rest = operands[0], operands[1:]
        results: list[Sequence[Known]] = []
        if isinstance(which, np.ndarray):
            self._use([which])
            for number, each in enumerate(branches):
                taken = times * (np.clip(which, 0, len(branches) - 1) == number)
                if taken.any():
                    results.append(self.run(each, rest, taken))
            return results[0] if len(results) == 1 else [self._use([x for some in results for x in some])] * len(branches[0].outvars)
        before, counts = (self.products, self.vector_flops), list[tuple[float, float, Counter[Sizes]]]()
        for each in branches:
            self.products, self.vector_flops = Counter(), 0.0
            results.append(self._unsure(each, rest, times))
            counts.append((self.matrix_flops, self.vector_flops, self.products))
        _, vector, products = max(counts, key=lambda count: count[:2])
        self.products, self.vector_flops = before[0] + products, before[1] + vector
        if max(count[0] for count in counts) > min(count[0] for count in counts):
            self.guessed.add("a branch that depends on data counts as taken")
        return [self._use([x for some in results for x in some])] * len(branches[0].outvars)

    def _scan(self, eqn: JaxprEqn, body: Jaxpr, operands: Sequence[Known], times: np.ndarray) -> Sequence[Known]:
        n = num_consts(eqn.params)
        found = self._use(operands[n:])
        if eqn.params["length"]:
            self.run(body, [*operands[:n], *[found] * (len(operands) - n)], times * eqn.params["length"])
        return [found] * len(eqn.outvars)

    def _while(self, eqn: JaxprEqn, operands: Sequence[Known], times: np.ndarray) -> Sequence[Known]:
        """A loop; the trips of one that counts up to an integer are known."""
        n_cond, n_body = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
        condition, body = eqn.params["cond_jaxpr"].jaxpr, eqn.params["body_jaxpr"].jaxpr
        start = operands[n_cond + n_body :]
        same = [made is read for made, read in zip(body.outvars, body.invars[n_body:], strict=True)]
        found = self._use([x for x, kept in zip(start, same, strict=True) if not kept])
        carry = [x if kept else found for x, kept in zip(start, same, strict=True)]
        trips = _trips(condition, body, n_cond, n_body, [*operands[:n_cond], *start])
        inside = [*operands[n_cond : n_cond + n_body], *carry]
        if trips is None:
            self.guessed.add("a loop whose length is not known counts once")
            self._unsure(condition, [*operands[:n_cond], *carry], times)
            self._unsure(body, inside, times)
        elif trips.any():
            self._use([trips])
            self.run(body, inside, times * trips)
        return carry

    def _use(self, operands: Sequence[Known]) -> frozenset[int]:
        """The axes on whose positions something depends that is computed from these and is no integer."""
        axes = set[int]()
        for each in operands:
            if isinstance(each, np.ndarray) and (varying := varying_axes(each)):
                self.used.append(each)
                axes |= varying
            elif isinstance(each, frozenset):
                axes |= each
        return frozenset(axes)

    def _touch(self, eqn: JaxprEqn, operands: Sequence[Known], times: np.ndarray, body: Jaxpr) -> Known | None:
        """Notes what an equation does with memory; the scalar that it looks up, or the axes from whose positions it does, or None."""
        name = eqn.primitive.name
        for place, memory in enumerate(operands):
            if not isinstance(memory, Memory):
                continue
            if memory.prefetched:
                position = _position(eqn, operands) if name == "get" else ()
                self.read[memory.number].append(position)
                if position and memory.number in self.values and all(x is not None for x in position):
                    values = self.values[memory.number]
                    return values[tuple(np.clip(x, 0, size - 1) for x, size in zip(position, values.shape, strict=True))]  # type: ignore
                if position:
                    known = (~axis for x in position if x is not None for axis in varying_axes(x))
                    return frozenset(known).union(*(x for x in operands if isinstance(x, frozenset)))
            elif name == "swap" and place == 0 and not _is_read(eqn.outvars[0], body):
                if self.sure and _is_whole(eqn) and (times > 0).all():
                    self.written.add(memory.number)
            elif memory.number not in self.written:
                self.carried.add(memory.number)
        return None

    def _count(self, eqn: JaxprEqn, times: np.ndarray) -> None:
        """Adds the work of an equation."""
        matrix, vector = flops_of(eqn)
        average = float(np.mean(times)) if matrix or vector else 0.0
        self.vector_flops += average * vector
        if matrix:
            self.products[product_sizes(eqn)] += average * matrix  # type: ignore[assignment]  # counters are declared to count


def varying_axes(integer: np.ndarray) -> frozenset[int]:
    """The axes along which an integer varies."""
    some = (axis for axis, size in enumerate(integer.shape) if size > 1)
    return frozenset(axis for axis in some if (integer != np.take(integer, [0], axis)).any())


def _trips(condition: Jaxpr, body: Jaxpr, n_cond: int, n_body: int, operands: Sequence[Known]) -> np.ndarray | None:
    """How often a loop runs that adds a literal to its counter while that is less than an integer; None of another."""
    if len(condition.eqns) != 1 or condition.eqns[0].primitive.name != "lt" or condition.outvars != condition.eqns[0].outvars:
        return None
    counter, bound = condition.eqns[0].invars
    known = dict(zip(condition.invars, operands, strict=True))
    carried = [*condition.invars[n_cond:]]
    if isinstance(counter, Literal) or counter not in carried or (not isinstance(bound, Literal) and bound not in known):
        return None
    at = carried.index(counter)
    steps = [
        atom.val
        for eqn in body.eqns
        if eqn.primitive.name == "add" and body.outvars[at] in eqn.outvars and body.invars[n_body + at] in eqn.invars
        for atom in eqn.invars
        if isinstance(atom, Literal)
    ]
    if not isinstance(bound, Literal) and bound in carried:
        place = carried.index(bound)
        if body.outvars[place] is not body.invars[n_body + place]:
            return None
    first, last = known[counter], np.asarray(bound.val) if isinstance(bound, Literal) else known[bound]
    if len(steps) != 1 or steps[0] <= 0 or not isinstance(first, np.ndarray) or not isinstance(last, np.ndarray):
        return None
    return np.maximum(0, -((first.astype(np.int64) - last) // steps[0]))


def _position(eqn: JaxprEqn, operands: Sequence[Known]) -> tuple[np.ndarray | None, ...]:
    """Where scalars are read, by dimension; empty for what is no single scalar."""
    if aval_of(eqn.outvars[0]).shape:
        return ()
    indexers = jax.tree.unflatten(eqn.params["tree"], operands[1:])
    if len(indexers) != 1 or not hasattr(indexers[0], "indices"):
        return ()
    found = [np.asarray(x) if isinstance(x, int | np.integer) else x for x in indexers[0].indices]
    return tuple(x if isinstance(x, np.ndarray) else None for x in found)


def _is_read(variable: Any, body: Jaxpr) -> bool:
    return any(variable is atom for eqn in body.eqns for atom in eqn.invars) or any(variable is atom for atom in body.outvars)


def _is_whole(eqn: JaxprEqn) -> bool:
    """Whether a store overwrites everything: as many elements, at no array of positions."""
    memory, stored, *positions = map(aval_of, eqn.invars)
    return memory.shape == stored.shape and not any(each.shape for each in positions)


# -- integers --------------------------------------------------------------------------------------------------------------


def _integer(eqn: JaxprEqn, operands: Sequence[Known]) -> np.ndarray | None:
    """The integer that an equation computes from integers; None of another one."""
    if (found := _decided(eqn, operands)) is not None:
        return found
    function = _INTEGER.get(eqn.primitive.name)
    if function is None or len(eqn.outvars) != 1 or not all(isinstance(x, np.ndarray) for x in operands):
        return None
    aval = aval_of(eqn.outvars[0])
    if aval.shape or aval.dtype.kind not in "iub" or math.prod(np.broadcast_shapes(*(x.shape for x in operands))) > LARGEST:  # type: ignore
        return None
    return np.asarray(function(*operands)).astype(aval.dtype)


def _decided(eqn: JaxprEqn, operands: Sequence[Known]) -> np.ndarray | None:
    """What one boolean decides whatever the other one is."""
    decisive = {"or": True, "and": False}.get(eqn.primitive.name)
    if decisive is not None and aval_of(eqn.outvars[0]).dtype == np.bool_:
        return next((x for x in operands if isinstance(x, np.ndarray) and (x == decisive).all()), None)
    return None


_INTEGER: Mapping[str, Callable[..., Any]] = {
    **EXACT,
    "clamp": lambda low, x, high: np.minimum(np.maximum(x, low), high),
    "convert_element_type": lambda x: x,
    "copy": lambda x: x,
    "div": quotient,
    "rem": lambda a, b: a - b * quotient(a, b),
    "select_n": lambda which, *cases: np.choose(np.asarray(which, int), cases),
    "shift_left": np.left_shift,
    "shift_right_arithmetic": np.right_shift,
    "xor": np.bitwise_xor,
}
"""Operations on integers and booleans."""


# -- work ------------------------------------------------------------------------------------------------------------------


def flops_of(eqn: JaxprEqn) -> tuple[float, float]:
    """Floating point operations of matrix products, and of everything else, in one run of an equation."""
    name, kind = eqn.primitive.name, primitive(eqn.primitive.name).kind
    if name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * _elements(eqn.outvars) * math.prod(_shape(eqn.invars[0])[dim] for dim in contracted), 0.0
    if kind in ("elementwise", "reduction"):
        return 0.0, float(_elements(eqn.outvars if kind == "elementwise" else eqn.invars))
    return 0.0, 0.0


def product_sizes(eqn: JaxprEqn) -> Sizes:
    """Rows, columns and contracted elements of one of a product's matrices."""
    (contracted, batch), (one, other) = eqn.params["dimension_numbers"], map(_shape, eqn.invars)
    k, batches = (math.prod(one[dim] for dim in dims[0]) for dims in (contracted, batch))
    return math.prod(one) // max(k * batches, 1), math.prod(other) // max(k * batches, 1), k


def _elements(variables: Collection[Any]) -> int:
    return math.prod(_shape(next(iter(variables))))


def _shape(variable: Any) -> tuple[int, ...]:
    return getattr(variable.aval, "shape", ())
