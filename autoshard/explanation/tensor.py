"""Why a tensor is sharded as it is: what reads it, what each other layout would cost, and what makes others unavailable."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import partial
from typing import TypeVar

from autoshard.errors import InfeasibleError, SearchLimitError, ShardingError, StrategyError
from autoshard.explanation.breakdown import collective_groups
from autoshard.explanation.data import CollectiveGroup, TensorGroup
from autoshard.explanation.groups import argument_groups, shard_bytes
from autoshard.explanation.program import Judged
from autoshard.ir import Layout, Mesh, Spec, layout_to_spec, layouts, shard_counts, spec_to_layout
from autoshard.judge.evaluate import evaluate
from autoshard.problem import Pin, Problem
from autoshard.search import DynamicProgramming, RecursiveProgramming, Searcher, solve
from autoshard.search.overlap import overlapped
from autoshard.strategy import Record

Found = TypeVar("Found")

BUDGET_SECONDS = 15.0  # for alternatives, the cheapest with all else fixed first
NEAR = 3  # names that are suggested


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another layout of the tensor, or its own.

    Attributes:
        spec: the layout.
        bytes: of all tensors of the group on a device.
        fixed_seconds: the step if only these tensors change, resharded for every reader; None where it cannot be, as of the own layout.
        step_seconds, peak_bytes: with everything else chosen anew; None where that was not searched.
        obstacle: what makes it unavailable, in words; empty where nothing does.
        is_own: whether it is the strategy's.
    """

    spec: Spec
    bytes: float
    fixed_seconds: float | None
    step_seconds: float | None
    peak_bytes: float | None
    obstacle: str
    is_own: bool = False


@dataclass(frozen=True, slots=True)
class TensorExplanation:
    """A tensor's layout explained.

    Attributes:
        group: the tensors, arguments that differ by indices and what mirrors them.
        step_seconds: of the strategy.
        pinned: whether the user pinned it.
        moves: the collectives that move it, or bring its new value.
        alternatives: its own layout first, then those that are available, the fastest first, then the others.
    """

    group: TensorGroup
    step_seconds: float
    pinned: bool
    moves: tuple[CollectiveGroup, ...]
    alternatives: tuple[Alternative, ...]

    @property
    def next_best(self) -> Alternative | None:
        """The fastest of the other layouts with everything else chosen anew."""
        searched = (each for each in self.alternatives if not each.is_own and each.step_seconds is not None)
        return min(searched, key=lambda each: each.step_seconds or 0.0, default=None)


def group_of(record: Record, name: str) -> TensorGroup:
    """The group of arguments that a path, a pattern, or the unambiguous end of one names.

    Brackets, quotes, dots and slashes all separate components: ``layers/*/up`` is the end of ``state['params']['layers'][0]['up']``.

    Raises:
        StrategyError: no group is named so, with the nearest names; or several are.
    """
    groups = argument_groups(record.arguments, record.mesh)
    for paths_of in (lambda group: group.paths[: group.n], lambda group: group.paths):
        found = [group for group in groups if any(path == name for path in (group.name, *paths_of(group)))]
        found = found or [group for group in groups if any(_ends(path, name) for path in paths_of(group))]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(group.name for group in found[:6])
            raise StrategyError(
                f"a tensor is named by its path, a pattern, or the end of one that no other has; {name!r} names {len(found)} groups: "
                f"{names}. Write more of the path."
            )
    paths = [path for group in groups for path in (group.name, *group.paths)]
    near = dict.fromkeys(groups_name(groups, path) for path in _near(name, paths))
    raise StrategyError(
        f"a tensor is named by its path, a pattern, or the end of one, and no argument of {record.program.name!r} is named {name!r}. "
        f"Near ones: {', '.join([*near][:NEAR])}."
    )


def groups_name(groups: Sequence[TensorGroup], path: str) -> str:
    """The name of the group that a path belongs to."""
    return next(group.name for group in groups if path == group.name or path in group.paths)


def _parts(path: str) -> tuple[str, ...]:
    return tuple(re.findall(r"[^\[\]'\"./]+", path))


def _ends(path: str, name: str) -> bool:
    """Whether a path ends as a name says, component by component."""
    whole, end = _parts(path), _parts(name)
    return 0 < len(end) <= len(whole) and all(fnmatchcase(a, b) for a, b in zip(whole[-len(end) :], end, strict=True))


def _near(name: str, paths: Sequence[str]) -> list[str]:
    """The paths that look most like a name, or that end most like it."""
    plain = {"/".join(_parts(path)[at:]): path for path in paths for at in range(len(_parts(path)))}
    found = get_close_matches("/".join(_parts(name)), plain, n=3 * NEAR, cutoff=0.3)
    return [plain[each] for each in found] or list(paths[:NEAR])


def explain_tensor(
    judged: Judged, name: str, pins: Mapping[int, Pin], limit: float | None, budget_seconds: float = BUDGET_SECONDS
) -> TensorExplanation:
    """The layout of an argument explained; alternatives are searched one by one, on the strategy's mesh.

    Args:
        pins: the user's, by value number.
        limit: the most bytes of a device; None: no limit.
        budget_seconds: how long to search; what is left by then has no ``step_seconds``.

    Raises:
        StrategyError: the name is of no argument, or of several.
    """
    record, graph, mesh = judged.record, judged.facts.graph, judged.record.mesh
    group = group_of(record, name)
    at = dict(zip(graph.argument_paths, graph.arguments, strict=True))
    values, mirrors = [at[path] for path in group.paths[: group.n]], [at[path] for path in group.paths[group.n :]]
    problem = Problem(judged.facts, judged.model, pins, limit)
    now = record.assignment.layout(values[0])
    options = [_fixed(judged, problem, group, values, mirrors, layout, now) for layout in layouts(len(group.shape), len(mesh.axes))]
    own = replace(
        next(each for each in options if each.is_own), step_seconds=record.cost.makespan_seconds, peak_bytes=record.cost.peak_bytes
    )
    open_ones = sorted((each for each in options if not each.obstacle and not each.is_own), key=lambda each: each.fixed_seconds or 0.0)
    searched = list(_searched(judged, problem, group, values, open_ones, budget_seconds))
    searched.sort(key=lambda each: (bool(each.obstacle), each.step_seconds is None, each.step_seconds or 0.0))
    closed = [each for each in options if each.obstacle]
    names = set(group.paths)
    moved = (
        each
        for each in record.cost.collectives
        if (each.value and each.value.kind == "argument" and each.value.name in names) or (each.reason and each.reason.argument in names)
    )
    pinned = any(value in pins for value in values)
    moves = collective_groups(record, judged, moved)
    return TensorExplanation(group, record.cost.makespan_seconds, pinned, moves, (own, *searched, *closed))


def _fixed(
    judged: Judged, problem: Problem, group: TensorGroup, values: Sequence[int], mirrors: Sequence[int], layout: Layout, now: Layout
) -> Alternative:
    """A layout of the tensors, with all else held fixed: the judge reshards them for every reader."""
    mesh, n = judged.record.mesh, group.n + group.alike
    spec = layout_to_spec(layout, mesh.names, len(group.shape))
    nbytes = n * shard_bytes(group.shape, group.dtype, spec, mesh)
    if layout == now:
        return Alternative(spec, group.bytes, None, None, None, "", is_own=True)
    obstacle = _obstacle(problem, group, values, layout)
    if obstacle:
        return Alternative(spec, nbytes, None, None, None, obstacle)
    assignment = judged.record.assignment
    changed = {**assignment.layouts, **dict.fromkeys((*values, *mirrors), layout)}
    cost = evaluate(judged.facts, judged.model, replace(assignment, layouts=changed)).cost
    return Alternative(spec, nbytes, cost.makespan_seconds, None, None, "")


def _obstacle(problem: Problem, group: TensorGroup, values: Sequence[int], layout: Layout) -> str:
    """What makes a layout of the tensors unavailable before anything is searched: divisibility, a pin, or the rules of their readers."""
    mesh: Mesh = problem.mesh
    for dim, (size, count) in enumerate(zip(group.shape, shard_counts(layout, len(group.shape), mesh.sizes), strict=True)):
        if size % count:
            return f"dim {dim} has size {size}, which {count} does not divide"
    pin = next((problem.pins[value] for value in values if value in problem.pins), None)
    if pin is not None and any(dim not in allowed for dim, allowed in zip(layout, pin, strict=True)):
        return "a pin fixes another layout"
    home = problem.decisions.home.get(values[0])
    if home is None:
        return "a scalar has one layout"
    whole = problem.costs.whole_domain(home[0])
    numbers = {problem.layout(home[0], label, home[1], values[0]) for label in whole.labels}
    return "" if layout in numbers else "no rule of the operations that share its layout allows it"


def _searched(
    judged: Judged, problem: Problem, group: TensorGroup, values: Sequence[int], options: Sequence[Alternative], budget_seconds: float
) -> Iterator[Alternative]:
    """Layouts with everything else chosen anew under them."""
    started, mesh = time.perf_counter(), judged.record.mesh
    for each in options:
        if time.perf_counter() - started > budget_seconds:
            yield each
            continue
        layout = spec_to_layout(each.spec, mesh, len(group.shape))
        pin = tuple(frozenset((dim,)) for dim in layout)
        try:
            pinned = Problem(judged.facts, judged.model, {**problem.pins, **dict.fromkeys(values, pin)}, problem.memory_limit_bytes)
            solution = by_first_that_holds(partial(solve, problem=pinned))
        except InfeasibleError as error:
            yield replace(each, obstacle=f"nothing with it fits the memory limit: {str(error).split('. ')[0][:120]}")
            continue
        except SearchLimitError:
            yield each
            continue
        except ShardingError as error:
            yield replace(each, obstacle=str(error).split(". ")[0][:120])
            continue
        cost = overlapped(judged.facts, judged.model, solution.judgement, problem.memory_limit_bytes or float("inf")).cost
        yield replace(each, step_seconds=cost.makespan_seconds, peak_bytes=cost.peak_bytes)


def by_first_that_holds(search: Callable[[Searcher], Found]) -> Found:
    """What a search finds with the first searcher that can hold the program: the optimum on each mesh, where that is one of them."""
    try:
        return search(DynamicProgramming())
    except SearchLimitError:
        return search(RecursiveProgramming())
