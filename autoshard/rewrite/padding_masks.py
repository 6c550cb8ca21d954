"""Which paddings are overwritten before an operation, with the value that changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoshard.primitives import is_scatter, primitive
from autoshard.rewrite.extents import is_suffix
from autoshard.rewrite.padding_contents import Masks, Reading, identity, is_finite, same
from autoshard.rewrite.padding_rules import dim_of


def masks(reading: Reading) -> Masks:
    """What has to be overwritten before an operation."""
    name = reading.op.primitive
    kind = primitive(name).kind
    if kind == "product":
        return _of_product(reading)
    if is_scatter(name):
        return _of_scatter(reading)
    if kind == "reduction" or name == "top_k":
        operator = {"argmax": "max", "argmin": "min", "top_k": "max"}.get(name) or primitive(name).operator
        return _of_dims(reading, operator, _combined(reading))
    if kind == "cumulative":
        operator = {"cumsum": "sum", "cumprod": "prod", "cummin": "min"}.get(name, "max")
        axis = reading.op.params["axis"]
        of = reading.reads[0][axis]
        return _of_dims(reading, operator, [axis] if of and (reading.op.params["reverse"] or not is_suffix(of)) else [])
    if kind == "window":
        operator = {"reduce_window_sum": "sum", "reduce_window_min": "min"}.get(name, "max")
        return _of_dims(reading, operator, _combined(reading))
    return ()


def _combined(reading: Reading) -> list[int]:
    """The first operand's padded dimensions that are not independent of each other."""
    dims, factors = reading.rule.operands[0], reading.rule.factors
    return [dim for dim in reading.padded(0) if any(factors[f].kind != "pass_through" for f in dims[dim])]


def _of_dims(reading: Reading, operator: str, dims: Sequence[int]) -> Masks:
    value = identity(operator, reading.dtypes[0]) if dims else None
    return tuple((0, dim, value) for dim in dims if not same(reading.contents[0][dim].value, value))


def _of_product(reading: Reading) -> Masks:
    """Of contracted dimensions both operands are 0, or one where the other is as finite as the rest; of neighbours that a window reads, the
    first."""
    found: list[tuple[int, int, Any]] = []
    for number, factor in enumerate(reading.rule.factors):
        at = [(k, dim) for k in (0, 1) if (dim := dim_of(reading.rule.operands[k], number)) is not None and reading.reads[k][dim]]
        if not at or factor.kind == "pass_through":
            continue
        contents = [reading.contents[k][dim] for k, dim in at]
        zeros = [same(content.value, 0) for content in contents]
        if factor.kind == "permutation":
            at, contents, zeros = at[:1], contents[:1], zeros[:1]
        wild = [not zero and not content.uniform and not is_finite(content.value) for content, zero in zip(contents, zeros, strict=True)]
        chosen = {place for place, is_wild in zip(at, wild, strict=True) if is_wild}
        if not any(zeros) and not chosen:
            chosen = {at[0]}
        found += [(k, dim, 0) for k, dim in at if (k, dim) in chosen]
    return tuple(dict.fromkeys(found))


def _of_scatter(reading: Reading) -> Masks:
    """The updates of positions that are padding change nothing."""
    value = identity(primitive(reading.op.primitive).operator or "sum", reading.dtypes[2])
    factors, dims = reading.rule.factors, reading.rule.operands[2]
    summed = [dim for dim in reading.padded(2) if any(factors[f].kind == "reduction" for f in dims[dim])]
    return tuple((2, dim, value) for dim in summed if not same(reading.contents[2][dim].value, value))
