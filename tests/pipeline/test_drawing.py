"""Drawings of timelines."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.pipeline.drawing import draw
from autoshard.pipeline.scheduling import schedule_of
from autoshard.pipeline.simulation import simulate
from tests.pipeline.test_schedules import EQUAL, timed


@settings(max_examples=50, deadline=None)
@given(timed(), st.integers(40, 160))
def test_drawings_are_as_wide_as_asked(case, width):
    """There is a line for each stage, none longer than the width."""
    schedule, pieces, sends = case
    lines = draw(simulate(schedule, pieces, sends), width).splitlines()
    assert len(lines) == schedule.n_stages
    assert all(len(line) <= width for line in lines)


def test_a_drawing():
    """Tasks stand where they run, and the middle of a long line is left out."""
    text = draw(simulate(schedule_of("zero_bubble", 2, 3), EQUAL))
    assert text == "stage 0  F0 F1 ...B0 W0 F2 B1 W1 B2 W2\nstage 1  ...F0 B0 F1 B1 W0 F2 B2 W1 W2"
    assert " ~ " in draw(simulate(schedule_of("1f1b", 2, 64), EQUAL), 80)
    assert "F0a" in draw(simulate(schedule_of("interleaved", 2, 2), EQUAL))
