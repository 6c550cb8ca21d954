"""An earlier strategy as the start of a search: the answer is never predicted to be slower than what is carried over."""

from __future__ import annotations

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.plan.prepared import prepare
from autoshard.plan.request import Request
from autoshard.plan.start import carried_specs

PARAMS = {"up": jnp.ones((96, 192)), "down": jnp.ones((192, 96))}
X = np.ones((48, 96), np.float32)


def train_step(params, x):
    value, gradients = jax.value_and_grad(lambda p: jnp.mean((jax.nn.relu(x @ p["up"]) @ p["down"]) ** 2))(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value


@functools.cache
def old(n=8, pinned=True):
    mesh = {"data": n // 2, "model": 2}
    pins = {"params['up']": P(None, "model"), "x": P("data")} if pinned else {}
    return autoshard.search(train_step, PARAMS, X, cluster=f"cpu:{n}", mesh=mesh, pins=pins)


def problems(n, mesh=None):
    prepared = prepare(train_step, (PARAMS, X), Request.of(cluster=f"cpu:{n}", mesh=mesh))
    return {str(each): prepared.problem(each, None, []) for each in prepared.meshes}


@pytest.mark.sample(1)
@pytest.mark.parametrize("n", [8, 6, 4, 2, 1])
@pytest.mark.parametrize("searcher", ["auto", "recursive_programming"])
def test_the_answer_is_no_slower_than_the_old_one_carried_over(n, searcher):
    """On as many devices and on fewer, wherever the mesh is searched."""
    found = autoshard.search(train_step, PARAMS, X, cluster=f"cpu:{n}", start=old(), searcher=searcher)
    for problem in problems(n).values():
        if set(problem.mesh.names) == {"data", "model"}:
            specs = carried_specs(old().record, problem)
            manual = autoshard.search(
                train_step, PARAMS, X, cluster=f"cpu:{n}", mesh=dict(problem.mesh.axes), searcher=autoshard.Manual(in_specs=specs)
            )
            assert found.cost.makespan_seconds <= manual.cost.makespan_seconds * (1 + 1e-9)
    if n == 8:
        assert found.cost.makespan_seconds <= old().cost.makespan_seconds * (1 + 1e-9)
    np.testing.assert_allclose(found.apply(train_step)(PARAMS, X)[1], train_step(PARAMS, X)[1], rtol=1e-5)


def test_specs_are_carried_over_where_they_divide():
    """By the names of axes, or by their order; without axes that are not there or do not divide; a pinned argument's stay out."""
    record = old().record
    assert old().in_specs[0]["up"] == P(None, "model") and old().in_specs[1] == P("data", None)
    (six,) = problems(6, {"data": 3, "model": 2}).values()
    assert carried_specs(record, six)["x"] == ("data", None) and carried_specs(record, six)["params['up']"] == (None, "model")
    (five,) = problems(5, {"data": 5}).values()
    assert carried_specs(record, five)["x"] == (None, None) == carried_specs(record, five)["params['up']"]
    (other,) = {str(each.mesh.axes): each for each in problems(4, {"rows": 2, "columns": 2}).values()}.values()
    assert carried_specs(record, other)["x"] == ("rows", None) and carried_specs(record, other)["params['up']"] == (None, "columns")


def test_a_start_is_the_answer_where_nothing_else_is(monkeypatch):
    """Where the time is over at once, and where the searcher's own answer is slower; a note says so."""
    found = autoshard.search(train_step, PARAMS, X, cluster="cpu:6", mesh={"data": 3, "model": 2}, start=old(), time_limit_seconds=1e-9)
    assert found.in_specs[0]["up"] == P(None, "model") and any("found by start" in note for note in found.notes)

    class Slow:
        name = "slow"
        automatic = True

        def solve(self, problem):
            return autoshard.Manual().solve(problem)

    monkeypatch.setattr(sys.modules["autoshard.search"], "DataParallel", autoshard.Manual)
    best = old(pinned=False)
    again = autoshard.search(train_step, PARAMS, X, cluster="cpu:8", mesh={"data": 4, "model": 2}, start=best, searcher=Slow())
    assert again.cost.makespan_seconds <= best.cost.makespan_seconds and any("found by start" in note for note in again.notes)
    assert again.lower_bound_seconds <= again.cost.objective_seconds


def test_a_start_that_is_not_used_says_why():
    """Since what was searched is faster, no argument is the same, or nothing of it fits."""

    def said(strategy):
        return "; ".join(note for note in strategy.notes if "start" in note)

    options = {"cluster": "cpu:8", "mesh": {"data": 8}}
    slow = autoshard.evaluate(train_step, PARAMS, X, in_specs={"*": P()}, **options)
    assert "start: not used, since with the specs of" in said(autoshard.search(train_step, PARAMS, X, start=slow, **options))
    other = autoshard.search(lambda w, v: jnp.tanh(w @ v), X, X.T, start=slow, **options)
    assert "start: not used, since no argument here" in said(other)
    found = autoshard.search(train_step, PARAMS, X, **options)
    limit = {"memory_limit_bytes": 1.05 * found.cost.peak_bytes, "microbatches": None, "remat": None}
    assert found.cost.peak_bytes < 0.9 * slow.cost.peak_bytes
    assert "must fit" in said(autoshard.search(train_step, PARAMS, X, start=slow, **options, **limit))


def test_what_is_no_start_is_refused():
    """What is no strategy, and a searcher that compares nothing."""
    with pytest.raises(autoshard.StrategyError, match=r"an earlier strategy, got 's.json'"):
        autoshard.search(train_step, PARAMS, X, cluster="cpu:8", start="s.json")
    with pytest.raises(autoshard.StrategyError, match=r"'manual' has one answer. Leave out start="):
        autoshard.search(train_step, PARAMS, X, cluster="cpu:8", start=old(), searcher="manual")
