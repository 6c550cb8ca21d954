"""The exact minimum of large tables: message passing says which labels matter, elimination searches those.

Message passing moves costs between the tables until their minima add up to a lower bound (`autoshard.search.reparametrisation`). Every
label then has a reduced cost: any labelling with it exceeds the bound by at least that. A *shell* keeps the labels of reduced cost up to
``delta``, and variable elimination solves it exactly (`autoshard.search.elimination`), without dominated labels where its tables would be
too large with them (`autoshard.search.dominance`). An answer of cost at most ``bound + delta`` is the
optimum, since whatever uses a label outside the shell costs more. Otherwise the shell is widened, at most to the answer's distance from the
bound, which holds the optimum for certain; where its tables would grow too large, the best answer stays, with the gap that is left.

Complexity: sweeps x table entries, then nodes x kept labels ** (induced width + 1).
"""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import count

import numpy as np

from autoshard.errors import SearchLimitError
from autoshard.problem import BUDGETS, Messages, Tables
from autoshard.search.dominance import undominated
from autoshard.search.elimination import Eliminator, table_cost
from autoshard.search.passing import Passing, Wiring
from autoshard.search.reparametrisation import Reparametrisation, normalised
from autoshard.search.searcher import Progress, silent


class Shells:
    """Searches of one problem's tables, with what they took.

    Attributes:
        max_sweeps: how often message passing may go over the nodes.
        tolerance: the gap at which nothing more is tried, after the first attempt.
        sweeps, shells, width: so far; the width is the largest of an elimination.
    """

    def __init__(self, max_entries: int, max_sweeps: int, tolerance: float, progress: Progress = silent):
        self.max_sweeps = max_sweeps
        self.tolerance = tolerance
        self.progress = progress
        self.eliminate = Eliminator(max_entries)
        self.sweeps = self.shells = self.width = 0

    def solve(
        self, tables: Tables, sent: Messages | None = None, max_sweeps: int | None = None, wiring: Wiring | None = None
    ) -> tuple[np.ndarray, float, Reparametrisation]:
        """The best labels found, a bound, and the tables as they were moved for it; goes on while sweeps tell and the gap is too wide.

        Args:
            sent: what to begin with, such as what was moved between tables that are much like these.
            max_sweeps: how often message passing may go over the nodes, if not as often as elsewhere.
            wiring: of these tables, if it is known.
        """
        most = self.max_sweeps if max_sweeps is None else min(max_sweeps, self.max_sweeps)
        passing = Passing(tables.unary, tables.pairs, sent, wiring=wiring)
        best, cost, sweeps, more = None, math.inf, 0, BUDGETS.attempt_sweeps
        for attempt in count(1):
            done = passing.run(more, progress=self.progress)
            sweeps += done
            last = done < more or sweeps >= most
            if not last and passing.rise > self.tolerated(attempt) * abs(passing.bound()):
                more = min(more, most - sweeps)
                continue  # no answer's gap is within what is tolerated: more sweeps do more for it
            moved = normalised(passing, sweeps)
            found, bound = self.widened(tables, moved, attempt, last)
            best, cost = min(((best, cost), (found, table_cost(tables.unary, tables.pairs, found))), key=lambda labelled: labelled[1])
            gap = cost - bound
            if last or gap <= self.tolerated(attempt) * abs(cost):
                break
            if attempt > 1 and gap > BUDGETS.attempt_far * self.tolerated(attempt + 1) * abs(cost):
                more *= 2
            more = min(more, most - sweeps)
        self.sweeps += sweeps
        assert best is not None
        return best, min(bound, cost), moved

    def tolerated(self, attempt: int) -> float:
        """The gap at which nothing more is tried: each attempt takes as long as the first, and finds less."""
        return self.tolerance * min(attempt, BUDGETS.attempt_lenience)

    def widened(self, tables: Tables, moved: Reparametrisation, attempt: int = 1, last: bool = True) -> tuple[np.ndarray, float]:
        """The best labels of ever wider shells, and the bound that is proven by then.

        An answer within what is tolerated uses no label of a reduced cost above that: shells begin far inside it. Once there is one, a
        proof is tried at once, and that is all.

        Args:
            attempt: how many there were, this one included.
            last: whether there are to be no others; before that no shell is wider than a quarter of what is tolerated, and far from an
                answer within it a single shell is enough.
        """
        rounding = BUDGETS.rounding * abs(moved.bound)
        delta, too_wide = max(self.tolerated(attempt) / 16 * abs(moved.bound), rounding), math.inf
        best = None
        for first, cheap in ((delta, True), (delta / 4, False)):
            with suppress(SearchLimitError):
                delta, best = first, self._shell(tables, moved, first, cheap=cheap)
                break
            too_wide = first
        if best is None:
            delta, best = rounding, self._shell(tables, moved, rounding, [int(reduced.argmin()) for reduced in moved.reduced])
        cost = table_cost(tables.unary, tables.pairs, best)
        while (gap := cost - moved.bound) > delta:
            enough = self.tolerated(attempt) * abs(cost)
            good = gap <= enough
            if too_wide <= delta * (1.25 if last else 4) or (good and too_wide < math.inf):
                break
            if not (last or good) and (delta >= enough / 4 or (gap > 2 * enough and too_wide == math.inf)):
                break  # more sweeps do more for it
            if good and gap + rounding < too_wide:
                wider = gap + rounding
            elif too_wide == math.inf:
                wider = min(max(4 * delta, min(gap / 64, enough / 16 or gap)), gap + rounding)
            else:
                wider = max(too_wide / 4, math.sqrt(delta * too_wide))
            self.progress("shells", delta / gap)
            try:
                found = self._shell(tables, moved, wider)
            except SearchLimitError:
                too_wide = wider
                continue
            delta = wider
            best, cost = min(((best, cost), (found, table_cost(tables.unary, tables.pairs, found))), key=lambda labelled: labelled[1])
        return best, min(cost, moved.bound + delta - rounding)  # what uses a label outside the last shell costs more than that

    def _shell(
        self, tables: Tables, moved: Reparametrisation, delta: float, incumbent: list[int] | None = None, cheap: bool = False
    ) -> np.ndarray:
        """The best of the labels whose reduced cost is at most delta, without dominated ones if there are too many.

        With an incumbent, nodes that are too well connected keep its.
        """
        kept = [np.flatnonzero(reduced <= max(delta, reduced.min())) for reduced in moved.reduced]
        start = None if incumbent is None else [int(np.searchsorted(labels, label)) for labels, label in zip(kept, incumbent, strict=True)]
        unary, pairs = _cut(tables, kept)
        try:
            answer = self.eliminate(unary, pairs, start, cheap=cheap)
        except SearchLimitError:
            if cheap:
                raise
            kept = [labels[left] for labels, left in zip(kept, undominated(unary, pairs), strict=True)]
            answer = self.eliminate(*_cut(tables, kept))
        self.shells += 1
        self.width = max(self.width, answer.width)
        return np.array([labels[position] for labels, position in zip(kept, answer.labels, strict=True)])


def _cut(tables: Tables, kept: list[np.ndarray]) -> tuple[list[np.ndarray], dict[tuple[int, int], np.ndarray]]:
    """The tables of some labels; what is cut from equal tables is one too."""
    sets: dict[bytes, np.ndarray] = {}
    kept = [sets.setdefault(labels.tobytes(), labels) for labels in kept]
    cut: dict[tuple[int, ...], np.ndarray] = {}
    unary = [cut.setdefault((id(table), id(labels)), table[labels]) for table, labels in zip(tables.unary, kept, strict=True)]
    pairs = {}
    for (i, j), table in tables.pairs.items():
        key = id(table), id(kept[i]), id(kept[j])
        if key not in cut:
            cut[key] = table[kept[i][:, None], kept[j]]
        pairs[i, j] = cut[key]
    return unary, pairs
