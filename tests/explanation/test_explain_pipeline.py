"""The report on a pipeline shows what its record says."""

from dataclasses import replace

import pytest
from programs import gpt
from strategy_records import PIPELINED

import autoshard
from autoshard.explanation.explain import explain
from autoshard.explanation.explain_pipeline import timeline_of
from autoshard.ir.rewrites import Microbatches
from autoshard.render import to_html, to_text


def pipelined(schedule="1f1b", chunks=1, microbatches=4, **figures):
    seconds = {"forward_seconds": 1e-3, "backward_seconds": 2e-3, "weights_seconds": 1e-3}
    stage = replace(PIPELINED.pipeline.stages[0], **(seconds | figures))
    stages = (replace(stage, **{name: seconds[name] / chunks for name in seconds}),) * 2 * chunks
    pipeline = replace(PIPELINED.pipeline, schedule=schedule, chunks=chunks, stages=stages)
    return replace(PIPELINED, pipeline=pipeline, program=replace(PIPELINED.program, rewrites=Microbatches.of(microbatches)))


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


def told(step_seconds, schedule="1f1b", forward=(1e-3, 1e-3)):
    """The third sentence on a pipeline of two stages, four microbatches and so many seconds."""
    chunks = 2 if schedule == "interleaved" else 1
    found = pipelined(schedule, chunks, after_seconds=0.0)
    stages = [replace(stage, forward_seconds=each / chunks) for stage, each in zip(found.pipeline.stages, forward * chunks, strict=True)]
    cost = replace(found.cost, makespan_seconds=step_seconds, compute_seconds=4 * (max(forward) + 3e-3))
    found = replace(found, pipeline=replace(found.pipeline, stages=tuple(stages)), cost=cost)
    return explain(found).data.sentences[2]


def test_the_report_says_what_to_change():
    """Where stages wait much: more microbatches, or another schedule; where one has more to do than others, another division."""
    assert "wait for other stages, 20 % of the step even on the busiest; more than 4 microbatches" in told(20e-3)
    assert "schedule='auto'" in told(20e-3) and "fewer stages" in told(20e-3, "interleaved")
    assert "division into stages; stage 0 has 32.0 ms of work, and 24.0 ms is the average" in told(33e-3, forward=(5e-3, 1e-3))
    assert "other stages" not in told(16.1e-3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_the_time_of_a_pipeline_is_that_of_its_busiest_devices(schedule):
    """All of their stages together: compute, collectives and the wait for other stages add up to the step, by layer too."""
    fn, args = gpt()
    found = autoshard.search(fn, *args, cluster="v5e:2x4", stages=2, microbatches=2, schedule=schedule, searcher="data_parallel")
    report = found.explain()
    data, text = report.data, to_text(report)
    waiting = data.time.waiting_seconds / data.time.step_seconds
    assert waiting == pytest.approx(min(data.stages.idle_shares), abs=1e-6) and waiting < max(data.stages.idle_shares) < 1
    assert sum(place.seconds for place in data.layers) == pytest.approx(data.time.compute_seconds + data.time.exposed_seconds)
    assert "waiting for other stages" in text and "came from a file" not in text
    assert data.stages.busiest_words in data.sentences[1] and ("stages 1 and 3" in text or "stages 0 and 2" in text) == (schedule != "1f1b")
    assert len({repeated.axis for repeated in data.repeated}) == len(data.repeated)


@pytest.mark.parametrize(("schedule", "chunks", "seconds"), [("gpipe", 1, 20e-3), ("1f1b", 1, 20e-3), ("interleaved", 2, 18e-3)])
def test_the_timeline_is_that_of_the_schedule(schedule, chunks, seconds):
    """Four microbatches of 4 ms on two stages: fill, 16 ms of work, drain; two chunks halve the idle time."""
    record = pipelined(schedule, chunks, send_seconds=0.0, send_back_seconds=0.0)
    assert timeline_of(record, record.pipeline).makespan_seconds == pytest.approx(seconds)


def test_updates_are_drawn_and_counted():
    """Each stage's as a task once a step, in its own column of the table."""
    record = pipelined(update_seconds=5e-3, send_seconds=0.0, send_back_seconds=0.0)
    record = replace(record, pipeline=replace(record.pipeline, orders=("FFBFBFBBU", "FBFBFBFBU")))
    assert timeline_of(record, record.pipeline).end_seconds == pytest.approx((25e-3, 22e-3))
    text = to_text(explain(record))
    (drawn,) = [line for line in text.splitlines() if line.startswith(" stage 0")]
    assert "...B3------ U---" in drawn and text.count("5.00 ms") >= 2


def test_transfers_delay_what_waits_for_them():
    """The second stage starts after the first task and its transfer, the backward pass of the first after the transfer back."""
    record = pipelined(send_seconds=0.5e-3, send_back_seconds=0.25e-3, microbatches=1)
    assert timeline_of(record, record.pipeline).makespan_seconds == pytest.approx(8.75e-3)
