"""Random small programs on which the exact searchers must find and prove the same optimum."""

from __future__ import annotations

import pytest
from problems import eager_cluster, problem_of
from small_graphs import random_small

from autoshard.errors import SearchLimitError
from autoshard.search import BruteForce, DynamicProgramming, IntegerProgramming

MESHES = ({"data": 4}, {"data": 2, "model": 2})
CLUSTERS = ("v5e:2x2", "a100:4")


def agree(seeds) -> int:
    """How many of the random programs are small enough for brute force; all three searchers find and prove the same optimum on each."""
    n = 0
    for seed in seeds:
        fn, args = random_small(seed)
        problem = problem_of(fn, *args, mesh=MESHES[seed % 2], cluster=eager_cluster(CLUSTERS[seed // 2 % 2]))
        try:
            exact = BruteForce(max_assignments=100_000).solve(problem).judgement.cost.objective_seconds
        except SearchLimitError:
            continue
        n += 1
        for searcher in (DynamicProgramming(), IntegerProgramming()):
            found = searcher.solve(problem)
            assert found.judgement.cost.objective_seconds == pytest.approx(exact, rel=1e-9), (seed, searcher)
            assert found.lower_bound_seconds == pytest.approx(exact, rel=1e-6), (seed, searcher)
    return n
