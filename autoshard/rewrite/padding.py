"""Padding of dimensions to sizes that devices divide, with equal results.

A vocabulary of 50,257 is padded to 50,264 for eight devices: arguments and results that have the dimension are that large, and so is all
that is computed of them. What is in the padding of an argument is never read: an operation that mixes it with other elements reads zeros
in its place, or -inf, or whatever else changes nothing (`autoshard.rewrite.padding_contents`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, ClassVar, Self

from autoshard.cluster import Cluster
from autoshard.errors import TraceError
from autoshard.ir import Graph, Rule
from autoshard.render import format_percent
from autoshard.rewrite.extents import Extent, Extents, padded_size
from autoshard.rewrite.padding_choice import LITTLE, Class, classes, is_promising
from autoshard.rewrite.padding_plan import plan_padding
from autoshard.rewrite.padding_program import padded_program
from autoshard.rules import rules_of
from autoshard.trace import Traced, rebuilt


@dataclass(frozen=True, slots=True)
class PaddedDim:
    """One dimension that is padded, with all that belong to it.

    Attributes:
        value, dim: a value that has it, by its number in the program, and which one of its dimensions it is.
        extent: its parts, each with its size and its padded size.
        name: what it is called in explanations.
        shards: the number of devices that divides the padded size.
        more_work: by what fraction the step's work grows.
    """

    value: int
    dim: int
    extent: Extent
    name: str = ""
    shards: int = 1
    more_work: float = 0.0

    def __str__(self) -> str:
        """The sentence of explanations."""
        size, padded = math.prod(n for n, _ in self.extent), padded_size(0, self.extent)
        return f"{self.name}, {size:,}, is padded to {padded:,} over {self.shards}: {format_percent(self.more_work)} more work"


@dataclass(frozen=True, slots=True)
class Padded:
    """A program with padded dimensions.

    Attributes:
        dims: one of each class of dimensions that belong together.
        arguments: positions of the argument leaves with padding, each with its dimension and its extent.
    """

    kind: ClassVar[str] = "padding"

    dims: tuple[PaddedDim, ...]
    arguments: tuple[tuple[int, int, Extent], ...] = ()

    def apply(self, traced: Traced) -> Traced:
        graph = traced.graph
        plan = plan_padding(graph, rules_of(graph), self._given(graph))
        padded = tuple(plan.of(value) for value in graph.arguments)
        if any(padded[k][dim] != of for k, dim, of in self.arguments) or sum(map(bool, chain(*padded))) != len(self.arguments):
            raise TraceError(f"{_OF_ONE}, and in this one it spreads to other arguments. Search again.")
        results: list[Extents] = [((),) * graph.values[value].rank for value in graph.results]
        for result, argument in graph.aliases:
            results[result] = padded[argument]
        return replace(rebuilt(traced, padded_program(traced.jaxpr, plan, results), traced.microbatches), padding=padded)

    def _given(self, graph: Graph) -> dict[tuple[int, int], Extent]:
        given: dict[tuple[int, int], Extent] = {}
        for each in self.dims:
            shape = graph.values[each.value].shape if each.value < len(graph.values) else ()
            size = math.prod(n for n, _ in each.extent)
            if each.dim >= len(shape) or shape[each.dim] != size:
                there = f"this one has {shape or 'no array'} there"
                raise TraceError(f"{_OF_ONE}: {each.name} of size {size} was padded, and {there}. Search again.")
            given[each.value, each.dim] = each.extent
        return given

    def json(self) -> dict[str, Any]:
        dims = [[each.value, each.dim, _parts(each.extent), each.name, each.shards, each.more_work] for each in self.dims]
        return {"dims": dims, "arguments": [[k, dim, _parts(of)] for k, dim, of in self.arguments]}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Self:
        dims = tuple(
            PaddedDim(int(value), int(dim), _extent(of), str(name), int(shards), float(more))
            for value, dim, of, name, shards, more in fields["dims"]
        )
        return cls(dims, tuple((int(k), int(dim), _extent(of)) for k, dim, of in fields["arguments"]))

    def describe(self) -> str:
        return "; ".join(map(str, self.dims))


_OF_ONE = "a padding is of one program"


def _parts(of: Extent) -> list[list[int]]:
    return [[*part] for part in of]


def _extent(parts: Any) -> Extent:
    found = tuple((int(size), int(padded)) for size, padded in parts)
    if not all(1 <= size <= padded for size, padded in found):
        raise ValueError(f"parts of a dimension grow by padding, got {found}")
    return found


def proposals(traced: Traced, cluster: Cluster, rewriting: Any) -> tuple[Padded, ...]:
    """The paddings that are worth planning: of dimensions that grow by little, and also of those that grow by much."""
    if not rewriting.padding or cluster.n_devices == 1:
        return ()
    graph = traced.graph
    rules = rules_of(graph)
    found = [*classes(graph, rules, cluster.n_devices)]
    little = [each for each in found if each.growth <= LITTLE]
    much = [each for each in found if each.growth > LITTLE and is_promising(each, graph, cluster.n_devices)]
    several = [little, [*little, *much]] if much else [little]
    return tuple(_padded(graph, rules, chosen) for chosen in several if chosen)


def _padded(graph: Graph, rules: Sequence[Rule | None], chosen: Sequence[Class]) -> Padded:
    plan = plan_padding(graph, rules, {(each.value, each.dim): each.extent for each in chosen})
    arguments = tuple((k, dim, of) for k, value in enumerate(graph.arguments) for dim, of in enumerate(plan.of(value)) if of)
    dims = (PaddedDim(each.value, each.dim, each.extent, _name(graph, each), each.shards, each.growth * each.share) for each in chosen)
    return Padded(tuple(dims), arguments)


def _name(graph: Graph, found: Class) -> str:
    """A dimension by the arguments that have it."""
    if not found.arguments:
        return f"a dimension of {found.size:,} elements that no argument has"
    k, dim, _ = next((each for each in found.arguments if graph.arguments[each[0]] == found.value), found.arguments[0])
    more = len({other for other, _, _ in found.arguments}) - 1
    others = f" and of {more} argument{'s' if more > 1 else ''} more" if more else ""
    return f"dimension {dim} of {graph.argument_paths[k]}{others}"
