"""Makespan of a step in which collectives run beside compute.

*Streams.* One for compute and one for the links. An asynchronous collective occupies the links, a synchronous one both streams, every other
task compute. A carried collective is executed by the kernels of matrix products: it starts together with one, and if no product
is left to start, compute waits for it.

*Schedule.* List scheduling on the dependency graph, as in compilers' latency-hiding schedulers: a free stream takes the ready task
with the longest path to the end (Graham, Bounds on Multiprocessing Timing Anomalies, 1969; XLA's latency_hiding_scheduler.cc has the
same order). So compute is placed between a collective's start and its end as far as dependencies allow. A loop is one compute task, and
its body has a schedule of its own.

Laws: the makespan is at least all compute, at least all communication, and at least the longest chain; at most the sum of all tasks; the
exposed time of collectives is the makespan less compute. As with any list schedule, less work is nearly always, but not provably, faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import accumulate

COMPUTE, WIRES, BOTH, PRODUCT, CARRIED = range(5)
_WIRES = frozenset({WIRES, CARRIED})


@dataclass(slots=True)
class Tasks:
    """Tasks in topological order: each depends on earlier ones only.

    Attributes:
        seconds: the duration of each.
        streams: the stream of each: ``COMPUTE``, ``WIRES`` or ``BOTH``; ``PRODUCT`` is compute too, and ``CARRIED`` wires.
        needs: the tasks on which each depends.
    """

    seconds: list[float] = field(default_factory=list)
    streams: list[int] = field(default_factory=list)
    needs: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, seconds: float, stream: int, needs: tuple[int, ...]) -> int:
        """The number of a new task."""
        self.seconds.append(seconds)
        self.streams.append(stream)
        self.needs.append(needs)
        return len(self.seconds) - 1


@dataclass(frozen=True, slots=True)
class Schedule:
    """The times of a schedule.

    Attributes:
        makespan_seconds: the end of the last task.
        exposed_seconds: per task on the links, how long compute is idle while it runs; absent where it never is.
        start_seconds: when each task starts.
    """

    makespan_seconds: float
    exposed_seconds: dict[int, float]
    start_seconds: list[float]


def schedule(tasks: Tasks) -> Schedule:
    """The list schedule of some tasks; O(n log n)."""
    seconds, streams = tasks.seconds, tasks.streams
    if _WIRES.isdisjoint(streams):
        begins = list(accumulate(seconds, initial=0.0))
        return Schedule(sum(seconds), {i: seconds[i] for i, stream in enumerate(streams) if stream == BOTH}, begins[:-1])
    newest, older, readers = [-1] * len(seconds), [], []  # linked lists of each task's dependents: flat, for the garbage collector's sake
    missing = [0] * len(seconds)
    longest = list(seconds)  # the longest path from a task's start to the end
    for i in range(len(seconds) - 1, -1, -1):
        needs = tasks.needs[i]
        missing[i] = len(needs)
        for j in needs:
            older.append(newest[j])
            newest[j] = len(readers)
            readers.append(i)
            if longest[i] + seconds[j] > longest[j]:
                longest[j] = longest[i] + seconds[j]
    arriving: tuple[list, list] = ([], [])  # per stream (time at which it is ready, task)
    waiting: tuple[list, list] = ([], [])  # per stream (-longest path, task) of the tasks that are ready when the stream is free
    for i, count in enumerate(missing):
        if not count:
            heappush(arriving[streams[i] in _WIRES], (0.0, i))
    free = [0.0, 0.0]
    since = [0.0, 0.0]  # the time up to which ready tasks were moved to ``waiting``
    ready, begins = [0.0] * len(seconds), [0.0] * len(seconds)
    runs: list[tuple[float, float, int]] = []  # of the links, in order
    idle: list[tuple[float, float]] = []  # of compute, in order
    exposed: dict[int, float] = {}

    def start(stream: int) -> float:
        if waiting[stream]:
            return max(free[stream], since[stream])
        return max(free[stream], arriving[stream][0][0]) if arriving[stream] else float("inf")

    def wait(stream: int, begin: float) -> int:
        """Moves the tasks that are ready by then to ``waiting``; returns how many of them are products."""
        new, products = arriving[stream], 0
        since[stream] = max(since[stream], begin)
        while new and new[0][0] <= begin:
            _, i = heappop(new)
            heappush(waiting[stream], (-longest[i], i))
            products += streams[i] == PRODUCT
        return products

    products = 0  # in ``waiting``
    for _ in seconds:
        starts = start(COMPUTE), start(WIRES)
        stream = WIRES if starts[WIRES] <= starts[COMPUTE] else COMPUTE
        begin = starts[stream]
        products += wait(stream, begin)
        if streams[waiting[stream][0][1]] == CARRIED:  # starts with a product; without one, once nothing else can start
            begin = max(begin, free[COMPUTE])
            if starts[COMPUTE] <= begin:
                products += wait(COMPUTE, begin)
                stream = stream if products else COMPUTE
        _, i = heappop(waiting[stream])
        products -= streams[i] == PRODUCT
        if streams[i] == BOTH:
            begin = max(begin, free[WIRES])
        begins[i], end = begin, begin + seconds[i]
        if stream == COMPUTE:
            if begin > free[COMPUTE]:
                idle.append((free[COMPUTE], begin))
            free[COMPUTE] = end
            if streams[i] == BOTH:
                free[WIRES] = end
                exposed[i] = seconds[i]
        else:
            free[WIRES] = end
            runs.append((begin, end, i))
        read = newest[i]
        while read >= 0:
            k, read = readers[read], older[read]
            missing[k] -= 1
            if end > ready[k]:
                ready[k] = end
            if not missing[k]:
                heappush(arriving[streams[k] in _WIRES], (ready[k], k))
    finish = max(free)
    if finish > free[COMPUTE]:
        idle.append((free[COMPUTE], finish))
    _expose(idle, runs, exposed)
    return Schedule(finish, exposed, begins)


def _expose(idle: Sequence[tuple[float, float]], runs: Sequence[tuple[float, float, int]], exposed: dict[int, float]) -> None:
    """Attributes the time that compute is idle to the collectives that run then."""
    at = 0
    for begin, end in idle:
        while at < len(runs) and runs[at][1] <= begin:
            at += 1
        k = at
        while k < len(runs) and runs[k][0] < end:
            begun, ended, task = runs[k]
            exposed[task] = exposed.get(task, 0.0) + max(min(end, ended) - max(begin, begun), 0.0)
            k += 1
