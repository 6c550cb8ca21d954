"""autoshard finds how to shard any JAX train step over many devices, says what it will cost, and runs it."""

from autoshard.api import Strategy, Verification, collective_seconds, evaluate, load, matmul_seconds, parallelize, search, verify
from autoshard.cluster import Cluster
from autoshard.cost.record import Cost
from autoshard.errors import (
    AutoshardError,
    ClusterError,
    CompilerError,
    InfeasibleError,
    RuleError,
    SearchLimitError,
    ShardingError,
    StrategyError,
    TraceError,
)
from autoshard.ir import Collective
from autoshard.probe import Calibration, calibrate
from autoshard.search import (
    Auto,
    BruteForce,
    DataParallel,
    DynamicProgramming,
    FullySharded,
    IntegerProgramming,
    Manual,
    RecursiveProgramming,
    ShardingPropagation,
    TensorParallel,
)

__all__ = [
    "Auto",
    "AutoshardError",
    "BruteForce",
    "Calibration",
    "Cluster",
    "ClusterError",
    "Collective",
    "CompilerError",
    "Cost",
    "DataParallel",
    "DynamicProgramming",
    "FullySharded",
    "InfeasibleError",
    "IntegerProgramming",
    "Manual",
    "RecursiveProgramming",
    "RuleError",
    "SearchLimitError",
    "ShardingError",
    "ShardingPropagation",
    "Strategy",
    "StrategyError",
    "TensorParallel",
    "TraceError",
    "Verification",
    "calibrate",
    "collective_seconds",
    "evaluate",
    "load",
    "matmul_seconds",
    "parallelize",
    "search",
    "verify",
]
