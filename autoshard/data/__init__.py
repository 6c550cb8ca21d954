"""Batches for a step's devices: which rows a process reads, sources of them, reading ahead, and what processes tell each other of them."""

from autoshard.data.exchange import ENDED, FAILED, HAS, WRAPS, Exchange, Told
from autoshard.data.prefetch import Ahead
from autoshard.data.shard import DataShard, local_index, shard_of
from autoshard.data.sources import Batched, Examples, Source, State, grain_kind, has_gaps, is_random_access, through_grain, tuned

__all__ = [
    "ENDED",
    "FAILED",
    "HAS",
    "WRAPS",
    "Ahead",
    "Batched",
    "DataShard",
    "Examples",
    "Exchange",
    "Source",
    "State",
    "Told",
    "grain_kind",
    "has_gaps",
    "is_random_access",
    "local_index",
    "shard_of",
    "through_grain",
    "tuned",
]
