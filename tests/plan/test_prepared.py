"""Of several answers the one is taken that is fastest once its communication is overlapped."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from autoshard.cluster import Cluster
from autoshard.cost.record import Cost
from autoshard.ir import Mesh
from autoshard.plan import prepared
from autoshard.plan.prepared import Prepared
from autoshard.search import Solution


def answer(name: str, makespan: float, exposed: float) -> Solution:
    """An answer of so many seconds, of which so many are exposed."""
    cost = Cost(makespan, makespan, makespan - exposed, exposed, exposed, 0.0, 0.0)
    return Solution(SimpleNamespace(cost=cost, assignment=SimpleNamespace(mesh=Mesh.of({name: 8}))), finder=name)


@pytest.mark.parametrize("wanted, ranked", [(1, ["third"]), (2, ["third", "first"]), (4, ["third", "first", "second", "fourth"])])
def test_answers_are_compared_with_their_communication_overlapped(monkeypatch, wanted, ranked):
    """Where overlap hides half of what is exposed the third of four is the fastest; one that could not be is tried only if it is wanted."""
    tried, limits = [], set()

    def halved(facts, model, judgement, limit):
        tried.append(model)
        limits.add(limit)
        seconds = judgement.cost.makespan_seconds - judgement.cost.exposed_communication_seconds / 2
        return SimpleNamespace(**{**vars(judgement), "cost": replace(judgement.cost, makespan_seconds=seconds)})

    monkeypatch.setattr(prepared, "overlapped", halved)
    monkeypatch.setattr(Prepared, "_model", lambda self, mesh, problem: mesh.names[0])
    answers = answer("first", 10.0, 0.2), answer("second", 10.5, 0.4), answer("third", 11.0, 4.0), answer("fourth", 12.0, 2.0)
    asked = Prepared(None, None, Cluster.parse("cpu:8"), (), 0, None, 9.0, {})
    found = asked.overlapped(answers, SimpleNamespace(memory_limit_bytes=7.0), wanted)
    assert [each.finder for each in found] == ranked and limits == {7.0}
    assert "second" not in tried or wanted > 1
