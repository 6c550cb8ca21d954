"""Lower bounds that tell which meshes are worth a search, and tighten the gap of an answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from autoshard.budgets import BUDGETS
from autoshard.inference.trw_s import MessagePassing
from autoshard.memory_limit.dual_bound import HeldBytes, held_at, priced
from autoshard.problem import NO_HINTS, Hints, Label, Problem, Tables
from autoshard.reductions import low_degree, symmetry
from autoshard.search.searcher import Solution


def message_bound(
    problem: Problem, max_sweeps: int, enough: float = float("inf"), hints: Hints = NO_HINTS
) -> tuple[float, Hints]:
    """A lower bound of the objective over all assignments of the mesh, by message passing where the tables are small enough.

    With a price of memory in the hints it bounds the assignments within the memory limit.

    Args:
        max_sweeps: the most sweeps.
        enough: a bound at which to stop.
        hints: with messages to begin from; they come back with the last ones, for a search of the mesh to begin from.
    """
    if not _tabulated(problem):
        return problem.compute_bound(), hints
    tables, messages, worth = problem.whole_tables(), hints.messages, 0.0
    if (held := _held_beyond(problem, tables, hints.above)) is not None:
        tables = priced(tables, held.tables(tables), hints.worth)
        messages, worth = hints.priced_messages, hints.worth * held.limit
    enough += worth - problem.fixed_seconds()
    if (small := symmetry.apply(problem)) is not None:
        passing = MessagePassing(small.project_tables(tables), messages)
        as_long = max_sweeps * problem.n_variables // small.n_variables  # as the whole's sweeps take
        passing.run(min(BUDGETS.quotient_sweeps, as_long), enough * (1 + BUDGETS.least_gain))
        messages = passing.messages
        passing = small.message_passing(messages, tables)
    elif held is None:
        passing = low_degree.message_passing(problem, messages)
    else:
        passing = MessagePassing(low_degree.apply(tables).model, messages)
    passing.run(max_sweeps, enough, give_up=enough < float("inf"))
    if small is None:
        messages = passing.messages
    bound = max(problem.fixed_seconds() + passing.bound() * (1 - 1e-9) - worth, problem.compute_bound())
    return bound, replace(hints, messages=messages) if held is None else replace(hints, priced_messages=messages)


def first_bound(problem: Problem) -> float:
    """The lower bound after `Budgets.first_sweeps` sweeps, of the quotient problem if there is one; infinity where tables are too large."""
    if not _tabulated(problem):
        return float("inf")
    small = symmetry.apply(problem)
    if small is None:
        passing = low_degree.message_passing(problem)
    else:
        passing = MessagePassing(small.whole_tables())
    passing.run(BUDGETS.first_sweeps)
    return problem.fixed_seconds() + passing.bound()


def _tabulated(problem: Problem) -> bool:
    """Whether all axes' tables are small enough to be made for a bound alone."""
    return problem.table_entries(range(len(problem.mesh.axes)), BUDGETS.bound_entries) <= BUDGETS.bound_entries


def _held_beyond(problem: Problem, tables: Tables, above: Sequence[Label] | None) -> HeldBytes | None:
    """Bytes at the peak of an answer found on another mesh, if it exceeds the limit on this one as well."""
    limit = problem.memory_limit_bytes
    if limit is None or above is None or (labels := problem.transferred(above)) is None:
        return None
    judgement = problem.evaluate(problem.assignment(labels))
    return held_at(problem, tables, labels, judgement.peak, limit) if judgement.cost.peak_bytes > limit else None


def bounded(problem: Problem, solution: Solution) -> Solution:
    """The solution with a tighter lower bound, where one comes cheap with its hints."""
    objective = solution.judgement.cost.objective_seconds
    if solution.lower_bound_seconds > min(problem.compute_bound(), objective * (1 - 1e-6)):
        return solution
    entries = problem.table_entries(range(len(problem.mesh.axes)), BUDGETS.bound_entries)
    if not (sweeps := min(BUDGETS.bounding_sweeps, BUDGETS.bounding_entries // max(entries, 1))):
        return solution
    bound, hints = message_bound(problem, sweeps, hints=solution.hints)
    return replace(solution, lower_bound_seconds=max(min(bound, objective), solution.lower_bound_seconds), hints=hints)
