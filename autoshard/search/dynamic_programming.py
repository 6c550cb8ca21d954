"""Dynamic programming: the optimum over all mesh axes at once, with its proof.

*Variables.* One a node of the problem (`autoshard.problem`): the choice of an op that leads a group, or the layout that a value is held in.
*Constraints.* Choices are legal, layouts divide, pins hold: other labels are not offered. *Objective.* The sum of unary and pair tables,
which is the judge's ``objective_seconds``. *Ties.* Of equal labellings the one that elimination meets first: the smallest labels, last node
first.

*Steps.* Nodes of one or two neighbours go first (`autoshard.search.contraction`); then message passing, and shells of small reduced cost,
widened until an answer is proven (`autoshard.search.shells`).

*Repeated layers* are folded first (`autoshard.problem.folding`): the steps are taken on a problem of a layer or two, whose optimum is an
answer to the whole. Costs moved as they were moved there give a bound of the whole, and some more message passing raises it until it is
within the tolerance of the answer; where it is not, the steps are taken on the whole.

*Memory.* Where the limit binds bytes get a price, and the bound is the dual one (`autoshard.search.memory`).

After the dynamic programming of MindSpore's auto parallel (node, edge and triangle elimination), here on bounded tables.

Complexity: sweeps x table entries, then nodes x kept labels ** (induced width + 1); of repeated layers those of a layer or two, and a few
sweeps over all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import count
from typing import ClassVar

import numpy as np

from autoshard.errors import InfeasibleError, SearchLimitError
from autoshard.judge.evaluate import Judgement
from autoshard.problem import BUDGETS, NO_HINTS, Hints, Messages, Problem, Tables, folded
from autoshard.search.contraction import contracted, contracted_whole
from autoshard.search.elimination import table_cost
from autoshard.search.frugal import frugal
from autoshard.search.memory import Fitted, Found, fitted, held_at, priced
from autoshard.search.passing import Passing
from autoshard.search.recursive_programming import RecursiveProgramming
from autoshard.search.reparametrisation import contracted_wiring, normalised, passing_of
from autoshard.search.searcher import Progress, Searcher, Solution, silent
from autoshard.search.shells import Shells


@dataclass(frozen=True, slots=True)
class DynamicProgramming(Searcher):
    """The dynamic-programming searcher.

    Attributes:
        max_entries: the largest table of an elimination.
        max_problem_entries: how many entries all pair tables together may have.
        max_sweeps: how often message passing goes over the nodes.
        price_steps: how many memory prices may be tried when the limit binds.
        second_opinion: whether recursive programming is asked too where memory binds; portfolios that have it do so themselves.
        tolerance: the gap at which nothing more is tried: further sweeps, or the whole after the folded problem; a multiple of it after
            some attempts (`autoshard.search.shells`); 0 asks for the optimum.
    """

    name: ClassVar[str] = "dynamic_programming"
    automatic: ClassVar[bool] = True

    max_entries: int = 1 << 21
    max_problem_entries: int = 1 << 26
    max_sweeps: int = 240
    price_steps: int = 12
    second_opinion: bool = True
    tolerance: float = 1e-3

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The optimum, proven where the tables stay small enough; see the module.

        Raises:
            SearchLimitError: the mesh has so many axes that the tables alone would be too large.
            InfeasibleError: nothing fits the memory limit.
        """
        if not self.second_opinion:
            return self._found(problem, progress, hints)[0]
        try:
            own, binds = self._found(problem, progress, hints)
        except InfeasibleError as error:
            if error.proven:
                raise
            return RecursiveProgramming().solve(problem, progress, hints)
        if binds:  # the best answers under prices need not be the best ones within a limit
            with suppress(InfeasibleError):
                other = RecursiveProgramming().solve(problem, progress, own.hints)
                own = replace(own, hints=other.hints)
                if other.judgement.cost.objective_seconds < own.judgement.cost.objective_seconds:
                    return replace(own, judgement=other.judgement)
        return own

    def _found(self, problem: Problem, progress: Progress, hints: Hints) -> tuple[Solution, bool]:
        """The optimum under the prices that keep it within the memory limit, and whether there had to be any and nothing is folded."""
        started = time.perf_counter()
        run = _Run(self, problem, progress, hints)
        found = fitted(problem, run.optimum, self.price_steps, frugal, hints=hints)
        if found.above is None:
            found, bound = run.unfolded(found)
        elif found.judgement.cost.objective_seconds > hints.least * (1 - self.tolerance):
            bound = problem.compute_bound() - problem.fixed_seconds()  # a better one would not be worth its time
        else:
            bound = run.dual_bound(found, found.above)
        judgement, hints = found.judgement, replace(run.hints, price=found.price)
        problem.hint(hints)
        solution = Solution(
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
            hints=hints,
        )
        return solution, run.small is None and found.above is not None


class _Run:
    """One problem's searches, with what they took.

    Attributes:
        small: the folded problem, which is searched where there is one.
        bound: of all labels of what is searched, since it is that of the tables without prices.
        cost: of the answer without prices, in the tables.
        hints: what is known by now, as it was given at first.
        sent: what message passing moved last: prices change little from one to the next.
        judged: what the judge says of answers that were met, by their labels.
    """

    cost: float

    def __init__(self, searcher: DynamicProgramming, problem: Problem, progress: Progress, hints: Hints):
        self.searcher = searcher
        self.problem = problem
        self.small = folded(problem)
        self.progress = progress
        self.hints = hints
        self.sent = hints.sent
        self.shells = Shells(searcher.max_entries, searcher.max_sweeps, searcher.tolerance, progress)
        self.judged: dict[bytes, Judgement] = {}
        self.bound = 0.0
        self.n_variables = 0

    def optimum(self, prices: Mapping[int, float]) -> Found:
        """The best labels under memory prices, of the whole problem, and what the judge says of them."""
        tables = self._tables(self.small or self.problem, prices)
        found, bound, self.sent = self._solved(tables, self.sent, BUDGETS.table_sweeps if prices else None)
        labels = [options[label] for options, label in zip(tables.labels, found, strict=True)]
        if not prices:
            self.bound, self.cost = bound, table_cost(tables.unary, tables.pairs, found)
            self.hints = replace(self.hints, sent=self.sent)
        if self.small is not None:
            labels = self.small.unfold(labels)
        if (key := found.tobytes()) not in self.judged:  # other prices often have the same answer
            self.judged[key] = self.problem.evaluate(self.problem.assignment(labels))
        return self.judged[key], labels

    def unfolded(self, found: Fitted) -> tuple[Fitted, float]:
        """The answer where a bound of the whole problem shows it to be good enough, else the whole's; and the bound."""
        if self.small is None:
            return found, self.bound
        problem = self.problem
        try:
            tables = self._tables(problem)
        except SearchLimitError:
            return found, problem.compute_bound() - problem.fixed_seconds()
        passing = passing_of(self.small, self.hints.sent, tables)
        bound, enough = self._pass(passing, self.cost)
        if enough:
            return found, bound - BUDGETS.rounding * self.cost
        best, bound = self.shells.widened(tables, normalised(passing, self.shells.sweeps))
        answer = [options[label] for options, label in zip(tables.labels, best, strict=True)]
        other = problem.evaluate(problem.assignment(answer))
        fits = problem.memory_limit_bytes is None or other.cost.peak_bytes <= problem.memory_limit_bytes
        if fits and other.cost.objective_seconds < found.judgement.cost.objective_seconds:
            return Fitted(other, answer), bound
        return found, bound

    def dual_bound(self, found: Fitted, above: Found) -> float:
        """A bound of all labels within the memory limit: the least cost where bytes have a price, less what the limit is worth."""
        problem, small = self.problem, self.small
        try:
            tables = self._tables(problem)
        except SearchLimitError:
            return problem.compute_bound() - problem.fixed_seconds()
        held = held_at(problem, tables, above[1], above[0].peak, problem.memory_limit_bytes or 0.0)
        charges = held.tables(tables)
        own, own_charges = (tables, charges) if small is None else (small.fold_tables(tables), small.fold_tables(charges))
        answers = []  # (seconds, bytes beyond the limit): no bound at a price is higher than what an answer costs there
        for labels in (above[1], found.labels):
            at = [options.index(label) for options, label in zip(tables.labels, labels, strict=True)]
            answers.append((table_cost(tables.unary, tables.pairs, at), table_cost(charges.unary, charges.pairs, at) - held.limit))
        (fast, excess), (slow, slack) = answers
        best, price, sent = -math.inf, 0.0, self.sent
        for _ in range(BUDGETS.dual_steps if excess > 0.0 else 0):
            tried = max(slow - fast, 0.0) / (excess - slack)
            labels, bound, moved = self._solved(priced(own, own_charges, tried), sent, BUDGETS.table_sweeps)
            bound -= tried * held.limit
            if bound > best:
                best, price, sent = bound, tried, moved
            if bound >= (fast + tried * excess) * (1 - self.searcher.tolerance):
                break  # where the two answers' lines cross nothing more is to be had
            seconds = table_cost(own.unary, own.pairs, labels)
            beyond = table_cost(own_charges.unary, own_charges.pairs, labels) - held.limit
            if beyond > 0.0:
                fast, excess = seconds, beyond
            else:
                slow, slack = seconds, beyond
        self.hints = replace(self.hints, above=tuple(above[1]), worth=price, sent_priced=sent)
        if small is None:
            return max(self.bound, best)
        cost = found.judgement.cost.objective_seconds - problem.fixed_seconds() + price * held.limit
        bound, _ = self._pass(passing_of(small, sent, priced(tables, charges, price)), cost)
        return bound - price * held.limit - BUDGETS.rounding * cost

    def _solved(self, tables: Tables, sent: Messages, max_sweeps: int | None) -> tuple[np.ndarray, float, Messages]:
        """The best labels of tables, a bound, and what was moved, from what was moved before.

        Folded tables stay whole, since what moves between their nodes is to move in the whole problem too.
        """
        if self.small is not None:
            found, bound, moved = self.shells.solve(tables, sent, max_sweeps)
            return found, bound, moved.sent
        known = tables is self.problem.whole_tables()
        fewer = self.problem.remembered(contracted_whole) if known else contracted(tables)
        wiring = self.problem.remembered(contracted_wiring) if known else None
        found, bound, moved = self.shells.solve(fewer.tables, sent, max_sweeps, wiring)
        return fewer.labels(found), bound, moved.sent

    def _pass(self, passing: Passing, cost: float) -> tuple[float, bool]:
        """The whole problem's bound after message passing, and whether it is as near to an answer's cost as is asked for."""
        entries = sum(table.size for table in passing.pairs.values())
        left = min(BUDGETS.table_sweeps, 1 + BUDGETS.whole_entries // max(entries, 1))
        for attempt in count(1):
            enough = cost * (1 - self.shells.tolerated(attempt))
            done = passing.run(min(BUDGETS.attempt_sweeps, left), enough, self.progress)
            left -= done
            self.shells.sweeps += done
            bound = passing.bound()
            if bound >= enough or done < BUDGETS.attempt_sweeps or not left:
                return bound, bound >= enough
        raise AssertionError("attempts end when no sweeps are left")

    def _tables(self, problem: Problem, prices: Mapping[int, float] | None = None) -> Tables:
        """All axes' tables, if they are not too large."""
        limit = self.searcher.max_problem_entries
        axes = range(len(problem.mesh.axes))
        if (entries := problem.table_entries(axes, limit)) > limit:
            raise SearchLimitError(
                f"dynamic programming keeps all axes' tables at once, up to {limit:,} entries, and on mesh {problem.mesh} this program has "
                f"more than {entries:,}. Use searcher='recursive_programming', or a mesh of fewer axes."
            )
        self.progress("tables", 0.0)
        tables = problem.tables(axes, problem.start(), prices) if prices else problem.whole_tables()
        self.n_variables = max(self.n_variables, sum(len(options) > 1 for options in tables.labels))
        return tables
