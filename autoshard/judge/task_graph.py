"""The tasks of a step, compute and collectives, with their dependences: a graph for the program and one for a trip of each loop.

`autoshard.cost.schedule` runs each on the device's streams. Seconds are counted here as they are planned, one task after the other, and
`saved_seconds` is by how much the plan's sum exceeds that of the tasks that compilers make of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from autoshard.cost.reshard import Step
from autoshard.cost.schedule import BOTH, COMPUTE, PRODUCT, Schedule, Tasks, schedule
from autoshard.ir import Op, Reason
from autoshard.judge.attribution import Blame
from autoshard.judge.model import CostModel

Cause = Callable[[Blame, Step], Reason]
"""Why a collective is there, found once it is reported."""


@dataclass(slots=True, eq=False)
class Region:
    """Tasks that are scheduled together: the program's, or those of one trip of a loop.

    Attributes:
        runs: how often in a step.
        outside: the region that the loop stands in.
        needs: the tasks of that region that end before the loop begins.
        sent: the positions in `TaskGraph.sent` of collectives, by their tasks.
        fused: tasks that are part of their readers' kernels.
        ops: the index of the op that each task is of; -1 where it is of none.
        loops: the regions of loops, by the tasks that stand for them.
        times: when each task starts, once the region is scheduled.
    """

    runs: int
    outside: Region | None = None
    needs: set[int] = field(default_factory=set)
    tasks: Tasks = field(default_factory=Tasks)
    sent: dict[int, int] = field(default_factory=dict)
    fused: list[int] = field(default_factory=list)
    ops: list[int] = field(default_factory=list)
    loops: dict[int, Region] = field(default_factory=dict)
    times: Schedule | None = None

    def add(self, op: int, seconds: float, stream: int, needs: Iterable[int]) -> int:
        """The number of a new task."""
        self.ops.append(op)
        return self.tasks.add(seconds, stream, tuple(needs))


Maker = tuple[Region, int]
"""The task that makes a value, in its region; None stands for a value that is there from the start."""


@dataclass(frozen=True, slots=True)
class Sent:
    """A collective, before its reason is found.

    Attributes:
        source: the op that it serves, or the path of the result.
        moved: the value that it moves.
        nbytes: its bytes as compiled, where those differ from the plan's; else 0.
        added: whether its operand is added to another collective's, which combines both.
    """

    step: Step
    trips: int
    source: Op | str
    moved: int
    cause: Cause
    nbytes: float = 0.0
    added: bool = False


class TaskGraph:
    """The tasks of a step as they are found, op by op.

    Attributes:
        region: the one that tasks are added to.
        op: the index of the op whose tasks are added; -1 for none.
        sent: all collectives.
        exposures: per position in `sent` its exposed seconds, once its region is scheduled.
        compute_seconds, communication_seconds, exposed_seconds, saved_seconds: sums over the step.
    """

    def __init__(self, model: CostModel, streams: Mapping[str, int]):
        """The empty graph.

        Args:
            streams: of each kind of collective that runs beside compute.
        """
        self.region = Region(1)
        self.op = -1
        self.sent: list[Sent] = []
        self.exposures: dict[int, float] = {}
        self.compute_seconds = self.communication_seconds = self.exposed_seconds = self.saved_seconds = 0.0
        self._model = model
        self._streams = streams

    # -- tasks ---------------------------------------------------------------------------------------------------------

    def communicate(self, path: Iterable[Step], needs: set[int], trips: int, source: Op | str, moved: int, cause: Cause) -> set[int]:
        """Adds one collective after another; gives the tasks that have to end before their result is there."""
        for step in path:
            if step.kind == "slice" or not step.nbytes:
                continue
            region = self.region
            self.communication_seconds += step.seconds * trips
            stream = self._streams.get(step.kind, BOTH)
            task = region.add(self.op, step.seconds * trips / (region.runs or 1), stream, needs)
            region.sent[task] = len(self.sent)
            self.sent.append(Sent(step, trips, source, moved, cause, step.compiled_nbytes))
            needs = self.compute(step.copying_seconds, trips, {task}) if step.copying_seconds else {task}
        return needs

    def note_merged(self, step: Step, trips: int, source: Op | str, moved: int, cause: Cause) -> None:
        """Adds a planned collective that the compiler merges with one that was there before."""
        self.exposures[len(self.sent)] = 0.0
        self.sent.append(Sent(replace(step, seconds=0.0, trips=0), trips, source, moved, cause))
        self.saved_seconds += (step.seconds + step.copying_seconds) * trips

    def compute(self, seconds: float, trips: int, needs: set[int], stream: int = COMPUTE) -> set[int]:
        """Adds a kernel; gives the task that has to end before its result is there."""
        self.compute_seconds += seconds * trips
        return {self.region.add(self.op, seconds * trips / (self.region.runs or 1), stream, needs)}

    def join(self, needs: set[int]) -> Maker | None:
        """One task that ends when all of some do."""
        if len(needs) > 1:
            return self.region, self.region.add(self.op, 0.0, COMPUTE, needs)
        return (self.region, next(iter(needs))) if needs else None

    def needs(self, makers: Iterable[Maker | None]) -> set[int]:
        """The tasks of this region among some makers; those of regions around it have to end before its loop begins."""
        found, here = set(), self.region
        for maker in makers:
            if maker is None:
                continue
            region, task = maker
            if region is here:
                found.add(task)
                continue
            inner = here
            while inner.outside is not None and inner.outside is not region:
                inner = inner.outside
            if inner.outside is region:  # else it was made in a loop that has ended, whose own task is a maker too
                inner.needs.add(task)
        return found

    # -- loops ---------------------------------------------------------------------------------------------------------

    def enter(self, runs: int, makers: Iterable[Maker | None]) -> None:
        """Begins a loop's region; the given makers, of values that flow into it, have to end before."""
        self.region = Region(runs, self.region, self.needs(makers))

    def leave(self, seconds: float) -> Maker:
        """Ends a loop's region, one run of which takes this; gives the loop's task in the region around it."""
        body, outside = self.region, self.region.outside
        assert outside is not None, "the program itself is not left"
        self.region: Region = outside
        task = outside.add(self.op, seconds * body.runs / (outside.runs or 1), COMPUTE, body.needs)
        outside.loops[task] = body
        return outside, task

    def scheduled_seconds(self) -> float:
        """The seconds of one run of the region; notes how much of its collectives is exposed."""
        region = self.region
        _add_to_readers(region.tasks, region.fused)
        region.times = found = schedule(region.tasks)
        for task, position in region.sent.items():
            seconds = found.exposed_seconds.get(task, 0.0) * region.runs
            self.exposures[position] = seconds
            self.exposed_seconds += seconds
        return found.makespan_seconds

    # -- collectives as compiled ---------------------------------------------------------------------------------------

    def resize(self, region: Region, task: int, nbytes: float) -> None:
        """Changes the bytes of a collective to those that the compiler makes of the plan's."""
        sent = self.sent[region.sent[task]]
        step = sent.step
        seconds = float(self._model.communication.seconds(step.kind, nbytes, step.axes, step.groups, step.itemsize))
        self._change(region, task, replace(sent, step=replace(sent.step, seconds=seconds), nbytes=nbytes), saves=True)

    def drop(self, region: Region, task: int) -> None:
        """Leaves out a collective, since its operand is added to that of a later one."""
        sent = self.sent[region.sent[task]]
        self._change(region, task, replace(sent, step=replace(sent.step, seconds=0.0), added=True), saves=True)
        region.tasks.seconds[task] = 0.0

    def combine_each_trip(self, region: Region, task: int) -> None:
        """Combines in every trip of a loop partial sums that were planned to be combined after it."""
        sent = self.sent[region.sent[task]]
        self._change(region, task, replace(sent, step=self._model.each_trip(sent.step), nbytes=0.0), saves=False)

    def combine_once(self, region: Region, task: int, trips: int, widened: float) -> None:
        """Combines after a loop partial sums that were planned to be combined in each trip."""
        sent = self.sent[region.sent[task]]
        nbytes = sent.step.nbytes * widened
        seconds = float(self._model.communication.seconds(sent.step.kind, nbytes, sent.step.axes, itemsize=sent.step.itemsize)) / trips
        self._change(region, task, replace(sent, step=replace(sent.step, seconds=seconds, trips=trips), nbytes=nbytes), saves=True)

    def _change(self, region: Region, task: int, after: Sent, saves: bool) -> None:
        """Replaces a collective; the plan keeps its seconds where that saves some, else it has the new ones."""
        position = region.sent[task]
        less = (self.sent[position].step.seconds - after.step.seconds) * after.trips
        self.sent[position] = after
        region.tasks.seconds[task] -= less / (region.runs or 1)
        self.communication_seconds -= less
        if saves:
            self.saved_seconds += less


def _add_to_readers(tasks: Tasks, fused: Iterable[int]) -> None:
    """Adds the seconds of fused tasks to the first kernel that reads them: they are computed then, and fill no gap before."""
    readers: dict[int, int] = dict.fromkeys(fused, -1)
    for reader, needs in enumerate(tasks.needs if readers else ()):
        for task in needs:
            if readers.get(task) == -1:
                readers[task] = reader
    for task, reader in readers.items():
        if reader >= 0 and tasks.streams[reader] in (COMPUTE, PRODUCT):
            tasks.seconds[reader] += tasks.seconds[task]
            tasks.seconds[task] = 0.0
