"""The search over numbers of stages and microbatches, schedules and recomputation."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from itertools import chain, repeat
from types import SimpleNamespace

import pytest

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Mesh
from autoshard.ir.rewrites import Recompute
from autoshard.judge.model import CostModel
from autoshard.pipeline.estimates import Estimator
from autoshard.pipeline.layer_costs import Costs, LayerCosts
from autoshard.pipeline.layer_search import Option
from autoshard.pipeline.plan_search import Planning, search_plans
from autoshard.pipeline.plans import FILL, Asked, Candidate
from autoshard.problem import Problem
from autoshard.recompute import Options
from autoshard.rewrite import applied
from autoshard.rules import rules_of
from autoshard.search import DynamicProgramming
from autoshard.trace import trace
from benchmarks import models

CLUSTER = Cluster.parse("v5e:2x2")


def problems(traced, cluster):
    """On one axis."""
    facts = program_facts(traced.graph, rules_of(traced.graph), compiler_of(cluster))
    return [Problem(facts, CostModel(cluster, Mesh((("data", cluster.n_devices),))))]


@cache
def step(scanned=False):
    fn, args = (models.gpt_scan if scanned else models.gpt)(6, 64, 4, 128, batch=16, length=32)
    return trace(fn, *args, donate_argnums=0)


def plans(limit=math.inf, traced=None, **options):
    return search_plans(traced or step(), CLUSTER, problems, Asked(limit, **options))


@pytest.mark.slow
def test_plans_are_ranked_above_a_bound_and_the_same_each_time():
    """Each has all layers and a makespan that its objective is not below; no objective is below the bound."""
    found, again = plans(), plans()
    assert found.ranked
    assert {each.candidate.n_stages for each in found.ranked} <= {1, 2, 4}
    makespans = [each.makespan_seconds for each in found.ranked]
    assert makespans == sorted(makespans) == [each.makespan_seconds for each in again.ranked]
    for each in found.ranked:
        assert sum(each.layering.layers) == 6
        assert each.objective_seconds >= found.bound_seconds * (1 - 1e-9)
        assert each.makespan_seconds >= found.computing_seconds * (1 - 1e-9)
    assert 0 <= found.gap < 1


def test_what_cannot_be_faster_is_not_searched():
    """A makespan that others reached is compared with computing alone, before there are searches; later runs go on from earlier ones."""
    planning = Planning.of(step(), CLUSTER, problems, Asked(math.inf, stages=[1, 2], microbatches=8))
    first = planning.run(below=1e-12)
    assert (first.ranked, first.n_searched) == ((), 0)
    alone = planning.run(n_stages=1)
    assert {each.candidate.n_stages for each in alone.ranked} == {1}
    fastest = alone.ranked[0].makespan_seconds
    assert 0.0 < alone.computing_seconds <= fastest
    again = planning.run(below=alone.computing_seconds)
    assert (again.n_searched, again.bound_of_faster(alone.computing_seconds)) == (alone.n_searched, math.inf)
    assert again.gap_of(alone.computing_seconds, 1.0) == 0.0


@pytest.mark.parametrize("scanned", [False, True])
def test_without_stages_the_costs_are_those_of_the_whole_step(scanned):
    """What two short programs promise for all layers is what a search of the whole step finds, and its bound is no greater."""
    whole = step(scanned)
    found = plans(traced=whole, stages=[1], microbatches=1)
    (estimate,) = found.ranked
    (problem,) = problems(whole, CLUSTER)
    cost = DynamicProgramming().solve(problem).judgement.cost
    assert estimate.objective_seconds == pytest.approx(cost.objective_seconds, rel=0.01)
    assert estimate.makespan_seconds == pytest.approx(cost.makespan_seconds, rel=0.02)
    if not scanned:  # of scanned ones as fast answers keep more or less of the weights on each device
        assert max(estimate.layering.peak_bytes) == pytest.approx(cost.peak_bytes, rel=0.1)
    assert found.bound_seconds <= cost.objective_seconds * (1 + 4 * DynamicProgramming().tolerance)


def test_memory_is_kept_and_raises_the_bound():
    """Peaks are within the limit at some cost of time, and the bound heeds it and is not above what fits."""
    free = plans(stages=[1], microbatches=1)
    limit = 0.6 * max(free.ranked[0].layering.peak_bytes)
    found = plans(limit, stages=[1], microbatches=1)
    assert found.ranked
    assert max(found.ranked[0].layering.peak_bytes) <= limit
    assert free.bound_seconds <= found.bound_seconds <= found.least_seconds
    nothing = plans(1e3, stages=[1], microbatches=1)
    assert (nothing.ranked, nothing.gap) == ((), 1.0)


@pytest.mark.slow
def test_recomputation_is_tried_where_memory_binds():
    """A program that computes again is the plan of all stages where the plain one does not fit, and is not made where it does."""
    fn, args = models.gpt(6, 64, 4, 128, batch=16, length=128)
    whole, made = trace(fn, *args, donate_argnums=0), []

    def recomputing(program):
        options = Options(program, program_facts(program.graph, rules_of(program.graph), compiler_of(CLUSTER)), CLUSTER.device)
        made.append(applied(Recompute(options.full), program))
        return made[-1]

    asked = {"stages": [2], "microbatches": 8, "recomputing": [recomputing], "traced": whole}
    free = plans(**asked).ranked[0]
    assert set(free.again) == {None}
    assert not made
    limit = 0.7 * max(free.layering.peak_bytes)
    found = plans(limit, **asked).ranked[0]
    assert len(made) in (1, 3)
    assert set(found.again) <= {None, 0} and 0 in found.again
    assert sum(found.layering.layers) == 6
    assert max(found.layering.peak_bytes) <= limit
    assert found.objective_seconds > free.objective_seconds


def test_the_first_stages_alone_compute_again_where_that_is_enough(monkeypatch):
    """They have most microbatches in flight; all stages take longer where all compute again."""
    monkeypatch.setattr(Estimator, "send_seconds", lambda *_: 0.0)
    zero = Costs(*[0.0] * 10)

    def option(seconds, kept_bytes, again):
        layer = replace(zero, microbatch_seconds=seconds, objective_seconds=seconds, kept_bytes=kept_bytes)
        return Option(0, LayerCosts(layer, zero), again=again)

    estimator = Estimator(SimpleNamespace(count=8, are_scanned=False), CLUSTER, Asked(5.0))
    meshes = [SimpleNamespace(problems=[SimpleNamespace(mesh=Mesh((("data", 1),)))])]
    plain, again = option(1.0, 1.0, None), option(1.3, 0.2, 0)
    (some,) = estimator.best(Candidate(4, 16), meshes, [plain, again])
    assert (some.again, some.layering.layers) == ((0, 0, None, None), (2, 2, 2, 2))
    assert some.parts == [(0.25, 0), (0.5, 0), (0.75, None), (1.0, None)]
    assert estimator.best(Candidate(4, 16), meshes, [plain])[0].makespan_seconds > some.makespan_seconds  # other numbers of layers
    (every,) = estimator.best(Candidate(4, 16), meshes, [again])
    assert set(every.again) == {0} and every.makespan_seconds > some.makespan_seconds


def test_any_stage_computes_again_or_has_its_state_on_hosts(monkeypatch):
    """The one that is fastest of those that fit, with what runs once a step; of scanned layers all stages do the same."""
    monkeypatch.setattr(Estimator, "send_seconds", lambda *_: 0.0)
    zero = Costs(*[0.0] * 10)

    def option(seconds, state, after, again=None, hosted=False, ends=0.0):
        layer = replace(zero, microbatch_seconds=seconds, objective_seconds=seconds, after_seconds=after, state_bytes=state)
        return Option(0, LayerCosts(layer, replace(zero, state_bytes=ends)), again, hosted)

    options = [option(1.0, 1.0, 0.0, ends=2.0), option(1.5, 1.0, 0.0, again=0, ends=1.0), option(1.0, 0.1, 4.0, hosted=True)]
    meshes = [SimpleNamespace(problems=[SimpleNamespace(mesh=Mesh((("data", 1),)))])]
    for scanned, expected in ((False, ((False,) * 3 + (True,))), (True, (True,) * 4)):
        estimator = Estimator(SimpleNamespace(count=8, are_scanned=scanned), CLUSTER, Asked(3.0))
        (found,) = estimator.best(Candidate(4, 16), meshes, options)
        assert (found.hosted, set(found.again), found.layering.layers) == (expected, {None}, (2, 2, 2, 2))


def test_a_search_that_is_interrupted_has_what_was_found_by_then():
    """Its plans, and a bound of all candidates, those without a search among them."""
    calls = []

    def interrupted(traced, cluster):
        calls.append(cluster)
        if len(calls) > 2:
            raise KeyboardInterrupt
        return problems(traced, cluster)

    found = search_plans(step(), CLUSTER, interrupted, Asked(math.inf, ends=(KeyboardInterrupt,)))
    assert found.ended_early
    assert found.n_searched == 1
    assert 0 < found.bound_seconds <= found.least_seconds
    with pytest.raises(KeyboardInterrupt):
        search_plans(step(), CLUSTER, interrupted, Asked(math.inf))


def test_seconds_of_this_thread_end_a_search():
    """With none there is no search, and a bound all the same."""
    planning = Planning.of(step(), CLUSTER, problems, Asked(math.inf))
    found = planning.run(cpu_seconds=0.0)
    assert (found.ranked, found.n_searched) == ((), 0)
    assert found.bound_seconds > 0


def test_a_time_limit_ends_a_search_in_the_middle(monkeypatch):
    """What was found by then stays, and the candidate may be searched later."""
    planning = Planning.of(step(), CLUSTER, problems, Asked(math.inf, stages=[1], microbatches=1))
    clock = chain([0.0], repeat(2.0))  # there is time for a candidate, and none left when it is solved
    monkeypatch.setattr("autoshard.pipeline.plan_search.time.perf_counter", lambda: next(clock))
    early = planning.run(until=1.0)
    assert (early.ranked, early.n_searched, early.ended_early) == ((), 0, False)
    monkeypatch.undo()
    assert planning.run().n_searched == 1


def test_numbers_that_are_asked_for():
    """Stages and microbatches may be fixed, and a number that does not divide the batch leaves no candidate."""
    found = plans(stages=[4], microbatches=16)
    assert [each.candidate for each in found.ranked] == [Candidate(4, 16)]
    assert plans(microbatches=3).bounds == ()
    assert plans(stages=[4], microbatches=2, schedules=["interleaved"]).bounds == ()


def test_problems_are_asked_for_on_the_devices_of_stages_alone():
    """A mesh that is that of a stage covers no other devices."""
    asked = []

    def recorded(traced, cluster):
        asked.append(cluster.n_devices)
        return problems(traced, cluster)

    for stages, expected in (([2, 4], {2}), ([1], {4})):
        Planning.of(step(), CLUSTER, recorded, Asked(math.inf, stages=stages))
        assert set(asked) == expected
        asked.clear()


def test_a_step_without_equal_layers_has_no_plans():
    """Its costs are not those of layers."""
    fn, args = models.gpt(2, 64, 4, 128, batch=16, length=32)
    assert search_plans(trace(fn, *args), CLUSTER, problems, Asked(math.inf)) is None


def test_the_schedule_of_the_smallest_bubble_is_the_fastest():
    """All schedules that a number of stages has are compared, and six layers are too few for two chunks on four stages."""
    found = plans(schedules=tuple(FILL), stages=[2, 4], microbatches=16)
    by_name = {(each.candidate.n_stages, each.schedule): each.makespan_seconds for each in found.ranked}
    assert {name for n, name in by_name if n == 2} == set(FILL)
    assert (4, "interleaved") not in by_name
    assert by_name[2, "zero_bubble"] < by_name[2, "interleaved"] < by_name[2, "1f1b"] == by_name[2, "gpipe"]
