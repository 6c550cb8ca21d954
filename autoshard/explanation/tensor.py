"""Why a tensor is sharded as it is: what moves it, what each other layout would cost, and what makes others unavailable.

Layouts are searched on the problem of the strategy's own search, with the tensor's layout restricted: all tables but those of the tensor's
variables serve again. The most promising are searched first, by the bound that the search's messages give each; in programs so large that
each takes a noticeable time, only a few, unless all are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np

from autoshard.cost.record import Cost
from autoshard.errors import InfeasibleError, SearchLimitError, ShardingError, StrategyError
from autoshard.explanation.breakdown import collective_groups
from autoshard.explanation.data import CollectiveGroup, TensorGroup
from autoshard.explanation.groups import shard_bytes
from autoshard.explanation.layers import line_of
from autoshard.explanation.named import Named, named
from autoshard.explanation.program import Judged
from autoshard.explanation.weights import gradient_ops, made_of
from autoshard.inference.reparametrisation import normalised
from autoshard.inference.trw_s import MessagePassing
from autoshard.ir import Collective, Layout, Spec, layout_to_spec, layouts, shard_counts, spec_to_layout
from autoshard.judge.evaluate import Judgement, evaluate
from autoshard.problem import NO_HINTS, Hints, Problem
from autoshard.reductions import symmetry
from autoshard.search import DynamicProgramming, RecursiveProgramming, Searcher
from autoshard.search.overlap import overlapped

Found = TypeVar("Found")

SEARCHED_OPS = 50_000  # operations that are searched for one answer, of all layouts together: about a second
LEAST_SEARCHED = 3  # layouts, of a program however large
BOUNDING_SWEEPS = 4  # of message passing before layouts are ranked, from the search's own messages
BOUNDED_ENTRIES = 1 << 22  # of the tables on which they are ranked


@dataclass(frozen=True, slots=True)
class Alternative:
    """Another layout of the tensor, or its own.

    Attributes:
        spec: the layout.
        bytes: of all tensors of the group on a device.
        fixed_seconds: the step if only these tensors change, resharded for every reader; None where it cannot be, as of the own layout and
            of computed values, or was not judged.
        step_seconds, peak_bytes: with everything else chosen anew; None where that was not searched.
        compute_seconds, exposed_seconds: of that step, computing and waiting for collectives; None as before.
        obstacle: what makes it unavailable, in words; empty where nothing does.
        is_own: whether it is the strategy's.
    """

    spec: Spec
    bytes: float
    fixed_seconds: float | None = None
    step_seconds: float | None = None
    peak_bytes: float | None = None
    compute_seconds: float | None = None
    exposed_seconds: float | None = None
    obstacle: str = ""
    is_own: bool = False

    def with_cost(self, cost: Cost) -> Alternative:
        """The same with the cost of a step with it."""
        return replace(
            self,
            step_seconds=cost.makespan_seconds,
            peak_bytes=cost.peak_bytes,
            compute_seconds=cost.compute_seconds,
            exposed_seconds=cost.exposed_communication_seconds,
        )


@dataclass(frozen=True, slots=True)
class TensorExplanation:
    """A tensor's layout explained.

    Attributes:
        kind: ``"argument"``, ``"result"`` or ``"value"``.
        group: the tensors: arguments that differ by indices and what mirrors them, results, or values of equal operations of a line.
        remark: a sentence on the name; empty where there is nothing to say.
        step_seconds: of the strategy.
        pinned: whether the user pinned it.
        moves: the collectives that move it, or bring its new value.
        gradients: those that combine its gradient over devices.
        alternatives: its own layout first, then those that are available, the fastest first, then the others.
        asked: the layout that the question is about; None: it is about its own.
    """

    kind: str
    group: TensorGroup
    remark: str
    step_seconds: float
    pinned: bool
    moves: tuple[CollectiveGroup, ...]
    gradients: tuple[CollectiveGroup, ...]
    alternatives: tuple[Alternative, ...]
    asked: Spec | None = None

    @property
    def own(self) -> Alternative:
        """The strategy's layout."""
        return self.alternatives[0]

    @property
    def next_best(self) -> Alternative | None:
        """The fastest of the other layouts with everything else chosen anew."""
        searched = (each for each in self.alternatives if not each.is_own and each.step_seconds is not None)
        return min(searched, key=lambda each: each.step_seconds or 0.0, default=None)

    @property
    def in_question(self) -> Alternative | None:
        """The layout that the question is about; None where that is its own, or none is named."""
        return next((each for each in self.alternatives if each.spec == self.asked and not each.is_own), None)


def explain_tensor(
    judged: Judged, name: str, problem: Problem, hints: Hints = NO_HINTS, asked: Spec | None = None, searches_all: bool = False
) -> TensorExplanation:
    """The layout of a tensor explained; other layouts are searched one by one, on the strategy's mesh.

    Args:
        name: of an argument, a result or a computed value; see `autoshard.explanation.named`.
        problem: that of the strategy's mesh, with the user's pins and memory limit.
        hints: of the search that found the strategy.
        asked: the layout of which to say why it is not the tensor's; it is searched first.
        searches_all: whether all available layouts are searched, however long that takes.

    Raises:
        StrategyError: the name is of nothing, or of several groups of tensors; or the layout asked for is none.
    """
    record, mesh = judged.record, judged.record.mesh
    tensors = named(judged, name)
    group, rank = tensors.group, len(tensors.group.shape)
    now = record.assignment.layout(tensors.values[0])
    wanted = None if asked is None else _layout(asked, tensors, judged)
    options = {layout: _option(judged, problem, tensors, layout, now) for layout in layouts(rank, len(mesh.axes))}
    own = options.pop(now).with_cost(record.cost)
    available = (layout for layout, each in options.items() if not each.obstacle)
    ranked = sorted(available, key=_rank(problem, hints, tensors, wanted))
    most = len(ranked) if searches_all else max(LEAST_SEARCHED, SEARCHED_OPS // max(len(judged.facts.graph.walk()), 1))
    for layout in ranked[:most]:
        options[layout] = _searched(judged, problem, hints, tensors, layout, options[layout])
    others = sorted(options.values(), key=lambda each: (bool(each.obstacle), each.step_seconds is None, each.step_seconds or 0.0))
    return TensorExplanation(
        kind=tensors.kind,
        group=group,
        remark=tensors.remark,
        step_seconds=record.cost.makespan_seconds,
        pinned=any(value in problem.pins for value in tensors.values),
        moves=_moves(judged, tensors),
        gradients=_gradients(judged, tensors),
        alternatives=(own, *others),
        asked=None if wanted is None else layout_to_spec(wanted, mesh.names, rank),
    )


def _moves(judged: Judged, tensors: Named) -> tuple[CollectiveGroup, ...]:
    """The collectives that move arguments, or what is made of them alone, or that bring their new values."""
    if tensors.kind != "argument":
        return ()
    names, made, facts = {*tensors.group.paths}, made_of(judged.facts, tensors.values), judged.facts

    def is_moved(each: Collective) -> bool:
        value, op, reason = each.value, each.op, each.reason
        if (value is not None and value.kind == "argument" and value.name in names) or (reason is not None and reason.argument in names):
            return True
        if value is None or value.kind != "result" or op is None or op.index < 0 or (reason is not None and reason.kind == "combined"):
            return False
        read = (one for one in facts.graph.walk()[op.index].operands if one in made and facts.graph.values[one].shape == value.shape)
        return any((maker := facts.names.maker(one)) is not None and maker.primitive == value.name for one in read)

    return collective_groups(judged.record, judged, filter(is_moved, judged.record.cost.collectives))


def _gradients(judged: Judged, tensors: Named) -> tuple[CollectiveGroup, ...]:
    """The collectives that combine gradients of arguments over devices."""
    if tensors.kind != "argument":
        return ()
    ops, sent = gradient_ops(judged.facts, {*tensors.values}), judged.record.cost.collectives
    combined = (each for each in sent if each.op and each.op.index in ops and each.reason and each.reason.kind == "combined")
    return collective_groups(judged.record, judged, combined)


def _layout(asked: Spec, tensors: Named, judged: Judged) -> Layout:
    """The layout of a spec.

    Raises:
        StrategyError: it is none of such a tensor on the mesh.
    """
    try:
        return spec_to_layout(tuple(asked), judged.record.mesh, len(tensors.group.shape), tensors.group.name)
    except ShardingError as error:
        raise StrategyError(f"spec= is a layout on the strategy's mesh, {judged.record.mesh}: {error}") from None


def _option(judged: Judged, problem: Problem, tensors: Named, layout: Layout, now: Layout) -> Alternative:
    """A layout of the tensors, not searched yet."""
    mesh, group = judged.record.mesh, tensors.group
    spec = layout_to_spec(layout, mesh.names, len(group.shape))
    if layout == now:
        return Alternative(spec, group.bytes, is_own=True)
    nbytes = (group.n + group.alike) * shard_bytes(group.shape, group.dtype, spec, mesh)
    return Alternative(spec, nbytes, obstacle=_obstacle(problem, tensors, layout))


def _obstacle(problem: Problem, tensors: Named, layout: Layout) -> str:
    """What makes a layout of the tensors unavailable before anything is searched: divisibility, a pin, or operations."""
    group, values, mesh = tensors.group, tensors.values, problem.mesh
    for dim, (size, count) in enumerate(zip(group.shape, shard_counts(layout, len(group.shape), mesh.sizes), strict=True)):
        if size % count:
            return f"dim {dim} has size {size}, which {count} does not divide"
    pin = next((problem.pins[value] for value in values if value in problem.pins), None)
    if pin is not None and any(dim not in allowed for dim, allowed in zip(layout, pin, strict=True)):
        return "a pin fixes another layout"
    home = problem.decisions.home.get(values[0])
    if home is None:
        return "every device computes it where it is read, from constants or scalars"
    whole = problem.costs.whole_domain(home[0])
    numbers = {problem.layout(home[0], label, home[1], values[0]) for label in whole.labels}
    return "" if layout in numbers else _rule_words(problem, home[0])


def _rule_words(problem: Problem, variable: int) -> str:
    """The operations that decide a variable's layouts, in words."""
    ops, one = problem.graph.walk(), problem.decisions.variables[variable]
    if one.leader >= 0:
        op = ops[one.leader]
        return f"{op.primitive} at {line_of(op.origin)}, which makes it, cannot be split so"
    followers = list(dict.fromkeys(f"{ops[index].primitive} at {line_of(ops[index].origin)}" for index, _, _ in one.followers))
    if not followers:
        return "the loop that reads it takes a slice a trip, which cannot be split so"
    more = f" and {len(followers) - 1} more" if len(followers) > 1 else ""
    return f"what has its layout, too, cannot be split so: {followers[0]}{more}"


def _rank(problem: Problem, hints: Hints, tensors: Named, wanted: Layout | None) -> Callable[[Layout], tuple[bool, float]]:
    """The order in which layouts are searched: the one asked for, then those of the least lower bounds of the objective.

    The bounds are those of labels that are the same in equal layers, from the messages of the strategy's own search.
    """
    reduced: dict[int, np.ndarray] = {}
    small = symmetry.apply(problem)
    if (small or problem).table_entries(range(len(problem.mesh.axes)), BOUNDED_ENTRIES) <= BOUNDED_ENTRIES:
        tables = small.whole_tables() if small else problem.whole_tables()
        passing = MessagePassing(tables, hints.messages if small else None)
        found = normalised(passing, passing.run(BOUNDING_SWEEPS)).reduced
        classes = range(problem.n_variables) if small is None else small.classes
        homes = {value: problem.decisions.home[value][0] for value in tensors.values if value in problem.decisions.home}
        reduced = {value: found[int(classes[home])] for value, home in homes.items()}

    def rank(layout: Layout) -> tuple[bool, float]:
        least = 0.0
        for value, costs in reduced.items():
            home, slot = problem.decisions.home[value]
            labels = problem.costs.whole_domain(home).labels
            own = (cost for label, cost in zip(labels, costs, strict=True) if problem.layout(home, label, slot, value) == layout)
            least = max(least, min(own, default=float("inf")))
        return layout != wanted, least

    return rank


def _searched(judged: Judged, problem: Problem, hints: Hints, tensors: Named, layout: Layout, option: Alternative) -> Alternative:
    """A layout with its costs: alone, and with everything else chosen anew under it."""
    assignment, limit = judged.record.assignment, problem.memory_limit_bytes or float("inf")
    if tensors.kind == "argument":
        changed = {**assignment.layouts, **dict.fromkeys((*tensors.values, *tensors.mirrors), layout)}
        alone = evaluate(judged.facts, judged.model, replace(assignment, layouts=changed)).cost
        option = replace(option, fixed_seconds=alone.makespan_seconds)
    pin = tuple(frozenset((dim,)) for dim in layout)
    values = [value for value in tensors.values if value in problem.decisions.home]
    try:
        answer = _best(problem.restricted(dict.fromkeys(values, pin)), hints)
    except InfeasibleError as error:
        return replace(option, obstacle=f"nothing with it fits the memory limit: {str(error).split('. ')[0][:120]}")
    except SearchLimitError:
        return option
    except ShardingError as error:
        return replace(option, obstacle=str(error).split(". ")[0][:120])
    return option.with_cost(overlapped(judged.facts, judged.model, answer, limit).cost)


def _best(problem: Problem, hints: Hints) -> Judgement:
    """The judgement of the best assignment of a problem, without a proof that it is."""
    searcher, limit = DynamicProgramming(), problem.memory_limit_bytes
    try:
        (judgement, _), _ = searcher.priced(problem, {}, hints.messages)
    except SearchLimitError:
        return RecursiveProgramming().solve(problem).judgement
    if limit is None or judgement.cost.peak_bytes <= limit:
        return judgement
    return searcher.solve(problem, hints=replace(hints, start=None)).judgement


def by_first_that_holds(search: Callable[[Searcher], Found]) -> Found:
    """What a search finds with the first searcher that can hold the program: the optimum on each mesh, where that is one of them."""
    try:
        return search(DynamicProgramming())
    except SearchLimitError:
        return search(RecursiveProgramming())
