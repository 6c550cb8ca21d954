"""Rules of elementwise primitives, identities and casts of bits."""

from __future__ import annotations

from autoshard.ir import Rule, Value
from autoshard.primitives import of_kind
from autoshard.rules.registry import assemble, broadcast, free, rule, whole


@rule(*of_kind("elementwise"))
def elementwise(*operands: Value, results: tuple[Value, ...], **_) -> Rule:
    """Every dimension is one pass-through factor of all operands and results: ``([i, j], [i, j])->([i, j])``.

    Scalars (a predicate, a bound, a literal) and dimensions of size one are read whole, as in ``([i, j], [])->([i, j])``.
    """
    dims = free(results[0].shape)
    return assemble([broadcast(operand, dims) for operand in operands], [dims] * len(results))


@rule("copy", "device_put", "layout_constraint", "name", "optimization_barrier", "sharding_constraint", "stop_gradient")
def identity(*operands: Value, results: tuple[Value, ...], **_) -> Rule:
    """Each result is its operand; the operands share no factor: ``([i], [j])->([i], [j])``."""
    dims = [free(operand.shape) for operand in operands]
    return assemble(dims, dims)


@rule("bitcast_convert_type", "random_wrap", "random_unwrap")
def reinterpret(x: Value, /, *, results: tuple[Value, ...], **_) -> Rule:
    """Elementwise, except for a trailing dimension of an element's words, which stays whole."""
    (y,) = results
    dims = free(min(x.shape, y.shape, key=len))
    return assemble([[*dims, *whole(x.shape[len(dims) :])]], [[*dims, *whole(y.shape[len(dims) :])]])
