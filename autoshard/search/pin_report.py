"""Reports on pins: the reshards that two of them force, and the axes, arguments and ops that none of them reaches."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.ir import NOWHERE
from autoshard.ir.naming import Names, pattern
from autoshard.problem import Label, Problem
from autoshard.render import format_bytes, format_percent

TOP = 4  # lines, paths and places that are shown of each; the rest is counted

Sources = Sequence[Mapping[int, int]]
"""Per mesh axis, by variable that a pin reaches: the pinned variable that it follows."""


def disagreements(problem: Problem, labels: Sequence[Label], sources: Sources) -> list[str]:
    """A line for every two pins whose followers need reshards between them, most bytes first: bytes, tensors and source lines."""
    names, pins = problem.facts.names, _pin_names(problem, sources)
    nbytes: defaultdict[tuple[str, ...], float] = defaultdict(float)
    counts: Counter[tuple[str, ...]] = Counter()
    first: dict[tuple[str, ...], str] = {}
    for edge in problem.decisions.edges:
        if edge.trips < 1:  # of a loop that is planned as if it had no trip
            continue
        stored = problem.layout(edge.source, labels[edge.source], edge.source_slot, edge.value)
        for slot in edge.target_slots:
            wanted = problem.layout(edge.target, labels[edge.target], slot, edge.value)
            for step in problem.model.reshard_path(problem.graph.values[edge.value], stored, wanted):
                made, read = (
                    " with ".join(dict.fromkeys(pins[sources[axis][end]] for axis in step.axes if end in sources[axis]))
                    for end in (edge.source, edge.target)
                )
                if step.kind != "slice" and made and read and made != read:
                    key = (made, read, step.kind, ", ".join(problem.mesh.names[axis] for axis in step.axes))
                    nbytes[key] += edge.trips * step.nbytes
                    counts[key] += int(edge.trips)
                    first.setdefault(key, f"{names.tensor(edge.value)}{_places(problem, names, edge.source, edge.target)}")
    lines = [
        f"{made} and {read} disagree: between their followers there are {counts[key]} {kind} over {axes}, {format_bytes(nbytes[key])} a "
        f"device in a step; the first is of {first[key]}"
        for key in sorted(nbytes, key=lambda key: (-nbytes[key], key))
        for made, read, kind, axes in [key]
    ]
    rest = [f"{len(lines) - TOP} more pairs of pins disagree, with fewer bytes each"] if len(lines) > TOP else []
    return [*lines[:TOP], *rest]


def _pin_names(problem: Problem, sources: Sources) -> dict[int, str]:
    """The name of each pinned variable; equal shapes with equal pins, such as a weight and its moments, count as one pin."""
    graph, names = problem.graph, {}
    paths = dict(zip(graph.arguments, graph.argument_paths, strict=True))
    alike: dict[tuple[Any, ...], list[str]] = defaultdict(list)
    keys = {}
    for index in {source for reached in sources for source in reached.values()}:
        variable = problem.decisions.variables[index]
        if variable.value in paths:
            keys[index] = (graph.values[variable.value].shape, problem.pins.get(variable.value))
            alike[keys[index]].append(pattern(paths[variable.value]))
        elif variable.leader >= 0:
            op = graph.walk()[variable.leader]
            names[index] = f"{'the constraint' if op.primitive == 'sharding_constraint' else op.primitive} at {op.origin}"
        else:
            names[index] = f"a value of shape {graph.values[variable.value].shape}"
    return names | {index: min(alike[key], key=lambda path: (len(path), path)) for index, key in keys.items()}


def _places(problem: Problem, names: Names, source: int, target: int) -> str:
    """The source lines of two variables' ops, where they have any, in words."""
    ops, text = problem.graph.walk(), ""
    for word, index in (("made", source), ("read", target)):
        variable = problem.decisions.variables[index]
        op = ops[variable.leader] if variable.leader >= 0 else names.maker(variable.value)
        text += f", {word} at {op.origin}" if op is not None else ""
    return text


def unreached(problem: Problem, sources: Sources) -> list[str]:
    """Lines on the mesh axes, the arguments and the ops that no pin reaches, with the ops' share of the work, heaviest first."""
    lines = [
        f"no pin shards anything over mesh axis {name!r} of size {size}: everything is replicated over it"
        for (name, size), reached in zip(problem.mesh.axes, sources, strict=True)
        if not reached and size > 1
    ]
    graph, ops = problem.graph, problem.graph.walk()
    alone = [variable for index, variable in enumerate(problem.decisions.variables) if not any(index in reached for reached in sources)]
    paths = dict(zip(graph.arguments, graph.argument_paths, strict=True))
    values = [variable.value for variable in alone if variable.value in paths and variable.value not in problem.pins]
    if arguments := list(dict.fromkeys(pattern(paths[value]) for value in values)):
        more = f" and {len(arguments) - TOP} more" if len(arguments) > TOP else ""
        lines.append(f"no pin reaches {', '.join(arguments[:TOP])}{more}: replicated")
    members = [op for one in alone for op in (*([one.leader] if one.leader >= 0 else []), *(op for op, _, _ in one.followers))]
    whole = (NOWHERE,) * len(problem.mesh.axes)
    seconds = [op.trips * problem.model.op_seconds(problem.facts, op, whole) for op in ops] if members else []
    if sum(seconds[op] for op in members) > 0.0:
        places: defaultdict[str, float] = defaultdict(float)
        for op in members:
            places[f"{ops[op].primitive} at {ops[op].origin}"] += seconds[op]
        share = sum(places.values()) / sum(seconds)
        heaviest = sorted(places, key=lambda place: (-places[place], place))[:TOP]
        lines.append(
            f"no pin reaches {len(members)} ops with {format_percent(share)} of the unsharded work, which every device does whole: "
            f"{'; '.join(heaviest)}. Pin something that they read, or constrain what they make"
        )
    return lines
