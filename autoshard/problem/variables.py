"""What a program leaves to decide: variables, the layouts their labels determine, and who reads whom.

A *variable* is an op that leads a group (its label is a choice) or a layout that a value is held in (its label is a layout):
an argument, a loop carry, a slice of a scanned array, a shared copy. An op whose operands all lie alike and carry every
factor (elementwise ops, transposes) *follows*: it joins its operand's variable and its choice is read off that operand's
layout. What a label determines are the variable's *slots*: one layout each, for values that lie in the variable and for operands
it reads. Slots are hash-consed, so two values lie alike exactly when they share variable and slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from autoshard.compilers.program_facts import Profile
from autoshard.ir import Op, Rule

Pin = tuple[frozenset[int], ...]
"""Per mesh axis, the dimensions it may shard; -1 means that it may leave the tensor unsharded."""


@dataclass(slots=True)
class Variable:
    """One decision.

    Attributes:
        head: what its labels are: ``("op", signature number)`` or ``("layout", shape, itemsize, held)``; held are arguments and what a
            loop holds, but no copies.
        leader: the op index of an op variable, else -1.
        value: the value of a layout variable, else -1.
        slots: how each slot follows from the label: ``("operand", j)``, ``("result", k)``, ``("layout",)``, or from another slot:
            ``("via", slot, from_dims, to_dims)`` for a follower's result, ``("shift", slot, rank, by)`` for scans.
        members: followers as ``(op index, slot of the deciding operand, its position)``.
        costs: ``(slot, signature number, position)`` of each follower.
        pins: ``(slot, rank, pin)``.
        gathers: ``(slot, shape, itemsize, portable, trips)`` of values that must be read whole.
    """

    head: tuple
    leader: int = -1
    value: int = -1
    slots: dict[tuple, int] = field(default_factory=dict)
    members: list[tuple[int, int, int]] = field(default_factory=list)
    costs: list[tuple] = field(default_factory=list)
    pins: list[tuple] = field(default_factory=list)
    gathers: list[tuple] = field(default_factory=list)

    def slot(self, derivation: tuple) -> int:
        return self.slots.setdefault(derivation, len(self.slots))

    def key(self) -> tuple:
        """Equal for variables with equal tables."""
        return self.head, tuple(self.slots), tuple(self.costs), tuple(self.pins), tuple(self.gathers)


@dataclass(frozen=True, slots=True)
class Edge:
    """A value read from one variable's slot by slots of another (or of the same) variable, ``trips`` times a step."""

    value: int
    source: int
    source_slot: int
    target: int
    target_slots: tuple[int, ...]
    trips: int


@dataclass(frozen=True, slots=True)
class Signature:
    """All that an op's cost depends on, besides its choice."""

    op: int  # one op of this signature
    rule: Rule
    trips: int


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The decisions of a program.

    Attributes:
        signatures: what variables refer to by number.
        variables: in program order.
        edges: reads between variables.
        home: value number -> (variable, slot) it lies in; absent: always replicated.
        copies: value number -> its copy variable.
    """

    signatures: tuple[Signature, ...]
    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...]
    home: Mapping[int, tuple[int, int]]
    copies: Mapping[int, int]


def build_structure(profile: Profile, pins: Mapping[int, Pin]) -> Structure:
    """The decisions of a program; linear in its size."""
    builder = _Builder(profile, pins)
    for value in profile.graph.arguments:
        builder.hold(value)
    builder.build(profile.graph.ops)
    for result, argument in profile.graph.aliases:
        builder.read(profile.graph.results[result], profile.graph.arguments[argument], 1)
    return builder.finish()


class _Builder:
    def __init__(self, profile: Profile, pins: Mapping[int, Pin]):
        self.profile = profile
        self.values = profile.graph.values
        self.pins = pins
        self.variables: list[Variable] = []
        self.signatures: list[Signature] = []
        self._signatures: dict[tuple, int] = {}
        self.home: dict[int, tuple[int, int]] = {}
        self.reads: dict[int, dict[tuple[int, int], dict[int, None]]] = {}

    def hold(self, value: int, views: Iterable[int] = ()) -> None:
        """Puts a value, and the views of it, into a layout variable of their own."""
        if self.values[value].rank == 0 or value in self.home:
            return
        variable = self._layout_variable(value, True)
        self._add(variable, value, variable.slot(("layout",)))
        for view in views:
            self.home[view] = self.home[value]

    def _layout_variable(self, value: int, held: bool) -> Variable:
        return Variable(("layout", self.values[value].shape, self.values[value].itemsize, held), value=value)

    def _add(self, variable: Variable, value: int, slot: int) -> None:
        self.variables.append(variable)
        self._settle(value, len(self.variables) - 1, slot)

    def _settle(self, value: int, variable: int, slot: int) -> None:
        if self.values[value].rank == 0:
            return
        self.home[value] = (variable, slot)
        if (pin := self.pins.get(value)) is not None:
            self.variables[variable].pins.append((slot, self.values[value].rank, pin))

    def read(self, value: int, holder: int, trips: int) -> None:
        """A value read in the layout another value lies in."""
        if holder in self.home:
            self._read(value, *self.home[holder], trips)

    def _read(self, value: int, variable: int, slot: int, trips: int) -> None:
        if value in self.home and self.home[value] != (variable, slot):
            self.reads.setdefault(value, {}).setdefault((variable, trips), {})[slot] = None

    def build(self, ops: Iterable[Op]) -> None:
        for op in ops:
            rule = self.profile.rules[op.index]
            if op.bodies:
                self._control_flow(op)
            elif rule is None or not any(factor.shardable for factor in rule.factors):
                self._whole(op)
            elif not all(self.profile.free[value] for value in op.results):
                self._op(op, rule)

    def _whole(self, op: Op) -> None:
        """An op that cannot be sharded reads its operands whole."""
        for value in op.operands:
            self._read_whole(value, op.trips)

    def _read_whole(self, value: int, trips: int) -> None:
        if value in self.home:
            variable, slot = self.home[value]
            found = self.values[value]
            self.variables[variable].gathers.append((slot, found.shape, found.itemsize, self.profile.portable[value], trips))

    def _control_flow(self, op: Op) -> None:
        """Holders are layout variables; what flows into them is read in their layout."""
        inputs = {value for body in op.bodies for value in body.inputs}
        for holder in op.holders:
            if holder.value in inputs:
                self.hold(holder.value, holder.views)
        for body in op.bodies:
            self.build(body.ops)
        for holder in op.holders:
            self.hold(holder.value, holder.views)
            if self.values[holder.value].rank == 0:  # of a scanned vector every trip takes one element
                for flow in holder.sources:
                    self._read_whole(flow.value, op.flow_trips(flow))
                continue
            variable, slot = self.home[holder.value]
            rank = self.values[holder.value].rank
            for flow in holder.sources:
                target = slot
                if flow.shift:
                    target = self.variables[variable].slot(("shift", slot, rank, flow.shift))
                self._read(flow.value, variable, target, op.flow_trips(flow))

    def _op(self, op: Op, rule: Rule) -> None:
        position = self._leading_operand(op, rule)
        if position is None:
            self._lead(op, rule)
        else:
            self._follow(op, rule, position)

    def _lead(self, op: Op, rule: Rule) -> None:
        variable = Variable(("op", self._signature(op, rule)), leader=op.index)
        self.variables.append(variable)
        index = len(self.variables) - 1
        for position, value in enumerate(op.operands):
            if value in self.home:
                self._read(value, index, variable.slot(("operand", position)), op.trips)
        for k, value in enumerate(op.results):
            self._settle(value, index, variable.slot(("result", k)))

    def _follow(self, op: Op, rule: Rule, position: int) -> None:
        index, base = self.home[op.operands[position]]
        variable = self.variables[index]
        variable.members.append((op.index, base, position))
        variable.costs.append((base, self._signature(op, rule), position))
        dims, made = rule.operands[position], rule.results[0]
        slot = base if made == dims else variable.slot(("via", base, dims, made))
        self._settle(op.results[0], index, slot)

    def _leading_operand(self, op: Op, rule: Rule) -> int | None:
        """The operand the op may follow, or None: every operand that has a variable lies alike and carries all factors.

        A constraint of the user's own decides alone: its operand may have to lie elsewhere, and is then resharded into it. So does a cast
        of bytes to numbers, as of quantised weights: what is gathered is better gathered before it.
        """
        if len(op.results) != 1 or op.results[0] in self.pins or self._dequantises(op):
            return None
        if any(factor.kind != "pass_through" for factor in rule.factors):
            return None
        if any(len(dim) > 1 for tensor in (*rule.operands, *rule.results) for dim in tensor):
            return None
        placed = [position for position, value in enumerate(op.operands) if value in self.home]
        if not placed:
            return None
        first = placed[0]
        dims = rule.operands[first]
        if {f for dim in dims for f in dim} != {f for dim in rule.results[0] for f in dim}:
            return None
        for position in placed[1:]:
            if self.home[op.operands[position]] != self.home[op.operands[first]] or rule.operands[position] != dims:
                return None
        return first

    def _dequantises(self, op: Op) -> bool:
        if op.primitive != "convert_element_type":
            return False
        before, after = self.values[op.operands[0]], self.values[op.results[0]]
        return before.dtype != "bool" and before.itemsize <= 1 < after.itemsize

    def _signature(self, op: Op, rule: Rule) -> int:
        """The number of the op's signature."""
        key = self.profile.alike[op.index], op.trips
        number = self._signatures.setdefault(key, len(self.signatures))
        if number == len(self.signatures):
            self.signatures.append(Signature(op.index, rule, op.trips))
        return number

    def finish(self) -> Structure:
        """Edges, with a copy variable between a value and its readers where several variables read it."""
        edges: list[Edge] = []
        copies: dict[int, int] = {}
        for value, readers in self.reads.items():
            source, source_slot = self.home[value]
            outside = [(variable, trips) for variable, trips in readers if variable != source]
            shared = (source, source_slot)
            if len(outside) > 1 and len({variable for variable, _ in outside}) > 1:
                variable = self._layout_variable(value, False)
                slot = variable.slot(("layout",))
                self.variables.append(variable)
                copies[value] = len(self.variables) - 1
                shared = (copies[value], slot)
                edges.append(Edge(value, source, source_slot, shared[0], (slot,), min(trips for _, trips in outside)))
            for (variable, trips), slots in readers.items():
                origin = (source, source_slot) if variable == source else shared
                edges.append(Edge(value, *origin, variable, tuple(slots), trips))
        return Structure(tuple(self.signatures), tuple(self.variables), tuple(edges), self.home, copies)
