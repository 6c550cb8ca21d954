"""Searches of several attempts: what takes longest is run once for all of them, and a refusal advises what was not tried."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from small_graphs import random_small

import autoshard
from autoshard.errors import InfeasibleError, NothingFasterError
from autoshard.ir import Mesh
from autoshard.plan import attempts
from autoshard.plan.answers import Answers
from autoshard.plan.forms import Form
from autoshard.plan.prepared import Prepared
from autoshard.search import Auto, DataParallel
from autoshard.search.auto import LAST_RESORT
from autoshard.search.integer_model import Model

OPTIONS = {"cluster": "cpu:8", "donate_argnums": 0}


def step(params, x, y):
    """A train step of eight equal layers in a scan."""

    def loss(params):
        x_out, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w["up"]) @ w["down"] + h, None), x, params)
        return jnp.mean((x_out - y) ** 2)

    return jax.tree.map(lambda p, g: p - 0.1 * g, params, jax.grad(loss)(params))


def arguments():
    """Abstract arguments of the step."""

    def leaf(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    return {"up": leaf(8, 64, 256), "down": leaf(8, 256, 64)}, leaf(64, 64), leaf(64, 64)


@pytest.fixture
def rounds(monkeypatch):
    """The variables of the models that are solved."""
    solved, solve = [], Model.solved
    monkeypatch.setattr(Model, "solved", lambda self, *args: solved.append(self.n_variables) or solve(self, *args))
    return solved


@pytest.mark.slow
def test_the_last_resort_has_one_budget(rounds):
    """Where quick attempts find something no model is solved, and where none does all attempts and meshes share the rounds of one."""
    found = autoshard.search(step, *arguments(), memory_limit_bytes=400e3, **OPTIONS)
    assert found.cost.peak_bytes <= 400e3 and found.remat == "fit" and not rounds
    (note,) = (each for each in found.notes if each.startswith("compared 1 to 64 microbatches with and without recomputation"))
    (taken,) = (each for each in found.record.trail if each.outcome == "taken")
    assert f"{taken.form} is fastest within 400 kB" in note and taken.peak_bytes == found.cost.peak_bytes
    few = Auto(last_resort=replace(LAST_RESORT, max_rounds=3))
    with pytest.raises(InfeasibleError, match="computes again what it reads: the smallest peak is"):
        autoshard.search(step, *arguments(), searcher=few, memory_limit_bytes=300e3, **OPTIONS)
    assert len(rounds) == 3


@pytest.mark.slow
def test_what_only_the_last_resort_finds_is_found(rounds):
    """At the least peak of any assignment, where the given member finds nothing, a search with all its attempts still does."""
    fn, args = random_small(64)
    options = {"cluster": "cpu:4", "mesh": {"data": 4}}
    with pytest.raises(InfeasibleError) as refused:
        autoshard.search(fn, *args, searcher="brute_force", memory_limit_bytes=1.0, microbatches=None, remat=None, **options)
    limit = options["memory_limit_bytes"] = refused.value.smallest_peak_bytes
    found = autoshard.search(fn, *args, searcher=Auto(members=(DataParallel(),)), **options)
    assert found.cost.peak_bytes <= limit and rounds
    assert "found by integer_programming, where nothing else was found within the memory limit" in found.notes
    with pytest.raises(InfeasibleError):
        autoshard.search(fn, *args, searcher=Auto(members=(DataParallel(),), last_resort=None), **options)


@pytest.mark.parametrize(
    ("asked", "advised", "tried"),
    [
        ({}, ["stages=2"], ["microbatches='fit'", "remat='fit'"]),
        ({"microbatches": None}, ["microbatches='fit'", "stages=2"], ["remat='fit'"]),
        ({"remat": None}, ["remat='fit'", "stages=2"], ["microbatches='fit'"]),
        ({"microbatches": 4, "remat": "full"}, ["stages=2"], ["microbatches='fit'", "remat='fit'"]),
    ],
)
def test_a_refusal_advises_what_was_not_tried(asked, advised, tried):
    """More devices, a smaller batch and memory always help; microbatches, recomputation and stages are named if they were not tried."""
    with pytest.raises(InfeasibleError) as refused:
        autoshard.search(step, *arguments(), memory_limit_bytes=30e3, mesh={"data": 8}, **asked, **OPTIONS)
    text = str(refused.value)
    assert "Use more devices, a smaller batch, or a higher memory limit." in text and "rematerialisation" not in text
    assert all(each in text for each in advised) and not any(each in text for each in tried)


def test_no_other_attempt_is_made_where_the_arguments_are_too_large(monkeypatch):
    """Split over all devices they are beyond the limit, which neither microbatches nor recomputation change."""
    asked, searched = [], attempts.searched_on_meshes
    monkeypatch.setattr(attempts, "searched_on_meshes", lambda *args, **options: asked.append(args) or searched(*args, **options))
    with pytest.raises(InfeasibleError, match="The arguments alone, split over all devices, take 135 kB"):
        autoshard.search(step, *arguments(), memory_limit_bytes=100e3, mesh={"data": 8}, **OPTIONS)
    assert len(asked) == 1


@pytest.mark.slow
def test_other_forms_are_searched_on_the_best_mesh_of_the_first_one(monkeypatch):
    """That is enough to compare them; on others only what is within the limit on none of them so far."""
    asked, searched = {}, attempts.searched_on_meshes

    def recorded(prepared, searcher, progress, ends, n_finalists, start, limit, **how):
        asked.setdefault(prepared.facts, []).append(len(prepared.meshes))
        return searched(prepared, searcher, progress, ends, n_finalists, start, limit, **how)

    monkeypatch.setattr(attempts, "searched_on_meshes", recorded)
    autoshard.search(step, *arguments(), memory_limit_bytes=400e3, **OPTIONS)
    first, *others = asked.values()
    assert first[0] > 1 and others and all(meshes[0] == 1 for meshes in others)


def test_a_full_plan_descends_over_prime_axes_once(monkeypatch):
    """Searches from other forms take the mesh to which the first one led, and no form is searched twice on one mesh."""
    descents, finer = [], Prepared.finer
    searched, search = [], attempts.searched_on_meshes

    def recorded(prepared, searcher, progress, ends, n_finalists, start, limit, **how):
        searched.append((id(prepared.facts), prepared.meshes, searcher, limit))
        return search(prepared, searcher, progress, ends, n_finalists, start, limit, **how)

    monkeypatch.setattr(Prepared, "finer", lambda self, *args: descents.append(self.facts) or finer(self, *args))
    monkeypatch.setattr(attempts, "searched_on_meshes", recorded)
    autoshard.search(step, *arguments(), plan="full", memory_limit_bytes=1e6, **OPTIONS)
    assert len(descents) == 1 and len({facts for facts, *_ in searched}) > 2
    assert len(searched) == len(set(searched))


def test_answers_are_found_once():
    """By form, limit and meshes, errors too; a form's answer on another mesh is known."""
    answers, first, asked = Answers(), Form(again=None), []

    def nothing():
        asked.append(1)
        raise NothingFasterError("nothing is faster.")

    ways, everywhere = ((Auto(), Mesh((("data", 8),))),), ((Auto(), None),)
    assert answers.elsewhere(first) is None
    assert answers.once(first, False, ways, lambda: "found") == answers.once(first, False, ways, nothing) == "found"
    for _ in range(2):
        with pytest.raises(NothingFasterError):
            answers.once(first, False, everywhere, nothing)
    assert asked == [1] and answers.elsewhere(first) == "found" and answers.elsewhere(Form(2)) is None
