"""The search over numbers of stages and microbatches."""

from __future__ import annotations

import math

import pytest

from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Mesh
from autoshard.judge.model import CostModel
from autoshard.pipeline.plan_search import Candidate, search_plans
from autoshard.problem import Problem
from autoshard.rules import rules_of
from autoshard.search import DynamicProgramming
from autoshard.trace import trace
from benchmarks import models

CLUSTER = Cluster.parse("v5e:2x2")


def search(traced, cluster, limit_bytes, mesh, like, hints):
    """On one axis."""
    mesh = mesh or Mesh((("data", cluster.n_devices),))
    facts = like.facts if like is not None else program_facts(traced.graph, rules_of(traced.graph), compiler_of(cluster))
    problem = Problem(facts, CostModel(cluster, mesh), {}, limit_bytes, like)
    return DynamicProgramming(second_opinion=False).solve(problem, hints=hints), problem


def plans(limit=math.inf, **options):
    fn, args = models.gpt(6, 64, 4, 128, batch=16, length=32)
    return search_plans(trace(fn, *args, donate_argnums=0), CLUSTER, limit, search, **options)


def test_plans_are_ranked_above_a_bound_and_the_same_each_time():
    """Each has all layers and a makespan that its objective is not below; no objective is below the bound."""
    found, again = plans(), plans()
    assert found.ranked
    assert {each.candidate.n_stages for each in found.ranked} <= {2, 4}
    makespans = [each.makespan_seconds for each in found.ranked]
    assert makespans == sorted(makespans) == [each.makespan_seconds for each in again.ranked]
    for each in found.ranked:
        assert sum(each.layering.layers) == 6
        assert each.objective_seconds >= found.bound_seconds * (1 - 1e-9)
    assert found.gap >= 0


def test_what_cannot_be_faster_is_not_searched():
    """A plan without stages that is fast enough rules all candidates out."""
    found = plans(best_seconds=1e-12)
    assert (found.n_searched, found.ranked) == (0, ())
    assert found.n_candidates > 0


@pytest.mark.slow
def test_memory_is_kept():
    """Peaks are within the limit, and a limit that nothing can keep leaves no plan."""
    peak = max(plans(numbers_of_stages=[2]).ranked[0].layering.peak_bytes)
    for each in plans(0.8 * peak, numbers_of_stages=[2]).ranked:
        assert max(each.layering.peak_bytes) <= 0.8 * peak
    assert plans(1e3).ranked == ()


def test_numbers_that_are_asked_for():
    """Stages and microbatches may be fixed, and a number that does not divide the batch leaves no candidate."""
    found = plans(numbers_of_stages=[4], n_microbatches=16)
    assert [each.candidate for each in found.ranked] == [Candidate(4, 16)]
    assert plans(n_microbatches=3).n_candidates == 0
    assert plans(numbers_of_stages=[4], n_microbatches=2, schedule="interleaved").n_candidates == 0


def test_a_step_without_equal_layers_has_no_plans():
    """Its costs are not those of layers."""
    fn, args = models.gpt(2, 64, 4, 128, batch=16, length=32)
    assert search_plans(trace(fn, *args), CLUSTER, math.inf, search) is None


@pytest.mark.parametrize(("candidate", "pace"), [(Candidate(1, 8), 8.0), (Candidate(4, 5), 2.0)])
def test_pace(candidate, pace):
    """Equal stages of one second together: the first microbatch takes that, each other one a stage's share."""
    assert candidate.pace(1.0) == pace


@pytest.mark.parametrize("schedule", ["gpipe", "interleaved", "zero_bubble"])
def test_every_schedule_has_plans(schedule):
    """Also one whose stages have several chunks, and whose microbatches are multiples of the stages."""
    found = plans(schedule=schedule, numbers_of_stages=[4], n_microbatches=16)
    assert [(each.candidate, each.schedule) for each in found.ranked] == [(Candidate(4, 16), schedule)]
    assert found.gap >= 0
