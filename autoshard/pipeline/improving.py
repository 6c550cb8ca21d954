"""Local search of a pipeline's orders: tasks of the critical path change places with the ones before them on their stage.

The critical path is the chain of tasks and transfers that the makespan is the length of; only a change on it can shorten the makespan (van
Laarhoven et al., Job Shop Scheduling by Simulated Annealing, 1992). A change is kept where the makespan is no longer and the residuals have
room. Microbatches of a piece stay in order. Each try takes O(tasks).
"""

from __future__ import annotations

import random
from itertools import islice

from autoshard.pipeline.list_scheduling import BACKWARD, FORWARD, UPDATE, WEIGHTS, Orders, Tables

SEED = 0


def improved(tables: Tables, orders: Orders, makespan: float, bound: float, tries: int) -> tuple[float, Orders]:
    """The makespan and the orders after so many tries, or once the bound is reached."""
    choose, best, orders = random.Random(SEED), makespan, [list(order) for order in orders]
    path = Timing(tables, orders).critical()
    while tries and best > bound * (1 + 1e-12) and path:
        tries -= 1
        stage, at = path.pop(choose.randrange(len(path)))
        order = orders[stage]
        order[at - 1], order[at] = order[at], order[at - 1]
        timing = Timing(tables, orders) if fits(tables, stage, order) else None
        if timing is None or not timing.is_complete or timing.makespan > best:
            order[at - 1], order[at] = order[at], order[at - 1]
            continue
        best, path = timing.makespan, timing.critical()
    return best, orders


def timed(tables: Tables, orders: Orders) -> float:
    """The makespan of orders."""
    return Timing(tables, orders).makespan


def fits(tables: Tables, stage: int, order: list[tuple[int, int]]) -> bool:
    """Whether residuals have room on a stage, and the last piece's tasks are in pairs."""
    last = len(tables.stage) - 1
    used, alive, ends, before = 0.0, 0, WEIGHTS if tables.splits else BACKWARD, (-1, -1)
    for task in order:
        kind, piece = task
        if tables.joins and before == (FORWARD, last) and task != (BACKWARD, last):
            return False
        if tables.flushes and kind == FORWARD and before[0] == BACKWARD:
            return False
        if kind == FORWARD:
            used, alive = used + tables.kept[piece], alive + 1
            if used > tables.room[stage] * (1 + 1e-9) or alive > tables.most[stage]:
                return False
        elif kind == BACKWARD:
            used -= tables.kept[piece] - tables.late[piece]
        elif kind == WEIGHTS:
            used -= tables.late[piece]
        alive -= kind == ends
        before = task
    return True


class Timing:
    """The start and end of every task of some orders, and what each waited for."""

    def __init__(self, tables: Tables, orders: Orders):
        self.tables, self.orders = tables, orders
        n, n_stages = len(tables.stage), len(orders)
        self.arrived: list[list[list[tuple[float, int, int]]]] = [[[] for _ in range(n)] for _ in range(4)]  # with the task that sent it
        self.arrived[FORWARD][0] = [(0.0, -1, -1)] * tables.n_microbatches
        self.counts = [[0] * n for _ in range(4)]
        self.free, self.links = [0.0] * n_stages, dict[tuple[int, int], float]()
        self.starts: list[list[float]] = [[] for _ in orders]
        self.sources: list[list[tuple[int, int]]] = [[] for _ in orders]  # of what a task waited for, on another stage; -1: its own
        self._run()

    @property
    def is_complete(self) -> bool:
        """Whether no tasks wait for each other."""
        return all(len(starts) == len(order) for starts, order in zip(self.starts, self.orders, strict=True))

    @property
    def makespan(self) -> float:
        """The end of the last task."""
        return max(self.free)

    def _run(self) -> None:
        arrived, counts, seconds, waiting = self.arrived, self.counts, self.tables.seconds, list(range(len(self.orders)))
        while waiting:
            stage = waiting.pop()
            order, starts, sources, end = self.orders[stage], self.starts[stage], self.sources[stage], self.free[stage]
            for kind, piece in islice(order, len(starts), None):
                times, i = arrived[kind][piece], counts[kind][piece]
                if i >= len(times):
                    break
                ready, *source = times[i]
                counts[kind][piece] = i + 1
                sources.append((source[0], source[1]) if ready >= end else (-1, -1))
                start = max(end, ready)
                starts.append(start)
                end = start + seconds[kind][piece]
                if (there := self._sent(stage, len(starts) - 1, kind, piece, end)) is not None:
                    waiting.append(there)
            self.free[stage] = end

    def _sent(self, stage: int, at: int, kind: int, piece: int, end: float) -> int | None:
        """Sends what a task made; gives the stage that it is for, where that is another one."""
        tables, last = self.tables, len(self.tables.stage) - 1
        if kind == (WEIGHTS if tables.splits else BACKWARD) and self.counts[kind][piece] == tables.n_microbatches:
            self.arrived[UPDATE][piece].append((end, stage, at))
        if kind >= WEIGHTS:
            return None
        if kind == BACKWARD and tables.splits:
            self.arrived[WEIGHTS][piece].append((end, stage, at))
        if kind == FORWARD and piece == last:
            self.arrived[BACKWARD][piece].append((end, stage, at))
        target = piece + 1 if kind == FORWARD else piece - 1
        if not 0 <= target <= last:
            return None
        there = tables.stage[target]
        if there == stage:
            self.arrived[kind][target].append((end, stage, at))
            return None
        if seconds := tables.send_seconds(piece, target):
            end = self.links[stage, there] = max(end, self.links.get((stage, there), 0.0)) + seconds
        self.arrived[kind][target].append((end, stage, at))
        return there

    def critical(self) -> list[tuple[int, int]]:
        """The tasks of the critical path, by stage and place, that follow another one on their stage and may go before it."""
        stage = max(range(len(self.free)), key=self.free.__getitem__)
        at, found = len(self.orders[stage]) - 1, []
        while at >= 0 and stage >= 0:
            source = self.sources[stage][at]
            if source[0] >= 0:
                if at and source != (stage, at - 1):
                    found.append((stage, at - 1)) if at > 1 else None
                stage, at = source
                continue
            if at and self._may_go_before(stage, at):
                found.append((stage, at))
            at -= 1
        return found

    def _may_go_before(self, stage: int, at: int) -> bool:
        """Whether a task may go before the one before it: of the same piece and microbatch they are in order."""
        (kind, piece), (before, other) = self.orders[stage][at], self.orders[stage][at - 1]
        return not (piece == other and kind in (before, UPDATE))
