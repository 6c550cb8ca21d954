"""Finalists are the fastest distinct answers, a baseline among them."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace

import pytest
from programs import PROGRAMS

import autoshard
from autoshard.ir import Collective, Mesh
from autoshard.mesh_search.finalists import finalists, is_baseline
from autoshard.mesh_search.search import search_meshes
from autoshard.plan.prepared import prepare
from autoshard.plan.request import Request
from autoshard.search import searcher_of, solve


def answer(seconds, finder="dynamic_programming", sent=0.0, peak=1e9, sizes=(8,)):
    """A solution, as far as finalists look at it."""
    mesh = Mesh(tuple(zip(("data", "model"), sizes, strict=False)))
    cost = SimpleNamespace(makespan_seconds=seconds, peak_bytes=peak, collectives=(Collective("all_reduce", ("data",), sent),))
    assignment = SimpleNamespace(mesh=mesh)
    return SimpleNamespace(judgement=SimpleNamespace(cost=cost), assignment=assignment, finder=finder)


def test_answers_that_compile_to_the_same_are_one():
    """Of answers on one mesh that are alike in two digits of time, memory and bytes sent, the fastest stays; a difference makes another."""
    one, alike, *others = answer(1.0), answer(1.01), answer(2.0), answer(1.02, sent=8.0), answer(1.03, peak=2e9), answer(1.04, sizes=(4, 2))
    assert set(map(id, finalists([*others, alike, one], 9))) == set(map(id, (one, *others)))
    assert len(finalists([answer(1.0, sent=1e9), answer(1.02, sent=1.02e9)], 9)) == 1


def test_the_last_place_is_a_baselines():
    """A baseline that is not among the fastest takes the last place, unless there is only one or another baseline has one already."""
    searched = [answer(float(number), sent=float(number)) for number in range(1, 4)]
    near, far = answer(2.5, "fully_sharded", sent=10.0), answer(9.0, "data_parallel", sent=20.0)
    assert finalists([*searched, far], 3) == (*searched[:2], far)
    assert finalists([*searched, far, near], 3) == (*searched[:2], near)
    assert finalists([*searched, far], 1) == (searched[0],)


def test_the_order_in_which_answers_come_does_not_matter():
    """Finalists of finalists and of more answers are those of all at once."""
    answers = [answer(float(k), "data_parallel" if k in (4, 5) else "auto", sent=float(k)) for k in range(1, 6)]
    for order in permutations(answers):
        kept = ()
        for one in order:
            kept = finalists([*kept, one], 3)
        assert kept == finalists(answers, 3)


@pytest.mark.sample(1)
@pytest.mark.parametrize("searcher", ["auto", "recursive_programming"])
def test_a_search_keeps_its_finalists_where_asked(searcher):
    """They are as many, ranked after the simplest of those equal to the fastest, and a baseline is among them."""
    fn, args = PROGRAMS["mlp"]()
    chosen = searcher_of(searcher)
    found = {}
    for n in (1, 3):
        prepared = prepare(fn, args, Request.of(cluster="v5e:2x4", searcher=chosen))
        problems = [prepared.problem(mesh, prepared.limit, ()) for mesh in prepared.meshes]
        found[n] = search_meshes(chosen, problems, solve, n_finalists=n)[0]
    assert not found[1].others and len(found[3].others) == 2
    ranked = found[3], *found[3].others
    seconds = [one.judgement.cost.makespan_seconds for one in ranked]
    error = prepared.cluster.device.pair_error
    assert seconds[1:] == sorted(seconds[1:]) and min(seconds) <= found[1].judgement.cost.makespan_seconds
    assert seconds[0] <= min(seconds) * (1 + error)
    assert any(map(is_baseline, ranked))
    assert all(0 <= one.lower_bound_seconds <= one.judgement.cost.objective_seconds for one in ranked)
    if searcher == "auto":
        assert min(seconds) == found[1].judgement.cost.makespan_seconds


def test_a_searcher_that_is_no_automatic_one_has_no_rivals():
    """Who asks for fully sharded data parallelism gets it, confirmed or not."""
    fn, args = PROGRAMS["mlp"]()
    chosen = autoshard.FullySharded()
    prepared = prepare(fn, args, Request.of(cluster="cpu:8", searcher=chosen, mesh={"data": 8}))
    found, _ = search_meshes(chosen, [prepared.problem(mesh, None, ()) for mesh in prepared.meshes], solve, n_finalists=3)
    assert not found.others
