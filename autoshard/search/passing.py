"""Message passing: costs move from node to node through pairs, and a lower bound rises with every sweep.

Sequential reweighted message passing (Kolmogorov 2015, "A new look at reweighted message passing", IEEE TPAMI 37(5), on pairwise models the
tree-reweighted TRW-S of Kolmogorov 2006): nodes in order collect what their pairs hold and hand it to those ahead in equal shares; then the
same backward. The bound never falls.

*The order* is that of least bandwidth (Cuthill and McKee 1969, reversed), so that all neighbours of a node stand near it and costs go far
in one sweep. It takes a third to a half of the sweeps that program order does, where a parameter stands far from all that reads it. Nodes
that are known to look alike follow each other, in that order of their classes.

*Levels.* Only the order of two nodes that stand in a pair matters. So nodes have their turns level by level, a level once all that it
waits for are done (as in parallel triangular solves: Anderson and Saad 1989): the same messages as one by one, in some twenty turns.

*Leaps.* Sweeps go on in much the same direction while the bound creeps up. Then every third starts from further on in the direction of
those before it, and is undone where the bound is not higher for it. Whatever is moved leaves the sum as it is, so this is safe, and it
takes half of the sweeps again.

Tables stay as they are, and equal layers share theirs: what is moved into a pair is kept beside it, as a vector for each of its ends.

Complexity: sweeps x entries of the pair tables.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, compress, pairwise
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
IN_A_ROW = 1 << 12  # entries of tables that are copied to lie in a row: adding to so many one by one takes as long as a few calls
SIDE_BY_SIDE = 1 << 13  # entries of tables that are copied to stand side by side
TOGETHER = 1 << 15  # entries that nodes with the same tables look at together: a quarter of a megabyte, which stays near the processor


class Passing:
    """What has been taken out of pairs for the nodes at their ends, while costs are moved.

    Each pair has two ends, and each end keeps what its node took there: a number a label. Ends lie in memory as `_Order` has them.

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
        self._tables = list(pairs.values())
        self._sizes = sizes = np.array([len(table) for table in unary], dtype=np.int64)
        order = _ordered(near_order(len(unary), pairs) if alike is None else alike_order(alike, pairs), pairs)
        self._ends, self._nodes = order.ends, order.nodes
        both = sizes[order.joined]
        self._firsts, self._starts = _placed(sizes, order.nodes)  # where what nodes hold lies in memory, in order and by node
        self._rows, rows = _placed(both, order.ends)  # where ends lie in memory, in order and by pair
        self._rows_of = dict(zip(pairs, rows.reshape(-1, 2).tolist(), strict=True))
        self._lengths, self._theirs, self._widths = both[order.ends], rows[order.ends ^ 1], both[order.ends ^ 1]
        self._label = _ranges(self._starts[order.joined[order.ends]], self._lengths)  # which of all that nodes hold numbers are taken for
        self._given = np.concatenate([np.zeros(0), *(unary[i] for i in order.nodes)])
        self._taken = np.zeros(len(self._label))
        if sent:
            taken = list(chain.from_iterable(_fitting(sent.get(pair), table) for pair, table in pairs.items()))
            self._taken[_ranges(rows, both)] = -np.concatenate([np.zeros(0), *taken])
        self._stacks: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray]] = {}
        turns = [self._turns(level, order.shares) for level in order.levels]
        self._forward = [forward for forward, _ in turns]
        self._backward = [backward for _, backward in reversed(turns)]

    def _turns(self, level: _Level, shares: np.ndarray) -> tuple[_Turn, _Turn]:
        """A level's turns, forward and backward."""
        start, middle, stop = (int(self._rows[end]) if end < len(self._rows) else len(self._taken) for end in level.bounds)
        sizes = self._sizes[level.nodes]
        first = int(self._starts[level.nodes[0]])
        given, block = self._given[first : first + int(sizes.sum())], self._taken[start:stop]
        label = self._label[start:stop] - first
        shares = np.repeat(shares[level.nodes], sizes)
        before, behind = (list(chain.from_iterable(map(self._pieces, runs))) for runs in (level.before, level.behind))
        at = middle - start
        return (
            _Turn(before, given, block, label, block[at:], label[at:], shares),
            _Turn(behind, given, block, label, block[:at], label[:at], shares),
        )

    def _pieces(self, run: _Run) -> Iterator[_Piece]:
        """The pairs of some ends, in few pieces."""
        if run.in_a_row:
            yield self._in_a_row(run.first, run.first + run.members * run.each)
            return
        entries = sum(self._table(end).size for end in range(run.first, run.first + run.each))
        step = max(TOGETHER // entries, 1)
        for member in range(0, run.members, step):
            yield from self._side_by_side(run.first + member * run.each, min(step, run.members - member), run.each)

    def _in_a_row(self, first: int, last: int) -> _Piece:
        """The pairs of some ends, one entry after the other."""
        n = self._lengths[first:last]
        widths = np.repeat(self._widths[first:last], n)
        table = np.concatenate([self._table(end).ravel() for end in range(first, last)])
        own = self._taken[self._rows[first] : self._rows[first] + n.sum()]
        return _Piece(table, _ranges(np.repeat(self._theirs[first:last], n), widths), np.cumsum(widths) - widths, 0, own)

    def _side_by_side(self, first: int, members: int, each: int) -> Iterator[_Piece]:
        """The pairs of nodes with the same tables, ``each`` a node; a piece holds one of them, or several small ones."""
        n = int(self._lengths[first])
        row = int(self._rows[first])
        own = self._taken[row : row + members * each * n].reshape(members, each, n)
        theirs = self._theirs[first : first + members * each].reshape(members, each)
        widths = self._widths[first : first + each].tolist()
        start = 0
        while start < each:
            stop = start + 1
            while stop < each and n * sum(widths[start : stop + 1]) <= SIDE_BY_SIDE:
                stop += 1
            table, starts = self._stack(range(first + start, first + stop))
            where = [theirs[:, k, None, None] + np.arange(widths[k]) for k in range(start, stop)]
            yield _Piece(table, np.concatenate(where, axis=2), starts, 2, own[:, start:stop].transpose(0, 2, 1))
            start = stop

    def _stack(self, ends: range) -> tuple[np.ndarray, np.ndarray]:
        """Tables side by side, a row for each of the node's labels, and where each starts."""
        tables = [self._table(end) for end in ends]
        key = tuple((id(self._tables[end >> 1]) << 1) + (end & 1) for end in self._ends[ends.start : ends.stop].tolist())
        if key not in self._stacks:
            starts = np.cumsum([0, *(table.shape[1] for table in tables[:-1])])
            self._stacks[key] = np.ascontiguousarray(tables[0]) if len(tables) == 1 else np.concatenate(tables, axis=1), starts
        return self._stacks[key]

    def _table(self, position: int) -> np.ndarray:
        """The table of an end's pair ``(labels of the end's node, the other's)``."""
        end = int(self._ends[position])
        return self._tables[end >> 1].T if end & 1 else self._tables[end >> 1]

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
        """Forward, then backward, over all levels, whose nodes collect the minima of the pairs they come from and hand on their shares."""
        for turn in chain(self._forward, self._backward):
            self._collect(turn)
            _, given, block, label, go, goes, shares = turn
            if len(go):
                held = np.bincount(label, block, len(given))
                held += given
                held *= shares
                go -= held.take(goes)
        self.swept = True

    def _collect(self, turn: _Turn) -> None:
        """The nodes take what pairs of one side hold at least, beyond what the others took."""
        for table, theirs, starts, axis, own in turn.come:
            np.minimum.reduceat(table - self._taken.take(theirs), starts, axis, None, own)

    @property
    def sent(self) -> dict[Pair, tuple[np.ndarray, np.ndarray]]:
        """What has been moved into each pair."""
        moved = -self._taken
        return {
            (i, j): (moved[first : first + self._sizes[i]], moved[last : last + self._sizes[j]])
            for (i, j), (first, last) in self._rows_of.items()
        }

    def bound(self) -> float:
        """The sum of all minima; those of pairs are zero after a sweep, whose backward half ends with taking them."""
        pairs = 0.0 if self.swept else _minima(self._left(self._forward), self._rows).sum()
        return float(_minima(self._held(), self._firsts).sum() + pairs)

    def unary(self) -> list[np.ndarray]:
        """What each node holds, less its minimum."""
        return self._by_node(self._beyond())

    def reduced(self) -> list[np.ndarray]:
        """By how much whatever has a label costs more than the bound, at least."""
        found = self._beyond()
        for turns in (self._forward, self._backward):
            left = self._left(turns)
            left -= np.repeat(_minima(left, self._rows), self._lengths)
            found += np.bincount(self._label, left, len(found))
        return self._by_node(found)

    def _held(self) -> np.ndarray:
        """What nodes hold, one after the other."""
        return self._given + np.bincount(self._label, self._taken, len(self._given))

    def _beyond(self) -> np.ndarray:
        """The same, less each one's minimum."""
        held = self._held()
        return held - np.repeat(_minima(held, self._firsts), self._sizes[self._nodes])

    def _by_node(self, held: np.ndarray) -> list[np.ndarray]:
        starts, stops = self._starts.tolist(), (self._starts + self._sizes).tolist()
        return [held[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def _left(self, turns: list[_Turn]) -> np.ndarray:
        """The least that is left in the pairs that nodes come from, by their labels; zero elsewhere."""
        before = self._taken.copy()
        for turn in turns:
            self._collect(turn)
        left = self._taken - before
        self._taken[:] = before
        return left


class _Piece(NamedTuple):
    """Pairs that are looked at together; side by side ``(n nodes, n_i labels, sum of n_j of the others)``, or all these in a row.

    Attributes:
        table: ``(n_i, sum of n_j)``, the same for all; or one number an entry.
        theirs: where in memory lies what the others took, ``(n, 1, sum of n_j)``, or one an entry.
        starts: where each other one's labels start along the axis.
        axis: that of the others' labels.
        own: ``(n, n_i, number of pairs)``, what the nodes took, or in a row.
    """

    table: np.ndarray
    theirs: np.ndarray
    starts: np.ndarray
    axis: int
    own: np.ndarray


class _Turn(NamedTuple):
    """What a level's nodes do in one direction.

    Attributes:
        come: the pairs they collect from.
        given: their own tables, one after the other.
        block, label: all that they took, and for which of their labels each is.
        go, goes: what they took of the pairs that get a share, and for which.
        shares: what part of what a label holds each of those gets.
    """

    come: list[_Piece]
    given: np.ndarray
    block: np.ndarray
    label: np.ndarray
    go: np.ndarray
    goes: np.ndarray
    shares: np.ndarray


class _Run(NamedTuple):
    """Ends that follow each other: ``each`` of every one of some nodes; ``in_a_row``: of few entries, whosever they are."""

    first: int
    members: int
    each: int
    in_a_row: bool


class _Level(NamedTuple):
    """Nodes that are in no pair with each other.

    Attributes:
        nodes: themselves.
        bounds: where in the order of ends those of pairs with nodes before start, those with nodes behind, and the next level's.
        before, behind: these.
    """

    nodes: np.ndarray
    bounds: tuple[int, int, int]
    before: list[_Run]
    behind: list[_Run]


class _Order(NamedTuple):
    """Nodes and ends level by level.

    A level's nodes keep their order. Of its ends come first those of pairs with nodes before, then those of pairs with nodes behind; in
    either half nodes with the same tables follow each other, and a node's ends are in the order of their tables.

    Attributes:
        nodes: in order.
        joined: the node of each end; the first and the second of every pair.
        ends: in order.
        levels: in order.
        shares: of what each node holds, for each of its ends in the direction of more.
    """

    nodes: np.ndarray
    joined: np.ndarray
    ends: np.ndarray
    levels: list[_Level]
    shares: np.ndarray


def _ordered(order: Sequence[int], pairs: Pairs) -> _Order:
    """Nodes and ends by level, where nodes of a pair have their turns in some order."""
    n = len(order)
    joined = np.array(list(pairs), dtype=np.int64).ravel()
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    other = joined.reshape(-1, 2)[:, ::-1].ravel()
    behind = place[other] > place[joined]
    waits = np.flatnonzero(~behind)
    waits = waits[np.argsort(place[joined[waits]], kind="stable")]
    level = _levels(n, joined[waits].tolist(), other[waits].tolist())
    nodes = np.lexsort((place, level))
    halves = 2 * level[joined] + behind
    ends, runs = _in_halves(pairs, joined, halves, place, 2 * int(level.max(initial=-1)) + 2)
    node_bounds = np.searchsorted(level[nodes], np.arange(len(runs) // 2 + 1)).tolist()
    end_bounds = np.searchsorted(halves[ends], np.arange(len(runs) + 1)).tolist()
    levels = [
        _Level(nodes[first:last], tuple(end_bounds[2 * k : 2 * k + 3]), runs[2 * k], runs[2 * k + 1])
        for k, (first, last) in enumerate(pairwise(node_bounds))
    ]
    n_before, n_behind = np.bincount(joined[~behind], minlength=n), np.bincount(joined[behind], minlength=n)
    return _Order(nodes, joined, ends, levels, 1 / np.maximum(np.maximum(n_before, n_behind), 1))


def _levels(n: int, waiting: Sequence[int], before: Sequence[int]) -> np.ndarray:
    """Each node's level: one more than any of those it waits for, which are given in its turn.

    >>> _levels(4, [1, 2, 2, 3], [0, 0, 1, 0]).tolist()
    [0, 1, 2, 1]
    """
    level = [0] * n
    for i, j in zip(waiting, before, strict=True):
        if level[j] >= level[i]:
            level[i] = level[j] + 1
    return np.array(level, dtype=np.int64)


def _in_halves(
    pairs: Pairs, joined: np.ndarray, halves: np.ndarray, place: np.ndarray, n_halves: int
) -> tuple[np.ndarray, list[list[_Run]]]:
    """The ends, half by half of the levels, and the runs of each half: of few entries first, then of nodes with the same tables."""
    numbers: dict[int, int] = {}
    codes = np.repeat([2 * numbers.setdefault(id(table), len(numbers)) for table in pairs.values()], 2)
    codes[1::2] += 1
    by_node = np.lexsort((codes, place[joined], halves))
    sides = np.flatnonzero(np.diff(joined[by_node], prepend=-1) | np.diff(halves[by_node], prepend=-1))  # each of a node and a half
    counts = np.diff(sides, append=len(by_node))
    entries = np.repeat([table.size for table in pairs.values()], 2)
    weights = np.add.reduceat(entries[by_node], sides).tolist() if len(sides) else []
    groups: list[dict[bytes, list[int]]] = [{} for _ in range(n_halves)]
    words = codes[by_node]
    for side, (half, start, count) in enumerate(zip(halves[by_node[sides]].tolist(), sides.tolist(), counts.tolist(), strict=True)):
        groups[half].setdefault(words[start : start + count].tobytes(), []).append(side)
    in_order: list[int] = []
    runs: list[list[_Run]] = []
    at = 0
    for half in groups:
        large = [len(members) * weights[members[0]] > IN_A_ROW for members in half.values()]
        few = [side for members, many in zip(half.values(), large, strict=True) if not many for side in members]
        n_ends = int(counts[few].sum())
        runs.append([_Run(at, n_ends, 1, True)] if few else [])
        in_order += few
        at += n_ends
        for members in compress(half.values(), large):
            each = int(counts[members[0]])
            runs[-1].append(_Run(at, len(members), each, False))
            in_order += members
            at += len(members) * each
    return by_node[_ranges(sides[in_order], counts[in_order])], runs


def _fitting(moved: tuple[np.ndarray, np.ndarray] | None, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """What was moved into a pair, if it was moved into a table of this shape; else nothing."""
    n_first, n_last = table.shape
    if moved is not None and len(moved[0]) == n_first and len(moved[1]) == n_last:
        return moved
    return np.zeros(n_first), np.zeros(n_last)


def _placed(sizes: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where things of some sizes lie that follow each other in an order: in that order, and in theirs."""
    lengths = sizes[order]
    in_order = np.cumsum(lengths) - lengths
    found = np.empty_like(in_order)
    found[order] = in_order
    return in_order, found


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Ranges of numbers, one after the other.

    >>> _ranges(np.array([5, 0]), np.array([2, 3])).tolist()
    [5, 6, 0, 1, 2]
    """
    before = np.cumsum(lengths) - lengths
    return np.arange(lengths.sum()) + np.repeat(starts - before, lengths)


def _minima(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The least of the values from each start to the next."""
    return np.minimum.reduceat(values, starts) if len(starts) else np.zeros(0)


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
    classes = np.array(alike, dtype=np.int64)
    ends = np.sort(classes[np.array(list(pairs), dtype=np.int64).reshape(-1, 2)], axis=1)
    joined = np.unique(ends[ends[:, 0] != ends[:, 1]], axis=0).tolist()
    place = np.argsort(near_order(int(classes.max(initial=-1)) + 1, joined))
    return np.lexsort((np.arange(len(classes)), place[classes])).tolist()
