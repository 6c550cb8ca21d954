"""Sharding rules of JAX primitives: one file per family, one function per rule."""

from autoshard.rules import (  # each family registers its rules
    attention,
    contraction,
    creation,
    declared,
    elementwise,
    indexing,
    kernels,
    linalg,
    ordering,
    partitioning,
    reduction,
    ring,
    shape,
    window,
)
from autoshard.rules.kernel_work import kernel_of
from autoshard.rules.kernels import grid_of
from autoshard.rules.lookup import rules_of
from autoshard.rules.mapped import in_order
from autoshard.rules.partitioner import propagates, runs_per_shard
from autoshard.rules.partitioning import partitioned, splits
from autoshard.rules.registry import registered, rule, rule_of
from autoshard.rules.shardy import same_on_shards
