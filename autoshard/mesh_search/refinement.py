"""Mesh refinement: from the best mesh of few axes to one of more, by recursive programming over the prime factors of its axes.

Every axis is split into prime factors (`autoshard.reductions.axis_split`). From the answer's labels each factor is freed in turn, slowest
links first, and solved exactly for the whole program given all others, in sweeps to a fixpoint (`autoshard.search.recursive_programming`).
That takes tables of one small axis at a time, near-linear in operations and in the number of factors, however many meshes there are. The
labels found are merged back onto few axes; a mesh on which they gain enough is searched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from autoshard.budgets import BUDGETS
from autoshard.errors import SearchLimitError
from autoshard.inference.reduced_cost_fixing import ReducedCostFixing
from autoshard.ir import Mesh
from autoshard.mesh_search.candidates import AXIS_NAMES
from autoshard.problem import Hints, Label, Problem
from autoshard.progress import Progress, silent
from autoshard.reductions import axis_split, symmetry
from autoshard.search.recursive_programming import Descent, RecursiveProgramming


def refined(
    problem: Problem,
    labels: Sequence[Label] | None,
    most_axes: int,
    least_gain: float,
    placed: Callable[[Mesh], Sequence[Problem]],
    progress: Progress = silent,
    price: float = 0.0,
) -> tuple[Problem, Hints] | None:
    """A problem of more axes on which a descent finds a smaller objective, with hints that start there; None: there is none.

    Args:
        problem: on the best mesh.
        labels: the answer there; None: that of recursive programming, whatever memory it takes.
        most_axes: the most axes of a mesh.
        least_gain: the relative gain in the objective that is worth a search.
        placed: from a mesh to its problems, one a placement.
        progress: a callback.
        price: seconds a byte, where the memory limit binds. Searches under prices take many times one without: there the judged makespan,
            with the peak at this price, has to be less by the gain, too.

    Raises:
        SearchLimitError: there is an answer, and a descent over the prime axes would make more than `Budgets.refined_tables`.
    """
    if labels is not None:
        gained = problem.cost_of(labels) * (1 - least_gain)
        if problem.compute_bound() - problem.fixed_seconds() >= gained:
            return None  # whatever the mesh
    if labels is not None or price:  # else nothing fits, and a mesh on which something does is worth any work
        _check_work(problem)
    if labels is None:
        labels, _ = _descended(problem, problem.start(), progress)
    if (found := _refined_mesh(problem, labels, most_axes, least_gain, progress)) is None:
        return None
    mesh, start = found
    best, cost = _settled(placed(mesh), start, progress)
    if best is None or cost > problem.cost_of(labels) * (1 - least_gain):
        return None
    if not price:
        return best
    ours, theirs = _priced_makespan(problem, labels, price), _priced_makespan(best[0], best[1].start or (), price)
    return best if theirs <= ours * (1 - least_gain) else None


def _check_work(problem: Problem) -> None:
    """Raises `SearchLimitError` where a descent over prime axes is too much work: each axis is freed twice, or more often."""
    n_axes = axis_split.n_factors(problem.mesh.sizes)
    if (n_tables := 2 * n_axes * problem.cached_for_all_meshes(_distinct_tables)) > BUDGETS.refined_tables:
        raise SearchLimitError(
            "the axes of the best mesh were not split any further: the layers of this program differ, so that it takes "
            f"{n_tables:,} tables or more to find whether another mesh is faster, and a search makes up to {BUDGETS.refined_tables:,}. "
            "Try one by its axes: mesh=."
        )


def _distinct_tables(problem: Problem) -> int:
    """The number of tables that may differ."""
    kinds = problem.decisions.kinds
    return len(set(kinds)) + len({(kinds[one.first], kinds[one.last], one.number) for one in problem.decisions.couplings})


def _priced_makespan(problem: Problem, labels: Sequence[Label], price: float) -> float:
    """The judged makespan of labels, with the bytes of their peak charged."""
    cost = problem.evaluate(problem.assignment(labels)).cost
    return cost.makespan_seconds + price * cost.peak_bytes


def _refined_mesh(
    problem: Problem, labels: Sequence[Label], most_axes: int, least_gain: float, progress: Progress
) -> tuple[Mesh, list[Label]] | None:
    """The merged mesh whose prime axes gain enough, and labels on it; None: there is none."""
    if (split := axis_split.apply(problem)) is None:
        return None
    start = split.project(labels)
    found, cost = _descended(split.problem, start, progress)
    if cost > split.problem.cost_of(start) * (1 - least_gain):
        return None
    return split.invert(found, AXIS_NAMES[:most_axes])


def _settled(
    problems: Sequence[Problem], labels: Sequence[Label], progress: Progress
) -> tuple[tuple[Problem, Hints] | None, float]:
    """The placement and the labels that a descent finds, and their cost: each placement's best labels are tried in all others.

    Descents are in the placement in which labels cost least, as long as they are cheaper in another one than in that which they are of.
    """
    best, least = None, math.inf
    tried: set[int] = set()
    while True:
        costs = [each.cost_of(labels) for each in problems]
        number = min(range(len(problems)), key=lambda k: (costs[k], k in tried, k))
        if number in tried or costs[number] >= least:
            return best, least
        tried.add(number)
        labels, cost = _descended(problems[number], labels, progress)
        if cost < least:
            best, least = (problems[number], Hints(start=tuple(labels))), cost


def _descended(problem: Problem, labels: Sequence[Label], progress: Progress) -> tuple[list[Label], float]:
    """Labels that no single axis can improve, equal in equal layers, and their cost."""
    small = symmetry.apply(problem) or problem
    fixing = ReducedCostFixing(BUDGETS.table_entries, BUDGETS.table_sweeps, BUDGETS.tolerance, progress)
    descent = Descent(RecursiveProgramming(max_sweeps=BUDGETS.axis_split_sweeps), small, progress, fixing)
    found = descent.settle(small.project(labels), {})
    return small.invert(found), small.cost_of(found)
