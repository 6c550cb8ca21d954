"""Data parallelism and fully sharded data parallelism (ZeRO): the baselines that people write by hand.

Both detect the batch: of the arguments that may hold examples (`autoshard.analysis.examples`), the one whose leading dimension, or the one
after it, makes the step fastest when it is sharded. All other layouts follow by propagation (`autoshard.search.propagation`).

In a loop over microbatches, each trip of fully sharded data parallelism does what a step does without: it gathers weights where they are
used, and scatters gradients (of stages 2 and 3) onto their sharded sums. Such a loop is known by what it does (`_loops_over_examples`).
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from autoshard.analysis.values import accumulators
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, ShardingError
from autoshard.ir import Assignment, Graph, Layout, Mesh, Op, divides, local_shape, shards
from autoshard.judge.evaluate import Judgement
from autoshard.judge.model import CostModel
from autoshard.primitives import is_loop, is_matrix, is_transform, primitive
from autoshard.problem import NO_HINTS, Hints, Problem
from autoshard.progress import Progress, silent
from autoshard.render import format_bytes
from autoshard.search.propagation import Propagation
from autoshard.search.searcher import Searcher, Solution

UNSPLIT = (
    "most work is not split: no batch dimension stays split through the step. A reshape into microbatches loses it where their number "
    "comes first and the devices do not divide it; searcher='auto' splits other dimensions too."
)


@dataclass(frozen=True, slots=True)
class DataParallel(Searcher):
    """Batch split over every mesh axis, state replicated, gradients all-reduced."""

    name: ClassVar[str] = "data_parallel"

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The data-parallel assignment."""
        started = time.perf_counter()
        progress("propagating the batch", 0.0)
        return _solution(problem, problem.cached(_judged_batch), started, hints)


@dataclass(frozen=True, slots=True)
class FullySharded(Searcher):
    """Data parallel with sharded state, as in ZeRO (Rajbhandari et al. 2020, arXiv:1910.02054).

    Attributes:
        stage: 1 shards the optimizer state, 2 scatters the gradients onto it as well, 3 shards the parameters too.
    """

    name: ClassVar[str] = "fully_sharded"

    stage: int = 3

    def __post_init__(self) -> None:
        if self.stage not in (1, 2, 3):
            raise ShardingError(f"FullySharded has stages 1, 2 and 3 (ZeRO's), got {self.stage!r}.")

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The assignment of the stage."""
        started = time.perf_counter()
        progress("propagating the batch", 0.0)
        limit, alone = problem.memory_limit_bytes, problem.cached(_parameter_bytes) if self.stage < 3 else 0.0
        if limit is not None and alone > limit:
            raise InfeasibleError(
                f"a strategy must fit {format_bytes(limit)} a device, and the parameters alone, which this baseline replicates, take "
                f"{format_bytes(alone)}. Use searcher='auto', more devices, or a higher memory limit."
            )
        return _solution(problem, problem.cached(_Stage(self.stage)), started, hints)


def _parameters(problem: Problem) -> tuple[Propagation, set[int]]:
    """The propagation of the batch, its choices frozen, and the state that the step computes with."""
    run = split_batch(problem)
    run.frozen = {op for op, choice in run.choices.items() if any(factor >= 0 for factor, _ in choice)}
    return run, _state(problem) & _used_with_the_batch(problem, run)


def _parameter_bytes(problem: Problem) -> float:
    """The bytes of the parameters that stages 1 and 2 leave whole on each device."""
    run, parameters = _parameters(problem)
    whole = (value for value in parameters if value not in problem.pins and all(dim < 0 for dim in run.layout(value)))
    return sum(problem.graph.values[value].nbytes for value in whole)


@dataclass(frozen=True, slots=True)
class _Stage:
    """A stage of ZeRO as a function of a problem: its judgement."""

    stage: int

    def __call__(self, problem: Problem) -> Judgement:
        graph = problem.graph
        run, parameters = _parameters(problem)
        state = _state(problem)
        sharded = state if self.stage == 3 else state - parameters
        run.seed({
            value: _pinned(problem, value, _most_sharded(problem, value)) for value in graph.arguments if value in sharded
        })  # fmt: skip
        loops = tuple(_loops_over_examples(problem, run, graph.ops))
        trips = {holder.value for loop in loops for holder in loop.holders}
        # What any other loop reads in every trip, as a recurrence reads its weights, is gathered once, before it.
        run.kept = {holder.value: run.layout(holder.value) for holder in graph.loop_constants() if holder.value not in trips}
        if self.stage >= 2:
            run.sums = {holder.value for loop in loops for holder in accumulators(loop)}
        run.forward()
        run.backward()
        if self.stage >= 2:
            run.scatter()
        run.forward()
        run.gather_before_casts()
        return problem.evaluate(run.assignment())


def _loops_over_examples(problem: Problem, run: Propagation, ops: Sequence[Op]) -> Iterator[Op]:
    """The loops that compute most of the batch's products, other examples in each trip, as those over microbatches do.

    A loop that carries what the batch splits computes the same examples in each trip, as a recurrence does; one of few products is a part
    of a layer, such as a loss that is computed in chunks.
    """

    def flops(ops: Iterable[Op]) -> float:
        return sum(each.trips * problem.facts.flops[each.index] for op in ops for each in op.walk() if each.index in run.frozen)

    loops = [op for op in ops if is_loop(op.primitive) and not _carries_examples(run, op)]
    if 0 < flops(ops) <= 2 * flops(loops):
        yield from loops
    for op in ops:
        for body in op.bodies:
            yield from _loops_over_examples(problem, run, body.ops)


def state_in_loops(problem: Problem) -> dict[int, tuple[int, int]]:
    """Where loops over examples add up gradients: state, what these loops read of it, and the sums.

    By value the one of which it is a part, itself or what an inner loop over layers slices, and how many leading dimensions it lacks. A
    value is behind those that it is read from.
    """
    run, state = _parameters(problem)[0], _state(problem)
    loops = {loop.index: loop for loop in _loops_over_examples(problem, run, problem.graph.ops)}
    found = {value: (value, 0) for value in state}
    for op in problem.graph.walk():
        if op.primitive == "convert_element_type" and op.operands[0] in found:
            found[op.results[0]] = found[op.operands[0]]
        for holder in op.holders:  # a recurrence is not followed: it reads its weights often
            source = next((flow for flow in holder.sources if flow.value in found), None)
            if source is not None and source.shift >= (0 if op.index in loops else 1):
                whole, lacks = found[source.value]
                found[holder.value] = whole, lacks + source.shift
    sums = [holder for loop in loops.values() for holder in accumulators(loop) if holder.value not in found]
    added = {flow.value: holder.value for holder in sums for flow in holder.sources if flow.inside}
    for op in reversed(problem.graph.walk()):
        total = next((added[value] for value in op.results if value in added), None)
        if total is not None and op.bodies:
            found.update((value, (added[value], 0)) for value in op.results if value in added)
        elif total is not None and primitive(op.primitive).kind == "elementwise":
            added.update((value, total) for value in op.operands if problem.graph.values[value].shape == problem.graph.values[total].shape)
    found.update((holder.value, (holder.value, 0)) for holder in sums if holder.value not in found)
    return found if sums else {}


def _carries_examples(run: Propagation, loop: Op) -> bool:
    """Whether a loop hands what the batch splits, changed, from trip to trip."""
    inputs = {value for body in loop.bodies for value in body.inputs}
    carries = [holder for holder in loop.holders if holder.value in inputs]
    changed = (holder for holder in carries if any(flow.inside and flow.value != holder.value for flow in holder.sources))
    return any(dim >= 0 for holder in changed for dim in run.layout(holder.value))


def _solution(problem: Problem, judgement: Judgement, started: float, hints: Hints) -> Solution:
    problem.tell(judgement)  # which may be from an earlier search
    limit = problem.memory_limit_bytes
    if limit is not None and judgement.cost.peak_bytes > limit:
        raise InfeasibleError(
            f"a strategy must fit {format_bytes(limit)} a device, and this baseline needs {format_bytes(judgement.cost.peak_bytes)}. "
            "Use searcher='auto', more devices, or a higher memory limit.",
            judgement.cost.peak_bytes,
        )
    split = judgement.cost.flops <= problem.cached(_enough_flops) or problem.mesh.size == 1
    return Solution(
        judgement,
        min(problem.compute_bound(), judgement.cost.objective_seconds),
        {"search_seconds": time.perf_counter() - started},
        notes=() if split else (UNSPLIT,),
        hints=hints,
    )


def split_batch(problem: Problem) -> Propagation:
    """The propagation of the batch, sharded on its leading dimension, or on the next where that splits too little work, as under a scan."""
    return Propagation(problem, **problem.cached(_split_batch)[0]).copy()


def _judged_batch(problem: Problem) -> Judgement:
    """The judgement of `split_batch`."""
    found, judgement = problem.cached(_split_batch)
    return problem.evaluate(Propagation(problem, **found).assignment()) if judgement is None else judgement


def _split_batch(problem: Problem) -> tuple[dict[str, Any], Judgement | None]:
    """The propagation of the batch, and its judgement where several were compared.

    It is the fastest that splits half of the work that can be split, or the fastest where none does. Which batch that is depends on into
    how many parts its arrays are split: meshes that split all alike share the answer.
    """
    batches = [_batches(problem, dim, problem.graph.without_examples(dim)) for dim in (0, 1)]
    split = tuple(
        tuple((value, dim, shards(layout, problem.mesh.sizes)) for value, layout in batch.items())
        for dim, some in enumerate(batches)
        for batch in some
    )
    parts = problem.model.cluster, split
    fastest = problem.cached_for_all_meshes(_fastest_batches)
    if (number := fastest.get(parts)) is not None:
        return _propagated(problem, [*chain(*batches), {}][number]).found(), None
    enough, number, known = problem.cached(_enough_flops), 0, list[tuple[Assignment, Judgement]]()
    best: tuple[int, Propagation, Judgement] | None = None
    for some in batches:
        runs = [(number + k, _propagated(problem, batch)) for k, batch in enumerate(some)]
        number += len(some)
        judged = [(k, run, _judged_once(problem, run.assignment(), known)) for k, run in runs]
        found = [*([best] if best else []), *judged]
        best = min(found, key=lambda one: (one[2].cost.flops > enough, one[2].cost.objective_seconds), default=None)
        if best is not None and best[2].cost.flops <= enough:
            break
    if best is None:
        whole = _propagated(problem, {})
        best = number, whole, problem.evaluate(whole.assignment())
    fastest[parts] = best[0]
    return best[1].found(), best[2]


def _judged_once(problem: Problem, assignment: Assignment, known: list[tuple[Assignment, Judgement]]) -> Judgement:
    """The judgement of an assignment, which may be that of another batch: what a stage receives is often split together."""
    choices, layouts = assignment.choices, assignment.layouts
    found = next((judgement for own, judgement in known if own.choices == choices and own.layouts == layouts), None)
    if found is None:
        found = problem.evaluate(assignment)
        known.append((assignment, found))
    return found


def _fastest_batches(problem: Problem) -> dict[tuple, int]:
    """By cluster, and how batches are split there on a mesh, the number of the fastest, of the meshes that were asked about."""
    return {}


def _enough_flops(problem: Problem) -> float:
    """The FLOPs of a device where half of the work is split that can be."""
    facts = problem.facts
    flops, fixed = 0.0, 0.0
    for op in problem.graph.walk():
        if is_matrix(op.primitive) or is_transform(op.primitive):
            flops += 0.0 if op.mapped else op.trips * facts.flops[op.index]
            fixed += op.trips * facts.flops[op.index] if op.mapped else 0.0
    return fixed + flops * (1 + 1 / problem.mesh.size) / 2


def batch_dims(problem: Problem) -> dict[int, int]:
    """By value number the dimension of the batch of each array that has it; empty where no argument without state can be split.

    Size and dimension are those of the arrays that, split over the mesh, split the work with least communication.
    """
    graph, state = problem.graph, _arguments_with_state(problem.graph)
    leading = [graph.values[alike[0]].shape[0] for alike in alike_arguments(graph, 0, state | graph.without_examples(0))]
    if leading and not any(size % n == 0 for size in leading for n in problem.mesh.sizes if n > 1):
        problem = _dividing(problem, leading[0])
    enough = problem.cached(_enough_flops)
    found: list[tuple[bool, float, float, int, int]] = []
    for dim in (0, 1):
        for batch in _batches(problem, dim, state | graph.without_examples(dim)):
            cost = problem.evaluate(_propagated(problem, batch).assignment()).cost
            size = graph.values[next(iter(batch))].shape[dim]
            found.append((cost.flops > enough, cost.communication_seconds, cost.objective_seconds, dim, size))
        if not all(is_whole for is_whole, *_ in found):
            break
    if not found:
        return {}
    *_, dim, size = min(found)
    free = (value for value in graph.arguments if value not in state | graph.without_examples(dim))
    return {value: dim for value in free if graph.values[value].shape[dim : dim + 1] == (size,)}


def _dividing(problem: Problem, size: int) -> Problem:
    """The program on the fewest devices that divide a size: on a mesh whose axes do not, another dimension would be taken for the batch."""
    n = next((n for n in range(2, size + 1) if size % n == 0), 1)
    return Problem(problem.facts, CostModel(Cluster.parse(f"cpu:{n}"), Mesh.of({"batch": n})))


def _arguments_with_state(graph: Graph) -> set[int]:
    """The values of the arguments that hold state: those that are donated; else those that are replaced, if that is no coincidence.

    A single array may be replaced by a result of the same shape by coincidence, as in a forward pass; then the first argument, if there are
    several, holds weights.
    """
    roots = [_root(path) for path in graph.argument_paths]
    state = {roots[position] for position in graph.donated}
    if not state:
        state = {root for root in roots if root == roots[0] or roots.count(root) > 1} & {roots[position] for position in graph.state}
    if not state and len({*roots}) > 1:
        state = {roots[0]}
    return {value for value, root in zip(graph.arguments, roots, strict=True) if root in state}


def _root(path: str) -> str:
    """The name of the argument that a path starts with."""
    return re.split(r"\W", path, maxsplit=1)[0]


def _propagated(problem: Problem, batch: dict[int, Layout]) -> Propagation:
    run = Propagation(problem)
    pinned = {value: run.layout(value) for value in problem.graph.arguments if value in problem.pins}
    run.seed({value: _pinned(problem, value, layout) for value, layout in (pinned | batch).items()})
    run.forward()
    run.backward()
    return run


def _batches(problem: Problem, dim: int, state: Collection[int]) -> list[dict[int, Layout]]:
    """The candidates for the batch: the arrays of all arguments, or of one, that share the commonest size of a dimension, sharded on it."""
    candidates = [{value: _split(problem, value, dim) for value in alike} for alike in alike_arguments(problem.graph, dim, state)]
    return [batch for batch in candidates if any(axis_dim >= 0 for layout in batch.values() for axis_dim in layout)]


def alike_arguments(graph: Graph, dim: int, state: Collection[int]) -> Iterator[list[int]]:
    """What may be the batch: the arrays of all arguments without state, or of one, that share the commonest size of a dimension."""
    groups: dict[str, list[int]] = {}
    for value, path in zip(graph.arguments, graph.argument_paths, strict=True):
        if value not in state and graph.values[value].rank > dim:
            groups.setdefault(_root(path), []).append(value)
    together = [value for group in groups.values() for value in group]
    for group in [*([together] if len(groups) > 1 else []), *groups.values()]:
        sizes = [graph.values[value].shape[dim] for value in group]
        commonest = max(dict.fromkeys(sizes), key=sizes.count)
        yield [value for value, size in zip(group, sizes, strict=True) if size == commonest]


def widest(problems: Sequence[Problem]) -> int:
    """The first problem on whose mesh the batch is split over most devices: on one axis there may be more devices than examples."""
    return max(range(len(problems)), key=lambda number: (n_shards(problems[number]), -number))


def n_shards(problem: Problem) -> int:
    """Into how many parts the batch is split on the problem's mesh, at most."""
    batches, sizes = _batches(problem, 0, problem.graph.without_examples(0)), problem.mesh.sizes
    return max((shards(layout, sizes) for batch in batches for layout in batch.values()), default=1)


def _split(problem: Problem, value: int, dim: int) -> Layout:
    """The layout that shards one dimension over as many mesh axes as divide it."""
    shape, sizes = problem.graph.values[value].shape, problem.mesh.sizes
    layout = (-1,) * len(sizes)
    for axis in range(len(sizes)):
        option = (*layout[:axis], dim, *layout[axis + 1 :])
        if divides(option, shape, sizes):
            layout = option
    return layout


def _most_sharded(problem: Problem, value: int) -> Layout:
    """The layout over as many devices as possible: of the dimensions that most devices divide the largest; other axes on others.

    A parameter sharded along one dimension is gathered by one collective, and its gradient scattered by one
    (`compilers.Compiler.scatters`).
    """
    shape, sizes = problem.graph.values[value].shape, problem.mesh.sizes
    layouts = [_split(problem, value, dim) for dim in range(len(shape))]
    layout = max(layouts, key=lambda layout: (shards(layout, sizes), shape[max(layout, default=0)]), default=(-1,) * len(sizes))
    for axis in range(len(sizes)):
        options = [(*layout[:axis], dim, *layout[axis + 1 :]) for dim in range(len(shape)) if layout[axis] < 0]
        fitting = [option for option in options if divides(option, shape, sizes)]
        layout = max(fitting, key=lambda option: local_shape(shape, option, sizes)[option[axis]], default=layout)
    return layout


def _pinned(problem: Problem, value: int, layout: Layout) -> Layout:
    """The layout, changed where the user's pins forbid it."""
    pin = problem.pins.get(value)
    if pin is None:
        return layout
    return tuple(dim if dim in allowed else min(allowed) for dim, allowed in zip(layout, pin, strict=True))


def _state(problem: Problem) -> set[int]:
    """The arguments that the step replaces, without scalars and examples."""
    graph = problem.graph
    return {value for k in graph.state if graph.values[value := graph.arguments[k]].rank}


def _used_with_the_batch(problem: Problem, run: Propagation) -> set[int]:
    """The values that a sharded op reads, directly or through ops that are not sharded."""
    used: set[int] = set()
    for op in reversed(problem.graph.walk()):
        for holder in op.holders:
            if holder.value in used or any(view in used for view in holder.views):
                used.update(flow.value for flow in holder.sources)
        rule = problem.rules[op.index]
        if rule is None:
            continue
        sharded = op.index in run.frozen
        if sharded or any(value in used for value in op.results):
            used.update(value for value in op.operands if all(dim < 0 for dim in run.layout(value)))
    return used
