"""The exact minimum of large tables: message passing says which labels matter, elimination searches those.

Message passing moves costs between the tables until their minima add up to a lower bound (`autoshard.search.reparametrisation`). Every
label then has a reduced cost: any labelling with it exceeds the bound by at least that. A *shell* keeps the labels of reduced cost up to
``delta``, and variable elimination solves it exactly (`autoshard.search.elimination`). An answer of cost at most ``bound + delta`` is the
optimum, since whatever uses a label outside the shell costs more. Otherwise the shell is widened, at most to the answer's distance from the
bound, which holds the optimum for certain; where its tables would grow too large, the best answer stays, with the gap that is left.

Complexity: sweeps x table entries, then nodes x kept labels ** (induced width + 1).
"""

from __future__ import annotations

import math

import numpy as np

from autoshard.errors import SearchLimitError
from autoshard.problem import Messages, Tables
from autoshard.search.elimination import Eliminator, table_cost
from autoshard.search.reparametrisation import Passing, Reparametrisation
from autoshard.search.searcher import Progress, silent

SWEEPS = 20  # of message passing between attempts at a proof
MOST_SWEEPS = 60  # where an answer is one of many, or tables are large
ROUNDING = 1e-9  # relative; sums of a few thousand terms in double precision are exact to 1e-12


class Shells:
    """Searches of one problem's tables, with what they took.

    Attributes:
        max_sweeps: how often message passing may go over the nodes.
        tolerance: the gap at which no more sweeps are tried.
        sweeps, shells, width: so far; the width is the largest of an elimination.
    """

    def __init__(self, max_entries: int, max_sweeps: int, tolerance: float, progress: Progress = silent):
        self.max_sweeps = max_sweeps
        self.tolerance = tolerance
        self.progress = progress
        self.eliminate = Eliminator(max_entries)
        self.sweeps = self.shells = self.width = 0

    def solve(
        self, tables: Tables, sent: Messages | None = None, max_sweeps: int | None = None
    ) -> tuple[np.ndarray, float, Reparametrisation]:
        """The best labels found, a bound, and the tables as they were moved for it; goes on while sweeps tell and the gap is too wide.

        Args:
            sent: what to begin with, such as what was moved between tables that are much like these.
            max_sweeps: how often message passing may go over the nodes, if not as often as elsewhere.
        """
        most = self.max_sweeps if max_sweeps is None else min(max_sweeps, self.max_sweeps)
        passing = Passing(tables.unary, tables.pairs, sent)
        best, cost, sweeps = None, math.inf, 0
        while True:
            done = passing.run(SWEEPS, progress=self.progress)
            sweeps += done
            moved = passing.normalised(sweeps)
            last = done < SWEEPS or sweeps >= most
            found, bound = self.widened(tables, moved, math.inf if last else self.tolerance)
            best, cost = min(((best, cost), (found, table_cost(tables.unary, tables.pairs, found))), key=lambda labelled: labelled[1])
            if last or cost - bound <= self.tolerance * abs(cost):
                self.sweeps += sweeps
                assert best is not None
                return best, min(bound, cost), moved

    def widened(self, tables: Tables, moved: Reparametrisation, within: float = math.inf) -> tuple[np.ndarray, float]:
        """The best labels of ever wider shells, and the bound that is proven by then.

        Args:
            within: the gap that the first shell has to leave, relative, for wider ones to be worth their time.
        """
        rounding = ROUNDING * abs(moved.bound)
        delta = rounding
        try:
            best = self._shell(tables, moved, delta)
        except SearchLimitError:
            best = self._shell(tables, moved, delta, [int(reduced.argmin()) for reduced in moved.reduced])
        cost = table_cost(tables.unary, tables.pairs, best)
        if cost - moved.bound > within * abs(cost):
            return best, moved.bound
        too_wide = math.inf
        while cost > moved.bound + delta and too_wide > 1.25 * delta:
            gap = cost - moved.bound + rounding
            wider = min(max(4 * delta, gap / 64) if too_wide == math.inf else math.sqrt(delta * too_wide), gap)
            self.progress("shells", delta / gap)
            try:
                found = self._shell(tables, moved, wider)
            except SearchLimitError:
                too_wide = wider
                continue
            delta = wider
            best, cost = min(((best, cost), (found, table_cost(tables.unary, tables.pairs, found))), key=lambda labelled: labelled[1])
        return best, min(cost, moved.bound + delta - rounding)  # what uses a label outside the last shell costs more than that

    def _shell(self, tables: Tables, moved: Reparametrisation, delta: float, incumbent: list[int] | None = None) -> np.ndarray:
        """The best of the labels whose reduced cost is at most delta; with an incumbent, nodes that are too well connected keep its."""
        sets: dict[bytes, np.ndarray] = {}  # equal ones are one, so that what is cut from equal tables is one too
        kept = [np.flatnonzero(reduced <= max(delta, reduced.min())) for reduced in moved.reduced]
        kept = [sets.setdefault(labels.tobytes(), labels) for labels in kept]
        cut: dict[tuple[int, ...], np.ndarray] = {}
        unary = [cut.setdefault((id(table), id(labels)), table[labels]) for table, labels in zip(tables.unary, kept, strict=True)]
        pairs = {}
        for (i, j), table in tables.pairs.items():
            key = id(table), id(kept[i]), id(kept[j])
            if key not in cut:
                cut[key] = table[kept[i][:, None], kept[j]]
            pairs[i, j] = cut[key]
        start = None if incumbent is None else [int(np.searchsorted(labels, label)) for labels, label in zip(kept, incumbent, strict=True)]
        answer = self.eliminate(unary, pairs, start)
        self.shells += 1
        self.width = max(self.width, answer.width)
        return np.array([labels[position] for labels, position in zip(kept, answer.labels, strict=True)])
