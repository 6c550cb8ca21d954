"""How far XLA's partitioner keeps a rule's promise: where it follows the rule by itself, and where it falls behind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from autoshard.ir import Rule
from autoshard.primitives import is_windowed

# Custom calls and transforms that the partitioner replicates, batch and all (seen in compiled modules, jaxlib 0.10.2).
GATHERED = frozenset({"fft", "select_and_scatter", "select_and_scatter_add", "top_k"})

# Elementwise functions that iterate until the last element has converged: partitioned, every trip asks all shards.
ITERATED = frozenset({"igamma", "igamma_grad_a", "igammac", "random_gamma", "regularized_incomplete_beta"})

# Elementwise functions that lower to CHLO, a dialect that the partitioner passes shardings through in neither direction.
UNKNOWN = frozenset({
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "bessel_i1e", "cosh", "digamma", "erf", "erf_inv", "erfc", "lgamma", "mulhi",
    "nextafter", "polygamma", "sinh", "square", "zeta",
})  # fmt: skip

# Operations of one StableHLO operation each, whose rule in the partitioner's own registry is ours.
PROPAGATED = frozenset({
    "broadcast_in_dim", "dot_general", "reduce_max", "reduce_min", "reduce_prod", "reduce_sum", "squeeze", "transpose",
})  # fmt: skip

# Those whose rule is ours for the dimensions that they pass on whole.
PASSED_WHOLE = frozenset({
    "concatenate", "conv_general_dilated", "pad", "reduce_window_max", "reduce_window_min", "reduce_window_sum", "reshape", "rev", "slice",
    "split",
})  # fmt: skip


def propagates(primitive: str, rule: Rule, sharded: Collection[int] = ()) -> bool:
    """Whether the partitioner carries shardings from operands to results just as the rule does: then none need be written on results.

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
            for dim, made in zip(reversed(operand), reversed(rule.results[0]), strict=False)  # stretched ones have fewer
        )
    )


def runs_per_shard(primitive: str, params: Mapping[str, Any]) -> bool:
    """Whether an operation must run per shard, inside `jax.shard_map`, to need no collectives but its rule's.

    Its parameters hold for a shard as they hold for the whole. Grouped convolutions are gathered, and where they group the batch the
    partitioner adds up the sum over input features once too often. Of windows that crop, a sharded one aborts the process.

    >>> runs_per_shard("top_k", {"k": 2, "axis": 1}), runs_per_shard("dot_general", {})
    (True, False)
    """
    grouped = any(params.get(name, 1) > 1 for name in ("feature_group_count", "batch_group_count"))
    cropped = is_windowed(primitive) and any(positions < 0 for edges in params["padding"] for positions in edges)
    return primitive in GATHERED or primitive in ITERATED or grouped or cropped
