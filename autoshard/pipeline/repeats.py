"""Repeated layers of a program: where an operation sequence repeats, and the same program with fewer of the repetitions.

A train step of equal layers has several *runs*: sequences of operations that repeat once a layer, such as the forward pass, the backward
pass and each traversal of an optimizer over the weights. `runs_of` finds them from the operations alone. `shortened` removes the same
layers from all runs: what the layers after them read is then made by the layers before them. Searches of two such programs give the costs
of a layer and of all the rest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from autoshard.ir import Graph, Op
from autoshard.pipeline.micro import Evaluator
from autoshard.pipeline.plans import Shorter
from autoshard.trace import Traced, rebuilt, types_of
from autoshard.trace.fingerprint import Canonical

FEWER = 2  # layers of the shorter of two programs
LEAST = 4  # repetitions; with fewer, a program is no deep one
_CANDIDATES = 64  # periods that are tried
_TOGETHER = (1, 4, 16)  # tokens; a single one may occur several times in a layer


@dataclass(frozen=True, slots=True)
class Run:
    """A sequence of a graph's top-level ops that repeats.

    Attributes:
        start: the position of the first op.
        period: ops of one repetition.
        length: ops in all; the last repetition may be a part of one.
    """

    start: int
    period: int
    length: int

    @property
    def count(self) -> int:
        """The number of whole repetitions."""
        return self.length // self.period

    @property
    def stop(self) -> int:
        """The position after the last op."""
        return self.start + self.length


def runs_of(tokens: Sequence[int], least: int = LEAST) -> tuple[Run, ...]:
    """Disjoint sequences of tokens that repeat at least ``least`` times, in order; of those that overlap the longest, of the least period.

    >>> runs_of([9, 1, 2, 1, 2, 1, 2, 1, 2, 8])
    (Run(start=1, period=2, length=8),)
    """
    array = np.asarray(tokens, dtype=np.int64)
    found = [run for period in _periods(array, least) for run in _of_period(array, period, least)]
    found.sort(key=lambda run: (-run.length, run.period, run.start))
    free = np.ones(len(array), dtype=bool)
    kept = []
    for run in found:
        if free[run.start : run.stop].all():
            kept.append(run)
            free[run.start : run.stop] = False
    return tuple(sorted(kept, key=lambda run: run.start))


def _periods(tokens: np.ndarray, least: int) -> list[int]:
    """The most frequent distances from a few tokens in a row to their next occurrence."""
    distances: Counter[int] = Counter()
    for n in _TOGETHER:
        if n <= len(tokens):
            rows = np.lib.stride_tricks.sliding_window_view(tokens, n)
            numbers = np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)
            order = np.argsort(numbers, kind="stable")
            same = numbers[order][1:] == numbers[order][:-1]
            distances.update((order[1:] - order[:-1])[same].tolist())
    return [period for period, n in distances.most_common(_CANDIDATES) if n >= least - 1]


def _of_period(tokens: np.ndarray, period: int, least: int) -> Iterator[Run]:
    equal = np.concatenate(([False], tokens[:-period] == tokens[period:], [False]))
    edges = np.flatnonzero(equal[1:] != equal[:-1])
    for begin, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        if (end - begin + period) // period >= least:
            yield Run(begin, period, end - begin + period)


# -- layers ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class RepeatedLayers:
    """The layers of a program that are written one after the other.

    Attributes:
        graph: the program's.
        runs: all runs, in order.
        forward: the first run of as many repetitions as the longest one has: the layers in the order in which data passes through them.
    """

    graph: Graph
    runs: tuple[Run, ...]
    forward: Run
    are_scanned = False

    @property
    def count(self) -> int:
        """The number of layers, the first and last of which may be incomplete."""
        return self.forward.count

    @property
    def handed_on_bytes(self) -> float:
        """The bytes of what a layer computes and the next one reads, at the least of the places where layers may be told apart."""
        run, graph = self.forward, self.graph
        place = {value: k for k, op in enumerate(graph.ops[run.start : run.stop]) for value in op.results}
        last = {value: k for k, op in enumerate(graph.ops[run.start : run.stop]) for value in op.operands if value in place}
        middle = run.period * (run.count // 2)
        crossing = [
            sum(graph.values[value].nbytes for value, end in last.items() if place[value] < border <= end)
            for border in range(middle, middle + run.period)
        ]
        return float(min(crossing))

    def shorter(self, traced: Traced) -> Shorter | None:
        """The program with a few of its layers, and with one more; None where layers cannot be taken out."""
        fewer, more = (shortened(traced, self, n) for n in (FEWER, FEWER + 1))
        return None if fewer is None or more is None else Shorter((FEWER, FEWER + 1), (fewer, more))


def layers_of(graph: Graph) -> RepeatedLayers | None:
    """The repeated layers of a program; None where it has none that are most of its operations."""
    canonical, numbers = Canonical(), {}
    tokens = [numbers.setdefault(_token(op, graph, canonical), len(numbers)) for op in graph.ops]
    runs = runs_of(tokens)
    if not runs or 2 * sum(run.length for run in runs) < len(tokens):
        return None
    longest = max(runs, key=lambda run: run.length)
    forward = next(run for run in runs if abs(run.count - longest.count) <= 1 and run.period > 1)
    return RepeatedLayers(graph, runs, forward)


def _token(op: Op, graph: Graph, canonical: Canonical) -> tuple:
    shapes = tuple((graph.values[value].shape, graph.values[value].dtype) for value in (*op.operands, *op.results))
    return op.primitive, canonical.params(op.params), shapes


@dataclass(frozen=True, slots=True)
class _Window:
    """Consecutive ops of some layers of a run, which are removed.

    Attributes:
        start, stop: positions of the first op and after the last one.
        layer: ops of one layer.
    """

    start: int
    stop: int
    layer: int

    def replacement(self, position: int) -> int:
        """The op of the last layer before the window that is the same as the one at a position in it."""
        return self.start - self.layer + (position - self.start) % self.layer


def shortened(traced: Traced, layers: RepeatedLayers, n_kept: int) -> Traced | None:
    """The program with ``n_kept`` of its layers, without the arguments and results of the others; None where they cannot be taken out.

    Layers in the middle are removed. It costs what a program of so many layers costs; the numbers that it would compute mean nothing.
    Those with a shard_map stay, whose ops run on shards.
    """
    graph, n_removed = traced.graph, layers.count - n_kept
    if n_removed <= 0 or n_kept < 2 or any(op.mapped or op.equation is None for op in graph.ops):
        return None
    for offset in _offsets(layers.forward.period):  # layers may be cut in two between which operations: some of them fit all runs
        windows = _windows(graph, layers, n_removed, offset)
        short = None if windows is None else _without(traced, windows, n_removed)
        if short is not None:
            return short
    return None


def _offsets(period: int) -> tuple[int, ...]:
    """Places within a repetition, from its begin."""
    step = max(period // 8, 1)
    return tuple(sign * k * step for k in range(5) for sign in ((1, -1) if k else (1,)))


def _without(traced: Traced, windows: Sequence[_Window], n_removed: int) -> Traced | None:
    """The program without the ops of some windows; None where it would not be one of fewer layers."""
    graph = traced.graph
    renamed: dict[int, int] = {}
    for window in windows:
        for position in range(window.start, window.stop):
            renamed.update(zip(graph.ops[position].results, graph.ops[window.replacement(position)].results, strict=True))
    removed = {position for window in windows for position in range(window.start, window.stop)}
    ops = [op for position, op in enumerate(graph.ops) if position not in removed]
    results = [position for position, value in enumerate(graph.results) if value not in renamed]
    read = {renamed.get(value, value) for op in ops for value in op.operands} | {graph.results[position] for position in results}
    read_before = {value for op in graph.ops for value in op.operands}.union(graph.results)  # nothing tells the layer of others
    arguments = [position for position, value in enumerate(graph.arguments) if value in read or value not in read_before]
    n_gone = len(graph.arguments) - len(arguments), len(graph.results) - len(results)
    if not _is_ordered(graph, ops, renamed) or any(n % n_removed for n in n_gone) or not n_gone[0]:
        return None
    return _rebuilt(traced, ops, renamed, arguments, results)


def _windows(graph: Graph, layers: RepeatedLayers, n_removed: int, offset: int) -> list[_Window] | None:
    """What to remove from each run: of the first the layers in the middle, of the others what reads anything that is gone by then."""
    run = layers.forward
    start = run.start + run.period * ((run.count - n_removed + 1) // 2) + offset
    if not run.start + run.period <= start <= run.stop - run.period * n_removed:
        return None
    window = _Window(start, start + run.period * n_removed, run.period)
    gone = _made(graph, run, window) | _own_arguments(graph, run, window)
    others = [other for other in layers.runs if other.start > run.start]
    rest = _rest(graph, others, gone, layers.count, n_removed, [_TRIES])
    return None if rest is None else [window, *rest]


_TRIES = 300  # of windows, of all runs together


def _rest(graph: Graph, runs: Sequence[Run], gone: set[int], n_layers: int, n_removed: int, tries: list[int]) -> list[_Window] | None:
    """Windows of later runs; where a window may begin at several ops, the first with which those after it fit as well.

    An op at the border of two layers may read nothing that is gone although it makes what only a removed op reads.
    """
    if not runs:
        return []
    run, *later = runs
    touched = [k for k in range(run.start, run.stop) if not gone.isdisjoint(graph.ops[k].operands)]
    if not touched:
        return _rest(graph, later, gone, n_layers, n_removed, tries)
    layer = run.period * (round(run.count / n_layers) or 1)
    length = layer * n_removed
    first, last = max(touched[-1] + 1 - length, run.start + layer), min(touched[0], run.stop - length)
    for start in range(first, last + 1):
        tries[0] -= 1
        if tries[0] < 0:
            return None
        window = _Window(start, start + length, layer)
        rest = _rest(graph, later, gone | _made(graph, run, window), n_layers, n_removed, tries)
        if rest is not None:
            return [window, *rest]
    return None


def _made(graph: Graph, run: Run, window: _Window) -> set[int]:
    """The values that are made in a window of a run and are not handed on to the layers after it."""
    made = {value for op in graph.ops[window.start : window.stop] for value in op.results}
    return made.difference(*(op.operands for op in graph.ops[window.stop : run.stop]))


def _own_arguments(graph: Graph, run: Run, window: _Window) -> set[int]:
    """The arguments that only removed ops of a run read, such as the weights of layers."""
    inside = {value for op in graph.ops[window.start : window.stop] for value in op.operands}
    outside = {value for op in (*graph.ops[: window.start], *graph.ops[window.stop : run.stop]) for value in op.operands}
    return inside.intersection(graph.arguments) - outside


def _is_ordered(graph: Graph, ops: Sequence[Op], renamed: Mapping[int, int]) -> bool:
    """Whether each op reads only what ops before it made."""
    known = {*graph.arguments, *graph.constants, *graph.literals}
    for op in ops:
        if not known.issuperset(renamed.get(value, value) for value in op.operands):
            return False
        known.update(op.results)
    return True


def _rebuilt(traced: Traced, ops: Sequence[Op], renamed: Mapping[int, int], arguments: Sequence[int], results: Sequence[int]) -> Traced:
    """The program of some ops of a graph, with some of its arguments and results."""
    graph, closed = traced.graph, traced.jaxpr
    ops = [replace(op, operands=tuple(renamed.get(value, value) for value in op.operands)) for op in ops]

    literals = dict(zip(graph.literals, graph.written, strict=True))  # of calls, too, whose bodies read them as arguments

    def function(*given: Any) -> list[Any]:
        evaluator = Evaluator(closed, literals | dict(zip((graph.arguments[position] for position in arguments), given, strict=True)))
        evaluator.run(ops)
        return [evaluator.arrays[graph.results[position]] for position in results]

    jaxpr = jax.make_jaxpr(function)(*types_of([closed.jaxpr.invars[position] for position in arguments]))
    short = graph.with_leaves(_places(len(graph.arguments), arguments), _places(len(graph.results), results))
    return rebuilt(replace(traced, graph=short, in_tree=jax.tree.structure((0,) * len(arguments))), jaxpr)


def _places(n: int, kept: Sequence[int]) -> list[list[int]]:
    """Of ``n`` leaves the position of each among those that are kept; none of the others."""
    at = {old: [new] for new, old in enumerate(kept)}
    return [at.get(k, []) for k in range(n)]
