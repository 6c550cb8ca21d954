"""State flows forward: the hints of one search are handed to the next by portfolios and mesh searches."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from problems import SMALL, problem_of
from programs import PROGRAMS

from autoshard.mesh_search.anytime import Incumbent
from autoshard.mesh_search.search import search_meshes
from autoshard.problem import Hints
from autoshard.search import SEARCHERS, Auto, DynamicProgramming, FullySharded, RecursiveProgramming, solve


@pytest.mark.sample(4)
@pytest.mark.parametrize("name", sorted(set(SEARCHERS) - {"sharding_propagation"}))  # which wants pins
def test_every_searcher_hands_on_its_hints(name):
    """Hints that a searcher does not use are in its solution's; so they are where the better of two answers is taken."""
    fn, args = SMALL["two_matmuls"]()
    problem, given = problem_of(fn, *args), Hints(worth=1.5, least=1e9)
    for solution in (SEARCHERS[name]().solve(problem, hints=given), solve(SEARCHERS[name](), problem, hints=given)):
        assert (solution.hints.worth, solution.hints.least) == (given.worth, given.least)


def test_messages_of_dynamic_programming_reach_the_observer():
    """A portfolio that ends while another member runs leaves a bound as good as the one that was proven by then."""
    fn, args = PROGRAMS["moe"]()
    problem = problem_of(fn, *args)
    incumbent = Incumbent(problem)

    def impatient(what, _):
        if what == RecursiveProgramming.name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Auto().solve(problem.observed_by(incumbent), impatient)
    assert incumbent.hints is not None and incumbent.hints.messages.keys() == DynamicProgramming().solve(problem).hints.messages.keys()


def test_meshes_hand_hints_to_each_other():
    """Every search after the first is given the least objective found by then, and the hints of the best mesh's search."""
    fn, args = PROGRAMS["lstm"]()
    problems = [problem_of(fn, *args, mesh=mesh) for mesh in ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4})]
    given, found = [], []

    def counted(searcher, problem, progress, hints):
        given.append(hints)
        found.append(replace(solve(searcher, problem, progress, hints), hints=replace(hints, worth=1.0 + len(found))))
        return found[-1]

    search_meshes(FullySharded(), problems, counted)  # which no bound cuts short
    objectives = [solution.judgement.cost.objective_seconds for solution in found]
    assert [hints.least for hints in given] == [math.inf, objectives[0], min(objectives[:2])]
    seconds = [solution.judgement.cost.makespan_seconds for solution in found]
    assert [hints.worth for hints in given] == [0.0, 1.0, 1.0 + seconds.index(min(seconds[:2]))]
