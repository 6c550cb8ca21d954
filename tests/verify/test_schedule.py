"""The time of a compiled module, read from its text."""

from __future__ import annotations

import pytest
from schedules import schedule

from autoshard.cluster import Cluster
from autoshard.cost.collectives import Communication
from autoshard.ir import Collective, Mesh
from autoshard.verify import scheduled_seconds, sent_seconds

CLOCK = 1.5e9  # Hz


@pytest.mark.parametrize("cycles", [0, 1500, 150_000_000])
def test_a_schedule_waits_where_it_waits(cycles):
    """A permute under way hides behind the cycles in between, whichever is longer; an all_gather that is waited for adds its time."""
    mesh = Mesh.of({"data": 8})
    communication = Communication(Cluster.parse("v5e:2x4").links(mesh))
    permute, gather = (communication.seconds(kind, n, (0,)) for kind, n in (("collective_permute", 4096), ("all_gather", 32768)))
    found = scheduled_seconds(schedule(cycles), mesh, communication, CLOCK)
    assert found == pytest.approx(max(cycles / CLOCK, permute) + gather)


def test_what_is_sent_takes_its_links_time():
    """Executions count, and devices that fit no mesh axes are charged as all of them."""
    mesh = Mesh.of({"data": 2, "model": 4})
    communication = Communication(Cluster.parse("v5e:2x4").links(mesh))
    over_one, over_all = (float(communication.seconds("all_reduce", 1e6, axes)) for axes in ((1,), (0, 1)))
    sent = [Collective("all_reduce", ("model",), 1e6, 3), Collective("all_reduce", ("?",), 1e6)]
    assert sent_seconds(sent, mesh, communication) == pytest.approx(3 * over_one + over_all)
