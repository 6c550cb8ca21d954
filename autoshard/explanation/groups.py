"""Tensors by group: arguments whose paths differ by indices, with those that mirror them, and the activations that a step stores."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from autoshard.compilers.kernel_order import Lifetimes
from autoshard.explanation.data import TensorGroup
from autoshard.explanation.layers import line_of, pass_of
from autoshard.explanation.program import Judged
from autoshard.ir import Graph, Mesh, Op, Spec, layout_to_spec, shard_counts, spec_to_layout
from autoshard.ir.naming import components, itemsize, numbered, starred
from autoshard.strategy import Record, TensorRecord

ACTIVATIONS = 40  # groups that are kept, the largest


def by_pattern(tensors: Sequence[TensorRecord]) -> list[tuple[str, list[TensorRecord]]]:
    """Tensors of equal shape, dtype and spec whose paths are equal but for indices, under one path: ``layers[*].qkv``."""
    total = Counter(starred(tensor.path) for tensor in tensors)
    groups: dict[tuple, list[TensorRecord]] = defaultdict(list)
    for tensor in tensors:
        groups[starred(tensor.path), tensor.shape, tensor.dtype, tensor.spec].append(tensor)
    return [(joined([t.path for t in members], len(members) == total[key[0]]), members) for key, members in groups.items()]


def joined(paths: list[str], complete: bool) -> str:
    """One path for several that differ by indices: ``*`` where they are all there are, else the indices."""
    shown = []
    for position, alternatives in enumerate(zip(*map(numbered, paths), strict=True)):
        found = sorted(set(alternatives), key=lambda text: (len(text), text))
        shown.append(found[0] if len(found) == 1 or position % 2 == 0 else "*" if complete else runs(map(int, found)))
    return "".join(shown)


def runs(numbers: Iterable[int]) -> str:
    """Whole numbers in short: ``0-3,6``; of more than four runs the ends.

    >>> runs([0, 1, 2, 3, 6]), runs(range(0, 16, 2))
    ('0-3,6', '0,2,…,14')
    """
    found: list[list[int]] = []
    for number in sorted(numbers):
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    texts = [str(low) if low == high else f"{low},{high}" if high == low + 1 else f"{low}-{high}" for low, high in found]
    return ",".join(texts if len(texts) <= 4 else [*texts[:2], "…", texts[-1]])


def alike(one: TensorRecord, other: TensorRecord) -> bool:
    """Whether two tensors have one shape, dtype and spec."""
    return (one.shape, one.dtype, one.spec) == (other.shape, other.dtype, other.spec)


def common_ending(path: str, other: str) -> bool:
    """Whether the paths end alike, but for at most two components at the start of the shorter one."""
    ours, theirs = components(path), components(other)
    common = 0
    while common < min(len(ours), len(theirs)) and ours[-1 - common] == theirs[-1 - common]:
        common += 1
    return common > 0 and min(len(ours), len(theirs)) - common <= 2


def shard_bytes(shape: Sequence[int], dtype: str, spec: Spec, mesh: Mesh) -> float:
    """The bytes of one device's shard."""
    counts = shard_counts(spec_to_layout(spec, mesh, len(shape)), len(shape), mesh.sizes)
    return itemsize(dtype) * math.prod(n / count for n, count in zip(shape, counts, strict=True))


def argument_groups(tensors: Sequence[TensorRecord], mesh: Mesh) -> tuple[TensorGroup, ...]:
    """The groups of arguments, the most bytes first; what mirrors a group deeper in the tree is counted with it.

    The moments that an optimizer keeps of a parameter have its ending, shape and spec.
    """
    found: list[TensorGroup] = []
    order = sorted(by_pattern(tensors), key=lambda group: len(components(group[0])))  # a parameter before its moments
    for path, members in order:
        first, paths = members[0], tuple(tensor.path for tensor in members)
        nbytes = len(members) * shard_bytes(first.shape, first.dtype, first.spec, mesh)
        like = next((at for at, group in enumerate(found) if _mirrors(path, first, group)), None)
        if like is None:
            found.append(TensorGroup(path, len(members), 0, first.shape, first.dtype, first.spec, nbytes, paths))
        else:
            group = found[like]
            more = {"alike": group.alike + len(members), "bytes": group.bytes + nbytes, "paths": group.paths + paths}
            found[like] = replace(group, **more)
    return tuple(sorted(found, key=lambda group: (-group.bytes, group.name)))


def _mirrors(path: str, tensor: TensorRecord, group: TensorGroup) -> bool:
    same = (tensor.shape, tensor.dtype, tensor.spec) == (group.shape, group.dtype, group.spec)
    return same and len(components(path)) > len(components(group.name)) and common_ending(path, group.name)


def state_positions(record: Record, judged: Judged | None) -> frozenset[int]:
    """The positions of arguments that a result replaces: exactly where the program is known, else those that some result looks like."""
    if judged is not None:
        return judged.facts.graph.state
    results = [(starred(members[0].path), members[0]) for _, members in by_pattern(record.results)]
    return frozenset(
        at
        for at, tensor in enumerate(record.arguments)
        if tensor.shape and any(alike(tensor, other) and common_ending(starred(tensor.path), path) for path, other in results)
    )


def waiting(times: Lifetimes, ops: Sequence[Op], maker: Callable[[int], Op | None]) -> frozenset[int]:
    """The values that the forward pass keeps until kernels of the backward pass run, whichever of these reads them."""
    backward = sorted(times.starts[op.index] for op in ops if pass_of(op) == "backward")
    found = set()
    for value, born, dies in zip(times.values, times.born, times.dies, strict=True):
        op, following = maker(value), bisect_right(backward, born)
        if op is None or following == len(backward) or backward[following] >= dies:
            continue
        if pass_of(op) in ("forward", "recomputed") or (pass_of(op) == "update" and not following):
            found.add(value)
    return frozenset(found)


def accumulated(graph: Graph) -> dict[Op, frozenset[tuple[int, ...]]]:
    """The loops over microbatches, which add up gradients: of each the shapes of its results."""
    return {
        op: frozenset(graph.values[value].shape for value in op.results)
        for op in graph.walk()
        if op.bodies and pass_of(op) == "update" and any(pass_of(inner) == "backward" for inner in op.walk())
    }


def activation_groups(judged: Judged) -> tuple[TensorGroup, ...]:
    """The values that the forward pass stores, by layer, source line and sharding; of a program without derivatives all stored values."""
    facts, assignment, mesh = judged.facts, judged.record.assignment, judged.record.mesh
    graph, returned = facts.graph, frozenset(facts.graph.results)
    ops = [op for op in graph.walk() if not op.bodies]
    trained = any(pass_of(op) == "backward" for op in ops)
    n_bytes: dict[tuple, float] = defaultdict(float)
    counts: Counter[tuple] = Counter()
    for op in ops:
        if trained and pass_of(op) != "forward":
            continue
        for value in op.results:
            found = graph.values[value]
            if not (found.rank and facts.fusion.materialised[value] and facts.fusion.root[value] == value) or value in returned:
                continue
            if facts.free[value] or not facts.wanted[value]:
                continue
            spec = layout_to_spec(assignment.layout(value), mesh.names, found.rank)
            layer, line = judged.layer(op), line_of(op.origin)
            key = (line if layer in line else f"{layer}, {line}"), found.shape, found.dtype, spec
            counts[key] += 1
            n_bytes[key] += shard_bytes(found.shape, found.dtype, spec, mesh)
    groups = [TensorGroup(name, counts[key], 0, shape, dtype, spec, n_bytes[key]) for key in counts for name, shape, dtype, spec in (key,)]
    return tuple(sorted(groups, key=lambda group: (-group.bytes, group.name))[:ACTIVATIONS])
