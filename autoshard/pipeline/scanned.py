"""Scanned layers of a program: which scans go over them, and the same program with fewer of them.

A step with fewer layers has shorter scans, over the first rows of all that is stacked along the layers (`autoshard.pipeline.layers`). So
the costs of a layer, and of all else, come from two such programs, as of layers written one after the other (`autoshard.pipeline.repeats`).
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.errors import TraceError
from autoshard.ir import Graph, Op
from autoshard.ir.scan import num_carry
from autoshard.microbatch import divisors, loop_of_batch
from autoshard.microbatch.plan import Loop
from autoshard.microbatch.work import Work
from autoshard.pipeline.layers import scans_of_layers, with_first_layers
from autoshard.pipeline.plans import Layers, Shorter
from autoshard.pipeline.repeats import LEAST, layers_of
from autoshard.rules import rules_of
from autoshard.trace import Traced

LEAST_SHARE = 0.5  # of the work of a step, that is in layers


@dataclass(frozen=True, slots=True, eq=False)
class ScannedLayers:
    """The layers of scans over stacked weights.

    Attributes:
        graph: the program's.
        scans: those of the greatest length, in order: the forward pass comes first.
        loop: the program's plan in microbatches, of any number.
    """

    graph: Graph
    scans: tuple[Op, ...]
    loop: Loop

    are_scanned = True

    @property
    def count(self) -> int:
        """The number of layers."""
        return self.scans[0].params["length"]

    @property
    def handed_on_bytes(self) -> float:
        """The bytes of what a layer computes and the next one reads."""
        first = self.scans[0]
        return float(sum(self.graph.values[value].nbytes for value in first.results[: num_carry(first.params)]))

    def shorter(self, traced: Traced) -> Shorter | None:
        """The program with two numbers of layers that divide theirs, as few as may be; None where layers cannot be taken out.

        One layer, whose stack cannot be split, is taken where there are no others.
        """
        divisors = [n for n in range(2, self.count + 1) if self.count % n == 0]
        n_fewer, n_more = divisors[:2] if len(divisors) > 1 else (1, self.count)
        fewer, more = self._first(traced, n_fewer), self._first(traced, n_more)
        return None if fewer is None or more is None else Shorter((n_fewer, n_more), (fewer, more))

    def _first(self, traced: Traced, n: int) -> Traced | None:
        """The program with its first layers alone."""
        return traced if n == self.count else with_first_layers(traced, self.loop, {op.index: self.count // n for op in self.scans})


def scanned_layers_of(traced: Traced) -> ScannedLayers | None:
    """The scanned layers of a program, which have most of its work; None where there are none."""
    graph, rules = traced.graph, rules_of(traced.graph)
    try:
        loop = loop_of_batch(traced, rules, next(n for n in divisors(traced) if n > 1))
    except (TraceError, StopIteration):
        return None
    scans, work = scans_of_layers(graph, loop), Work.of(graph)
    longest = max((op.params["length"] for op in scans), default=0)
    layers = tuple(op for op in scans if op.params["length"] == longest)
    if longest < LEAST or work.of_ops(layers, rules, graph) < LEAST_SHARE * work.of_ops(graph.ops, rules, graph):
        return None
    return ScannedLayers(graph, layers, loop)


def equal_layers_of(traced: Traced) -> Layers | None:
    """The equal layers of a program, scanned or not; None where there are none that are most of it."""
    return scanned_layers_of(traced) or layers_of(traced.graph)
