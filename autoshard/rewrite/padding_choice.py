"""Which dimensions are worth padding on so many devices.

A dimension belongs to others, which are padded with it. It is worth it where it does not divide, where operations that have it are part of
the step's work or memory, and where more devices can have their shards of it than without padding. Padding that adds little work is one
variant; a second one also has dimensions that grow by much, such as 12 heads for 8 devices, where these and the examples together cannot
use all devices.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autoshard.analysis.values import free_values
from autoshard.cost.compute import op_flops
from autoshard.ir import Assignment, Graph, Op, Rule
from autoshard.primitives import is_matrix, primitive
from autoshard.rewrite.extents import Extent, Extents, padded_size
from autoshard.rewrite.padding_plan import Links

LITTLE = 0.05
"""Growth of a dimension that is tried wherever the dimension matters."""

MUCH = 0.5
"""Growth beyond which a dimension is never padded."""

MATTERS = 0.01
"""Share of the step's work, or of its arrays' bytes, of the dimensions that are tried."""

LARGE_PART = 0.1
"""The same for dimensions that grow by much."""


@dataclass(frozen=True, slots=True)
class Class:
    """Dimensions that belong together.

    Attributes:
        value, dim: the one that they were found from.
        extent: its sizes.
        shards: the number of devices that divides the padded size.
        share: the share of the step's work of operations that have the dimension.
        memory: the share of the bytes of all its arrays.
        arguments: positions of arguments, their dimensions and extents.
        ops: the operations that have the dimension, by their numbers.
        quantum: of how many elements each shard is a multiple.
    """

    value: int
    dim: int
    extent: Extent
    shards: int
    share: float
    memory: float
    arguments: tuple[tuple[int, int, Extent], ...]
    ops: tuple[int, ...]
    quantum: int = 1

    @property
    def growth(self) -> float:
        """By what fraction the dimension grows."""
        return padded_size(0, self.extent) / math.prod(size for size, _ in self.extent) - 1

    @property
    def size(self) -> int:
        return math.prod(size for size, _ in self.extent)


def padded_for(size: int, devices: int, quantum: int = 1) -> tuple[int, int] | None:
    """The padded size that most devices divide without much growth, and how many; None where padding does not let more devices divide it.

    Args:
        quantum: each device's shard is a multiple of it.

    >>> padded_for(50257, 16), padded_for(12, 8), padded_for(96, 8), padded_for(5, 256)
    ((50272, 16), (16, 8), None, (6, 2))
    """
    now = max((q for q in _divisors(devices) if size % (q * quantum) == 0), default=0)
    best: tuple[float, int, int] | None = None
    for q in _divisors(devices):
        padded = -(-size // (q * quantum)) * q * quantum
        growth = padded / size - 1
        if q > now and growth <= MUCH:
            # Little growth counts as none, so that of these the one that most devices divide is taken.
            key = (padded if growth > LITTLE else size) / q, q, padded
            best = key if best is None or key[0] < best[0] else best
    if best is None or (now and best[0] >= size / now):
        return None
    return best[2], best[1]


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def uneven_sizes(graph: Graph, devices: int) -> dict[int, tuple[int, int]]:
    """The sizes of dimensions that padding lets more devices divide, each with its padded size and the number of these devices."""
    sizes = {size for value in graph.values for size in value.shape}
    return {size: found for size in sizes if size > 1 and (found := padded_for(size, devices)) is not None}


def classes(graph: Graph, rules: Sequence[Rule | None], devices: int, quanta: Mapping[int, int] | None = None) -> Iterator[Class]:
    """The classes of dimensions that do not divide and that matter, those of arguments first.

    Args:
        quanta: per position of an argument of how many elements each shard is a multiple.
    """
    of_value = {graph.arguments[k]: quantum for k, quantum in (quanta or {}).items()}
    uneven, work, links = uneven_sizes(graph, devices), Work(graph, rules), Links(graph, rules)
    seen: set[tuple[int, int]] = set()
    for value in dict.fromkeys((*of_value, *graph.arguments, *work.largest())):
        quantum = of_value.get(value, 1)
        for dim, size in enumerate(graph.values[value].shape):
            wanted = padded_for(size, devices, quantum) if quantum > 1 else uneven.get(size)
            if wanted is None or (value, dim) in seen:
                continue
            extent = ((size, wanted[0]),)
            extents = links.spread({(value, dim): extent})
            seen |= {(other, d) for other, found in extents.items() for d, of in enumerate(found) if of}
            ops = {op.index: op for each in extents for op in links.ops.get(each, ())}
            shares = work.shares(ops.values())
            found = Class(value, dim, extent, wanted[1], *shares, arguments_of(graph, extents), tuple(sorted(ops)), quantum)
            if quantum > 1 or max(found.share, found.memory) >= MATTERS:
                yield found


def arguments_of(graph: Graph, extents: Mapping[int, Extents]) -> tuple[tuple[int, int, Extent], ...]:
    """The positions of arguments with padding, each with the dimension and its extent."""
    padded = ((k, extents[value]) for k, value in enumerate(graph.arguments) if value in extents)
    return tuple((k, dim, of) for k, found in padded for dim, of in enumerate(found) if of)


class Work:
    """The work of a program's operations, and the bytes of its values."""

    def __init__(self, graph: Graph, rules: Sequence[Rule | None]):
        self.graph, self.rules, self.free = graph, rules, free_values(graph)
        self.products = {op.index: self._flops(op) for op in graph.walk() if is_matrix(op.primitive) or op.kernel is not None}
        self.flops = sum(self.products.values())
        self.bytes = sum(self.nbytes(op) for op in graph.walk() if not op.bodies)

    def _flops(self, op: Op) -> float:
        return op.trips * op_flops(op, self.rules[op.index], self.graph.values)

    def nbytes(self, op: Op) -> float:
        """The bytes that an operation makes in a step: none of constants, and where it only shows its operand in another shape."""
        if primitive(op.primitive).work == "none":
            return 0.0
        return op.trips * sum(self.graph.values[value].nbytes for value in op.results if not self.free[value])

    def largest(self) -> list[int]:
        """The results of what is much of the work, in program order."""
        much = [op for op in self.graph.walk() if self.products.get(op.index, 0.0) >= MATTERS * self.flops > 0]
        much += [op for op in self.graph.walk() if not op.bodies and self.nbytes(op) >= MATTERS * self.bytes > 0]
        return [value for op in much for value in (*op.operands, *op.results)]

    def shares(self, ops: Collection[Op]) -> tuple[float, float]:
        """The shares of the work, and of the bytes that are made, of some operations."""
        flops = sum(self.products.get(op.index, 0.0) for op in ops)
        nbytes = sum(self.nbytes(op) for op in ops)
        return flops / (self.flops or 1.0), nbytes / (self.bytes or 1.0)


def more_work(graph: Graph, rules: Sequence[Rule | None], value: int, dim: int, of: Extent) -> float:
    """By what fraction a step's work grows where a dimension is padded, and those that belong to it."""
    links = Links(graph, rules)
    ops = {op.index: op for each in links.spread({(value, dim): of}) for op in links.ops.get(each, ())}
    return (padded_size(0, of) / math.prod(size for size, _ in of) - 1) * Work(graph, rules).shares(ops.values())[0]


def repeated(found: Class, work: Work, assignment: Assignment) -> float:
    """The share of the step's work, or of the bytes that it makes, of operations that have a dimension and that devices do alike."""
    graph, n = work.graph, assignment.mesh.size
    flops = nbytes = 0.0
    for op in (graph.walk()[index] for index in found.ops):
        parts = math.prod(size for (factor, _), size in zip(assignment.choice(op.index), assignment.mesh.sizes, strict=True) if factor >= 0)
        flops += work.products.get(op.index, 0.0) * (1 - parts / n)
        nbytes += work.nbytes(op) * (1 - parts / n)
    return max(flops / (work.flops or 1.0), nbytes / (work.bytes or 1.0))


def is_promising(found: Class, graph: Graph, devices: int) -> bool:
    """Whether a dimension that grows by much is worth a try: with the examples it cannot use all devices otherwise."""
    if max(found.share, found.memory) < LARGE_PART:
        return False
    examples = graph.examples[0] if graph.examples is not None else range(len(graph.arguments))
    sizes = [shape[0] for k in examples if (shape := graph.values[graph.arguments[k]].shape)]
    of_examples = {k for k, dim, _ in found.arguments if dim == 0} & set(examples)
    batch = 1 if of_examples else max((math.gcd(size, devices) for size in sizes), default=1)
    return math.gcd(found.size, devices) * batch < devices

