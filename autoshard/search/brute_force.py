"""Brute force: enumeration of all assignments of a small problem, the reference of the other searchers' tests."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autoshard.errors import InfeasibleError, SearchLimitError
from autoshard.problem import NO_HINTS, Hints, Problem, Tables
from autoshard.progress import Progress, silent
from autoshard.render import format_bytes
from autoshard.search.searcher import Searcher, Solution


@dataclass(frozen=True, slots=True)
class BruteForce(Searcher):
    """The searcher that enumerates; on ties the smallest labels, first variable first.

    Attributes:
        max_assignments: the most that are enumerated.
    """

    name: ClassVar[str] = "brute_force"

    max_assignments: int = 1_000_000

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The optimum over all mesh axes at once.

        Raises:
            SearchLimitError: there are too many assignments.
            InfeasibleError: none fits the memory limit.
        """
        started = time.perf_counter()
        tables = problem.tables(range(len(problem.mesh.axes)), problem.start())
        n = math.prod(len(options) for options in tables.labels)
        if n > self.max_assignments:
            raise SearchLimitError(
                f"brute force tries up to {self.max_assignments:,} assignments and this problem has {n:,}. "
                "Use searcher='recursive_programming'."
            )
        sizes = [len(options) for options in tables.labels]
        strides = [math.prod(sizes[variable + 1 :]) for variable in range(len(sizes))]
        costs = _costs(tables, strides)
        smallest = math.inf
        for number in np.argsort(costs, kind="stable"):
            assignment = problem.assignment(
                [options[int(number) // stride % len(options)] for options, stride in zip(tables.labels, strides, strict=True)]
            )
            judgement = problem.evaluate(assignment)
            smallest = min(smallest, judgement.cost.peak_bytes)
            if problem.memory_limit_bytes is None or smallest <= problem.memory_limit_bytes:
                bound = min(judgement.cost.objective_seconds, problem.compute_bound())
                stats = {"assignments": n, "search_seconds": time.perf_counter() - started}
                return Solution(judgement, bound, stats, hints=hints)
        raise InfeasibleError(f"no assignment fits the memory limit; the smallest peak is {format_bytes(smallest)}.", smallest)


def _costs(tables: Tables, strides: Sequence[int]) -> np.ndarray:
    """The energies of all labellings, numbered with the last variable's label varying fastest."""
    numbers = np.arange(math.prod(map(len, tables.unary)))

    def position(variable: int) -> np.ndarray:
        return numbers // strides[variable] % len(tables.unary[variable])

    costs = np.zeros(len(numbers))
    for variable, table in enumerate(tables.unary):
        costs += table[position(variable)]
    for (i, j), table in tables.pairs.items():
        costs += table[position(i), position(j)]
    return costs
