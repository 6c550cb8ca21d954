"""Schedules of pipelines: complete, in order, within their memory, and as short as their papers say."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import PipelineError
from autoshard.pipeline import scheduling
from autoshard.pipeline.list_scheduling import Rule
from autoshard.pipeline.schedule import Schedule, Task, alive_bytes, pieces_in_flight
from autoshard.pipeline.scheduling import NAMES, Workload, has_chunks, schedule_of, scheduled
from autoshard.pipeline.simulation import PieceCosts, simulate
from tests.pipeline import published_schedules as published

EQUAL = PieceCosts(1.0, 1.0, 1.0)


@st.composite
def schedules(draw_, names=tuple(NAMES)):
    """Any schedule of a few stages and microbatches."""
    name, n_stages, n = draw_(st.sampled_from(names)), draw_(st.integers(1, 5)), draw_(st.integers(1, 9))
    chunks = draw_(st.sampled_from([k for k in (1, 2, 3) if has_chunks(name, k)]))
    return schedule_of(name, n_stages, n, chunks, draw_(st.sampled_from(["loop", "v"])) if name == "auto" else "loop")


@st.composite
def timed(draw_):
    """A schedule with seconds of its pieces and transfers."""
    schedule = draw_(schedules())
    seconds = st.floats(0.0, 4.0)
    pieces = [PieceCosts(draw_(seconds), draw_(seconds), draw_(seconds)) for _ in range(schedule.n_pieces)]
    return schedule, pieces, [draw_(seconds) for _ in range(schedule.n_pieces - 1)]


@st.composite
def workloads(draw_):
    """Uneven pieces, with transfers and room for few microbatches or many."""
    n_stages, chunks, placement = draw_(st.integers(1, 4)), draw_(st.integers(1, 3)), draw_(st.sampled_from(["loop", "v"]))
    seconds, n = st.floats(0.1, 4.0), n_stages * chunks
    pieces = tuple(PieceCosts(*(draw_(seconds) for _ in range(3)), draw_(seconds), draw_(seconds)) for _ in range(n))
    sends = tuple(draw_(st.floats(0.0, 1.0)) for _ in range(n - 1))
    whole = sum(max(each.kept_bytes, each.late_bytes) for each in pieces)
    room = (whole * draw_(st.floats(1.0, 5.0)),) * n_stages
    return Workload(n_stages, draw_(st.integers(1, 7)), pieces, placement, sends, sends[::-1], room)


@settings(max_examples=40, deadline=None)
@given(workloads())
def test_what_is_found_is_complete_fits_and_is_above_its_bound(work):
    """Any costs: the makespan is that of the simulation, no less than the bound, and residuals have room."""
    found = scheduled(work, effort=2_000)
    timeline = simulate(found.schedule, work.pieces, work.sends, work.sends_back)
    assert timeline.makespan_seconds == pytest.approx(found.makespan_seconds)
    assert found.bound_seconds <= found.makespan_seconds * (1 + 1e-9)
    assert max(alive_bytes(found.schedule, work.pieces)) <= work.room_bytes[0] * (1 + 1e-6)
    assert found.schedule == Schedule.of_words("auto", found.schedule.words, work.chunks, work.placement)


PUBLISHED = {
    "gpipe": (lambda S, m: published.gpipe(S, m), "gpipe", PieceCosts(1.0, 1.0, 1.0)),
    "1f1b": (published.one_forward_one_backward, "1f1b", PieceCosts(1.0, 1.2, 0.8)),
    "interleaved": (lambda S, m: published.interleaved(S, m, 2), "interleaved", PieceCosts(1.0, 1.0, 1.0)),
    "interleaved in 4 chunks": (lambda S, m: published.interleaved(S, m, 4), "interleaved", PieceCosts(1.0, 1.0, 1.0)),
    "ZB-H1": (published.zb_h1, "zero_bubble", PieceCosts(1.0, 1.0, 1.0)),
    "ZB-H1, costs of GPT": (published.zb_h1, "zero_bubble", PieceCosts(18.5, 18.1, 9.3)),  # Qi et al. 2023, table 5: 1.5B
    "ZB-V": (published.zb_v, "auto", PieceCosts(1.0, 1.0, 1.0)),
    "ZB-V, costs of GPT": (published.zb_v, "auto", PieceCosts(18.5, 18.1, 9.3)),
    "DualPipeV": (published.dual_pipe_v, "auto", PieceCosts(1.0, 1.0, 1.0)),
}


@pytest.mark.parametrize("case", PUBLISHED)
@pytest.mark.parametrize("send_seconds", [0.0, 0.05])
def test_no_published_schedule_is_faster_in_its_memory(case, send_seconds):
    """Each one at its number of chunks, placement and peak of residuals, on 4 stages with 12 microbatches."""
    construct, name, costs = PUBLISHED[case]
    theirs = construct(4, 12)
    work = Workload.alike(4, 12, costs, theirs.n_chunks, theirs.placement, send_seconds * costs.forward)
    ours = scheduled(replace(work, room_bytes=alive_bytes(theirs, work.pieces)), name)
    tolerance = 0.005 if send_seconds else 1e-9
    assert ours.makespan_seconds <= simulate(theirs, work.pieces, work.sends).makespan_seconds * (1 + tolerance)
    assert max(alive_bytes(ours.schedule, work.pieces)) <= max(alive_bytes(theirs, work.pieces)) * (1 + 1e-9)


@pytest.mark.parametrize("costs", [EQUAL, PieceCosts(1.0, 1.2, 0.8), PieceCosts(1.0, 1.9, 0.9), PieceCosts(1.0, 0.8, 1.2)])
def test_the_bubble_is_less_than_half_of_1f1bs_in_its_memory(costs):
    """With two chunks or one, whether F, B and W take equal time or not."""
    for n in (8, 16):
        one = simulate(schedule_of("1f1b", 4, n), costs).bubble_fraction
        found = (scheduled(Workload.alike(4, n, costs, *layout)) for layout in ((1, "loop"), (2, "v")))
        assert min(simulate(each.schedule, costs.divided(each.schedule.n_chunks)).bubble_fraction for each in found) <= one / 2


@pytest.mark.parametrize("chunks", [3, 4])
def test_orders_that_wait_for_each_other_are_not_improved(chunks):
    """Some rules end so in three chunks or more of a V; the answer is of another one, in less than half of 1F1B's bubble."""
    found = scheduled(Workload.alike(4, 8, EQUAL, chunks, "v"))
    one = simulate(schedule_of("1f1b", 4, 8), EQUAL).bubble_fraction
    assert simulate(found.schedule, EQUAL.divided(chunks)).bubble_fraction <= one / 2


def test_gpipe_computes_all_forward_tasks_first():
    """Whatever its tasks take, and local search tries."""
    pieces = (PieceCosts(2.0, 1.0, 1.0), PieceCosts(1.0, 3.0, 0.5))
    assert scheduled(Workload(2, 4, pieces, sends=(0.5,)), "gpipe").schedule.words == ("FFFFBBBB",) * 2


def test_the_least_makespan_of_small_workloads_is_the_bound():
    """Two chunks in a V with room as 1F1B needs leave only what the last stage waits for the first one."""
    found = scheduled(Workload.alike(4, 12, EQUAL, 2, "v"))
    assert found.makespan_seconds == found.bound_seconds == 36 + 1.5


@pytest.mark.slow
def test_many_tasks_take_seconds():
    """32 stages, 256 microbatches and 4 chunks: their schedule is found, and near its bound."""
    found = scheduled(Workload.alike(32, 256, PieceCosts(1.0, 1.1, 0.9), 4, "v"))
    assert found.gap < 0.05


@settings(max_examples=100, deadline=None)
@given(timed())
def test_every_task_runs_once_after_what_it_needs(case):
    """No task is missing, twice or early: it starts after its stage is free and what it reads was computed and sent."""
    schedule, pieces, sends = case
    timeline = simulate(schedule, pieces, sends)
    last = len(pieces) - 1
    ends = {
        (schedule.piece(span.stage, span.task.chunk), span.task.kind, span.task.microbatch): span.end_seconds
        for spans in timeline.spans
        for span in spans
    }
    assert len(ends) == len(pieces) * len(schedule.kinds) * schedule.n_microbatches == len(timeline.dispatch_order)
    for spans in timeline.spans:
        assert all(a.end_seconds <= b.start_seconds for a, b in pairwise(spans))
        for span in spans:
            p, i = schedule.piece(span.stage, span.task.chunk), span.task.microbatch
            needs = {"F": (p - 1, "F", i), "B": (p + 1, "B", i) if p < last else (p, "F", i), "W": (p, "B", i)}[span.task.kind]
            if needs[0] < 0:
                continue
            boundary = sends[min(p, needs[0])] if schedule.stage(needs[0]) != span.stage else 0.0
            assert span.start_seconds >= ends[needs] + boundary - 1e-9


@settings(max_examples=100, deadline=None)
@given(timed())
def test_the_makespan_is_at_least_the_work(case):
    """Stages are no busier than the makespan."""
    schedule, pieces, sends = case
    timeline = simulate(schedule, pieces, sends)
    assert max(timeline.busy_seconds) <= timeline.makespan_seconds + 1e-9
    assert 0.0 <= timeline.bubble_fraction <= 1.0


@settings(max_examples=100, deadline=None)
@given(timed())
def test_the_order_of_dispatch_has_no_task_before_one_that_it_needs(case):
    """One process that starts tasks in this order never has to wait for one that it has not started."""
    schedule, pieces, sends = case
    timeline = simulate(schedule, pieces, sends)
    place = {
        (schedule.piece(stage, task.chunk), task.kind, task.microbatch): k for k, (stage, task) in enumerate(timeline.dispatch_order)
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
    assert pieces_in_flight(schedule_of("gpipe", S, m)) == (m,) * S
    assert pieces_in_flight(schedule_of("1f1b", S, m)) == tuple(min(S - s, m) for s in range(S))
    assert max(pieces_in_flight(schedule_of("zero_bubble", S, m))) <= min(S, m)


@pytest.mark.parametrize("n_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("n_microbatches", [1, 4, 9, 32])
def test_bubbles_of_gpipe_and_1f1b(n_stages, n_microbatches):
    """With equal stages the bubble is (S - 1) / (m + S - 1)."""
    S, m = n_stages, n_microbatches
    for name in ("gpipe", "1f1b"):
        timeline = simulate(schedule_of(name, S, m), PieceCosts(1.0, 2.0))
        assert timeline.bubble_fraction == pytest.approx((S - 1) / (m + S - 1))
        assert timeline.makespan_seconds == pytest.approx(3 * (m + S - 1))


@pytest.mark.parametrize("n_chunks", [2, 4])
def test_chunks_divide_the_bubble(n_chunks):
    """An interleaved schedule's bubble is that of 1F1B divided by the number of chunks."""
    S, m = 4, 16
    whole = simulate(schedule_of("1f1b", S, m), PieceCosts(1.0, 2.0)).makespan_seconds
    parts = simulate(schedule_of("interleaved", S, m, n_chunks), PieceCosts(1.0 / n_chunks, 2.0 / n_chunks)).makespan_seconds
    assert parts - 3 * m == pytest.approx((whole - 3 * m) / n_chunks)


def test_transfers_of_one_direction_wait_for_each_other():
    """A slow link between two stages sets the pace, one transfer after the other, while both directions run at once."""
    timeline = simulate(schedule_of("gpipe", 2, 4), PieceCosts(1.0, 1.0), 3.0)
    forward = [transfer for transfer in timeline.transfers if transfer.source == 0]
    assert [transfer.start_seconds for transfer in forward] == [1.0, 4.0, 7.0, 10.0]
    assert simulate(schedule_of("gpipe", 1, 4), EQUAL, []).transfers == ()


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
        (("2f2b", 2, 4), "auto, gpipe, 1f1b, interleaved, zero_bubble; got '2f2b'"),
        (("1f1b", 0, 4), "at least one of its stages; got 0"),
        (("1f1b", 2, 0), "at least one of its microbatches; got 0"),
        (("1f1b", 2, 4, 2), "one chunk a stage; got 2"),
        (("interleaved", 2, 4, 1), "two chunks a stage or more; got 1. Use chunks=2, or '1f1b'"),
    ],
)
def test_impossible_schedules_are_refused(arguments, words):
    """The rule, what was got, and what to do."""
    with pytest.raises(PipelineError, match=words):
        schedule_of(*arguments)


def test_a_stage_without_room_is_refused():
    """One microbatch of each chunk has to fit."""
    with pytest.raises(PipelineError, match=r"stage 0 has 0\.5 bytes for residuals, and these need 1"):
        scheduled(replace(Workload.alike(2, 4, EQUAL), room_bytes=(0.5, math.inf)))


@pytest.mark.parametrize("order", [(Task("F", 0),), (Task("F", 0), Task("B", 0), Task("B", 0)), ()])
def test_orders_with_other_tasks_are_refused(order):
    """A stage without a task, or with one twice, is named."""
    with pytest.raises(PipelineError, match="stage 1 of 'mine'"):
        Schedule("mine", ((Task("F", 0), Task("B", 0)), order))


def test_orders_that_wait_for_each_other_are_replaced(monkeypatch):
    """Where the finalists' microbatches have no room any more, a rule that reserves room for later chunks makes the orders."""
    pieces = tuple(PieceCosts(1.0, backward, 0.0, kept, kept) for backward, kept in ((2.0, 3.0), (1.0, 3.0), (1.0, 2.0), (2.0, 3.0)))
    work = Workload(2, 8, pieces, room_bytes=(5.0, 6.0))
    stuck = Rule("fill", "groups", 0.5)
    monkeypatch.setattr(scheduling, "_candidates", lambda tables: [(scheduling._as_it_is, stuck)])
    found = scheduled(work)
    assert found.bound_seconds <= found.makespan_seconds < math.inf and found.schedule.n_microbatches == 8
