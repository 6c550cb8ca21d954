"""What looks wrong about a sharding, each finding with its place, its cost and what to do; from a judged program, by rules without models.

Thresholds are shares: a finding costs at least a hundredth of a device's memory for arguments, or a thousandth of the step. A finding that
causes others, such as a batch that nothing splits, comes before them.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from autoshard.analysis.values import makers_of
from autoshard.explanation.breakdown import collective_groups, origin_of
from autoshard.explanation.groups import argument_groups
from autoshard.explanation.layers import line_of, pass_of
from autoshard.explanation.program import Judged
from autoshard.ir import Collective, Mesh, Op, layout_to_spec, shard_counts
from autoshard.ir.naming import itemsize
from autoshard.ir.words import array_type, spec_words
from autoshard.problem import Problem
from autoshard.render import format_bytes, format_count, format_percent, format_seconds
from autoshard.search import batch_dims

RULES = {
    "unsharded-batch": "a batch of which every device has all, so that all of them repeat the work on it",
    "unsharded-parameter": "a large argument of which every device has all",
    "replicated-activation": "a large computed value of which every device has all, or that a constraint gathers",
    "repeated-work": "compute that all devices of a mesh axis repeat",
    "whole-kernel": "a kernel that all devices of a mesh axis run, since it cannot be split further",
    "undivided-dimension": "compute that all devices of a mesh axis repeat, since they do not divide its largest dimension",
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
        seconds: of a step that it takes, at most; 0.0 where it takes memory alone. Of a constraint that gathers a value it is, with
            `causes_seconds`, by how much a step without the constraint is shorter.
        advice: what to do.
        causes_seconds: of a step that repeated work takes which it causes, at most.
    """

    rule: str
    where: str
    what: str
    bytes: float
    seconds: float
    advice: str
    causes_seconds: float = 0.0


Without = Callable[[Collection[Op]], Judged]


def findings(judged: Judged, uneven: Collection[str] = (), without: Without | None = None) -> tuple[Finding, ...]:
    """The findings of a strategy's program, those first that take most time with what they cause, then those that take most memory.

    What other findings cause comes last.

    Args:
        uneven: paths of arguments that are whole only because the mesh does not divide them, which is a finding already.
        without: the program judged without some of its constraints. With it a constraint that gathers is charged what a step without it
            is shorter by, and findings that go away without it say so; None: it is charged what it takes at most.
    """
    causes = _Causes(judged)
    batch = _batch(judged, uneven)
    found = [*_whole_batch(judged, batch, causes)]
    constrained = [*_constrained(judged, causes)]
    found += [*_unsharded(judged, {*uneven, *batch}, causes), *_replicated(judged), *_resharded(judged)]
    caused: list[Finding] = []
    for is_caused, each in _repeated(judged, causes):
        (caused if is_caused else found).append(each)
    if without is not None:
        for number, (each, ops) in enumerate(constrained):
            other = without(ops)
            saved = max(0.0, judged.record.cost.makespan_seconds - other.record.cost.makespan_seconds)
            constrained[number] = replace(each, seconds=min(each.seconds, saved), causes_seconds=max(0.0, saved - each.seconds)), ops
            left = {(one.rule, one.where) for one in findings(other, uneven)}
            gone = [one for one in (*found, *caused) if (one.rule, one.where) not in left]
            found, caused = ([one for one in some if one not in gone] for some in (found, caused))
            caused += [replace(one, advice=f"It goes away without the constraint at {each.where}.") for one in gone]
    found += [each for each, _ in constrained]

    def by_cost(some: list[Finding]) -> list[Finding]:
        return sorted(some, key=lambda each: (-each.seconds - each.causes_seconds, -each.bytes, each.rule, each.where))

    return (*by_cost(found), *by_cost(caused))


class _Causes:
    """What devices repeat because of values that an axis does not split; each operation is put down to the first cause that is asked about.

    Attributes:
        ops: by axis the operations that a cause was found for.
    """

    def __init__(self, judged: Judged):
        self.judged = judged
        self.ops: list[set[Op]] = [set() for _ in judged.record.mesh.axes]
        self._held = defaultdict[int, list[int]](list)
        for holder in (holder for op in judged.facts.graph.walk() for holder in op.holders):
            for flow in holder.sources:
                self._held[flow.value] += [holder.value, *holder.views]

    def seconds(self, roots: Collection[int], axis: int) -> float:
        """The seconds that the devices of an axis repeat of what is computed from some values, at most."""
        judged, size = self.judged, self.judged.record.mesh.sizes[axis]
        ops, assignment, known = judged.facts.graph.walk(), judged.record.assignment, self.ops[axis]
        left, seen, repeated = [*roots], {*roots}, set[Op]()
        while left:
            value = left.pop()
            readers = [ops[reader] for reader in judged.facts.readers[value]]
            repeats = [op for op in readers if not op.bodies and op not in known and assignment.choice(op.index)[axis][0] < 0]
            repeated.update(repeats)
            reached = (*self._held[value], *(result for op in repeats for result in op.results))
            new = {each for each in reached if each not in seen and assignment.layout(each)[axis] < 0}
            seen |= new
            left += new
        known |= repeated
        return sum(judged.seconds.get(op, 0.0) for op in repeated) * (1 - 1 / size)

    def most(self, roots: Collection[int]) -> float:
        """As `seconds`, of the axis whose devices repeat most; what is less than is worth a finding is none."""
        found = max((self.seconds(roots, axis) for axis in range(len(self.ops))), default=0.0)
        return found if found > SLOW * self.judged.record.cost.makespan_seconds else 0.0


_TOO = " Repeated work below goes away with it."


def _batch(judged: Judged, uneven: Collection[str]) -> dict[str, tuple[int, int]]:
    """By path the value and the dimension of each array of the batch, where every device has all of all of them."""
    graph, assignment = judged.facts.graph, judged.record.assignment
    dims = batch_dims(Problem(judged.facts, judged.model))
    paths = dict(zip(graph.arguments, graph.argument_paths, strict=True))
    if any(max(assignment.layout(value), default=-1) >= 0 or paths[value] in uneven for value in dims):
        return {}
    return {paths[value]: (value, dim) for value, dim in dims.items()}


def _whole_batch(judged: Judged, batch: Mapping[str, tuple[int, int]], causes: _Causes) -> Iterator[Finding]:
    """The batch, where nothing splits it and all devices repeat the work on it."""
    mesh, values = judged.record.mesh, judged.facts.graph.values
    caused = causes.most([value for value, _ in batch.values()])
    if caused:
        names, (first, dim) = [*batch], next(iter(batch.values()))
        yield Finding(
            "unsharded-batch",
            f"{', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}",
            f"the batch, dim {dim} of size {values[first].shape[dim]}, whole on each of {mesh.size} devices",
            sum(values[value].nbytes for value, _ in batch.values()),
            0.0,
            f"Split dim {dim} over {mesh.names[0]}.{_TOO}",
            caused,
        )


def _constrained(judged: Judged, causes: _Causes) -> Iterator[tuple[Finding, list[Op]]]:
    """Constraints that gather a computed value on all devices, or over an axis whose devices then repeat the work on it, by source line."""
    record, assignment, mesh = judged.record, judged.record.assignment, judged.record.mesh
    step, values = record.cost.makespan_seconds, judged.facts.graph.values
    lines, gathers = defaultdict[str, list[Op]](list), defaultdict[str, list[Collective]](list)
    made = makers_of(judged.facts.graph.walk())
    for op in judged.facts.graph.walk():
        if op.primitive == CONSTRAINT and not op.mapped:
            lines[line_of(op.origin)].append(op)
    for each in record.cost.collectives:
        if each.op and each.op.primitive == CONSTRAINT and (origin := origin_of(each, judged)):
            gathers[line_of(origin)].append(each)
    for line, ops in lines.items():
        if any(_is_of_argument(op, made) for op in ops):  # the others are of its gradient
            continue
        gathered = {op: _gathered(judged, op) for op in ops}
        axes = sorted({axis for over in gathered.values() for axis in over})
        caused = max((causes.seconds([op.results[0] for op in gathered if axis in gathered[op]], axis) for axis in axes), default=0.0)
        whole = [op for op, over in gathered.items() if over and max(assignment.layout(op.results[0])) < 0]
        kept = [op for op in whole if pass_of(op) != "backward"] or whole
        held, seconds = (
            sum(op.trips * values[op.results[0]].nbytes for op in kept),
            sum(each.count * each.seconds for each in gathers[line]),
        )
        is_large = bool(whole) and (held > LARGE * record.cost.peak_bytes or seconds > SLOW * step)
        if caused > 10 * SLOW * step or is_large:
            shown = next(op for op, over in gathered.items() if over)
            value, names = values[shown.results[0]], " and ".join(mesh.names[axis] for axis in axes)
            spec = spec_words(layout_to_spec(assignment.layout(shown.operands[0]), mesh.names, value.rank))
            found = Finding(
                "replicated-activation",
                line,
                f"{array_type(value.dtype, value.shape)}, sharded as {spec}, which with_sharding_constraint gathers over {names}",
                held or value.nbytes / math.prod(shard_counts(assignment.layout(shown.results[0]), value.rank, mesh.sizes)),
                seconds,
                f"Name {names} in the constraint's spec, or leave the constraint out.{_TOO if caused > 10 * SLOW * step else ''}",
                caused,
            )
            yield found, ops


def _gathered(judged: Judged, op: Op) -> list[int]:
    """The axes that split what a constraint reads, and not what it makes."""
    before, after = (judged.record.assignment.layout(value) for value in (op.operands[0], op.results[0]))
    return [axis for axis in range(len(judged.record.mesh.axes)) if before[axis] >= 0 > after[axis]]


def _is_of_argument(op: Op, made: Mapping[int, Op]) -> bool:
    """Whether what a constraint reads is an argument, or made of one alone, as a cast weight is: those are gathered on purpose."""
    value = op.operands[0]
    while (maker := made.get(value)) is not None and len(maker.operands) == 1 and not maker.bodies:
        value = maker.operands[0]
    return maker is None


def _unsharded(judged: Judged, but: Collection[str], causes: _Causes) -> Iterator[Finding]:
    """Large arguments that are whole on every device, those of some paths left out."""
    record, mesh = judged.record, judged.record.mesh
    total = sum(group.bytes for group in argument_groups(record.arguments, mesh))
    values = dict(zip(judged.facts.graph.argument_paths, judged.facts.graph.arguments, strict=True))
    for group in argument_groups([tensor for tensor in record.arguments if tensor.path not in but], mesh):
        if mesh.size > 1 and all(entry is None for entry in group.spec) and group.bytes > LARGE * total:
            dims = [dim for dim, size in enumerate(group.shape) if size % mesh.size == 0]
            fits = f"dim {dims[0]} of size {group.shape[dims[0]]} divides" if dims else _divisible(group.shape, mesh)
            caused = causes.most([values[path] for path in group.paths])
            yield Finding(
                "unsharded-parameter",
                group.name,
                f"{group.n + group.alike} x {array_type(group.dtype, group.shape)} whole on each of {mesh.size} devices",
                group.bytes,
                0.0,
                f"Shard it: {fits}; over all devices each would hold {format_bytes(group.bytes / mesh.size)}.{_TOO if caused else ''}",
                caused,
            )


def _divisible(shape: tuple[int, ...], mesh: Mesh) -> str:
    """Which dimension some axis divides."""
    for name, size in sorted(mesh.axes, key=lambda axis: -axis[1]):
        for dim, n in enumerate(shape):
            if size > 1 and n % size == 0:
                return f"dim {dim} of size {n} divides by {name}={size}"
    return f"no dimension divides by an axis of {mesh}, so pad one"


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


def _repeated(judged: Judged, causes: _Causes) -> Iterator[tuple[bool, Finding]]:
    """Compute that axes repeat, by axis and source line, and whether other findings cause most of it."""
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
                some = f"{len(ops)} operation{'s' * (len(ops) > 1)}"
                rule, why, advice = _why_whole(judged, op, axis)
                advice = f"{advice}, or use a mesh without {name}; at most {format_percent(saved / step)} of the step is saved."
                what = f"{some}, most in {op.primitive}, that all {size} devices of {name} repeat{why}"
                is_caused = sum(seconds for op, seconds in ops if op in causes.ops[axis]) > saved / 2
                yield is_caused, Finding(rule, line, what, 0.0, saved, advice)


def _why_whole(judged: Judged, op: Op, axis: int) -> tuple[str, str, str]:
    """The rule of a finding on an operation that an axis does not split, why it does not where it cannot, and what to do."""
    name, n = judged.record.mesh.axes[axis]
    rule, split = judged.facts.rules[op.index], {factor for factor, _ in judged.record.assignment.choice(op.index)}
    free = [] if rule is None else [factor.size for k, factor in enumerate(rule.factors) if factor.shardable and k not in split]
    even, uneven = (sorted((size for size in free if (size % n == 0) == divides), reverse=True) for divides in (True, False))
    if uneven and uneven[0] > max(even, default=0) and uneven[0] >= n:
        padded = -(-uneven[0] // n) * n
        advice = f"Make it a multiple, such as {format_count(padded)}, leave it to autoshard.search, which pads what is worth it"
        return "undivided-dimension", f": of size {format_count(uneven[0])}, which does not divide by {n}", advice
    if op.kernel is not None and op.kernel.whole and not even:
        advice = "Say with autoshard.kernel_rule what may be split all the same"
        return "whole-kernel", f": {'; '.join(op.kernel.whole)}", advice
    return "repeated-work", "", f"Shard an operand over {name}"


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


_OF_BYTES = {"silent-resharding": "sent", "uneven-padding": "of padding"}


def cost_words(found: Finding) -> str:
    """What a finding costs, a line each.

    >>> cost_words(Finding("silent-resharding", "", "", 33e6, 168e-6, ""))
    '168 µs\\n33.0 MB sent'
    """
    seconds = format_seconds(found.seconds + found.causes_seconds) if found.seconds or found.causes_seconds else ""
    held = f"{format_bytes(found.bytes)} {_OF_BYTES.get(found.rule, 'a device')}" if found.bytes else ""
    return "\n".join(filter(None, (seconds, held)))
