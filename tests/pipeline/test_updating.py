"""Updates of chunks as tasks of their own: in gaps of the schedule, once all gradients of the chunk are there."""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.errors import PipelineError
from autoshard.pipeline.figures import StageFigures, update_ops
from autoshard.pipeline.improving import timed
from autoshard.pipeline.instructions import Instruction
from autoshard.pipeline.list_scheduling import RULES, Rule, Tables, list_scheduled
from autoshard.pipeline.micro import loop_of
from autoshard.pipeline.schedule import Schedule, alive_bytes
from autoshard.pipeline.scheduling import Workload, scheduled
from autoshard.pipeline.simulation import PieceCosts, simulate
from autoshard.pipeline.stages import stages_of
from autoshard.pipeline.updating import with_early_updates
from autoshard.plan.found_pipelines import FoundPipeline, FoundStage
from autoshard.rules import rules_of
from autoshard.trace import trace
from tests.pipeline.test_schedules import workloads
from tests.pipelines import compared, pipelined
from tests.programs import abstract, train_step_of

B, D = 16, 8
ADAM, CLIPPED = optax.adam(1e-2), optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2))


def layers(n, optimizer, width=D):
    """A step of layers of one width."""

    def loss(params, x, y):
        for w in params:
            x = x + jnp.tanh(x @ w)
        return jnp.mean((x - y) ** 2)

    weights, batch = [abstract((width, width))] * n, abstract((B, width))
    return train_step_of(loss, weights, batch, batch, optimizer=optimizer)


@settings(max_examples=40, deadline=None)
@given(workloads(), st.floats(0.1, 8.0))
def test_updates_come_after_the_last_gradients_of_their_chunk(work, seconds):
    """Any costs: orders are complete, and have the makespan of the simulation, above the bound; to move updates makes none longer."""
    pieces = tuple(replace(each, update=seconds * (k + 1)) for k, each in enumerate(work.pieces))
    found = scheduled(replace(work, pieces=pieces), effort=2_000)
    assert found.schedule.updates
    timeline = simulate(found.schedule, pieces, work.sends, work.sends_back)
    assert timeline.makespan_seconds == pytest.approx(found.makespan_seconds)
    assert found.bound_seconds <= found.makespan_seconds * (1 + 1e-9)
    assert max(alive_bytes(found.schedule, pieces)) <= work.room_bytes[0] * (1 + 1e-6)
    assert found.schedule == Schedule.of_words("auto", found.schedule.words, work.chunks, work.placement)
    room = work.n_stages, work.n_microbatches, work.placement, pieces, False, (work.sends, work.sends_back), work.room_bytes
    tables = Tables.of(*room)
    makespan, orders = list_scheduled(tables, Rule(reserves=True))
    earlier, moved = with_early_updates(tables, orders, 20)
    assert earlier == timed(tables, moved) <= makespan * (1 + 1e-9)


def test_a_gap_hides_an_update():
    """Of the first of two chunks that the first stage ends, where it waits for a transfer before its last task."""
    pieces = (PieceCosts(1.0, 2.0, update=0.5),) * 4
    work = Workload(2, 2, pieces, sends=(1.0,) * 3)
    found = scheduled(work, "interleaved")
    first = found.schedule.words[0]
    assert first.index("Ub") < first.rindex("Ba")
    apart = scheduled(replace(work, pieces=tuple(replace(each, update=0.0) for each in pieces)), "interleaved")
    assert found.makespan_seconds == pytest.approx(apart.makespan_seconds + 0.5)  # of two
    tables = Tables.of(2, 2, "loop", pieces, False, (work.sends, work.sends), (math.inf,) * 2)
    makespan, orders = list_scheduled(tables, RULES[0])
    assert with_early_updates(tables, orders, 10)[0] == pytest.approx(makespan - 0.5)  # without local search, too


def test_an_update_before_its_gradients_is_refused():
    """The stage, the task and what to do."""
    with pytest.raises(PipelineError, match="stage 1 of 'mine' has other tasks of the chunk after U"):
        Schedule.of_words("mine", ["FFBBU", "FBFUB"])
    with pytest.raises(PipelineError, match="stage 1 of 'mine'"):
        Schedule.of_words("mine", ["FFBBU", "FBFB"])


@pytest.mark.parametrize("optimizer", [ADAM, CLIPPED], ids=["adam", "clipped"])
@pytest.mark.parametrize(("schedule", "n_chunks"), [("interleaved", 2), pytest.param("auto", 2, marks=pytest.mark.slow)])
def test_chunks_are_updated_while_others_compute(schedule, n_chunks, optimizer, monkeypatch):
    """The programs run where the schedule has them, and the step is that of one device: where gradients are clipped by the norm of all,
    each chunk's part of it is computed early and sent late.
    """
    fn, args = layers(2 * n_chunks, optimizer)
    run = pipelined(fn, args, 2, 4, schedule, n_chunks=n_chunks, donated=(0,))
    early = {outer.call for programs in run._programs for outer in programs.after if outer.level == run.staged.loop_level}
    started, start = [], Instruction.run

    def told(each, arrays):
        if " of microbatch " in each.what or each.call in early:
            started.append((each.piece, "U" if each.call in early else each.what[0]))
        start(each, arrays)

    monkeypatch.setattr(Instruction, "run", told)
    compared(run, args, steps=2)
    step = started[len(started) // 2 :]
    ends = {piece: max(k for k, (other, kind) in enumerate(step) if other == piece and kind != "U") for piece in range(2 * n_chunks)}
    updates = {piece: step.index((piece, "U")) for piece in ends}
    assert all(ends[piece] < updates[piece] for piece in ends)
    assert any(updates[piece] < ends[other] for piece in ends for other in ends if run.schedule.stage(piece) == run.schedule.stage(other))


@pytest.mark.parametrize("clips", [False, True])
def test_what_waits_for_all_gradients_is_no_part_of_the_update(clips):
    """Without a norm of all gradients all state is replaced by it; with one, it makes the chunk's part of the norm alone."""
    fn, args = layers(2, CLIPPED if clips else ADAM, 64)  # small arrays are updated anywhere
    staged = stages_of(trace(fn, *args, donate_argnums=0), 2, 2)
    for stage in staged.stages:
        graph = stage.traced.graph
        loop = loop_of(graph, rules_of(graph), 2)
        own = update_ops(stage, loop, staged.loop_level)
        made = {value for op in graph.ops if op.index in own for value in op.results}
        replaced = [graph.results[result] for result, _ in graph.aliases if graph.values[graph.results[result]].shape == (64, 64)]
        assert len(replaced) == 3 and {value in made for value in replaced} == {not clips}
        assert own and loop.index not in own


@pytest.mark.parametrize(("chunks", "expected"), [(1, 110.0), (2, 227.0)])
def test_new_state_is_counted_beside_the_tasks_of_other_chunks(chunks, expected):
    """Of one chunk nothing runs any more when it is made; of several, tasks of others do, which make 7 bytes for themselves."""
    nbytes = {"lasting_bytes": 100.0, "working_bytes": 112.0, "backward_bytes": 7.0, "passes_bytes": 7.0, "update_bytes": 10.0}
    figures = StageFigures({}, {}, 0.0, residual_bytes=5.0, **nbytes)
    stages = (FoundStage(None, figures, 0.0, 0.0, joins=False),) * chunks
    found = FoundPipeline(None, "auto", 1, "loop", stages, None, math.inf)
    assert found._lasting_bytes(0) == expected
