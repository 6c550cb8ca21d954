"""Rules of primitives that order or accumulate along a dimension: scans, sorts, top-k."""

from __future__ import annotations

from autoshard.ir import Factor, Rule, Send, Value
from autoshard.rules.registry import assemble, free, free_but, resized, rule, whole


@rule("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")
def cumulative(x: Value, /, *, results: tuple[Value, ...], axis: int, **_) -> Rule:
    """Shards of the accumulated dimension gather each other's last element: ``([i, j])->([i, j]) permutation={j/all_gather 1 of 1}``."""
    dims = free(x.shape)
    dims[axis] = Factor(x.shape[axis], "permutation", sends=(Send("all_gather", 1),))
    return assemble([dims], [dims])


@rule("sort")
def sort(*operands: Value, results: tuple[Value, ...], dimension: int, **_) -> Rule:
    """The sorted dimension stays whole in every operand and result."""
    dims = free_but(operands[0].shape, (dimension,))
    return assemble([dims] * len(operands), [dims] * len(results))


@rule("top_k")
def top_k(x: Value, /, *, results: tuple[Value, ...], axis: int, **_) -> Rule:
    """Shards of the searched dimension gather the k best of each, values and positions; the k of the result stay whole."""
    dims, axis = free(x.shape), axis % x.rank
    k = results[0].shape[axis]
    found = [*dims[:axis], *whole([k]), *dims[axis + 1 :]]
    dims[axis] = Factor(x.shape[axis], "permutation", sends=(Send("all_gather", 0, max(k, 1)), Send("all_gather", 2)))
    return assemble([dims], [found, found])


@rule("approx_top_k")
def approx_top_k(x: Value, /, *, results: tuple[Value, ...], reduction_dimension: int, **_) -> Rule:
    """The searched dimension stays whole, as in `top_k`."""
    dims = free_but(x.shape, (reduction_dimension % x.rank,))
    return assemble([dims], [resized(dims, result.shape) for result in results])
