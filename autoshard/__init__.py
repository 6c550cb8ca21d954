"""Automatic sharding of JAX programs over many devices: searches strategies, predicts their cost, runs and verifies them."""

from autoshard import collectives, distributed
from autoshard.api import (
    Confirm,
    Frontier,
    Strategy,
    Verification,
    collective_seconds,
    evaluate,
    frontier,
    load,
    matmul_seconds,
    parallelize,
    search,
    verify,
)
from autoshard.cluster import Cluster
from autoshard.cost.record import Cost
from autoshard.errors import (
    AutoshardError,
    ClusterError,
    CompilerError,
    InfeasibleError,
    RuleError,
    SearcherError,
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
from autoshard.strategy import Confirmation

__all__ = [
    "Auto",
    "AutoshardError",
    "BruteForce",
    "Calibration",
    "Cluster",
    "ClusterError",
    "Collective",
    "CompilerError",
    "Confirm",
    "Confirmation",
    "Cost",
    "DataParallel",
    "DynamicProgramming",
    "Frontier",
    "FullySharded",
    "InfeasibleError",
    "IntegerProgramming",
    "Manual",
    "RecursiveProgramming",
    "RuleError",
    "SearchLimitError",
    "SearcherError",
    "ShardingError",
    "ShardingPropagation",
    "Strategy",
    "StrategyError",
    "TensorParallel",
    "TraceError",
    "Verification",
    "calibrate",
    "collective_seconds",
    "collectives",
    "distributed",
    "evaluate",
    "frontier",
    "load",
    "matmul_seconds",
    "parallelize",
    "search",
    "verify",
]
