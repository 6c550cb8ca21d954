"""What memory buys: the strategies of a program that no other one beats in both step time and peak memory."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import jax

from autoshard.ask.ladder import ladder, shares_tables
from autoshard.ask.strategy import Strategy
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, SearchLimitError, ShardingError
from autoshard.ir import Assignment, Mesh
from autoshard.judge.evaluate import Judgement
from autoshard.mesh_search.anytime import Timed, endings, timed
from autoshard.mesh_search.bounds import bounded
from autoshard.microbatch import divisors
from autoshard.plan.confirm import Confirm
from autoshard.plan.microbatching import Microbatches, all_found, best
from autoshard.plan.offloading import check_offload
from autoshard.plan.prepared import Prepared, prepare
from autoshard.plan.request import Request, given
from autoshard.plan.user_pins import Pins
from autoshard.problem import NO_HINTS, Hints, Problem
from autoshard.progress import Progress, part, silent
from autoshard.recompute import optimizer_state
from autoshard.render import Paragraph, Report, Table, format_bytes, format_percent, format_seconds, shown
from autoshard.rewrite import Padding, divisible
from autoshard.run.collecting import rarely_collecting
from autoshard.search import DataParallel, FullySharded, Searcher, Solution, TensorParallel
from autoshard.search.integer_programming import LastResort
from autoshard.trace import Batch, outside_mesh

BASELINES: tuple[Searcher, ...] = (DataParallel(), FullySharded(stage=1), FullySharded(stage=2), FullySharded(stage=3), TensorParallel())


LESS = 0.9  # of the least memory that was met: so much is asked for to find out how little it can be
LEAST_RATIO = 1.02  # peaks that are closer are one to whoever has to fit a device


class Frontier(Sequence[Strategy]):
    """Strategies of one program by rising peak memory and falling step time: none is beaten in both by any that was met.

    Attributes:
        strategies: the first holds the least memory, the last takes the least time.
        notes: what there is to know of the search, such as that it ended early.
    """

    def __init__(self, strategies: Sequence[Strategy], notes: Sequence[str] = ()):
        self.strategies = tuple(strategies)
        self.notes = tuple(notes)

    def __len__(self) -> int:
        return len(self.strategies)

    @overload
    def __getitem__(self, index: int) -> Strategy: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Strategy, ...]: ...
    def __getitem__(self, index: int | slice) -> Strategy | tuple[Strategy, ...]:
        return self.strategies[index]

    def within(self, memory_limit_bytes: float) -> Strategy:
        """The fastest that a device of so many bytes can run.

        Raises:
            InfeasibleError: none fits; names the smallest peak.
        """
        fitting = [strategy for strategy in self if strategy.cost.peak_bytes <= memory_limit_bytes]
        if not fitting:
            least = self[0].cost.peak_bytes
            raise InfeasibleError(
                f"a strategy must fit {format_bytes(memory_limit_bytes)} a device, and the smallest peak on this frontier is "
                f"{format_bytes(least)}. Use more devices, a smaller batch, or a higher limit.",
                least,
            )
        return fitting[-1]

    def report(self) -> Report:
        """A row for each strategy; prints in a terminal and shows in Jupyter."""
        fastest, largest = self[-1].cost.makespan_seconds, self[-1].cost.peak_bytes
        several, hosted = any(strategy.microbatches > 1 for strategy in self), any(strategy.offload for strategy in self)
        rows = tuple(
            (
                format_bytes(strategy.cost.peak_bytes),
                format_percent(strategy.cost.peak_bytes / largest),
                format_seconds(strategy.cost.makespan_seconds),
                f"{strategy.cost.makespan_seconds / (fastest or 1.0):.2f} x",
                format_percent(strategy.gap),
                str(strategy.record.mesh),
                _found_by(strategy),
                *([str(strategy.microbatches)] if several else []),
                *([f"{len(strategy.offload)} leaves" if strategy.offload else ""] if hosted else []),
            )
            for strategy in self
        )
        columns = (">peak memory", ">of the fastest's", ">step time", ">ratio", ">gap", "mesh", "found by")
        columns += (*((">microbatches",) if several else ()), *((">on hosts",) if hosted else ()))
        record = self[-1].record
        gap = "The gap is the objective's to the best lower bound known of what holds no more on that mesh."
        parts = (Table(columns, rows), Paragraph(gap), *map(Paragraph, self.notes))
        return Report(f"What memory buys for {record.program.name} on {record.cluster['name']}", parts)

    def __repr__(self) -> str:
        return f"Frontier of {len(self)}: {', '.join(map(repr, self.strategies))}"

    def __str__(self) -> str:
        return str(self.report())

    def _repr_html_(self) -> str:
        return self.report()._repr_html_()


def _found_by(strategy: Strategy) -> str:
    """The searcher, with the stage of ZeRO where it has one."""
    searcher = strategy.record.searcher
    return f"{searcher.name}, stage {searcher.options['stage']}" if "stage" in searcher.options else searcher.name


def frontier(
    fn: Callable,
    *args: Any,
    cluster: Cluster | str | Path | None = None,
    searcher: str | Searcher = "recursive_programming",
    mesh: Mapping[str, int] | jax.sharding.Mesh | int | None = None,
    pins: Pins | None = None,
    batch_axes: str | Sequence[str] | None = None,
    batch: Batch = None,
    points: int = 8,
    memory_limit_bytes: float | None = None,
    donate_argnums: int | Sequence[int] = (),
    progress: Progress | bool = silent,
    time_limit_seconds: float | None = None,
    interruptible: bool = False,
    confirm: str | Confirm | bool | None = None,
    microbatches: Microbatches = "fit",
    remat: str | None = None,
    offload: str | None = None,
    stages: int | None = None,
    schedule: str | None = None,
    plan: str = "sharding",
    start: Strategy | None = None,
    kernels: str | None = None,
    balance: float | None = None,
    padding: bool | Padding = False,
) -> Frontier:
    """The Pareto front of step time against peak memory: what the searcher finds under ever smaller limits, and the baselines.

    On every mesh the searcher and the baselines are asked without a limit, then, on meshes of which the front has something, the searcher
    for less than anything was found to hold, as long as that is met, which makes it try all its memory prices. Limits in equal ratios from
    the fastest answer's peak down to the smallest are then asked for where nothing was met between them, on the meshes that are best
    around. Every assignment that is judged on the way counts; the program is traced once, and each mesh's tables are made once. Heuristic.

    With recomputation, stages, rewrites, a start or a confirmation each limit is a search of its own (`autoshard.ask.ladder`): the first
    ones halve the peak until nothing fits, and the rest is between those.

    Args:
        fn, args, cluster, searcher, mesh, pins, batch_axes, batch, donate_argnums, progress: as for `search`.
        time_limit_seconds, interruptible: as for `search`; what was met by then makes the front.
        points: how many strategies there may be.
        memory_limit_bytes: what a device may hold at its peak; by default the cluster's memory less a reserve.
        microbatches: as for `search`; with ``"auto"`` the front is that of 1, 2, 4 and 8 together, each searched like this.
        offload: ``"optimizer"`` keeps optimizer state in the memory of hosts, as for `search`; with ``"auto"`` the front is that of steps
            with it there and on devices together; None: all is on devices.
        confirm, remat, stages, schedule, plan, start, kernels, balance, padding: as for `search`.

    Raises:
        TraceError: the batch cannot be computed in that many microbatches.
        ShardingError: nothing can be offloaded.
        InfeasibleError: nothing fits the memory limit; names the smallest peak found.

    >>> import jax.numpy as jnp
    >>> found = frontier(lambda w, x: jnp.tanh(x @ w), jnp.ones((64, 64)), jnp.ones((512, 64)), cluster="cpu:8", mesh={"data": 8})
    >>> [strategy.in_specs for strategy in found][-1]
    (P(None, None), P('data', None))
    """
    request = Request.of(**given(locals()))
    if isinstance(points, bool) or not isinstance(points, int) or points < 1:
        raise ShardingError(f"a frontier has a whole number of points, 1 or more, got {points!r}.")
    chosen = request.searcher
    if not shares_tables(request):
        with shown(progress) as callback:
            met, note = ladder(fn, args, request, points, callback)
        return Frontier([Strategy.of(each) for each in met], [note] if note else [])
    with shown(progress) as callback, rarely_collecting(), outside_mesh(keep_auto=True):
        ask = partial(prepare, fn, args, cluster, chosen, mesh, request.asked, memory_limit_bytes, donate_argnums)
        first = microbatches if isinstance(microbatches, int) else 1
        asked = ask(first)
        check_offload(offload, asked.cluster, asked.traced)
        ways = _ways(offload, asked)
        limited, ends = timed(callback, time_limit_seconds), endings(time_limit_seconds, interruptible)
        searches: list[_Search] = []
        last = LastResort(chosen.last_resort)

        def attempt(n: int) -> None:
            refused: list[InfeasibleError] = []
            for on_host in ways:
                prepared = asked if n == first and not on_host else ask(n, offload=on_host)
                searches.append(_Search(prepared, chosen.without_last_resort(), limited))
                try:
                    searches[-1].run(points, last)
                except InfeasibleError as error:
                    refused.append(error)
            if len(refused) == len(ways):
                raise min(refused, key=lambda error: error.smallest_peak_bytes or math.inf)

        notes = ()
        try:
            if microbatches == "auto":
                all_found(attempt)
            else:
                best(attempt, microbatches, asked.limit, lambda: divisors(divisible(asked.traced)), seconds=lambda _: 0.0)
        except ends:
            if not any(search.front for search in searches):
                raise
            notes = (f"The search ended early, {searches[-1].stage}: more time may find strategies between these, and better ones.",)
    front: list[_Point] = []
    for point in (point for search in searches for point in search.front):
        _met(front, point)
    owners = {search.prepared.facts: search for search in searches}
    found = []
    for point in dict.fromkeys(_fastest(front, limit) for limit in _limits(front, asked.limit, points)):
        search = owners[point.problem.facts]
        [solution] = search.prepared.overlapped([search.solution(point)], point.problem.within(asked.limit))
        found.append(Strategy.of(search.prepared.plan(point.mesh, solution, point.searcher)))
    return Frontier(found, notes)


def _ways(offload: str | None, asked: Prepared) -> tuple[bool, ...]:
    """Whether optimizer state is on hosts, for each of the programs of which a frontier is."""
    if offload == "auto":
        return (False, True) if optimizer_state(asked.traced) else (False,)
    return (offload == "optimizer",)


class _Search:
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
        self.front: list[_Point] = []
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
        limits = _limits(self.front, prepared.limit, points)
        for number, (lower, limit) in enumerate(pairwise(limits)):
            before, share = (2 + number / len(limits)) / 3, 1 / len(limits) / 3
            self.stage = f"at {format_bytes(limit)} of up to {format_bytes(limits[-1])}"
            self.progress(f"at most {format_bytes(limit)}", before)
            if not any(lower < point.cost[0] <= limit for point in self.front):
                for candidate in dict.fromkeys(point.mesh for point in _around(self.front, limit)):
                    self._ask(self.problems[candidate], self.searcher, limit, part(self.progress, before, share))

    def _finer(self) -> tuple[Problem, Hints] | None:
        """The problem on a mesh of more axes that promises what is faster than all that fits, and hints of where it begins."""
        if not self.prepared.most_axes or not any(point.cost[0] <= self.prepared.limit for point in self.front):
            return None
        fastest = _fastest(self.front, self.prepared.limit)
        known = Solution(fastest.judgement, hints=self.hints[fastest.mesh])
        return self.prepared.finer(fastest.problem, known, part(self.progress, 1 / 3, 0.0))

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

    def solution(self, point: _Point) -> Solution:
        """What a point is as an answer, with the best bound known of all that hold as little on its mesh."""
        peak, objective = point.judgement.cost.peak_bytes, point.judgement.cost.objective_seconds
        known = [bound for limit, bound in self.bounds[point.mesh] if peak <= limit]
        bound = min(max([point.problem.compute_bound(), *known]), objective)
        solution = bounded(point.problem, Solution(point.judgement, bound, hints=self.hints[point.mesh]))
        self.hints[point.mesh] = solution.hints  # the next point's bound goes on from there
        return solution


@dataclass(frozen=True, slots=True, eq=False)
class _Point:
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

    def beats(self, other: _Point) -> bool:
        return all(ours <= theirs for ours, theirs in zip(self.cost, other.cost, strict=True))


@dataclass(frozen=True, slots=True)
class _Observer:
    """Puts on the front what a searcher meets."""

    front: list[_Point]
    problem: Problem
    searcher: Searcher
    progress: Progress

    def check(self) -> None:
        if isinstance(self.progress, Timed):
            self.progress.check()

    def judged(self, judgement: Judgement) -> None:
        _met(self.front, _Point(self.problem, judgement, self.searcher))

    def noted(self, found: Callable[[], Assignment]) -> None:
        """What is not judged yet does not count."""

    def hinted(self, hints: Hints) -> None:
        """Hints come with the solution; those of a search that ends early are of no use to others."""


def _met(front: list[_Point], point: _Point) -> None:
    """Puts a point on a front that no other one of it beats, and takes those off that it beats."""
    if not any(other.beats(point) for other in front):
        front[:] = [*(other for other in front if not point.beats(other)), point]


def _limits(front: Sequence[_Point], limit: float, points: int) -> list[float]:
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
    most = _fastest(front, limit).cost[0]
    steps = min(points - 1, int(math.log(most / least) / math.log(LEAST_RATIO)))
    return [least * (most / least) ** (number / steps) for number in range(steps)] + [most]


def _fastest(front: Sequence[_Point], limit: float) -> _Point:
    """The fastest within a limit that something fits."""
    return min((point for point in front if point.cost[0] <= limit), key=lambda point: point.cost[1])


def _around(front: Sequence[_Point], limit: float) -> list[_Point]:
    """The points of the front on both sides of a limit."""
    below = [point for point in front if point.cost[0] <= limit]
    above = [point for point in front if point.cost[0] > limit]
    return [*([max(below, key=lambda point: point.cost)] if below else []), *([min(above, key=lambda point: point.cost)] if above else [])]
