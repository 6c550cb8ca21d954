"""Equivalent tables that show a lower bound: costs moved between nodes and pairs until their separate minima add up to much.

A sum of unary tables ``u_i`` and pair tables ``p_ij`` does not change when a vector over the labels of ``i`` is added to
``u_i`` and subtracted from a ``p_ij``. The minima of all tables, added up, bound the sum from below, and moving costs well
raises that bound (`autoshard.search.passing`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.problem import Folded, Messages, Problem, Tables
from autoshard.search.contraction import contracted_whole
from autoshard.search.elimination import Pairs
from autoshard.search.passing import Pair, Passing, Wiring
from autoshard.search.searcher import Progress, silent


@dataclass(frozen=True, eq=False)
class Reparametrisation:
    """The same sum, as a bound and tables that are nowhere negative.

    Attributes:
        bound: no labels have a smaller sum.
        unary: ``(n_i,) float64`` each, at least 0.
        given: the pair tables as they were given.
        sent: what was moved into them.
        reduced: per node ``(n_i,) float64``: every labelling in which the node has this label costs at least ``bound`` plus this.
        sweeps: how often the nodes were passed.
    """

    bound: float
    unary: tuple[np.ndarray, ...]
    given: Pairs
    sent: Messages
    reduced: tuple[np.ndarray, ...]
    sweeps: int

    @cached_property
    def pairs(self) -> dict[Pair, np.ndarray]:
        """``(n_i, n_j) float64`` each, at least 0."""
        moved = {pair: _moved(table, *self.sent[pair]) for pair, table in self.given.items()}
        return {pair: table - table.min() for pair, table in moved.items()}


def reparametrise(
    unary: Sequence[np.ndarray], pairs: Pairs, *, max_sweeps: int = 40, enough: float = math.inf, progress: Progress = silent
) -> Reparametrisation:
    """The tables after message passing, which stops where the bound is enough, or a sweep raises it by next to nothing."""
    passing = Passing(unary, pairs)
    sweeps = passing.run(max_sweeps, enough, progress)
    return normalised(passing, sweeps)


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


def passing_of(problem: Folded, sent: Messages, whole: Tables) -> Passing:
    """Message passing in the whole problem, from what was moved in the folded one; nodes that look alike have their turns together."""
    return Passing(whole.unary, whole.pairs, unfolded(problem, sent, whole), problem.classes.tolist())


def contracted_wiring(problem: Problem) -> Wiring:
    """The wiring between a problem's contracted tables, which remembers it."""
    tables = problem.remembered(contracted_whole).tables
    return Wiring([len(table) for table in tables.unary], tables.pairs)


def contracted_passing(problem: Problem, sent: Messages | None = None) -> Passing:
    """Message passing between a problem's contracted tables, from what was sent."""
    tables = problem.remembered(contracted_whole).tables
    return Passing(tables.unary, tables.pairs, sent, wiring=problem.remembered(contracted_wiring))


def normalised(passing: Passing, sweeps: int) -> Reparametrisation:
    """What passing has come to, as a sum less its bound."""
    return Reparametrisation(passing.bound(), tuple(passing.unary()), passing.pairs, passing.sent, tuple(passing.reduced()), sweeps)


def _moved(table: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """A pair's table with what was moved into it."""
    return table + first[:, None] + last
