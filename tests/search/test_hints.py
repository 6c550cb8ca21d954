"""State flows forward: what one search found out is handed to the next, by whoever asks several."""

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


@pytest.mark.parametrize("name", sorted(set(SEARCHERS) - {"sharding_propagation"}))  # which wants pins
def test_every_searcher_hands_on_what_it_was_given(name):
    """Hints that a searcher makes nothing of are in its solution's; so they are where the better of two answers is taken."""
    fn, args = SMALL["two_matmuls"]()
    problem, given = problem_of(fn, *args), Hints(worth=1.5, least=1e9)
    for solution in (SEARCHERS[name]().solve(problem, hints=given), solve(SEARCHERS[name](), problem, hints=given)):
        assert (solution.hints.worth, solution.hints.least) == (given.worth, given.least)


def test_what_dynamic_programming_moved_is_known_to_whoever_watches():
    """A portfolio that ends while another member is asked leaves a bound as good as the one that was proven by then."""
    fn, args = PROGRAMS["moe"]()
    problem = problem_of(fn, *args)
    met = Incumbent(problem)

    def impatient(what, _):
        if what == RecursiveProgramming.name:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Auto().solve(problem.observed_by(met), impatient)
    assert met.hints is not None and met.hints.messages.keys() == DynamicProgramming().solve(problem).hints.messages.keys()


def test_meshes_hand_hints_to_each_other():
    """Every search after the first is given the least objective met by then, and what the best mesh's search found out."""
    fn, args = PROGRAMS["lstm"]()
    problems = [problem_of(fn, *args, mesh=mesh) for mesh in ({"data": 8}, {"data": 4, "model": 2}, {"data": 2, "model": 4})]
    given, found = [], []

    def asked(searcher, problem, progress, hints):
        given.append(hints)
        found.append(replace(solve(searcher, problem, progress, hints), hints=replace(hints, worth=1.0 + len(found))))
        return found[-1]

    search_meshes(FullySharded(), problems, asked)  # which no bound cuts short
    objectives = [solution.judgement.cost.objective_seconds for solution in found]
    assert [hints.least for hints in given] == [math.inf, objectives[0], min(objectives[:2])]
    seconds = [solution.judgement.cost.makespan_seconds for solution in found]
    assert [hints.worth for hints in given] == [0.0, 1.0, 1.0 + seconds.index(min(seconds[:2]))]
