"""The time of a compiled module, read from its text."""

from __future__ import annotations

import pytest
from schedules import schedule

from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.cost.record import Cost
from autoshard.ir import Collective, Mesh
from autoshard.verify import Clock, corrected_seconds, scheduled_seconds, sent_seconds

CLOCK = 1.5e9  # Hz


@pytest.mark.parametrize("cycles", [0, 1500, 150_000_000])
def test_a_schedule_waits_where_it_waits(cycles):
    """A permute under way hides behind the cycles in between, whichever is longer; an all_gather that is waited for adds its time."""
    mesh = Mesh.of({"data": 8})
    communication = Communication(Cluster.parse("v5e:2x4").links(mesh))
    permute, gather = (communication.seconds(kind, n, (0,)) for kind, n in (("collective_permute", 4096), ("all_gather", 32768)))
    found = scheduled_seconds(schedule(cycles), mesh, communication, Clock(CLOCK))
    assert found == pytest.approx(max(cycles / CLOCK, permute) + gather)


def test_what_is_sent_takes_its_links_time():
    """Executions count, and devices that fit no mesh axes are charged as all of them."""
    mesh = Mesh.of({"data": 2, "model": 4})
    communication = Communication(Cluster.parse("v5e:2x4").links(mesh))
    over_one, over_all = (float(communication.seconds("all_reduce", 1e6, axes)) for axes in ((1,), (0, 1)))
    sent = [Collective("all_reduce", ("model",), 1e6, 3), Collective("all_reduce", ("?",), 1e6)]
    assert sent_seconds(sent, mesh, communication) == pytest.approx(3 * over_one + over_all)


def test_a_prediction_is_corrected_by_what_was_compiled():
    """As predicted it stays; FLOPs scale computing, more bytes are exposed, and of fewer the share that was predicted to be."""
    mesh = Mesh.of({"data": 8})
    communication = Communication(Cluster.parse("v5e:2x4").links(mesh))
    planned = (Collective("all_reduce", ("data",), 1e6, 2),)
    alone = sent_seconds(planned, mesh, communication)
    cost = Cost(0.0, 5 * alone, 4 * alone, 4 * alone, alone, 0.0, 1e9, planned)

    def corrected(sent, flops=1e9):
        return corrected_seconds(cost, sent, flops, mesh, communication)

    assert corrected(planned) == pytest.approx(5 * alone)
    assert corrected([Collective("all_reduce", ("data",), 1e6)] * 2) == pytest.approx(5 * alone)
    assert corrected(planned, 2e9) == pytest.approx(9 * alone)
    assert corrected((*planned, *planned)) == pytest.approx(6 * alone)
    assert corrected(()) == pytest.approx(4.75 * alone)


def test_what_the_compiler_makes_of_a_plan_is_no_correction():
    """What it is expected to make of collectives is compared, and an all_reduce that stands for a reduce_scatter is one."""
    mesh = Mesh.of({"data": 8})
    communication = Communication(Cluster.parse("v5e:2x4").links(mesh))
    made = Collective("all_gather", ("data",), 3e6)
    planned = Collective("all_gather", ("data",), 1e6, compiled=(made,)), Collective("reduce_scatter", ("data",), 1e6)
    cost = Cost(0.0, 1.0, 1.0, 0.5, 0.5, 0.0, 0.0, planned)
    sent = made, Collective("all_reduce", ("data",), 1e6)
    assert corrected_seconds(cost, sent, 7.0, mesh, communication) == pytest.approx(1.0)
