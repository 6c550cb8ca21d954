"""The report on a pipeline shows what its record says."""

from dataclasses import replace

import pytest
from strategy_records import PIPELINED

from autoshard.api.explain import explain
from autoshard.api.explain_pipeline import timeline_of
from autoshard.render import to_html, to_text


def pipelined(schedule="1f1b", chunks=1, microbatches=4, **figures):
    seconds = {"forward_seconds": 1e-3, "backward_seconds": 2e-3, "weights_seconds": 1e-3}
    stage = replace(PIPELINED.pipeline.stages[0], **(seconds | figures))
    stages = (replace(stage, **{name: seconds[name] / chunks for name in seconds}),) * 2 * chunks
    pipeline = replace(PIPELINED.pipeline, schedule=schedule, chunks=chunks, stages=stages)
    return replace(PIPELINED, pipeline=pipeline, program=replace(PIPELINED.program, microbatches=microbatches))


def test_the_report_shows_every_stage_and_the_schedule():
    """A row a stage, with its devices and times, and a line of the drawing for each."""
    text = to_text(explain(pipelined(residual_bytes=5e6)))
    assert "Schedule 1f1b: 4 microbatches." in text
    (first,) = [line for line in text.splitlines() if line.startswith(" stage 0")]
    assert first.split()[2].startswith("F0") and "B3" in first
    rows = [line.split() for line in text.splitlines() if "data=2 x model=2" in line and line.split()[0].isdigit()]
    assert [row[0:4] for row in rows] == [["0", "0", "to", "3"], ["1", "4", "to", "7"]]
    assert "2 x 5.00 MB" in text and "1 x 5.00 MB" in text  # microbatches in flight: fewer on later stages
    assert "Arguments of stage 0" in text and "Arguments of stage 1" in text
    assert "stage 0" in to_html(explain(pipelined()))


@pytest.mark.parametrize(("schedule", "chunks", "seconds"), [("gpipe", 1, 20e-3), ("1f1b", 1, 20e-3), ("interleaved", 2, 18e-3)])
def test_the_timeline_is_that_of_the_schedule(schedule, chunks, seconds):
    """Four microbatches of 4 ms on two stages: fill, 16 ms of work, drain; two chunks halve the idle time."""
    record = pipelined(schedule, chunks, send_seconds=0.0, send_back_seconds=0.0)
    assert timeline_of(record, record.pipeline).makespan_seconds == pytest.approx(seconds)


def test_transfers_delay_what_waits_for_them():
    """The second stage starts after the first task and its transfer, the backward pass of the first after the transfer back."""
    record = pipelined(send_seconds=0.5e-3, send_back_seconds=0.25e-3, microbatches=1)
    assert timeline_of(record, record.pipeline).makespan_seconds == pytest.approx(8.75e-3)
