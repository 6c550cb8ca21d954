"""What users call: search, evaluate, parallelize, and the `Strategy` they get."""

from autoshard.api.parallelize import Parallelized, parallelize
from autoshard.api.search import evaluate, search
from autoshard.api.step import Step
from autoshard.api.strategy import Strategy, load
from autoshard.api.verification import Verification, verify

__all__ = ["Parallelized", "Step", "Strategy", "Verification", "evaluate", "load", "parallelize", "search", "verify"]
