"""Which rows of a global batch each process reads, as its devices need them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise

import numpy as np

from autoshard.errors import StrategyError


@dataclass(frozen=True, slots=True)
class DataShard:
    """The part of every global batch that a process reads; processes of one ``shard_id`` read the same.

    Attributes:
        num_shards: parts that the data is split into; 1 where every process reads everything.
        shard_id: which of them this process reads.
        batch_size: rows of a global batch.
        rows: this process's positions in the global batch, rising; its own batch has its rows in this order.

    >>> DataShard(num_shards=2, shard_id=1, batch_size=8, rows=(4, 5, 6, 7)).n_rows
    4
    """

    num_shards: int
    shard_id: int
    batch_size: int
    rows: tuple[int, ...]

    @property
    def n_rows(self) -> int:
        """Rows of this process's own batch."""
        return len(self.rows)


def shard_of(needed: Iterable[tuple[int, int, int]], batch_size: int, process: int) -> DataShard:
    """A process's shard: its rows, and those of all that share rows with it.

    Shards are disjoint and have the same number of rows; where processes share rows in a way that allows only shards of different sizes,
    there is one, and all read everything. O(n log n) in the triples.

    Args:
        needed: a process, and the first row that one of its devices needs of some array and the one after the last.
        batch_size: rows of a global batch.
        process: the index of the process.

    Raises:
        StrategyError: no device of the process needs anything.

    >>> shard_of([(0, 0, 4), (0, 4, 8), (1, 8, 12), (1, 12, 16)], 16, 1).rows
    (8, 9, 10, 11, 12, 13, 14, 15)
    """
    triples = sorted(set(needed))
    from scipy.sparse import coo_matrix
    from scipy.sparse.csgraph import connected_components

    processes = sorted({each for each, _, _ in triples})
    if process not in processes:
        raise StrategyError(
            f"a process reads what its own devices need, and process {process} has no device of this strategy's mesh. Search for all "
            "devices, or start as many processes as have some."
        )
    cuts = sorted({0, batch_size, *chain.from_iterable((start, stop) for _, start, stop in triples)})
    sizes = np.diff(cuts)
    place, number = {cut: n for n, cut in enumerate(cuts)}, {each: n for n, each in enumerate(processes)}
    pairs = {(number[each], segment) for each, start, stop in triples for segment in range(place[start], place[stop])}
    owners, segments = np.array(sorted(pairs)).T
    n = len(processes) + len(sizes)
    _, groups = connected_components(coo_matrix((np.ones(len(owners)), (owners, len(processes) + segments)), (n, n)), directed=False)
    group_of_segment = groups[len(processes) :]
    shards = list(dict.fromkeys(group_of_segment.tolist()))
    rows_of = np.bincount(group_of_segment, sizes, n)[shards]
    if len(set(rows_of.tolist())) > 1:
        return DataShard(1, 0, batch_size, tuple(range(batch_size)))
    own = groups[number[process]]
    segments_of = zip(pairwise(cuts), group_of_segment, strict=True)
    rows = chain.from_iterable(range(*segment) for segment, group in segments_of if group == own)
    return DataShard(len(shards), shards.index(own), batch_size, tuple(rows))


def local_index(rows: Sequence[int], wanted: slice) -> slice:
    """Where rows of a global batch are in the batch that has these rows alone.

    >>> local_index((2, 3, 6, 7), slice(6, 8))
    slice(2, 4, None)
    """
    start = bisect_left(rows, wanted.start)
    return slice(start, start + wanted.stop - wanted.start)
