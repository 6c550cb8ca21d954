"""A minimal set of sharding constraints with which Shardy's propagation gives a strategy's program.

*Given*: the shardings of arguments and results, and all constraints of the lowering. *Sought*: a subset of the constraints with which
Shardy inserts the same collectives, and no device computes more. Constraints of one source line that differ only in their layer are one
line of code, and are kept or deleted together.

The program is lowered once, with a number on each constraint. A trial deletes constraints from a copy of the module and runs Shardy's
passes on it, which takes milliseconds. Chunks are deleted, twice as large after a success and half as large after a failure, until
no single line can be deleted: k log n trials where k of n lines stay. The set is minimal in that sense, not necessarily the smallest.
Finally the program is lowered with only these constraints, and compared.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding

from autoshard.analysis.values import free_values
from autoshard.ir import Assignment, Collective, Graph, Layout, Mesh, Op, Origin, Rule, Spec, layout_to_spec, operand_layout, result_layouts
from autoshard.ir.naming import Names, pattern
from autoshard.lower.constrain import ReshardPath, constrained, needs_shard_map
from autoshard.lower.mesh import lowering_mesh, to_named_sharding
from autoshard.progress import Progress, silent
from autoshard.verify.compare import Row, compare
from autoshard.verify.shardy_passes import collectives_in, explicit, lowered_flat, made_bytes

SLACK = 0.02  # allowed growth of the bytes that a device computes: propagation leaves a few scalars and iotas whole

MARK = "autoshard.constraint="
_MARKED = re.compile(re.escape(MARK) + r"(\d+)")


@dataclass(frozen=True, slots=True)
class Pin:
    """One ``with_sharding_constraint`` line.

    Attributes:
        origin: the source line where it belongs.
        name: the constrained tensor: ``state['layers'][*]['w']``, ``the result of dot_general``.
        dtype, shape: of the tensor.
        spec: its `PartitionSpec` as a tuple.
        reader: the op on that line that reads the tensor in this sharding; empty where all its readers do.
        backward: whether the tensor is a gradient, of the backward pass of that line.
        count: the number of the program's constraints that the line represents.
        operand: the tensor's operand position in the expression at ``origin.columns``, -1 for the expression itself; None for neither.
    """

    origin: Origin
    name: str
    dtype: str
    shape: tuple[int, ...]
    spec: Spec
    reader: str
    backward: bool
    count: int
    operand: int | None = None


@dataclass(frozen=True, slots=True)
class Fewest:
    """A minimal set of constraints, and how its program differs from the strategy's.

    Attributes:
        pins: the lines to add, in program order.
        differing: collectives that differ between the strategy and the program with only these lines; empty where none does.
        per_shard: operations that the lowering runs inside `jax.shard_map`, by primitive and source line, which no constraint does.
        extra_compute: the share of bytes that a device computes beyond the strategy's.
        minimal: whether no line can be deleted; False where time ran out.
        n_constraints: constraints of the whole lowering.
        trials, seconds: the cost of the search.
    """

    pins: tuple[Pin, ...]
    differing: tuple[Row, ...]
    per_shard: tuple[str, ...]
    extra_compute: float
    minimal: bool
    n_constraints: int
    trials: int
    seconds: float


def fewest_pins(
    jaxpr: ClosedJaxpr,
    graph: Graph,
    rules: tuple[Rule | None, ...],
    assignment: Assignment,
    reshard_path: ReshardPath,
    budget_seconds: float = 30.0,
    progress: Progress = silent,
) -> Fewest:
    """A minimal set of constraints with which Shardy's propagation gives the assignment's program, besides arguments' and results'."""
    started = time.perf_counter()
    program, mesh = _Program(jaxpr, graph, rules, assignment, reshard_path), assignment.mesh
    lowered, sites = program.constrained()
    module = lowered.compiler_ir("stablehlo")
    lines = _lines(sites, graph, rules, assignment)
    wanted = _Outcome.of(module, mesh)
    trials = 0

    def suffices(kept: Sequence[_Line]) -> bool:
        nonlocal trials
        trials += 1
        numbers = {number for line in kept for number in line.sites}
        return _Outcome.of(_without(module, numbers), mesh).equals(wanted)

    deadline = started + budget_seconds
    present = [line for line in lines if line.present]
    added, minimal = _minimal([line for line in lines if not line.present], lambda kept: suffices([*present, *kept]), deadline, progress)
    kept = {number for line in (*present, *added) for number in line.sites}
    alone = _Outcome.of(program.constrained(kept)[0], mesh)
    return Fewest(
        pins=tuple(line.pin for line in sorted(added, key=lambda line: line.sites)),
        differing=alone.differences(wanted),
        per_shard=_per_shard(graph, rules, assignment),
        extra_compute=alone.nbytes / wanted.nbytes - 1 if wanted.nbytes else 0.0,
        minimal=minimal,
        n_constraints=len(sites),
        trials=trials,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True, slots=True)
class _Program:
    """A program with an assignment, to be lowered with constraints; attributes as the arguments of `fewest_pins`."""

    jaxpr: ClosedJaxpr
    graph: Graph
    rules: tuple[Rule | None, ...]
    assignment: Assignment
    reshard_path: ReshardPath

    def constrained(self, kept: Set[int] | None = None) -> tuple[jax.stages.Lowered, list[tuple[int, NamedSharding]]]:
        """The program lowered, and the value and the sharding of each constraint.

        Args:
            kept: the numbers of the constraints that it has; None: all, each under its number as its name.
        """
        graph, assignment = self.graph, self.assignment
        everything, sites = lowering_mesh(assignment.mesh, graph), list[tuple[int, NamedSharding]]()

        def constrain(x: Any, sharding: NamedSharding, value: int) -> Any:
            number = len(sites)
            sites.append((value, sharding))
            if kept is not None:
                return jax.lax.with_sharding_constraint(x, sharding) if number in kept else x
            with jax.named_scope(f"{MARK}{number}"):
                return jax.lax.with_sharding_constraint(x, sharding)

        path = self.reshard_path
        flat = constrained(self.jaxpr, graph, self.rules, assignment, everything, path, constrain, differentiable=False)
        results = zip(result_layouts(graph, assignment), graph.results, strict=True)
        pairs = [*((assignment.layout(value), value) for value in graph.arguments), *results]
        shardings = [to_named_sharding(layout, graph.values[value].rank, assignment.mesh.names, everything) for layout, value in pairs]
        n = len(graph.arguments)
        return lowered_flat(flat, self.jaxpr, shardings[:n], shardings[n:]), sites


def _per_shard(graph: Graph, rules: tuple[Rule | None, ...], assignment: Assignment) -> tuple[str, ...]:
    """The ops that are lowered inside `jax.shard_map`, each source line once."""
    found = (
        f"{op.primitive} {replace(op.origin, name_stack='')}"
        for op in graph.walk()
        if (rule := rules[op.index]) is not None and needs_shard_map(op, rule, assignment.choice(op.index), assignment.mesh.sizes)
    )
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True, eq=False)
class _Outcome:
    """A program after Shardy's passes."""

    module: Any
    mesh: Mesh
    collectives: tuple[Collective, ...]

    @staticmethod
    def of(module: Any, mesh: Mesh) -> _Outcome:
        after = explicit(module)
        return _Outcome(after, mesh, collectives_in(after, mesh))

    @cached_property
    def nbytes(self) -> float:
        """The bytes of all op results on a device."""
        return made_bytes(self.module, self.mesh)

    def differences(self, wanted: _Outcome) -> tuple[Row, ...]:
        rows = compare(wanted.collectives, self.collectives)
        return tuple(row for row in rows if not row.agrees or row.predicted_count != row.actual_count)

    def equals(self, wanted: _Outcome) -> bool:
        return not self.differences(wanted) and self.nbytes <= (1 + SLACK) * wanted.nbytes


def _minimal(
    lines: Sequence[_Line], suffices: Callable[[Sequence[_Line]], bool], deadline: float, progress: Progress
) -> tuple[list[_Line], bool]:
    """Lines of which none can be deleted alone, and whether there was time to establish that; lines of low worth are tried first."""
    lines = sorted(lines, key=lambda line: (line.worth, line.sites))
    size = len(lines)
    while True:
        kept: list[_Line] = []
        waiting = list(lines)
        while waiting:
            if time.perf_counter() > deadline:
                return [*kept, *waiting], False
            progress(f"{len(kept)} constraints needed, {len(waiting)} in question", 1 - len(waiting) / len(lines))
            if suffices([*kept, *waiting[size:]]):
                waiting, size = waiting[size:], 2 * size
            elif size == 1:
                kept.append(waiting.pop(0))
            else:
                size //= 2
        if len(kept) == len(lines):
            return kept, True
        lines = kept  # a line that a later one made superfluous is deleted in the next round


# -- constraints and the lines that represent them ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    """Constraints that one line of code represents.

    Attributes:
        sites: their numbers.
        pin: the line.
        worth: a rank of how natural the line is to write; lines of low worth are deleted first.
        present: whether the user's program has it already.
    """

    sites: tuple[int, ...]
    pin: Pin
    worth: int
    present: bool


def _lines(sites: Sequence[tuple[int, NamedSharding]], graph: Graph, rules: tuple[Rule | None, ...], assignment: Assignment) -> list[_Line]:
    names, free = Names(graph), free_values(graph)
    readers, expressions = _readers(graph, rules, assignment), _Expressions(graph, names)

    def next_reader(number: int) -> Op | None:
        """The reader at the end of a reshard: the value's constraints along it are consecutive."""
        value = sites[number][0]
        following = itertools.takewhile(lambda site: site[0] == value, sites[number + 1 :])
        return next((readers[value, tuple(sharding.spec)] for _, sharding in following if (value, tuple(sharding.spec)) in readers), None)

    groups: dict[tuple[Pin, int, bool], list[int]] = {}
    for number, (value, sharding) in enumerate(sites):
        tensor, maker, spec = graph.values[value], _product(names, value), tuple(sharding.spec)
        own = layout_to_spec(assignment.layout(value), assignment.mesh.names, tensor.rank) == spec
        reader = None if own else readers.get((value, spec))
        transposed = maker is not names.maker(value)
        at = reader or (maker if own or transposed else next_reader(number) or maker)
        pin = Pin(
            origin=replace(at.origin, name_stack="") if at else Origin(),
            name=pattern(names.name(value)),
            dtype=tensor.dtype,
            shape=tensor.shape,
            spec=spec,
            reader=reader.primitive if reader else "",
            backward=names.is_gradient(value),
            count=0,
            operand=None if at is None or transposed else expressions.place(value, at, at is reader),
        )
        # By rising worth: arguments (which jit shards), free values, steps of a reshard, operands, results; gradients before other values.
        in_jit = own and value in graph.arguments
        worth = 0 if in_jit else 1 if free[value] else 2 if not own and reader is None else 3 + 2 * own + (not pin.backward)
        present = own and maker is not None and maker.primitive == "sharding_constraint"
        groups.setdefault((pin, worth, present), []).append(number)
    return [_Line(tuple(numbers), replace(pin, count=len(numbers)), worth, present) for (pin, worth, present), numbers in groups.items()]


class _Expressions:
    """Where values stand in the expressions of the source: what enters one is an operand of it, what leaves it is its result."""

    def __init__(self, graph: Graph, names: Names):
        self._graph, self._names = graph, names
        self._readers: dict[int, list[Op]] = {}
        self._forward: dict[tuple, list[Op]] = {}
        for op in graph.walk():
            for value in op.operands:
                self._readers.setdefault(value, []).append(op)
            if not any(map(names.is_gradient, op.results)):
                self._forward.setdefault(_expression(op), []).append(op)

    def place(self, value: int, at: Op, is_reader: bool) -> int | None:
        """As `Pin.operand` has it, of a value that an op makes or reads; of a gradient that of the value it is the gradient of."""
        here, maker = _expression(at), self._names.maker(value)
        backward = self._names.is_gradient(value)
        if not here[-1] or at.bodies or (is_reader and maker is not None and _expression(maker) == here):
            return None
        if is_reader:
            return -1 if backward else at.operands.index(value)
        if len(at.results) > 1 or any(_expression(reader) == here for reader in self._readers.get(value, ())):
            return None
        if not backward:
            return -1
        entering = [
            position
            for op in self._forward.get(here, ())
            for position, operand in enumerate(op.operands)
            if self._graph.values[operand].shape == self._graph.values[value].shape and self._enters(operand, here)
        ]
        return entering[0] if len(entering) == 1 else None

    def _enters(self, value: int, here: tuple) -> bool:
        maker = self._names.maker(value)
        return maker is None or _expression(maker) != here


def _expression(op: Op) -> tuple:
    return op.origin.file, op.origin.line, op.origin.columns


def _product(names: Names, value: int) -> Op | None:
    """The op that makes a value; for a transposed gradient the product before the transpose, which has a line of the user's program."""
    maker = names.maker(value)
    while maker is not None and maker.primitive == "transpose" and names.is_gradient(value):
        value = maker.operands[0]
        maker = names.maker(value)
    return maker


def _readers(graph: Graph, rules: tuple[Rule | None, ...], assignment: Assignment) -> dict[tuple[int, Spec], Op]:
    """Per value and spec, the first op that reads the value in that sharding."""
    found: dict[tuple[int, Spec], Op] = {}
    for op in graph.walk():
        rule = rules[op.index]
        for position, value in enumerate(op.operands):
            target: Layout = (-1,) * len(assignment.mesh.axes)
            if rule is not None:
                target = operand_layout(rule, assignment.choice(op.index), position)
            found.setdefault((value, layout_to_spec(target, assignment.mesh.names, graph.values[value].rank)), op)
    return found


# -- modules -----------------------------------------------------------------------------------------------------------------


def _without(module: Any, kept: set[int]) -> Any:
    """A copy of the module without the numbered constraints that are not kept."""
    copy = module.operation.clone()
    for op in [*_constraints(copy)]:
        mark = _MARKED.search(str(op.location))
        if mark and int(mark[1]) not in kept:
            op.results[0].replace_all_uses_with(op.operands[0])
            op.erase()
    return copy


def _constraints(op: Any) -> Iterator[Any]:
    for region in op.operation.regions:
        for block in region.blocks:
            for inner in block.operations:
                if inner.operation.name == "sdy.sharding_constraint":
                    yield inner.operation
                yield from _constraints(inner)
