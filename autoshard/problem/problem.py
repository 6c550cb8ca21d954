"""The search problem: a program on a mesh, with its decision variables, their cost tables, and the judge.

Its objective is additive: seconds that no variable decides, plus a unary table per variable and a pair table per two variables between
which values are read. `Problem.tables` gives these tables with some mesh axes free, while every variable keeps its label on the others: all
axes for a joint search, one for a search that goes axis by axis.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any, Protocol, TypeVar

import numpy as np

from autoshard.compilers.buffers import Buffer, CopiesOf
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.cost.reshard import path_seconds
from autoshard.inference.model import Pair
from autoshard.ir import NOWHERE, Assignment, Choice, Graph, Layout, Mesh, Rule, given_choice, layout_dims, shards_of
from autoshard.judge.evaluate import Judgement, evaluate
from autoshard.judge.model import CostModel
from autoshard.problem.cost_tables import CostedDomain, CostTables, Tables
from autoshard.problem.domains import Domains, Label
from autoshard.problem.hints import Hints
from autoshard.problem.variables import Decisions, Edge, Pin, decisions_of

Fact = TypeVar("Fact")

CHECKED = 256  # so many tables are made in between two looks at the clock


Charge = tuple[int, int, int, float]
"""What a price of bytes is on: variable, slot (-1: the partial result of its leader), rank and bytes of the whole array."""


class Observer(Protocol):
    """A receiver of the answers and hints that a search comes to on its way."""

    def check(self) -> None:
        """Is called before what takes time, and may end the search by an exception."""

    def judged(self, judgement: Judgement) -> None:
        """Receives an assignment that was judged."""

    def noted(self, found: Callable[[], Assignment]) -> None:
        """Receives the answer that the search would return if it ended now, not judged yet."""

    def hinted(self, hints: Hints) -> None:
        """Receives the hints that the search would return if it ended now."""


class Problem:
    """A program on a mesh, to be searched; it is immutable.

    Attributes:
        facts: the program and the facts about it that no assignment changes.
        graph, rules: of the program.
        model: the costs on the mesh.
        mesh: the mesh.
        pins: per value number, the dimensions that the user lets each mesh axis shard.
        memory_limit_bytes: the most bytes that a device may have in use at its peak; None: no limit.
        observer: receives answers and hints of searches; None: nobody does.
        decisions: the variables and the reads between them.
        costs: the tables of the variables.
    """

    _made = False

    def __init__(
        self,
        facts: ProgramFacts,
        model: CostModel,
        pins: Mapping[int, Pin] | None = None,
        memory_limit_bytes: float | None = None,
        like: Problem | None = None,
        observer: Observer | None = None,
        restricted: Mapping[int, Pin] | None = None,
    ):
        """A problem, of which as much as possible is shared with another one.

        Args:
            like: the other problem. Variables are shared where program and pins are the same, or the pins of arguments alone differ; then
                compute seconds, too, where the cluster is the same, domains where mesh sizes are, and tables where the cost model is.
            restricted: layouts of values that the other problem has, restricted as pins are.
        """
        self.facts = facts
        self.graph: Graph = facts.graph
        self.rules: tuple[Rule | None, ...] = facts.rules
        self.model = model
        self.mesh: Mesh = model.mesh
        self.pins: Mapping[int, Pin] = dict(pins or {})
        self.memory_limit_bytes = memory_limit_bytes
        self.observer = observer
        like = like if like is not None and like.facts is facts else None
        known = None if like is None else like.decisions if like.pins == self.pins else like.decisions.repinned(facts, like.pins, self.pins)
        known = decisions_of(facts, self.pins) if known is None else known
        self.decisions: Decisions = known.restricted(facts, restricted) if restricted else known
        same = like is not None and like.decisions is self.decisions
        self._facts_of_decisions: dict[Callable, Any] = like._facts_of_decisions if like is not None and same else {}
        like = like if like is not None and like.decisions.signatures is known.signatures else None
        if like is not None and same and like.model is model:
            self.costs, self._facts = like.costs, like._facts
        else:
            alike = like is not None and like.mesh.sizes == self.mesh.sizes
            domains = like.costs.domains if like is not None and alike else Domains(self.decisions.signatures, self.mesh.sizes)
            self.costs: CostTables = CostTables(facts, model, self.decisions, domains, None if like is None else like.costs)
            self._facts: dict[Callable, Any] = {}
        self._made = True

    def __setattr__(self, name: str, value: object) -> None:
        if self._made:
            raise AttributeError(
                f"a problem stays as it was made, and {name!r} was to be set. Use problem.within(limit) or problem.observed_by(observer), "
                "which are other problems; facts for the next search go into the hints of a solution."
            )
        super().__setattr__(name, value)

    def within(self, memory_limit_bytes: float | None) -> Problem:
        """The same problem under another memory limit; the two share all tables."""
        return Problem(self.facts, self.model, self.pins, memory_limit_bytes, self, self.observer)

    def observed_by(self, observer: Observer) -> Problem:
        """The same problem with an observer of its searches; the two share all tables."""
        return Problem(self.facts, self.model, self.pins, self.memory_limit_bytes, self, observer)

    def restricted(self, pins: Mapping[int, Pin]) -> Problem:
        """The same problem with the layouts of some values restricted as by pins, computed ones too; the two share all other tables.

        An assignment of it is one of this problem. A pin of a computed value would let its operation lead, which is another problem.
        """
        return Problem(self.facts, self.model, self.pins, self.memory_limit_bytes, self, restricted=pins)

    @property
    def n_variables(self) -> int:
        return len(self.decisions.variables)

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

    # -- labels ----------------------------------------------------------------------------------------------------

    def start(self) -> list[Label]:
        """The labels that leave everything replicated."""
        return [self.costs.replicated(variable) for variable in range(len(self.decisions.variables))]

    def allows(self, variable: int, label: Label) -> bool:
        """Whether a label is in a variable's domain."""
        decisions = self.decisions
        return bool(self.costs.domains.domain(decisions.variables[variable], decisions.kinds[variable], label, ()).labels)

    def pinned(self, axis: int) -> list[int]:
        """The variables that pins make shard something over the mesh axis, or specs of a user's shard_map."""
        variables, sizes = self.decisions.variables, self.mesh.sizes
        rules = [self.rules[one.leader] if one.leader >= 0 else None for one in variables]
        given = [rule is not None and bool(rule.given) and given_choice(rule, sizes)[axis] != NOWHERE for rule in rules]
        return [i for i, one in enumerate(variables) if given[i] or any(-1 not in pin[axis] for _, _, pin in one.pins)]

    def transferred(self, labels: Sequence[Label]) -> list[Label] | None:
        """Labels for this mesh from those of a mesh with as many axes, or with one, which all axes here then follow.

        Returns:
            None where the variables differ, as with other pins, or some domain lacks its label.
        """
        n = len(self.mesh.axes)
        if len(labels) != self.n_variables:
            return None
        labels = [label if len(label) == n else label * n for label in labels]
        return labels if all(label in self.costs.whole_domain(variable).positions for variable, label in enumerate(labels)) else None

    def assignment(self, labels: Sequence[Label]) -> Assignment:
        """The assignment of some labels."""
        choices: dict[int, Choice] = {}
        placed: dict[int, Layout] = {}
        values = self.graph.values
        for i, variable in enumerate(self.decisions.variables):
            if variable.leader >= 0:
                choices[variable.leader] = labels[i]
            followed = self.costs.follower_choices(i, labels[i])
            choices.update((op, choice) for (op, _, _), choice in zip(variable.followers, followed, strict=True))
        for value, (variable, slot) in self.decisions.home.items():
            placed[value] = self.costs.layout(variable, labels[variable], slot, values[value].rank)
        copies = {}
        for value, variable in self.decisions.copies.items():
            layout = labels[variable]
            if layout != placed[value]:
                copies[value] = layout
        return Assignment(self.mesh, choices, placed, copies)

    def labels(self, assignment: Assignment) -> list[Label]:
        """The labels of an assignment of this problem; the inverse of `assignment`."""
        copies = set(self.decisions.copies.values())
        labels: list[Label] = []
        for i, variable in enumerate(self.decisions.variables):
            if variable.leader >= 0:
                labels.append(assignment.choice(variable.leader))
            else:
                value = variable.value
                labels.append(assignment.copies.get(value, assignment.layout(value)) if i in copies else assignment.layout(value))
        return labels

    def layout(self, variable: int, label: Label, slot: int, value: int) -> Layout:
        """The layout of a value that a slot of a variable stores or reads, under a label."""
        return self.costs.layout(variable, label, slot, self.graph.values[value].rank)

    # -- tables ----------------------------------------------------------------------------------------------------

    def tables(self, free: Sequence[int], labels: Sequence[Label], prices: Mapping[Buffer, float] | None = None) -> Tables:
        """The costs with some mesh axes free and the given labels on all others.

        Args:
            free: the free mesh axes.
            labels: the present label of every variable.
            prices: seconds charged for each byte on a device (Lagrange multipliers), by what is stored; an op's partial result is charged
                where the op keeps it whole.
        """
        free = tuple(free)
        domains = self.costs.domains_of(labels, free)
        unary = [domain.unary for domain in domains]
        pairs: dict[tuple[int, int], np.ndarray] = {}
        for number, coupling in enumerate(self.decisions.couplings):
            if number % CHECKED == 0:
                self.check()
            i, j = coupling[:2]
            table = self.costs.table(coupling, domains)
            if i == j:
                unary[i] = table
            else:
                pairs[i, j] = table
        self.charge(unary, pairs, domains, prices or {})
        incumbent = np.fromiter(map(CostedDomain.position, domains, labels), dtype=np.int64, count=len(labels))
        return Tables(tuple(unary), pairs, tuple(domain.labels for domain in domains), incumbent)

    def charge(
        self, unary: list[np.ndarray], pairs: dict[Pair, np.ndarray], domains: Sequence[CostedDomain], prices: Mapping[Buffer, float]
    ) -> None:
        """Replaces tables by such that charge prices for bytes; equal tables stay one array.

        Args:
            unary: per variable its table ``(n,)``, to be replaced.
            pairs: by two variables their table ``(n_i, n_j)``, to be replaced.
            domains: of the variables.
            prices: as in `tables`.
        """
        charged: dict[tuple[Any, ...], tuple[np.ndarray, np.ndarray]] = {}  # by identities; the value keeps its key's table alive
        for buffer, price in prices.items():
            for edge in self.copying(buffer):
                first, last = domains[edge.source].slots[edge.source_slot], [domains[edge.target].slots[slot] for slot in edge.target_slots]
                one, pair = self.graph.values[edge.value], (min(edge.source, edge.target), max(edge.source, edge.target))
                key = id(pairs[pair]), pair[0] == edge.source, id(first), *map(id, last), one.rank, one.nbytes, price
                if key not in charged:
                    nbytes = self.copied_bytes(edge, first, last)
                    charged[key] = pairs[pair], pairs[pair] + price * (nbytes if pair[0] == edge.source else nbytes.T)
                pairs[pair] = charged[key][1]
            for charge in self.charges(buffer):
                variable, slot = charge[:2]
                domain = domains[variable]
                key = id(unary[variable]), id(domain.slots[slot] if slot >= 0 else domain), charge[2:], price
                if key not in charged:
                    charged[key] = unary[variable], unary[variable] + price * self.charged_bytes(charge, variable, domain)
                unary[variable] = charged[key][1]

    def charges(self, buffer: Buffer) -> list[Charge]:
        """What a price is on: every place that stores a value, or the partial result of an op."""
        if isinstance(buffer, CopiesOf):
            return []
        if buffer < 0:
            variable = self.cached_for_all_meshes(leading_variables).get(~buffer)
            return [] if variable is None else [(variable, -1, 0, 0.0)]
        one, own = self.graph.values[buffer], (self.decisions.home.get(buffer, (-1, 0))[0], self.decisions.copies.get(buffer, -1))
        found = []
        for variable, slot in self.places(buffer):  # another name under which a body reads it may be a view of another rank
            name = buffer if variable in own else self.decisions.variables[variable].value
            found.append((variable, slot, self.graph.values[name].rank, one.nbytes))
        return found

    def charged_bytes(self, charge: Charge, variable: int, domain: CostedDomain) -> np.ndarray:
        """The bytes on a device ``(n,)`` that a charge is for, by the labels of a variable's domain."""
        _, slot, rank, nbytes = charge
        if slot < 0:
            return self.costs.kept_partials(variable, domain)
        return nbytes / shards_of(domain.slots[slot], rank, self.mesh.sizes)

    def copying(self, buffer: Buffer) -> Sequence[Edge]:
        """The reads of a value whose copies a price is on; none of other buffers, nor where the copy has a variable of its own."""
        return self.cached_for_all_meshes(_reads_of_values).get(buffer.value, ()) if isinstance(buffer, CopiesOf) else ()

    def copied_bytes(self, edge: Edge, source: np.ndarray, targets: Sequence[np.ndarray]) -> np.ndarray:
        """The share ``(n_source, n_target)`` of a copy's bytes on a device that one of its readers is charged, by the layouts' numbers.

        A copy is stored from its first reader to its last, so that each of ``n`` readers is charged the ``n``-th part.
        """
        one, readers = self.graph.values[edge.value], len(self.copying(CopiesOf(edge.value)))
        shares = (_copied_shares(source[:, None], target, one.rank, self.mesh.sizes) for target in targets)
        return one.nbytes / readers * reduce(np.maximum, shares)

    def cost_of(self, labels: Sequence[Label], prices: Mapping[Buffer, float] | None = None) -> float:
        """The tables' cost of some labels, in seconds: the objective less `fixed_seconds`."""
        tables = self.tables((), labels, prices)
        return tables.energy(tables.incumbent)

    def whole_tables(self) -> Tables:
        """The costs with all mesh axes free, made once."""
        return self.cached(_all_free)

    def table_entries(self, free: Sequence[int], limit: int) -> int:
        """The number of entries of the pair tables with these axes free; beyond the limit a rough one. No large table is made."""
        free = tuple(free)
        if len(free) > 1 and not self.model.tabulates(self.cached_for_all_meshes(_highest_rank)):
            return limit + 1  # reshards are computed pair by pair, which takes longer than any search
        sizes: dict[int, int] = {}  # by kind
        variables, domains = self.decisions.variables, self.costs.domains
        for number, (kind, i) in enumerate(self.cached_for_all_meshes(_first_of_kinds).items()):
            if number % CHECKED == CHECKED - 1:
                self.check()
            if (most := domains.most_labels(variables[i], len(free))) > limit // 1000:
                return most * 1000
            sizes[kind] = len(self.costs.domain(i, self.costs.replicated(i), free).labels)
        return sum(n * sizes[one] * sizes[other] for (one, other), n in self.kind_pairs().items())

    def kind_pairs(self) -> Mapping[tuple[int, int], int]:
        """The number of pair tables by the kinds of their two variables; of a reduction, of the variables that stand for its own."""
        return self.cached_for_all_meshes(_kind_pairs)

    def most_labels(self) -> int:
        """The number of labels of one variable of each kind, legal or not."""
        variables, most = self.decisions.variables, self.costs.domains.most_labels
        return sum(most(variables[i], len(self.mesh.axes)) for i in self.cached_for_all_meshes(_first_of_kinds).values())

    def slots(self, variable: int) -> tuple[np.ndarray, ...]:
        """Per slot of a variable the layout numbers ``(n,)`` by its labels with all axes free."""
        return self.costs.whole_domain(variable).slots

    def positions(self, labels: Sequence[Label]) -> list[int]:
        """The positions of labels in the domains with all axes free; of the cheapest label where a domain lacks one."""
        return [self.costs.whole_domain(variable).position(label) for variable, label in enumerate(labels)]

    def places(self, value: int) -> list[tuple[int, int]]:
        """The variables and slots that store a value: its own, its copy's, and that of each name under which a body reads it."""
        places = [self.decisions.home[value]] if value in self.decisions.home else []
        return places + self.cached_for_all_meshes(_other_places).get(value, [])

    def device_bytes(self, value: int, numbers: np.ndarray) -> np.ndarray:
        """The bytes of a value on a device ``(n,)``, in the layouts of these numbers ``(n,)``."""
        one = self.graph.values[value]
        return one.nbytes / shards_of(numbers, one.rank, self.mesh.sizes)

    # -- judging ---------------------------------------------------------------------------------------------------

    def evaluate(self, assignment: Assignment) -> Judgement:
        """The judge's figures of an assignment."""
        self.check()
        judgement = evaluate(self.facts, self.model, assignment)
        self.tell(judgement)
        return judgement

    def check(self) -> None:
        """Lets the observer, if there is one, end the search."""
        if self.observer is not None:
            self.observer.check()

    def tell(self, judgement: Judgement) -> None:
        """Tells the observer, if there is one, of an assignment that was judged."""
        if self.observer is not None:
            self.observer.judged(judgement)

    def note(self, labels: Sequence[Label]) -> None:
        """Tells the observer, if there is one, the answer that the search would return if it ended now."""
        if self.observer is not None:
            self.observer.noted(partial(self.assignment, list(labels)))

    def hint(self, hints: Hints) -> None:
        """Tells the observer, if there is one, the hints that the search would return if it ended now."""
        if self.observer is not None:
            self.observer.hinted(hints)

    # -- facts -----------------------------------------------------------------------------------------------------

    def cached(self, fact: Callable[[Problem], Fact]) -> Fact:
        """The result of a pure function of this problem that does not read its memory limit, computed once."""
        return self._once(self._facts, fact)

    def cached_for_all_meshes(self, fact: Callable[[Problem], Fact]) -> Fact:
        """The result of a pure function of the decisions, computed once for the problems on all meshes that share them."""
        return self._once(self._facts_of_decisions, fact)

    def _once(self, known: dict[Callable, Any], fact: Callable[[Problem], Fact]) -> Fact:
        if fact not in known:
            known[fact] = fact(self)
        return known[fact]

    def fixed_seconds(self) -> float:
        """The cost of ops that no variable decides, such as those on scalars: the objective is this plus the tables."""
        return self.cached(_undecided)

    def compute_bound(self) -> float:
        """A lower bound of the objective over all assignments of the mesh: every op split over all devices, nothing communicated."""
        return self.cached(_split_evenly)


def _first_of_kinds(problem: Problem) -> dict[int, int]:
    """By kind its first variable."""
    found: dict[int, int] = {}
    for variable, kind in enumerate(problem.decisions.kinds):
        found.setdefault(kind, variable)
    return found


def _kind_pairs(problem: Problem) -> Counter[tuple[int, int]]:
    kinds = problem.decisions.kinds
    return Counter((kinds[one.first], kinds[one.last]) for one in problem.decisions.couplings if one.first != one.last)


def _all_free(problem: Problem) -> Tables:
    return problem.tables(range(len(problem.mesh.axes)), problem.start())


def _undecided(problem: Problem) -> float:
    variables, facts, model = problem.decisions.variables, problem.facts, problem.model
    decided = {variable.leader for variable in variables} | {op for variable in variables for op, _, _ in variable.followers}
    whole = (NOWHERE,) * len(problem.mesh.axes)
    return sum(
        op.trips * (model.op_seconds(facts, op, whole) + path_seconds(model.exchange_path(facts, op, whole)))
        for op in problem.graph.walk()
        if op.index not in decided and not (op.results and problem.rules[op.index] and all(facts.free[v] for v in op.results))
    )


def _split_evenly(problem: Problem) -> float:
    least: dict[int, float] = {}
    total = 0.0
    for op in problem.graph.walk():
        if not all(problem.facts.free[value] for value in op.results):
            alike = problem.facts.alike[op.index]
            if alike not in least:
                least[alike] = problem.model.least_op_seconds(problem.facts, op)
            total += op.trips * least[alike]
    return total


def leading_variables(problem: Problem) -> dict[int, int]:
    """The variable that each op leads, by the op's index."""
    return {variable.leader: number for number, variable in enumerate(problem.decisions.variables) if variable.leader >= 0}


def _other_places(problem: Problem) -> dict[int, list[tuple[int, int]]]:
    """By value, the variables and slots of its copies, and of the names under which bodies read it."""
    root, places = problem.facts.fusion.root, {}
    copied = {variable: value for value, variable in problem.decisions.copies.items()}
    for number, variable in enumerate(problem.decisions.variables):
        if variable.leader < 0 and (number in copied or root[variable.value] != variable.value):
            places.setdefault(copied.get(number, root[variable.value]), []).append((number, 0))
    return places


def _reads_of_values(problem: Problem) -> dict[int, list[Edge]]:
    """By value its reads by other variables, but for that of a shared copy."""
    reads: dict[int, list[Edge]] = {}
    for edge in problem.decisions.edges:
        if edge.source != edge.target and problem.decisions.copies.get(edge.value) != edge.target:
            reads.setdefault(edge.value, []).append(edge)
    return reads


def _copied_shares(sources: np.ndarray, targets: np.ndarray, rank: int, sizes: tuple[int, ...]) -> np.ndarray:
    """The share of a tensor on a device that is sent there for layouts, from others, by their numbers, which broadcast.

    A slice of what is there is not sent.
    """
    before, after = (layout_dims(numbers, rank, len(sizes)) for numbers in (sources, targets))
    return ((before >= 0) & (before != after)).any(axis=-1) / shards_of(targets, rank, sizes)


def _highest_rank(problem: Problem) -> int:
    """That of the values between variables."""
    return max((problem.graph.values[edge.value].rank for edge in problem.decisions.edges), default=0)
