"""Primitives that compute each element of a result from the same element of every operand."""

from __future__ import annotations

from autoshard.ir import Factor, Rule, Value
from autoshard.rules.registry import Dim, assemble, free, rule, whole

ARITHMETIC = (
    "abs", "add", "add_any", "cbrt", "ceil", "clamp", "div", "exp", "exp2", "expm1", "floor", "integer_pow", "log", "log1p", "logistic",
    "max", "min", "mul", "mulhi", "neg", "nextafter", "pow", "rem", "round", "rsqrt", "sign", "sqrt", "square", "sub",
)  # fmt: skip
TRIGONOMETRIC = (
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh",
)  # fmt: skip
SPECIAL = (
    "bessel_i0e", "bessel_i1e", "digamma", "erf", "erf_inv", "erfc", "igamma", "igamma_grad_a", "igammac", "lgamma", "polygamma",
    "random_gamma_grad", "regularized_incomplete_beta", "zeta",
)  # fmt: skip
LOGIC = (
    "and", "clz", "eq", "eq_to", "ge", "gt", "is_finite", "le", "le_to", "lt", "lt_to", "ne", "not", "or", "population_count",
    "select_n", "shift_left", "shift_right_arithmetic", "shift_right_logical", "xor",
)  # fmt: skip
CONVERSION = ("complex", "conj", "convert_element_type", "imag", "real", "reduce_precision")
RANDOM = ("philox2x32", "philox4x32", "random_clone", "random_fold_in", "random_seed", "threefry2x32", "threefry4x32")


@rule(*ARITHMETIC, *TRIGONOMETRIC, *SPECIAL, *LOGIC, *CONVERSION, *RANDOM)
def elementwise(*operands: Value, results: tuple[Value, ...], **_) -> Rule:
    """Every dimension is one pass-through factor of all operands and results: ``([i, j], [i, j])->([i, j])``.

    Scalars (a predicate, a bound, a literal) and dimensions of size one are read whole, as in ``([i, j], [])->([i, j])``.
    """
    dims = free(results[0].shape)
    return assemble([_stretched(operand, dims) for operand in operands], [dims] * len(results))


def _stretched(operand: Value, dims: list[Factor]) -> list[Dim]:
    aligned = dims[len(dims) - operand.rank :]
    return [dim if dim.size == n else () for dim, n in zip(aligned, operand.shape, strict=True)]


@rule("copy", "copy_p", "device_put", "layout_constraint", "name", "optimization_barrier", "sharding_constraint", "stop_gradient")
def identity(*operands: Value, results: tuple[Value, ...], **_) -> Rule:
    """Each result is its operand; the operands share no factor: ``([i], [j])->([i], [j])``."""
    dims = [free(operand.shape) for operand in operands]
    return assemble(dims, dims)


@rule("bitcast_convert_type", "random_wrap", "random_unwrap")
def reinterpret(x: Value, /, *, results: tuple[Value, ...], **_) -> Rule:
    """Elementwise, except that the words an element is made of are a trailing dimension, which stays whole."""
    (y,) = results
    dims = free(min(x.shape, y.shape, key=len))
    return assemble([[*dims, *whole(x.shape[len(dims) :])]], [[*dims, *whole(y.shape[len(dims) :])]])
