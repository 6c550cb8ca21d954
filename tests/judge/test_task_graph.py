"""The judge's task graph: regions of loops, and sums that changes of planned collectives keep."""

from __future__ import annotations

import pytest

from autoshard.cluster import Cluster
from autoshard.cost.reshard import Step
from autoshard.cost.schedule import WIRES
from autoshard.ir import Mesh, Reason
from autoshard.judge.model import CostModel
from autoshard.judge.task_graph import TaskGraph

MODEL = CostModel(Cluster.parse("v5e:2x4"), Mesh.of({"data": 8}))
STEP = Step("all_reduce", (0,), (-1,), (-1,), 2.0**24, 1e-3)


def graph_with(step: Step, trips: int = 1) -> tuple[TaskGraph, int]:
    """A graph of one kernel and one collective after it, with the collective's task."""
    graph = TaskGraph(MODEL, {"all_gather": WIRES})
    (task,) = graph.communicate((step,), graph.compute(2e-3, trips, set()), trips, "out", 0, lambda blame, step: Reason("held"))
    return graph, task


def planned(graph: TaskGraph) -> float:
    return graph.compute_seconds + graph.communication_seconds + graph.saved_seconds


@pytest.mark.parametrize("change", [lambda g, t: g.resize(g.region, t, 2.0**20), lambda g, t: g.drop(g.region, t)])
def test_what_compilers_save_is_still_planned(change):
    """A collective of fewer bytes, or none at all, shortens the schedule, and leaves the plan's sum as it was."""
    graph, task = graph_with(STEP)
    before = planned(graph)
    change(graph, task)
    assert planned(graph) == pytest.approx(before) and graph.saved_seconds > 0
    assert graph.scheduled_seconds() == pytest.approx(graph.compute_seconds + graph.communication_seconds)
    assert graph.scheduled_seconds() < before


def test_sums_that_are_combined_in_each_trip_cost_the_plan_more():
    """Of a sum that was planned to be combined once after four trips the plan gets the seconds of all four."""
    graph, task = graph_with(Step("all_reduce", (0,), (-1,), (-1,), 2.0**24, 1e-3, trips=4), trips=4)
    before = planned(graph)
    graph.combine_each_trip(graph.region, task)
    assert planned(graph) == pytest.approx(before + 4 * 3e-3) and graph.saved_seconds == 0


def test_a_loop_is_one_task_around_it():
    """A loop of three trips takes three times its region's schedule, and begins after what flows into it."""
    graph = TaskGraph(MODEL, {})
    first = graph.join(graph.compute(1.0, 1, set()))
    graph.enter(3, [first])
    assert graph.needs([first]) == set(), "what was made outside has ended before the loop begins"
    inside = graph.join(graph.compute(2.0, 3, set()))
    region, task = graph.leave(graph.scheduled_seconds())
    assert region is graph.region and region.tasks.needs[task] == (0,) and region.tasks.seconds[task] == 6.0
    assert graph.needs([inside]) == set() and graph.scheduled_seconds() == 7.0 == graph.compute_seconds
