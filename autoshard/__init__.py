"""autoshard finds how to shard any JAX train step over many devices, says what it will cost, and runs it."""

from autoshard.api import Strategy, Verification, evaluate, load, parallelize, search, verify
from autoshard.cluster import Cluster
from autoshard.cost.record import Cost
from autoshard.errors import (
    AutoshardError,
    ClusterError,
    InfeasibleError,
    RuleError,
    SearchLimitError,
    ShardingError,
    StrategyError,
    TraceError,
)
from autoshard.ir import Collective
from autoshard.probe import Calibration, calibrate
from autoshard.search import Auto, BruteForce, DataParallel, DynamicProgramming, FullySharded, RecursiveProgramming

__all__ = [
    "Auto",
    "AutoshardError",
    "BruteForce",
    "Calibration",
    "Cluster",
    "ClusterError",
    "Collective",
    "Cost",
    "DataParallel",
    "DynamicProgramming",
    "FullySharded",
    "InfeasibleError",
    "RecursiveProgramming",
    "RuleError",
    "SearchLimitError",
    "ShardingError",
    "Strategy",
    "StrategyError",
    "TraceError",
    "Verification",
    "calibrate",
    "evaluate",
    "load",
    "parallelize",
    "search",
    "verify",
]
