"""List scheduling of a pipeline's tasks: one event after the other, a stage that is free starts a task that is ready, chosen by a rule.

A forward task starts if its residuals have room. Of a piece the microbatches are in order, since they are alike. O(tasks x (chunks + log
stages)).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import product

from autoshard.ir.pieces import part_of
from autoshard.pipeline.simulation import PieceCosts

FORWARD, BACKWARD, WEIGHTS, UPDATE = range(4)
KIND_LETTERS = "FBWU"
_ROUNDING = 1e-9  # of what fits


@dataclass(frozen=True, slots=True)
class Rule:
    """What a stage starts of the tasks that are ready.

    Attributes:
        first: ``backward`` tasks, ``forward`` tasks, or both in ``turns``; or forward tasks until so many microbatches are in flight as a
            round trip of the pieces takes, then both in turns, each in its order and waited for: to ``fill``, as 1F1B, Megatron-LM's
            interleaved schedule, ZB-H1 and ZB-V do.
        chunks: of several chunks' forward tasks the ``last`` one's is started, which finishes microbatches; or, in ``groups`` of as many
            microbatches as there are stages, that of the earliest group, and of its chunks the first one for forward tasks (Megatron-LM).
        waits_weights, waits_forward: a task that fills a gap is not started where a task that comes before it is known to arrive within so
            much of its duration.
        reserves: whether forward tasks leave room for one microbatch of each later chunk of their stage that has none before its backward
            task. So the last piece can always go on, and by induction each one before it. Without, orders may be shorter, or wait for each
            other forever.
        more: microbatches in flight beyond those of a round trip, where forward tasks ``fill``: what is sent may take longer.
    """

    first: str = "turns"
    chunks: str = "last"
    waits_weights: float = 0.0
    waits_forward: float = 0.0
    reserves: bool = False
    more: int = 0


WAITS = ((0.5, 0.0), (0.0, 0.0), (0.5, 0.5), (0.0, 0.5), (1.0, 1.0))
RULES = (
    *(Rule("fill", "groups", waits, more=more) for more in (0, 1) for waits in (0.5, 0.0, 1.0)),
    *(
        Rule(first, chunks, *waits, reserves)
        for waits, reserves, chunks, first in product(WAITS, (False, True), ("last", "groups"), ("turns", "forward", "backward"))
    ),
)
"""The rules that are tried, the most successful ones first."""


@dataclass(frozen=True, slots=True, eq=False)
class Tables:
    """What is scheduled, as plain lists.

    Attributes:
        n_microbatches: of each piece.
        stage: per piece the stage that has it; own: per stage its pieces, in order.
        seconds: of forward tasks, backward tasks, those of weights and updates, per piece.
        splits: whether there are tasks of weights; the backward tasks have their seconds otherwise.
        kept, late: per piece the bytes that a microbatch needs from its forward task on, and those of them until the task of weights.
        sends: from a piece to the next one, and to the one before, per boundary.
        room: bytes, per stage.
        most: microbatches of all its pieces in flight, per stage.
        flushes: whether backward tasks start after all forward tasks of their stage.
        joins: whether the last piece's backward task comes right after its forward task: both are one program.
    """

    n_microbatches: int
    stage: list[int]
    own: list[list[int]]
    seconds: tuple[list[float], list[float], list[float], list[float]]
    splits: bool
    kept: list[float]
    late: list[float]
    sends: tuple[Sequence[float], Sequence[float]]
    room: Sequence[float]
    most: Sequence[float]
    flushes: bool = False
    joins: bool = False

    @classmethod
    def of(
        cls,
        n_stages: int,
        n_microbatches: int,
        placement: str,
        pieces: Sequence[PieceCosts],
        splits: bool,
        sends: tuple[Sequence[float], Sequence[float]],
        room: Sequence[float],
        most: Sequence[float] = (),
        flushes: bool = False,
        joins: bool = False,
    ) -> Tables:
        """The tables of pieces; ``most`` is unlimited where it is empty."""
        stage = [part_of(p, n_stages, placement) for p in range(len(pieces))]
        backward = [each.backward + (0.0 if splits else each.weights) for each in pieces]
        late = [each.late_bytes if splits else 0.0 for each in pieces]
        return cls(
            n_microbatches,
            stage,
            [[p for p, s in enumerate(stage) if s == own] for own in range(n_stages)],
            (
                [each.forward for each in pieces],
                backward,
                [each.weights if splits else 0.0 for each in pieces],
                [each.update for each in pieces],
            ),
            splits,
            [max(each.kept_bytes, own) for each, own in zip(pieces, late, strict=True)],
            late,
            sends,
            room,
            most or [math.inf] * n_stages,
            flushes,
            joins and not flushes,
        )

    @property
    def n_tasks(self) -> int:
        """Of all stages, without updates."""
        return self.n_microbatches * len(self.stage) * (3 if self.splits else 2)

    @property
    def updates(self) -> bool:
        """Whether there are tasks that update state."""
        return any(self.seconds[UPDATE])

    def send_seconds(self, piece: int, target: int) -> float:
        """From a piece to a neighbouring one."""
        return 0.0 if self.stage[piece] == self.stage[target] else self.sends[piece > target][min(piece, target)]


Orders = list[list[tuple[int, int]]]
"""Per stage its tasks in order, each as a kind and a piece."""


def list_scheduled(tables: Tables, rule: Rule) -> tuple[float, Orders]:
    """The makespan, and the orders, in which updates come last; infinity where tasks wait for each other."""
    return _ListScheduling(tables, rule).run()


class _ListScheduling:
    """The state of one schedule that is being made.

    Attributes:
        arrived: per kind and piece when the microbatches that have been sent are there.
        done: per kind and piece how many microbatches were started.
        used, alive: per stage bytes, and microbatches of all pieces in flight.
    """

    def __init__(self, tables: Tables, rule: Rule):
        self.tables, self.rule = tables, rule
        n, n_stages = len(tables.stage), len(tables.own)
        self.last = n - 1
        self.arrived: tuple[list[list[float]], ...] = tuple([[] for _ in range(n)] for _ in range(2))
        self.arrived[FORWARD][0] = [0.0] * tables.n_microbatches
        self.done = tuple([0] * n for _ in range(3))
        self.finished = self.done[WEIGHTS if tables.splits else BACKWARD]
        self.used, self.alive, self.free = [0.0] * n_stages, [0] * n_stages, [0.0] * n_stages
        self.latest = [BACKWARD] * n_stages
        chunks = n // n_stages
        self.folds = chunks == 2 and tables.stage[self.last] == 0 and n_stages > 1  # two chunks in a V
        self.round_trip = [(1 if chunks == 1 else 2) * (n_stages - 1 - stage) + (chunks - 1) * n_stages + 1 for stage in range(n_stages)]
        if self.folds:
            self.round_trip = [2 * n_stages] * n_stages
        self.room = [room * (1 + _ROUNDING) for room in tables.room]
        self.links: dict[tuple[int, int], float] = {}
        self.orders: Orders = [[] for _ in range(n_stages)]
        self.events = [(0.0, stage) for stage in range(n_stages)]

    def run(self) -> tuple[float, Orders]:
        events, free = self.events, self.free
        while events:
            now, stage = heappop(events)
            if free[stage] <= now and (task := self.choice(stage, now)) is not None:
                self.orders[stage].append(task)
                self.start(stage, now, *task)
        is_complete = sum(map(len, self.orders)) == self.tables.n_tasks
        assert is_complete or not self.rule.reserves, "no task waits forever"
        for stage, own in enumerate(self.tables.own if self.tables.updates else ()):
            self.orders[stage] += [(UPDATE, p) for p in own]
            free[stage] += sum(self.tables.seconds[UPDATE][p] for p in own)
        return max(free) if is_complete else math.inf, self.orders

    def choice(self, stage: int, now: float) -> tuple[int, int] | None:
        """The task that a stage starts; None where it waits."""
        rule, tables = self.rule, self.tables
        if tables.joins and tables.stage[self.last] == stage and self.done[BACKWARD][self.last] < self.done[FORWARD][self.last]:
            return BACKWARD, self.last  # in one program with its forward task
        own = tables.own[stage]
        if rule.first == "fill":
            return self.filled(stage, own, now)
        backward, next_backward = self.ready(BACKWARD, self.by_rule(BACKWARD, own), now)
        forward, next_forward = self.ready(FORWARD, self.by_rule(FORWARD, own), now)
        if tables.flushes and any(self.done[FORWARD][p] < tables.n_microbatches for p in own):
            backward = -1
        if forward >= 0 and backward >= 0 and rule.first != "forward" and (rule.first == "backward" or self.latest[stage] == FORWARD):
            forward = -1
        if forward >= 0:
            if next_backward >= now + rule.waits_forward * tables.seconds[FORWARD][forward] or tables.flushes:
                return FORWARD, forward
        elif backward >= 0:
            return BACKWARD, backward
        return self.filling(own, min(next_backward, next_forward), forward >= 0, now)

    def filled(self, stage: int, own: list[int], now: float) -> tuple[int, int] | None:
        """The next task of a stage that starts forward and backward tasks in a fixed order."""
        tables = self.tables
        left = [p for p in self.by_rule(FORWARD, own) if self.done[FORWARD][p] < tables.n_microbatches]
        in_flight = sum(self.done[FORWARD][p] - self.done[BACKWARD][p] for p in own)
        if self.folds and self.done[FORWARD][own[0]] == tables.n_microbatches:  # places of the first chunk's microbatches stay empty
            lead, second = len(self.free) - stage, self.done[FORWARD][own[1]]
            place = 2 * lead - 1 + stage + second + min(second, stage) + max(second - len(self.free) + 1, 0)
            in_flight = place - stage - sum(self.done[BACKWARD][p] for p in own)
        most = self.round_trip[stage] + self.rule.more
        if left and (in_flight < most or tables.flushes):
            if self.fits(left[0]):
                return self.waited_for(FORWARD, left[0], own, now)
            if (weights := self.filling(own, math.inf, False, now)) is not None or not in_flight:
                return weights
        left = [p for p in self.by_rule(BACKWARD, own) if self.done[BACKWARD][p] < tables.n_microbatches]
        return self.waited_for(BACKWARD, left[0], own, now) if left else self.filling(own, math.inf, False, now)

    def waited_for(self, kind: int, piece: int, own: list[int], now: float) -> tuple[int, int] | None:
        """A task, if it is ready; else a task of weights until then, or None."""
        times, i = self.arrived[kind][piece], self.done[kind][piece]
        if i < len(times) and times[i] <= now:
            return kind, piece
        return self.filling(own, times[i] if i < len(times) else math.inf, False, now)

    def by_rule(self, kind: int, own: list[int]) -> list[int]:
        """The pieces of a stage, the one to start first coming first."""
        if self.rule.first == "fill" and self.folds:
            (first, second), lead = (self.done[kind][p] for p in own), len(self.free) - own[0]
            most = 2 * lead - 1 if first < 2 * lead - 1 + own[0] else lead
            later = first - second >= most if kind == FORWARD else second - first < lead
            return own[::-1] if later else own
        if self.rule.chunks == "last" or len(own) == 1:
            return own[::-1]
        done, size, sign = self.done[kind], len(self.free), 1 if kind == FORWARD else -1
        return sorted(own, key=lambda p: (done[p] // size, sign * p))

    def filling(self, own: Sequence[int], until: float, waits: bool, now: float) -> tuple[int, int] | None:
        """The oldest task of weights, if it is short enough; ``waits`` where a forward task is left alone for what arrives."""
        counts, later = self.done[WEIGHTS], self.done[BACKWARD]
        if not self.tables.splits:
            return None
        piece = min((p for p in own if counts[p] < later[p]), key=counts.__getitem__, default=-1)
        if piece < 0:
            return None
        share = 1.0 if waits else self.rule.waits_weights
        return (WEIGHTS, piece) if now + share * self.tables.seconds[WEIGHTS][piece] <= until else None

    def ready(self, kind: int, pieces: Sequence[int], now: float) -> tuple[int, float]:
        """The first of some pieces with a task that is ready, -1 for none; and when the next one of those that are known is."""
        found, soon = -1, math.inf
        arrived, done = self.arrived[kind], self.done[kind]
        for p in pieces:
            times, i = arrived[p], done[p]
            if i < len(times):
                if times[i] > now:
                    soon = min(soon, times[i])
                elif found < 0 and (kind == BACKWARD or self.fits(p)):
                    found = p
        return found, soon

    def fits(self, piece: int) -> bool:
        """Whether there is room for one more microbatch of a piece, and for what is reserved."""
        tables, started, finished = self.tables, self.done[FORWARD], self.finished
        stage, needed, count = tables.stage[piece], tables.kept[piece], 1
        for p in reversed(tables.own[stage]) if self.rule.reserves else ():
            if p == piece:
                break
            if started[p] == self.done[BACKWARD][p]:
                left = started[p] - finished[p]  # tasks of weights, which give up their room
                needed += max(tables.kept[p] - left * tables.late[p], 0.0)
                count += max(1 - left, 0)
        return self.used[stage] + needed <= self.room[stage] and self.alive[stage] + count <= tables.most[stage]

    def start(self, stage: int, now: float, kind: int, piece: int) -> None:
        """Starts a task, and what it sends."""
        tables = self.tables
        end = self.free[stage] = now + tables.seconds[kind][piece]
        self.done[kind][piece] += 1
        if kind == FORWARD:
            self.used[stage] += tables.kept[piece]
            self.alive[stage] += 1
            self.latest[stage] = FORWARD
            if piece == self.last:
                self.arrived[BACKWARD][piece].append(end)
            else:
                self.send(stage, piece, piece + 1, end, kind)
        elif kind == BACKWARD:
            self.used[stage] -= tables.kept[piece] - tables.late[piece]
            self.alive[stage] -= not tables.splits
            self.latest[stage] = BACKWARD
            if piece:
                self.send(stage, piece, piece - 1, end, kind)
        else:
            self.used[stage] -= tables.late[piece]
            self.alive[stage] -= 1
        heappush(self.events, (end, stage))

    def send(self, stage: int, piece: int, target: int, end: float, kind: int) -> None:
        """Sends what a task made, after what was sent before on the same way."""
        there, seconds = self.tables.stage[target], self.tables.send_seconds(piece, target)
        if there != stage:
            if seconds:
                end = self.links[stage, there] = max(end, self.links.get((stage, there), 0.0)) + seconds
            heappush(self.events, (end, there))
        self.arrived[kind][target].append(end)
