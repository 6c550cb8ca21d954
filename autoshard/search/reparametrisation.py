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
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.search.elimination import Pairs
from autoshard.search.searcher import Progress, silent

Pair = tuple[int, int]


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
    unary: Sequence[np.ndarray], pairs: Pairs, *, max_sweeps: int = 40, tolerance: float = 3e-6, progress: Progress = silent
) -> Reparametrisation:
    """The tables after message passing, which stops where ten sweeps raise the bound by less than the tolerance, relative to it."""
    tables = _Tables(unary, pairs)
    bounds = [tables.bound()]
    for sweep in range(max_sweeps):
        tables.sweep()
        bounds.append(tables.bound())
        progress("lower bound", (sweep + 1) / max_sweeps)
        if bounds[-1] - bounds[-2] <= tolerance / 10 * abs(bounds[-1]):
            break
    return tables.normalised(len(bounds) - 1)


def bound_after(unary: Sequence[np.ndarray], pairs: Pairs, *, max_sweeps: int, enough: float = math.inf) -> float:
    """The lower bound alone, after some sweeps, or fewer where it is enough."""
    tables = _Tables(unary, pairs)
    bound = tables.bound()
    for _ in range(max_sweeps):
        if bound >= enough:
            break
        tables.sweep()
        bound = tables.bound()
    return bound


class _Tables:
    """Tables while costs are moved in place; pairs go from a node to one behind it."""

    def __init__(self, unary: Sequence[np.ndarray], pairs: Pairs):
        self.unary = [np.array(table, dtype=np.float64) for table in unary]
        self.pairs = {pair: np.array(table, dtype=np.float64) for pair, table in pairs.items()}
        before: list[list[tuple[np.ndarray, int]]] = [[] for _ in unary]
        behind: list[list[tuple[np.ndarray, int]]] = [[] for _ in unary]
        for (i, j), table in self.pairs.items():
            first, last = ((i, table, 0), (j, table, 1)) if i < j else ((j, table, 1), (i, table, 0))
            behind[first[0]].append(first[1:])
            before[last[0]].append(last[1:])
        self.before, self.behind = before, behind

    def sweep(self) -> None:
        """Forward, then backward, over all nodes."""
        n = len(self.unary)
        for i in range(n):
            self._pass(i, self.before[i], self.behind[i])
        for i in range(n - 1, -1, -1):
            self._pass(i, self.behind[i], self.before[i])

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
        """The sum of all minima."""
        return math.fsum(float(table.min()) for table in (*self.unary, *self.pairs.values()))

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
