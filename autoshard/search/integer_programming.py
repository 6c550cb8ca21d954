"""Integer programming: the optimum as proven by HiGHS, with the memory limit as constraints.

*Variables.* One indicator (0 or 1) a variable of the problem and label; one continuous number a pair of variables and of their labels.
*Constraints.* Each variable has one label; the numbers of a pair add up to the indicators of its variables, from either side (the local
marginal polytope: Wainwright and Jordan 2008, "Graphical models, exponential families, and variational inference", section 4.1).
*Memory.* A peak is a maximum over moments of the program. The model starts without memory rows; where the judge finds the answer's peak
above the limit, a row is added: the bytes, by label, of the values live there are at most the limit. Then the model is solved again
(Kelley 1960, "The cutting-plane method"). Copies in other layouts and partial sums that an op makes as it runs count under all labels of
the op and of what it reads; other copies while the value and all its readers keep their labels. *Objective.* The sum of unary and pair
tables: the judge's ``objective_seconds``. *Ties.* As HiGHS breaks them: equal models get equal answers.

*Warm start.* Message passing (`autoshard.inference.reparametrisation`) gives every label and every pair of labels a reduced cost: a lower
bound of the cost beyond the bound of any labelling with it. The model has the labels and pairs up to a slack, which is widened until the
answer is within it: no label outside is then part of a better one. The first incumbent is the answer of recursive programming.

*The certificate.* Every row follows from the limit: the values live at a moment of the program do not depend on the assignment, and a row
never counts more bytes than the judge does. So the dual bound of the model with rows bounds every
assignment within the limit, and the gap is honest where the limit binds; assignments above the limit may cost less.

Complexity: exponential in the worst case; on tables that message passing has made tight the relaxation is nearly integral.
"""

from __future__ import annotations

import math
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

from autoshard.budgets import BUDGETS
from autoshard.compilers.buffer_assignment import peaks_above
from autoshard.compilers.buffers import Peak
from autoshard.errors import InfeasibleError, SearchLimitError
from autoshard.inference.reparametrisation import Reparametrisation, reparametrise
from autoshard.judge.evaluate import Judgement
from autoshard.problem import NO_HINTS, Hints, MemoryTables, Problem, Tables
from autoshard.progress import Progress, silent
from autoshard.render import format_bytes
from autoshard.search.integer_model import Model, Row, memory_rows
from autoshard.search.recursive_programming import RecursiveProgramming
from autoshard.search.searcher import Searcher, Solution

PEAKS = 4  # of one answer, that get rows at once
ROUND = 1000  # variables; HiGHS takes models under memory rows some tenths of a second, and one of four times as many four seconds


@dataclass(frozen=True, slots=True)
class IntegerProgramming(Searcher):
    """The integer-programming searcher.

    Attributes:
        time_limit_seconds: of all HiGHS runs together; after it the best answer is returned with its gap. None: no limit.
        gap: the relative gap at which the search stops.
        max_problem_entries: the most entries of all pair tables together.
        max_variables: the most variables of a model.
        max_sweeps: the most sweeps of message passing.
        max_nodes: of branch and bound, in one model; None: as many as there is time for.
        max_rounds: the most models solved, of which each counts once for every `ROUND` variables begun; None: as many as there is time
            for. With both limits and no time limit, answers do not depend on the machine.
    """

    name: ClassVar[str] = "integer_programming"
    automatic: ClassVar[bool] = True

    time_limit_seconds: float | None = 60.0
    gap: float = 0.0
    max_problem_entries: int = 1 << 24
    max_variables: int = 1 << 20
    max_sweeps: int = 60
    max_nodes: int | None = None
    max_rounds: int | None = None

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The optimum within the memory limit, or the best found in time; see the module.

        Raises:
            SearchLimitError: the tables or the model would be too large, or no answer within the limit was found in time.
            InfeasibleError: nothing fits the memory limit.
        """
        return _Run(self, problem, progress, hints).solution()

    def limited(self, seconds: float) -> IntegerProgramming:
        """The searcher with a time limit of its own, since HiGHS calls no progress callback; infinity is none."""
        if math.isinf(seconds):
            return self
        return replace(self, time_limit_seconds=seconds if self.time_limit_seconds is None else min(seconds, self.time_limit_seconds))


class _Run:
    """The models of one problem, and the best answer.

    Attributes:
        best: the incumbent; None: none is within the memory limit.
        smallest_peak: the smallest peak found, in bytes.
        rows: of memory.
        known: the bytes of values at peaks so far, by value and the number of its layout.
        rounds: the models solved, as `IntegerProgramming.max_rounds` counts them.
        n_variables: of the last one.
        until: the end of the time limit.
    """

    def __init__(self, searcher: IntegerProgramming, problem: Problem, progress: Progress, hints: Hints):
        self.searcher = searcher
        self.problem = problem
        self.progress = progress
        self.hints = hints
        self.started = time.perf_counter()
        self.best: Judgement | None = None
        self.smallest_peak = math.inf
        self.rows: list[Row] = []
        self.known: dict[tuple[int, int], float] = {}
        self.rounds = self.n_variables = 0
        self.until = math.inf

    def solution(self, starts: bool = True) -> Solution:
        """The best answer; ``starts``: whether the first incumbent is searched for."""
        problem = self.problem
        if starts:
            self._first_answer()
        tables = self._tables()
        moved = reparametrise(tables, max_sweeps=self.searcher.max_sweeps, progress=self.progress)
        bound = self._bound_by_widening(tables, moved, problem.fixed_seconds())
        if self.best is None:
            raise InfeasibleError(
                f"a strategy must fit {format_bytes(problem.memory_limit_bytes or 0.0)} a device, and on mesh {problem.mesh} none does: "
                f"the smallest peak found is {format_bytes(self.smallest_peak)}. "
                "Use more devices, a smaller batch, or a higher memory limit.",
                self.smallest_peak,
            )
        is_open = bound < self.best.cost.objective_seconds * (1 - self.searcher.gap) / (1 + BUDGETS.rounding)
        late = f"integer programming's {self._given()} before its bound reached its answer: a higher limit may close the gap"
        return Solution(
            judgement=self.best,
            lower_bound_seconds=min(bound, self.best.cost.objective_seconds),
            notes=(late,) if is_open else (),
            stats={
                "n_variables": problem.n_variables,
                "n_program_variables": self.n_variables,
                "memory_rows": len(self.rows),
                "rounds": self.rounds,
                "search_seconds": time.perf_counter() - self.started,
            },
            hints=self.hints,
        )

    def _first_answer(self) -> None:
        try:
            first = RecursiveProgramming().solve(self.problem, self.progress, self.hints)
        except InfeasibleError as error:
            self.smallest_peak = error.smallest_peak_bytes or math.inf
        else:
            self.best, self.hints = first.judgement, first.hints

    def _tables(self) -> Tables:
        problem, limit = self.problem, self.searcher.max_problem_entries
        axes = range(len(problem.mesh.axes))
        if (entries := problem.table_entries(axes, limit)) > limit:
            raise SearchLimitError(
                f"integer programming takes tables of up to {limit:,} entries, and on mesh {problem.mesh} this program has "
                f"more than {entries:,}. Use searcher='dynamic_programming', or 'recursive_programming' on meshes of many axes."
            )
        return problem.whole_tables()

    def _bound_by_widening(self, tables: Tables, moved: Reparametrisation, fixed: float) -> float:
        """The lower bound from models of ever more labels, until none outside can be part of a better answer, or the time is over."""
        seconds = self.searcher.time_limit_seconds
        self.until = math.inf if seconds is None else time.perf_counter() + seconds
        least = bound = fixed + moved.bound
        most = sum(float(table.max()) for table in (*moved.unary, *moved.pairs.values()))  # a slack with which the model has all labels
        slack = 0.0
        while True:
            enough = most if self.best is None else self.best.cost.objective_seconds - least
            slack = min(max(8 * slack, enough / 64 if self.best else least / 64), max(enough, 0.0)) + BUDGETS.rounding * least
            model = Model(moved, slack, self.searcher.max_variables, self.problem.memory_limit_bytes is not None)
            self.n_variables = model.n_variables
            bound = max(bound, min(self._bound_by_rows(tables, model, fixed), least + slack))
            objective = math.inf if self.best is None else self.best.cost.objective_seconds
            if objective <= bound / (1 - self.searcher.gap) * (1 + BUDGETS.rounding) or slack >= most or self._late():
                return bound

    def _bound_by_rows(self, tables: Tables, model: Model, fixed: float) -> float:
        """The lower bound of a model with ever more memory rows, until its answer is within the limit, or the time is over."""
        problem = self.problem
        bound = 0.0
        while True:
            left = max(self.until - time.perf_counter(), 0.0)
            given = self.searcher.time_limit_seconds
            self.progress("integer program", 0.0 if given is None else 1.0 - left / given)
            answer = model.solved(self.rows, max(left, 0.1), self.searcher.gap, self.searcher.max_nodes)
            self.rounds += 1 + model.n_variables // ROUND
            bound = max(bound, fixed + answer.bound)
            if answer.labels is None:
                return bound
            labels = [options[label] for options, label in zip(tables.labels, answer.labels, strict=True)]
            judgement = problem.evaluate(problem.assignment(labels))
            limit = problem.memory_limit_bytes
            self.smallest_peak = min(self.smallest_peak, judgement.cost.peak_bytes)
            if limit is None or judgement.cost.peak_bytes <= limit:
                if self.best is None or judgement.cost.objective_seconds < self.best.cost.objective_seconds:
                    self.best = judgement
                return bound
            memory, sizes = problem.cached(MemoryTables), [len(options) for options in tables.labels]
            for peak in self._peaks(judgement, limit):
                self.known |= memory.held_bytes(peak, answer.labels)
                self.rows += memory_rows(problem, sizes, answer.labels, peak, limit, self.known)
            if self._late():
                return bound

    def _peaks(self, judgement: Judgement, limit: float) -> list[Peak]:
        """The judged peak, and the fullest other moments beyond the limit."""
        facts, peak = self.problem.facts, judgement.peak
        others = peaks_above(facts, judgement.assignment, judgement.copies, judgement.partials, limit, PEAKS)
        return [peak, *(other for other in others if other.moment != peak.moment)]

    def _late(self) -> bool:
        """Whether the time is over, or as many models are solved as may be.

        Raises:
            SearchLimitError: so it is, and there is no answer.
        """
        if time.perf_counter() <= self.until and not self._all_solved():
            return False
        if self.best is None:
            raise SearchLimitError(
                f"integer programming's {self._given()}, and no strategy within the memory limit was found. "
                "Use a higher limit, or searcher='recursive_programming'."
            )
        return True

    def _all_solved(self) -> bool:
        return self.searcher.max_rounds is not None and self.rounds >= self.searcher.max_rounds

    def _given(self) -> str:
        """The limit that was reached, in words."""
        if self._all_solved():
            return f"{self.searcher.max_rounds} rounds of models were solved"
        if self.searcher.time_limit_seconds is None:
            return f"{self.searcher.max_nodes} nodes of a model were searched"
        return f"{self.searcher.time_limit_seconds:g} s were over"


class LastResort:
    """A searcher's last resort for several problems of one call, of which the first that has an answer within its memory limit ends it.

    All share its budget of models. No other searcher finds anything in them, so none is run for a first incumbent.

    Attributes:
        searcher: integer programming, with the models that are left of its budget; None: there is none.
        refused: the problems in which nothing was found, each with the smallest peak found there, as a share of its limit.
    """

    def __init__(self, searcher: Searcher | None):
        self.searcher = searcher if isinstance(searcher, IntegerProgramming) else None
        self.refused: list[tuple[float, Problem]] = []

    def refuse(self, problem: Problem, error: InfeasibleError) -> None:
        """Takes a problem in which nothing was found."""
        self.refused.append(((error.smallest_peak_bytes or math.inf) / (problem.memory_limit_bytes or math.inf), problem))

    def found(self, progress: Progress = silent, seconds: float | None = None) -> tuple[Solution, Problem] | None:
        """The answer to the first refused problem that has one, nearest to the limit first, and that problem; None: none has one.

        A program on a mesh is tried once, even if it was refused under several limits.

        Args:
            progress: a callback.
            seconds: that are left; None: as many as it takes.
        """
        nearest: dict[tuple[int, tuple[int, ...]], Problem] = {}
        for _, problem in sorted(self.refused, key=lambda each: each[0]):
            nearest.setdefault((id(problem.facts), problem.mesh.sizes), problem)
        self.refused = []
        for problem in nearest.values():
            if self.searcher is None or seconds == 0.0 or self.searcher.max_rounds == 0:
                break
            run, solution = _Run(self.searcher if seconds is None else self.searcher.limited(seconds), problem, progress, NO_HINTS), None
            with suppress(InfeasibleError, SearchLimitError):
                solution = run.solution(starts=False)
            if self.searcher.max_rounds is not None:
                self.searcher = replace(self.searcher, max_rounds=max(self.searcher.max_rounds - run.rounds, 0))
            if solution is not None:
                note = f"found by {self.searcher.name}, where nothing else was found within the memory limit"
                return replace(solution, notes=(note, *solution.notes), finder=self.searcher.name), problem
        return None
