"""Automatic sharding of JAX programs over many devices: searches strategies, predicts their cost, runs and verifies them.

A name is loaded where it is first used: a command's options, or one module of the package, do not need the rest of it.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from autoshard.version import __version__

if TYPE_CHECKING:
    from autoshard import checkpoint, collectives, distributed, parameter_server, serving, testing
    from autoshard.ask.comparing import Comparison, compare
    from autoshard.ask.costs import collective_seconds, matmul_seconds
    from autoshard.ask.frontier import Frontier, frontier
    from autoshard.ask.kernel_rules import kernel_rule
    from autoshard.ask.linting import Lint, lint
    from autoshard.ask.parallelize import parallelize
    from autoshard.ask.search import evaluate, search
    from autoshard.ask.strategy import Strategy, WhatIf, load
    from autoshard.ask.sweep import Sweep, SweepPoint, sweep
    from autoshard.ask.verification import verify
    from autoshard.ask.verified import Verification
    from autoshard.cluster import Cluster
    from autoshard.cost.record import Cost
    from autoshard.errors import (
        AutoshardError,
        CheckpointError,
        ClusterError,
        CompilerError,
        InfeasibleError,
        PipelineError,
        RuleError,
        SearcherError,
        SearchLimitError,
        ShardingError,
        StrategyError,
        TraceError,
    )
    from autoshard.ir import Collective
    from autoshard.plan.confirm import Confirm
    from autoshard.probe import Calibration, calibrate
    from autoshard.rewrite import Padding
    from autoshard.run.diloco import DiLoCo
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
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "Collective",
    "Comparison",
    "CompilerError",
    "Confirm",
    "Confirmation",
    "Cost",
    "DataParallel",
    "DiLoCo",
    "DynamicProgramming",
    "Frontier",
    "FullySharded",
    "InfeasibleError",
    "IntegerProgramming",
    "Lint",
    "Manual",
    "Padding",
    "PipelineError",
    "RecursiveProgramming",
    "RuleError",
    "SearchLimitError",
    "SearcherError",
    "ShardingError",
    "ShardingPropagation",
    "Strategy",
    "StrategyError",
    "Sweep",
    "SweepPoint",
    "TensorParallel",
    "TraceError",
    "Verification",
    "WhatIf",
    "__version__",
    "calibrate",
    "checkpoint",
    "collective_seconds",
    "collectives",
    "compare",
    "distributed",
    "evaluate",
    "frontier",
    "kernel_rule",
    "lint",
    "load",
    "matmul_seconds",
    "parallelize",
    "parameter_server",
    "search",
    "serving",
    "sweep",
    "testing",
    "verify",
]

_NAMES = {
    "ask.comparing": ("Comparison", "compare"),
    "ask.costs": ("collective_seconds", "matmul_seconds"),
    "ask.frontier": ("Frontier", "frontier"),
    "ask.kernel_rules": ("kernel_rule",),
    "ask.linting": ("Lint", "lint"),
    "ask.parallelize": ("parallelize",),
    "ask.search": ("evaluate", "search"),
    "ask.strategy": ("Strategy", "WhatIf", "load"),
    "ask.sweep": ("Sweep", "SweepPoint", "sweep"),
    "ask.verification": ("verify",),
    "ask.verified": ("Verification",),
    "cluster": ("Cluster",),
    "cost.record": ("Cost",),
    "errors": (
        *("AutoshardError", "CheckpointError", "ClusterError", "CompilerError", "InfeasibleError", "PipelineError", "RuleError"),
        *("SearchLimitError", "SearcherError", "ShardingError", "StrategyError", "TraceError"),
    ),
    "ir": ("Collective",),
    "plan.confirm": ("Confirm",),
    "probe": ("Calibration", "calibrate"),
    "rewrite": ("Padding",),
    "run.diloco": ("DiLoCo",),
    "search": (
        *("Auto", "BruteForce", "DataParallel", "DynamicProgramming", "FullySharded", "IntegerProgramming", "Manual"),
        *("RecursiveProgramming", "ShardingPropagation", "TensorParallel"),
    ),
    "strategy": ("Confirmation",),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}


class _Package(ModuleType):
    """The package: importing a folder of it that is named as a public function does not hide the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOMES and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


def __getattr__(name: str) -> Any:
    """A public name, loaded where it is first used."""
    if name not in __all__:
        raise AttributeError(f"module 'autoshard' has no attribute {name!r}")
    home = _HOMES.get(name)
    found = import_module(f"autoshard.{name}") if home is None else getattr(import_module(f"autoshard.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


sys.modules[__name__].__class__ = _Package
