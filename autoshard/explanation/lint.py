"""What looks wrong about a sharding, each finding with its place, its cost and what to do; from a judged program, by rules without models.

Thresholds are shares: a finding costs at least a hundredth of a device's memory for arguments, or a thousandth of the step.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from autoshard.explanation.breakdown import collective_groups
from autoshard.explanation.groups import argument_groups
from autoshard.explanation.layers import line_of, pass_of
from autoshard.explanation.program import Judged
from autoshard.ir import Collective, Mesh, Op
from autoshard.ir.naming import itemsize
from autoshard.ir.words import array_type
from autoshard.render import format_bytes, format_percent, format_seconds

RULES = {
    "unsharded-parameter": "a large argument of which every device has all",
    "replicated-activation": "a large computed value of which every device has all",
    "repeated-work": "compute that all devices of a mesh axis repeat",
    "uneven-padding": "a sharded dimension that the mesh does not divide",
    "silent-resharding": "a collective that moves a value to another sharding, which no constraint asks for",
}

LARGE = 0.01  # of all arguments' bytes, and of the peak: smaller arrays may be replicated
SLOW = 0.001  # of the step
CONSTRAINT = "sharding_constraint"

_RESHARDS = ("read", "unruled", "held", "replaced")  # reasons of collectives that change a value's layout


@dataclass(frozen=True, slots=True)
class Finding:
    """One finding.

    Attributes:
        rule: one of `RULES`.
        where: a source line, or an argument's path.
        what: what is there, in words.
        bytes: that a device holds, sends or pads for it.
        seconds: of a step that it takes, at most; 0.0 where it takes memory alone.
        advice: what to do.
    """

    rule: str
    where: str
    what: str
    bytes: float
    seconds: float
    advice: str


def findings(judged: Judged, uneven: Collection[str] = ()) -> tuple[Finding, ...]:
    """The findings of a strategy's program, those that take most time first, then those that take most memory.

    Args:
        uneven: paths of arguments that are whole only because the mesh does not divide them, which is a finding already.
    """
    found = (*_unsharded(judged, uneven), *_replicated(judged), *_repeated(judged), *_resharded(judged))
    return tuple(sorted(found, key=lambda each: (-each.seconds, -each.bytes, each.rule, each.where)))


def _unsharded(judged: Judged, uneven: Collection[str]) -> Iterator[Finding]:
    record, mesh = judged.record, judged.record.mesh
    total = sum(group.bytes for group in argument_groups(record.arguments, mesh))
    for group in argument_groups([tensor for tensor in record.arguments if tensor.path not in uneven], mesh):
        if mesh.size > 1 and _is_whole(group.spec) and group.bytes > LARGE * total:
            dims = [dim for dim, size in enumerate(group.shape) if size % mesh.size == 0]
            fits = f"dim {dims[0]} of size {group.shape[dims[0]]} divides" if dims else _divisible(group.shape, mesh)
            yield Finding(
                "unsharded-parameter",
                group.name,
                f"{group.n + group.alike} x {array_type(group.dtype, group.shape)} whole on each of {mesh.size} devices",
                group.bytes,
                0.0,
                f"Shard it: {fits}; over all devices it would hold {format_bytes(group.bytes / mesh.size)} of each.",
            )


def _divisible(shape: tuple[int, ...], mesh: Mesh) -> str:
    """Which dimension some axis divides."""
    for name, size in sorted(mesh.axes, key=lambda axis: -axis[1]):
        for dim, n in enumerate(shape):
            if size > 1 and n % size == 0:
                return f"dim {dim} of size {n} divides by {name}={size}"
    return f"no dimension divides by an axis of {mesh}, so pad one"


def _is_whole(spec: tuple) -> bool:
    return all(entry is None for entry in spec)


def _replicated(judged: Judged) -> Iterator[Finding]:
    """Stored values that are whole on every device, by source line."""
    facts, assignment, mesh = judged.facts, judged.record.assignment, judged.record.mesh
    returned, lines = frozenset(facts.graph.results), {}
    for op in facts.graph.walk():
        for value in () if op.bodies or op.mapped else op.results:
            found = facts.graph.values[value]
            stored = facts.fusion.materialised[value] and facts.fusion.root[value] == value
            if not stored or facts.free[value] or not found.rank or value in returned or pass_of(op) == "backward":
                continue
            if all(dim < 0 for dim in assignment.layout(value)) and found.nbytes > LARGE * judged.record.cost.peak_bytes:
                lines.setdefault(line_of(op.origin), []).append(found)
    if mesh.size > 1:
        for line, values in lines.items():
            largest = max(values, key=lambda value: value.nbytes)
            yield Finding(
                "replicated-activation",
                line,
                f"{_counted(len(values), array_type(largest.dtype, largest.shape))}, whole on each of {mesh.size} devices",
                sum(value.nbytes for value in values),
                0.0,
                "Constrain it with jax.lax.with_sharding_constraint, or shard an argument that it has its dimensions from, as the batch.",
            )


def _counted(n: int, largest: str) -> str:
    return f"a value, {largest}" if n == 1 else f"{n} values, the largest {largest}"


def _repeated(judged: Judged) -> Iterator[Finding]:
    """Compute that axes repeat, by axis and source line."""
    mesh, step = judged.record.mesh, judged.record.cost.makespan_seconds
    for axis, (name, size) in enumerate(mesh.axes):
        lines: dict[str, list[tuple[Op, float]]] = {}
        for op, seconds in judged.seconds.items():
            if size > 1 and judged.record.assignment.choice(op.index)[axis][0] < 0:
                lines.setdefault(line_of(op.origin), []).append((op, seconds * (1 - 1 / size)))
        for line, ops in lines.items():
            saved = sum(seconds for _, seconds in ops)
            if saved > 10 * SLOW * step:
                op = max(ops, key=lambda item: item[1])[0]
                yield Finding(
                    "repeated-work",
                    line,
                    f"{len(ops)} operations, most in {op.primitive}, that all {size} devices of {name} repeat",
                    0.0,
                    saved,
                    f"Shard an operand over {name}, or use a mesh without it; at most {format_percent(saved / step)} of the step is saved.",
                )


def _resharded(judged: Judged) -> Iterator[Finding]:
    """Collectives that change the layout of a computed value, and exchanges of arguments, by what they move and for whom."""
    record = judged.record
    silent = [each for each in record.cost.collectives if each.reason and each.reason.kind in _RESHARDS and not _is_asked_for(each)]
    for group in collective_groups(record, judged, silent):
        if group.seconds > SLOW * record.cost.makespan_seconds:
            hidden = "" if group.exposed_seconds else ", hidden behind compute"
            yield Finding(
                "silent-resharding",
                group.source or "new state",
                f"{group.count} x {group.kind} over {', '.join(group.axes)} of {group.tensor}: {group.cause}{hidden}",
                group.bytes * group.count,
                group.seconds,
                f"Constrain {group.tensor or 'it'} to the sharding in which it is read, or change that of the reader's other operands.",
            )


def _is_asked_for(collective: Collective) -> bool:
    """Whether a constraint asks for a reshard, or it gathers an argument: a sharded weight, whose sharding says so."""
    op, value = collective.op, collective.value
    constrained = (op and op.primitive) == CONSTRAINT or (value is not None and (value.kind, value.name) == ("result", CONSTRAINT))
    return constrained or (value is not None and value.kind == "argument" and collective.kind == "all_gather")


def padding(shape: tuple[int, ...], dtype: str, dim: int, count: int, where: str, axes: tuple[str, ...]) -> Finding:
    """The finding that a dimension is sharded into more parts than divide it."""
    size = shape[dim]
    padded = -(-size // count) * count
    return Finding(
        "uneven-padding",
        where,
        f"dim {dim} of {array_type(dtype, shape)} has size {size}, and {' and '.join(axes)} split{'s' * (len(axes) == 1)} it into {count}",
        itemsize(dtype) * math.prod(n for at, n in enumerate(shape) if at != dim) * (padded - size),
        0.0,
        f"Pad it to {padded} yourself, or shard another dimension: jit refuses such arguments, and XLA pads such values or gathers them.",
    )


def cost_words(found: Finding) -> str:
    """What a finding costs."""
    parts = [format_seconds(found.seconds)] if found.seconds else []
    return ", ".join([*parts, *([format_bytes(found.bytes)] if found.bytes else [])])
