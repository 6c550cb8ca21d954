"""Bubbles of a schedule are explained by what the stage waits for."""

from __future__ import annotations

from collections import Counter

import pytest

from autoshard.pipeline.schedule import Schedule
from autoshard.pipeline.scheduling import schedule_of
from autoshard.pipeline.simulation import PieceCosts, simulate
from autoshard.pipeline.waiting import waits


def seconds_of(timeline, costs):
    """Per stage and reason the seconds."""
    found = Counter()
    for wait in waits(timeline, [costs] * timeline.schedule.n_pieces):
        found[wait.stage, wait.reason] += wait.seconds
    return found


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zero_bubble"])
def test_waits_are_all_idle_time(name):
    """They add up to what stages do not work until the makespan."""
    costs = PieceCosts(1.0, 1.5, 0.5)
    timeline = simulate(schedule_of(name, 3, 6), costs, 0.25)
    found = seconds_of(timeline, costs)
    for stage, busy in enumerate(timeline.busy_seconds):
        own = sum(seconds for (at, _), seconds in found.items() if at == stage)
        assert own == pytest.approx(timeline.makespan_seconds - busy)


def test_what_stages_wait_for():
    """The first one for its gradients, with a forward task that has no room; the second one for tasks, transfers and the end."""
    costs = PieceCosts(1.0, 1.0)
    timeline = simulate(Schedule.of_words("1f1b", ["FFBFBB", "FBFBFB"]), costs, 0.25)
    found = seconds_of(timeline, costs)
    assert found[1, "stage"] == 1.25 and found[1, "transfer"] == 0.5
    assert found[0, "memory"] > 0 and found[0, "end"] == 0.0 and found[1, "end"] > 1.0
    first = next(wait for wait in waits(timeline, [costs] * 2) if wait.stage == 1)
    assert str(first) == "F0 waits for a task of stage 0"
