"""A step whose later part reads what comes of all examples in an earlier one: several pipelines, one after the other.

Each pass over the microbatches (`autoshard.microbatch.passes_of`) is cut, searched and run as a pipeline of its own on the same devices.
What a pass hands on stays where its stage has it; where a later one has it elsewhere, or in another layout, it is sent between the two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from autoshard.microbatch import Pass
from autoshard.pipeline.run import Pipelined
from autoshard.pipeline.schedule import Task
from autoshard.pipeline.sending import is_here, put, sending
from autoshard.progress import Progress, part
from autoshard.render import progress_line

Home = tuple[int, int]
"""The number of a pass, and a position among its arguments."""


def homes_of(passes: Sequence[Pass]) -> list[Home]:
    """Per argument of the step the pass that has it between steps: the last if it reads or replaces it, else the first that reads it."""
    last, graph = len(passes) - 1, passes[-1].traced.graph
    own = [k for k in passes[-1].operands if isinstance(k, int)]
    read = {value for op in graph.ops for value in op.operands} | set(graph.results)
    replaced = {argument for _, argument in graph.aliases}
    first = {k: (number, at) for number, each in reversed([*enumerate(passes[:-1])]) for at, k in enumerate(each.operands)}
    return [(last, k) if graph.arguments[k] in read or k in replaced else first.get(k, (last, k)) for k in own]


class PipelinedPasses:
    """A step on flat arguments and results that runs as several pipelines.

    Attributes:
        passes, runs: its parts.
        in_shardings, out_shardings: of the step's flat arguments and results.
    """

    def __init__(self, passes: Sequence[Pass], runs: Sequence[Pipelined]):
        self.passes, self.runs = tuple(passes), tuple(runs)
        self.in_shardings: tuple[NamedSharding, ...] = tuple(runs[number].in_shardings[at] for number, at in homes_of(passes))
        self.out_shardings: tuple[NamedSharding, ...] = runs[-1].out_shardings
        self._ways = [self._ways_of(number) for number in range(len(passes))]
        self._is_compiled = False

    @property
    def executed(self) -> tuple[tuple[int, Task], ...]:
        """The tasks that the last call started, those of each pass one after the other."""
        return tuple(each for run in self.runs for each in run.executed)

    def of_placed(self, arguments: Sequence[Any], waits: bool = False) -> list[Any]:
        """As `Pipelined.of_placed`; the first call tells what it compiles."""
        if self._is_compiled:
            return self._called(arguments, waits, [None] * len(self.runs))
        n = len(self.runs)
        with progress_line() as progress:
            results = self._called(arguments, waits, [part(progress, number / n, 1 / n) for number in range(n)])
        self._is_compiled = True
        return results

    def _called(self, arguments: Sequence[Any], waits: bool, told: Sequence[Progress | None]) -> list[Any]:
        made: list[list[Any]] = []
        for own, run, ways, progress in zip(self.passes, self.runs, self._ways, told, strict=True):
            read = (arguments[k] if isinstance(k, int) else made[k[0]][k[1]] for k in own.operands)
            made.append(run.of_placed([way(x) for way, x in zip(ways, read, strict=True)], waits, progress))
        return made[-1]

    def _ways_of(self, number: int) -> list[Callable[[Any], Any]]:
        """How a pass gets each of its arguments."""
        own, run, found = self.passes[number], self.runs[number], []
        for k, target, variable in zip(own.operands, run.in_shardings, own.traced.jaxpr.jaxpr.invars, strict=True):
            source = self.in_shardings[k] if isinstance(k, int) else self.runs[k[0]].out_shardings[k[1]]
            found.append(_way(source, target, variable.aval))
        return found


def _way(source: NamedSharding, target: NamedSharding, aval: Any) -> Callable[[Any], Any]:
    """The function that brings an array from one sharding to another."""
    if source == target or source.is_equivalent_to(target, aval.ndim):
        return lambda x: x
    if source.is_fully_addressable and target.is_fully_addressable:
        return lambda x: put(x, target)
    if source.is_fully_replicated and source.device_set >= target.device_set:  # each process has it
        return partial(_of_whole, target=target, shape=aval.shape)
    way, is_there = sending(source, target, aval.shape, aval.dtype), is_here(source)
    return lambda x: way(x if is_there else None)


def _of_whole(x: Any, target: NamedSharding, shape: tuple[int, ...]) -> Any:
    """An array of one that each process has whole; None in processes that have no part of it."""
    if not is_here(target):
        return None
    whole = x.addressable_data(0)
    return jax.make_array_from_callback(shape, target, lambda index: whole[index])
