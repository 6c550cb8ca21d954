"""Message passing: costs move from node to node through pairs, and a lower bound rises with every sweep.

Sequential reweighted message passing (Kolmogorov 2015, "A new look at reweighted message passing", IEEE TPAMI 37(5), on pairwise models the
tree-reweighted TRW-S of Kolmogorov 2006): nodes in order collect what their pairs hold and hand it to those ahead in equal shares; then the
same backward. The bound never falls.

*The order* is that of least bandwidth (Cuthill and McKee 1969, reversed), so that all neighbours of a node stand near it and costs go far
in one sweep. It takes a third to a half of the sweeps that program order does, where a parameter stands far from all that reads it. Nodes
that are known to look alike follow each other, in that order of their classes.

*Levels.* Only the order of two nodes that stand in a pair matters. So nodes have their turns level by level, a level once all that it
waits for are done (as in parallel triangular solves: Anderson and Saad 1989): the same messages as one by one, in some twenty turns.

*Leaps.* Sweeps go on in much the same direction while the bound creeps up. Then every second one starts from further on in the direction of
those before it, and is undone where the bound is not higher for it. Whatever is moved leaves the sum as it is, so this is safe, and it
takes half of the sweeps again.

Tables stay as they are, and equal layers share theirs: what is moved into a pair is kept beside it, as a vector for each of its ends.

*Rows.* Many labels of an op have an operand lie in the same way, so that many rows of a pair's table are equal, and many columns. One of
each is looked at, less the most that was taken for any of its labels.

Complexity: sweeps x entries of the pair tables, of those rows and columns that differ.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import reverse_cuthill_mckee

from autoshard.problem import BUDGETS, Messages
from autoshard.search.elimination import Pairs
from autoshard.search.searcher import Progress, silent

Pair = tuple[int, int]

NO_LABELS = np.zeros(0, dtype=np.int64)
FROM_THE_FIRST = np.zeros(1, dtype=np.int64)


class Wiring:
    """The order in which costs are moved between some tables, and where in memory; the same for all passing over them.

    Each pair has two ends, and each end keeps what its node took there: a number a label. Ends lie in memory as `_Order` has them.

    Attributes:
        pairs: the tables, as they are given.
        sizes: how many labels each node has.
        nodes: in the order in which what they hold lies in memory.
        firsts, starts: where what each node holds lies, in that order and by node.
        label, row: which of what nodes hold each number of an end is for, and its row.
        places: where the numbers of ends lie, end by end of the pairs, by the labels' own numbers.
        offsets: where there the two ends of each pair start.
        blocks, lengths: where each end's numbers lie, and how many there are.
        groups: where each row's labels lie.
        forward, backward: turns, in order.
    """

    def __init__(self, sizes: Sequence[int], pairs: Pairs, alike: Sequence[int] | None = None):
        """Lays out what is taken.

        Args:
            sizes: per node how many labels it has.
            alike: per node the number of its class, such as that of an equal layer's equal part.
        """
        self.pairs = pairs
        narrow, rows = _narrowed(pairs)
        self._tables = list(narrow.values())
        self.sizes = np.array(sizes, dtype=np.int64)
        order = _ordered(near_order(len(sizes), pairs) if alike is None else alike_order(alike, pairs), narrow)
        self._ends, self.nodes = order.ends, order.nodes
        self.firsts, self.starts = _placed(self.sizes, order.nodes)
        # By label: an end's lie row by row.
        n_labels = self.sizes[order.joined]
        self.lengths = n_labels[order.ends]
        self.blocks, _ = _placed(n_labels, order.ends)
        within = np.concatenate([NO_LABELS, *(rows[end].labels for end in order.ends)])
        self.label = within + np.repeat(self.starts[order.joined[order.ends]], self.lengths)
        before = np.cumsum(n_labels) - n_labels
        self.places = np.empty_like(within)
        self.places[within + np.repeat(before[order.ends], self.lengths)] = np.arange(len(within))
        self.offsets = before.reshape(-1, 2).tolist()
        # By row.
        n_rows = np.array([len(end.counts) for end in rows], dtype=np.int64)
        self._row_blocks, blocks = _placed(n_rows, order.ends)  # where ends lie in memory, in order and by pair
        self._heights, self._theirs, self._widths = n_rows[order.ends], blocks[order.ends ^ 1], n_rows[order.ends ^ 1]
        counts = np.concatenate([NO_LABELS, *(rows[end].counts for end in order.ends)])
        self.groups = np.cumsum(counts) - counts
        self.row = np.repeat(np.arange(len(counts)), counts)
        turns = [self._turns(level, order.shares) for level in order.levels]
        self.forward = [forward for forward, _ in turns]
        self.backward = [backward for _, backward in reversed(turns)]

    def _turns(self, level: _Level, shares: np.ndarray) -> tuple[_Turn, _Turn]:
        """A level's turns, forward and backward."""
        start, middle, stop = (int(self.blocks[end]) if end < len(self.blocks) else len(self.label) for end in level.bounds)
        first_row, middle_row, last_row = (
            int(self._row_blocks[end]) if end < len(self._row_blocks) else len(self.groups) for end in level.bounds
        )
        sizes = self.sizes[level.nodes]
        first = int(self.starts[level.nodes[0]])
        given, block = slice(first, first + int(sizes.sum())), slice(start, stop)
        label = self.label[block] - first
        shares = np.repeat(shares[level.nodes], sizes)
        before, behind = (list(chain.from_iterable(map(self._pieces, runs))) for runs in (level.before, level.behind))
        at = middle - start
        row = self.row[block]
        lower, upper = self.groups[first_row:middle_row] - start, self.groups[middle_row:last_row] - middle
        low, high = slice(first_row, middle_row), slice(middle_row, last_row)
        left, right = slice(start, middle), slice(middle, stop)
        return (
            _Turn(before, left, row[:at], given, block, label, shares, right, label[at:], upper, high),
            _Turn(behind, right, row[at:], given, block, label, shares, left, label[:at], lower, low),
        )

    def _pieces(self, run: _Run) -> Iterator[_Piece]:
        """The pairs of some ends, in few pieces."""
        if run.in_a_row:
            yield self._in_a_row(run.first, run.first + run.members)
            return
        step = max(BUDGETS.together_entries // self._table(run.first).size, 1)
        for member in range(0, run.members, step):
            yield self._side_by_side(run.first + member, min(step, run.members - member))

    def _in_a_row(self, first: int, last: int) -> _Piece:
        """The pairs of some ends, one entry after the other."""
        n, row = self._heights[first:last], int(self._row_blocks[first])
        widths = np.repeat(self._widths[first:last], n)
        table = np.concatenate([self._table(end).ravel() for end in range(first, last)])
        theirs = _ranges(np.repeat(self._theirs[first:last], n), widths)
        return _Piece(table, theirs, np.cumsum(widths) - widths, 0, slice(row, row + int(n.sum())), (-1,))

    def _side_by_side(self, first: int, members: int) -> _Piece:
        """The pairs of ends with the same table."""
        n, row, width = int(self._heights[first]), int(self._row_blocks[first]), int(self._widths[first])
        theirs = self._theirs[first : first + members, None, None] + np.arange(width)
        own = slice(row, row + members * n)
        return _Piece(np.ascontiguousarray(self._table(first)), theirs, FROM_THE_FIRST, 2, own, (members, n, 1))

    def _table(self, position: int) -> np.ndarray:
        """The table of an end's pair ``(rows of the end, the other's)``."""
        end = int(self._ends[position])
        return self._tables[end >> 1].T if end & 1 else self._tables[end >> 1]


class Passing:
    """What has been taken out of pairs for the nodes at their ends, while costs are moved.

    Attributes:
        pairs: the tables, as they are given.
        swept: whether the minima of all pairs are taken.
        rise: of the bound, in the last sweeps from a leap to the next.
    """

    def __init__(
        self,
        unary: Sequence[np.ndarray],
        pairs: Pairs,
        sent: Messages | None = None,
        alike: Sequence[int] | None = None,
        wiring: Wiring | None = None,
    ):
        """Begins with what was sent into pairs, less what has another shape there, for some other table.

        Args:
            unary: per node what its labels cost.
            alike: per node the number of its class, such as that of an equal layer's equal part.
            wiring: of these pairs, if it is known.
        """
        self._wiring = wiring = Wiring([len(table) for table in unary], pairs, alike) if wiring is None else wiring
        self.pairs = pairs
        self.swept = False
        self.rise = math.inf
        self._reach = 2.0
        self._given = np.concatenate([np.zeros(0), *(unary[i] for i in wiring.nodes)])
        self._taken = np.zeros(len(wiring.label))
        self._most = np.zeros(len(wiring.groups))  # that was taken for any label of a row; a sweep renews it where it is looked at
        if sent:
            taken = list(chain.from_iterable(_fitting(sent.get(pair), table) for pair, table in pairs.items()))
            self._taken[wiring.places] = -np.concatenate([np.zeros(0), *taken])
        self._forward = [_views(turn, self._given, self._taken, self._most) for turn in wiring.forward]
        self._backward = [_views(turn, self._given, self._taken, self._most) for turn in wiring.backward]

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
            if creeps and (sweep + 1) % BUDGETS.leap_sweeps == 0:
                bound = self._leap(since, bound)
            else:
                self.sweep()
                old, bound = bound, self.bound()
                if bound - old <= BUDGETS.passing_tolerance * abs(bound):
                    return sweep + 1
                creeps = bound - old <= BUDGETS.leap_rise * abs(bound)
            if (sweep + 1) % BUDGETS.leap_sweeps == 0:
                self.rise, since, below = bound - below, self._taken.copy(), bound
                if give_up and bound + self.rise / BUDGETS.leap_sweeps * (max_sweeps - sweep - 1) < enough:
                    return sweep + 1
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
            (_, _, _, _, _, label, shares, _, goes, groups, _), _, _, given, block, go, most = turn
            if len(go):
                held = np.bincount(label, block, len(given))
                held += given
                held *= shares
                go -= held.take(goes)
                np.maximum.reduceat(go, groups, 0, None, most)
        self.swept = True

    def _collect(self, turn: _Views) -> None:
        """The nodes take what pairs of one side hold at least, beyond what the others took."""
        for (table, theirs, starts, axis, _, _), own in turn.pieces:
            np.minimum.reduceat(table - self._most.take(theirs), starts, axis, None, own)
        self._most.take(turn.of.rows, 0, turn.come, "clip")

    @property
    def sent(self) -> dict[Pair, tuple[np.ndarray, np.ndarray]]:
        """What has been moved into each pair."""
        moved = -self._taken[self._wiring.places]
        sizes = self._wiring.sizes.tolist()
        return {
            (i, j): (moved[first : first + sizes[i]], moved[last : last + sizes[j]])
            for (i, j), (first, last) in zip(self.pairs, self._wiring.offsets, strict=True)
        }

    def bound(self) -> float:
        """The sum of all minima; those of pairs are zero after a sweep, whose backward half ends with taking them."""
        pairs = 0.0 if self.swept else _minima(self._left(self._forward), self._wiring.blocks).sum()
        return float(_minima(self._held(), self._wiring.firsts).sum() + pairs)

    def unary(self) -> list[np.ndarray]:
        """What each node holds, less its minimum."""
        return self._by_node(self._beyond())

    def reduced(self) -> list[np.ndarray]:
        """By how much whatever has a label costs more than the bound, at least."""
        found = self._beyond()
        for turns in (self._forward, self._backward):
            left = self._left(turns)
            left -= np.repeat(_minima(left, self._wiring.blocks), self._wiring.lengths)
            found += np.bincount(self._wiring.label, left, len(found))
        return self._by_node(found)

    def _held(self) -> np.ndarray:
        """What nodes hold, one after the other."""
        return self._given + np.bincount(self._wiring.label, self._taken, len(self._given))

    def _beyond(self) -> np.ndarray:
        """The same, less each one's minimum."""
        held = self._held()
        return held - np.repeat(_minima(held, self._wiring.firsts), self._wiring.sizes[self._wiring.nodes])

    def _by_node(self, held: np.ndarray) -> list[np.ndarray]:
        starts, stops = self._wiring.starts.tolist(), (self._wiring.starts + self._wiring.sizes).tolist()
        return [held[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def _left(self, turns: list[_Views]) -> np.ndarray:
        """The least that is left in the pairs that nodes come from, by their labels; zero elsewhere."""
        before = self._taken.copy()
        if len(self._wiring.groups):
            np.maximum.reduceat(self._taken, self._wiring.groups, 0, None, self._most)
        for turn in turns:
            self._collect(turn)
        left = self._taken - before
        self._taken[:] = before
        return left


class _Piece(NamedTuple):
    """Pairs that are looked at together; side by side ``(n pairs, n_i rows, n_j of the others)``, or all these in a row.

    Attributes:
        table: ``(n_i, n_j)``, the same for all; or one number an entry.
        theirs: where in memory lies what the others took at most, ``(n, 1, n_j)``, or one an entry.
        starts: where the others' rows start along the axis, of each row of the nodes'.
        axis: that of the others' rows.
        own, shape: where in memory lies what the nodes take, ``(n, n_i, 1)``, or in a row.
    """

    table: np.ndarray
    theirs: np.ndarray
    starts: np.ndarray
    axis: int
    own: slice
    shape: tuple[int, ...]


class _Turn(NamedTuple):
    """What a level's nodes do in one direction.

    Attributes:
        pieces: the pairs they collect from.
        come, rows: where what they took of those lies, and the row of each.
        given: where their own tables lie, one after the other.
        block, label: where all that they took lies, and for which of their labels each is.
        shares: what part of what a label holds each pair gets that gets a share.
        go, goes: where what they took of those lies, and for which.
        groups, most: where each row's labels lie in that, and where the most that was taken for any.
    """

    pieces: list[_Piece]
    come: slice
    rows: np.ndarray
    given: slice
    block: slice
    label: np.ndarray
    shares: np.ndarray
    go: slice
    goes: np.ndarray
    groups: np.ndarray
    most: slice


class _Views(NamedTuple):
    """The parts of memory that a turn reads and writes; `_Turn` says what each is, and `_Piece` what its pieces' own is."""

    of: _Turn
    pieces: list[tuple[_Piece, np.ndarray]]
    come: np.ndarray
    given: np.ndarray
    block: np.ndarray
    go: np.ndarray
    most: np.ndarray


def _views(turn: _Turn, given: np.ndarray, taken: np.ndarray, most: np.ndarray) -> _Views:
    """A turn's parts of what nodes hold, of what was taken, and of the most that was taken for any label of a row."""
    pieces = [(piece, most[piece.own].reshape(piece.shape)) for piece in turn.pieces]
    return _Views(turn, pieces, taken[turn.come], given[turn.given], taken[turn.block], taken[turn.go], most[turn.most])


class _Run(NamedTuple):
    """Ends that follow each other, of the same table; ``in_a_row``: of few entries, whichever tables they have."""

    first: int
    members: int
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
    either half ends of the same table follow each other.

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
    """The ends, half by half of the levels, and the runs of each half: of few entries first, then those of a table each."""
    numbers: dict[int, int] = {}
    codes = np.repeat(np.array([2 * numbers.setdefault(id(table), len(numbers)) for table in pairs.values()], dtype=np.int64), 2)
    codes[1::2] += 1
    entries = np.repeat(np.array([table.size for table in pairs.values()], dtype=np.int64), 2)
    ends = np.lexsort((place[joined], codes, halves))
    firsts = np.flatnonzero(np.diff(codes[ends], prepend=-1) | np.diff(halves[ends], prepend=-1))  # of each half and table
    counts = np.diff(firsts, append=len(ends))
    half, many = halves[ends[firsts]], counts * entries[ends[firsts]] > BUDGETS.row_entries
    in_order = np.lexsort((many, half))
    ends = ends[_ranges(firsts[in_order], counts[in_order])]
    runs: list[list[_Run]] = [[] for _ in range(n_halves)]
    at = 0
    for number, alone, members in zip(half[in_order].tolist(), many[in_order].tolist(), counts[in_order].tolist(), strict=True):
        if not alone and runs[number]:
            runs[number][0] = _Run(runs[number][0].first, runs[number][0].members + members, True)
        else:
            runs[number].append(_Run(at, members, not alone))
        at += members
    return ends, runs


class _Rows(NamedTuple):
    """What a pair's table tells apart of the labels at one of its ends.

    Attributes:
        labels: row by row.
        counts: of each row's labels.
    """

    labels: np.ndarray
    counts: np.ndarray

    @property
    def firsts(self) -> np.ndarray:
        """A label of each row."""
        return self.labels[np.cumsum(self.counts) - self.counts]


def _narrowed(pairs: Pairs) -> tuple[dict[Pair, np.ndarray], list[_Rows]]:
    """The tables with one of equal rows and one of equal columns, and both ends of each pair."""
    met: dict[int, tuple[np.ndarray, _Rows, _Rows]] = {}
    narrow, ends = {}, []
    for pair, table in pairs.items():
        if id(table) not in met:
            first, last = _rows(table), _rows(table.T)
            met[id(table)] = table[first.firsts[:, None], last.firsts], first, last
        narrow[pair], first, last = met[id(table)]
        ends += [first, last]
    return narrow, ends


def _rows(table: np.ndarray) -> _Rows:
    """Which labels have equal rows.

    >>> _rows(np.array([[0, 1], [2, 3], [0, 1]]))
    _Rows(labels=array([0, 2, 1]), counts=array([2, 1]))
    """
    width, data = table.shape[1] * table.itemsize, table.tobytes()
    numbers: dict[bytes, int] = {}
    row = np.array([numbers.setdefault(data[k : k + width], len(numbers)) for k in range(0, len(data), width)])
    return _Rows(np.argsort(row, kind="stable"), np.bincount(row))


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
