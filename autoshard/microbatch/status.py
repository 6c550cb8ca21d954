"""The status of a value in a loop over microbatches, and how operations carry it on: sharding rules, applied to time.

A loop over ``n`` microbatches is like one more mesh axis of size ``n``, whose devices run one after the other. A value that each
microbatch has in full is *whole*; one that is split along a dimension is a *slice*; one that is the sum (or maximum, ...) over all
microbatches of the values in each is *partial*. What an all_reduce would combine on a mesh axis is accumulated over trips; what would
need any other collective couples the microbatches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal as OneOf

import numpy as np
from jax.extend.core import Literal

from autoshard.ir import Op, Rule
from autoshard.primitives import is_collective, is_rearrangement, is_scatter, linear
from autoshard.trace.mapped import MAPPED, has_effects


@dataclass(frozen=True, slots=True)
class Status:
    """How the values of one array in all microbatches make up the array.

    Attributes:
        kind: ``"whole"``; ``"zero"``: whole, and all elements are 0; ``"slice"``; ``"rows"``: a slice in another order than that of the
            examples, or of positions; or ``"partial"``.
        dim: of a slice, the dimension that is split.
        inner: of a slice, how many positions in a row along it an example has: more than 1 where other dimensions are merged into it.
        operator: of a partial value, how those of the microbatches are combined.
        rows: of rows, their order, and what their elements are (`autoshard.microbatch.sorted_rows`).
    """

    kind: str
    dim: int = -1
    inner: int = 1
    operator: str = ""
    rows: Hashable = None

    @property
    def is_whole(self) -> bool:
        """Whether each microbatch has the array."""
        return self.kind in ("whole", "zero")

    @property
    def is_split(self) -> bool:
        """Whether a microbatch has what is of its own examples."""
        return self.kind in ("slice", "rows")


WHOLE, ZERO = Status("whole"), Status("zero")


def slice_along(dim: int, inner: int = 1) -> Status:
    """The status of an array that is split along a dimension, of which an example has ``inner`` positions."""
    return Status("slice", dim, inner)


def partial(operator: str) -> Status:
    """The status of an array that is combined over all microbatches."""
    return Status("partial", operator=operator)


class Coupled(Exception):
    """An operation needs more than one microbatch at a time; the message has it, its line and why.

    Attributes:
        remedy: what to write in its place.
    """

    def __init__(self, op: Op, reason: str, remedy: str = "Compute it of each example by itself"):
        super().__init__(f"{op.primitive} at {op.origin} {reason}")
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Made:
    """An array that each microbatch makes of its own size: a number, plus positions along a dimension.

    Attributes:
        shape: in a microbatch.
        number: of all elements, or of the first.
        dim: the dimension along which they are positions; -1: none.
        each: how many positions in a row are the same.
    """

    shape: tuple[int, ...]
    number: int | float | bool
    dim: int = -1
    each: int = 1


@dataclass(frozen=True, slots=True)
class Move:
    """How an operation runs in a microbatch.

    Attributes:
        reads, makes: the statuses of its operands and results.
        factor: the factor of its rule that is split; -1: none, and it runs as it is.
        inner: how many indices of the factor in a row an example has.
        made: per operand that is whole, what the microbatch makes in its place; None where it takes a part of it, or no operand is made.
        search: of a search in sorted keys, which runs as one in those of the microbatch, its side.
    """

    reads: tuple[Status, ...]
    makes: tuple[Status, ...]
    factor: int = -1
    inner: int = 1
    made: tuple[Made | None, ...] = ()
    search: OneOf["left", "right"] | None = None


def moved(op: Op, rule: Rule | None, reads: Sequence[Status], n: int) -> Move:
    """How an operation without bodies carries the statuses of its operands on.

    Raises:
        Coupled: it needs more than one of the ``n`` microbatches at a time; of one, it reads no slice and is not linear in sums.
    """
    statuses = tuple(reads)
    if all(status.is_whole for status in statuses):
        return Move(statuses, (ZERO if _is_zero(op, statuses) else WHOLE,) * len(op.results))
    if n > 1 and op.equation is not None and has_effects(op.equation):
        raise Coupled(op, "has an effect, which in a loop or branch would happen once a microbatch: return what it reads from there")
    if not any(status.kind == "slice" for status in statuses):
        return Move(statuses, (_carried(op, statuses),) * len(op.results))
    try:
        return split_along(op, rule, statuses, n)
    except Coupled:
        if n > 1:
            raise
        return _undivided(rule, statuses, len(op.results))


def as_it_is(n_operands: int, n_results: int) -> Move:
    """The move of an operation on the only microbatch: its results are all there is of their sums."""
    return Move((WHOLE,) * n_operands, (partial("sum"),) * n_results)


def joined(op: Op, one: Status, other: Status) -> Status:
    """The status of a value that is one of two, such as a loop's carry.

    Raises:
        Coupled: there is no such status.
    """
    if one == other:
        return one
    if one.is_whole and other.is_whole:
        return WHOLE
    for this, that in ((one, other), (other, one)):
        if this == ZERO or (this == WHOLE and that.kind == "slice"):
            return that
    raise Coupled(op, f"carries what is {_words(one)} and then {_words(other)}")


def _words(status: Status) -> str:
    kinds = {"whole": "the same for all examples", "zero": "zero", "slice": "split over examples", "rows": "rows in the order of a sort"}
    return kinds.get(status.kind) or _combined([status.operator])


def _combined(operators: Iterable[str]) -> str:
    logical = {"and": "logical and", "or": "logical or", "xor": "logical xor"}
    return f"a {' and a '.join(logical.get(operator, operator) for operator in sorted(operators))} over the examples"


# -- slices ----------------------------------------------------------------------------------------------------------------


def split_along(op: Op, rule: Rule | None, statuses: tuple[Status, ...], n: int) -> Move:
    """The move along the one factor to which all slices belong."""
    if rule is None:
        raise Coupled(op, "has no sharding rule, and reads the examples")
    factor, inner = _split_factor(op, rule, statuses, n)
    found = rule.factors[factor]
    if found.kind not in ("pass_through", "reduction") or found.sends:
        raise Coupled(op, "needs all examples at once")
    if found.kind == "reduction":
        if is_scatter(op.primitive) and statuses[0] != ZERO:
            raise Coupled(op, f"combines rows of the examples ({found.operator}) with an array that is not zero")
        return Move(statuses, (partial(found.operator or "sum"),) * len(op.results), factor, inner)
    places = [place_of(rule, dims, factor) for dims in rule.results]
    if None in places:
        raise Coupled(op, "has a result that depends on all examples")
    return Move(statuses, tuple(slice_along(dim, inner * within) for dim, within in filter(None, places)), factor, inner)


def _undivided(rule: Rule | None, statuses: Sequence[Status], n_results: int) -> Move:
    """The move of an operation that couples examples which are all in one microbatch.

    Nothing is divided, and so any status is right; these keep what has the examples' dimension apart from sums over it, such as gradients.
    """
    move = as_it_is(len(statuses), n_results)
    if rule is None:
        return move
    split = {f for dims, each in zip(rule.operands, statuses, strict=True) if each.kind == "slice" for f in dims[each.dim]}
    places = [next((dim for dim, factors in enumerate(dims) if split.intersection(factors)), None) for dims in rule.results]
    return replace(move, makes=tuple(makes if dim is None else slice_along(dim) for makes, dim in zip(move.makes, places, strict=True)))


def _split_factor(op: Op, rule: Rule, statuses: Sequence[Status], n: int) -> tuple[int, int]:
    """The factor to which the slices of the operands belong, and how many of its indices in a row an example has."""
    found = set()
    for dims, status in zip(rule.operands, statuses, strict=True):
        if status.kind == "partial":
            raise Coupled(op, f"reads {_words(status)}")
        if status.kind == "slice":
            found.add(factor_of(rule, dims[status.dim], status.inner, n))
    if len(found) != 1:
        raise Coupled(op, "pairs each example with others")
    if (one := found.pop()) is None:
        raise Coupled(op, "takes the examples' dimension apart")
    return one


def factor_of(rule: Rule, factors: Sequence[int], inner: int, n: int) -> tuple[int, int] | None:
    """The factor of a dimension that is split where an example has ``inner`` positions, and how many of its indices an example has.

    None where no one factor is, as of a dimension of 20 positions that is taken apart into 4 and 5, of which every second is a slice.

    Args:
        factors: the dimension's, from major to minor.
    """
    minor = 1
    for factor in reversed(factors):
        size = rule.factors[factor].size
        if inner % minor == 0 and size % (inner // minor * n) == 0:
            return factor, inner // minor
        minor *= size
    return None


def place_of(rule: Rule, dims: Sequence[Sequence[int]], factor: int) -> tuple[int, int] | None:
    """The dimension of a tensor that a factor belongs to, and how many positions along it one index of the factor has."""
    for dim, factors in enumerate(dims):
        if factor in factors:
            return dim, math.prod(rule.factors[minor].size for minor in factors[factors.index(factor) + 1 :])
    return None


# -- partial values --------------------------------------------------------------------------------------------------------

_OF_ONE = frozenset(
    {"broadcast_in_dim", "cumsum", "expand_dims", "name", "pvary", "reduce_precision", "reduce_sum", "rev", "slice", "split"}
)
"""Linear in their only operand, beside those that the table of primitives says."""
_EXTREMES = frozenset({"pmax", "pmin"})
"""The collectives that are not linear."""
_OF_FIRST = frozenset({"div", "dynamic_slice"})
"""Linear in their first operand."""
_OF_EITHER = frozenset({"conv_general_dilated", "dot_general", "mul"})
"""Linear in each operand, the others given."""
_OF_ALL = frozenset({"add", "add_any", "concatenate", "sub"})
"""Linear in all operands together."""


def _carried(op: Op, statuses: tuple[Status, ...]) -> Status:
    """The status of the results of an op that reads partial values and no slices."""
    operators = {status.operator for status in statuses if status.kind == "partial"}
    if len(operators) == 1:
        (operator,) = operators
        if operator == "sum" and _is_linear(op, statuses):
            return partial(operator)
        if operator in ("max", "min") and (is_rearrangement(op.primitive) or op.primitive == "broadcast_in_dim"):
            return partial(operator)
    raise Coupled(op, f"reads {_combined(operators)}")


def _is_linear(op: Op, statuses: tuple[Status, ...]) -> bool:
    """Whether a sum of operands becomes the sum of results, where the statuses say which operands are sums."""
    name, sums = op.primitive, [status.kind == "partial" for status in statuses]
    rest = [status == ZERO for status, is_sum in zip(statuses, sums, strict=True) if not is_sum]
    if name in _OF_ONE or linear(name) in ("carries", "regroups") or name == MAPPED or (is_collective(name) and name not in _EXTREMES):
        return sums == [True] and not _makes_integers(op)
    if name in _OF_ALL:
        return all(rest)
    if name in _OF_FIRST:
        return sums[0] and not any(sums[1:]) and not (name == "div" and _makes_integers(op))
    if name in _OF_EITHER:
        return sum(sums) == 1
    if name == "select_n":
        return not sums[0] and all(rest[1:])
    if name == "dynamic_update_slice":
        return not any(sums[2:]) and all(status == ZERO or is_sum for status, is_sum in zip(statuses[:2], sums[:2], strict=True))
    return name == "pad" and sums == [True, False] and rest == [True]


def _makes_integers(op: Op) -> bool:
    """Whether a cast or a quotient rounds to whole numbers: those of parts would add up to another sum."""
    if op.primitive not in ("convert_element_type", "div") or op.equation is None:
        return False
    read, made = op.equation.invars[0].aval.dtype, op.equation.outvars[0].aval.dtype
    return made.kind in "iub" and (op.primitive == "div" or read.kind not in "iub")


# -- zeros -----------------------------------------------------------------------------------------------------------------


def _is_zero(op: Op, statuses: tuple[Status, ...]) -> bool:
    """Whether all results are zero where some operands are known to be."""
    name = op.primitive
    if name == "broadcast_in_dim" or linear(name) in ("carries", "regroups"):
        return statuses[0] == ZERO
    return linear(name) == "adds" and all(status == ZERO for status in statuses)


def operand_statuses(op: Op, status: Callable[[int], Status]) -> tuple[Status, ...]:
    """The statuses of an op's operands; of a literal, whether it is zero.

    Args:
        status: of a value by its number.
    """
    atoms = [None] * len(op.operands) if op.equation is None else op.equation.invars
    return tuple(literal_status(atom) or status(value) for atom, value in zip(atoms, op.operands, strict=True))


def literal_status(atom: object) -> Status | None:
    """Zero or whole for a literal; None for a variable."""
    if not isinstance(atom, Literal):
        return None
    return ZERO if isinstance(atom.val, int | float | np.ndarray | np.generic) and not np.any(atom.val) else WHOLE
