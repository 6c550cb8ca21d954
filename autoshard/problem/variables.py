"""Decision variables of a program, the layouts that their labels determine, and the reads between them.

A *variable* is an op that leads a group (its label is a choice) or a layout in which a value is stored (its label is the layout): an
argument, a loop carry, a slice of a scanned array, a shared copy. An op whose operands all have one layout and carry every factor
(elementwise ops, transposes) *follows*: it joins its operand's variable, and its choice is derived from that operand's layout. A label
determines the layouts of its variable's *slots*: one each for the values that the variable places and for the operands that it reads.
Equal derivations are one slot, so two values have equal layouts under all labels exactly when they share variable and slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from autoshard.compilers.program_facts import ProgramFacts
from autoshard.ir import Op, Rule

# What a trip counts in tables of a loop that is planned as if it had none: its layouts are the fastest for it, and change no others
RARE_TRIPS = 1e-6

Pin = tuple[frozenset[int], ...]
"""Per mesh axis, the dimensions of a value that the user lets it shard; -1: it may shard none."""


@dataclass(slots=True)
class Variable:
    """One decision.

    Attributes:
        label_type: ``("op", signature number)`` or ``("layout", shape, itemsize, stored)``; stored are arguments and the values that a loop
            keeps from trip to trip, but no copies.
        leader: the index of the leading op, -1 for a layout.
        value: the value of a layout, -1 for an op.
        slots: how each slot follows from the label, in the order of slots: ``("operand", j)``, ``("result", k)``, ``("layout",)``, or from
            another slot: ``("via", slot, from_dims, to_dims)`` for a follower's result, ``("shift", slot, rank, by)`` for scans.
        followers: ``(op index, slot of the operand that decides, its position)``.
        follower_signatures: per follower ``(slot, signature number, position)``.
        pins: ``(slot, rank, pin)`` of the values that the user pinned.
        whole_reads: ``(slot, shape, itemsize, portable, trips)`` of reads that need the value replicated.
    """

    label_type: tuple[Any, ...]
    leader: int = -1
    value: int = -1
    slots: dict[tuple[Any, ...], int] = field(default_factory=dict)
    followers: list[tuple[int, int, int]] = field(default_factory=list)
    follower_signatures: list[tuple[Any, ...]] = field(default_factory=list)
    pins: list[tuple[Any, ...]] = field(default_factory=list)
    whole_reads: list[tuple[Any, ...]] = field(default_factory=list)

    def slot(self, derivation: tuple[Any, ...]) -> int:
        """The slot of a derivation, a new one if there is none."""
        return self.slots.setdefault(derivation, len(self.slots))

    def key(self) -> tuple[Any, ...]:
        """Equal for variables with equal tables."""
        return self.label_type, tuple(self.slots), tuple(self.follower_signatures), tuple(self.pins), tuple(self.whole_reads)


@dataclass(frozen=True, slots=True)
class Edge:
    """Reads of a value: from a slot of the source variable into slots of the target (or the same) variable, ``trips`` times a step.

    Attributes:
        late_sum: whether the value is a partial sum of the source's leader that a loop adds up before it is combined.
    """

    value: int
    source: int
    source_slot: int
    target: int
    target_slots: tuple[int, ...]
    trips: float
    late_sum: bool


class Coupling(NamedTuple):
    """All reads between two variables, or within one.

    Attributes:
        first, last: the variables, ``first <= last``.
        number: equal for couplings whose tables are equal if their variables' domains are.
        edges: the reads.
    """

    first: int
    last: int
    number: int
    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class Signature:
    """The facts that, with a choice, determine an op's cost."""

    op: int  # one op of this signature
    rule: Rule
    trips: float


def _weight(trips: float) -> float:
    """What so many trips count in tables."""
    return trips or RARE_TRIPS


@dataclass(frozen=True, slots=True, eq=False)
class Decisions:
    """The decision variables of a program and the reads between them.

    Attributes:
        signatures: of ops; variables have their numbers.
        variables: in program order.
        edges: reads between variables.
        home: by value, the ``(variable, slot)`` that determines its layout; values that are always replicated are absent.
        copies: by value, the variable of the copy that its readers share.
        kinds: per variable a number, equal for variables of equal domains and unary tables.
        numbers: the kinds by `Variable.key`; decisions under other pins add theirs, so that all of them share tables by kind.
        couplings: the edges, grouped by their two variables.
    """

    signatures: tuple[Signature, ...]
    variables: tuple[Variable, ...]
    edges: tuple[Edge, ...]
    home: Mapping[int, tuple[int, int]]
    copies: Mapping[int, int]
    kinds: tuple[int, ...]
    numbers: dict[tuple[Any, ...], int]
    couplings: tuple[Coupling, ...]

    def repinned(self, facts: ProgramFacts, before: Mapping[int, Pin], pins: Mapping[int, Pin]) -> Decisions | None:
        """The decisions under other pins of arguments, in time linear in those that differ; None where other pins differ, too.

        A pin of an argument only takes labels from its variable; one of a computed value decides which operations lead.
        """
        arguments = frozenset(facts.graph.arguments)
        changed = [value for value in {**before, **pins} if before.get(value) != pins.get(value)]
        if not arguments.issuperset(changed):
            return None
        variables, kinds = list(self.variables), list(self.kinds)
        for value in changed:
            number, slot = self.home.get(value, (-1, 0))
            if number >= 0:
                pin = [(slot, facts.graph.values[value].rank, pins[value])] if value in pins else []
                variables[number] = one = replace(variables[number], pins=pin)
                kinds[number] = self.numbers.setdefault(one.key(), len(self.numbers))
        return replace(self, variables=tuple(variables), kinds=tuple(kinds))

    def restricted(self, facts: ProgramFacts, pins: Mapping[int, Pin]) -> Decisions:
        """The same decisions with the layouts of some values restricted: labels go, and the same operations lead."""
        variables, kinds = list(self.variables), list(self.kinds)
        for value, pin in pins.items():
            number, slot = self.home[value]
            one = variables[number]
            variables[number] = one = replace(one, pins=[*one.pins, (slot, facts.graph.values[value].rank, pin)])
            kinds[number] = self.numbers.setdefault(one.key(), len(self.numbers))
        return replace(self, variables=tuple(variables), kinds=tuple(kinds))


def decisions_of(facts: ProgramFacts, pins: Mapping[int, Pin]) -> Decisions:
    """The decision variables of a program, in time linear in its size."""
    builder = _Builder(facts, pins)
    for value in facts.graph.arguments:
        builder.store(value)
    builder.build(facts.graph.ops)
    for result, argument in facts.graph.aliases:
        builder.read(facts.graph.results[result], facts.graph.arguments[argument], 1)
    return builder.finish()


class _Builder:
    def __init__(self, facts: ProgramFacts, pins: Mapping[int, Pin]):
        self.facts = facts
        self.values = facts.graph.values
        self.pins = pins
        self.variables: list[Variable] = []
        self.signatures: list[Signature] = []
        self._signatures: dict[tuple, int] = {}
        self.home: dict[int, tuple[int, int]] = {}
        self.reads: dict[int, dict[tuple[int, float], dict[int, None]]] = {}

    def store(self, value: int, views: Iterable[int] = ()) -> None:
        """Adds a layout variable for a value and its views."""
        if self.values[value].rank == 0 or value in self.home:
            return
        variable = self._layout_variable(value, True)
        self._add(variable, value, variable.slot(("layout",)))
        for view in views:
            self.home[view] = self.home[value]

    def _layout_variable(self, value: int, stored: bool) -> Variable:
        return Variable(("layout", self.values[value].shape, self.values[value].itemsize, stored), value=value)

    def _add(self, variable: Variable, value: int, slot: int) -> None:
        self.variables.append(variable)
        self._place(value, len(self.variables) - 1, slot)

    def _place(self, value: int, variable: int, slot: int) -> None:
        if self.values[value].rank == 0:
            return
        self.home[value] = (variable, slot)
        if (pin := self.pins.get(value)) is not None:
            self.variables[variable].pins.append((slot, self.values[value].rank, pin))

    def read(self, value: int, like: int, trips: float) -> None:
        """Adds a read of a value in the layout of another one."""
        if like in self.home:
            self._read(value, *self.home[like], trips)

    def _read(self, value: int, variable: int, slot: int, trips: float) -> None:
        if value in self.home and self.home[value] != (variable, slot):
            self.reads.setdefault(value, {}).setdefault((variable, trips), {})[slot] = None

    def build(self, ops: Iterable[Op]) -> None:
        for op in ops:
            rule = self.facts.rules[op.index]
            if op.bodies:
                self._control_flow(op)
            elif rule is None or not any(factor.shardable for factor in rule.factors):
                self._whole(op)
            elif not all(self.facts.free[value] for value in op.results):
                self._op(op, rule)

    def _whole(self, op: Op) -> None:
        """Adds the reads of an op that cannot be sharded: all operands replicated."""
        for value in op.operands:
            self._read_whole(value, _weight(op.trips))

    def _read_whole(self, value: int, trips: float) -> None:
        if value in self.home:
            variable, slot = self.home[value]
            read = self.values[value]
            self.variables[variable].whole_reads.append((slot, read.shape, read.itemsize, self.facts.portable[value], trips))

    def _control_flow(self, op: Op) -> None:
        """Adds a layout variable per holder; values that flow into it are read in its layout. Those of a shard_map's body are shards."""
        if op.mapped:
            for body in op.bodies:
                self.build(body.ops)
            return
        inputs = {value for body in op.bodies for value in body.inputs}
        for holder in op.holders:
            if holder.value in inputs:
                self.store(holder.value, holder.views)
        for body in op.bodies:
            self.build(body.ops)
        for holder in op.holders:
            if self._stacks_sums(holder.value):
                continue
            self.store(holder.value, holder.views)
            if self.values[holder.value].rank == 0:  # a trip reads one element of a scanned vector
                for flow in holder.sources:
                    self._read_whole(flow.value, _weight(op.flow_trips(flow)))
                continue
            variable, slot = self.home[holder.value]
            rank = self.values[holder.value].rank
            for flow in holder.sources:
                target = slot
                if flow.shift:
                    target = self.variables[variable].slot(("shift", slot, rank, flow.shift))
                self._read(flow.value, variable, target, _weight(op.flow_trips(flow)))

    def _stacks_sums(self, value: int) -> bool:
        """Whether a value is a stack of partial sums that an outer loop adds up; it is then placed as they are, to be combined after it."""
        inner = self.facts.sums.stacked.get(value)
        if inner is None or inner not in self.home:
            return False
        index, slot = self.home[inner]
        self._place(value, index, self.variables[index].slot(("shift", slot, self.values[inner].rank, 1)))
        return True

    def _op(self, op: Op, rule: Rule) -> None:
        position = self._masked_sum(op) if op.primitive == "select_n" else None
        if position is not None:
            index, base = self.home[op.operands[position]]
            for value in op.operands:
                self._read(value, index, base, _weight(op.trips))
            self._follow(op, rule, position)
            return
        position = self._leading_operand(op, rule)
        if position is None:
            self._lead(op, rule)
        else:
            self._follow(op, rule, position)

    def _masked_sum(self, op: Op) -> int | None:
        """The position of a partial sum that a mask selects from on its way into a loop's carry; None where there is none."""
        made_by, shape = self.facts.sums.made_by, self.values[op.results[0]].shape
        if op.results[0] not in made_by or op.results[0] in self.pins or any(self.values[value].shape != shape for value in op.operands):
            return None
        return next((k for k, value in enumerate(op.operands) if value in made_by and value in self.home), None)

    def _lead(self, op: Op, rule: Rule) -> None:
        variable = Variable(("op", self._signature(op, rule)), leader=op.index)
        self.variables.append(variable)
        index = len(self.variables) - 1
        for position, value in enumerate(op.operands):
            if value in self.home:
                self._read(value, index, variable.slot(("operand", position)), _weight(op.trips))
        for k, value in enumerate(op.results):
            self._place(value, index, variable.slot(("result", k)))

    def _follow(self, op: Op, rule: Rule, position: int) -> None:
        index, base = self.home[op.operands[position]]
        variable = self.variables[index]
        variable.followers.append((op.index, base, position))
        variable.follower_signatures.append((base, self._signature(op, rule), position))
        dims, made = rule.operands[position], rule.results[0]
        slot = base if made == dims else variable.slot(("via", base, dims, made))
        self._place(op.results[0], index, slot)

    def _leading_operand(self, op: Op, rule: Rule) -> int | None:
        """The position of the operand that the op follows; None where it leads.

        An op follows where all operands that have variables share their variable, slot and factors, and these are all of its factors. A
        sharding constraint of the user leads, since its operand may have another layout and is then resharded. So does a cast from one byte
        to more, as of quantised weights: a gather before it sends fewer bytes.
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
        key = self.facts.alike[op.index], op.trips
        number = self._signatures.setdefault(key, len(self.signatures))
        if number == len(self.signatures):
            self.signatures.append(Signature(op.index, rule, _weight(op.trips)))
        return number

    def finish(self) -> Decisions:
        """The decisions, with a copy variable between a value and its readers where several other variables read it."""
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
                edges.append(self._edge(value, (source, source_slot), shared[0], (slot,), min(trips for _, trips in outside)))
            for (variable, trips), slots in readers.items():
                origin = (source, source_slot) if variable == source else shared
                edges.append(self._edge(value, origin, variable, tuple(slots), trips))
        numbers: dict[tuple[Any, ...], int] = {}
        kinds = tuple(numbers.setdefault(variable.key(), len(numbers)) for variable in self.variables)
        variables, couplings = tuple(self.variables), self._couplings(edges)
        return Decisions(tuple(self.signatures), variables, tuple(edges), self.home, copies, kinds, numbers, couplings)

    def _edge(self, value: int, source: tuple[int, int], target: int, target_slots: tuple[int, ...], trips: float) -> Edge:
        late_sum = self.facts.sums.made_by.get(value, -1) == self.variables[source[0]].leader >= 0
        return Edge(value, *source, target, target_slots, trips, late_sum)

    def _couplings(self, edges: Iterable[Edge]) -> tuple[Coupling, ...]:
        between: dict[tuple[int, int], list[Edge]] = {}
        for edge in edges:
            between.setdefault((min(edge.source, edge.target), max(edge.source, edge.target)), []).append(edge)
        numbers: dict[tuple[Any, ...], int] = {}
        values, portable = self.values, self.facts.portable

        def properties(edge: Edge) -> tuple:
            value = values[edge.value]
            return value.shape, value.itemsize, portable[edge.value], edge.late_sum, edge.trips, edge.source_slot, edge.target_slots

        couplings: list[Coupling] = []
        for (i, j), reads in between.items():
            key = i == j, tuple((edge.source == i, *properties(edge)) for edge in reads)
            couplings.append(Coupling(i, j, numbers.setdefault(key, len(numbers)), tuple(reads)))
        return tuple(couplings)
