"""Primitives that combine all elements along some dimensions into one."""

from __future__ import annotations

from typing import Any

from autoshard.ir import Factor, Rule, Value
from autoshard.rules.registry import assemble, free_but, rule


def _reduction(operator: str):
    def reduce(x: Value, /, *, results: tuple[Value, ...], axes: tuple[int, ...], **_) -> Rule:
        """Reduced dimensions leave partial results, the others pass through: ``([i, j])->([i]) reduction={j:max}``.

        Bits stay whole: XLA has no all_reduce by xor, and by and/or for booleans alone (jaxlib 0.10.2 fails to compile them).
        """
        bits = operator == "xor" or (operator in ("and", "or") and x.dtype != "bool")
        kind = ("need_replication",) if bits else ("reduction", operator)
        dims = [Factor(n, *kind) if d in axes else Factor(n) for d, n in enumerate(x.shape)]
        return assemble([dims], [[dim for d, dim in enumerate(dims) if d not in axes]])

    return reduce


for _operator in ("sum", "max", "min", "prod", "and", "or", "xor"):
    rule(f"reduce_{_operator}")(_reduction(_operator))


@rule("argmax", "argmin")
def argmax(x: Value, /, *, results: tuple[Value, ...], axes: tuple[int, ...], **_) -> Rule:
    """The searched dimension stays whole: partial results would have to carry value and position."""
    dims = free_but(x.shape, axes)
    return assemble([dims], [[dim for d, dim in enumerate(dims) if d not in axes]])


@rule("reduce")
def reduce(*operands: Value, results: tuple[Value, ...], dimensions: tuple[int, ...], **_: Any) -> Rule:
    """A reduction by an arbitrary function, which keeps its dimensions whole; operands come first, then their initial values."""
    dims = free_but(operands[0].shape, dimensions)
    kept = [dim for d, dim in enumerate(dims) if d not in dimensions]
    return assemble([dims if operand.rank else [] for operand in operands], [kept] * len(results))
