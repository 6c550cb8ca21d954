"""The search of a front: everything that is met on all meshes under ever smaller limits, as far as nothing else beats it."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from autoshard.errors import InfeasibleError, SearchLimitError, ShardingError
from autoshard.ir import Assignment, Mesh
from autoshard.judge.evaluate import Judgement
from autoshard.mesh_search.anytime import Timed
from autoshard.mesh_search.bounds import bounded
from autoshard.plan.prepared import Prepared
from autoshard.problem import NO_HINTS, Hints, Problem
from autoshard.progress import Progress, part
from autoshard.render import format_bytes
from autoshard.search import DataParallel, FullySharded, Searcher, Solution, TensorParallel
from autoshard.search.integer_programming import LastResort

BASELINES: tuple[Searcher, ...] = (DataParallel(), FullySharded(stage=1), FullySharded(stage=2), FullySharded(stage=3), TensorParallel())


LESS = 0.9  # of the least memory that was met: so much is asked for to find out how little it can be
LEAST_RATIO = 1.02  # peaks that are closer are one to whoever has to fit a device


class FrontSearch:
    """Everything that is met on all meshes, as far as nothing else beats it.

    Attributes:
        bounds: by mesh, limits and what no assignment within them has a smaller objective than.
        hints: by mesh, what searches of it found out so far.
        stage: where the search is, in words.
    """

    stage: str

    def __init__(self, prepared: Prepared, searcher: Searcher, progress: Progress):
        self.prepared = prepared
        self.searcher = searcher
        self.progress = progress
        self.front: list[Point] = []
        self.problems: dict[Mesh, Problem] = {}
        self.hints: dict[Mesh, Hints] = {}
        self.bounds: dict[Mesh, list[tuple[float, float]]] = defaultdict(list)

    def run(self, points: int, last: LastResort) -> None:
        """First what searcher and baselines find on every mesh, then what lies between; the last resort, if nothing fits."""
        prepared, failure = self.prepared, None
        n = len(prepared.meshes)
        for number, candidate in enumerate(prepared.meshes):
            self.stage = f"on mesh {candidate}, {number + 1} of {n}"
            self.progress(f"mesh {candidate}", number / n / 3)
            try:
                problem = prepared.problem(candidate, None, self.problems.values())
                self._ask_all(problem, part(self.progress, number / n / 3, 1 / n / 3))
            except ShardingError as error:  # pins do not divide on this mesh
                failure = error
        if not self.front:
            assert failure is not None
            raise failure
        self.stage = "while looking for more axes"
        if (finer := self._finer()) is not None:
            problem, self.hints[problem.mesh] = finer
            self._ask_all(problem, part(self.progress, 1 / 3, 0.0))
        self.stage = "while looking for the least memory"
        promising = list(dict.fromkeys(point.mesh for point in self.front))
        for number, candidate in enumerate(promising):
            share, limit = 1 / len(promising) / 3, math.inf
            while (least := min(point.cost[0] for point in self.front)) <= limit:  # what was asked for was met: there may be less
                limit = LESS * least
                self._ask(self.problems[candidate], self.searcher, limit, part(self.progress, 1 / 3 + number * share, share))
        if min(point.cost[0] for point in self.front) > prepared.limit:
            self._ask_last(last)
        rising = limits(self.front, prepared.limit, points)
        for number, (lower, limit) in enumerate(pairwise(rising)):
            before, share = (2 + number / len(rising)) / 3, 1 / len(rising) / 3
            self.stage = f"at {format_bytes(limit)} of up to {format_bytes(rising[-1])}"
            self.progress(f"at most {format_bytes(limit)}", before)
            if not any(lower < point.cost[0] <= limit for point in self.front):
                for candidate in dict.fromkeys(point.mesh for point in _around(self.front, limit)):
                    self._ask(self.problems[candidate], self.searcher, limit, part(self.progress, before, share))

    def _finer(self) -> tuple[Problem, Hints] | None:
        """The problem on a mesh of more axes that promises what is faster than all that fits, and hints of where it begins."""
        if not self.prepared.most_axes or not any(point.cost[0] <= self.prepared.limit for point in self.front):
            return None
        best = fastest(self.front, self.prepared.limit)
        known = Solution(best.judgement, hints=self.hints[best.mesh])
        return self.prepared.finer(best.problem, known, part(self.progress, 1 / 3, 0.0))

    def _ask_all(self, problem: Problem, progress: Progress) -> None:
        """Lets the searcher and every baseline look for an answer."""
        self.problems[problem.mesh] = problem
        searchers = (self.searcher, *BASELINES)
        for done, searcher in enumerate(searchers):
            self._ask(problem, searcher, None, part(progress, done / len(searchers), 1 / len(searchers)))

    def _ask(self, problem: Problem, searcher: Searcher, limit: float | None, progress: Progress) -> None:
        """Lets a searcher look for an answer within a limit, and puts on the front what it meets on the way."""
        watched = problem.within(limit).observed_by(_Observer(self.front, problem, searcher, self.progress))
        hints = self.hints.setdefault(problem.mesh, NO_HINTS)
        with suppress(InfeasibleError, SearchLimitError):  # what it met counts all the same
            found = searcher.solve(watched, progress, hints)
            self.hints[problem.mesh] = found.hints
            self.bounds[problem.mesh].append((math.inf if limit is None else limit, found.lower_bound_seconds))

    def _ask_last(self, last: LastResort) -> None:
        """Puts what the last resort finds within the limit on the front."""
        for point in self.front:
            observer = _Observer(self.front, point.problem, self.searcher, self.progress)
            watched = point.problem.within(self.prepared.limit).observed_by(observer)
            last.refuse(watched, InfeasibleError("", point.cost[0]))
        last.found(self.progress)

    def solution(self, point: Point) -> Solution:
        """What a point is as an answer, with the best bound known of all that hold as little on its mesh."""
        peak, objective = point.judgement.cost.peak_bytes, point.judgement.cost.objective_seconds
        known = [bound for limit, bound in self.bounds[point.mesh] if peak <= limit]
        bound = min(max([point.problem.compute_bound(), *known]), objective)
        solution = bounded(point.problem, Solution(point.judgement, bound, hints=self.hints[point.mesh]))
        self.hints[point.mesh] = solution.hints  # the next point's bound goes on from there
        return solution


@dataclass(frozen=True, slots=True, eq=False)
class Point:
    """An assignment that was judged, on which mesh, and who asked."""

    problem: Problem
    judgement: Judgement
    searcher: Searcher

    @property
    def mesh(self) -> Mesh:
        return self.problem.mesh

    @property
    def cost(self) -> tuple[float, float]:
        return self.judgement.cost.peak_bytes, self.judgement.cost.makespan_seconds

    def beats(self, other: Point) -> bool:
        return all(ours <= theirs for ours, theirs in zip(self.cost, other.cost, strict=True))


@dataclass(frozen=True, slots=True)
class _Observer:
    """Puts on the front what a searcher meets."""

    front: list[Point]
    problem: Problem
    searcher: Searcher
    progress: Progress

    def check(self) -> None:
        if isinstance(self.progress, Timed):
            self.progress.check()

    def judged(self, judgement: Judgement) -> None:
        met(self.front, Point(self.problem, judgement, self.searcher))

    def noted(self, found: Callable[[], Assignment]) -> None:
        """What is not judged yet does not count."""

    def hinted(self, hints: Hints) -> None:
        """Hints come with the solution; those of a search that ends early are of no use to others."""


def met(front: list[Point], point: Point) -> None:
    """Puts a point on a front that no other one of it beats, and takes those off that it beats."""
    if not any(other.beats(point) for other in front):
        front[:] = [*(other for other in front if not point.beats(other)), point]


def limits(front: Sequence[Point], limit: float, points: int) -> list[float]:
    """Rising limits in equal ratios, from the smallest peak to that of the fastest that fits.

    Raises:
        InfeasibleError: nothing fits.
    """
    least = min(point.cost[0] for point in front)
    if least > limit:
        raise InfeasibleError(
            f"a strategy must fit {format_bytes(limit)} a device, and the smallest peak found is {format_bytes(least)}. "
            "Use more devices, a smaller batch, or a higher memory limit.",
            least,
        )
    most = fastest(front, limit).cost[0]
    steps = min(points - 1, int(math.log(most / least) / math.log(LEAST_RATIO)))
    return [least * (most / least) ** (number / steps) for number in range(steps)] + [most]


def fastest(front: Sequence[Point], limit: float) -> Point:
    """The fastest within a limit that something fits."""
    return min((point for point in front if point.cost[0] <= limit), key=lambda point: point.cost[1])


def _around(front: Sequence[Point], limit: float) -> list[Point]:
    """The points of the front on both sides of a limit."""
    below = [point for point in front if point.cost[0] <= limit]
    above = [point for point in front if point.cost[0] > limit]
    return [*([max(below, key=lambda point: point.cost)] if below else []), *([min(above, key=lambda point: point.cost)] if above else [])]
