"""The program as a graph that folds: passes, layers, source lines and operations, each coloured by the axes that its values are split over.

Layers that differ by a number only are one node, and so are the operations of a line: a node says how often it is repeated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from autoshard.explanation import Judged
from autoshard.explanation.layers import PASSES, layer_of, line_of, pass_of
from autoshard.ir import Graph, layout_to_spec
from autoshard.ir.words import array_type, spec_words

Path = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Node:
    """A part of the program.

    Attributes:
        name: of the pass, the layer, the line or the operation.
        kind: ``pass``, ``layer``, ``line`` or ``op``.
        row: its row among its siblings: after all those whose values it reads, but for those that repeat in turns with it.
        repeats: how often it is in the program.
        compute_seconds, communication_seconds: of a step.
        axes: per mesh axis the share of its values' bytes that are split over it.
        result: dtype, shape and spec of what it makes, where that is the same each time; for operations only.
        children: of which it consists.
        edges: (position, position, bytes) for each pair of children of which the second reads values of the first.
    """

    name: str
    kind: str
    row: int
    repeats: int
    compute_seconds: float
    communication_seconds: float
    axes: tuple[float, ...]
    result: str = ""
    children: tuple[Node, ...] = ()
    edges: tuple[tuple[int, int, float], ...] = ()


@dataclass(slots=True)
class _Sums:
    """What is added up over the operations of a node."""

    first: int
    compute: float = 0.0
    communication: float = 0.0
    bytes: float = 0.0
    split: list[float] = field(default_factory=list)
    results: set[str] = field(default_factory=set)
    ops: Counter[tuple] = field(default_factory=Counter)
    children: dict[str, Path] = field(default_factory=dict)
    edges: dict[tuple[Path, Path], float] = field(default_factory=lambda: defaultdict(float))


def program(judged: Judged) -> Node:
    """The whole program, as one node."""
    graph, axes = judged.facts.graph, range(len(judged.model.mesh.sizes))
    sent: dict[int, float] = defaultdict(float)
    for each in judged.judgement.cost.collectives:
        if each.op is not None:
            sent[each.op.index] += each.count * each.seconds
    paths: dict[int, Path] = {}
    sums: dict[Path, _Sums] = {}
    for op in graph.walk():
        if op.bodies or judged.facts.idle[op.index]:
            continue
        paths[op.index] = path = (pass_of(op), *layer_of(op.origin).split("/"), line_of(op.origin), op.primitive)
        told = [_Told.of(judged, value) for value in op.results]
        for depth in range(len(path) + 1):
            here = sums.setdefault(path[:depth], _Sums(op.index, split=[0.0 for _ in axes]))
            here.compute += judged.seconds.get(op, 0.0)
            here.communication += sent.get(op.index, 0.0)
            here.ops[op.primitive, line_of(op.origin), op.origin.columns] += 1
            for one in told:
                here.bytes += one.nbytes
                here.split = [total + one.nbytes * split for total, split in zip(here.split, one.split, strict=True)]
            if depth < len(path):
                here.children.setdefault(path[depth], path[: depth + 1])
            elif told:
                here.results.add(told[0].text)
    for source, target, nbytes in _reads(graph, paths):
        common = next(k for k in range(len(source) + 1) if source[: k + 1] != target[: k + 1] or k == len(source))
        if common < len(source):
            sums[source[:common]].edges[source[: common + 1], target[: common + 1]] += nbytes
    return _node((), 0, sums) if sums else Node("", "program", 0, 1, 0.0, 0.0, tuple(0.0 for _ in axes))


@dataclass(frozen=True, slots=True)
class _Told:
    """A value: its bytes, whether each axis splits it, and its type with its spec."""

    nbytes: float
    split: tuple[bool, ...]
    text: str

    @classmethod
    def of(cls, judged: Judged, number: int) -> _Told:
        value, layout = judged.facts.graph.values[number], judged.record.assignment.layout(number)
        spec = layout_to_spec(layout, judged.model.mesh.names, value.rank)
        return cls(value.nbytes, tuple(dim >= 0 for dim in layout), f"{array_type(value.dtype, value.shape)} {spec_words(spec)}")


def _reads(graph: Graph, paths: Mapping[int, Path]) -> Iterable[tuple[Path, Path, float]]:
    """Source, target and bytes of the values that operations read of others, through the holders of loops too."""
    makers = {value: op.index for op in graph.walk() if not op.bodies for value in op.results}
    sources: dict[int, list[int]] = defaultdict(list)
    for op in graph.walk():
        for holder in op.holders:
            for view in holder.views:
                sources[view].append(holder.value)
            sources[holder.value] += [flow.value for flow in holder.sources]
    found: dict[int, frozenset[int]] = {}

    def made_by(value: int) -> frozenset[int]:
        if value not in sources:
            return frozenset((makers[value],)) if value in makers else frozenset()
        if value not in found:
            seen, ahead, ops = {value}, [value], set()
            while ahead:
                one = ahead.pop()
                ops.update((makers[one],) if one in makers else ())
                new = [source for source in sources.get(one, ()) if source not in seen]
                seen.update(new)
                ahead += new
            found[value] = frozenset(ops)
        return found[value]

    for op in graph.walk():
        for value in dict.fromkeys(op.operands) if op.index in paths else ():
            for maker in made_by(value):
                if maker in paths:
                    yield paths[maker], paths[op.index], graph.values[value].nbytes


def _node(path: Path, row: int, sums: Mapping[Path, _Sums]) -> Node:
    here = sums[path]
    children = sorted(here.children.values(), key=lambda child: _order(child, sums))
    rows = _rows(children, here.edges)
    position = {child: k for k, child in enumerate(children)}
    kind = ("program", "pass")[len(path)] if len(path) < 2 else "op" if not children else "line" if not _has_lines(path, sums) else "layer"
    return Node(
        name=path[-1] if path else "",
        kind=kind,
        row=row,
        repeats=min(here.ops.values()),
        compute_seconds=here.compute,
        communication_seconds=here.communication,
        axes=tuple(split / here.bytes if here.bytes else 0.0 for split in here.split),
        result=next(iter(here.results)) if len(here.results) == 1 else "",
        children=tuple(_node(child, rows[child], sums) for child in children),
        edges=tuple((position[a], position[b], nbytes) for (a, b), nbytes in sorted(here.edges.items())),
    )


def _has_lines(path: Path, sums: Mapping[Path, _Sums]) -> bool:
    """Whether children of a node have children themselves."""
    return any(sums[child].children for child in sums[path].children.values())


def _order(path: Path, sums: Mapping[Path, _Sums]) -> tuple[int, int]:
    """Passes in their order, all else by its first operation."""
    return PASSES.index(path[0]) if len(path) == 1 else 0, sums[path].first


def _rows(children: Sequence[Path], edges: Mapping[tuple[Path, Path], float]) -> dict[Path, int]:
    """Per child its row: after those that it reads; those that read each other in turns share a row."""
    import networkx as nx

    graph = nx.DiGraph()
    graph.add_nodes_from(children)
    graph.add_edges_from(edges)
    folded = nx.condensation(graph)
    found = {}
    for row, generation in enumerate(nx.topological_generations(folded)):
        for group in generation:
            found.update(dict.fromkeys(folded.nodes[group]["members"], row))
    return found
