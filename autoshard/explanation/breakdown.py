"""Where a step's time and memory go: by layer, source line and collective, by group of values, and what the axes of the mesh repeat."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, replace

from autoshard.explanation.data import CollectiveGroup, MemoryGroup, Place, RepeatedWork
from autoshard.explanation.groups import accumulated
from autoshard.explanation.layers import layer_of, line_of, pass_of
from autoshard.explanation.program import Judged
from autoshard.ir import Collective, Op, Origin
from autoshard.ir.naming import pattern, starred
from autoshard.primitives import is_matrix
from autoshard.strategy import Record

REST = "reshards and other kernels"  # compute of the judge that no op has: copies around collectives, blocks of windowed products
OUTSIDE = "new state"  # what serves no op, but a result of the program
LEAST_REPEATED = 0.01  # of the step; and of the layer that repeats most, for others to be named
MOST_LAYERS = 5  # that are named


def places(record: Record, judged: Judged | None, named: Callable[[Origin], str]) -> tuple[Place, ...]:
    """The seconds of a step by place, the longest first; they add up to the record's compute and collectives.

    Args:
        named: the place of an origin: its layer, or its line.
    """
    compute, products, flops = (defaultdict[str, float](float) for _ in range(3))
    counts = Counter[str]()
    if judged is not None:
        for op, seconds in judged.seconds.items():
            compute[named(op.origin)] += seconds
        for op in judged.facts.graph.walk():
            counts[named(op.origin)] += not op.bodies
            if is_matrix(op.primitive):
                products[named(op.origin)] += judged.seconds.get(op, 0.0)
                done = judged.model.op_cost(judged.facts, op, record.assignment.choice(op.index)).flops
                flops[named(op.origin)] += op.trips * done
        rest = record.cost.compute_seconds - sum(compute.values())
        if rest > 1e-9 * record.cost.compute_seconds:
            compute[REST] += rest
    sent, exposed = defaultdict[str, float](float), defaultdict[str, float](float)
    for collective in record.cost.collectives:
        place = named(origin) if (origin := origin_of(collective, judged)) else OUTSIDE
        sent[place] += collective.count * collective.seconds
        exposed[place] += collective.count * collective.exposed_seconds
    found = [
        Place(name, compute[name], sent[name], exposed[name], products[name], flops[name], counts[name]) for name in {**compute, **sent}
    ]
    return tuple(sorted(found, key=lambda place: (-place.seconds, -place.communication_seconds, place.name)))


def merged(parts: Iterable[tuple[Place, ...]]) -> tuple[Place, ...]:
    """The places of several programs of the same devices, those of one name as one, the longest first."""
    found: dict[str, Place] = {}
    for place in (place for part in parts for place in part):
        before = found.get(place.name)
        both = [getattr(place, each.name) + getattr(before, each.name) for each in fields(Place)[1:]] if before else None
        found[place.name] = place if both is None else Place(place.name, *both)
    return tuple(sorted(found.values(), key=lambda place: (-place.seconds, -place.communication_seconds, place.name)))


def origin_of(collective: Collective, judged: Judged | None) -> Origin | None:
    """The origin of the op that a collective serves, with its scopes where the program is known; None where it serves no op."""
    op = collective.op
    if op is None or not op.primitive:
        return None
    return judged.facts.graph.walk()[op.index].origin if judged is not None and op.index >= 0 else op.origin


def layers(record: Record, judged: Judged | None) -> tuple[Place, ...]:
    """The seconds of a step by layer."""
    return places(record, judged, layer_of)


def lines(record: Record, judged: Judged | None) -> tuple[Place, ...]:
    """The seconds of a step by source line."""
    return places(record, judged, line_of)


def collective_groups(record: Record, judged: Judged | None, some: Iterable[Collective] | None = None) -> tuple[CollectiveGroup, ...]:
    """The collectives of a step, or some of them; those that differ by a layer's index only are one group."""
    found: dict[tuple, CollectiveGroup] = {}
    for each in record.cost.collectives if some is None else some:
        told = _of_any_layer(each)
        origin = origin_of(each, judged)
        key = (each.kind, each.mesh_axes, each.bytes, told.tensor, told.source, told.cause, layer_of(origin) if origin else OUTSIDE)
        group = found.get(key)
        if group is None:
            group = CollectiveGroup(*key[:3], 0, 0.0, 0.0, *key[3:])
        found[key] = replace(
            group,
            count=group.count + each.count,
            seconds=group.seconds + each.count * each.seconds,
            exposed_seconds=group.exposed_seconds + each.count * each.exposed_seconds,
        )
    return tuple(sorted(found.values(), key=lambda group: (-group.seconds, -group.bytes * group.count, group.kind, group.source)))


def _of_any_layer(collective: Collective) -> Collective:
    """The collective with a star for every index of a path, folders cut from its source file."""
    op, value, reason = collective.op, collective.value, collective.reason
    return replace(
        collective,
        op=op
        and replace(op, name=pattern(op.name), origin=replace(op.origin, file=line_of(replace(op.origin, function="")).rpartition(":")[0])),
        value=value and replace(value, name=pattern(value.name)),
        reason=reason and replace(reason, argument=pattern(reason.argument)),
    )


def memory_groups(judged: Judged) -> tuple[MemoryGroup, ...]:
    """What a device holds at the fullest moment of the step, the largest first; the bytes add up to the peak."""
    facts, peak = judged.facts, judged.judgement.peak
    graph = facts.graph
    paths = dict(zip(graph.arguments, graph.argument_paths, strict=True))
    state = {graph.arguments[argument] for argument in graph.state}
    new = {graph.results[result]: graph.arguments[argument] for result, argument in graph.aliases}
    groups: dict[tuple[str, str], list[float]] = defaultdict(list)
    trained = any(pass_of(op) == "backward" for op in graph.walk())
    sums = accumulated(graph)
    kinds = {"backward": "gradients", "update": "temporaries"} if trained else {}

    def layer(op: Op | None) -> str:
        return "constants" if op is None else layer_of(op.origin)

    for value, nbytes in zip(peak.alive, peak.held, strict=True):
        if value in paths:
            groups["state" if value in state else "inputs", starred(paths[value])].append(nbytes)
        elif value in new:
            groups["state", f"new value of {starred(paths[new[value]])}"].append(nbytes)
        else:
            op = facts.names.maker(value)
            is_sum = op is not None and graph.values[value].shape in sums.get(op, ())
            kind = "gradients" if is_sum else kinds.get(pass_of(op) if op else "", "activations")
            groups[kind, layer(op)].append(nbytes)
    for value, nbytes in peak.copies:
        groups["copies", starred(paths[value]) if value in paths else layer(facts.names.maker(value))].append(nbytes)
    for op, nbytes in peak.partials:
        groups["partial sums", layer(graph.walk()[op])].append(nbytes)
    rest = peak.nbytes - sum(map(sum, groups.values()))
    if abs(rest) > 1e-9 * peak.nbytes:
        groups["other", ""].append(rest)
    found = [MemoryGroup(kind, name, sum(sizes), len(sizes)) for (kind, name), sizes in groups.items()]
    return tuple(sorted(found, key=lambda group: (-group.bytes, group.kind, group.name)))


def repeated_work(programs: Sequence[Judged]) -> tuple[RepeatedWork, ...]:
    """Per mesh axis the compute that all of its devices repeat, where that is more than a hundredth of the step.

    Args:
        programs: that of a step; of a pipeline those that the same devices run.
    """
    found = []
    for axis, (name, size) in enumerate(programs[0].record.mesh.axes if programs else ()):
        whole = [
            (judged, op, seconds)
            for judged in programs
            for op, seconds in judged.seconds.items()
            if judged.record.assignment.choice(op.index)[axis][0] < 0
        ]
        by_layer: Mapping[str, float] = _sums((judged.layer(op), seconds) for judged, op, seconds in whole)
        seconds = sum(by_layer.values())
        uneven = sum(seconds for judged, op, seconds in whole if not _divides(judged, op, size))
        saved = seconds * (1 - 1 / size)
        if saved > LEAST_REPEATED * sum(judged.record.cost.makespan_seconds for judged in programs):
            ranked = sorted(by_layer.items(), key=lambda item: (-item[1], item[0]))
            told = [(layer, each) for layer, each in ranked[:MOST_LAYERS] if each > LEAST_REPEATED * ranked[0][1]]
            found.append(RepeatedWork(name, size, seconds, uneven, saved, tuple(told)))
    return tuple(found)


def _divides(judged: Judged, op: Op, size: int) -> bool:
    """Whether an axis of this size could split an op."""
    rule = judged.facts.rules[op.index]
    return rule is not None and any(factor.shardable and factor.size > 1 and factor.size % size == 0 for factor in rule.factors)


def _sums(items: Iterable[tuple[str, float]]) -> dict[str, float]:
    found: dict[str, float] = defaultdict(float)
    for name, seconds in items:
        found[name] += seconds
    return found
