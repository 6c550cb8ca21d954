"""Dynamic programming: the optimum over all mesh axes at once, with its proof.

*Variables.* One a node of the problem (`autoshard.problem`): the choice of an op that leads a group, or the layout that a value is held in.
*Constraints.* Choices are legal, layouts divide, pins hold: other labels are not offered. *Objective.* The sum of unary and pair tables,
which is the judge's ``objective_seconds``. *Ties.* Of equal labellings the one that elimination meets first: the smallest labels, last node
first.

*Steps.* Message passing and shells of small reduced cost, widened until an answer is proven (`autoshard.search.shells`).

*Repeated layers* are folded first (`autoshard.problem.folding`): the steps are taken on a problem of a layer or two, whose optimum is an
answer to the whole. Costs moved as they were moved there give a bound of the whole, and some more message passing raises it until it is
within the tolerance of the answer; where it is not, the steps are taken on the whole.

After the dynamic programming of MindSpore's auto parallel (node, edge and triangle elimination), here on bounded tables.

Complexity: sweeps x table entries, then nodes x kept labels ** (induced width + 1); of repeated layers those of a layer or two, and a few
sweeps over all.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

from autoshard.cost.evaluate import Judgement
from autoshard.errors import InfeasibleError, SearchLimitError
from autoshard.problem import Folded, Label, Problem, Tables, folded
from autoshard.search.elimination import table_cost
from autoshard.search.memory import fastest_within
from autoshard.search.recursive_programming import RecursiveProgramming
from autoshard.search.reparametrisation import Passing, Reparametrisation, unfolded
from autoshard.search.searcher import Progress, Solution, silent
from autoshard.search.shells import ROUNDING, SWEEPS, Shells


@dataclass(frozen=True, slots=True)
class DynamicProgramming:
    """The dynamic-programming searcher.

    Attributes:
        max_entries: the largest table of an elimination.
        max_problem_entries: how many entries all pair tables together may have.
        max_sweeps: how often message passing goes over the nodes.
        price_steps: how many memory prices may be tried when the limit binds.
        tolerance: the gap at which nothing more is tried: further sweeps, or the whole after the folded problem; 0 asks for the optimum.
    """

    name: ClassVar[str] = "dynamic_programming"
    automatic: ClassVar[bool] = True

    max_entries: int = 1 << 21
    max_problem_entries: int = 1 << 26
    max_sweeps: int = 240
    price_steps: int = 12
    tolerance: float = 1e-3

    def solve(self, problem: Problem, progress: Progress = silent) -> Solution:
        """The optimum, proven where the tables stay small enough; see the module.

        Raises:
            SearchLimitError: the mesh has so many axes that the tables alone would be too large.
            InfeasibleError: nothing fits the memory limit.
        """
        try:
            own, binds = self._found(problem, progress)
        except InfeasibleError:
            return RecursiveProgramming().solve(problem, progress)
        if binds:  # the best answers under prices need not be the best ones within a limit
            with suppress(InfeasibleError):
                other = RecursiveProgramming().solve(problem, progress)
                if other.judgement.cost.objective_seconds < own.judgement.cost.objective_seconds:
                    return replace(own, assignment=other.assignment, judgement=other.judgement)
        return own

    def _found(self, problem: Problem, progress: Progress) -> tuple[Solution, bool]:
        """The optimum under the prices that keep it within the memory limit, and whether there had to be any and nothing is folded."""
        started = time.perf_counter()
        small = folded(problem)
        run = _Run(self, problem if small is None else small, progress)
        judgement, labels = fastest_within(run.problem, run.optimum, self.price_steps)
        bound = run.bound
        if small is not None:
            judgement, labels, bound = self._unfolded(problem, small, run, judgement, small.unfold(labels))
        solution = Solution(
            assignment=problem.assignment(labels),
            judgement=judgement,
            lower_bound_seconds=min(bound + problem.fixed_seconds(), judgement.cost.objective_seconds),
            stats={
                "n_nodes": problem.n_nodes,
                "n_variables": run.n_variables,
                "induced_width": run.shells.width,
                "sweeps": run.shells.sweeps,
                "shells": run.shells.shells,
                "search_seconds": time.perf_counter() - started,
            },
        )
        limit = problem.memory_limit_bytes
        return solution, small is None and limit is not None and run.first.cost.peak_bytes > limit

    def _unfolded(
        self, problem: Problem, small: Folded, run: _Run, judgement: Judgement, labels: list[Label]
    ) -> tuple[Judgement, list[Label], float]:
        """The folded problem's answer where a bound of the whole shows it to be good enough, or memory binds; else the whole's."""
        whole = _Run(self, problem, run.progress)
        try:
            tables = whole.tables_without_prices()
        except SearchLimitError:
            return judgement, labels, problem.compute_bound() - problem.fixed_seconds()
        passing = Passing(*unfolded(small, run.tables, run.moved, tables))
        enough = run.cost * (1 - self.tolerance)
        run.shells.sweeps += passing.run(SWEEPS, enough, run.progress)
        bound = passing.bound() - ROUNDING * run.cost
        if bound >= enough - ROUNDING * run.cost or judgement is not run.first:
            return judgement, labels, bound
        found, bound = run.shells.widened(tables, passing.normalised(run.shells.sweeps))
        run.n_variables = max(run.n_variables, sum(len(options) > 1 for options in tables.labels))
        answer = [options[label] for options, label in zip(tables.labels, found, strict=True)]
        other = problem.evaluate(problem.assignment(answer))
        fits = problem.memory_limit_bytes is None or other.cost.peak_bytes <= problem.memory_limit_bytes
        if fits and other.cost.objective_seconds < judgement.cost.objective_seconds:
            return other, answer, bound
        return judgement, labels, bound


class _Run:
    """One problem's searches, with what they took.

    Attributes:
        bound: of all labels, since it is that of the tables without prices.
        first, cost: the judgement of the answer without prices, and its cost in the tables.
        tables, moved: those without prices, before and after message passing.
    """

    first: Judgement
    cost: float
    tables: Tables
    moved: Reparametrisation

    def __init__(self, searcher: DynamicProgramming, problem: Problem, progress: Progress):
        self.searcher = searcher
        self.problem = problem
        self.progress = progress
        self.shells = Shells(searcher.max_entries, searcher.max_sweeps, searcher.tolerance, progress)
        self.bound = 0.0
        self.n_variables = 0

    def optimum(self, prices: Mapping[int, float]) -> tuple[Judgement, list[Label]]:
        """The best labels under memory prices, and what the judge says of them."""
        problem = self.problem
        tables = problem.tables(range(len(problem.mesh.axes)), problem.start(), prices) if prices else self.tables_without_prices()
        self.n_variables = max(self.n_variables, sum(len(options) > 1 for options in tables.labels))
        found, bound, moved = self.shells.solve(tables)
        labels = [options[label] for options, label in zip(tables.labels, found, strict=True)]
        judgement = problem.evaluate(problem.assignment(labels))
        if not prices:
            self.bound, self.tables, self.moved = bound, tables, moved
            self.first, self.cost = judgement, table_cost(tables.unary, tables.pairs, found)
        return judgement, labels

    def tables_without_prices(self) -> Tables:
        """All axes' tables, if they are not too large."""
        problem, limit = self.problem, self.searcher.max_problem_entries
        axes = range(len(problem.mesh.axes))
        if (entries := problem.table_entries(axes, limit)) > limit:
            raise SearchLimitError(
                f"dynamic programming keeps all axes' tables at once, up to {limit:,} entries, and on mesh {problem.mesh} this program has "
                f"more than {entries:,}. Use searcher='recursive_programming', or a mesh of fewer axes."
            )
        self.progress("tables", 0.0)
        return problem.tables(axes, problem.start())
