"""Answers that hold little: where a search goes on from whose prices for bytes lead to nothing within a memory limit."""

from __future__ import annotations

from contextlib import suppress

from autoshard.errors import InfeasibleError, SearchLimitError, ShardingError
from autoshard.problem import Problem
from autoshard.search.baselines import FullySharded
from autoshard.search.memory import Found
from autoshard.search.tensor_parallel import TensorParallel


def frugal(problem: Problem) -> list[Found]:
    """What fully sharded data parallelism and tensor parallelism find where memory has no limit."""
    unlimited, found = problem.within(None), []
    for searcher in (FullySharded(stage=3), TensorParallel()):
        with suppress(InfeasibleError, SearchLimitError, ShardingError):
            judgement = searcher.solve(unlimited).judgement
            found.append((judgement, problem.labels(judgement.assignment)))
    return found
