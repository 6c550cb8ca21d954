"""The public functions and classes."""

from autoshard.ask.comparing import Comparison, compare
from autoshard.ask.costs import collective_seconds, matmul_seconds
from autoshard.ask.frontier import Frontier, frontier
from autoshard.ask.kernel_rules import kernel_rule
from autoshard.ask.linting import Lint, lint
from autoshard.ask.parallelize import Parallelized, parallelize
from autoshard.ask.search import evaluate, search
from autoshard.ask.strategy import Strategy, WhatIf, load
from autoshard.ask.sweep import Sweep, SweepPoint, sweep
from autoshard.ask.verification import verify
from autoshard.ask.verified import Verification
from autoshard.plan.confirm import Confirm
from autoshard.run.step import Step

__all__ = [
    "Comparison",
    "Confirm",
    "Frontier",
    "Lint",
    "Parallelized",
    "Step",
    "Strategy",
    "Sweep",
    "SweepPoint",
    "Verification",
    "WhatIf",
    "collective_seconds",
    "compare",
    "evaluate",
    "frontier",
    "kernel_rule",
    "lint",
    "load",
    "matmul_seconds",
    "parallelize",
    "search",
    "sweep",
    "verify",
]
