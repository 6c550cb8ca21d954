"""Symmetry reduction: one variable for each class of equivalent variables, such as the same operation in equal layers.

Two variables are equivalent when they have the same tables and, as far as a few reads away, so do their neighbours: colour refinement
(Weisfeiler and Lehman 1968), stopped early, so that all layers but those next to something else have the same colours. The quotient problem
has one variable a colour, whose tables are the sums over its class (lifted inference: Mladenov, Ahmadi and Kersting 2012, "Lifted linear
programming"). Its labellings are labellings of the whole problem, of the same cost. So its optimum is an answer, which takes the time of a
layer or two however deep the program is; the whole problem's lower bound shows how good that answer is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.compilers.buffers import Buffer
from autoshard.inference.model import Messages, Pair
from autoshard.inference.trw_s import MessagePassing
from autoshard.ir import Assignment
from autoshard.problem import Label, Problem, Tables
from autoshard.problem.cost_tables import CostedDomain
from autoshard.problem.problem import Charge, Fact
from autoshard.problem.variables import Coupling, Edge

Part = TypeVar("Part")


def apply(problem: Problem) -> Quotient | None:
    """The quotient problem; None where it would have nearly as many variables."""
    classes = problem.cached_for_all_meshes(_classes)
    return Quotient(problem, classes) if classes.max(initial=0) + 1 <= BUDGETS.symmetry_share * problem.n_variables else None


def _classes(problem: Problem) -> np.ndarray:
    """Per variable ``(n_variables,)`` the number of its colour, in the order in which colours first occur."""
    kinds, couplings = problem.decisions.kinds, problem.decisions.couplings
    within = {one.first: one.number for one in couplings if one.first == one.last}
    keys = [(kind, within.get(variable, -1)) for variable, kind in enumerate(kinds)]
    colours = np.unique(np.array(keys, dtype=np.int64).reshape(-1, 2), axis=0, return_inverse=True)[1].reshape(-1)
    first, last, number = np.array([one[:3] for one in couplings if one.first != one.last], dtype=np.int64).reshape(-1, 3).T
    for _ in range(BUDGETS.symmetry_rounds):
        seen = np.zeros(len(kinds), dtype=np.uint64)
        np.add.at(seen, first, _mixed(_mixed(colours)[last] + 2 * number.astype(np.uint64)))
        np.add.at(seen, last, _mixed(_mixed(colours)[first] + 2 * number.astype(np.uint64) + 1))
        pairs = np.stack([colours.astype(np.uint64), seen], axis=1)
        finer = np.unique(pairs, axis=0, return_inverse=True)[1].reshape(-1)
        if finer.max(initial=0) == colours.max(initial=0):
            break
        colours = finer
    _, firsts, inverse = np.unique(colours, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(firsts))[inverse.reshape(-1)]


def _counted_couplings(problem: Problem) -> dict[tuple[int, int, int], tuple[int, Coupling]]:
    """By the colours of two variables and the number of their coupling: the count of such couplings, and one of them."""
    classes, counted = problem.cached_for_all_meshes(_classes).tolist(), {}
    for one in problem.decisions.couplings:
        key = classes[one.first], classes[one.last], one.number
        counted[key] = (counted[key][0] if key in counted else 0) + 1, one
    return counted


def _kind_pairs(problem: Problem) -> Counter[tuple[int, int]]:
    """The number of pairs of colours with tables, by the kinds of their variables."""
    classes, kinds = problem.cached_for_all_meshes(_classes).tolist(), problem.decisions.kinds
    between = ((one.first, one.last) for one in problem.decisions.couplings)
    ends = {(min(classes[i], classes[j]), max(classes[i], classes[j])) for i, j in between if classes[i] != classes[j]}
    kind_of = {number: kinds[variable] for variable, number in reversed([*enumerate(classes)])}
    return Counter((kind_of[a], kind_of[b]) for a, b in ends)


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Hashes of numbers whose sums hardly ever collide (the finaliser of SplitMix64); a collision leaves a colour unsplit."""
    z = numbers.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


class Quotient(Problem):
    """A problem with one variable for each class of another one's variables.

    Attributes:
        whole: the problem that was reduced.
        classes: ``(whole.n_variables,)``, the class of each variable: its number here.
    """

    def __init__(self, whole: Problem, classes: np.ndarray):
        self.whole = whole
        self.classes = classes
        _, self._firsts = np.unique(classes, return_index=True)
        self._charges_of: dict[Buffer, tuple[Charge, ...]] = {}
        self._charged: list[Any] = []  # the last prices, and their sums by charge
        super().__init__(whole.facts, whole.model, whole.pins, whole.memory_limit_bytes, whole, whole.observer)

    @property
    def n_variables(self) -> int:
        return len(self._firsts)

    @property
    def original(self) -> Problem:
        return self.whole

    def cached(self, fact: Callable[[Problem], Fact]) -> Fact:
        """The result of a function of the whole problem."""
        return self.whole.cached(fact)

    # -- to the whole and back -------------------------------------------------------------------------------------

    def invert(self, labels: Sequence[Label]) -> list[Label]:
        """The labels of the whole problem."""
        return [labels[int(number)] for number in self.classes]

    def project(self, labels: Sequence[Label]) -> list[Label]:
        """The labels here, from those of the whole problem: of each class its first variable's."""
        return [labels[int(variable)] for variable in self._firsts]

    def project_parts(self, parts: Sequence[Mapping[int, Part]]) -> tuple[dict[int, Part], ...] | None:
        """Parts of labels, per mesh axis by variable here, from those by variable of the whole; None where they differ within a class."""
        numbers = self.classes.tolist()
        found: list[dict[int, Part]] = []
        for part_of in parts:
            found.append({numbers[variable]: part for variable, part in part_of.items()})
            if any(part_of.get(variable) != found[-1].get(number) for variable, number in enumerate(numbers)):
                return None
        return tuple(found)

    def project_tables(self, tables: Tables) -> Tables:
        """The sums over classes of tables of the whole problem."""
        classes = self.classes.tolist()
        unary = [np.zeros(len(tables.labels[variable])) for variable in self._firsts]
        for number, table in zip(classes, tables.unary, strict=True):
            unary[number] += table
        pairs: dict[tuple[int, int], np.ndarray] = {}
        for (i, j), table in tables.pairs.items():
            a, b = classes[i], classes[j]
            if a == b:
                unary[a] += np.diagonal(table)
            else:
                key, one = ((a, b), table) if a < b else ((b, a), table.T)
                if key in pairs:
                    pairs[key] += one
                else:
                    pairs[key] = one.copy()
        options = tuple(tables.labels[variable] for variable in self._firsts)
        return Tables(tuple(unary), pairs, options, tables.incumbent[self._firsts])

    def lift(self, messages: Messages, whole: Tables) -> Messages:
        """Messages of the whole problem from those here: each pair's message, divided evenly among the pairs that it stands for."""
        classes = self.classes.tolist()
        between = {(i, j): (classes[i], classes[j]) for i, j in whole.pairs}
        counts = Counter((min(pair), max(pair)) for pair in between.values())
        shares: dict[Pair, tuple[np.ndarray, np.ndarray]] = {}
        for (a, b), (first, last) in messages.items():
            shares[a, b] = first / counts[a, b], last / counts[a, b]
            shares[b, a] = last / counts[a, b], first / counts[a, b]
        return {pair: shares[ends] for pair, ends in between.items() if ends in shares}

    def message_passing(self, messages: Messages, whole: Tables) -> MessagePassing:
        """Message passing over the whole problem's tables, from messages here; the variables of a class are processed together."""
        return MessagePassing(whole, self.lift(messages, whole), self.classes.tolist())

    # -- as any problem --------------------------------------------------------------------------------------------

    def start(self) -> list[Label]:
        return [self.whole.costs.replicated(int(variable)) for variable in self._firsts]

    def allows(self, variable: int, label: Label) -> bool:
        return self.whole.allows(int(self._firsts[variable]), label)

    def pinned(self, axis: int) -> list[int]:
        return list(dict.fromkeys(int(self.classes[variable]) for variable in self.whole.pinned(axis)))

    def tables(self, free: Sequence[int], labels: Sequence[Label], prices: Mapping[Buffer, float] | None = None) -> Tables:
        """The tables that `project_tables` makes of the whole's; each of equal ones is made once and multiplied by its count."""
        whole, free = self.whole, tuple(free)
        domains = [whole.costs.domain(int(variable), label, free) for variable, label in zip(self._firsts, labels, strict=True)]
        unary = [float(count) * domain.unary for count, domain in zip(np.bincount(self.classes), domains, strict=True)]
        pairs: dict[tuple[int, int], np.ndarray] = {}
        counted: dict[tuple[int, int, bool], np.ndarray] = {}  # equal tables stay one array, by the whole problem's identities
        for (a, b, _), (count, coupling) in whole.cached_for_all_meshes(_counted_couplings).items():
            one = whole.costs.table(coupling, {coupling.first: domains[a], coupling.last: domains[b]})
            if coupling.first == coupling.last:
                unary[a] = count * one
            elif a == b:
                unary[a] = unary[a] + count * np.diagonal(one)
            else:
                pair, key = (min(a, b), max(a, b)), (id(one), count, a < b)
                if key not in counted:
                    counted[key] = count * (one if a < b else one.T)
                pairs[pair] = pairs[pair] + counted[key] if pair in pairs else counted[key]
        if prices:
            self._charge(unary, pairs, domains, prices)
        incumbent = np.array([domain.position(label) for domain, label in zip(domains, labels, strict=True)], dtype=np.int64)
        return Tables(tuple(unary), pairs, tuple(domain.labels for domain in domains), incumbent)

    def _charge(
        self, unary: list[np.ndarray], pairs: dict[Pair, np.ndarray], domains: Sequence[CostedDomain], prices: Mapping[Buffer, float]
    ) -> None:
        """Adds prices of bytes to tables: equal buffers of a class are charged once, at the sum of their prices."""
        whole = self.whole
        if not self._charged or self._charged[0] is not prices:
            self._charged[:] = prices, *self._summed(prices)  # searches ask for the tables of several axes under the same prices
        for charge, price in self._charged[1].items():
            number, domain = charge[0], domains[charge[0]]
            unary[number] = unary[number] + price * whole.charged_bytes(charge, int(self._firsts[number]), domain)
        for (a, b, *_), (price, edge) in self._charged[2].items():
            slots = domains[b].slots
            nbytes = price * whole.copied_bytes(edge, domains[a].slots[edge.source_slot], [slots[slot] for slot in edge.target_slots])
            if a == b:
                unary[a] = unary[a] + np.diagonal(nbytes)
            else:
                pair, table = ((a, b), nbytes) if a < b else ((b, a), nbytes.T)
                pairs[pair] = pairs[pair] + table

    def _summed(self, prices: Mapping[Buffer, float]) -> tuple[dict[Charge, float], dict[tuple, tuple[float, Edge]]]:
        """The sums of prices by charge; and by the classes and kinds of reads that copy, with one of these reads."""
        sums: dict[Charge, float] = {}
        copied: dict[tuple, tuple[float, Edge]] = {}
        for buffer, price in prices.items():
            for charge in self._charges(buffer):
                sums[charge] = sums.get(charge, 0.0) + price
            reads = self.whole.copying(buffer)
            for edge in reads:
                one = self.graph.values[edge.value]
                classes = int(self.classes[edge.source]), int(self.classes[edge.target])
                key = *classes, edge.source_slot, edge.target_slots, one.rank, one.nbytes, len(reads)
                copied[key] = (copied[key][0] if key in copied else 0.0) + price, edge
        return sums, copied

    def _charges(self, charged: Buffer) -> tuple[Charge, ...]:
        """What a price of the whole problem is on, with classes for variables."""
        if (found := self._charges_of.get(charged)) is None:
            charges = self.whole.charges(charged)
            found = tuple((int(self.classes[variable]), slot, rank, nbytes) for variable, slot, rank, nbytes in charges)
            self._charges_of[charged] = found
        return found

    def whole_tables(self) -> Tables:
        return self.tables(range(len(self.mesh.axes)), self.start())

    def kind_pairs(self) -> Mapping[tuple[int, int], int]:
        return self.whole.cached_for_all_meshes(_kind_pairs)

    def assignment(self, labels: Sequence[Label]) -> Assignment:
        return self.whole.assignment(self.invert(labels))

    def labels(self, assignment: Assignment) -> list[Label]:
        return self.project(self.whole.labels(assignment))
