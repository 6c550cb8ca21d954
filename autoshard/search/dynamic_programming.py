"""Dynamic programming: the optimum over all mesh axes at once, with its proof.

*Variables.* One a node of the problem (`autoshard.problem`): the choice of an op that leads a group, or the layout that a value is held in.
*Constraints.* Choices are legal, layouts divide, pins hold: other labels are not offered. *Objective.* The sum of unary and pair tables,
which is the judge's ``objective_seconds``. *Ties.* Of equal labellings the one that elimination meets first: the smallest labels, last node
first.

*Steps.* (1) Message passing moves costs between the tables until their minima add up to a lower bound
(`autoshard.search.reparametrisation`). Every label then has a reduced cost: any labelling with it exceeds the bound by at least
that. (2) A *shell* keeps the labels of reduced cost up to ``delta``, and variable elimination solves it exactly
(`autoshard.search.elimination`). (3) An answer of cost at most ``bound + delta`` is the optimum, since whatever uses a label outside
the shell costs more. Otherwise the shell is widened, at most to the answer's distance from the bound, which holds the optimum for
certain; where its tables would grow too large, the best answer is returned with the gap that is left.

After the dynamic programming of MindSpore's auto parallel (node, edge and triangle elimination), here on bounded tables.

Complexity: sweeps x table entries, then nodes x kept labels ** (induced width + 1).
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from autoshard.cost.evaluate import Judgement
from autoshard.errors import SearchLimitError
from autoshard.problem import Label, Problem, Tables
from autoshard.search.elimination import Elimination, eliminate, table_cost
from autoshard.search.memory import fastest_within
from autoshard.search.reparametrisation import Reparametrisation, reparametrise
from autoshard.search.searcher import Progress, Solution, silent

ROUNDING = 1e-9  # relative; sums of a few thousand terms in double precision are exact to 1e-12


@dataclass(frozen=True, slots=True)
class DynamicProgramming:
    """The dynamic-programming searcher.

    Attributes:
        max_entries: the largest table of an elimination.
        max_problem_entries: how many entries all pair tables together may have.
        max_sweeps: how often message passing goes over the nodes.
        price_steps: how many memory prices may be tried when the limit binds.
    """

    name: ClassVar[str] = "dynamic_programming"
    automatic: ClassVar[bool] = True

    max_entries: int = 1 << 21
    max_problem_entries: int = 1 << 26
    max_sweeps: int = 60
    price_steps: int = 12

    def solve(self, problem: Problem, progress: Progress = silent) -> Solution:
        """The optimum, proven where the tables stay small enough; see the module.

        Raises:
            SearchLimitError: the mesh has so many axes that the tables alone would be too large.
            InfeasibleError: nothing fits the memory limit.
        """
        started = time.perf_counter()
        run = _Run(self, problem, progress)
        judgement, labels = fastest_within(problem, run.optimum, self.price_steps)
        bound = run.bound + problem.fixed_seconds()
        return Solution(
            assignment=problem.assignment(labels),
            judgement=judgement,
            lower_bound_seconds=min(bound, judgement.cost.objective_seconds),
            stats={
                "n_nodes": problem.n_nodes,
                "n_variables": run.n_variables,
                "induced_width": run.width,
                "sweeps": run.sweeps,
                "shells": run.shells,
                "search_seconds": time.perf_counter() - started,
            },
        )


class _Run:
    """One problem's searches, with what they took; ``bound`` holds for all labels, since it is that of the tables without prices."""

    def __init__(self, searcher: DynamicProgramming, problem: Problem, progress: Progress):
        self.searcher = searcher
        self.problem = problem
        self.progress = progress
        self.bound = 0.0
        self.n_variables = self.width = self.sweeps = self.shells = 0

    def optimum(self, prices: Mapping[int, float]) -> tuple[Judgement, list[Label]]:
        """The best labels under memory prices, and what the judge says of them."""
        problem, searcher = self.problem, self.searcher
        tables = self._tables(prices)
        moved = reparametrise(tables.unary, tables.pairs, max_sweeps=searcher.max_sweeps, progress=self.progress)
        self.sweeps += moved.sweeps
        self.n_variables = max(self.n_variables, sum(len(options) > 1 for options in tables.labels))
        found, bound = self._widened(tables, moved)
        if not prices:
            self.bound = bound
        labels = [options[label] for options, label in zip(tables.labels, found, strict=True)]
        return problem.evaluate(problem.assignment(labels)), labels

    def _tables(self, prices: Mapping[int, float]) -> Tables:
        problem, limit = self.problem, self.searcher.max_problem_entries
        axes = range(len(problem.mesh.axes))
        if (entries := problem.table_entries(axes, limit)) > limit:
            raise SearchLimitError(
                f"dynamic programming keeps all axes' tables at once, up to {limit:,} entries, and on mesh {problem.mesh} this program has "
                f"more than {entries:,}. Use searcher='recursive_programming', or a mesh of fewer axes."
            )
        self.progress("tables", 0.0)
        return problem.tables(axes, problem.start(), prices)

    def _widened(self, tables: Tables, moved: Reparametrisation) -> tuple[np.ndarray, float]:
        """The best labels of ever wider shells, and the bound that is proven by then."""
        rounding = ROUNDING * abs(moved.bound)
        delta = rounding
        try:
            best = self._shell(moved, delta)
        except SearchLimitError:
            best = self._shell(moved, delta, [int(reduced.argmin()) for reduced in moved.reduced])
        cost = table_cost(tables.unary, tables.pairs, best)
        too_wide = math.inf
        while cost > moved.bound + delta and too_wide > 1.25 * delta:
            gap = cost - moved.bound + rounding
            wider = min(max(4 * delta, gap / 64) if too_wide == math.inf else math.sqrt(delta * too_wide), gap)
            self.progress("shells", delta / gap)
            try:
                found = self._shell(moved, wider)
            except SearchLimitError:
                too_wide = wider
                continue
            delta = wider
            best, cost = min(((best, cost), (found, table_cost(tables.unary, tables.pairs, found))), key=lambda labelled: labelled[1])
        return best, min(cost, moved.bound + delta - rounding)  # what uses a label outside the last shell costs more than that

    def _shell(self, moved: Reparametrisation, delta: float, incumbent: list[int] | None = None) -> np.ndarray:
        """The best of the labels whose reduced cost is at most delta; with an incumbent, nodes that are too well connected keep its."""
        kept = [np.flatnonzero(reduced <= max(delta, reduced.min())) for reduced in moved.reduced]
        unary = [table[labels] for table, labels in zip(moved.unary, kept, strict=True)]
        pairs = {(i, j): table[np.ix_(kept[i], kept[j])] for (i, j), table in moved.pairs.items()}
        start = None if incumbent is None else [int(np.searchsorted(labels, label)) for labels, label in zip(kept, incumbent, strict=True)]
        answer: Elimination = eliminate(unary, pairs, max_entries=self.searcher.max_entries, incumbent=start)
        self.shells += 1
        self.width = max(self.width, answer.width)
        return np.array([labels[position] for labels, position in zip(kept, answer.labels, strict=True)])
