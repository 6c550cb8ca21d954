"""Branch and bound over meshes: one problem a mesh, of which those with too great a lower bound are cut.

*Objective.* The least judged makespan. *Ties.* The earlier mesh. *Order.* Meshes of fewest axes first, since their tables are small and
simple meshes are preferable, but those of a far greater bound than others last; of equally many axes, those of the least lower bound after
two sweeps of message passing; of equal bounds, the most balanced mesh. *Cuts.* A mesh is searched only if its lower bound, after a few more
sweeps, is below the least objective found by the least gain that is worth a search (`Budgets.least_gain`). Where all meshes of three axes
are searched, and tables over these are too large for that, the bound is over assignments that are the same in equal layers, as searchers
there look for. *Refinement.* Unless the user named the axes, those of the best mesh are split at last
(`autoshard.mesh_search.refinement`), and the finer mesh is searched like any other.

*Guarantee.* On a cut mesh every assignment that such a bound is over costs at least the least objective found, less that gain. Its makespan
may still be less, where more of its communication hides behind compute than of the best answer's: cuts are exact in the objective, which
searchers minimise and bound, and a heuristic in the makespan, which decides among answers. So `auto` tries tensor parallelism on a cut
mesh, if that was near the best elsewhere, and the mesh's bound is not above what the most that any answer hides makes of the best makespan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autoshard.budgets import BUDGETS
from autoshard.errors import AutoshardError, InfeasibleError, NothingFasterError, OutOfTime, SearchLimitError, ShardingError
from autoshard.inference.trw_s import MessagePassing
from autoshard.memory_limit.lagrangian import nothing_fits
from autoshard.mesh_search.anytime import Incumbent, Timed
from autoshard.mesh_search.bounds import bounded, first_bounds, large_bound, may_hide_more, message_bound, quotient_bound, transferred
from autoshard.mesh_search.equality import figures_of, simplest_first
from autoshard.mesh_search.finalists import BASELINES, finalists, worse
from autoshard.problem import NO_HINTS, Hints, Problem
from autoshard.progress import Progress, part, silent
from autoshard.search.baselines import DataParallel, FullySharded, widest
from autoshard.search.searcher import Searcher, Solution
from autoshard.search.tensor_parallel import TensorParallel

PROVEN_AXES = 2  # of meshes that proofs alone cut; where all of more axes are searched they are many, and take the longest

Finer = Callable[[Problem, Solution | None, Progress], tuple[Problem, Hints] | None]
"""From the best problem, its solution if there is one, and progress to a problem of more axes with hints; None: there is none."""

Refused = Callable[[Problem, InfeasibleError], None]
"""Takes a problem in which nothing was found within the memory limit, and the error that says so."""


def search_meshes(
    searcher: Searcher,
    problems: Sequence[Problem],
    solve,
    progress: Progress = silent,
    ends: tuple[type[BaseException], ...] = (),
    finer: Finer | None = None,
    n_finalists: int = 1,
    refused: Refused | None = None,
    warm: Hints = NO_HINTS,
    quick: bool = False,
) -> tuple[Solution, Problem]:
    """The best solution over problems that differ in their mesh, and its problem; its statistics count the cut meshes.

    Args:
        searcher: the searcher.
        problems: one a mesh and placement.
        solve: called with searcher, problem, progress and hints, those of the best mesh so far.
        progress: a callback; of a search of limited time a `Timed` one.
        ends: exceptions that end the search early; the solution is then the best answer found.
        finer: called at last with the best problem, its solution and progress; where nothing fits, with the problem of the smallest
            peak and no solution. None: no mesh of more axes is searched.
        n_finalists: the number of distinct solutions to return: the best one and its ``others``. Baselines are among them if the searcher
            is automatic.
        refused: called with each problem in which nothing was found within the memory limit, though something may be, and the error.
        warm: hints of an earlier search of the program, with which the first problem's search begins.
        quick: whether the bound of a quotient problem cuts a mesh, which is no proof, but takes a fraction of the time of one.

    Raises:
        InfeasibleError: no mesh has a solution within the memory limit, or none was found in the share of the time that such a search has;
            names the smallest peak found.
        NothingFasterError: nor has any that was not cut by the least objective of ``warm``.
        ShardingError: the pins leave no mesh a legal sharding.
    """
    search = _Search(searcher, [*problems], solve, progress, bool(ends), finer, n_finalists, refused, replace(warm, far={}), quick)
    try:
        search.run()
        search.add_baselines()
    except ends:
        search.end_early()
        if search.best is None and isinstance(progress, Timed) and not progress.is_over:
            raise search.nothing_yet() from None
        if search.best is None:
            raise
    if search.best is None:
        if search.cut:
            raise NothingFasterError("no strategy can be faster than one that was found before. Use that.", proven=search.failure is None)
        assert search.failure is not None
        raise search.failure
    _, number, solution = search.take_simplest()
    problem = search.plain(number)
    with suppress(OutOfTime):  # of a search that has ended; the bound that it has holds
        solution = bounded(search.in_last_seconds(number) if search.notes else problem, solution)
    stats = {**solution.stats, "meshes": len(search.problems), "meshes_cut": search.cut, **({"ended_early": 1} if search.notes else {})}
    return replace(solution, stats=stats, notes=(*solution.notes, *search.notes, *search.left_out), others=search.others()), problem


@dataclass(slots=True)
class _Search:
    """The problems of one program, searched one after the other, and the best solution so far.

    Attributes:
        searcher, solve, progress, finer, refused, warm, quick: as in `search_meshes`.
        problems: those given, then that of more axes, if there is one. Below, a problem is given by its number here.
        observed: whether incumbents are kept, since the search may end early.
        n_finalists, finalists: how many of the best distinct solutions are kept, and which.
        best: least makespan, its problem and its solution.
        failure: the error to report if there is no solution.
        least, hiding: the least objective found, and the most that one was of its makespan.
        cut: the number of meshes that were cut.
        incumbents, hints: by problem; hints of a search of it, and after the search the improved ones.
        notes, left_out: on a search that ended early, and on what takes too much work for what it may gain.
        solutions, infeasible: by problem, and the mesh sizes without one.
        peaks: by problem without a solution the smallest peak found, unless it is proven that nothing fits; of one placement of a mesh.
        nearest: of the problems without a solution, the one of the smallest peak.
        passings: of a quick search by problem the message passing over its quotient problem, which the next bound goes on with.
        has_near: whether a mesh was searched though its bound is above the least objective; each takes as long as the best one.
        n_given, reached: how many problems were given, and how many were begun with.
    """

    searcher: Searcher
    problems: list[Problem]
    solve: Callable[[Searcher, Problem, Progress, Hints], Solution]
    progress: Progress
    observed: bool
    finer: Finer | None
    n_finalists: int = 1
    refused: Refused | None = None
    warm: Hints = NO_HINTS
    quick: bool = False
    finalists: tuple[Solution, ...] = ()
    best: tuple[float, int, Solution] | None = None
    failure: AutoshardError | None = None
    least: float = float("inf")
    hiding: float = 1.0
    cut: int = 0
    incumbents: dict[int, Incumbent] = field(default_factory=dict)
    hints: dict[int, Hints] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    solutions: dict[int, Solution] = field(default_factory=dict)
    infeasible: set[tuple[int, ...]] = field(default_factory=set)
    peaks: dict[int, float] = field(default_factory=dict)
    nearest: int | None = None
    passings: dict[int, MessagePassing] = field(default_factory=dict)
    has_near: bool = False
    n_given: int = field(init=False)
    reached: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.n_given = len(self.problems)
        self.least = self.warm.least
        for number in range(self.n_given):
            self._observe(number)

    def _observe(self, number: int) -> None:
        """Keeps an incumbent of the problem, if the search may end early."""
        if self.observed:
            self.incumbents[number] = Incumbent(self.problems[number], self.clock)
            self.problems[number] = self.problems[number].observed_by(self.incumbents[number])

    @property
    def clock(self) -> Timed | None:
        """What ends the search when its time is over; None: its time is not limited."""
        return self.progress if isinstance(self.progress, Timed) else None

    def plain(self, number: int) -> Problem:
        """The problem as it was given, which no clock watches."""
        return self.incumbents[number].problem if self.observed else self.problems[number]

    def in_last_seconds(self, number: int) -> Problem:
        """The problem for what remains to be done when the search has ended: in a second if its time was limited."""
        problem = self.plain(number)
        return problem if self.clock is None else problem.observed_by(Incumbent(problem, self.clock.last()))

    def run(self) -> None:
        if self.clock is not None and self.searcher.automatic:
            self._begin_with_baselines()
        n = len(self.problems) + (self.finer is not None)
        for done, number in enumerate(self._order()):
            self._try(number, part(self.progress, done / n, 1 / n))
        if self.best is None and self.least == math.inf:
            self._try_again()
        number, solution = self.best[1:] if self.best is not None else (self.nearest, None)
        if self.finer is not None and number is not None:
            found = self._finer(number, solution, part(self.progress, (n - 1) / n, 0.5 / n))
            if found is not None:
                problem, self.hints[n - 1] = found
                self.problems.append(problem)
                self._observe(n - 1)
                self._try(n - 1, part(self.progress, (n - 0.5) / n, 0.5 / n))

    def _finer(self, number: int, solution: Solution | None, progress: Progress) -> tuple[Problem, Hints] | None:
        """What ``finer`` finds; None, with a note, where that would be too much work."""
        assert self.finer is not None
        try:
            return self.finer(self.problems[number], solution, progress)
        except SearchLimitError as error:
            self.left_out = (str(error),)
            return None

    def _try(self, number: int, progress: Progress) -> None:
        """Searches a problem, unless it is cut or another placement's answer serves."""
        hints = self.hints.setdefault(number, self.warm)
        if self.best is not None:
            self.hints[number] = replace(self.hints[self.best[1]], least=self.least, start=hints.start)
        progress(f"mesh {self.problems[number].mesh}", 0.0)
        self.reached += 1
        problem = self.problems[number]
        try:
            if self._is_cut(number):
                self.cut += 1
                if self._may_hide(number) and (quick := self.searcher.solve_cut_mesh(problem, self.hints[number])) is not None:
                    self._keep(number, quick)
            elif (other := self._placed_otherwise(number)) is not None:
                self._keep(number, transferred(problem, *other))
            else:
                solution = self.solve(self.searcher, problem, progress, self.hints[number])
                self.hints[number] = solution.hints
                self._keep(number, solution)
        except (InfeasibleError, ShardingError) as error:
            if self.refused is not None and isinstance(error, InfeasibleError) and not error.proven:
                self.refused(self.plain(number), error)
            before, self.failure = self.failure, worse(self.failure, error)
            if isinstance(error, InfeasibleError) and not error.proven and problem.mesh.sizes not in self.infeasible:
                self.peaks[number] = error.smallest_peak_bytes or math.inf
            self.infeasible.add(problem.mesh.sizes)
            if isinstance(error, InfeasibleError) and self.failure is not before:
                self.nearest = number

    def _try_again(self) -> None:
        """Searches what the searcher left out, on the meshes whose peaks came near the limit, nearest first, until one has an answer."""
        for peak, number in sorted((peak, number) for number, peak in self.peaks.items()):
            problem = self.problems[number]
            if peak > BUDGETS.near * (problem.memory_limit_bytes or 0.0):
                return
            self.progress(f"mesh {problem.mesh} once more", 1.0)
            with suppress(InfeasibleError, SearchLimitError):
                if (solution := self.searcher.solve_again(problem, self.progress, self.hints[number])) is None:
                    continue
                self.hints[number] = solution.hints
                self._keep(number, solution)
                for other, placed in enumerate(self.problems):
                    if other != number and placed.mesh.sizes == problem.mesh.sizes:
                        self._keep(other, transferred(placed, problem, solution))
                return

    def _placed_otherwise(self, number: int) -> tuple[Problem, Solution] | None:
        """The problem of the mesh in another placement, and its solution, where the limit binds: peaks do not depend on placements.

        Raises:
            InfeasibleError: nothing fits there.
        """
        if not self.searcher.automatic or self.problems[number].memory_limit_bytes is None:
            return None
        sizes = self.problems[number].mesh.sizes
        if sizes in self.infeasible and self.failure is not None:
            raise self.failure
        for other, solution in self.solutions.items():
            problem = self.problems[other]
            if problem.mesh.sizes == sizes and self.hints[other].price > 0.0:
                return problem, solution
        return None

    def _order(self) -> list[int]:
        """The numbers of the problems, in the order in which to search them."""
        numbers = list(range(len(self.problems)))
        if not self.searcher.automatic or len(numbers) == 1:
            return numbers
        firsts, passings = zip(*first_bounds(self.problems, self.progress), strict=True)
        least = min(firsts)
        if self.quick:
            self.passings = {number: passing for number, passing in enumerate(passings) if passing is not None}

        def rank(number: int) -> tuple[float, ...]:
            first, mesh = firsts[number], self.problems[number].mesh
            known = least > 0.0 and first < float("inf")
            steps = (first / least - 1) // BUDGETS.least_gain if known else first  # bounds less than a gain apart count as equal
            return float(first > BUDGETS.far_bound * least), len(mesh.axes), steps, max(mesh.sizes, default=1), number

        return sorted(numbers, key=rank)

    def _is_cut(self, number: int) -> bool:
        """Whether no assignment of the mesh has a gain that is worth a search."""
        if self.least == math.inf or not self.searcher.automatic:
            return False
        enough = self.least * (1 - BUDGETS.least_gain)
        problem = self.problems[number]
        if self.quick:
            return quotient_bound(problem, BUDGETS.screening_sweeps, enough, self.passings.pop(number, None)) >= enough
        bound, self.hints[number] = message_bound(problem, BUDGETS.screening_sweeps, enough, self.hints[number])
        is_one_of_several = self.finer is not None and number < self.n_given
        if bound < enough and is_one_of_several and len(problem.mesh.axes) > PROVEN_AXES:
            bound = large_bound(problem, BUDGETS.table_sweeps, enough)
        is_searched = any(self.problems[other].mesh.sizes == problem.mesh.sizes for other in self.solutions)
        if bound < enough or self.best is None or self.has_near or is_searched or not is_one_of_several:
            return bound >= enough
        self.has_near = may_hide_more(problem, self.best[2].judgement.cost, self.least, self.hints[number])
        return not self.has_near

    def _may_hide(self, number: int) -> bool:
        """Whether tensor parallelism may be faster on a cut mesh than the best answer, if it hides no more than any answer did."""
        if self.best is None or self.quick or not self.hints[number].near_tensor_parallel:
            return True
        enough = self.best[0] * self.hiding
        return message_bound(self.problems[number], BUDGETS.screening_sweeps, enough, self.hints[number])[0] < enough

    def _keep(self, number: int, solution: Solution) -> None:
        self.least = min(self.least, solution.least_seconds, solution.judgement.cost.objective_seconds)
        costs = [each.judgement.cost for each in (solution, *solution.others)]
        self.hiding = max([self.hiding, *(each.objective_seconds / each.makespan_seconds for each in costs if each.makespan_seconds)])
        if self.n_finalists > 1:
            self.finalists = finalists((*self.finalists, solution, *solution.others), self.n_finalists)
        solution = replace(solution, others=(), hints=self.hints[number])  # finalists keep the others
        self.solutions[number] = solution
        ranked = solution.judgement.cost.makespan_seconds, number, solution
        self.best = min(self.best or ranked, ranked, key=lambda entry: entry[:2])

    def add_baselines(self) -> None:
        """Adds the baselines' answers on the best mesh to the finalists, unless the searcher does so."""
        if self.n_finalists < 2 or self.best is None or not self.searcher.automatic or self.searcher.includes_baselines:
            return
        number = self.best[1]
        for baseline in BASELINES:
            self.progress(f"{baseline.name} to compare with", 1.0)
            with suppress(InfeasibleError, SearchLimitError, ShardingError):
                solution = baseline.solve(self.problems[number])
                bound = min(self.best[2].lower_bound_seconds, solution.judgement.cost.objective_seconds)  # the bound is of the mesh
                self._keep(number, replace(solution, lower_bound_seconds=bound, finder=baseline.name))

    def _begin_with_baselines(self) -> None:
        """Lets quick baselines answer on one mesh until one fits, however long that takes, as the answer of a search that ends."""
        first = self.incumbents[widest(self.problems[: self.n_given])]
        for baseline in (DataParallel(), FullySharded(stage=3)):
            try:
                return first.judged(baseline.solve(first.problem).judgement)
            except (InfeasibleError, SearchLimitError, ShardingError) as error:
                if isinstance(error, InfeasibleError) and error.smallest_peak_bytes:
                    first.smallest_peak_bytes = min(first.smallest_peak_bytes, error.smallest_peak_bytes)

    def nothing_yet(self) -> InfeasibleError:
        """The error of a search that found nothing in its share of the time, while others may find something in the rest."""
        smallest = min(incumbent.smallest_peak_bytes for incumbent in self.incumbents.values())
        return nothing_fits(self.problems[0], "the smallest peak found in a part of the time", smallest)

    def _keep_first_baseline(self) -> None:
        """Keeps the first answer of a baseline within the memory limit, those first that take little time."""
        last = silent if self.clock is None else self.clock.last()
        sizes = {problem.mesh.sizes: number for number, problem in reversed([*enumerate(self.problems)])}
        numbers = sorted(sizes.values())  # one placement of each mesh, which all take the same memory
        for baseline in (DataParallel(), FullySharded(stage=3), TensorParallel()):
            for number in numbers if baseline.differs_by_mesh else [widest(self.problems[: self.n_given])]:
                with suppress(InfeasibleError, SearchLimitError, ShardingError):
                    self.hints.setdefault(number, NO_HINTS)
                    solution = baseline.solve(self.plain(number), last)
                    return self._keep(number, replace(solution, finder=baseline.name))

    def take_simplest(self) -> tuple[float, int, Solution]:
        """The best solution: of meshes that are equal within the model's error the simplest one's, where answers are compared."""
        assert self.best is not None
        if self.searcher.automatic and self.n_finalists > 1:
            error = self.problems[self.best[1]].model.cluster.device.pair_error
            _, number, fastest = self.best
            answers = {**self.solutions, number: fastest}  # of a mesh the last answer may be a baseline's
            number, solution = simplest_first(answers.items(), error, lambda each: figures_of(each[1]))[0]
            if solution is not fastest:
                self.finalists = finalists((*self.finalists, fastest), self.n_finalists)
                self.best = solution.judgement.cost.makespan_seconds, number, solution
        return self.best

    def others(self) -> tuple[Solution, ...]:
        """The finalists without the best solution."""
        assert self.best is not None
        best = self.best[-1]
        ranked = [each for each in finalists((best, *self.finalists), self.n_finalists) if each is not best]
        return tuple(replace(each, notes=(*each.notes, *self.notes, *self.left_out)) for each in ranked[: self.n_finalists - 1])

    def end_early(self) -> None:
        """Makes incumbents solutions; where an automatic searcher has none, a baseline's that fits, if any does, on any mesh."""
        for number, incumbent in self.incumbents.items():
            self.hints.setdefault(number, self.warm)
            if incumbent.hints is not None and number not in self.solutions:
                self.hints[number] = incumbent.hints
            if (solution := incumbent.solution()) is not None:
                self._keep(number, solution)
        if self.best is None and self.searcher.automatic:
            self._keep_first_baseline()
        several = len({problem.mesh.sizes for problem in self.problems}) > 1
        reached = max(self.reached, 1)
        rest = ", before any of more axes" if self.finer is not None and reached <= self.n_given else ""
        self.notes = (
            f"the search ended early, on {'mesh' if several else 'placement'} {reached} of {len(self.problems)}{rest}: "
            "this is the best strategy that it had found",
        )
