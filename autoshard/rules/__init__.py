"""Sharding rules of JAX primitives: one file per family, one function per rule."""

from autoshard.rules import (
    contraction,
    creation,
    elementwise,
    indexing,
    linalg,
    ordering,
    reduction,
    shape,
    window,
)
from autoshard.rules.lookup import rules_of
from autoshard.rules.mapped import in_order
from autoshard.rules.partitioner import propagates, runs_per_shard
from autoshard.rules.registry import registered, rule, rule_of
from autoshard.rules.shardy import same_on_shards

FAMILIES = (contraction, creation, elementwise, indexing, linalg, ordering, reduction, shape, window)

__all__ = ["FAMILIES", "in_order", "propagates", "registered", "rule", "rule_of", "rules_of", "runs_per_shard", "same_on_shards"]
