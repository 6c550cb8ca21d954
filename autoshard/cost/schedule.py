"""Makespan: when compute and collectives run, where collectives run while devices compute.

*Streams.* One for compute and one for the wires. An asynchronous collective takes the wires alone, everything else takes compute, and
a synchronous collective takes both. A carried collective is moved on by the kernels of matrix products: it starts with one, and where
none is left to start it is waited for.

*Schedule.* List scheduling on the dependency graph, as compilers' latency-hiding schedulers do: a stream that is free takes, of the
tasks whose inputs are there, the one with the longest way to the end (Graham, Bounds on Multiprocessing Timing Anomalies, 1969;
XLA's latency_hiding_scheduler.cc orders by the same). So compute moves in between a collective's start and its end, from before and
from behind, as far as dependencies allow. A loop is one compute task, and its body has a schedule of its own.

Laws: at least all compute, at least all communication, at least the longest chain; at most their sum; what collectives leave exposed is
what the makespan has beyond compute. As of any list schedule, less work is nearly always, but not provably, faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

COMPUTE, WIRES, BOTH, PRODUCT, CARRIED = range(5)
_WIRES = frozenset({WIRES, CARRIED})


@dataclass(slots=True)
class Tasks:
    """Tasks in an order in which they can run: task ``i`` needs earlier tasks only.

    Attributes:
        seconds: how long each takes.
        streams: what each takes: ``COMPUTE``, ``WIRES`` or ``BOTH``; ``PRODUCT`` is compute too, and ``CARRIED`` wires.
        needs: the tasks that each waits for.
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
    """When all is done.

    Attributes:
        makespan_seconds: the end of the last task.
        exposed_seconds: per task that takes the wires, how long compute waits while it runs; absent where nothing does.
    """

    makespan_seconds: float
    exposed_seconds: dict[int, float]


def schedule(tasks: Tasks) -> Schedule:
    """The list schedule of some tasks; O(n log n)."""
    seconds, streams = tasks.seconds, tasks.streams
    if _WIRES.isdisjoint(streams):
        return Schedule(sum(seconds), {i: seconds[i] for i, stream in enumerate(streams) if stream == BOTH})
    newest, older, readers = [-1] * len(seconds), [], []  # chains of who reads a task: flat lists wake no garbage collector
    missing = [0] * len(seconds)
    way = list(seconds)  # the longest way from a task's start to the end
    for i in range(len(seconds) - 1, -1, -1):
        needs = tasks.needs[i]
        missing[i] = len(needs)
        for j in needs:
            older.append(newest[j])
            newest[j] = len(readers)
            readers.append(i)
            if way[i] + seconds[j] > way[j]:
                way[j] = way[i] + seconds[j]
    arriving: tuple[list, list] = ([], [])  # per stream (when it is ready, task)
    waiting: tuple[list, list] = ([], [])  # per stream (-way, task) of those that are ready by the time the stream is free
    for i, count in enumerate(missing):
        if not count:
            heappush(arriving[streams[i] in _WIRES], (0.0, i))
    free = [0.0, 0.0]
    since = [0.0, 0.0]  # when the last of those that wait was ready
    ready = [0.0] * len(seconds)
    runs: list[tuple[float, float, int]] = []  # of the wires, in order
    idle: list[tuple[float, float]] = []  # of compute, in order
    exposed: dict[int, float] = {}

    def start(stream: int) -> float:
        if waiting[stream]:
            return max(free[stream], since[stream])
        return max(free[stream], arriving[stream][0][0]) if arriving[stream] else float("inf")

    def wait(stream: int, begin: float) -> int:
        """What is ready by then waits now; how many products are among it."""
        new, products = arriving[stream], 0
        since[stream] = max(since[stream], begin)
        while new and new[0][0] <= begin:
            _, i = heappop(new)
            heappush(waiting[stream], (-way[i], i))
            products += streams[i] == PRODUCT
        return products

    products = 0  # that wait
    for _ in seconds:
        starts = start(COMPUTE), start(WIRES)
        stream = WIRES if starts[WIRES] <= starts[COMPUTE] else COMPUTE
        begin = starts[stream]
        products += wait(stream, begin)
        if streams[waiting[stream][0][1]] == CARRIED:  # waits for a product; once nothing else can start it is waited for
            begin = max(begin, free[COMPUTE])
            if starts[COMPUTE] <= begin:
                products += wait(COMPUTE, begin)
                stream = stream if products else COMPUTE
        _, i = heappop(waiting[stream])
        products -= streams[i] == PRODUCT
        if streams[i] == BOTH:
            begin = max(begin, free[WIRES])
        end = begin + seconds[i]
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
    return Schedule(finish, exposed)


def _expose(idle: Sequence[tuple[float, float]], runs: Sequence[tuple[float, float, int]], exposed: dict[int, float]) -> None:
    """Splits the time that compute is idle among the collectives that run then."""
    at = 0
    for begin, end in idle:
        while at < len(runs) and runs[at][1] <= begin:
            at += 1
        k = at
        while k < len(runs) and runs[k][0] < end:
            begun, ended, task = runs[k]
            exposed[task] = exposed.get(task, 0.0) + max(min(end, ended) - max(begin, begun), 0.0)
            k += 1
