"""What values were computed from, as far as it can be read off the operations that make them: constants, positions, counts of keys.

Only what is certain is found: where an operation is not known, there is no answer.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from autoshard.ir import Graph, Op
from autoshard.ir.scan import num_carry, num_consts
from autoshard.microbatch.positions import Positions
from autoshard.microbatch.searching import search_of
from autoshard.primitives import linear
from autoshard.trace.structure import inputs_of

Number = int | float | bool

_SAME = frozenset({"copy", "name", "optimization_barrier", "pvary", "stop_gradient"})
"""Primitives whose results are their operands."""
_FOLDED: Mapping[str, Callable[..., Number]] = {
    "eq": operator.eq,
    "lt": operator.lt,
    "ne": operator.ne,
    "select_n": lambda which, *cases: cases[int(which)],
    "sign": lambda x: (x > 0) - (x < 0),
}
"""Functions of numbers, as far as indices are computed with them."""
_POSITIONS = frozenset({"argmax", "argmin", "iota"})
"""Primitives whose results are positions, and so not negative."""
_COUNTING = 2**24  # float32 counts so far without rounding


@dataclass(frozen=True, slots=True)
class _Below:
    """How many keys are below 0, 1, 2, ..., plus an offset; ``is_clipped``: the first is 0, however many are."""

    keys: int
    offset: int
    is_clipped: bool


class Provenance:
    """The makers of a program's values, and what these say of them.

    A body's inputs are followed to what the operation is called with. What a loop carries is not followed; a slice of what another loop has
    stacked up is followed to the value that this one stacks in the same trip.
    """

    def __init__(self, graph: Graph):
        self.graph = graph
        self.makers: dict[int, tuple[Op, int]] = {}
        self.outer: dict[int, int] = {}
        self.written = dict(zip(graph.literals, graph.written, strict=True))
        for op in graph.walk():
            self.makers.update((value, (op, k)) for k, value in enumerate(op.results))
            self.outer.update(_entering(op))
        self.reordered: dict[int, int] = {}  # per value that has the rows of another one in another order, that one; found by others
        scans = [(op.bodies[0].inputs, num_consts(op.params) + num_carry(op.params)) for op in graph.walk() if op.primitive == "scan"]
        self._slices = {value for inputs, first in scans for value in inputs[first:]}

    def maker(self, value: int) -> tuple[Op | None, int]:
        """The op that makes a value, through the inputs and the stacks of bodies, and which of its results it is; None for others."""
        depth = 0  # of slices taken of stacks
        while True:
            if value in self.outer:
                depth += value in self._slices
                value = self.outer[value]
                continue
            op, k = self.makers.get(value, (None, 0))
            if op is not None and op.primitive == "scan" and depth and k >= num_carry(op.params):
                value, depth = op.bodies[0].outputs[k], depth - 1
            elif depth:
                return None, 0
            elif op is not None and op.primitive == "remat2":
                value = op.bodies[0].outputs[k]
            else:
                return op, k

    def reached(self, value: int) -> int:
        """The number of a value in the body or program that makes it."""
        op, k = self.maker(value)
        return self._root(value) if op is None else op.results[k]

    def _root(self, value: int) -> int:
        while value in self.outer and value not in self._slices:
            value = self.outer[value]
        return value

    # -- constants and positions --------------------------------------------------------------------------------------------

    def number(self, value: int) -> Number | None:
        """The number that all elements are; None where they are not known to be one."""
        value = self._root(value)
        if value in self.written:
            found = np.asarray(self.written[value])
            if found.dtype.kind == "V" and jnp.issubdtype(found.dtype, jnp.number):  # such as bfloat16, which NumPy does not know
                found = found.astype(np.float32)
            first = found.reshape(-1)[:1]
            return first.item() if found.dtype.kind in "biuf" and found.size and np.all(found == first) else None
        op, _ = self.maker(value)
        if op is None or not op.operands or op.bodies:
            return None
        if op.primitive in ("broadcast_in_dim", "convert_element_type", *_SAME) or linear(op.primitive) in ("carries", "regroups"):
            found = self.number(op.operands[0])
            whole = self.graph.values[op.results[0]].dtype.startswith(("int", "uint"))
            return math.trunc(found) if found is not None and whole and math.isfinite(found) else found
        if op.primitive in _FOLDED:
            numbers = [self.number(operand) for operand in op.operands]
            return None if None in numbers else _FOLDED[op.primitive](*numbers)
        return None

    def positions(self, value: int) -> Positions | None:
        """The dimension along which elements are positions; None where they are not known to be."""
        op, _ = self.maker(value)
        if op is None or op.bodies:
            return None
        values, (made, *_) = self.graph.values, op.results
        match op.primitive:
            case "iota":
                return Positions(op.params["dimension"], 0)
            case "add" | "sub":
                one, other = op.operands
                found, number = self.positions(one), self.number(other)
                if found is None and op.primitive == "add":
                    found, number = self.positions(other), self.number(one)
                if found is None or number is None:
                    return None
                return replace(found, offset=found.offset + int(number) * (1 if op.primitive == "add" else -1))
            case "select_n" if self._is_wrapped(op):
                return self.positions(op.operands[1])
            case "broadcast_in_dim":
                found = self.positions(op.operands[0])
                return found and replace(found, dim=op.params["broadcast_dimensions"][found.dim])
            case "reshape" | "squeeze" | "expand_dims" | "convert_element_type":
                found, before, after = self.positions(op.operands[0]), values[op.operands[0]], values[made]
                if found is None or not after.dtype.startswith(("int", "uint")):
                    return None
                return found.reshaped(before.shape, after.shape)
        return self.positions(op.operands[0]) if op.primitive in _SAME else None

    # -- keys ---------------------------------------------------------------------------------------------------------------

    def keys(self, value: int) -> int:
        """The value that has the same whole numbers in another shape, type or order, as far back as there is one."""
        while True:
            op, k = self.maker(value)
            if op is None:
                return self._root(value)
            if op.results[k] in self.reordered:
                value = self.reordered[op.results[k]]
                continue
            if not (op.primitive in (*_SAME, "sort") or self._reshapes(op) or self._keeps_integers(op)):
                return op.results[k]
            value = op.operands[k if op.primitive in ("optimization_barrier", "sort") else 0]

    def _reshapes(self, op: Op) -> bool:
        """Whether an op has the elements of its operand, each once and in order."""
        if op.primitive not in ("reshape", "squeeze", "expand_dims", "broadcast_in_dim"):
            return False
        return self.graph.values[op.operands[0]].size == self.graph.values[op.results[0]].size

    def _keeps_integers(self, op: Op) -> bool:
        if op.primitive != "convert_element_type":
            return False
        read, made = (self.graph.values[value] for value in (op.operands[0], op.results[0]))
        if not (read.dtype.startswith(("int", "uint")) and made.dtype.startswith(("int", "uint"))):
            return False
        same_sign = read.dtype.startswith("u") == made.dtype.startswith("u")
        return made.itemsize >= read.itemsize and (same_sign or made.itemsize > read.itemsize or self.is_natural(op.operands[0]))

    def is_natural(self, value: int) -> bool:
        """Whether whole numbers are known not to be negative."""
        if self.graph.values[value].dtype.startswith("uint"):
            return True
        if (number := self.number(value)) is not None:
            return number >= 0
        op, k = self.maker(value)
        if op is None or op.bodies:
            return False
        name, read = op.primitive, op.operands
        if name in _POSITIONS or (name == "top_k" and k == 1):
            return True
        if name == "max":
            return any(map(self.is_natural, read))
        if name in ("min", "add", "mul"):
            return all(map(self.is_natural, read))
        if name == "clamp":
            return self.is_natural(read[0])
        if name == "rem":
            return self.is_natural(read[0])
        if name == "select_n":
            return self._is_wrapped(op) or all(map(self.is_natural, read[1:])) or self._is_modulus(op)
        if name in ("sort", "concatenate"):
            return self.is_natural(read[k]) if name == "sort" else all(map(self.is_natural, read))
        passes = name in _SAME or name in ("broadcast_in_dim", "gather", "slice", "dynamic_slice", "convert_element_type")
        integers = read and self.graph.values[read[0]].dtype.startswith(("int", "uint", "bool"))
        return bool(integers) and (passes or linear(name) in ("carries", "regroups")) and self.is_natural(read[0])

    def _is_modulus(self, op: Op) -> bool:
        """Whether a choice is the remainder that has its divisor's sign: `jnp.remainder` by a positive number."""
        added = [self.makers.get(self._root(value), (None, 0))[0] for value in op.operands[1:]]
        rest = next((each for each in added if each is not None and each.primitive == "rem"), None)
        total = next((each for each in added if each is not None and each.primitive == "add"), None)
        if rest is None or total is None or rest.results[0] not in total.operands:
            return False
        divisor = self.number(rest.operands[1])
        return divisor is not None and divisor > 0 and any(self.number(value) == divisor for value in total.operands)

    def unwrapped(self, value: int) -> int:
        """The keys that an index is, without what JAX makes of negative ones."""
        while True:
            op, _ = self.maker(value)
            if op is not None and op.primitive == "select_n" and self._is_wrapped(op) and self.is_natural(op.operands[1]):
                value = op.operands[1]
            elif op is not None and (op.primitive in _SAME or self._reshapes(op) or self._keeps_integers(op)):
                value = op.operands[0]
            else:
                return value

    def _is_wrapped(self, op: Op) -> bool:
        """Whether a choice is ``x < 0 ? x + n : x`` of whole numbers that are not negative."""
        if op.primitive != "select_n" or len(op.operands) != 3:
            return False
        compared, _ = self.maker(op.operands[0])
        if compared is None or compared.primitive != "lt" or self.number(compared.operands[1]) != 0:
            return False
        return self.reached(compared.operands[0]) == self.reached(op.operands[1]) and self.is_natural(op.operands[1])

    def is_floor(self, op: Op) -> bool:
        """Whether a choice is a quotient of whole numbers rounded down, of its first case and that less 1: what `//` becomes."""
        if op.primitive != "select_n" or len(op.operands) != 3:
            return False
        both, quotient = (self.maker(value)[0] for value in op.operands[:2])
        if both is None or quotient is None or both.primitive != "and" or quotient.primitive != "div":
            return False
        parts = [self.maker(value)[0] for value in both.operands]
        if any(part is None or part.primitive != "ne" for part in parts):
            return False
        x, divisor = quotient.operands
        return {self._compared(part, x, divisor) for part in parts if part is not None} == {"rem", "sign"}

    def _compared(self, op: Op, x: int, divisor: int) -> str:
        """The function of ``rem(x, divisor) != 0``, or of ``sign(x) != sign(divisor)``; empty for others."""
        one, other = (self.maker(value)[0] for value in op.operands)
        if one is None or self.reached(one.operands[0]) != self.reached(x):
            return ""
        if one.primitive == "rem":
            return "rem" if self.is_same(one.operands[1], divisor) and self.number(op.operands[1]) == 0 else ""
        number = self.number(divisor)
        signs = number is not None and self.number(op.operands[1]) == (number > 0) - (number < 0)
        signs = signs or (other is not None and other.primitive == "sign" and self.is_same(other.operands[0], divisor))
        return "sign" if one.primitive == "sign" and signs else ""

    def is_same(self, one: int, other: int) -> bool:
        """Whether two values are one, or the same number."""
        number = self.number(one)
        return self.reached(one) == self.reached(other) or (number is not None and number == self.number(other))

    # -- counts -------------------------------------------------------------------------------------------------------------

    def counted(self, value: int) -> int | None:
        """The keys of which a vector has the counts: how many are 0, how many are 1, and so on. None where it is not known to.

        Keys that are as large as the vector is long, and those below 0, are counted nowhere, or these as 0.
        """
        op, k = self.maker(value)
        while op is not None and (op.primitive in _SAME or self._keeps_vector(op)):
            value = op.operands[k if op.primitive == "optimization_barrier" else 0]
            op, k = self.maker(value)
        if op is None or self.graph.values[value].rank != 1:
            return None
        if op.primitive == "scatter-add":
            return self._scattered(op)
        if op.primitive == "reduce_sum":
            return self._summed(value)
        if op.primitive == "sub":
            return self._between(op)
        return None

    def _between(self, op: Op) -> int | None:
        """Differences of how many keys are below 1, 2, 3, ... and below 0, 1, 2, ...: of `jnp.searchsorted` of sorted keys."""
        above, below = map(self._below, op.operands)
        if above is None or below is None or (above.keys, above.offset, below.offset) != (below.keys, 1, 0):
            return None
        return above.keys if below.is_clipped or self.is_natural(above.keys) else None

    def _below(self, value: int) -> _Below | None:
        """Of which keys a vector says how many are below 0, 1, 2, ..., plus an offset."""
        op, _ = self.maker(value)
        if op is None:
            return None
        if op.primitive == "convert_element_type" or op.primitive in _SAME:
            return self._below(op.operands[0]) if self._keeps_vector(op) or op.primitive in _SAME else None
        if op.primitive == "slice" and set(op.params["strides"] or (1,)) == {1}:
            found, (start,) = self._below(op.operands[0]), op.params["start_indices"]
            return found and replace(found, offset=found.offset + start, is_clipped=found.is_clipped and not start)
        if op.primitive == "concatenate" and len(op.operands) == 2 and self.graph.values[op.operands[0]].shape == (1,):
            found = self._below(op.operands[1]) if self.number(op.operands[0]) == 0 else None
            return found and replace(found, offset=found.offset - 1, is_clipped=True)
        found = search_of(op, self.graph)
        if found is None or (numbers := self.positions(found.numbers)) is None or numbers.each > 1:
            return None
        return _Below(self.keys(found.keys), numbers.offset + (found.side == "right"), False)

    def is_count(self, value: int) -> bool:
        """Whether a value is counts of keys, or a stack of them."""
        op, k = self.makers.get(value, (None, 0))
        if op is not None and op.primitive == "scan" and k >= num_carry(op.params):
            return self.is_count(op.bodies[0].outputs[k])
        return self.counted(value) is not None

    def _keeps_vector(self, op: Op) -> bool:
        """Whether an op has the whole numbers of a vector, as another type, or with dimensions of size one."""
        if op.primitive == "convert_element_type":
            read, made = (self.graph.values[value].dtype for value in (op.operands[0], op.results[0]))
            return made.startswith(("int32", "int64", "uint32", "uint64", "float32", "float64")) and not read.startswith("bool")
        return self._reshapes(op) and self.graph.values[op.results[0]].rank == 1

    def _scattered(self, op: Op) -> int | None:
        """Ones added to zeros at keys: `jnp.bincount`, `jax.ops.segment_sum`, and ``zeros.at[keys].add(1)``."""
        zeros, indices, ones = op.operands
        values, numbers = self.graph.values, op.params["dimension_numbers"]
        plain = values[zeros].rank == 1 and not numbers.update_window_dims and values[indices].shape[-1:] == (1,)
        if not plain or self.number(zeros) != 0 or self.number(ones) != 1 or not values[zeros].dtype.startswith(("int32", "int64", "uint")):
            return None
        key = self.unwrapped(indices)
        maker, _ = self.maker(key)
        if maker is not None and maker.primitive == "max" and any(self.number(each) == 0 for each in maker.operands):
            key = next(each for each in maker.operands if self.number(each) != 0)  # what is below 0 comes first, and counts as 0
        elif not self.is_natural(key):
            return None
        return self.keys(key)

    def _summed(self, value: int) -> int | None:
        """Comparisons of each key with 0, 1, 2, ..., added up over the keys: sums of `jax.nn.one_hot`."""
        dim = 0  # that of the counts, in ``value``
        summed: set[int] = set()  # the others, in ``value``; all of them in the end
        while True:
            op, _ = self.maker(value)
            if op is None or op.bodies:
                return None
            if op.primitive == "reduce_sum":
                axes = sorted(op.params["axes"])
                kept = [d for d in range(self.graph.values[op.operands[0]].rank) if d not in axes]
                dim, summed = kept[dim], {*(kept[d] for d in summed), *axes}
            elif op.primitive == "eq":
                return self._compared_keys(op, dim)
            elif not (op.primitive in _SAME or op.primitive == "convert_element_type"):
                return None
            value = op.operands[0]

    def _compared_keys(self, op: Op, dim: int) -> int | None:
        values, shape = self.graph.values, self.graph.values[op.results[0]].shape
        others = math.prod(n for d, n in enumerate(shape) if d != dim)
        for keys, numbers in (op.operands, reversed(op.operands)):
            found = self.positions(numbers)
            if found != Positions(dim, 0) or values[numbers].shape[dim] != shape[dim]:
                continue
            key = self._spread(keys, dim)
            if key is not None and values[key].size == others < _COUNTING and self.is_natural(key):
                return self.keys(key)
        return None

    def _spread(self, value: int, dim: int) -> int | None:
        """What is the same along a dimension, before it was spread along that alone."""
        values = self.graph.values
        while values[value].rank > dim and values[value].shape[dim] != 1:
            op, _ = self.maker(value)
            if op is None or op.primitive != "broadcast_in_dim":
                return None
            placed = op.params["broadcast_dimensions"]
            if dim in placed and values[op.operands[0]].shape[placed.index(dim)] != 1:
                return None
            if values[op.operands[0]].size * values[op.results[0]].shape[dim] != values[op.results[0]].size:
                return None
            return op.operands[0]
        return value


def _entering(op: Op) -> Iterator[tuple[int, int]]:
    """The inputs of an op's bodies, each with what the op is called with; not what a loop carries."""
    if op.primitive in ("scan", "while", "cond", "remat2", "custom_linear_solve"):
        positions = inputs_of(op.primitive, op.params, len(op.operands), len(op.results), len(op.bodies))
        for body, own in zip(op.bodies, positions, strict=False):
            yield from ((value, op.operands[k]) for value, k in zip(body.inputs, own, strict=True) if k is not None)
