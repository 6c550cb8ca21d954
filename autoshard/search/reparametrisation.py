"""Equivalent tables that show a lower bound: costs moved between nodes and pairs until their separate minima add up to much.

A sum of unary tables ``u_i`` and pair tables ``p_ij`` does not change when a vector over the labels of ``i`` is added to
``u_i`` and subtracted from a ``p_ij``. The minima of all tables, added up, bound the sum from below, and moving costs well
raises that bound. Sequential reweighted message passing (Kolmogorov 2015, "A new look at reweighted message passing",
IEEE TPAMI 37(5), on pairwise models the tree-reweighted TRW-S of Kolmogorov 2006): nodes in order collect what their pairs hold
and hand it to those ahead in equal shares; then the same backward. The bound never falls.

*The order* is that of least bandwidth (Cuthill and McKee 1969, reversed), so that all neighbours of a node stand near it and costs go far
in one sweep. It takes a third to a half of the sweeps that program order does, where a parameter stands far from all that reads it.

*Leaps.* Sweeps go on in much the same direction while the bound creeps up. Then every third starts from further on in the direction of those
before it, and is undone where the bound is not higher for it. Whatever is moved leaves the sum as it is, so this is safe, and it takes
half of the sweeps again.

Tables stay as they are, and equal layers share theirs: what is moved into a pair is kept beside it, as a vector for each of its ends.

Complexity: sweeps x entries of the pair tables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee

from autoshard.problem import Folded, Messages, Tables
from autoshard.search.elimination import Pairs
from autoshard.search.searcher import Progress, silent

Pair = tuple[int, int]

TOLERANCE = 3e-7  # of the bound; a sweep that raises it by less is the last
LEAPS = 3  # one sweep of so many is a leap
CREEPING = 0.01  # of the bound; after a sweep that raises it by more a leap goes too far
SIDE_BY_SIDE = 1 << 13  # entries of tables that are copied to stand side by side: adding to so many takes as long as a few calls


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
    return passing.normalised(sweeps)


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


def near_order(n_nodes: int, pairs: Collection[Pair]) -> list[int]:
    """The nodes in an order in which those of a pair stand near each other.

    >>> near_order(4, [(0, 3), (3, 1), (1, 2)])
    [2, 1, 3, 0]
    """
    if not n_nodes:
        return []
    ends = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
    both = np.concatenate([ends, ends[:, ::-1]])
    joined = csr_matrix((np.ones(len(both)), (both[:, 0], both[:, 1])), shape=(n_nodes, n_nodes))
    return reverse_cuthill_mckee(joined, symmetric_mode=True).tolist()


class Passing:
    """What has been taken out of pairs for the nodes at their ends, while costs are moved.

    What a node took is a block: a row a pair, first of those to nodes before it, then of those to nodes behind; a column a label. From
    either side it collects in one piece, of tables that stand side by side.

    Attributes:
        pairs: the tables, as they are given.
        order: of the nodes.
        swept: whether the minima of all pairs are taken.
    """

    def __init__(self, unary: Sequence[np.ndarray], pairs: Pairs, sent: Messages | None = None):
        """Begins with what was sent into pairs, less what has another shape there, for some other table."""
        self.pairs = pairs
        self.order = near_order(len(unary), pairs)
        self.swept = False
        self._reach = 2.0
        self._given = np.concatenate([np.zeros(0), *unary])
        sizes = [len(table) for table in unary]
        self._starts = np.cumsum([0, *sizes])
        place = {node: position for position, node in enumerate(self.order)}
        sides: list[tuple[list[Pair], list[Pair]]] = [([], []) for _ in unary]
        for i, j in pairs:
            sides[i][place[i] < place[j]].append((i, j))
            sides[j][place[j] < place[i]].append((i, j))
        rows: dict[tuple[Pair, int], slice] = {}  # where what each end of a pair took lies in memory
        labels: list[np.ndarray] = [np.zeros(0, dtype=np.int64)]
        at = 0
        for i, (size, (before, behind)) in enumerate(zip(sizes, sides, strict=True)):
            labels.append(np.tile(np.arange(self._starts[i], self._starts[i + 1]), len(before) + len(behind)))
            for pair in chain(before, behind):
                rows[pair, i] = slice(at, at + size)
                at += size
        self._label = np.concatenate(labels)
        self._taken = np.zeros(at)
        self._ends = {(i, j): (self._taken[rows[(i, j), i]], self._taken[rows[(i, j), j]]) for i, j in pairs}
        for pair, known in (sent or {}).items():
            ends = self._ends.get(pair, ())
            if [len(end) for end in ends] == [len(moved) for moved in known]:
                for end, moved in zip(ends, known, strict=True):
                    np.negative(moved, end)
        stacks = _Stacks(pairs, rows)
        turns = [self._turns(i, sides[i], stacks) for i in self.order]
        self._forward = [forward for forward, _ in turns]
        self._backward = [backward for _, backward in reversed(turns)]

    def _turns(self, i: int, sides: tuple[list[Pair], list[Pair]], stacks: _Stacks) -> tuple[_Turn, _Turn]:
        """A node's turn forward, and backward."""
        given = self._given[self._starts[i] : self._starts[i + 1]]
        ends = [stacks.rows[pair, i] for pair in chain(*sides)]
        block = self._taken[ends[0].start : ends[-1].stop].reshape(-1, len(given)) if ends else np.zeros((0, len(given)))
        before, behind = block[: len(sides[0])], block[len(sides[0]) :]
        share = 1 / max(len(before), len(behind), 1)
        return (
            _Turn(i, given, block, stacks.pieces(i, sides[0], before.T), behind if len(behind) else None, share),
            _Turn(i, given, block, stacks.pieces(i, sides[1], behind.T), before if len(before) else None, share),
        )

    def run(self, max_sweeps: int, enough: float = math.inf, progress: Progress = silent, give_up: bool = False) -> int:
        """Sweeps until the bound is enough or hardly rises, and their number.

        Args:
            give_up: whether to stop where the sweeps that are left, if they all raised the bound as the last ones did, would not be enough.
        """
        bound = self.bound()
        since, below, creeps = self._taken.copy(), bound, False
        for sweep in range(max_sweeps):
            if bound >= enough:
                return sweep
            if creeps and (sweep + 1) % LEAPS == 0:
                bound = self._leap(since, bound)
            else:
                self.sweep()
                old, bound = bound, self.bound()
                if bound - old <= TOLERANCE * abs(bound):
                    return sweep + 1
                creeps = bound - old <= CREEPING * abs(bound)
            if (sweep + 1) % LEAPS == 0:
                if give_up and bound + (bound - below) / LEAPS * (max_sweeps - sweep - 1) < enough:
                    return sweep + 1
                since, below = self._taken.copy(), bound
            progress("lower bound", (sweep + 1) / max_sweeps)
        return max_sweeps

    def _leap(self, since: np.ndarray, bound: float) -> float:
        """A sweep from further on where the last ones went, unless the bound is then lower: then all is as it was; and the bound."""
        before = self._taken.copy()
        self._taken += self._reach * (before - since)
        self.sweep()
        if (found := self.bound()) > bound:
            self._reach *= 1.5
            return found
        self._reach = max(self._reach / 3, 0.5)
        self._taken[:] = before
        return bound

    def sweep(self) -> None:
        """Forward, then backward, over all nodes, each of which collects the minima of the pairs it comes from and hands on its share."""
        taken, minima, add = self._taken, np.minimum.reduceat, np.add.reduce
        for _, given, block, come, go, share in chain(self._forward, self._backward):
            for table, starts, theirs, own in come:
                minima(table - taken.take(theirs), starts, 1, None, own)
            if go is not None:
                held = add(block, 0)
                held += given
                held *= share
                go -= held
        self.swept = True

    @property
    def sent(self) -> dict[Pair, tuple[np.ndarray, np.ndarray]]:
        """What has been moved into each pair."""
        return {pair: (-first, -last) for pair, (first, last) in self._ends.items()}

    def bound(self) -> float:
        """The sum of all minima; those of pairs are zero after a sweep, whose backward half ends with taking them."""
        pairs = 0.0 if self.swept else math.fsum(left.min(axis=0).sum() for turn in self._forward for left in self._left(turn))
        return float(np.minimum.reduceat(self._held(), self._starts[:-1]).sum() if len(self._given) else 0.0) + pairs

    def _held(self) -> np.ndarray:
        """What nodes hold, one after the other."""
        return self._given + np.bincount(self._label, self._taken, len(self._given))

    def _left(self, turn: _Turn) -> Iterator[np.ndarray]:
        """The least that is left by a node's labels ``(n_i, number of pairs)`` in the pairs that it comes from."""
        for table, starts, theirs, own in turn.come:
            yield np.minimum.reduceat(table - self._taken[theirs], starts, axis=1) - own

    def normalised(self, sweeps: int) -> Reparametrisation:
        """The sum less its bound."""
        held = np.split(self._held(), self._starts[1:-1]) if len(self._given) else []
        unary = tuple(table - table.min() for table in held)
        reduced = [table.copy() for table in unary]
        for turn in chain(self._forward, self._backward):
            for left in self._left(turn):
                reduced[turn.node] += (left - left.min(axis=0)).sum(axis=1)
        return Reparametrisation(self.bound(), unary, self.pairs, self.sent, tuple(reduced), sweeps)


class _Piece(NamedTuple):
    """Pairs of a node on one side of it.

    Attributes:
        table: ``(n_i, sum of n_j)``, side by side.
        starts: where each other one's labels start.
        theirs: where in memory lies what the others took.
        own: ``(n_i, number of pairs)``, what the node took.
    """

    table: np.ndarray
    starts: np.ndarray
    theirs: np.ndarray
    own: np.ndarray


class _Turn(NamedTuple):
    """What a node does in one direction.

    Attributes:
        given: its own table.
        block: all that it took.
        come: the pairs it collects from.
        go: what it took of the pairs that get a share; None: there are none.
        share: of what it holds, for each.
    """

    node: int
    given: np.ndarray
    block: np.ndarray
    come: list[_Piece]
    go: np.ndarray | None
    share: float


class _Stacks:
    """Tables side by side, which equal nodes share."""

    def __init__(self, pairs: Pairs, rows: Mapping[tuple[Pair, int], slice]):
        self.pairs = pairs
        self.rows = rows
        self._stacks: dict[tuple[tuple[int, bool], ...], tuple[np.ndarray, np.ndarray]] = {}

    def pieces(self, i: int, side: list[Pair], own: np.ndarray) -> list[_Piece]:
        """A node's pairs on one side, in one piece unless they are large."""
        pieces, first, entries = [], 0, 0
        for last, pair in enumerate(side, 1):
            entries += self.pairs[pair].size
            if last == len(side) or entries + self.pairs[side[last]].size > SIDE_BY_SIDE:
                some = side[first:last]
                theirs = [self.rows[pair, pair[pair[0] == i]] for pair in some]
                where = np.concatenate([np.arange(row.start, row.stop) for row in theirs])
                pieces.append(_Piece(*self._stack(i, some), where, own[:, first:last]))
                first, entries = last, 0
        return pieces

    def _stack(self, i: int, pairs: list[Pair]) -> tuple[np.ndarray, np.ndarray]:
        """Their tables, a row for each of the node's labels, and where each starts."""
        key = tuple((id(self.pairs[pair]), pair[0] == i) for pair in pairs)
        if key not in self._stacks:
            tables = [self.pairs[pair] if first else self.pairs[pair].T for pair, (_, first) in zip(pairs, key, strict=True)]
            starts = np.cumsum([0, *(table.shape[1] for table in tables[:-1])])
            self._stacks[key] = np.ascontiguousarray(tables[0]) if len(tables) == 1 else np.concatenate(tables, axis=1), starts
        return self._stacks[key]


def _moved(table: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """A pair's table with what was moved into it."""
    return table + first[:, None] + last
