"""The search problem as numpy tables: what each variable may choose, and what choices cost alone and in pairs.

`Problem.tables` frees some mesh axes while every variable keeps its label on the others: all of them for a joint search, one
for a search that goes axis by axis. Equal layers have equal tables: everything is cached by what it depends on, never by where it stands,
so building tables costs a few dictionary look-ups a variable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial, reduce
from typing import Any, Protocol, TypeVar

import numpy as np

from autoshard.compilers.program_facts import Profile
from autoshard.cost.reshard import Step
from autoshard.errors import ShardingError
from autoshard.inference.model import PairwiseModel
from autoshard.ir import (
    NOWHERE,
    Assignment,
    Choice,
    Layout,
    Op,
    Rule,
    Value,
    layout_of,
    layouts,
    shards,
)
from autoshard.judge.evaluate import Judgement, evaluate
from autoshard.judge.model import CostModel
from autoshard.problem.domains import Domain, Domains, Label
from autoshard.problem.hints import Hints
from autoshard.problem.variables import Edge, Pin, Structure, Variable, build_structure

Fact = TypeVar("Fact")
# Of equally fast layouts an argument takes the one of fewest bytes a device, and so does what a loop holds, such as a mask that is made of
# constants outside it: none is sent however it lies, but each device makes its part. Below any rounding of the objective.
TIE_SECONDS_PER_BYTE = 1e-20


@dataclass(frozen=True, slots=True, eq=False)
class Tables(PairwiseModel):
    """The costs of one step of a search as a pairwise model, in seconds.

    Attributes:
        labels: per variable the labels it may take, ``n_i`` of them.
        incumbent: ``(n_variables,)``, the position of the present label of each variable.
    """

    labels: tuple[tuple[Label, ...], ...]
    incumbent: np.ndarray

    def at(self, positions: Sequence[int] | np.ndarray) -> list[Label]:
        """The labels at some positions ``(n_variables,)``."""
        return [options[position] for options, position in zip(self.labels, positions, strict=True)]

    def positions(self, labels: Sequence[Label]) -> list[int]:
        """The positions of some labels; the inverse of `at`."""
        return [options.index(label) for options, label in zip(self.labels, labels, strict=True)]


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """What a variable offers: labels, their cost, and per slot the layout numbers ``(n,)``."""

    labels: tuple[Label, ...]
    positions: Mapping[Label, int]
    unary: np.ndarray
    slots: tuple[np.ndarray, ...]

    def position(self, label: Label) -> int:
        """Where a label stands; that of the cheapest where it is not offered."""
        found = self.positions.get(label)
        return int(self.unary.argmin()) if found is None else found


_LeaderParts = tuple[np.ndarray, tuple[tuple[Step, ...], ...], np.ndarray]
"""Per label the seconds that an op computes; the distinct collectives of its own that labels have, and per label which of these."""


@dataclass(frozen=True, slots=True, eq=False)
class _Known:
    """What was computed of a problem so far, by all that it depends on: the same whenever it is asked for.

    Attributes:
        op_seconds: by op and the factors that it splits.
        member_costs: by signature and position, then by layout number.
        leader_parts: by op and offer.
        steps_seconds: by steps.
        columns: by kind, label and free axes.
        followers: by kind and label.
        layouts: by kind, label and slot.
        joint_tables: by the number of the reads, and the columns of both variables.
        distinct: the first of equal tables, by shape and hash.
        facts: by the function that says them.
    """

    op_seconds: dict[tuple[int, tuple[int, ...]], float] = field(default_factory=dict)
    member_costs: dict[tuple[int, int], dict[int, float]] = field(default_factory=dict)
    leader_parts: dict[tuple[int, Domain], _LeaderParts] = field(default_factory=dict)
    steps_seconds: dict[tuple[Step, ...], float] = field(default_factory=dict)
    columns: dict[tuple[int, Label, tuple[int, ...]], _Columns] = field(default_factory=dict)
    followers: dict[tuple[int, Label], tuple[Choice, ...]] = field(default_factory=dict)
    layouts: dict[tuple[int, Label, int], Layout] = field(default_factory=dict)
    joint_tables: dict[tuple[int, _Columns, _Columns], np.ndarray] = field(default_factory=dict)
    distinct: dict[tuple[tuple[int, ...], int], np.ndarray] = field(default_factory=dict)
    facts: dict[Callable, Any] = field(default_factory=dict)


class Watcher(Protocol):
    """Who wants to know what a search meets on its way."""

    def judged(self, judgement: Judgement) -> None: ...

    def noted(self, found: Callable[[], Assignment]) -> None: ...

    def hinted(self, hints: Hints) -> None: ...


class Problem:
    """A program on a mesh, ready to be searched; no attribute changes once it is made.

    Attributes:
        profile: the program and its unsharded facts.
        model: what things cost on the mesh.
        pins: per value number, where each mesh axis may shard it.
        memory_limit_bytes: what a device may hold at its peak; None: no limit.
        watcher: who is told what a search meets; nobody unless given.
        variables: the decisions to be made.
        offers: the labels that variables may have.
    """

    _made = False

    def __init__(
        self,
        profile: Profile,
        model: CostModel,
        pins: Mapping[int, Pin] | None = None,
        memory_limit_bytes: float | None = None,
        like: Problem | None = None,
        watcher: Watcher | None = None,
    ):
        """A problem, made anew as far as no other one is like it.

        Args:
            like: a problem to share with: variables where pins are the same, domains and seconds of ops where the mesh has the same sizes,
                all tables where costs are the same.
        """
        self.profile = profile
        self.graph = profile.graph
        self.rules = profile.rules
        self.model = model
        self.mesh = model.mesh
        self.pins: Mapping[int, Pin] = dict(pins or {})
        self.memory_limit_bytes = memory_limit_bytes
        self.watcher = watcher
        if like is not None and like.profile is profile and like.pins == self.pins:
            self.structure, self._kinds, self._joints, self._shared = like.structure, like._kinds, like._joints, like._shared
        else:
            self.structure: Structure = build_structure(profile, self.pins)
            numbers: dict[tuple, int] = {}
            self._kinds = [numbers.setdefault(variable.key(), len(numbers)) for variable in self.structure.variables]
            self._joints = _joints(profile, self.structure)
            self._shared: dict[Callable, Any] = {}
        if like is not None and like.structure is self.structure and like.mesh.sizes == self.mesh.sizes:
            self.domains, self._known = like.domains, like._known_under(model)
        else:
            self.domains, self._known = Domains(self.structure.signatures, self.mesh.sizes), _Known()
        self._made = True

    def __setattr__(self, name: str, value: object) -> None:
        if self._made:
            raise AttributeError(
                f"a problem stays as it was made, and {name!r} was to be set. Use problem.within(limit) or problem.watched(watcher), which "
                "are other problems; what a search finds out goes into the hints of its solution."
            )
        super().__setattr__(name, value)

    def within(self, memory_limit_bytes: float | None) -> Problem:
        """The same problem under another memory limit; the two share all that is known of it."""
        return Problem(self.profile, self.model, self.pins, memory_limit_bytes, self, self.watcher)

    def watched(self, watcher: Watcher) -> Problem:
        """The same problem with somebody who is told what its search meets; the two share all that is known of it."""
        return Problem(self.profile, self.model, self.pins, self.memory_limit_bytes, self, watcher)

    def _known_under(self, model: CostModel) -> _Known:
        """What is known of this problem and holds for one on a mesh of the same sizes."""
        if model is self.model:
            return self._known
        if model.cluster != self.model.cluster:
            return _Known()
        known = self._known  # what is computed, and which collectives, does not depend on where axes are placed
        return _Known(known.op_seconds, known.member_costs, known.leader_parts)

    @property
    def n_variables(self) -> int:
        return len(self.structure.variables)

    def equal_tables(self) -> tuple[list[int], list[tuple[int, int, int]]]:
        """Per variable a number, equal for equal tables; and per read its two variables in order and such a number."""
        return self._kinds, [(i, j, number) for i, j, number, _ in self._joints]

    @property
    def original(self) -> Problem:
        """The problem that this one was reduced from: itself, unless it is a reduction."""
        return self

    def project(self, labels: Sequence[Label]) -> list[Label]:
        """This problem's labels from those of the problem that it was reduced from: the same, unless it is a reduction."""
        return list(labels)

    def invert(self, labels: Sequence[Label]) -> list[Label]:
        """The labels of the problem that this one was reduced from; the inverse of `project`."""
        return list(labels)

    def start(self) -> list[Label]:
        """The labels that leave everything replicated."""
        return [self._nowhere(variable) for variable in self.structure.variables]

    def allows(self, variable: int, label: Label) -> bool:
        """Whether a variable may have a label."""
        return bool(self.domains.domain(self.structure.variables[variable], self._kinds[variable], label, ()).labels)

    def pinned(self, axis: int) -> list[int]:
        """The variables whose pins shard something over the mesh axis."""
        return [i for i, variable in enumerate(self.structure.variables) if any(-1 not in pin[axis] for _, _, pin in variable.pins)]

    def tables(self, free: Sequence[int], labels: Sequence[Label], prices: Mapping[int, float] | None = None) -> Tables:
        """The costs with some mesh axes free and the given labels on all others.

        Args:
            free: the mesh axes that are free.
            labels: the present label of every variable.
            prices: per value number, seconds charged for each byte a device holds of it (a memory multiplier).
        """
        free = tuple(free)
        known, kinds = self._known.columns.get, self._kinds
        columns = [known((kinds[i], label, free)) or self._column(i, label, free) for i, label in enumerate(labels)]
        unary = [offer.unary for offer in columns]
        pairs: dict[tuple[int, int], np.ndarray] = {}
        for i, j, number, edges in self._joints:
            table = self._joint_table(i, j, number, edges, columns)
            if i == j:
                unary[i] = table
            else:
                pairs[i, j] = table
        self._charge(unary, columns, prices or {})
        incumbent = np.fromiter(map(_Columns.position, columns, labels), dtype=np.int64, count=len(labels))
        return Tables(tuple(unary), pairs, tuple(column.labels for column in columns), incumbent)

    def cost_of(self, labels: Sequence[Label], prices: Mapping[int, float] | None = None) -> float:
        """The tables' cost of some labels, in seconds: the objective less `fixed_seconds`."""
        tables = self.tables((), labels, prices)
        return tables.energy(tables.incumbent)

    def whole_tables(self) -> Tables:
        """The costs with all mesh axes free, made once."""
        return self.remembered(_all_free)

    def table_entries(self, free: Sequence[int], limit: int) -> int:
        """How many entries the pair tables have with these axes free; counting stops beyond the limit, before anything large is made."""
        free = tuple(free)
        sizes: dict[int, int] = {}  # by kind
        for i, (variable, kind) in enumerate(zip(self.structure.variables, self._kinds, strict=True)):
            if kind not in sizes:
                if (most := self.domains.most_labels(variable, len(free))) > limit // 1000:
                    return most * 1000
                sizes[kind] = len(self._column(i, self._nowhere(variable), free).labels)
        entries = 0
        for i, j in self._read_pairs():
            entries += sizes[self._kinds[i]] * sizes[self._kinds[j]]
            if entries > limit:
                break
        return entries

    def _read_pairs(self) -> Iterable[tuple[int, int]]:
        """The pairs of variables that have tables."""
        return ((i, j) for i, j, _, _ in self._joints if i != j)

    def _nowhere(self, variable: Variable) -> Label:
        return (NOWHERE if variable.leader >= 0 else -1,) * len(self.mesh.axes)

    def carried(self, labels: Sequence[Label]) -> list[Label] | None:
        """The labels for those on a mesh of as many axes, or of one, which all axes here do as one; None where some are not offered."""
        n = len(self.mesh.axes)
        if len(labels) != self.n_variables:  # pins differ, and with them the variables
            return None
        labels = [label if len(label) == n else label * n for label in labels]
        return labels if all(label in self._joint(variable).positions for variable, label in enumerate(labels)) else None

    def assignment(self, labels: Sequence[Label]) -> Assignment:
        """The assignment that labels stand for."""
        choices: dict[int, Choice] = {}
        lies: dict[int, Layout] = {}
        values, ops = self.graph.values, self.graph.walk()
        for i, variable in enumerate(self.structure.variables):
            if variable.leader >= 0:
                choices[variable.leader] = labels[i]
            key = self._kinds[i], labels[i]
            if (followed := self._known.followers.get(key)) is None:
                ranks = [values[ops[op].operands[position]].rank for op, _, position in variable.members]
                followed = self._known.followers[key] = tuple(
                    _followed(self._rule(op), position, self._layout(i, labels[i], slot, rank))
                    for (op, slot, position), rank in zip(variable.members, ranks, strict=True)
                )
            choices.update((op, choice) for (op, _, _), choice in zip(variable.members, followed, strict=True))
        for value, (variable, slot) in self.structure.home.items():
            lies[value] = self._layout(variable, labels[variable], slot, values[value].rank)
        copies = {}
        for value, variable in self.structure.copies.items():
            layout = labels[variable]
            if layout != lies[value]:
                copies[value] = layout
        return Assignment(self.mesh, choices, lies, copies)

    def labels(self, assignment: Assignment) -> list[Label]:
        """The labels that stand for an assignment of this problem; the inverse of `assignment`."""
        held_by = {variable: value for value, variable in self.structure.copies.items()}
        labels: list[Label] = []
        for i, variable in enumerate(self.structure.variables):
            if variable.leader >= 0:
                labels.append(assignment.choice(variable.leader))
            else:
                value = variable.value
                labels.append(assignment.copies.get(value, assignment.layout(value)) if i in held_by else assignment.layout(value))
        return labels

    def layout(self, variable: int, label: Label, slot: int, value: int) -> Layout:
        """The layout that a variable's label gives one of its slots, in which it holds or reads a value."""
        return self._layout(variable, label, slot, self.graph.values[value].rank)

    def _layout(self, variable: int, label: Label, slot: int, rank: int) -> Layout:
        key = self._kinds[variable], label, slot
        if (found := self._known.layouts.get(key)) is None:
            start = self._nowhere(self.structure.variables[variable])
            joint = self._known.columns.get((self._kinds[variable], start, tuple(range(len(label)))))
            if joint is not None and label in joint.positions:
                number = joint.slots[slot][joint.positions[label]]
            else:
                number = self._column(variable, label, ()).slots[slot][0]
            found = self._known.layouts[key] = layout_of(int(number), rank, len(self.mesh.axes))
        return found

    def _rule(self, op: int) -> Rule:
        rule = self.rules[op]
        assert rule is not None, "ops without a rule make no decision"
        return rule

    def evaluate(self, assignment: Assignment) -> Judgement:
        """What the judge says of an assignment."""
        judgement = evaluate(self.profile, self.model, assignment)
        if self.watcher is not None:
            self.watcher.judged(judgement)
        return judgement

    def note(self, labels: Sequence[Label]) -> None:
        """Says what the search would return if it ended now; costs nothing unless somebody watches."""
        if self.watcher is not None:
            self.watcher.noted(partial(self.assignment, list(labels)))

    def hint(self, hints: Hints) -> None:
        """Says what the search found out so far, should it end now."""
        if self.watcher is not None:
            self.watcher.hinted(hints)

    def remembered(self, fact: Callable[[Problem], Fact]) -> Fact:
        """What a pure function says of this problem, whatever its memory limit; several searchers that ask have it computed once."""
        return self._once(self._known.facts, fact)

    def shared(self, fact: Callable[[Problem], Fact]) -> Fact:
        """The same of a function that looks at no costs: problems on other meshes that have these variables know it too."""
        return self._once(self._shared, fact)

    def _once(self, known: dict[Callable, Any], fact: Callable[[Problem], Fact]) -> Fact:
        if fact not in known:
            known[fact] = fact(self)
        return known[fact]

    def fixed_seconds(self) -> float:
        """What ops cost that no variable decides, such as those on scalars: the objective is this plus the tables."""
        variables = self.structure.variables
        decided = {variable.leader for variable in variables} | {op for variable in variables for op, _, _ in variable.members}
        whole = (NOWHERE,) * len(self.mesh.axes)
        return sum(
            op.trips * self.model.op_seconds(self.profile, op, whole)
            for op in self.graph.walk()
            if op.index not in decided and not (op.results and self.rules[op.index] and all(self.profile.free[v] for v in op.results))
        )

    def compute_bound(self) -> float:
        """A lower bound of the objective over all assignments of the mesh: every op split over all devices, nothing exchanged."""
        return self.remembered(_split_evenly)

    # -- one variable --------------------------------------------------------------------------------------------------

    def _column(self, index: int, label: Label, free: tuple[int, ...]) -> _Columns:
        key = (self._kinds[index], label, free)
        if (found := self._known.columns.get(key)) is None:
            variable = self.structure.variables[index]
            offer = self.domains.domain(variable, self._kinds[index], label, free)
            found = self._known.columns[key] = self._priced(variable, offer)
        return found

    def _priced(self, variable: Variable, offer: Domain) -> _Columns:
        """The offer with what it costs."""
        if not offer.labels:
            raise ShardingError(
                f"a pin must leave some legal sharding on mesh {self.mesh}, and the one on {self._describe(variable)} leaves none. "
                "Loosen the pin, or pick a mesh whose axes divide the tensor."
            )
        labels, slots = offer.labels, offer.slots
        unary = self._leader_cost(variable, offer)
        for slot, signature, position in variable.costs:
            unary = unary + self._member_cost(signature, position, slots[slot])
        for slot, shape, itemsize, portable, trips in variable.gathers:
            unary = unary + trips * self.model.reshard_seconds(shape, itemsize, portable, slots[slot], np.zeros(1, dtype=np.int64))
        return _Columns(labels, offer.positions, self._one(unary), slots)

    def _leader_cost(self, variable: Variable, offer: Domain) -> np.ndarray:
        labels = offer.labels
        if variable.leader < 0:
            _, shape, itemsize, kept = variable.head
            held = np.array([Value(shape, "", itemsize).nbytes / shards(label, self.mesh.sizes) for label in labels])
            return TIE_SECONDS_PER_BYTE * held if kept else np.zeros(len(labels))
        signature = self.structure.signatures[variable.head[1]]
        op = self.graph.walk()[signature.op]
        if (parts := self._known.leader_parts.get((op.index, offer))) is None:
            parts = self._known.leader_parts[op.index, offer] = self._computed_and_sent(op, signature.rule, labels)
        computed, sent, which = parts
        return signature.trips * (computed + np.array([self._own_seconds(steps) for steps in sent])[which])

    def _computed_and_sent(self, op: Op, rule: Rule, labels: Sequence[Label]) -> _LeaderParts:
        """The seconds that an op computes, and its own collectives; neither depends on where axes are placed."""
        known, model = self._known.op_seconds, self.model
        talking = {number for number, factor in enumerate(rule.factors) if factor.kind == "reduction" or factor.sends}
        seconds, which = [], []
        sent: dict[tuple[Step, ...], int] = {}
        for label in labels:
            factors = tuple(factor for factor, _ in label)  # where sums are scattered to is not computed
            if (computed := known.get((op.index, factors))) is None:
                computed = known[op.index, factors] = model.op_seconds(self.profile, op, label)
            seconds.append(computed)
            steps = () if talking.isdisjoint(factors) else model.own_steps(self.profile, op, label)
            which.append(sent.setdefault(steps, len(sent)))
        return np.array(seconds), tuple(sent), np.array(which, dtype=np.int64)

    def _own_seconds(self, steps: tuple[Step, ...]) -> float:
        """What an op's own collectives take."""
        if (found := self._known.steps_seconds.get(steps)) is None:
            found = self._known.steps_seconds[steps] = sum(map(self.model.own_seconds, steps), 0.0)
        return found

    def _member_cost(self, signature: int, position: int, numbers: np.ndarray) -> np.ndarray:
        """The seconds ``(n,)`` of a follower by the layout numbers ``(n,)`` of the operand that decides its choice."""
        known, asked = self._known.member_costs.setdefault((signature, position), {}), numbers.tolist()
        if new := set(asked).difference(known):
            entry = self.structure.signatures[signature]
            rule, op = entry.rule, self.graph.walk()[entry.op]
            for number in new:
                choice = _followed(rule, position, layout_of(number, len(rule.operands[position]), len(self.mesh.axes)))
                known[number] = entry.trips * self.model.op_seconds(self.profile, op, choice)
        return np.array([known[number] for number in asked])

    def _describe(self, variable: Variable) -> str:
        if variable.leader >= 0:
            op = self.graph.walk()[variable.leader]
            return f"{op.primitive} at {op.origin}"
        if variable.value in self.graph.arguments:
            return f"{self.graph.argument_paths[self.graph.arguments.index(variable.value)]} {self.graph.values[variable.value].shape}"
        return f"a value of shape {self.graph.values[variable.value].shape}"

    # -- pairs -----------------------------------------------------------------------------------------------------

    def _joint_table(
        self, i: int, j: int, number: int, edges: Sequence[Edge], columns: Mapping[int, _Columns] | Sequence[_Columns]
    ) -> np.ndarray:
        """What reads between variable ``i`` and one behind it, or within it, cost by their labels; a variable's own costs included."""
        key = number, columns[i], columns[j]
        if (found := self._known.joint_tables.get(key)) is None:
            tables = [self._edge_table(edge, columns) for edge in edges]
            if i == j:
                found = reduce(np.add, tables, columns[i].unary)
            else:
                found = reduce(np.add, [table if edge.source == i else table.T for edge, table in zip(edges, tables, strict=True)])
            self._known.joint_tables[key] = found = self._one(found)
        return found

    def _one(self, table: np.ndarray) -> np.ndarray:
        """The first of equal tables: whoever remembers what came of it by its identity does so for all of them."""
        found = self._known.distinct.setdefault((table.shape, hash(table.tobytes())), table)
        return found if np.array_equal(found, table) else table

    def _edge_table(self, edge: Edge, columns: Mapping[int, _Columns] | Sequence[_Columns]) -> np.ndarray:
        value = self.graph.values[edge.value]
        source = columns[edge.source].slots[edge.source_slot]
        distinct = {target.tobytes(): target for target in (columns[edge.target].slots[slot] for slot in edge.target_slots)}.values()
        sources = source if edge.source == edge.target else source[:, None]
        facts = value.shape, value.itemsize, self.profile.portable[edge.value]
        table = edge.trips * reduce(np.add, [self.model.reshard_seconds(*facts, sources, target) for target in distinct])
        if edge.source == edge.target:
            return table
        if _accumulated(self.profile, self.structure, edge):
            op, labels = self.graph.walk()[self.structure.variables[edge.source].leader], columns[edge.source].labels
            again = np.array([op.trips * self.model.recombining_seconds(self.profile, op, label) for label in labels])
            table += again[:, None] * np.any([source[:, None] != target for target in distinct], axis=0)
        return table

    def _charge(self, unary: list[np.ndarray], columns: Sequence[_Columns], prices: Mapping[int, float]) -> None:
        """Adds prices for the bytes that values hold; equal tables stay one."""
        charged: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}  # with the table that was charged, which keeps its identity
        for value, price in prices.items():
            held = self.graph.values[value]
            for variable, slot in self.places(value):
                numbers = columns[variable].slots[slot]
                key = id(unary[variable]), id(numbers), held.shape, held.itemsize, price
                if key not in charged:
                    charged[key] = unary[variable], unary[variable] + price * self.held_bytes(value, numbers)
                unary[variable] = charged[key][1]

    def places(self, value: int) -> list[tuple[int, int]]:
        """The variables and slots where a value's bytes lie: its own, its copy's, and that of each name under which a body reads it."""
        places = [self.structure.home[value]] if value in self.structure.home else []
        return places + self.shared(_other_places).get(value, [])

    def slots(self, variable: int) -> tuple[np.ndarray, ...]:
        """Per slot of a variable the layout numbers ``(n,)`` by its label in tables with all axes free."""
        return self._joint(variable).slots

    def positions(self, labels: Sequence[Label]) -> list[int]:
        """Where labels stand among those of tables with all axes free; that of the cheapest where one is not among them."""
        return [self._joint(variable).position(label) for variable, label in enumerate(labels)]

    def _joint(self, variable: int) -> _Columns:
        return self._column(variable, self._nowhere(self.structure.variables[variable]), tuple(range(len(self.mesh.axes))))

    def held_bytes(self, value: int, numbers: np.ndarray) -> np.ndarray:
        """The bytes that a device holds of a value in layouts of these numbers."""
        found = self.graph.values[value]
        return found.nbytes / _shards_by_number(found.rank, self.mesh.sizes)[numbers]


def _other_places(problem: Problem) -> dict[int, list[tuple[int, int]]]:
    """By value the variables and slots of its copies, and of the names under which bodies read it."""
    root, places = problem.profile.fusion.root, {}
    copied = {variable: value for value, variable in problem.structure.copies.items()}
    for number, variable in enumerate(problem.structure.variables):
        if variable.leader < 0 and (number in copied or root[variable.value] != variable.value):
            places.setdefault(copied.get(number, root[variable.value]), []).append((number, 0))
    return places


def _all_free(problem: Problem) -> Tables:
    return problem.tables(range(len(problem.mesh.axes)), problem.start())


def _split_evenly(problem: Problem) -> float:
    least: dict[int, float] = {}
    total = 0.0
    for op in problem.graph.walk():
        if not all(problem.profile.free[value] for value in op.results):
            alike = problem.profile.alike[op.index]
            if alike not in least:
                least[alike] = problem.model.least_op_seconds(problem.profile, op)
            total += op.trips * least[alike]
    return total


def _joints(profile: Profile, variables: Structure) -> list[tuple[int, int, int, tuple[Edge, ...]]]:
    """The reads between every two variables, or within one: the two in order, a number that alike ones share, and the edges."""
    between: dict[tuple[int, int], list[Edge]] = {}
    for edge in variables.edges:
        between.setdefault((min(edge.source, edge.target), max(edge.source, edge.target)), []).append(edge)
    numbers: dict[tuple, int] = {}
    values, found = profile.graph.values, []

    def facts(edge: Edge) -> tuple:
        value = values[edge.value]
        added = _accumulated(profile, variables, edge)
        return value.shape, value.itemsize, profile.portable[edge.value], added, edge.trips, edge.source_slot, edge.target_slots

    for (i, j), edges in between.items():
        key = i == j, tuple((edge.source == i, *facts(edge)) for edge in edges)
        found.append((i, j, numbers.setdefault(key, len(numbers)), tuple(edges)))
    return found


def _accumulated(profile: Profile, structure: Structure, edge: Edge) -> bool:
    """Whether a loop adds up partial sums before they are combined; only leaders make partial sums."""
    return profile.sums.made_by.get(edge.value, -1) == structure.variables[edge.source].leader >= 0


@cache
def _shards_by_number(rank: int, sizes: tuple[int, ...]) -> np.ndarray:
    return np.array([shards(layout, sizes) for layout in layouts(rank, len(sizes))])


def _followed(rule: Rule, position: int, layout: Layout) -> Choice:
    """The choice of a follower whose deciding operand has this layout."""
    dims = rule.operands[position]
    return tuple((dims[dim][0], -1) if dim >= 0 and dims[dim] else NOWHERE for dim in layout)
