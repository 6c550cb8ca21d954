"""Brute force: every assignment of a small problem, one by one. The referee of the other searchers' tests."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from itertools import product
from typing import ClassVar

from autoshard.errors import InfeasibleError, SearchLimitError
from autoshard.problem import Problem
from autoshard.render import format_bytes
from autoshard.search.elimination import table_cost
from autoshard.search.searcher import Progress, Solution, silent


@dataclass(frozen=True, slots=True)
class BruteForce:
    """The assignment of least table cost, and the smallest labels on ties.

    Attributes:
        max_assignments: more than this many raise `SearchLimitError`.
    """

    name: ClassVar[str] = "brute_force"
    automatic: ClassVar[bool] = False

    max_assignments: int = 1_000_000

    def solve(self, problem: Problem, progress: Progress = silent) -> Solution:
        """The optimum over all mesh axes at once."""
        started = time.perf_counter()
        tables = problem.tables(range(len(problem.mesh.axes)), problem.start())
        n = math.prod(len(options) for options in tables.labels)
        if n > self.max_assignments:
            raise SearchLimitError(
                f"brute force tries up to {self.max_assignments:,} assignments and this problem has {n:,}. "
                "Use searcher='recursive_programming'."
            )
        ranges = [range(len(options)) for options in tables.labels]
        ranked = sorted((table_cost(tables.unary, tables.pairs, labels), labels) for labels in product(*ranges))
        smallest = math.inf
        for _, labels in ranked:
            assignment = problem.assignment([options[label] for options, label in zip(tables.labels, labels, strict=True)])
            judgement = problem.evaluate(assignment)
            smallest = min(smallest, judgement.cost.peak_bytes)
            if problem.memory_limit_bytes is None or smallest <= problem.memory_limit_bytes:
                bound = min(judgement.cost.objective_seconds, problem.compute_bound())
                return Solution(assignment, judgement, bound, {"assignments": n, "search_seconds": time.perf_counter() - started})
        raise InfeasibleError(f"no assignment fits the memory limit; the smallest peak is {format_bytes(smallest)}.", smallest)
