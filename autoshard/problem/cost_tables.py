"""Cost tables of a problem: unary tables of variables and pair tables of the reads between them, each computed once.

A table is cached by all that it depends on and not by its variables' numbers. So equal layers share their tables, and the tables of a
whole program take a few dictionary look-ups a variable.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.cost.collectives import SHIFT, Groups
from autoshard.errors import ShardingError
from autoshard.inference.model import PairwiseModel
from autoshard.ir import NOWHERE, Choice, Layout, Op, Rule, Value, layout_of
from autoshard.judge.model import CostModel, Sent
from autoshard.primitives import is_collective
from autoshard.problem.domains import Domain, Domains, Label
from autoshard.problem.variables import Coupling, Decisions, Edge, Variable

# Of equally fast layouts an argument takes the one of fewest bytes a device, and so does a value that a loop keeps, such as a mask made of
# constants before the loop: no layout of it has to be sent, but each device makes its part. Below any rounding of the objective.
TIE_SECONDS_PER_BYTE = 1e-20


@dataclass(frozen=True, slots=True, eq=False)
class Tables(PairwiseModel):
    """The costs of a problem, with some mesh axes free, as a pairwise model in seconds.

    Attributes:
        labels: per variable its domain, ``n_i`` labels.
        incumbent: ``(n_variables,)``, the position of each variable's present label.
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
class CostedDomain:
    """The domain of a variable and its unary table.

    Attributes:
        labels: ``n`` of them.
        positions: the position of each label.
        unary: seconds ``(n,)``.
        slots: per slot the layout numbers ``(n,)``.
        array: as of a `Domain`.
        whole: the domain with all mesh axes free that this one's labels were taken from; None: there was none.
        rows: the positions of the labels in that; None likewise.
    """

    labels: tuple[Label, ...]
    positions: Mapping[Label, int]
    unary: np.ndarray
    slots: tuple[np.ndarray, ...]
    array: np.ndarray
    whole: CostedDomain | None = None
    rows: np.ndarray | None = None

    def position(self, label: Label) -> int:
        """The position of a label; of the cheapest one where the domain lacks it."""
        position = self.positions.get(label)
        return int(self.unary.argmin()) if position is None else position


_OpCosts = tuple[np.ndarray, list[Sent]]
"""Seconds of compute by label ``(n,)``, and an op's own collectives."""


class CostTables:
    """The tables of a program's variables under a cost model.

    Attributes:
        facts: the program.
        model: the costs on a mesh.
        decisions: the variables and the reads between them.
        domains: of the variables, on meshes of these sizes.
    """

    def __init__(self, facts: ProgramFacts, model: CostModel, decisions: Decisions, domains: Domains, like: CostTables | None = None):
        """Tables to be computed on demand.

        Args:
            like: tables whose decisions have the same kinds. Of the same cost model all are shared; on the same cluster seconds of compute,
                and, of the same domains, lists of collectives, since neither depends on the placement of mesh axes.
        """
        self.facts = facts
        self.model = model
        self.decisions = decisions
        self.domains = domains
        there = like if like is not None and like.model.cluster == model.cluster else None
        near = there if there is not None and there.domains is domains else None
        same = near if near is not None and near.model is model else None
        # By equal ops and into how many parts they split each factor, on meshes of any sizes.
        self._computed: dict[tuple[int, tuple[int, ...]], float] = {} if there is None else there._computed
        # By signature and position, then by layout number; by op and domain.
        self._follower_seconds: dict[tuple[int, int], dict[int, float]] = {} if near is None else near._follower_seconds
        self._op_costs: dict[tuple[int, Domain], _OpCosts] = {} if near is None else near._op_costs
        # By kind, label and free axes; by kind and label; by kind, label and slot; by number and domains.
        self._domains: dict[tuple[int, Label, tuple[int, ...]], CostedDomain] = {} if same is None else same._domains
        self._followers: dict[tuple[int, Label], tuple[Choice, ...]] = {} if same is None else same._followers
        self._layouts: dict[tuple[int, Label, int], Layout] = {} if same is None else same._layouts
        self._coupling_tables: dict[tuple[int, CostedDomain, CostedDomain], np.ndarray] = {} if same is None else same._coupling_tables
        self._kept: dict[CostedDomain, np.ndarray] = {} if same is None else same._kept
        # The first of equal tables, by shape and hash.
        self._distinct: dict[tuple[tuple[int, ...], int], np.ndarray] = {} if same is None else same._distinct

    # -- domains ---------------------------------------------------------------------------------------------------

    def domain(self, variable: int, label: Label, free: tuple[int, ...]) -> CostedDomain:
        """The labels that differ from a given one on the free axes only, with their costs.

        Raises:
            ShardingError: pins leave the variable no label.
        """
        key = self.decisions.kinds[variable], label, free
        if (domain := self._domains.get(key)) is None:
            one = self.decisions.variables[variable]
            domain = self._taken(variable, label, free) or self._costed(one, self.domains.domain(one, key[0], label, free))
            self._domains[key] = domain
        return domain

    def _taken(self, variable: int, label: Label, free: tuple[int, ...]) -> CostedDomain | None:
        """The same, taken from the domain with all axes free; None where that lacks the label, or is neither known nor small."""
        n_axes, kind = len(self.model.mesh.axes), self.decisions.kinds[variable]
        if len(free) == n_axes:
            return None
        if not self.domains.knows(kind, self.replicated(variable), tuple(range(n_axes))):
            most = self.domains.most_labels(self.decisions.variables[variable], n_axes)
            if not free or most > BUDGETS.whole_labels:
                return None
        whole = self.whole_domain(variable)
        if label not in whole.positions:
            return None
        fixed = [axis for axis in range(n_axes) if axis not in free]
        alike = whole.array[:, fixed] == np.array(label, np.int64)[fixed]
        rows = np.flatnonzero(alike.reshape(len(alike), -1).all(axis=1)) if free else np.array([whole.positions[label]])
        labels = tuple(whole.labels[row] for row in rows.tolist())
        positions = {one: position for position, one in enumerate(labels)}
        slots = tuple(numbers[rows] for numbers in whole.slots)
        return CostedDomain(labels, positions, self._first_equal(whole.unary[rows]), slots, whole.array[rows], whole, rows)

    def domains_of(self, labels: Sequence[Label], free: tuple[int, ...]) -> list[CostedDomain]:
        """The domains of all variables around given labels."""
        known, kinds = self._domains.get, self.decisions.kinds
        return [known((kinds[i], label, free)) or self.domain(i, label, free) for i, label in enumerate(labels)]

    def whole_domain(self, variable: int) -> CostedDomain:
        """The domain of a variable with all mesh axes free."""
        return self.domain(variable, self.replicated(variable), tuple(range(len(self.model.mesh.axes))))

    def replicated(self, variable: int) -> Label:
        """The label of a variable that shards nothing."""
        return (NOWHERE if self.decisions.variables[variable].leader >= 0 else -1,) * len(self.model.mesh.axes)

    def layout(self, variable: int, label: Label, slot: int, rank: int) -> Layout:
        """The layout of a slot under a label."""
        kind, n_axes = self.decisions.kinds[variable], len(self.model.mesh.axes)
        if (layout := self._layouts.get((kind, label, slot))) is None:
            whole = self._domains.get((kind, self.replicated(variable), tuple(range(n_axes))))
            if whole is not None and label in whole.positions:
                number = whole.slots[slot][whole.positions[label]]
            else:
                number = self.domain(variable, label, ()).slots[slot][0]
            layout = self._layouts[kind, label, slot] = layout_of(int(number), rank, n_axes)
        return layout

    def follower_choices(self, variable: int, label: Label) -> tuple[Choice, ...]:
        """The choices of a variable's followers under a label."""
        key = self.decisions.kinds[variable], label
        if (choices := self._followers.get(key)) is None:
            choices = self._followers[key] = tuple(
                _followed(rule, position, self.layout(variable, label, slot, len(rule.operands[position])))
                for slot, signature, position in self.decisions.variables[variable].follower_signatures
                for rule in (self.decisions.signatures[signature].rule,)
            )
        return choices

    # -- unary tables ----------------------------------------------------------------------------------------------

    def _costed(self, variable: Variable, domain: Domain) -> CostedDomain:
        """A domain with its unary table."""
        if not domain.labels:
            raise ShardingError(
                f"a pin must leave some legal sharding on mesh {self.model.mesh}, and the one on {self._describe(variable)} leaves none. "
                "Loosen the pin, or pick a mesh whose axes divide the tensor."
            )
        unary = self._leader_cost(variable, domain)
        for slot, signature, position in variable.follower_signatures:
            unary = unary + self._follower_cost(signature, position, domain.slots[slot])
        for slot, shape, itemsize, portable, trips in variable.whole_reads:
            unary = unary + trips * self.model.reshard_seconds(shape, itemsize, portable, domain.slots[slot], np.zeros(1, dtype=np.int64))
        return CostedDomain(domain.labels, domain.positions, self._first_equal(unary), domain.slots, domain.array)

    def _leader_cost(self, variable: Variable, domain: Domain) -> np.ndarray:
        """The seconds ``(n,)`` of a variable's leader, or the tie-break of its layout."""
        if variable.leader < 0:
            _, shape, itemsize, stored = variable.label_type
            parts = np.where(domain.array >= 0, np.array(self.model.mesh.sizes, np.int64), 1).prod(axis=1)
            return TIE_SECONDS_PER_BYTE * (Value(shape, "", itemsize).nbytes / parts) if stored else np.zeros(len(domain.labels))
        signature = self.decisions.signatures[variable.label_type[1]]
        op = self.facts.graph.walk()[signature.op]
        if (costs := self._op_costs.get((op.index, domain))) is None:
            costs = self._op_costs[op.index, domain] = self._compute_and_collectives(op, signature.rule, domain)
        computed, sent = costs
        communicated, rings, last = np.zeros(len(computed)), np.zeros(len(computed)), np.zeros(len(computed))
        for kind, axes, groups, trips, itemsize, positions, nbytes in sent:
            seconds = self.model.communication.seconds(kind, nbytes, axes, groups, itemsize) / trips
            if kind != SHIFT:
                communicated[positions] += seconds
                continue
            n = math.prod(self.model.mesh.sizes[axis] for axis in axes)
            rings[positions] += (n - 1) * seconds
            last[positions] = computed[positions] / n
        if "collective_permute" in self.facts.compiler.asynchronous:
            computed = np.maximum(computed, rings + last)  # each block but the last is computed while the next one comes
        else:
            communicated += rings
        return signature.trips * (computed + communicated)

    def _compute_and_collectives(self, op: Op, rule: Rule, domain: Domain) -> _OpCosts:
        """The seconds that an op computes, and its own collectives; neither depends on the placement of mesh axes."""
        splits = domain.array[:, :, :1] == np.arange(len(rule.factors))
        parts = np.where(splits, np.array(self.model.mesh.sizes, np.int64)[:, None], 1).prod(axis=1)
        seconds = [self._seconds(op, tuple(row), label) for row, label in zip(parts.tolist(), domain.labels, strict=True)]
        return np.array(seconds), self._sent(op, rule, domain, splits)

    def _sent(self, op: Op, rule: Rule, domain: Domain, splits: np.ndarray) -> list[Sent]:
        """The op's own collectives: of partial results for all labels at once, of exchanges between shards one label after the other."""
        reduced = [number for number, factor in enumerate(rule.factors) if factor.kind == "reduction"]
        sending = [number for number, factor in enumerate(rule.factors) if factor.sends]
        kept = {number for result in rule.results for dim in result for number in dim}
        if not sending and not is_collective(op.primitive) and kept.isdisjoint(reduced):
            return self.model.combined(self.facts, op, domain.array) if reduced else []
        found: dict[tuple[str, tuple[int, ...], Groups | None, int, float], list[tuple[int, float]]] = {}
        for number in np.flatnonzero(splits[:, :, [*reduced, *sending]].any(axis=(1, 2))).tolist():
            for step in self.model.own_steps(self.facts, op, domain.labels[number]):
                if step.kind != "slice":
                    at = SHIFT if step.hops else step.kind, step.axes, step.groups, step.trips, step.itemsize
                    found.setdefault(at, []).append((number, step.compiled_nbytes or step.nbytes))
        return [sent for at, each in found.items() for sent in _once_a_label(at, each)]

    def _seconds(self, op: Op, parts: tuple[int, ...], choice: Choice) -> float:
        """The seconds that an op computes under a choice, which depend on the number of parts of each factor alone."""
        key = self.facts.alike[op.index], parts
        if (seconds := self._computed.get(key)) is None:
            seconds = self._computed[key] = self.model.op_seconds(self.facts, op, choice)
        return seconds

    def kept_partials(self, variable: int, domain: CostedDomain) -> np.ndarray:
        """The bytes ``(n,)`` of a leader's partial result that a device keeps until all such are combined, by the labels of its domain.

        So are those of which the compiler forms no reduce_scatter (`autoshard.compilers.buffer_assignment.stored_partials`).
        """
        if (kept := self._kept.get(domain)) is None:
            op = self.facts.graph.walk()[self.decisions.variables[variable].leader]
            kept = self._kept[domain] = np.array([self._kept_whole(op, label) for label in domain.labels])
        return kept

    def _kept_whole(self, op: Op, label: Label) -> float:
        step = next(iter(self.model.reduction_path(self.facts, op, label, 0)), None)
        if step is None or step.kind != "reduce_scatter":
            return 0.0
        formed = self.facts.compiler.scatters(self.facts.graph.values[op.results[0]], step, self.model.mesh.sizes)
        return 0.0 if formed else step.nbytes

    def _follower_cost(self, signature: int, position: int, numbers: np.ndarray) -> np.ndarray:
        """The seconds ``(n,)`` of a follower by the layout numbers ``(n,)`` of the operand that decides its choice."""
        known, wanted = self._follower_seconds.setdefault((signature, position), {}), numbers.tolist()
        if new := set(wanted).difference(known):
            entry = self.decisions.signatures[signature]
            rule, op = entry.rule, self.facts.graph.walk()[entry.op]
            for number in new:
                choice = _followed(rule, position, layout_of(number, len(rule.operands[position]), len(self.model.mesh.axes)))
                parts = [1] * len(rule.factors)
                for (factor, _), size in zip(choice, self.model.mesh.sizes, strict=True):
                    if factor >= 0:
                        parts[factor] *= size
                known[number] = entry.trips * self._seconds(op, tuple(parts), choice)
        return np.array([known[number] for number in wanted])

    def _describe(self, variable: Variable) -> str:
        graph = self.facts.graph
        if variable.leader >= 0:
            op = graph.walk()[variable.leader]
            return f"{op.primitive} at {op.origin}"
        if variable.value in graph.arguments:
            return f"{graph.argument_paths[graph.arguments.index(variable.value)]} {graph.values[variable.value].shape}"
        return f"a value of shape {graph.values[variable.value].shape}"

    # -- pair tables -----------------------------------------------------------------------------------------------

    def table(self, coupling: Coupling, domains: Mapping[int, CostedDomain] | Sequence[CostedDomain]) -> np.ndarray:
        """The seconds ``(n_i, n_j)`` of a coupling's reads; of reads within a variable ``(n_i,)``, its unary table included."""
        i, j, number, edges = coupling
        key = number, domains[i], domains[j]
        if (table := self._coupling_tables.get(key)) is None:
            if (table := self._taken_table(number, domains[i], domains[j], i == j)) is None:
                tables = [self._edge_table(edge, domains) for edge in edges]
                if i == j:
                    table = reduce(np.add, tables, domains[i].unary)
                else:
                    table = reduce(np.add, [one if edge.source == i else one.T for edge, one in zip(edges, tables, strict=True)])
            self._coupling_tables[key] = table = self._first_equal(table)
        return table

    def _taken_table(self, number: int, one: CostedDomain, other: CostedDomain, is_within: bool) -> np.ndarray | None:
        """The entries of the table with all axes free; None where that is not known, or is not of these domains' labels."""
        if one.whole is None or other.whole is None or one.rows is None or other.rows is None:
            return None
        if (whole := self._coupling_tables.get((number, one.whole, other.whole))) is None:
            return None
        return whole[one.rows] if is_within else whole[one.rows[:, None], other.rows]

    def _first_equal(self, table: np.ndarray) -> np.ndarray:
        """The first of equal tables, so that results computed from a table and kept by its identity serve all equal ones."""
        first = self._distinct.setdefault((table.shape, hash(table.tobytes())), table)
        return first if np.array_equal(first, table) else table

    def _edge_table(self, edge: Edge, domains: Mapping[int, CostedDomain] | Sequence[CostedDomain]) -> np.ndarray:
        value = self.facts.graph.values[edge.value]
        source = domains[edge.source].slots[edge.source_slot]
        distinct = {target.tobytes(): target for target in (domains[edge.target].slots[slot] for slot in edge.target_slots)}.values()
        sources = source if edge.source == edge.target else source[:, None]
        facts = value.shape, value.itemsize, self.facts.portable[edge.value]
        table = edge.trips * reduce(np.add, [self.model.reshard_seconds(*facts, sources, target) for target in distinct])
        if edge.source == edge.target:
            return table
        if edge.late_sum:
            op, labels = self.facts.graph.walk()[self.decisions.variables[edge.source].leader], domains[edge.source].labels
            again = np.array([op.trips * self.model.recombining_seconds(self.facts, op, label) for label in labels])
            table += again[:, None] * np.any([source[:, None] != target for target in distinct], axis=0)
        return table


def _once_a_label(at: tuple[str, tuple[int, ...], Groups | None, int, float], sent: list[tuple[int, float]]) -> Iterator[Sent]:
    """Collectives of one kind, of labels each of which has several perhaps, divided so that none has two."""
    while sent:
        first = dict(reversed(sent))
        yield *at, np.array([*first], np.int64), np.array([*first.values()])
        seen: set[int] = set()
        sent = [each for each in sent if each[0] in seen or seen.add(each[0])]


def _followed(rule: Rule, position: int, layout: Layout) -> Choice:
    """The choice of a follower by the layout of the operand that decides it."""
    dims = rule.operands[position]
    return tuple((dims[dim][0], -1) if dim >= 0 and dims[dim] else NOWHERE for dim in layout)
