"""The Lagrangian dual bound under a memory limit.

The bytes on a device at one moment of the program are at most the limit. An assignment that pays a price for them and gets the limit times
the price back pays no more than its seconds alone, so the least sum under that price bounds all assignments within the limit from below
(Everett 1963, "Generalized Lagrange multiplier method"). The best price makes answers
above and below the limit cost the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.compilers.buffers import Peak
from autoshard.problem import Label, MemoryTables, Problem, Tables


@dataclass(frozen=True, slots=True)
class LiveBytes:
    """A lower bound of the bytes on a device at one moment, by the labels of tables with all axes free.

    Attributes:
        variables, pairs: bytes by a variable's label, and by the labels of two.
        limit: the most that their sum is for labels within the memory limit.
    """

    variables: Mapping[int, np.ndarray]
    pairs: Mapping[tuple[int, int], np.ndarray]
    limit: float

    def tables(self, like: Tables) -> Tables:
        """The bytes as tables of the same labels."""
        unary = tuple(self.variables.get(variable, np.zeros(len(options))) for variable, options in enumerate(like.labels))
        return Tables(unary, self.pairs, like.labels, like.incumbent)


def live_bytes_at(problem: Problem, tables: Tables, labels: Sequence[Label], peak: Peak, limit: float) -> LiveBytes:
    """The bytes of any labels at the moment at which given ones have their peak.

    Values alive then are alive under all labels, and padding only adds to them. A copy counts while its layout, and that in which its first
    and last reader read it, are the present ones. Bytes that fast memory could take over under other labels are added to the limit.

    Args:
        labels: of every variable.
        peak: theirs, as judged.
    """
    at = tables.positions(labels)
    memory = problem.cached(MemoryTables)
    variables, undecided = memory.least_bytes(peak, at)
    pairs: dict[tuple[int, int], np.ndarray] = {}

    def add_pair(i: int, j: int, live: np.ndarray) -> None:
        key, table = ((i, j), live) if (i, j) in tables.pairs else ((j, i), live.T)
        pairs[key] = pairs.get(key, 0.0) + table

    for value, nbytes in peak.copies:
        found = memory.shared_copy(value, at, peak.moment)
        if found is None or not _is_share(nbytes, found.nbytes):
            continue
        variables[found.copy] = variables.get(found.copy, 0.0) - (len(found.reads) - 1) * nbytes * found.same
        for variable, same in found.reads.items():
            add_pair(found.copy, variable, nbytes * np.outer(found.same, same))
        add_pair(found.copy, found.home, -nbytes * np.outer(found.same, found.like_copy))  # there it is no copy
    return LiveBytes(variables, pairs, limit + peak.spare_bytes - undecided)


def priced(tables: Tables, live: Tables, price: float) -> Tables:
    """Tables with a price on bytes."""
    unary = tuple(cost + price * nbytes for cost, nbytes in zip(tables.unary, live.unary, strict=True))
    pairs = {pair: cost + price * live.pairs[pair] if pair in live.pairs else cost for pair, cost in tables.pairs.items()}
    return Tables(unary, pairs, tables.labels, tables.incumbent)


def _is_share(nbytes: float, whole: float) -> bool:
    """Whether a copy takes all bytes of a value, or half of them, rounded to bfloat16."""
    return any(abs(nbytes - part) <= BUDGETS.rounding * part for part in (whole, whole / 2))
