"""Starts of small peak memory, from which a search continues where no price of memory leads to an answer within the limit."""

from __future__ import annotations

from contextlib import suppress

from autoshard.errors import InfeasibleError, SearchLimitError, ShardingError
from autoshard.memory_limit.repair import Answer
from autoshard.problem import Problem
from autoshard.search.baselines import FullySharded
from autoshard.search.tensor_parallel import TensorParallel


def low_memory_starts(problem: Problem) -> list[Answer]:
    """The answers of fully sharded data parallelism and of tensor parallelism, whatever the memory limit; found once a problem."""
    return problem.cached(_starts)


def _starts(problem: Problem) -> list[Answer]:
    unlimited, found = problem.within(None), []
    for searcher in (FullySharded(stage=3), TensorParallel()):
        with suppress(InfeasibleError, SearchLimitError, ShardingError):
            judgement = searcher.solve(unlimited).judgement
            found.append((judgement, problem.labels(judgement.assignment)))
    return found
