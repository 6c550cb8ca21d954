"""Laws of the makespan on random task graphs, and what is hidden behind what."""

from __future__ import annotations

import random

import pytest

from autoshard.cost.schedule import BOTH, CARRIED, COMPUTE, PRODUCT, WIRES, Tasks, schedule

EVERY = COMPUTE, WIRES, BOTH, PRODUCT, CARRIED
ON_COMPUTE, ON_WIRES = {COMPUTE, PRODUCT}, {WIRES, CARRIED}


def random_tasks(seed, streams=EVERY, scale=1.0):
    """Tasks that need up to three earlier ones; whatever takes the wires is ``scale`` times as long."""
    rng = random.Random(seed)
    tasks = Tasks()
    for i in range(rng.randrange(1, 40)):
        needs = tuple({rng.randrange(i) for _ in range(rng.randrange(4))}) if i else ()
        stream = rng.choice(streams)
        seconds = rng.choice([0.0, rng.random(), 5 * rng.random()])
        tasks.add(seconds * (scale if stream not in ON_COMPUTE else 1.0), stream, needs)
    return tasks


def longest_chain(tasks):
    ends = []
    for seconds, needs in zip(tasks.seconds, tasks.needs, strict=True):
        ends.append(seconds + max((ends[i] for i in needs), default=0.0))
    return max(ends)


@pytest.mark.parametrize("seed", range(60))
def test_a_makespan_lies_between_its_bounds(seed):
    """No less than either stream's work and the longest chain, no more than everything in a row; exposed times make up the rest."""
    tasks = random_tasks(seed)
    found = schedule(tasks)
    work = [sum(s for s, t in zip(tasks.seconds, tasks.streams, strict=True) if t in {*stream, BOTH}) for stream in (ON_COMPUTE, ON_WIRES)]
    compute = sum(s for s, t in zip(tasks.seconds, tasks.streams, strict=True) if t in ON_COMPUTE)
    makespan = found.makespan_seconds
    assert max(*work, longest_chain(tasks)) <= makespan * (1 + 1e-12)
    assert makespan <= sum(tasks.seconds) * (1 + 1e-12)
    assert makespan == pytest.approx(compute + sum(found.exposed_seconds.values()))
    for task, seconds in found.exposed_seconds.items():
        assert tasks.streams[task] not in ON_COMPUTE
        assert 0 <= seconds <= tasks.seconds[task] * (1 + 1e-9)
        assert tasks.streams[task] in ON_WIRES or seconds == tasks.seconds[task]


@pytest.mark.parametrize("seed", range(40))
def test_slower_wires_are_no_faster(seed):
    """With wires at a third of the speed these programs take as long or longer."""
    fast, slow = (schedule(random_tasks(seed, scale=scale)).makespan_seconds for scale in (1.0, 3.0))
    assert fast <= slow


@pytest.mark.parametrize("seed", range(20))
def test_without_asynchronous_collectives_all_is_in_a_row(seed):
    """Where nothing overlaps the makespan is the sum."""
    tasks = random_tasks(seed, (COMPUTE, BOTH))
    assert schedule(tasks).makespan_seconds == pytest.approx(sum(tasks.seconds))


@pytest.mark.parametrize("order", ["before", "behind"])
def test_work_moves_in_between_start_and_end(order):
    """Compute hides a collective whether the program has it ahead of the producer or after the reader."""
    tasks = Tasks()
    if order == "before":
        tasks.add(3.0, COMPUTE, ())
    producer = tasks.add(1.0, COMPUTE, ())
    sent = tasks.add(2.0, WIRES, (producer,))
    reader = tasks.add(1.0, COMPUTE, (sent,))
    if order == "behind":
        tasks.add(3.0, COMPUTE, ())
        tasks.add(0.0, COMPUTE, (reader,))
    found = schedule(tasks)
    assert found.makespan_seconds == 5.0
    assert found.exposed_seconds.get(sent, 0.0) == 0.0


@pytest.mark.parametrize(("other", "exposed"), [(COMPUTE, 2.0), (PRODUCT, 0.0)])
def test_a_carried_collective_hides_behind_products_only(other, exposed):
    """Without a product it is waited for once all else is done; with one it starts, and flies on over the rest."""
    tasks = Tasks()
    sent = tasks.add(2.0, CARRIED, ())
    tasks.add(0.5, other, ())
    tasks.add(3.0, COMPUTE, ())
    tasks.add(1.0, PRODUCT, (sent,))
    found = schedule(tasks)
    assert found.exposed_seconds.get(sent, 0.0) == exposed
    assert found.makespan_seconds == 4.5 + exposed


def test_what_nothing_hides_is_exposed():
    """A collective between two products in a chain is exposed whole; with half its time of other work, half."""
    for other, exposed in ((0.0, 2.0), (1.0, 1.0)):
        tasks = Tasks()
        sent = tasks.add(2.0, WIRES, (tasks.add(1.0, COMPUTE, ()),))
        tasks.add(1.0, COMPUTE, (sent,))
        tasks.add(other, COMPUTE, ())
        assert schedule(tasks).exposed_seconds[sent] == exposed
