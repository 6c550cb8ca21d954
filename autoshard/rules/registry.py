"""The registry of sharding rules by primitive name, and the functions they are written with.

A rule is a function of an operation: operands positionally as `Value`s, results as ``results``, the primitive's
parameters by keyword. It returns a `Rule`, or None where there is none for these parameters:

    @rule("transpose")
    def transpose(x, /, *, results, permutation, **_):
        dims = free(x.shape)
        return assemble([dims], [[dims[d] for d in permutation]])

A tensor is written as one entry per dimension: a `Factor`, or a tuple of factors from major to minor, or ``()``. Factors
are compared by identity: the same `Factor` object in two places is one factor, two equal objects are two.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from autoshard.errors import RuleError
from autoshard.ir import Dims, Factor, Rule, Value

Dim = Factor | tuple[Factor, ...]
RuleFunction = Callable[..., Rule | None]

_FUNCTIONS: dict[str, RuleFunction] = {}


def rule(*primitives: str) -> Callable[[RuleFunction], RuleFunction]:
    """A decorator that registers a function as the sharding rule of these primitives."""

    def register(function: RuleFunction) -> RuleFunction:
        for primitive in primitives:
            if primitive in _FUNCTIONS:
                raise RuleError(f"a primitive has one rule, and {primitive!r} has two: {_FUNCTIONS[primitive]}, {function}. Remove one.")
            _FUNCTIONS[primitive] = function
        return function

    return register


def registered() -> frozenset[str]:
    """The names of all primitives with a rule.

    >>> "dot_general" in registered(), "scan" in registered()
    (True, False)
    """
    return frozenset(_FUNCTIONS)


def rule_of(primitive: str, params: Mapping[str, Any], operands: Sequence[Value], results: Sequence[Value]) -> Rule | None:
    """The sharding rule of one operation, or None where its primitive has none here.

    >>> x = Value((8, 4), "float32", 4)
    >>> str(rule_of("reduce_max", {"axes": (1,)}, [x], [Value((8,), "float32", 4)]))
    '([i, j])->([i]) {i=8, j=4} reduction={j:max}'

    Raises:
        RuleError: the products of a rule's factors are not the dimensions of the operation.
    """
    function = _FUNCTIONS.get(primitive)
    found = function(*operands, results=tuple(results), **params) if function else None
    if found is not None:
        _check(primitive, found.factors, (*found.operands, *found.results), (*operands, *results))
    return found


def free(shape: Sequence[int]) -> list[Factor]:
    """A new pass-through factor for each dimension."""
    return [Factor(n) for n in shape]


def whole(shape: Sequence[int]) -> list[Factor]:
    """A new need-replication factor for each dimension."""
    return [Factor(n, "need_replication") for n in shape]


def broadcast(operand: Value, dims: Sequence[Factor]) -> list[Dim]:
    """The entries of an operand whose last dimensions are these factors; dimensions of size one are read whole."""
    aligned = dims[len(dims) - operand.rank :]
    return [dim if dim.size == n else () for dim, n in zip(aligned, operand.shape, strict=True)]


def reduced(size: int, operator: str, dtype: str) -> Factor:
    """A new reduction factor, or a need-replication one where XLA has no all_reduce with this operator and dtype.

    It has and/or for booleans alone; xor, max and min of complex numbers, and two-bit integers fail to compile (jaxlib 0.10.2).
    """
    bits = operator == "xor" or (operator in ("and", "or") and dtype != "bool")
    ordered = operator in ("max", "min") and dtype.startswith("complex")
    if bits or ordered or dtype in ("int2", "uint2"):
        return Factor(size, "need_replication")
    return Factor(size, "reduction", operator)


def free_but(shape: Sequence[int], touched: Collection[int]) -> list[Factor]:
    """A new factor for each dimension: need-replication for those in ``touched``, pass-through for the others."""
    return [Factor(n, "need_replication" if d in touched else "pass_through") for d, n in enumerate(shape)]


def resized(dims: Sequence[Factor], shape: Sequence[int]) -> list[Factor]:
    """The factors of a tensor of this shape: those of ``dims``, and a new need-replication factor where the size differs."""
    return [dim if dim.size == n else Factor(n, "need_replication") for dim, n in zip(dims, shape, strict=True)]


def assemble(operands: Sequence[Sequence[Dim]], results: Sequence[Sequence[Dim]]) -> Rule:
    """The rule of tensors written in factor objects, which are numbered in order of appearance: results first, then operands.

    A dimension of size one (or zero) cannot be sharded, and has no factor.
    """
    numbers: dict[int, int] = {}
    factors: list[Factor] = []

    def tensor(dims: Sequence[Dim]) -> Dims:
        numbered = []
        for dim in dims:
            members = [f for f in ((dim,) if isinstance(dim, Factor) else dim) if f.size > 1]
            for factor in members:
                if id(factor) not in numbers:
                    numbers[id(factor)] = len(factors)
                    factors.append(factor)
            numbered.append(tuple(numbers[id(factor)] for factor in members))
        return tuple(numbered)

    made = tuple(map(tensor, results))
    return Rule(operands=tuple(map(tensor, operands)), results=made, factors=tuple(factors))


def _check(primitive: str, factors: tuple[Factor, ...], tensors: Sequence[Dims], values: Sequence[Value]) -> None:
    for dims, value in zip(tensors, values, strict=True):
        sizes = tuple(math.prod(factors[f].size for f in dim) for dim in dims)
        if sizes != tuple(max(n, 1) for n in value.shape):
            raise RuleError(
                f"a rule's factors multiply to its dimensions: {primitive!r} has {value.shape}, its rule {sizes}. Fix the rule."
            )
