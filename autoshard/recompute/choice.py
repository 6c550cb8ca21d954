"""What a block keeps between its passes: a minimum cut at a price for bytes, one for each class of equal segments.

Each equation of the forward pass is run again or not, each value that is read again is kept or made again: least seconds of what is run
again plus the price of what is kept, exactly, as a minimum cut. Equal segments are cut once. What the first equations make may have
another price, which leads to choices between those of one price.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from jax.extend.core import Var

from autoshard.recompute.block import Block, is_key, nbytes, segment_of, variables

SCALE = 1 << 29  # capacities are whole numbers of this many parts of all that can be cut
ENDLESS = 1 << 30


@dataclass(frozen=True, slots=True)
class _Segment:
    """A segment as far as its cut depends on it.

    Attributes:
        seconds: per equation the time of running it again; None where it is not.
        results: per equation its results: bytes, whether the backward pass reads it, and whether it is kept in any case.
        reads: per equation the results of the segment that it reads, as pairs of numbers; (-1, k) for a loop's carry.
        carried: per carry its bytes, and whether the backward pass reads it.
    """

    seconds: tuple[float | None, ...]
    results: tuple[tuple[tuple[float, bool, bool], ...], ...]
    reads: tuple[tuple[tuple[int, int], ...], ...]
    carried: tuple[tuple[float, bool], ...]


class _Prices(NamedTuple):
    """Prices of bytes: of those that the first equations of a segment make, and of the others."""

    first: float
    others: float
    n_first: int

    @classmethod
    def of(cls, first: float, others: float, n_first: int, n: int) -> _Prices:
        """The prices of ``n`` equations, the same where they are of all of them."""
        if n_first >= n:
            return cls(first, first, 0)
        return cls(first, others, n_first) if n_first > 0 else cls(others, others, 0)

    def at(self, k: int) -> float:
        """That of an equation; what a trip starts with is equation -1."""
        return self.first if k < self.n_first else self.others


class Chooser:
    """The choice of what a block keeps, at any price.

    Args:
        seconds: per equation of the forward pass the time of running it; None: never again.
        stored: the values that the compiler stores; others it makes again where they are read.
        is_trip: whether the block is a loop's, one trip's passes.
    """

    def __init__(
        self, block: Block, places: tuple[int, ...], seconds: Callable[[int], float | None], stored: frozenset[Var], is_trip: bool
    ):
        self.block, self.places, self.stored = block, places, stored
        self._is_trip = is_trip
        self._seconds = [seconds(k) for k in range(block.turn)]
        ends = (0, *places, block.turn)
        self._bounds = list(pairwise(ends))
        self._fixed = block.returned | self._early()
        self._segments = [self._segment(start, stop) for start, stop in self._bounds]
        self._cuts: dict[tuple[_Segment, _Prices], frozenset[int]] = {}

    def _segment(self, start: int, stop: int) -> _Segment:
        block = self.block
        own = segment_of(self.places, start)
        local = {var: (k - start, n) for k in range(start, stop) for n, var in enumerate(block.eqns[k].outvars)}
        local |= {var: (-1, n) for n, var in enumerate(block.carried)}
        crossing = self._crossing
        return _Segment(
            tuple(self._seconds[k] if block.repeatable(k) else None for k in range(start, stop)),
            tuple(
                tuple((nbytes(v), v in block.needed, v in self._fixed or crossing.get(v, own) > own) for v in block.eqns[k].outvars)
                for k in range(start, stop)
            ),
            tuple(tuple(local[v] for v in variables(block.eqns[k].invars) if v in local) for k in range(start, stop)),
            tuple((nbytes(v), v in block.needed) for v in block.carried),
        )

    def _early(self) -> frozenset[Var]:
        """Keys, and the values that the backward pass reads before it comes to their segment: a region for them would hold up others.

        Whatever reads the last segment's values, as an optimizer reads running statistics at the end, waits for no region, but in a trip.
        """
        block, found = self.block, set[Var]()
        later = 0
        for eqn in reversed(block.eqns[block.turn :]):
            read = [v for v in variables(eqn.invars) if v in block.made]
            of = [segment_of(self.places, block.made[v]) for v in read]
            found.update(v for v, segment in zip(read, of, strict=True) if segment + 1 < later or is_key(v))
            later = max([later, *(segment for segment in of if self._is_trip or segment < len(self.places))])
        return frozenset(found)

    @cached_property
    def _crossing(self) -> dict[Var, int]:
        """Per value the last segment of the forward pass that reads it."""
        found: dict[Var, int] = {}
        for k, eqn in enumerate(self.block.eqns[: self.block.turn]):
            found.update((v, segment_of(self.places, k)) for v in variables(eqn.invars))
        return found

    def kept(self, price: float, lower: float = 0.0, share: float = 1.0) -> frozenset[Var]:
        """What is kept where a byte costs so many seconds.

        The last segment keeps everything, since its backward pass runs at once, except a loop's trip. So does one of which nothing that
        takes time is run again: compilers do that by themselves.

        Args:
            lower: the price of bytes that are made after the first share of the equations.
            share: that share.
        """
        block, again = self.block, set[int]()
        until = round(share * block.turn)
        last = len(self._bounds) - 1
        for number, ((start, stop), segment) in enumerate(zip(self._bounds, self._segments, strict=True)):
            if number == last and not self._is_trip:
                continue
            key = segment, _Prices.of(price, lower, until - start, stop - start)
            if key not in self._cuts:
                self._cuts[key] = _cut(*key)
            found = self._cuts[key]
            if any(segment.seconds[k] for k in found):
                again.update(start + k for k in found)
        return self.kept_without(again)

    def kept_without(self, again: set[int]) -> frozenset[Var]:
        """What is kept where some equations are run again."""
        block = self.block
        read = set(block.needed) | {v for k in again for v in variables(block.eqns[k].invars) if v in block.made}
        crossing = self._crossing
        held = set(read & self._fixed)
        held |= {v for v in read if crossing.get(v, -1) > segment_of(self.places, block.made[v])}
        return frozenset(v for v in read if block.made[v] not in again) | held

    def held(self, kept: frozenset[Var]) -> set[Var]:
        """What is held between the passes: what regions read, and what the compiler makes other values of."""
        block = self.block
        again = {segment_of(self.places, k) for k in block.again(kept)}
        read = {v for v in kept if segment_of(self.places, block.made[v]) in again}
        return read | block.held(kept - read, self.stored)

    def seconds(self, kept: frozenset[Var]) -> float:
        """The time of what is run again."""
        return sum(self._seconds[k] or 0.0 for k in self.block.again(kept))


def _cut(segment: _Segment, prices: _Prices) -> frozenset[int]:
    """The equations of a segment that are run again; of several best choices the fewest."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    tails, heads, costs = zip(*_edges(segment, prices), strict=True) if segment.seconds or segment.carried else ((), (), ())
    cost, n = np.array(costs), len(segment.seconds)
    finite = np.isfinite(cost)
    total = cost[finite].sum()
    if not total:
        return frozenset()
    capacity = np.where(finite, np.ceil(np.where(finite, cost, 0.0) / total * SCALE), ENDLESS).astype(np.int32)
    size = 2 + n + sum(map(len, segment.results)) + len(segment.carried)
    graph = csr_matrix((capacity, (tails, heads)), shape=(size, size))
    left = graph - maximum_flow(graph, 0, 1).flow
    left.data = np.maximum(left.data, 0)
    left.eliminate_zeros()
    reached = breadth_first_order(left.T.tocsr(), 1, return_predecessors=False)
    return frozenset(int(one) - 2 for one in reached if 2 <= one < 2 + n)


def _edges(segment: _Segment, prices: _Prices) -> Iterator[tuple[int, int, float]]:
    """The graph that is cut: tail, head and cost; source 0, sink 1, then equations, their results, and carries."""
    n = len(segment.seconds)
    first = [*accumulate(map(len, segment.results), initial=2 + n)]
    carry = first[-1]
    for k, seconds in enumerate(segment.seconds):
        yield 0, 2 + k, np.inf if seconds is None else seconds
        for number, (held, needed, fixed) in enumerate(segment.results[k]):
            yield 2 + k, first[k] + number, 0.0 if fixed else prices.at(k) * held
            if needed:
                yield first[k] + number, 1, np.inf
        for by, result in set(segment.reads[k]):
            yield carry + result if by < 0 else first[by] + result, 2 + k, np.inf
    for number, (held, needed) in enumerate(segment.carried):
        yield 0, carry + number, prices.at(-1) * held
        if needed:
            yield carry + number, 1, np.inf
