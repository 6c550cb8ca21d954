"""Message passing: costs move from node to node through pairs, and a lower bound rises with every sweep.

Sequential reweighted message passing (Kolmogorov 2015, "A new look at reweighted message passing", IEEE TPAMI 37(5), on pairwise models the
tree-reweighted TRW-S of Kolmogorov 2006): nodes in order collect what their pairs hold and hand it to those ahead in equal shares; then the
same backward. The bound never falls.

*The order* is that of least bandwidth (Cuthill and McKee 1969, reversed), so that all neighbours of a node stand near it and costs go far
in one sweep. It takes a third to a half of the sweeps that program order does, where a parameter stands far from all that reads it. Nodes
that are known to look alike follow each other, in that order of their classes, and have their turns together.

*Leaps.* Sweeps go on in much the same direction while the bound creeps up. Then every third starts from further on in the direction of
those before it, and is undone where the bound is not higher for it. Whatever is moved leaves the sum as it is, so this is safe, and it
takes half of the sweeps again.

Tables stay as they are, and equal layers share theirs: what is moved into a pair is kept beside it, as a vector for each of its ends.

Complexity: sweeps x entries of the pair tables.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee

from autoshard.problem import Messages
from autoshard.search.elimination import Pairs
from autoshard.search.searcher import Progress, silent

Pair = tuple[int, int]

TOLERANCE = 3e-7  # of the bound; a sweep that raises it by less is the last
LEAPS = 3  # one sweep of so many is a leap
CREEPING = 0.01  # of the bound; after a sweep that raises it by more a leap goes too far
SIDE_BY_SIDE = 1 << 13  # entries of tables that are copied to stand side by side: adding to so many takes as long as a few calls
TOGETHER = 1 << 15  # entries that nodes which have their turns together look at: a quarter of a megabyte, which stays near the processor


class Passing:
    """What has been taken out of pairs for the nodes at their ends, while costs are moved.

    What a node took is a block: a row a pair, first of those to nodes before it, then of those to nodes behind; a column a label. From
    either side it collects in one piece, of tables that stand side by side.

    Attributes:
        pairs: the tables, as they are given.
        swept: whether the minima of all pairs are taken.
    """

    def __init__(self, unary: Sequence[np.ndarray], pairs: Pairs, sent: Messages | None = None, alike: Sequence[int] | None = None):
        """Begins with what was sent into pairs, less what has another shape there, for some other table.

        Args:
            alike: per node the number of its class, such as that of an equal layer's equal part.
        """
        self.pairs = pairs
        self.swept = False
        self._reach = 2.0
        self._sizes = [len(table) for table in unary]
        order = near_order(len(unary), pairs) if alike is None else alike_order(alike, pairs)
        place = {node: position for position, node in enumerate(order)}
        sides = _sides(place, pairs)
        self._starts = [0] * len(unary)  # where what a node holds lies in memory
        self._rows: dict[Pair, list[int]] = {pair: [0, 0] for pair in pairs}  # where what its ends took lies
        at = taken = 0
        for i in order:
            size = self._sizes[i]
            self._starts[i] = at
            for _, end, pair in chain(*sides[i]):
                self._rows[pair][end] = taken
                taken += size
            at += size
        self._taken = np.zeros(taken)
        self._label = np.zeros(taken, dtype=np.int64)  # which of what nodes hold each is
        self._given = np.concatenate([np.zeros(0), *(unary[i] for i in order)])
        self._firsts = np.array([self._starts[i] for i in order], dtype=np.int64)
        for pair, (first, last) in (sent or {}).items():
            if pair in pairs and (len(first), len(last)) == pairs[pair].shape:
                for row, moved in zip(self._rows[pair], (first, last), strict=True):
                    np.negative(moved, self._taken[row : row + len(moved)])
        self._stacks: dict[tuple[tuple[int, int], ...], tuple[np.ndarray, np.ndarray]] = {}
        turns = [self._turns(batch, [sides[i] for i in batch]) for batch in self._batches(place, sides)]
        self._forward = [forward for forward, _ in turns]
        self._backward = [backward for _, backward in reversed(turns)]

    def _ends(self, pair: Pair) -> tuple[np.ndarray, ...]:
        """What the ends of a pair took of it."""
        return tuple(self._taken[row : row + self._sizes[i]] for i, row in zip(pair, self._rows[pair], strict=True))

    def _batches(self, place: Mapping[int, int], sides: list[_Sides]) -> Iterator[list[int]]:
        """Nodes that follow each other, have the same tables on both sides, and are in no pair with each other."""
        batch: list[int] = []
        like, entries = None, 0
        for i in place:
            key = self._sizes[i], *(tuple((number, end) for number, end, _ in side) for side in sides[i])
            joined = key == like and all(place[pair[1 - end]] < place[batch[0]] for _, end, pair in sides[i][0])
            if not joined or (len(batch) + 1) * entries > TOGETHER:
                if batch:
                    yield batch
                batch, like = [], key
                entries = max(sum(self.pairs[pair].size for _, _, pair in side) for side in sides[i])
            batch.append(i)
        if batch:
            yield batch

    def _turns(self, batch: list[int], sides: list[_Sides]) -> tuple[_Turn, _Turn]:
        """The turns of some nodes, forward and backward."""
        n, size = len(batch), self._sizes[batch[0]]
        n_before, n_behind = map(len, sides[0])
        where = slice(self._starts[batch[0]], self._starts[batch[0]] + n * size)
        first = next((self._rows[pair][end] for _, end, pair in chain(*sides[0])), 0)
        blocks = slice(first, first + n * (n_before + n_behind) * size)
        block, labels = (some[blocks].reshape(n, n_before + n_behind, size) for some in (self._taken, self._label))
        labels[:] = np.arange(where.start, where.stop).reshape(n, 1, size)
        given = self._given[where].reshape(n, size)
        before, behind = block[:, :n_before], block[:, n_before:]
        share = 1 / max(n_before, n_behind, 1)
        return (
            _Turn(where, given, block, self._pieces([side for side, _ in sides], before), behind if n_behind else None, share),
            _Turn(where, given, block, self._pieces([side for _, side in sides], behind), before if n_before else None, share),
        )

    def _pieces(self, sides: list[list[_End]], own: np.ndarray) -> list[_Piece]:
        """The pairs of some nodes on one side, in one piece unless they are large."""
        pieces, first, entries, side = [], 0, 0, sides[0]
        for last, (_, _, pair) in enumerate(side, 1):
            entries += self.pairs[pair].size
            if last == len(side) or entries + self.pairs[side[last][2]].size > SIDE_BY_SIDE:
                theirs = [
                    np.array([self._rows[pair][1 - end] for _, end, pair in ends])[:, None] + np.arange(self._sizes[other])
                    for ends, other in (([ends[k] for ends in sides], side[k][2][1 - side[k][1]]) for k in range(first, last))
                ]
                mine = own[:, first:last].transpose(0, 2, 1)
                pieces.append(_Piece(*self._stack(side[first:last]), np.concatenate(theirs, axis=1), mine))
                first, entries = last, 0
        return pieces

    def _stack(self, side: list[_End]) -> tuple[np.ndarray, np.ndarray]:
        """Tables side by side, a row for each of the node's labels, and where each starts."""
        key = tuple((number, end) for number, end, _ in side)
        if key not in self._stacks:
            tables = [self.pairs[pair].T if end else self.pairs[pair] for _, end, pair in side]
            starts = np.cumsum([0, *(table.shape[1] for table in tables[:-1])])
            self._stacks[key] = np.ascontiguousarray(tables[0]) if len(tables) == 1 else np.concatenate(tables, axis=1), starts
        return self._stacks[key]

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
                minima(table - taken.take(theirs)[:, None], starts, 2, None, own)
            if go is not None:
                held = add(block, 1)
                held += given
                held *= share
                go -= held[:, None]
        self.swept = True

    @property
    def sent(self) -> dict[Pair, tuple[np.ndarray, np.ndarray]]:
        """What has been moved into each pair."""
        ends = ((pair, self._ends(pair)) for pair in self.pairs)
        return {pair: (-first, -last) for pair, (first, last) in ends}

    def bound(self) -> float:
        """The sum of all minima; those of pairs are zero after a sweep, whose backward half ends with taking them."""
        pairs = 0.0 if self.swept else math.fsum(left.min(axis=1).sum() for turn in self._forward for left in self._left(turn))
        return float(np.minimum.reduceat(self._held(), self._firsts).sum() if len(self._firsts) else 0.0) + pairs

    def unary(self) -> list[np.ndarray]:
        """What each node holds, less its minimum."""
        return self._by_node(self._beyond())

    def reduced(self) -> list[np.ndarray]:
        """By how much whatever has a label costs more than the bound, at least."""
        found = self._beyond()
        for turn in chain(self._forward, self._backward):
            own = found[turn.where].reshape(turn.given.shape)
            for left in self._left(turn):
                own += (left - left.min(axis=1, keepdims=True)).sum(axis=2)
        return self._by_node(found)

    def _held(self) -> np.ndarray:
        """What nodes hold, one after the other."""
        return self._given + np.bincount(self._label, self._taken, len(self._given))

    def _beyond(self) -> np.ndarray:
        """The same, less each one's minimum."""
        held = self._held()
        least = np.minimum.reduceat(held, self._firsts) if len(self._firsts) else held
        return held - np.repeat(least, np.diff(self._firsts, append=len(held)))

    def _by_node(self, held: np.ndarray) -> list[np.ndarray]:
        return [held[start : start + size] for start, size in zip(self._starts, self._sizes, strict=True)]

    def _left(self, turn: _Turn) -> Iterator[np.ndarray]:
        """The least that is left by nodes' labels ``(n, n_i, number of pairs)`` in the pairs that they come from."""
        for table, starts, theirs, own in turn.come:
            yield np.minimum.reduceat(table - self._taken[theirs][:, None], starts, axis=2) - own


_End = tuple[int, int, Pair]
"""A pair as a node sees it: a number that equal tables share, which of its ends the node is, and the pair."""

_Sides = tuple[list[_End], list[_End]]
"""A node's pairs, to nodes before it and to nodes behind."""


class _Piece(NamedTuple):
    """Pairs of some nodes on one side of them.

    Attributes:
        table: ``(n_i, sum of n_j)``, side by side; the same for all.
        starts: where each other one's labels start.
        theirs: ``(n, sum of n_j)``, where in memory lies what the others took.
        own: ``(n, n_i, number of pairs)``, what the nodes took.
    """

    table: np.ndarray
    starts: np.ndarray
    theirs: np.ndarray
    own: np.ndarray


class _Turn(NamedTuple):
    """What ``n`` nodes do in one direction.

    Attributes:
        where: what they hold lies in memory.
        given: ``(n, n_i)``, their own tables.
        block: ``(n, number of pairs, n_i)``, all that they took.
        come: the pairs they collect from.
        go: what they took of the pairs that get a share; None: there are none.
        share: of what each holds, for each.
    """

    where: slice
    given: np.ndarray
    block: np.ndarray
    come: list[_Piece]
    go: np.ndarray | None
    share: float


def _sides(place: Mapping[int, int], pairs: Pairs) -> list[_Sides]:
    """By node its pairs, equal tables in an order that is the same for all nodes."""
    sides: list[_Sides] = [([], []) for _ in place]
    numbers: dict[int, int] = {}
    for (i, j), table in pairs.items():
        number = numbers.setdefault(id(table), len(numbers))
        sides[i][place[i] < place[j]].append((number, 0, (i, j)))
        sides[j][place[j] < place[i]].append((number, 1, (i, j)))
    for before, behind in sides:
        before.sort()
        behind.sort()
    return sides


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


def alike_order(alike: Sequence[int], pairs: Collection[Pair]) -> list[int]:
    """The nodes class by class, the classes in an order in which those of a pair stand near each other.

    >>> alike_order([0, 1, 0, 1], [(0, 1), (1, 2), (2, 3)])
    [1, 3, 0, 2]
    """
    classes = {(min(one, other), max(one, other)) for one, other in ((alike[i], alike[j]) for i, j in pairs) if one != other}
    place = {number: position for position, number in enumerate(near_order(max(alike, default=-1) + 1, sorted(classes)))}
    return sorted(range(len(alike)), key=lambda node: (place[alike[node]], node))
