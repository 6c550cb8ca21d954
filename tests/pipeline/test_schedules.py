"""Schedules of pipelines: complete, in order, within their memory, and as short as their papers say."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import PipelineError
from autoshard.pipeline.schedule import SCHEDULES, Schedule, Task, in_flight, residual_bytes, schedule_of
from autoshard.pipeline.simulation import PieceSeconds, simulate

EQUAL = PieceSeconds(1.0, 1.0, 1.0)


@st.composite
def schedules(draw_, names=SCHEDULES):
    """Any schedule of a few stages and microbatches."""
    name, n_stages = draw_(st.sampled_from(names)), draw_(st.integers(1, 8))
    if name != "interleaved":
        return schedule_of(name, n_stages, draw_(st.integers(1, 24)))
    return schedule_of(name, n_stages, n_stages * draw_(st.integers(1, 4)), draw_(st.integers(1, 3)))


@st.composite
def timed(draw_):
    """A schedule with seconds of its pieces and transfers."""
    schedule = draw_(schedules())
    n_pieces = schedule.n_stages * schedule.n_chunks
    seconds = st.floats(0.0, 4.0)
    pieces = [PieceSeconds(draw_(seconds), draw_(seconds), draw_(seconds)) for _ in range(n_pieces)]
    return schedule, pieces, [draw_(seconds) for _ in range(n_pieces - 1)]


@settings(max_examples=100, deadline=None)
@given(timed())
def test_every_task_runs_once_after_what_it_needs(case):
    """No task is missing, twice or early: it starts after its stage is free and what it reads was computed and sent."""
    schedule, pieces, sends = case
    timeline = simulate(schedule, pieces, sends)
    S, last = schedule.n_stages, len(pieces) - 1
    ends = {
        (span.task.chunk * S + span.stage, span.task.kind, span.task.microbatch): span.end_seconds
        for spans in timeline.spans
        for span in spans
    }
    assert len(ends) == len(pieces) * len(schedule.kinds) * schedule.n_microbatches == len(timeline.dispatch_order)
    for spans in timeline.spans:
        assert all(a.end_seconds <= b.start_seconds for a, b in pairwise(spans))
        for span in spans:
            p, i = span.task.chunk * S + span.stage, span.task.microbatch
            needs = {"F": (p - 1, "F", i), "B": (p + 1, "B", i) if p < last else (p, "F", i), "W": (p, "B", i)}[span.task.kind]
            if needs[0] < 0:
                continue
            boundary = sends[min(p, needs[0])] if needs[0] % S != span.stage else 0.0
            assert span.start_seconds >= ends[needs] + boundary - 1e-9


def critical_path_seconds(schedule, pieces, sends):
    """A lower bound of the makespan of any orders of the same tasks.

    It is the longest of the chain of one microbatch through all pieces, and of each stage's own work, which begins when its first input
    arrives and after which the last gradient has to reach the first piece.
    """
    n_stages, split = schedule.n_stages, "W" in schedule.kinds
    sends = [0.0 if n_stages == 1 else seconds for seconds in sends]
    forward = [piece.forward for piece in pieces]
    backward = [piece.backward + (0.0 if split else piece.weights) for piece in pieces]
    weights = [piece.weights if split else 0.0 for piece in pieces]
    bounds = [sum(forward) + sum(backward) + 2 * sum(sends) + weights[0]]
    for s in range(n_stages):
        begin = sum(forward[:s]) + sum(sends[:s])
        work = schedule.n_microbatches * (sum(forward[s::n_stages]) + sum(backward[s::n_stages]))
        bounds.append(begin + work + schedule.n_microbatches * sum(weights[s::n_stages]))
        bounds.append(begin + work + sum(backward[:s]) + sum(sends[:s]) + weights[0])
    return max(bounds)


@settings(max_examples=100, deadline=None)
@given(timed())
def test_the_makespan_is_at_least_the_critical_path(case):
    """Neither the chain of one microbatch nor the work of one stage can be beaten, and stages are no busier than the makespan."""
    schedule, pieces, sends = case
    timeline = simulate(schedule, pieces, sends)
    assert timeline.makespan_seconds >= critical_path_seconds(schedule, pieces, sends) - 1e-9
    assert max(timeline.busy_seconds) <= timeline.makespan_seconds + 1e-9
    assert 0.0 <= timeline.bubble_fraction <= 1.0


@settings(max_examples=100, deadline=None)
@given(timed())
def test_the_order_of_dispatch_has_no_task_before_one_that_it_needs(case):
    """One process that starts tasks in this order never has to wait for one that it has not started."""
    schedule, pieces, sends = case
    timeline = simulate(schedule, pieces, sends)
    place = {
        (task.chunk * schedule.n_stages + stage, task.kind, task.microbatch): k for k, (stage, task) in enumerate(timeline.dispatch_order)
    }
    for (p, kind, i), k in place.items():
        needs = {"F": (p - 1, "F", i), "B": (p + 1, "B", i), "W": (p, "B", i)}[kind]
        assert place.get(needs, -1) < k
        assert kind != "B" or place[p, "F", i] < k


@pytest.mark.parametrize("n_stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("n_microbatches", [1, 2, 5, 16])
def test_microbatches_in_flight(n_stages, n_microbatches):
    """GPipe holds every microbatch; 1F1B at most S - s of them on stage s; zero-bubble no more than 1F1B's first stage."""
    S, m = n_stages, n_microbatches
    assert in_flight(schedule_of("gpipe", S, m)) == (m,) * S
    assert in_flight(schedule_of("1f1b", S, m)) == tuple(min(S - s, m) for s in range(S))
    assert max(in_flight(schedule_of("zero_bubble", S, m))) <= min(S, m)


@pytest.mark.parametrize("n_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("n_microbatches", [1, 4, 9, 32])
def test_bubbles_of_gpipe_and_1f1b(n_stages, n_microbatches):
    """With equal stages the bubble is (S - 1) / (m + S - 1)."""
    S, m = n_stages, n_microbatches
    for name in ("gpipe", "1f1b"):
        timeline = simulate(schedule_of(name, S, m), PieceSeconds(1.0, 2.0))
        assert timeline.bubble_fraction == pytest.approx((S - 1) / (m + S - 1))
        assert timeline.makespan_seconds == pytest.approx(3 * (m + S - 1))


@pytest.mark.parametrize("n_stages", [2, 4, 8, 16])
@pytest.mark.parametrize("n_times", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("seconds", [EQUAL, PieceSeconds(1.0, 1.2, 0.8), PieceSeconds(1.0, 0.8, 1.2), PieceSeconds(1.0, 1.9, 0.9)])
def test_the_bubble_of_zero_bubble(n_stages, n_times, seconds):
    """It is at most 0.7 of 1F1B's with as many microbatches as stages or more, whether F, B and W take equal time or not."""
    m = n_stages * n_times
    one, zero = (simulate(schedule_of(name, n_stages, m), seconds) for name in ("1f1b", "zero_bubble"))
    assert zero.bubble_fraction <= 0.7 * one.bubble_fraction


@pytest.mark.parametrize("transfer_seconds", [0.02, 0.1])
def test_transfers_leave_zero_bubble_ahead(transfer_seconds):
    """So it is where what is sent takes as long as a tenth of a forward task."""
    for n_stages, m in ((4, 8), (4, 16), (4, 32), (8, 8), (8, 16), (8, 32)):
        one, zero = (simulate(schedule_of(n, n_stages, m), PieceSeconds(1, 1.1, 0.9), transfer_seconds) for n in ("1f1b", "zero_bubble"))
        assert zero.bubble_fraction <= 0.7 * one.bubble_fraction


@pytest.mark.parametrize("n_chunks", [2, 4])
def test_chunks_divide_the_bubble(n_chunks):
    """An interleaved schedule's bubble is that of 1F1B divided by the number of chunks."""
    S, m = 4, 16
    whole = simulate(schedule_of("1f1b", S, m), PieceSeconds(1.0, 2.0)).makespan_seconds
    parts = simulate(schedule_of("interleaved", S, m, n_chunks), PieceSeconds(1.0 / n_chunks, 2.0 / n_chunks)).makespan_seconds
    assert parts - 3 * m == pytest.approx((whole - 3 * m) / n_chunks)


def test_transfers_of_one_direction_wait_for_each_other():
    """A slow link between two stages sets the pace, one transfer after the other, while both directions run at once."""
    timeline = simulate(schedule_of("gpipe", 2, 4), PieceSeconds(1.0, 1.0), 3.0)
    forward = [transfer for transfer in timeline.transfers if transfer.source == 0]
    assert [transfer.start_seconds for transfer in forward] == [1.0, 4.0, 7.0, 10.0]
    assert simulate(schedule_of("gpipe", 1, 4), EQUAL, []).transfers == ()


def test_residuals_of_stages():
    """Those of the microbatches in flight add up."""
    assert residual_bytes(schedule_of("1f1b", 2, 4), [3.0, 5.0]) == (6.0, 5.0)
    assert residual_bytes(schedule_of("gpipe", 2, 4), [3.0, 5.0]) == (12.0, 20.0)


def test_orders_that_wait_for_each_other_are_refused():
    """A deadlock is named with the stages and tasks at which it happens."""
    first = (Task("F", 0), Task("F", 1), Task("B", 1), Task("B", 0))
    second = (Task("F", 0), Task("B", 0), Task("F", 1), Task("B", 1))
    crossed = Schedule(
        "crossed", ((Task("F", 0), Task("B", 0), Task("F", 1), Task("B", 1)), (Task("F", 0), Task("F", 1), Task("B", 0), Task("B", 1)))
    )
    with pytest.raises(PipelineError, match="stage 0 at B0, stage 1 at F1"):
        simulate(crossed, EQUAL)
    assert simulate(Schedule("possible", (first, second)), EQUAL).makespan_seconds > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("2f2b", 2, 4), "gpipe, 1f1b, interleaved, zero_bubble; got '2f2b'"),
        (("1f1b", 0, 4), "at least one of its stages; got 0"),
        (("1f1b", 2, 0), "at least one of its microbatches; got 0"),
        (("1f1b", 2, 4, 2), "one chunk a stage; got 2"),
        (("interleaved", 4, 6), "got 6 microbatches on 4 stages"),
    ],
)
def test_impossible_schedules_are_refused(arguments, words):
    """The rule, what was got, and what to do."""
    with pytest.raises(PipelineError, match=words):
        schedule_of(*arguments)


@pytest.mark.parametrize("order", [(Task("F", 0),), (Task("F", 0), Task("B", 0), Task("B", 0)), ()])
def test_orders_with_other_tasks_are_refused(order):
    """A stage without a task, or with one twice, is named."""
    with pytest.raises(PipelineError, match="stage 1 of 'mine'"):
        Schedule("mine", ((Task("F", 0), Task("B", 0)), order))
