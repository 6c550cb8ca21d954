"""Dynamic programming: the optimum over all mesh axes at once, with its proof.

*Variables.* Those of the problem (`autoshard.problem`): the choice of an op that leads a group, or the layout of a stored value.
*Constraints.* Choices are legal, layouts divide dimensions, pins are honoured: domains have no other labels. *Objective.* The sum of unary
and pair tables, which is the judge's ``objective_seconds``. *Ties.* Of labellings of equal cost the one that elimination finds: the
smallest labels, last variable first.

*Steps.* Variables of one or two neighbours are eliminated first (`autoshard.reductions.low_degree`); then message passing, and elimination
over labels of small reduced cost, ever more of them until an answer is proven (`autoshard.inference.reduced_cost_fixing`).

*Repeated layers* are reduced first (`autoshard.reductions.symmetry`): the steps are taken on the quotient problem of a layer or two, whose
optimum is an answer to the whole. Its messages, lifted to the whole problem, give a lower bound there, and some more message passing raises
it until it is within the tolerance of the answer; where it is not, the steps are taken on the whole.

*Memory.* Where the limit binds, bytes get a price (`autoshard.memory_limit.lagrangian`), and the bound is that of the Lagrangian dual
(`autoshard.memory_limit.dual_bound`).

After the dynamic programming of MindSpore's auto parallel (node, edge and triangle elimination), here on bounded tables.

Complexity: sweeps x table entries, then variables x kept labels ** (induced width + 1); of repeated layers those of a layer or two, and a
few sweeps over all.
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

from autoshard.budgets import BUDGETS
from autoshard.compilers.buffers import Buffer
from autoshard.errors import InfeasibleError, SearchLimitError
from autoshard.inference.model import Messages
from autoshard.inference.reduced_cost_fixing import ReducedCostFixing
from autoshard.inference.reparametrisation import normalised
from autoshard.inference.trw_s import MessagePassing
from autoshard.judge.evaluate import Judgement
from autoshard.memory_limit.dual_bound import live_bytes_at, priced
from autoshard.memory_limit.lagrangian import Fitted, fitted
from autoshard.memory_limit.repair import Answer
from autoshard.problem import NO_HINTS, Hints, Problem, Tables
from autoshard.progress import Progress, silent
from autoshard.reductions import low_degree, symmetry
from autoshard.search.low_memory_starts import low_memory_starts
from autoshard.search.recursive_programming import RecursiveProgramming
from autoshard.search.searcher import Searcher, Solution


@dataclass(frozen=True, slots=True)
class DynamicProgramming(Searcher):
    """The dynamic-programming searcher.

    Attributes:
        max_entries: the largest table of an elimination.
        max_problem_entries: how many entries all pair tables together may have.
        max_sweeps: the most sweeps of message passing.
        price_steps: the most memory prices that may be tried when the limit binds.
        second_opinion: whether recursive programming searches as well where memory binds; portfolios that have it as a member need not.
        tolerance: the relative gap at which nothing more is tried: further sweeps, or the whole problem after its quotient; a multiple of
            it after some attempts (`autoshard.inference.reduced_cost_fixing`); 0 demands the optimum.
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

    def priced(self, problem: Problem, prices: Mapping[Buffer, float], messages: Messages) -> tuple[Answer, Messages]:
        """The best answer where bytes of values have prices, whatever the memory limit, and the messages for the next price."""
        run = _Run(self, problem, silent, replace(NO_HINTS, messages=messages))
        answer = run.optimum(prices)
        return answer, run.messages

    def priced_bound(self, problem: Problem, answer: Answer, price: float) -> float:
        """A lower bound of an assignment's seconds plus the price times its peak bytes, over all assignments.

        Args:
            answer: bytes are those that any assignment has at its moment of peak.
            price: seconds a byte.
        """
        judgement, labels = answer
        tables = problem.whole_tables()
        live = live_bytes_at(problem, tables, labels, judgement.peak, 0.0)
        fewer = low_degree.apply(priced(tables, live.tables(tables), price))
        _, bound, _ = ReducedCostFixing(self.max_entries, self.max_sweeps, self.tolerance, silent).solve(
            fewer.model, {}, BUDGETS.table_sweeps
        )
        return problem.fixed_seconds() + bound - price * live.limit

    def _found(self, problem: Problem, progress: Progress, hints: Hints) -> tuple[Solution, bool]:
        """The optimum under prices that keep it within the memory limit, and whether the limit binds in a problem without symmetry."""
        started = time.perf_counter()
        run = _Run(self, problem, progress, hints)
        found = fitted(problem, run.optimum, self.price_steps, low_memory_starts, hints=hints)
        if found.above is None:
            found, bound = run.proven(found)
        elif found.judgement.cost.objective_seconds > hints.least * BUDGETS.near:  # such an answer's makespan is hardly the least
            bound = problem.compute_bound() - problem.fixed_seconds()
        else:
            bound = run.dual_bound(found, found.above)
        judgement, hints = found.judgement, replace(run.hints, price=found.price)
        problem.hint(hints)
        solution = Solution(
            judgement=judgement,
            lower_bound_seconds=min(bound + problem.fixed_seconds(), judgement.cost.objective_seconds),
            stats={
                "n_variables": problem.n_variables,
                "n_free_variables": run.n_free_variables,
                "induced_width": run.fixing.width,
                "sweeps": run.fixing.sweeps,
                "restrictions": run.fixing.restrictions,
                "search_seconds": time.perf_counter() - started,
            },
            hints=hints,
        )
        return solution, run.small is None and found.above is not None


class _Run:
    """The searches of one problem under several prices, with counts of their work.

    Attributes:
        small: the quotient problem, which is searched where there is one.
        bound: a lower bound of the tables without prices.
        cost: the tables' cost of the answer without prices.
        hints: the given ones, improved.
        messages: the last ones, which start the search under the next price.
        judged: judgements by labels.
    """

    cost: float

    def __init__(self, searcher: DynamicProgramming, problem: Problem, progress: Progress, hints: Hints):
        self.searcher = searcher
        self.problem = problem
        self.small = symmetry.apply(problem)
        self.progress = progress
        self.hints = hints
        self.messages = hints.messages
        self.fixing = ReducedCostFixing(searcher.max_entries, searcher.max_sweeps, searcher.tolerance, progress)
        self.judged: dict[bytes, Judgement] = {}
        self.bound = 0.0
        self.n_free_variables = 0

    def optimum(self, prices: Mapping[Buffer, float]) -> Answer:
        """The judgement and the labels, of the whole problem, of the best answer under memory prices."""
        tables = self._tables(self.small or self.problem, prices)
        found, bound, self.messages = self._solved(tables, self.messages, BUDGETS.table_sweeps if prices else None)
        labels = tables.at(found)
        if not prices:
            self.bound, self.cost = bound, tables.energy(found)
            self.hints = replace(self.hints, messages=self.messages)
        if self.small is not None:
            labels = self.small.invert(labels)
        if (key := found.tobytes()) not in self.judged:  # other prices often have the same answer
            self.judged[key] = self.problem.evaluate(self.problem.assignment(labels))
        return self.judged[key], labels

    def proven(self, found: Fitted) -> tuple[Fitted, float]:
        """The answer, where a lower bound of the whole problem is within the tolerance of it, else the whole problem's; and the bound."""
        if self.small is None:
            return found, self.bound
        problem = self.problem
        try:
            tables = self._tables(problem)
        except SearchLimitError:
            return found, problem.compute_bound() - problem.fixed_seconds()
        passing = self.small.message_passing(self.hints.messages, tables)
        bound, enough = self._pass(passing, self.cost)
        if enough:
            return found, bound - BUDGETS.rounding * self.cost
        best, bound = self.fixing.minimise(tables, normalised(passing, self.fixing.sweeps))
        answer = tables.at(best)
        other = problem.evaluate(problem.assignment(answer))
        fits = problem.memory_limit_bytes is None or other.cost.peak_bytes <= problem.memory_limit_bytes
        if fits and other.cost.objective_seconds < found.judgement.cost.objective_seconds:
            return Fitted(other, answer), bound
        return found, bound

    def dual_bound(self, found: Fitted, above: Answer) -> float:
        """The Lagrangian dual bound over all labels within the memory limit: the least cost under a price, less the limit's worth at it."""
        problem, small = self.problem, self.small
        try:
            tables = self._tables(problem)
        except SearchLimitError:
            return problem.compute_bound() - problem.fixed_seconds()
        live = live_bytes_at(problem, tables, above[1], above[0].peak, problem.memory_limit_bytes or 0.0)
        charges = live.tables(tables)
        own, own_charges = (tables, charges) if small is None else (small.project_tables(tables), small.project_tables(charges))
        answers = []  # (seconds, bytes beyond the limit): no bound at a price exceeds an answer's cost at it
        for labels in (above[1], found.labels):
            at = tables.positions(labels)
            answers.append((tables.energy(at), charges.energy(at) - live.limit))
        (fast, excess), (slow, slack) = answers
        best, price, messages = -math.inf, 0.0, self.messages
        for _ in range(BUDGETS.dual_steps if excess > 0.0 else 0):
            tried = max(slow - fast, 0.0) / (excess - slack)
            labels, bound, moved = self._solved(priced(own, own_charges, tried), messages, BUDGETS.table_sweeps)
            bound -= tried * live.limit
            if bound > best:
                best, price, messages = bound, tried, moved
            if bound >= (fast + tried * excess) * (1 - self.searcher.tolerance):
                break  # no price does better than the one at which the two answers cost the same
            seconds = own.energy(labels)
            beyond = own_charges.energy(labels) - live.limit
            if beyond > 0.0:
                fast, excess = seconds, beyond
            else:
                slow, slack = seconds, beyond
        self.hints = replace(self.hints, above=tuple(above[1]), worth=price, priced_messages=messages)
        if small is None:
            return max(self.bound, best)
        cost = found.judgement.cost.objective_seconds - problem.fixed_seconds() + price * live.limit
        bound, _ = self._pass(small.message_passing(messages, priced(tables, charges, price)), cost)
        return bound - price * live.limit - BUDGETS.rounding * cost

    def _solved(self, tables: Tables, messages: Messages, max_sweeps: int | None) -> tuple[np.ndarray, float, Messages]:
        """The best labels of tables, a lower bound, and the messages that show it, from given messages.

        A quotient's variables of low degree are not eliminated, since its messages are to be lifted to the whole problem.
        """
        if self.small is not None:
            found, bound, moved = self.fixing.solve(tables, messages, max_sweeps)
            return found, bound, moved.messages
        known = tables is self.problem.whole_tables()
        fewer = self.problem.cached(low_degree.apply_whole) if known else low_degree.apply(tables)
        layout = self.problem.cached(low_degree.message_layout) if known else None
        found, bound, moved = self.fixing.solve(fewer.model, messages, max_sweeps, layout)
        return fewer.invert(found), bound, moved.messages

    def _pass(self, passing: MessagePassing, cost: float) -> tuple[float, bool]:
        """The whole problem's bound after message passing, and whether it is within the tolerance of an answer's cost."""
        entries = passing.model.n_entries
        left = min(BUDGETS.table_sweeps, 1 + BUDGETS.bounding_entries // max(entries, 1))
        for attempt in count(1):
            enough = cost * (1 - self.fixing.tolerated(attempt))
            done = passing.run(min(BUDGETS.attempt_sweeps, left), enough, self.progress)
            left -= done
            self.fixing.sweeps += done
            bound = passing.bound()
            if bound >= enough or done < BUDGETS.attempt_sweeps or not left:
                return bound, bound >= enough
        raise AssertionError("attempts end when no sweeps are left")

    def _tables(self, problem: Problem, prices: Mapping[Buffer, float] | None = None) -> Tables:
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
        self.n_free_variables = max(self.n_free_variables, sum(len(options) > 1 for options in tables.labels))
        return tables
