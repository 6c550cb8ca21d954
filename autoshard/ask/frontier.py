"""What memory buys: the strategies of a program that no other one beats in both step time and peak memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, overload

import jax

from autoshard.ask.front import FrontSearch, Point, fastest, limits, met
from autoshard.ask.ladder import ladder, shares_tables
from autoshard.ask.strategy import Strategy
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, ShardingError, TraceError
from autoshard.mesh_search.anytime import endings, timed
from autoshard.microbatch import divisors
from autoshard.plan.confirm import Confirm
from autoshard.plan.forms import Form
from autoshard.plan.microbatching import AUTO, Microbatches, found_with_each, with_few
from autoshard.plan.offloading import check_offload
from autoshard.plan.prepared import Prepared, prepare
from autoshard.plan.request import Request, given
from autoshard.plan.user_pins import Pins
from autoshard.progress import Progress, silent
from autoshard.recompute import optimizer_state
from autoshard.render import Paragraph, Report, Reported, Table, format_bytes, format_percent, format_seconds, shown
from autoshard.rewrite import Padding, divisible
from autoshard.run.collecting import rarely_collecting
from autoshard.search import Searcher
from autoshard.search.integer_programming import LastResort
from autoshard.trace import Batch, outside_mesh


class Frontier(Reported, Sequence[Strategy]):
    """Strategies of one program by rising peak memory and falling step time: none is beaten in both by any that was met.

    Attributes:
        strategies: the first holds the least memory, the last takes the least time.
        notes: what there is to know of the search, such as that it ended early.
    """

    def __init__(self, strategies: Sequence[Strategy], notes: Sequence[str] = ()):
        self.strategies: tuple[Strategy, ...] = tuple(strategies)
        self.notes: tuple[str, ...] = tuple(notes)

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


def _found_by(strategy: Strategy) -> str:
    """The searcher, with the stage of ZeRO where it has one."""
    searcher = strategy.record.searcher
    return f"{searcher.name}, stage {searcher.options['stage']}" if "stage" in searcher.options else searcher.name


def frontier(
    fn: Callable[..., Any],
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
    slow_reduction: str | None = None,
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
        confirm, remat, stages, schedule, plan, start, kernels, slow_reduction, balance, padding: as for `search`.

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
            steps, note = ladder(fn, args, request, points, callback)
        return Frontier([Strategy.of(each) for each in steps], [note] if note else [])
    with shown(progress) as callback, rarely_collecting(), outside_mesh(keep_auto=True):
        ask, first = partial(prepare, fn, args, request), microbatches if isinstance(microbatches, int) else 1
        asked = ask(Form(first))
        check_offload(offload, asked.cluster, asked.traced)
        ways = _ways(offload, asked)
        limited, ends = timed(callback, time_limit_seconds), endings(time_limit_seconds, interruptible)
        searches: list[FrontSearch] = []
        last = LastResort(chosen.last_resort)

        def attempt(n: int) -> None:
            refused: list[InfeasibleError] = []
            for on_host in ways:
                prepared = asked if n == first and not on_host else ask(Form(n, hosted=on_host))
                searches.append(FrontSearch(prepared, chosen.without_last_resort(), limited))
                try:
                    searches[-1].run(points, last)
                except InfeasibleError as error:
                    refused.append(error)
            if len(refused) == len(ways):
                raise min(refused, key=lambda error: error.smallest_peak_bytes or math.inf)

        notes = ()
        try:
            if microbatches == "auto":
                numbers = {1, *AUTO} & {1, *divisors(divisible(asked.traced))}
                found_with_each(sorted(numbers), lambda n, *_: attempt(n), silent, (TraceError,))
            elif microbatches == "fit":
                with_few(attempt, asked.limit, lambda: divisors(divisible(asked.traced)))
            else:
                attempt(first)
        except ends:
            if not any(search.front for search in searches):
                raise
            notes = (f"The search ended early, {searches[-1].stage}: more time may find strategies between these, and better ones.",)
    front: list[Point] = []
    for point in (point for search in searches for point in search.front):
        met(front, point)
    owners = {search.prepared.facts: search for search in searches}
    found = []
    for point in dict.fromkeys(fastest(front, limit) for limit in limits(front, asked.limit, points)):
        search = owners[point.problem.facts]
        [solution] = search.prepared.overlapped([search.solution(point)], point.problem.within(asked.limit))
        found.append(Strategy.of(search.prepared.plan(point.mesh, solution, point.searcher)))
    return Frontier(found, notes)


def _ways(offload: str | None, asked: Prepared) -> tuple[bool, ...]:
    """Whether optimizer state is on hosts, for each of the programs of which a frontier is."""
    if offload == "auto":
        return (False, True) if optimizer_state(asked.traced) else (False,)
    return (offload == "optimizer",)
