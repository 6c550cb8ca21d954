"""How XLA's partitioner treats the sharding rules: the ops whose shardings it propagates by the rule, and those it gathers regardless."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from autoshard.ir import Rule
from autoshard.primitives import is_windowed

# Custom calls and transforms that the partitioner replicates, batch included (seen in compiled modules, jaxlib 0.10.2); of solves,
# right-hand sides. Kernels are opaque to it.
GATHERED = frozenset({
    "custom_partitioning", "ffi_call", "fft", "pallas_call", "select_and_scatter", "select_and_scatter_add", "top_k", "triangular_solve",
    "tridiagonal_solve",
})  # fmt: skip

# Elementwise functions that iterate until the last element has converged: partitioned, each trip needs a collective.
ITERATED = frozenset({"igamma", "igamma_grad_a", "igammac", "random_gamma", "regularized_incomplete_beta"})

# Elementwise functions that lower to CHLO, a dialect through which the partitioner propagates no shardings.
UNKNOWN = frozenset({
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i1e", "cosh", "digamma", "erf", "erf_inv", "erfc", "lgamma", "mulhi",
    "nextafter", "polygamma", "sinh", "square", "zeta",
})  # fmt: skip

# Primitives of one StableHLO operation each, whose rule in Shardy's registry equals ours.
PROPAGATED = frozenset({
    "broadcast_in_dim", "dot_general", "reduce_max", "reduce_min", "reduce_prod", "reduce_sum", "squeeze", "transpose",
})  # fmt: skip

# Primitives whose rule equals ours for the dimensions that they pass on whole.
PASSED_WHOLE = frozenset({
    "concatenate", "conv_general_dilated", "pad", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "reshape", "rev", "slice",
    "split",
})  # fmt: skip


def propagates(primitive: str, rule: Rule, sharded: Collection[int] = ()) -> bool:
    """Whether the partitioner propagates shardings from operands to results as the rule does, so that results need no constraint.

    Args:
        sharded: the factors that are sharded.

    >>> propagates("exp", Rule.parse("([i, j])->([i, j]) {i=8, j=4}"))
    True
    >>> rule = Rule.parse("([i, jk])->([i, j, k]) {i=8, j=2, k=4}")
    >>> propagates("reshape", rule, {0}), propagates("reshape", rule, {1})
    (True, False)
    """
    if primitive in UNKNOWN:
        return False
    if primitive in PROPAGATED:
        return True
    if primitive in PASSED_WHOLE:
        tensors = *rule.operands, *rule.results
        whole = (dim == (factor,) for factor in sharded for dims in tensors for dim in dims if factor in dim)
        return all(rule.factors[factor].kind == "pass_through" for factor in sharded) and all(whole)
    return (
        len(rule.results) == 1
        and all(factor.kind == "pass_through" for factor in rule.factors)
        and all(
            dim in ((), made)
            for operand in rule.operands
            for dim, made in zip(reversed(operand), reversed(rule.results[0]), strict=False)  # broadcast operands have fewer
        )
    )


def runs_per_shard(primitive: str, params: Mapping[str, Any]) -> bool:
    """Whether an operation must run per shard, inside `jax.shard_map`, to need no collectives but its rule's.

    Its parameters are the same for a shard and for the whole. XLA gathers grouped convolutions, and where they group the batch it adds the
    sum over input features once too often. Sharded windows that crop abort the process.

    >>> runs_per_shard("top_k", {"k": 2, "axis": 1}), runs_per_shard("dot_general", {})
    (True, False)
    """
    grouped = any(params.get(name, 1) > 1 for name in ("feature_group_count", "batch_group_count"))
    cropped = is_windowed(primitive) and any(positions < 0 for edges in params["padding"] for positions in edges)
    return primitive in GATHERED or primitive in ITERATED or grouped or cropped
