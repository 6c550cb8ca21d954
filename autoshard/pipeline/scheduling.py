"""The scheduler of pipelines: the orders of tasks of least makespan, for given seconds, transfers, bytes and memory.

*Variables.* Per stage the order of its tasks. *Objective.* The makespan, as `autoshard.pipeline.simulation` has it. *Constraints.* The
bytes that microbatches in flight keep on a stage are within its room; what a name restricts (`NAMES`). *Method.* List scheduling by several
rules (`list_scheduling`), of long steps on fewer microbatches first, then updates in gaps (`updating`) and local search (`improving`).
Heuristic, with a lower bound (`schedule_bound`). *Ties.* Fewer tasks, then the rule that is tried first. The same for the same numbers, on
any machine: effort is counted in tasks, not in seconds.

Published schedules are among what is reached: GPipe (Huang et al., 2019), 1F1B (Narayanan et al., PipeDream, 2019), interleaved 1F1B
(Narayanan et al., Megatron-LM, 2021), ZB-H1 and ZB-H2 (Qi et al., Zero Bubble Pipeline Parallelism, 2023), ZB-V (Qi et al., Pipeline
Parallelism with Controllable Memory, 2024) and DualPipeV (DeepSeek, 2025), each at its number of chunks, placement and memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.errors import PipelineError
from autoshard.pipeline.improving import improved, timed
from autoshard.pipeline.list_scheduling import KIND_LETTERS, RULES, UPDATE, Orders, Rule, Tables, list_scheduled
from autoshard.pipeline.schedule import Schedule
from autoshard.pipeline.schedule_bound import least_makespan
from autoshard.pipeline.simulation import PieceCosts, per_boundary
from autoshard.pipeline.updating import with_early_updates

EFFORT = 200_000  # tasks that all rules together schedule at most, of fewer microbatches where need be
USUAL = 10_000  # the same for schedules of equal stages
FINALISTS = 2  # rules that schedule all microbatches, and are improved
IMPROVING = 100_000  # tasks that local search times
UPDATING = 50_000  # tasks that are timed to find gaps for updates; of more in all these come last, and are a small share
LEAST_TRIES = 20  # of local search; of longer steps there is none
SPLIT_GAIN = 0.005  # of the makespan, that tasks of weights are worth: each takes the host some time, too


AsSeen = Callable[[Tables], Tables]


@dataclass(frozen=True, slots=True)
class Named:
    """What a schedule's name allows.

    Attributes:
        chunks: the least and the greatest number of chunks a stage.
        splits: whether gradients of weights are tasks of their own; None: either way.
        most: of microbatches in flight on a stage, those of all chunks added up: from the stage, the number of stages and that of chunks.
        flushes: whether backward tasks start after all forward tasks.
    """

    chunks: tuple[int, float] = (1, 1)
    splits: bool | None = False
    most: Callable[[int, int, int], float] = lambda stage, n_stages, chunks: math.inf
    flushes: bool = False


NAMES = {
    "auto": Named((1, math.inf), None),
    "gpipe": Named(flushes=True),
    "1f1b": Named(most=lambda stage, n_stages, chunks: n_stages - stage),
    "interleaved": Named(
        (2, math.inf), most=lambda stage, n_stages, chunks: 2 * (n_stages - 1 - stage) + (chunks - 1) * n_stages + 1
    ),
    "zero_bubble": Named(splits=True, most=lambda stage, n_stages, chunks: n_stages),
}
"""The names of schedules. The numbers of microbatches in flight are those of their papers."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is scheduled.

    Attributes:
        n_stages, n_microbatches: numbers.
        pieces: the costs of the pieces of the program, in order.
        placement: of the pieces on the stages.
        sends, sends_back: seconds of transfers between neighbouring pieces, per boundary.
        room_bytes: per stage what residuals may have; empty: any number of bytes.
        joins: whether the last piece's backward task comes right after its forward task.
    """

    n_stages: int
    n_microbatches: int
    pieces: tuple[PieceCosts, ...]
    placement: str = "loop"
    sends: tuple[float, ...] = ()
    sends_back: tuple[float, ...] = ()
    room_bytes: tuple[float, ...] = ()
    joins: bool = False

    @classmethod
    def alike(
        cls, n_stages: int, n_microbatches: int, costs: PieceCosts, chunks: int = 1, placement: str = "loop", send_seconds: float = 0.0
    ) -> Workload:
        """Of equal stages of such costs, divided into chunks, with as much room as 1F1B needs on the first stage."""
        n = n_stages * chunks
        sends = (send_seconds,) * (n - 1)
        room = (n_stages * costs.kept_bytes,) * n_stages
        return cls(n_stages, n_microbatches, (costs.divided(chunks),) * n, placement, sends, sends, room)

    @property
    def chunks(self) -> int:
        """Pieces of each stage."""
        return len(self.pieces) // self.n_stages


@dataclass(frozen=True, slots=True)
class Scheduled:
    """A schedule that was found.

    Attributes:
        schedule: the orders.
        makespan_seconds: of its tasks.
        bound_seconds: that no orders of these tasks are below.
    """

    schedule: Schedule
    makespan_seconds: float
    bound_seconds: float

    @property
    def gap(self) -> float:
        """The share of the makespan that is above the bound."""
        return max(1 - self.bound_seconds / self.makespan_seconds, 0.0) if self.makespan_seconds else 0.0


def scheduled(work: Workload, name: str = "auto", effort: int = EFFORT) -> Scheduled:
    """The schedule of least makespan that is found, of what a name of `NAMES` allows; ``effort`` is how many tasks are scheduled in all.

    Raises:
        PipelineError: there is no such name, a number is not positive or not the name's, or one microbatch has no room.

    >>> found = scheduled(Workload.alike(2, 3, PieceCosts(1.0, 2.0)), "1f1b")
    >>> found.schedule.words, found.makespan_seconds, found.gap
    (('FFBFBB', 'FBFBFB'), 12.0, 0.0)
    """
    check(name, work.n_stages, work.n_microbatches, work.chunks)
    named = NAMES[name]
    most = [named.most(stage, work.n_stages, work.chunks) for stage in range(work.n_stages)]
    n = len(work.pieces)
    room = work.room_bytes or (math.inf,) * work.n_stages
    sends = per_boundary(work.sends or 0.0, n), per_boundary(work.sends_back or work.sends or 0.0, n)
    found: list[Scheduled] = []
    for splits in (False, True) if named.splits is None else (named.splits,):
        numbers = work.n_stages, work.n_microbatches, work.placement
        tables = Tables.of(*numbers, work.pieces, splits, sends, room, most, named.flushes, work.joins)
        _check_room(tables)
        bound = least_makespan(tables)
        if not found or bound < found[0].makespan_seconds * (1 - SPLIT_GAIN):
            makespan, orders = _orders(tables, bound, effort)
            found.append(Scheduled(_schedule(name, tables, orders, work.placement), makespan, bound))
    gain = {id(each): 1 - SPLIT_GAIN if "W" not in each.schedule.kinds else 1.0 for each in found}
    best = min(found, key=lambda each: each.makespan_seconds * gain[id(each)])
    return replace(best, bound_seconds=min(each.bound_seconds for each in found))


def schedule_of(name: str, n_stages: int, n_microbatches: int, n_chunks: int | None = None, placement: str = "loop") -> Schedule:
    """The schedule of a name for equal stages whose forward task, and each of the two parts of the backward one, take equal time.

    ``"auto"`` has as much room as 1F1B needs. ``n_chunks`` is 2 for ``"interleaved"`` where it is not given, and 1 for all others.

    Raises:
        PipelineError: as for `scheduled`.

    >>> [str(task) for task in schedule_of("1f1b", 2, 3).orders[0]]
    ['F0', 'F1', 'B0', 'F2', 'B1', 'B2']
    """
    chunks = n_chunks if n_chunks is not None else 2 if name == "interleaved" else 1
    check(name, n_stages, n_microbatches, chunks)
    work = Workload.alike(n_stages, n_microbatches, PieceCosts(1.0, 1.0, 1.0), chunks, placement)
    return scheduled(work if name == "auto" else replace(work, room_bytes=()), name, USUAL).schedule


def check(name: str, n_stages: int, n_microbatches: int, chunks: int = 1) -> None:
    """Raises `PipelineError` for a name or numbers that no schedule has."""
    if name not in NAMES:
        raise PipelineError(f"A schedule is one of {', '.join(NAMES)}; got {name!r}.")
    for what, n in (("stages", n_stages), ("microbatches", n_microbatches), ("chunks", chunks)):
        if n < 1:
            raise PipelineError(f"A pipeline has at least one of its {what}; got {n}.")
    if not has_chunks(name, chunks):
        if chunks == 1:
            raise PipelineError(f"Schedule {name!r} has two chunks a stage or more; got 1. Use chunks=2, or '1f1b' for one.")
        raise PipelineError(f"Schedule {name!r} has one chunk a stage; got {chunks}. Use 'interleaved' or 'auto' for several.")


def has_chunks(name: str, chunks: int) -> bool:
    """Whether a name's schedules may have so many chunks a stage."""
    least, most = NAMES[name].chunks
    return least <= chunks <= most


def _check_room(tables: Tables) -> None:
    for stage, own in enumerate(tables.own):
        needed = sum(tables.kept[p] for p in own)
        if needed > tables.room[stage]:
            raise PipelineError(
                f"A stage of a pipeline needs room for one microbatch of each of its chunks; stage {stage} has {tables.room[stage]:.4g} "
                f"bytes for residuals, and these need {needed:.4g}. Use more microbatches, or more stages."
            )


def _orders(tables: Tables, bound: float, effort: int) -> tuple[float, Orders]:
    """The makespan and the orders of the best rule, improved."""
    candidates = _candidates(tables)
    few = replace(tables, n_microbatches=min(tables.n_microbatches, 2 * len(tables.own) + 2))
    few = tables if few.n_microbatches == tables.n_microbatches or tables.n_tasks * len(candidates) <= effort else few
    least, tried, tasks = (1 + 1e-9) * bound if few is tables else 0.0, list[tuple[float, int, Orders]](), 0
    for number, candidate in enumerate(candidates):
        tried.append(_of_candidate(few, number, *candidate))
        tasks += few.n_tasks
        if tried[-1][0] <= least or (tasks >= effort and min(tried)[0] < math.inf):
            break
    tried.sort(key=lambda each: each[:2])
    if few is not tables:
        tried = sorted((_of_candidate(tables, k, *candidates[k]) for _, k, _ in tried[:FINALISTS]), key=lambda each: each[:2])
    if math.isinf(tried[0][0]):  # those of few microbatches that wait for each other where there are more
        tried = [(*_of_candidate(tables, 0, _as_it_is, Rule(reserves=True)),)]
    tries = IMPROVING // tables.n_tasks if effort == EFFORT else 0
    if tables.updates and tables.n_tasks <= UPDATING:
        n = 1 if tries < LEAST_TRIES else FINALISTS
        tried[:n] = sorted((_updated_early(tables, *each) for each in tried[:n]), key=lambda each: each[:2])
    if tries < LEAST_TRIES:
        return timed(tables, tried[0][2]), tried[0][2]  # a rule that waits, and then starts what it waited with, tells too much
    orders = _improved(tables, tried, bound, tries)
    return timed(tables, orders), orders


def _updated_early(tables: Tables, makespan: float, number: int, orders: Orders) -> tuple[float, int, Orders]:
    """A candidate with its updates in gaps."""
    if math.isinf(makespan):
        return makespan, number, orders
    makespan, orders = with_early_updates(tables, orders, UPDATING // tables.n_tasks)
    return makespan, number, orders


def _improved(tables: Tables, tried: Sequence[tuple[float, int, Orders]], bound: float, tries: int) -> Orders:
    """The best orders after local search: half of the tries are for starts of different makespans, the others for the best of these."""
    starts = [(tried[0][0], tried[0][2])]
    for makespan, _, own in tried:
        if len(starts) < FINALISTS and starts[-1][0] * (1 + 1e-9) < makespan < math.inf:
            starts.append((makespan, own))
    better = [improved(tables, orders, makespan, bound, tries // 2 // len(starts)) for makespan, orders in starts]
    makespan, orders = min(better, key=lambda each: each[0])
    return improved(tables, orders, makespan, bound, tries - tries // 2)[1]


def _of_candidate(tables: Tables, number: int, as_seen: AsSeen, rule: Rule) -> tuple[float, int, Orders]:
    """The makespan, the number and the orders of one of the candidates."""
    makespan, orders = list_scheduled(as_seen(tables), rule)
    return makespan if as_seen is _as_it_is or math.isinf(makespan) else timed(tables, orders), number, orders


def _as_it_is(tables: Tables) -> Tables:
    return tables


def _without_sends(tables: Tables) -> Tables:
    """Tasks that are sent in no time: small delays of some lead rules astray."""
    nothing = [0.0] * (len(tables.stage) - 1)
    return replace(tables, sends=(nothing, nothing))


def _alike(tables: Tables) -> Tables:
    """All pieces and kinds of tasks alike, and sent in no time."""
    n = len(tables.stage)
    seconds = ([1.0] * n, [1.0 if tables.splits else 2.0] * n, [1.0 if tables.splits else 0.0] * n, tables.seconds[UPDATE])
    return replace(_without_sends(tables), seconds=seconds)


def _candidates(tables: Tables) -> list[tuple[AsSeen, Rule]]:
    """Rules, and with which seconds they make orders, which are then timed as they are; the most successful ones first."""
    sends = any(map(any, tables.sends))
    seen = (_as_it_is, _without_sends, _alike) if sends else (_as_it_is, _alike)
    one_chunk = len(tables.own) == len(tables.stage)
    return [(as_seen, rule) for rule in RULES for as_seen in seen if not one_chunk or rule.first == "fill" or rule.chunks == "last"]


def _schedule(name: str, tables: Tables, orders: Orders, placement: str) -> Schedule:
    """The schedule of orders of kinds and pieces."""
    n_stages = len(orders)
    words = ["".join(KIND_LETTERS[kind] + chr(ord("a") + piece // n_stages) for kind, piece in order) for order in orders]
    if len(tables.stage) == n_stages:
        words = ["".join(KIND_LETTERS[kind] for kind, _ in order) for order in orders]
    return Schedule.of_words(name, words, len(tables.stage) // n_stages, placement)
