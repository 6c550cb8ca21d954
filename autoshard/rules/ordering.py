"""Primitives in which every element along one dimension depends on the others: scans, sorts, top-k."""

from __future__ import annotations

from autoshard.ir import Rule, Value
from autoshard.rules.registry import assemble, free_but, resized, rule


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(x: Value, /, *, results: tuple[Value, ...], axis: int, **_) -> Rule:
    """The accumulated dimension stays whole: ``([i, j])->([i, j]) need_replication={j}``."""
    dims = free_but(x.shape, (axis,))
    return assemble([dims], [dims])


@rule("sort")
def sort(*operands: Value, results: tuple[Value, ...], dimension: int, **_) -> Rule:
    """The sorted dimension stays whole in every operand and result."""
    dims = free_but(operands[0].shape, (dimension,))
    return assemble([dims] * len(operands), [dims] * len(results))


@rule("top_k")
def top_k(x: Value, /, *, results: tuple[Value, ...], axis: int, **_) -> Rule:
    """The searched dimension stays whole, and so do the k found."""
    dims = free_but(x.shape, (axis % x.rank,))
    return assemble([dims], [resized(dims, result.shape) for result in results])


@rule("approx_top_k")
def approx_top_k(x: Value, /, *, results: tuple[Value, ...], reduction_dimension: int, **_) -> Rule:
    """The searched dimension stays whole, as in `top_k`."""
    dims = free_but(x.shape, (reduction_dimension % x.rank,))
    return assemble([dims], [resized(dims, result.shape) for result in results])
