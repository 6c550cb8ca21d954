"""The memory of a device over a step, by what the buffers are: the curve of which the predicted peak is the highest point."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autoshard.compilers.buffers import Buffers
from autoshard.compilers.kernel_order import usage
from autoshard.explanation import Judged
from autoshard.explanation.groups import accumulated, argument_groups, waiting
from autoshard.explanation.layers import layer_of, line_of, pass_of
from autoshard.ir import Op
from autoshard.ir.naming import starred

GROUPS = ("parameters", "optimizer state", "inputs", "activations", "gradients", "temporaries")
MOST_POINTS = 1200  # of the curve; each is the fullest moment of its stretch


@dataclass(frozen=True, slots=True)
class Moment:
    """A moment of the step: its number, what runs, and the bytes of each of `GROUPS`."""

    number: int
    at: str
    bytes: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Alive:
    """Buffers of one name at the fullest moment: their group, bytes on a device, and how many."""

    name: str
    group: str
    bytes: float
    n: int


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """The bytes of a device over a step.

    Attributes:
        moments: some, in the order of the program; the fullest one is among them.
        n_moments: how many there are; each kernel has two, in which it reads and writes.
        peak: the position of the fullest in ``moments``.
        alive: what is held then, the most bytes first.
        fixed: per moment the bytes that no larger batch makes more: state, what is gathered of it, and its gradients.
    """

    moments: tuple[Moment, ...]
    n_moments: int
    peak: int
    alive: tuple[Alive, ...]
    fixed: tuple[float, ...]


def memory_curve(judged: Judged) -> MemoryCurve:
    """The curve of a strategy's program: in the order of kernels that holds most, if the compiler may take one of several.

    Where that order would take more memory than the compiler lets it, all that is alive is shown with an equal share less.
    """
    facts, judgement = judged.facts, judged.judgement
    orders = facts.compiler.buffers(facts, judged.record.assignment, judgement.copies, judgement.partials)
    held = max(orders, key=lambda each: each.usage.max())
    owners = list(_owners(judged, held))
    kinds = np.array([GROUPS.index(group) for group, _ in owners])
    by_group = np.stack([usage(held.times.moments, np.where(kinds == k, held.held, 0.0), held.born, held.dies) for k in range(len(GROUPS))])
    fixed = usage(held.times.moments, np.where(list(_fixed(judged, held)), held.held, 0.0), held.born, held.dies)
    within = np.minimum(held.usage / np.maximum(by_group.sum(axis=0), 1.0), 1.0)
    by_group *= within
    chosen = _chosen(held.usage[: max(held.times.moments, 1)])
    running = _running(held, facts.graph.walk())
    moments = tuple(Moment(int(k), running(int(k)), tuple(map(float, by_group[:, k]))) for k in chosen)
    fullest = int(held.usage.argmax())
    sums: dict[tuple[str, str], list[float]] = defaultdict(list)
    for k in np.flatnonzero((held.born <= fullest) & (held.dies > fullest) & (held.held > 0)):
        sums[owners[k]].append(float(held.held[k] * within[fullest]))
    alive = [Alive(name, group, sum(sizes), len(sizes)) for (group, name), sizes in sums.items()]
    ranked = tuple(sorted(alive, key=lambda each: (-each.bytes, each.group, each.name)))
    peak = int(np.flatnonzero(chosen == fullest)[0])
    return MemoryCurve(moments, held.times.moments, peak, ranked, tuple(map(float, (fixed * within)[chosen])))


def _chosen(usage: np.ndarray) -> np.ndarray:
    """The fullest moment of each of at most `MOST_POINTS` stretches of the step."""
    bounds = np.unique(np.linspace(0, len(usage), MOST_POINTS + 1).astype(int))
    return np.array([low + int(usage[low:high].argmax()) for low, high in pairwise(bounds)])


def _running(held: Buffers, ops: tuple[Op, ...]) -> Callable[[int], str]:
    """The line whose kernel runs at a moment."""
    starts = np.array(held.times.starts[: len(ops)])
    order = np.argsort(starts, kind="stable")
    ordered = starts[order]

    def running(moment: int) -> str:
        k = int(np.searchsorted(ordered, moment, side="right")) - 1
        return f"{pass_of(ops[order[k]])}, {line_of(ops[order[k]].origin)}" if k >= 0 else "start of the step"

    return running


def _fixed(judged: Judged, held: Buffers) -> Iterable[bool]:
    """Per buffer whether it is of the state's size rather than of the batch's."""
    graph = judged.facts.graph
    state = {graph.arguments[argument] for argument in graph.state}
    shapes = {shape for value in state for shape in (graph.values[value].shape, graph.values[value].shape[1:])}
    yield from (value in state or graph.values[value].shape in shapes for value in (*held.times.values, *held.copies))
    yield from (True for _ in held.partials)
    yield from (False for _ in range(len(held.held) - len(held.times.values) - len(held.copies) - len(held.partials)))


def _owners(judged: Judged, held: Buffers) -> Iterable[tuple[str, str]]:
    """Group and name of each buffer."""
    facts = judged.facts
    graph, arguments = facts.graph, _argument_kinds(judged)
    paths = dict(zip(graph.arguments, graph.argument_paths, strict=True))
    waits, sums = waiting(held.times, graph.walk(), facts.names.maker), accumulated(graph)

    def place(op: Op | None) -> str:
        return "constants" if op is None else f"{layer_of(op.origin)}, {line_of(op.origin)}"

    def made(value: int) -> tuple[str, str]:
        op = facts.names.maker(value)
        if op is None:
            return "temporaries", place(op)
        if pass_of(op) == "backward" or graph.values[value].shape in sums.get(op, ()):
            return "gradients", place(op)
        return ("activations" if value in waits else "temporaries"), place(op)

    new = {graph.results[result]: graph.arguments[argument] for result, argument in graph.aliases}
    for value in held.times.values:
        of = new.get(value)
        if value in paths:
            yield arguments[value], starred(paths[value])
        else:
            yield made(value) if of is None else (arguments[of], f"new value of {starred(paths[of])}")
    for value in held.copies:
        yield "temporaries", "copy of " + (starred(paths[value]) if value in paths else place(facts.names.maker(value)))
    for op in held.partials:
        group = "gradients" if pass_of(graph.walk()[op]) == "backward" else "temporaries"
        yield group, "partial sums of " + place(graph.walk()[op])
    for _ in range(len(held.held) - len(held.times.values) - len(held.copies) - len(held.partials)):
        yield "temporaries", "working memory of kernels"


def _argument_kinds(judged: Judged) -> dict[int, str]:
    """The group of each argument, by its value.

    State that other state mirrors deeper in the tree, as an optimizer's moments do a parameter, are parameters; so is other state that the
    forward pass reads, or any of a program without derivatives. What remains of the state is the optimizer's.
    """
    facts, record = judged.facts, judged.record
    graph, ops = facts.graph, facts.graph.walk()
    state = graph.state
    mirrored: dict[str, str] = {}
    for group in argument_groups([tensor for at, tensor in enumerate(record.arguments) if at in state], record.mesh):
        if group.alike and group.shape:
            mirrored |= dict.fromkeys(group.paths[: group.n], "parameters") | dict.fromkeys(group.paths[group.n :], "optimizer state")
    trained = any(pass_of(op) == "backward" for op in ops)

    def kind(at: int, value: int) -> str:
        if at not in state:
            return "inputs"
        forward = any(pass_of(ops[op]) == "forward" for op in facts.readers[value])
        return mirrored.get(graph.argument_paths[at]) or ("parameters" if forward or not trained else "optimizer state")

    return {value: kind(at, value) for at, value in enumerate(graph.arguments)}
