"""The order in which messages are passed, and where they are stored: the same for all message passing over some pairs.

*Order.* That of least bandwidth (Cuthill and McKee 1969, reversed), so that all neighbours of a variable stand near it and costs go far in
one sweep: a third to a half of the sweeps that program order takes, where a parameter stands far from all its readers. Variables that are
known to be equivalent follow each other, in that order of their classes.

*Levels.* Only the order of two variables that share a table matters. So variables are processed level by level, a level once all that it
depends on are done (as in parallel triangular solves: Anderson and Saad 1989): the same messages as one by one, in some twenty steps.

*Distinct rows.* Many labels of an operation give an operand the same layout, so that many rows of a pair's table are equal, and many
columns. One of each is kept, less the largest message of any of its labels.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain, pairwise
from typing import NamedTuple

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.inference.model import Pair, Pairs

NO_LABELS = np.zeros(0, dtype=np.int64)
FROM_THE_FIRST = np.zeros(1, dtype=np.int64)


class MessageLayout:
    """The order of messages between some tables, and the offsets of their storage.

    Each pair has two ends. An end stores the message that its variable took from the pair, a number a label; ends are stored in the order
    of `_Order`.

    Attributes:
        pairs: the tables, as they are given.
        sizes: per variable the number of its labels.
        variables: in the order in which their costs are stored.
        firsts, starts: offsets of each variable's costs, in that order and by variable.
        label, row: per number of an end the offset of its label's cost, and its row.
        places: offsets of the ends' numbers, end by end of the pairs, by the labels' own numbers.
        offsets: where in that the two ends of each pair start.
        blocks, lengths: offset and length of each end.
        groups: offset of each row's labels.
        forward, backward: the steps of a sweep, in order.
    """

    def __init__(self, sizes: Sequence[int], pairs: Pairs, classes: Sequence[int] | None = None):
        """Finds the order and the offsets.

        Args:
            sizes: per variable the number of its labels.
            classes: per variable the number of its class, such as that of the same operation in equal layers.
        """
        self.pairs = pairs
        narrow, rows = _narrowed(pairs)
        self._tables = list(narrow.values())
        self.sizes = np.array(sizes, dtype=np.int64)
        order = _ordered(bandwidth_order(len(sizes), pairs) if classes is None else class_order(classes, pairs), narrow)
        self._ends, self.variables = order.ends, order.variables
        self.firsts, self.starts = _placed(self.sizes, order.variables)
        # By label, an end's row by row.
        n_labels = self.sizes[order.joined]
        self.lengths = n_labels[order.ends]
        self.blocks, _ = _placed(n_labels, order.ends)
        within = np.concatenate([NO_LABELS, *(rows[end].labels for end in order.ends)])
        self.label = within + np.repeat(self.starts[order.joined[order.ends]], self.lengths)
        before = np.cumsum(n_labels) - n_labels
        self.places = np.empty_like(within)
        self.places[within + np.repeat(before[order.ends], self.lengths)] = np.arange(len(within))
        self.offsets: list[list[int]] = before.reshape(-1, 2).tolist()
        # By row.
        n_rows = np.array([len(end.counts) for end in rows], dtype=np.int64)
        self._row_blocks, blocks = _placed(n_rows, order.ends)  # offsets of ends, in order and by pair
        self._heights, self._theirs, self._widths = n_rows[order.ends], blocks[order.ends ^ 1], n_rows[order.ends ^ 1]
        counts = np.concatenate([NO_LABELS, *(rows[end].counts for end in order.ends)])
        self.groups = np.cumsum(counts) - counts
        self.row = np.repeat(np.arange(len(counts)), counts)
        steps = [self._steps(level, order.shares) for level in order.levels]
        self.forward: list[LevelStep] = [forward for forward, _ in steps]
        self.backward: list[LevelStep] = [backward for _, backward in reversed(steps)]

    def _steps(self, level: _Level, shares: np.ndarray) -> tuple[LevelStep, LevelStep]:
        """A level's steps, forward and backward."""
        start, middle, stop = (int(self.blocks[end]) if end < len(self.blocks) else len(self.label) for end in level.bounds)
        first_row, middle_row, last_row = (
            int(self._row_blocks[end]) if end < len(self._row_blocks) else len(self.groups) for end in level.bounds
        )
        sizes = self.sizes[level.variables]
        first = int(self.starts[level.variables[0]])
        given, block = slice(first, first + int(sizes.sum())), slice(start, stop)
        label = self.label[block] - first
        shares = np.repeat(shares[level.variables], sizes)
        before, behind = (list(chain.from_iterable(map(self._batches, runs))) for runs in (level.before, level.behind))
        at = middle - start
        row = self.row[block]
        lower, upper = self.groups[first_row:middle_row] - start, self.groups[middle_row:last_row] - middle
        low, high = slice(first_row, middle_row), slice(middle_row, last_row)
        left, right = slice(start, middle), slice(middle, stop)
        return (
            LevelStep(before, left, row[:at], given, block, label, shares, right, label[at:], upper, high),
            LevelStep(behind, right, row[at:], given, block, label, shares, left, label[:at], lower, low),
        )

    def _batches(self, run: _Run) -> Iterator[Batch]:
        """The pairs of some ends, as few batches."""
        if run.flattened:
            yield self._flattened(run.first, run.first + run.members)
            return
        step = max(BUDGETS.together_entries // self._table(run.first).size, 1)
        for member in range(0, run.members, step):
            yield self._of_one_table(run.first + member, min(step, run.members - member))

    def _flattened(self, first: int, last: int) -> Batch:
        """The pairs of some ends, one entry after the other."""
        n, row = self._heights[first:last], int(self._row_blocks[first])
        widths = np.repeat(self._widths[first:last], n)
        table = np.concatenate([self._table(end).ravel() for end in range(first, last)])
        theirs = _ranges(np.repeat(self._theirs[first:last], n), widths)
        return Batch(table, theirs, np.cumsum(widths) - widths, 0, slice(row, row + int(n.sum())), (-1,))

    def _of_one_table(self, first: int, members: int) -> Batch:
        """The pairs of ends with the same table."""
        n, row, width = int(self._heights[first]), int(self._row_blocks[first]), int(self._widths[first])
        theirs = self._theirs[first : first + members, None, None] + np.arange(width)
        own = slice(row, row + members * n)
        return Batch(np.ascontiguousarray(self._table(first)), theirs, FROM_THE_FIRST, 2, own, (members, n, 1))

    def _table(self, position: int) -> np.ndarray:
        """The table of an end's pair ``(rows of the end, the other's)``."""
        end = int(self._ends[position])
        return self._tables[end >> 1].T if end & 1 else self._tables[end >> 1]


class Batch(NamedTuple):
    """Pairs whose messages are computed together: of one table, ``(n pairs, n_i rows, n_j of the others)``, or of several, flattened.

    Attributes:
        table: ``(n_i, n_j)``, the same for all; or flattened.
        theirs: offsets of the others' largest messages, ``(n, 1, n_j)``, or one an entry.
        starts: where each row's entries start along the axis.
        axis: that of the others' rows.
        own, shape: the slice of the messages to compute, and its shape ``(n, n_i, 1)``, or flat.
    """

    table: np.ndarray
    theirs: np.ndarray
    starts: np.ndarray
    axis: int
    own: slice
    shape: tuple[int, ...]


class LevelStep(NamedTuple):
    """A level's step in one direction; slices and offsets are into what `MessagePassing` stores.

    Attributes:
        batches: the pairs its variables collect from.
        come, rows: the messages from those, and the row of each.
        given: the variables' own costs, one variable after the other.
        block, label: all their messages, and the label that each is for.
        shares: per label the part of its cost that each pair gets in the direction of the sweep.
        go, goes: the messages to those pairs, and the label that each is for.
        groups, most: in those messages, where each row's labels begin; and the slice of the rows' largest messages.
    """

    batches: list[Batch]
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


class _Run(NamedTuple):
    """Ends that follow each other: of the same table, or, ``flattened``, of any tables of few entries."""

    first: int
    members: int
    flattened: bool


class _Level(NamedTuple):
    """Variables that share no tables with each other.

    Attributes:
        variables: their numbers.
        bounds: in the order of ends, where those of pairs with earlier variables start, those with later ones, and the next level's.
        before, behind: the ends of pairs with earlier and with later variables.
    """

    variables: np.ndarray
    bounds: tuple[int, int, int]
    before: list[_Run]
    behind: list[_Run]


class _Order(NamedTuple):
    """Variables and ends level by level.

    A level's variables keep their order. Its ends with earlier variables come before those with later ones; in either half ends of the same
    table follow each other.

    Attributes:
        variables: the variables, in order.
        joined: the variable of each end; the first and the second of every pair.
        ends: in order.
        levels: in order.
        shares: per variable one over the number of its ends in the direction in which it has more.
    """

    variables: np.ndarray
    joined: np.ndarray
    ends: np.ndarray
    levels: list[_Level]
    shares: np.ndarray


def _ordered(order: Sequence[int], pairs: Pairs) -> _Order:
    """Variables and ends by level, for variables processed in a given order."""
    n = len(order)
    joined = np.array(list(pairs), dtype=np.int64).ravel()
    place = np.empty(n, dtype=np.int64)
    place[order] = np.arange(n)
    other = joined.reshape(-1, 2)[:, ::-1].ravel()
    behind = place[other] > place[joined]
    waits = np.flatnonzero(~behind)
    waits = waits[np.argsort(place[joined[waits]], kind="stable")]
    level = _levels(n, joined[waits].tolist(), other[waits].tolist())
    variables = np.lexsort((place, level))
    halves = 2 * level[joined] + behind
    ends, runs = _in_halves(pairs, joined, halves, place, 2 * int(level.max(initial=-1)) + 2)
    variable_bounds = np.searchsorted(level[variables], np.arange(len(runs) // 2 + 1)).tolist()
    end_bounds = np.searchsorted(halves[ends], np.arange(len(runs) + 1)).tolist()
    levels = [
        _Level(variables[first:last], tuple(end_bounds[2 * k : 2 * k + 3]), runs[2 * k], runs[2 * k + 1])
        for k, (first, last) in enumerate(pairwise(variable_bounds))
    ]
    n_before, n_behind = np.bincount(joined[~behind], minlength=n), np.bincount(joined[behind], minlength=n)
    return _Order(variables, joined, ends, levels, 1 / np.maximum(np.maximum(n_before, n_behind), 1))


def _levels(n: int, waiting: Sequence[int], before: Sequence[int]) -> np.ndarray:
    """Each variable's level: one more than any that it waits for.

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
    """The ends, half by half of the levels, and the runs of each half: all of few entries first, then one a table."""
    numbers: dict[int, int] = {}
    codes = np.repeat(np.array([2 * numbers.setdefault(id(table), len(numbers)) for table in pairs.values()], dtype=np.int64), 2)
    codes[1::2] += 1
    entries = np.repeat(np.array([table.size for table in pairs.values()], dtype=np.int64), 2)
    ends = np.lexsort((place[joined], codes, halves))
    firsts = np.flatnonzero(np.diff(codes[ends], prepend=-1) | np.diff(halves[ends], prepend=-1))  # of each half and table
    counts = np.diff(firsts, append=len(ends))
    half, many = halves[ends[firsts]], counts * entries[ends[firsts]] > BUDGETS.small_entries
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
    """Groups of labels with equal rows in a pair's table.

    Attributes:
        labels: group by group.
        counts: per group the number of its labels.
    """

    labels: np.ndarray
    counts: np.ndarray

    @property
    def firsts(self) -> np.ndarray:
        """One label of each group."""
        return self.labels[np.cumsum(self.counts) - self.counts]


def _narrowed(pairs: Pairs) -> tuple[dict[Pair, np.ndarray], list[_Rows]]:
    """The tables without repeated rows and columns, and the groups of labels at both ends of each pair."""
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
    """The groups of labels with equal rows.

    >>> _rows(np.array([[0, 1], [2, 3], [0, 1]]))
    _Rows(labels=array([0, 2, 1]), counts=array([2, 1]))
    """
    width, data = table.shape[1] * table.itemsize, table.tobytes()
    numbers: dict[bytes, int] = {}
    row = np.array([numbers.setdefault(data[k : k + width], len(numbers)) for k in range(0, len(data), width)])
    return _Rows(np.argsort(row, kind="stable"), np.bincount(row))


def _placed(sizes: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of blocks of some sizes that follow each other in an order: in that order, and by block."""
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


def bandwidth_order(n_variables: int, pairs: Collection[Pair]) -> list[int]:
    """The variables in the order of least bandwidth, in which those of a pair stand near each other.

    >>> bandwidth_order(4, [(0, 3), (3, 1), (1, 2)])
    [2, 1, 3, 0]
    """
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import reverse_cuthill_mckee

    if not n_variables:
        return []
    ends = np.array(list(pairs), dtype=np.int64).reshape(-1, 2)
    both = np.concatenate([ends, ends[:, ::-1]])
    joined = csr_matrix((np.ones(len(both)), (both[:, 0], both[:, 1])), shape=(n_variables, n_variables))
    return reverse_cuthill_mckee(joined, symmetric_mode=True).tolist()


def class_order(classes: Sequence[int], pairs: Collection[Pair]) -> list[int]:
    """The variables class by class, the classes in the order of least bandwidth.

    >>> class_order([0, 1, 0, 1], [(0, 1), (1, 2), (2, 3)])
    [1, 3, 0, 2]
    """
    class_of = np.array(classes, dtype=np.int64)
    ends = np.sort(class_of[np.array(list(pairs), dtype=np.int64).reshape(-1, 2)], axis=1)
    joined = np.unique(ends[ends[:, 0] != ends[:, 1]], axis=0).tolist()
    place = np.argsort(bandwidth_order(int(class_of.max(initial=-1)) + 1, joined))
    return np.lexsort((np.arange(len(class_of)), place[class_of])).tolist()
