"""Padding of dimensions to sizes that devices divide, with equal results.

A vocabulary of 50,257 is padded to 50,264 for eight devices: arguments and results that have the dimension are that large, and so is all
that is computed of them. What is in the padding of an argument is never read: an operation that mixes it with other elements reads zeros
in its place, or -inf, or whatever else changes nothing (`autoshard.rewrite.padding_contents`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from itertools import chain
from typing import Any

from autoshard.cluster import Cluster
from autoshard.errors import ShardingError, TraceError
from autoshard.ir import Assignment, Graph, Rule
from autoshard.ir.rewrites import Extent, Padded, PaddedDim
from autoshard.render import format_percent
from autoshard.rewrite.extents import Extents, padded_size
from autoshard.rewrite.padding_choice import (
    LITTLE,
    MATTERS,
    Class,
    Work,
    arguments_of,
    classes,
    is_promising,
    more_work,
    repeated,
    uneven_sizes,
)
from autoshard.rewrite.padding_plan import Links, Plan, plan_padding
from autoshard.rewrite.padding_program import padded_program
from autoshard.rules import rules_of
from autoshard.trace import Traced, rebuilt


def padded(rewrite: Padded, traced: Traced) -> Traced:
    """The program with padding.

    Raises:
        TraceError: it is not the program that this padding is of.
    """
    graph = traced.graph
    plan = plan_padding(graph, rules_of(graph), _given(rewrite, graph))
    of_arguments = tuple(plan.of(value) for value in graph.arguments)
    given, n_padded = rewrite.arguments, sum(map(bool, chain(*of_arguments)))
    if any(of_arguments[k][dim] != of for k, dim, of in given) or n_padded != len(given):
        raise TraceError(f"{_OF_ONE}, and in this one it spreads to other arguments. Search again.")
    results: list[Extents] = [((),) * graph.values[value].rank for value in graph.results]
    for result, argument in graph.aliases:
        results[result] = of_arguments[argument]
    told = f"{rewrite.describe()}{PLACED if given else ''}", *cut_for(graph, plan)
    return replace(rebuilt(traced, padded_program(traced.jaxpr, plan, results), rewrite, notes=told), padding=of_arguments)


def _given(rewrite: Padded, graph: Graph) -> dict[tuple[int, int], Extent]:
    given: dict[tuple[int, int], Extent] = {}
    for each in rewrite.dims:
        shape = graph.values[each.value].shape if each.value < len(graph.values) else ()
        size = math.prod(n for n, _ in each.extent)
        if each.dim >= len(shape) or shape[each.dim] != size:
            there = f"this one has {shape or 'no array'} there"
            raise TraceError(f"{_OF_ONE}: {each.name} of size {size} was padded, and {there}. Search again.")
        given[each.value, each.dim] = each.extent
    return given


def cut_for(graph: Graph, plan: Plan) -> Iterator[str]:
    """The kernels and custom calls that take no padding, in words: what they read in its own size is gathered."""
    rules = rules_of(graph)
    for op in graph.walk():
        if op.bodies or op.mapped or (op.kernel is None and rules[op.index] is not None):
            continue
        move = plan.moves.get(op.index)
        for number, value in enumerate(op.operands):
            shape, reads = graph.values[value].shape, move.reads[number] if move is not None else ((),) * graph.values[value].rank
            for dim, (of, read) in enumerate(zip(plan.of(value), reads, strict=True)):
                if of and not read:
                    yield (
                        f"{op.primitive} at {op.origin} takes no padding: dimension {dim} of its operand {number}, padded to "
                        f"{padded_size(0, of):,}, is cut to its own {shape[dim]:,} elements there, on every device"
                    )


PLACED = "; strategy.shard and strategy.init give state its padding, and of arrays in their own sizes each step pads and cuts"

_OF_ONE = "a padding is of one program"


@dataclass(frozen=True, slots=True)
class Padding:
    """What a search may pad, and to which sizes; ``padding=True`` is ``Padding()``.

    Attributes:
        quantum: of how many elements each device's shard of a dimension of state is a multiple, such as the blocks of quantised
            state: one number for all arguments, or one for each pattern of their paths. Dimensions that are no such multiples are padded
            in any case where they grow by at most half, and no dimension is split into parts that are none.

    >>> Padding(quantum={"state['mu']*": 128}).quantum_of("state['mu']['embed']")
    128

    Raises:
        ShardingError: a quantum is no positive whole number.
    """

    quantum: int | Mapping[str, int] = 1

    def __post_init__(self) -> None:
        for each in self.quantum.values() if isinstance(self.quantum, Mapping) else (self.quantum,):
            if isinstance(each, bool) or not isinstance(each, int) or each < 1:
                raise ShardingError(
                    "a quantum is the number of elements of which each device's shard of a dimension is a multiple, a positive whole "
                    f"number or one for each pattern of arguments' paths; got {self.quantum!r}. Use 128, or {{\"state['mu']*\": 128}}."
                )

    def quantum_of(self, path: str) -> int:
        """The quantum of an argument by its path."""
        if not isinstance(self.quantum, Mapping):
            return self.quantum
        return next((each for pattern, each in self.quantum.items() if path == pattern or fnmatch(path, _literal(pattern))), 1)


def _literal(pattern: str) -> str:
    """A pattern of paths as `fnmatch` reads it: brackets stand for themselves."""
    return pattern.replace("[", "[[]")


def proposals(traced: Traced, cluster: Cluster, rewriting: Any) -> tuple[Padded, ...]:
    """The paddings that are worth planning: of dimensions that grow by little, and also of those that grow by much."""
    if not rewriting.padding or cluster.n_devices == 1:
        return ()
    graph, asked, devices = traced.graph, rewriting.padding, cluster.n_devices
    quanta = {k: asked.quantum_of(graph.argument_paths[k]) for k in graph.state} if isinstance(asked, Padding) else {}
    quanta = {k: quantum for k, quantum in quanta.items() if quantum > 1}
    if not quanta and not uneven_sizes(graph, devices):
        return ()
    rules = rules_of(graph)
    found = [*classes(graph, rules, devices, quanta)]
    required = [each for each in found if each.quantum > 1]
    little = [each for each in found if each.growth <= LITTLE or each.quantum > 1]
    much = [each for each in found if each not in little and is_promising(each, graph, devices)]
    several = dict.fromkeys(map(tuple, (required, little, [*little, *much])))
    return tuple(_padded(graph, rules, chosen, bool(required)) for chosen in several if chosen)


def _padded(graph: Graph, rules: Sequence[Rule | None], chosen: Sequence[Class], required: bool) -> Padded:
    extents = Links(graph, rules).spread({(each.value, each.dim): each.extent for each in chosen})
    dims = (PaddedDim(each.value, each.dim, each.extent, named(graph, each), each.shards, each.growth * each.share) for each in chosen)
    return Padded(tuple(dims), arguments_of(graph, extents), required)


def padded_alike(traced: Traced, like: Padded, n_arguments: int) -> Padded | None:
    """The padding of another program, whose first arguments are the same and are stored alike; None where that takes more than theirs."""
    graph, rules = traced.graph, rules_of(traced.graph)
    given = {(graph.arguments[k], dim): of for k, dim, of in like.arguments if k < n_arguments}
    arguments = arguments_of(graph, Links(graph, rules).spread(given))
    if not given or [each for each in arguments if each[0] < n_arguments] != [each for each in like.arguments if each[0] < n_arguments]:
        return None
    shards = {each.extent: each.shards for each in like.dims}

    def of_dim(value: int, dim: int, of: Extent) -> PaddedDim:
        name = f"dimension {dim} of {graph.argument_paths[graph.arguments.index(value)]}"
        return PaddedDim(value, dim, of, name, shards.get(of, 1), more_work(graph, rules, value, dim, of))

    dims = (of_dim(value, dim, of) for (value, dim), of in given.items())
    return Padded(tuple(dims), arguments, like.required)


def stays_whole(graph: Graph, rules: Sequence[Rule | None], assignment: Assignment, asked: bool | Padding) -> list[str]:
    """Dimensions that do not divide and whose operations several devices do alike, or that padding would divide, in words.

    None that were planned with padding, too.
    """
    devices = assignment.mesh.size
    words: list[str] = []
    if not uneven_sizes(graph, devices):
        return words
    work = Work(graph, rules)
    for found in classes(graph, rules, devices):
        is_tried = found.growth <= LITTLE or is_promising(found, graph, devices)
        share = 0.0 if is_tried and asked else repeated(found, work, assignment)
        if share < MATTERS and (asked or not is_tried):
            continue
        padded = padded_size(0, _first(graph, found)[2] if found.arguments else found.extent)
        remedy = f"choose {padded:,} or another size that divides" if asked else f"choose {padded:,}, or let padding=True pad it"
        repeats = f", and several of these repeat {format_percent(share)} of the step's work that has it" if share >= MATTERS else ""
        words.append(f"{named(graph, found)}, of size {found.size:,}, does not divide by {devices} devices{repeats}: {remedy}")
    return words


def named(graph: Graph, found: Class) -> str:
    """A dimension by the arguments that have it."""
    if not found.arguments:
        return "a dimension that no argument has"
    k, dim, _ = _first(graph, found)
    more = len({other for other, _, _ in found.arguments}) - 1
    others = f" and of {more} argument{'s' if more > 1 else ''} more" if more else ""
    size = graph.values[graph.arguments[k]].shape[dim]
    of_size = "" if size == found.size else f"what becomes of the {size:,} in "
    return f"{of_size}dimension {dim} of {graph.argument_paths[k]}{others}"


def _first(graph: Graph, found: Class) -> tuple[int, int, Extent]:
    """Of the arguments that have a dimension the one with the shortest path."""
    return min(found.arguments, key=lambda each: len(graph.argument_paths[each[0]]))
