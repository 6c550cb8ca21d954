"""Rules of primitives that reduce dimensions."""

from __future__ import annotations

from typing import Any

from autoshard.ir import Factor, Rule, Send, Value
from autoshard.primitives import of_kind, primitive
from autoshard.rules.registry import assemble, free, free_but, reduced, rule


def _reduction(operator: str):
    def reduce(x: Value, /, *, results: tuple[Value, ...], axes: tuple[int, ...], **_) -> Rule:
        """Reduced dimensions leave partial results, the others pass through: ``([i, j])->([i]) reduction={j:max}``."""
        dims = [reduced(n, operator, x.dtype) if d in axes else Factor(n) for d, n in enumerate(x.shape)]
        return assemble([dims], [[dim for d, dim in enumerate(dims) if d not in axes]])

    return reduce


for _name in of_kind("reduction"):
    if _operator := primitive(_name).operator:
        rule(_name)(_reduction(_operator))


@rule("argmax", "argmin")
def argmax(x: Value, /, *, results: tuple[Value, ...], axes: tuple[int, ...], **_) -> Rule:
    """Shards of the searched dimension gather the element and the position that each of them found."""
    dims = free(x.shape)
    for axis in axes:
        dims[axis] = Factor(x.shape[axis], "permutation", sends=(Send("all_gather", 0), Send("all_gather", 1)))
    return assemble([dims], [[dim for d, dim in enumerate(dims) if d not in axes]])


# Operators that may count the initial value several times: every shard begins with it.
IDEMPOTENT = frozenset({"max", "min", "and", "or"})


@rule("reduce")
def reduce(*operands: Value, results: tuple[Value, ...], dimensions: tuple[int, ...], jaxpr: Any, **_: Any) -> Rule:
    """A reduction by an arbitrary function keeps its dimensions whole, unless it is one of `IDEMPOTENT`.

    Operands come first, then their initial values.
    """
    x = operands[0]
    operator = primitive(_only_primitive(jaxpr.jaxpr)).operator if len(results) == 1 else ""
    dims = free_but(x.shape, dimensions)
    if operator in IDEMPOTENT:
        dims = [reduced(n, operator, x.dtype) if d in dimensions else dims[d] for d, n in enumerate(x.shape)]
    kept = [dim for d, dim in enumerate(dims) if d not in dimensions]
    return assemble([dims if operand.rank else [] for operand in operands], [kept] * len(results))


def _only_primitive(jaxpr: Any) -> str:
    """The name of the primitive that a function applies to its two arguments; empty if it does anything else."""
    if len(jaxpr.eqns) != 1 or {*jaxpr.eqns[0].invars} != {*jaxpr.invars} or jaxpr.outvars != jaxpr.eqns[0].outvars:
        return ""
    return jaxpr.eqns[0].primitive.name
