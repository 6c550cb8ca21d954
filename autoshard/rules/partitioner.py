"""Where XLA's partitioner falls behind a rule, and running the operation per shard keeps the rule's promise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Custom calls and transforms that the partitioner replicates, batch and all (seen in compiled modules, jaxlib 0.10.2).
GATHERED = frozenset({"fft", "top_k"})

# Elementwise functions that iterate until the last element has converged: partitioned, every trip asks all shards.
ITERATED = frozenset({"igamma", "igamma_grad_a", "igammac", "random_gamma_grad", "regularized_incomplete_beta"})


def runs_per_shard(primitive: str, params: Mapping[str, Any]) -> bool:
    """Whether an operation must run per shard, inside `jax.shard_map`, to need no collectives but its rule's.

    Its parameters hold for a shard as they hold for the whole, and none of its factors is a reduction.

    >>> runs_per_shard("top_k", {"k": 2, "axis": 1}), runs_per_shard("dot_general", {})
    (True, False)
    """
    return primitive in GATHERED or primitive in ITERATED or params.get("feature_group_count", 1) > 1
