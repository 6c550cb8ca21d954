"""The program graph: values, ops in program order, and control flow as ops with bodies; without JAX.

Values are numbered over the whole program, bodies included; so are ops, depth first in program order (an op before the
ops of its bodies).

A control-flow op has no rule. Its `Holder`s say how layouts flow through it: a holder is a value that keeps one layout
throughout the op (a loop carry, a scanned slice, a branch operand); its `sources` are the values that are resharded to
that layout, its `views` the values that share it.

A user's `jax.shard_map` is part of the program around it. An op of its own takes each operand apart into shards, its body's ops are on the
arrays of one device, whose values have the shapes of shards, and an op puts each result together.
"""

from __future__ import annotations

import ntpath
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from autoshard.ir.kernel import Kernel
from autoshard.primitives import is_loop

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, slots=True)
class Value:
    """One array of the program.

    Attributes:
        shape: the whole (unsharded) shape.
        dtype: the dtype's name, such as ``float32``; ``key<fry>`` for typed keys.
        itemsize: bytes per element, fractional for sub-byte dtypes.
        on_host: whether it is in the memory of the device's host.
    """

    shape: tuple[int, ...]
    dtype: str
    itemsize: float
    on_host: bool = False

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        n = 1
        for dim in self.shape:
            n *= dim
        return n

    @property
    def nbytes(self) -> float:
        return self.size * self.itemsize


@dataclass(frozen=True, slots=True)
class Origin:
    """The source location of an op in the user's program.

    Attributes:
        columns: the first line's start column of the expression, its last line, and its end column there; empty where they are not known.
    """

    file: str = ""
    line: int = 0
    function: str = ""
    name_stack: str = ""
    columns: tuple[int, ...] = field(default=(), compare=False)

    @property
    def place(self) -> str:
        """The file's name and the line, ``gpt.py:41``; empty where they are not known."""
        return f"{ntpath.basename(self.file)}:{self.line}" if self.file else ""  # of files of any system

    def __str__(self) -> str:
        place = f"{self.file}:{self.line}" if self.file else "unknown source"
        return f"{place} ({self.function})" if self.function else place


@dataclass(frozen=True, slots=True)
class Flow:
    """A value read into a holder.

    Attributes:
        value: the number of the value.
        shift: how many leading dimensions the value has that the holder lacks (1: a scanned input; -1: a scanned output's slice).
        inside: whether it is read in the body, once a trip, rather than once before the op.
    """

    value: int
    shift: int = 0
    inside: bool = False


@dataclass(frozen=True, slots=True)
class Holder:
    """A value that keeps one layout over the life of a control-flow op."""

    value: int
    sources: tuple[Flow, ...]
    views: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Body:
    """The sub-program of a control-flow op; ``trips`` is how often it runs in one execution of the op."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: tuple[Op, ...]
    trips: int = 1


@dataclass(frozen=True, slots=True, eq=False)
class Op:
    """One operation.

    Attributes:
        index: its number, depth first over the whole program.
        primitive: the JAX primitive's name.
        operands: value numbers, literals included.
        results: value numbers, unread results included.
        params: the primitive's parameters; only rules and the lowering read them.
        origin: source line and name stack.
        path: the position of its equation: equation index, then (body, equation index) for each nesting level.
        trips: executions in one step: the product of the enclosing loops' trip counts.
        bodies: sub-programs of a control-flow op.
        holders: how layouts flow into and out of the bodies.
        mapped: of an op of a user's shard_map, the names and sizes of the axes of its mesh; empty for all others.
        kernel: the work of a user's kernel, where its body can be read.
        equation: the traced equation; only the fallback rule (`autoshard.rules.shardy`) reads it, to lower it.
    """

    index: int
    primitive: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    params: Mapping[str, Any]
    origin: Origin
    path: tuple[int, ...]
    trips: int = 1
    bodies: tuple[Body, ...] = ()
    holders: tuple[Holder, ...] = ()
    equation: Any = field(default=None, repr=False)
    mapped: tuple[tuple[str, int], ...] = ()
    kernel: Kernel | None = None

    def flow_trips(self, flow: Flow) -> int:
        """How often one step reads a value into one of the op's holders."""
        return self.trips * (max(body.trips for body in self.bodies) if flow.inside else 1)

    def walk(self) -> Iterator[Op]:
        """The op, then those of its bodies, in program order."""
        yield self
        for body in self.bodies:
            for op in body.ops:
                yield from op.walk()


def is_transfer(op: Op) -> bool:
    """Whether an op moves a value between a device's memory and its host's: a `jax.device_put` to a `jax.memory.Space`."""
    return op.primitive == "device_put" and any(isinstance(place, Enum) for place in op.params["devices"])


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """A traced program.

    Attributes:
        name: the function's name.
        values: every array, by number.
        ops: the top-level ops in program order, without dead code.
        arguments, argument_paths: value number and path (``state.params['w']``) of each argument leaf.
        results, result_paths: the same for the results; a value may be returned twice.
        constants: values captured by the function.
        literals, written: scalar constants written in the program, and their values where these are known.
        aliases: pairs (result position, argument position) of state that replaces an argument.
        donated: argument positions whose memory may be reused.
        examples: the argument positions that may hold examples along dimension 0, and along dimension 1; None: all that are not replaced.
        fingerprint: a hash, equal for equal programs, independent of names and process.
        assumptions: assumptions of the trace (the trip count of a ``while``, say), in words.
    """

    name: str
    values: tuple[Value, ...]
    ops: tuple[Op, ...]
    arguments: tuple[int, ...]
    argument_paths: tuple[str, ...]
    results: tuple[int, ...]
    result_paths: tuple[str, ...]
    constants: tuple[int, ...] = ()
    literals: tuple[int, ...] = ()
    written: tuple[Any, ...] = field(default=(), repr=False)
    aliases: tuple[tuple[int, int], ...] = ()
    donated: tuple[int, ...] = ()
    examples: tuple[frozenset[int], frozenset[int]] | None = None
    fingerprint: str = ""
    assumptions: tuple[str, ...] = ()
    _walked: tuple[Op, ...] = field(default=(), repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_walked", tuple(chain.from_iterable(op.walk() for op in self.ops)))

    def walk(self) -> tuple[Op, ...]:
        """Every op, bodies included, in program order: ``walk()[i].index == i``."""
        return self._walked

    @property
    def state(self) -> frozenset[int]:
        """The positions of arguments that a result replaces, and that hold no examples."""
        return frozenset(argument for _, argument in self.aliases).difference(*(self.examples or ()))

    def without_examples(self, dim: int) -> frozenset[int]:
        """The arguments, by value number, that hold no examples along dimension 0 or 1."""
        apart = self.state if self.examples is None else {*range(len(self.arguments))} - self.examples[dim]
        return frozenset(self.arguments[position] for position in apart)

    def examples_at(self, places: Sequence[Sequence[int]]) -> tuple[frozenset[int], frozenset[int]] | None:
        """`examples` of a program whose arguments are at other positions: ``places`` has those of each of these."""
        if self.examples is None:
            return None
        first, second = (frozenset(place for position in found for place in places[position]) for found in self.examples)
        return first, second

    def with_leaves(self, arguments: Sequence[Sequence[int]], results: Sequence[Sequence[int]]) -> Graph:
        """The graph with the names, aliases, donations and examples of a program whose arguments and results are at other positions.

        Args:
            arguments, results: of each of these the positions of its parts there, which have its name; none where it is left out.
        """
        return replace(
            self,
            argument_paths=tuple(path for path, places in zip(self.argument_paths, arguments, strict=True) for _ in places),
            result_paths=tuple(path for path, places in zip(self.result_paths, results, strict=True) for _ in places),
            aliases=tuple(sorted(pair for k, argument in self.aliases for pair in zip(results[k], arguments[argument], strict=False))),
            donated=tuple(place for argument in self.donated for place in arguments[argument]),
            examples=self.examples_at(arguments),
        )

    @property
    def zeros(self) -> frozenset[int]:
        """The values all of whose elements are written as 0: literals, and what broadcasts and casts make of them."""
        found = {literal for literal, written in zip(self.literals, self.written, strict=False) if not np.any(written)}
        for op in self.walk():
            if op.primitive in ("broadcast_in_dim", "convert_element_type") and op.operands[0] in found:
                found.update(op.results)
        return frozenset(found)

    def loop_constants(self) -> Iterator[Holder]:
        """The holders of loop-invariant values: one value flows in, neither sliced nor carried."""
        holders = (holder for op in self.walk() if is_loop(op.primitive) for holder in op.holders)
        return (holder for holder in holders if len(holder.sources) == 1 and not holder.sources[0].shift)

    def to_networkx(self) -> nx.MultiDiGraph[Any]:
        """The program as a directed multigraph: nodes ``("op", i)``, ``("argument", i)`` and ``("result", i)``, an edge for each read."""
        import networkx as nx

        graph = nx.MultiDiGraph(name=self.name, fingerprint=self.fingerprint)
        producer: dict[int, tuple[str, int]] = {}
        for position, value in enumerate(self.arguments):
            graph.add_node(("argument", position), label=self.argument_paths[position], shape=self.values[value].shape)
            producer[value] = ("argument", position)
        for op in self.walk():
            node = ("op", op.index)
            graph.add_node(node, label=op.primitive, trips=op.trips, origin=str(op.origin))
            for result in op.results:
                producer.setdefault(result, node)
            for holder in op.holders:
                producer.setdefault(holder.value, node)
                for view in holder.views:
                    producer.setdefault(view, node)
        for op in self.walk():
            for value in dict.fromkeys((*op.operands, *(flow.value for h in op.holders for flow in h.sources))):
                if value in producer and producer[value] != ("op", op.index):
                    graph.add_edge(producer[value], ("op", op.index), value=value, shape=self.values[value].shape)
        for position, value in enumerate(self.results):
            graph.add_node(("result", position), label=self.result_paths[position], shape=self.values[value].shape)
            if value in producer:
                graph.add_edge(producer[value], ("result", position), value=value, shape=self.values[value].shape)
        return graph
