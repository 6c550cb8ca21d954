"""Equivalent tables that show a lower bound: costs moved between nodes and pairs until their separate minima add up to much.

A sum of unary tables ``u_i`` and pair tables ``p_ij`` does not change when a vector over the labels of ``i`` is added to
``u_i`` and subtracted from a ``p_ij``. The minima of all tables, added up, bound the sum from below, and moving costs well
raises that bound. Sequential reweighted message passing (Kolmogorov 2015, "A new look at reweighted message passing",
IEEE TPAMI 37(5), on pairwise models the tree-reweighted TRW-S of Kolmogorov 2006): nodes in program order collect what their pairs hold
and hand it to those ahead in equal shares; then the same backward. The bound never falls.

Complexity: sweeps x entries of the pair tables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.problem import Folded, Messages, Tables
from autoshard.search.elimination import Pairs
from autoshard.search.searcher import Progress, silent

Pair = tuple[int, int]

NOTHING = np.zeros(0)
TOLERANCE = 3e-7  # of the bound; a sweep that raises it by less is the last


@dataclass(frozen=True, slots=True, eq=False)
class Reparametrisation:
    """The same sum, as a bound and tables that are nowhere negative.

    Attributes:
        bound: no labels have a smaller sum.
        unary: ``(n_i,) float64`` each, at least 0.
        pairs: ``(n_i, n_j) float64`` each, at least 0.
        reduced: per node ``(n_i,) float64``: every labelling in which the node has this label costs at least ``bound`` plus this.
        sweeps: how often the nodes were passed.
    """

    bound: float
    unary: tuple[np.ndarray, ...]
    pairs: dict[Pair, np.ndarray]
    reduced: tuple[np.ndarray, ...]
    sweeps: int


def reparametrise(
    unary: Sequence[np.ndarray], pairs: Pairs, *, max_sweeps: int = 40, enough: float = math.inf, progress: Progress = silent
) -> Reparametrisation:
    """The tables after message passing, which stops where the bound is enough, or a sweep raises it by next to nothing."""
    passing = Passing(unary, pairs)
    sweeps = passing.run(max_sweeps, enough, progress)
    return passing.normalised(sweeps)


def messages(before: Pairs, after: Pairs) -> Messages:
    """What was moved into the pairs between two equivalent sums."""
    found = {}
    for pair, table in before.items():
        difference = after[pair] - table
        found[pair] = difference[:, 0], difference[0] - difference[0, 0]
    return found


def moved_alike(unary: Sequence[np.ndarray], pairs: Pairs, sent: Messages) -> tuple[list[np.ndarray], dict[Pair, np.ndarray]]:
    """Copies of the tables, in which as much is moved as between others; what has no counterpart of its shape there stays."""
    own = [np.array(table, dtype=np.float64) for table in unary]
    between = {}
    for (i, j), table in pairs.items():
        first, last = sent.get((i, j), (NOTHING, NOTHING))
        if table.shape == (len(first), len(last)):
            own[i] -= first
            own[j] -= last
            between[i, j] = table + (first[:, None] + last)
        else:
            between[i, j] = np.array(table, dtype=np.float64)
    return own, between


def unfolded(problem: Folded, sent: Messages, whole: Tables) -> Messages:
    """What to move in the whole problem where so much was moved in the folded one: what its pairs stand for share it evenly."""
    classes = problem.classes.tolist()
    between = {(i, j): (classes[i], classes[j]) for i, j in whole.pairs}
    alike = Counter((min(pair), max(pair)) for pair in between.values())
    shares: dict[Pair, tuple[np.ndarray, np.ndarray]] = {}
    for (a, b), (first, last) in sent.items():
        shares[a, b] = first / alike[a, b], last / alike[a, b]
        shares[b, a] = last / alike[a, b], first / alike[a, b]
    return {pair: shares[ends] for pair, ends in between.items() if ends in shares}


class Passing:
    """Copies of tables while costs are moved, some from the start; pairs go from a node to one behind it."""

    def __init__(self, unary: Sequence[np.ndarray], pairs: Pairs, sent: Messages | None = None):
        self.unary, self.pairs = moved_alike(unary, pairs, sent or {})
        before: list[list[tuple[np.ndarray, int]]] = [[] for _ in unary]
        behind: list[list[tuple[np.ndarray, int]]] = [[] for _ in unary]
        for (i, j), table in self.pairs.items():
            first, last = ((i, table, 0), (j, table, 1)) if i < j else ((j, table, 1), (i, table, 0))
            behind[first[0]].append(first[1:])
            before[last[0]].append(last[1:])
        self.before, self.behind = before, behind
        self.swept = False

    def run(self, max_sweeps: int, enough: float = math.inf, progress: Progress = silent, give_up: bool = False) -> int:
        """Sweeps until the bound is enough or hardly rises, and their number.

        Args:
            give_up: whether to stop where the sweeps that are left, if they all raised the bound as the last one did, would not be enough.
        """
        bound = self.bound()
        for sweep in range(max_sweeps):
            if bound >= enough:
                return sweep
            self.sweep()
            old, bound = bound, self.bound()
            progress("lower bound", (sweep + 1) / max_sweeps)
            if bound - old <= TOLERANCE * abs(bound) or (give_up and sweep and bound + (bound - old) * (max_sweeps - sweep - 1) < enough):
                return sweep + 1
        return max_sweeps

    def sweep(self) -> None:
        """Forward, then backward, over all nodes."""
        n = len(self.unary)
        for i in range(n):
            self._pass(i, self.before[i], self.behind[i])
        for i in range(n - 1, -1, -1):
            self._pass(i, self.behind[i], self.before[i])
        self.swept = True

    def _pass(self, i: int, come: list[tuple[np.ndarray, int]], go: list[tuple[np.ndarray, int]]) -> None:
        """The node collects the minima of the pairs it comes from, and gives those ahead their shares."""
        held = self.unary[i]
        for table, side in come:
            least = np.minimum.reduce(table, axis=1 - side)
            table -= least[:, None] if side == 0 else least
            held = held + least
        if go:
            share = held / max(len(come), len(go))
            for table, side in go:
                table += share[:, None] if side == 0 else share
            held = held - share * len(go)
        self.unary[i] = held

    def bound(self) -> float:
        """The sum of all minima; those of pairs are zero after a sweep, whose backward half ends with taking them."""
        pairs = () if self.swept else self.pairs.values()
        return math.fsum(np.minimum.reduce(table, axis=None) for table in (*self.unary, *pairs))

    def normalised(self, sweeps: int) -> Reparametrisation:
        """The tables less their minima, which are the bound."""
        bound = self.bound()
        unary = tuple(table - table.min() for table in self.unary)
        pairs = {pair: table - table.min() for pair, table in self.pairs.items()}
        reduced = [table.copy() for table in unary]
        for (i, j), table in pairs.items():
            reduced[i] += table.min(axis=1)
            reduced[j] += table.min(axis=0)
        return Reparametrisation(bound, unary, pairs, tuple(reduced), sweeps)
