"""An earlier strategy as a candidate of a new search: itself on its own mesh, else its arguments' specs carried over to another.

Where the program and the mesh's axes are the same, all of its choices are judged again. Else the specs of its arguments are, as the
searcher `manual` completes them: arguments are known by their paths, mesh axes by their names, or by their order where none is the same;
a dimension keeps the axes that divide it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from autoshard.errors import InfeasibleError, SearchLimitError, ShardingError, StrategyError
from autoshard.ir import Mesh, Spec, entry_axes, local_shape, spec_to_layout
from autoshard.mesh_search.finalists import finalists
from autoshard.plan.plan import Plan
from autoshard.problem import Problem
from autoshard.render import format_seconds
from autoshard.search import Manual, Searcher, Solution
from autoshard.strategy import Record, check_program

FINDER = "start"
MOST_MESHES = 3  # on which a search carries specs over: those on which a device holds least of the arguments


def checked(start: Plan | None, searcher: Searcher) -> Plan | None:
    """The earlier strategy, if it is one and the searcher compares answers.

    Raises:
        StrategyError: it is none, or the searcher takes no start.
    """
    if start is not None and not isinstance(start, Plan):
        raise StrategyError(f"start= is an earlier strategy, got {start!r:.100}. Pass what autoshard.load or autoshard.search returns.")
    if start is not None and not searcher.automatic:
        raise StrategyError(
            f"start= is one more candidate of a searcher that takes the best of several, and {searcher.name!r} has one answer. Leave out "
            "start=, or use searcher='auto'."
        )
    return start


def carried(start: Plan, problems: Sequence[Problem]) -> tuple[Solution, Problem] | str:
    """The fastest solution that carries a strategy over to the mesh of one of some problems, and that; else why there is none, in words."""
    found: list[tuple[Solution, Problem]] = []
    refused: list[Exception] = []
    if not any(carried_specs(start.record, problem) for problem in problems):
        return f"since no argument here that is not pinned has the path and the rank of one of {start.record.name!r}"
    ranked = sorted(problems, key=lambda problem: _held(start.record, problem))
    sizes = list(dict.fromkeys(problem.mesh.axes for problem in ranked))[:MOST_MESHES]
    for problem in (problem for problem in ranked if problem.mesh.axes in sizes or problem.mesh.axes == start.record.mesh.axes):
        found += [(solution, problem) for solution in _candidates(start.record, problem, refused)]
    if not found:
        return f"since {str(refused[0]).split('. ')[0] if refused else 'it is for other meshes'}"
    return min(found, key=lambda pair: pair[0].judgement.cost.makespan_seconds)


def unused(found: Solution, why: str) -> Solution:
    """What was searched, with a note on a start that it is not made of."""
    return replace(found, notes=(*found.notes, f"start: not used, {why}"))


def better(start: Plan, found: tuple[Solution, Problem], spare: tuple[Solution, Problem], n_finalists: int) -> tuple[Solution, Problem]:
    """The faster one of what was searched and what was carried over, with the other among its finalists."""
    (one, problem), (other, elsewhere) = found, spare
    if one.judgement.cost.makespan_seconds <= other.judgement.cost.makespan_seconds:
        kept = replace(one, others=finalists((one, other, *one.others), n_finalists)[1:])
        told = [format_seconds(each.judgement.cost.makespan_seconds) for each in (other, one)]
        why = f"since with the specs of {start.record.name!r} a step takes {told[0]}, and with those found {told[1]}"
        return unused(kept, why), problem
    bound = one.lower_bound_seconds if elsewhere.mesh == problem.mesh else other.lower_bound_seconds
    bound = min(bound, other.judgement.cost.objective_seconds)
    stats, others = {**one.stats, **other.stats}, finalists((other, replace(one, others=()), *one.others), n_finalists)[1:]
    return replace(other, lower_bound_seconds=bound, stats=stats, others=others, hints=one.hints), elsewhere


def _candidates(record: Record, problem: Problem, refused: list[Exception]) -> Iterator[Solution]:
    """The strategy's specs as `manual` completes them, and the strategy itself where it is for this program and mesh.

    Args:
        refused: takes the error where the specs cannot be completed.
    """
    try:
        solution = Manual(carried_specs(record, problem)).solve(problem)
        note = f"found by start: the argument specs of {record.name!r}, carried over"
        yield replace(solution, notes=(note, *solution.notes), finder=FINDER)
    except (ShardingError, InfeasibleError, SearchLimitError) as error:
        refused.append(error)
    if record.mesh.axes == problem.mesh.axes and not problem.pins:
        with suppress(StrategyError, InfeasibleError):
            check_program(record, problem.graph, problem.rules)
            judgement = problem.evaluate(replace(record.assignment, mesh=problem.mesh))
            limit, cost = problem.memory_limit_bytes, judgement.cost
            if limit is None or cost.peak_bytes <= limit:
                bound = min(problem.compute_bound(), cost.objective_seconds)
                yield Solution(judgement, bound, {"search_seconds": 0.0}, (f"found by start: {record.name!r} itself",), finder=FINDER)


def carried_specs(record: Record, problem: Problem) -> dict[str, Spec]:
    """Per argument of a problem's program that a strategy has, and that nobody pinned, its spec on the problem's mesh.

    An axis that is not there, or does not divide its dimension, is left out.
    """
    names, graph = _renamed(record.mesh, problem.mesh), problem.graph
    there = {tensor.path: tensor for tensor in record.arguments}
    sizes = dict(problem.mesh.axes)
    found: dict[str, Spec] = {}
    for value, path in zip(graph.arguments, graph.argument_paths, strict=True):
        tensor, shape = there.get(path), graph.values[value].shape
        if tensor is not None and len(tensor.shape) == len(shape) and value not in problem.pins:
            found[path] = tuple(_kept(entry, size, names, sizes) for entry, size in zip(tensor.spec, shape, strict=False))
    return found


def _kept(entry: None | str | Sequence[str], size: int, names: dict[str, str], sizes: dict[str, int]) -> None | str | tuple[str, ...]:
    """The axes of a dimension that are there and divide it."""
    kept: list[str] = []
    for name in entry_axes(entry):
        axis = names.get(name)
        if axis is not None and size % sizes[axis] == 0:
            kept.append(axis)
            size //= sizes[axis]
    return None if not kept else kept[0] if len(kept) == 1 else tuple(kept)


def _renamed(old: Mesh, new: Mesh) -> dict[str, str]:
    """The new axis of each old one: of the same name where any has, else in the same place."""
    same = {name: name for name in old.names if name in new.names}
    return same or dict(zip(old.names, new.names, strict=False))


def _held(record: Record, problem: Problem) -> int:
    """How many elements of the arguments a device holds on a problem's mesh."""
    graph, specs = problem.graph, carried_specs(record, problem)
    held: int = 0
    for value, path in zip(graph.arguments, graph.argument_paths, strict=True):
        shape = graph.values[value].shape
        layout = spec_to_layout(specs.get(path, ()), problem.mesh, len(shape), path)
        held += int(math.prod(local_shape(shape, layout, problem.mesh.sizes)))
    return held
