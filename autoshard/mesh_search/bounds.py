"""Lower bounds of meshes, which show whether a search is worthwhile, and which tighten the gap of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoshard.budgets import BUDGETS
from autoshard.cost.record import Cost
from autoshard.errors import ShardingError
from autoshard.inference.trw_s import MessagePassing
from autoshard.memory_limit.dual_bound import LiveBytes, live_bytes_at, priced
from autoshard.problem import NO_HINTS, Hints, Label, Problem, Tables
from autoshard.progress import Progress
from autoshard.reductions import low_degree, symmetry
from autoshard.search.searcher import Solution


def message_bound(problem: Problem, max_sweeps: int, enough: float = float("inf"), hints: Hints = NO_HINTS) -> tuple[float, Hints]:
    """A lower bound of the objective over all assignments of the mesh, and hints with the messages that prove it.

    By message passing where the tables are small enough, else compute alone. With a multiplier of memory in the hints it bounds the
    assignments within the memory limit only.

    Args:
        problem: the program on the mesh.
        max_sweeps: the most sweeps.
        enough: the bound, in seconds, at which to stop.
        hints: with the messages to start from.
    """
    if not _tabulated(problem):
        return problem.compute_bound(), hints
    tables, messages, worth = problem.whole_tables(), hints.messages, 0.0
    if (live := _live_bytes_beyond(problem, tables, hints.above)) is not None:
        tables = priced(tables, live.tables(tables), hints.worth)
        messages, worth = hints.priced_messages, hints.worth * live.limit
    enough += worth - problem.fixed_seconds()
    if (small := symmetry.apply(problem)) is not None:
        passing = MessagePassing(small.project_tables(tables), messages)
        as_long = max_sweeps * problem.n_variables // small.n_variables  # as the sweeps of the whole
        passing.run(min(BUDGETS.table_sweeps, as_long), enough * (1 + BUDGETS.least_gain))
        messages, is_hopeless = passing.messages, passing.bound() < enough * (1 - BUDGETS.least_gain)
        if enough < float("inf") and live is None and is_hopeless:  # the bound of the whole is hardly above that of equal layers
            return problem.compute_bound(), replace(hints, messages=messages)
        passing = small.message_passing(messages, tables)
    elif live is None:
        passing = low_degree.message_passing(problem, messages)
    else:
        passing = MessagePassing(low_degree.apply(tables).model, messages)
    passing.run(max_sweeps, enough, give_up=enough < float("inf"))
    if small is None:
        messages = passing.messages
    bound = max(problem.fixed_seconds() + passing.bound() * (1 - 1e-9) - worth, problem.compute_bound())
    return bound, replace(hints, messages=messages) if live is None else replace(hints, priced_messages=messages)


def quotient_bound(problem: Problem, max_sweeps: int, enough: float, passing: MessagePassing | None) -> float:
    """The lower bound of the objective over the assignments that are the same in equal layers; of all where there are no such layers.

    It takes the time of a layer or two, and is no proof that another assignment costs as much; arguments are those of `message_bound`.

    Args:
        passing: over the quotient problem's tables, which goes on from where it is; None: there is no such problem.
    """
    if passing is None:
        return message_bound(problem, max_sweeps, enough)[0]
    passing.run(max_sweeps, enough - problem.fixed_seconds(), give_up=True)
    return max(problem.fixed_seconds() + passing.bound(), problem.compute_bound())


def large_bound(problem: Problem, max_sweeps: int, enough: float) -> float:
    """The `quotient_bound` of a mesh whose tables are too large for a bound of the whole; that of compute where a layer's are, too."""
    small = symmetry.apply(problem)
    if small is None or _tabulated(problem) or not _tabulated(small):
        return problem.compute_bound()
    return quotient_bound(problem, max_sweeps, enough, MessagePassing(small.whole_tables()))


def first_bound(problem: Problem) -> tuple[float, MessagePassing | None]:
    """The lower bound after `Budgets.first_sweeps` sweeps, of the quotient problem if there is one; infinity for too large tables.

    The second is the message passing over the quotient problem's tables, if there is one.
    """
    if not _tabulated(problem):
        return float("inf"), None
    small = symmetry.apply(problem)
    passing = low_degree.message_passing(problem) if small is None else MessagePassing(small.whole_tables())
    passing.run(BUDGETS.first_sweeps)
    return problem.fixed_seconds() + passing.bound(), None if small is None else passing


def first_bounds(problems: Iterable[Problem], progress: Progress) -> list[tuple[float, MessagePassing | None]]:
    """`first_bound` of each; infinity where pins leave no legal sharding, which is reported when the mesh is searched."""
    found: list[tuple[float, MessagePassing | None]] = []
    for problem in problems:
        progress(f"mesh {problem.mesh}, first bound", 0.0)
        try:
            found.append(first_bound(problem))
        except ShardingError:
            found.append((float("inf"), None))
    return found


def may_hide_more(problem: Problem, best: Cost, least: float, hints: Hints) -> bool:
    """Whether a mesh whose bound is above the least objective, in seconds, may be faster than the best answer all the same.

    Bounds are of objectives, without overlap. Where some communication of the best answer is hidden, more may be of one whose objective is
    as near as makespans of near objectives are.
    """
    if best.makespan_seconds >= best.objective_seconds * (1 - BUDGETS.least_gain):
        return False
    enough = least * BUDGETS.near
    return message_bound(problem, BUDGETS.screening_sweeps, enough, hints)[0] < enough


def _tabulated(problem: Problem) -> bool:
    """Whether the tables with all axes free are small enough to be made for a bound alone."""
    return problem.table_entries(range(len(problem.mesh.axes)), BUDGETS.bound_entries) <= BUDGETS.bound_entries


def _live_bytes_beyond(problem: Problem, tables: Tables, above: Sequence[Label] | None) -> LiveBytes | None:
    """The bytes at the peak of an answer from another mesh, if that exceeds the limit on this mesh, too; else None."""
    limit = problem.memory_limit_bytes
    if limit is None or above is None or (labels := problem.transferred(above)) is None:
        return None
    judgement = problem.evaluate(problem.assignment(labels))
    return live_bytes_at(problem, tables, labels, judgement.peak, limit) if judgement.cost.peak_bytes > limit else None


def bounded(problem: Problem, solution: Solution) -> Solution:
    """The solution with a tighter lower bound, if it has only that of compute and a few sweeps from its hints are cheap."""
    objective = solution.judgement.cost.objective_seconds
    if solution.lower_bound_seconds > min(problem.compute_bound(), objective * (1 - 1e-6)):
        return solution
    entries = problem.table_entries(range(len(problem.mesh.axes)), BUDGETS.bound_entries)
    if not (sweeps := min(BUDGETS.screening_sweeps, BUDGETS.bounding_entries // max(entries, 1))):
        return solution
    bound, hints = message_bound(problem, sweeps, hints=solution.hints)
    return replace(solution, lower_bound_seconds=max(min(bound, objective), solution.lower_bound_seconds), hints=hints)


def transferred(problem: Problem, other: Problem, solution: Solution) -> Solution:
    """The solution of a problem that differs in its placement alone, judged on this problem's links."""
    judgement = problem.evaluate(problem.assignment(other.labels(solution.assignment)))
    bound = min(problem.compute_bound(), judgement.cost.objective_seconds)
    return replace(solution, judgement=judgement, lower_bound_seconds=bound, least_seconds=float("inf"))
