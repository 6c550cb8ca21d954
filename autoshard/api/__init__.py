"""What users call: search, evaluate, parallelize, and the `Strategy` they get."""

from autoshard.api.comparing import Comparison, compare
from autoshard.api.confirm import Confirm
from autoshard.api.costs import collective_seconds, matmul_seconds
from autoshard.api.frontier import Frontier, frontier
from autoshard.api.kernel_rules import kernel_rule
from autoshard.api.linting import Lint, lint
from autoshard.api.parallelize import Parallelized, parallelize
from autoshard.api.search import evaluate, search
from autoshard.api.step import Step
from autoshard.api.strategy import Strategy, load
from autoshard.api.sweep import Sweep, SweepPoint, sweep
from autoshard.api.verification import Verification, verify
from autoshard.api.what_if import WhatIf

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
