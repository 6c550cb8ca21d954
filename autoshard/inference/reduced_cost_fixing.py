"""The exact minimum of large models: message passing tells which labels matter, elimination searches those.

Message passing gives a lower bound and, for every label, a reduced cost: any labelling with it exceeds the bound by at least that
(`autoshard.inference.reparametrisation`). Labels of reduced cost above a ``threshold`` are fixed to be absent (reduced-cost fixing, as in
integer programming: Wolsey 1998, "Integer Programming", section 7), and variable elimination solves the restricted model exactly
(`autoshard.inference.elimination`), without dominated labels where its tables would otherwise be too large
(`autoshard.inference.dead_end_elimination`). An answer of cost at most ``bound + threshold`` is the optimum, since any labelling with an
absent label costs more. Otherwise the threshold is raised, at most to the answer's distance from the bound, which admits the optimum for
certain; where the tables would grow too large, the best answer is returned with the remaining gap.

Complexity: sweeps x table entries, then variables x kept labels ** (induced width + 1).
"""

from __future__ import annotations

import math
from contextlib import suppress
from itertools import count
from operator import itemgetter

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.errors import SearchLimitError
from autoshard.inference.dead_end_elimination import undominated
from autoshard.inference.elimination import Eliminator
from autoshard.inference.message_layout import MessageLayout
from autoshard.inference.model import Messages, Pair, PairwiseModel
from autoshard.inference.reparametrisation import Reparametrisation, normalised
from autoshard.inference.trw_s import MessagePassing
from autoshard.progress import Progress, silent


class ReducedCostFixing:
    """Minimisations of similar models, with counts of what they took.

    Attributes:
        max_sweeps: the most sweeps of message passing.
        tolerance: the relative gap at which nothing more is tried, after the first attempt.
        sweeps, restrictions, width: so far: sweeps, restricted models solved, and the largest induced width.
    """

    def __init__(self, max_entries: int, max_sweeps: int, tolerance: float, progress: Progress = silent):
        self.max_sweeps = max_sweeps
        self.tolerance = tolerance
        self.progress = progress
        self.eliminate: Eliminator = Eliminator(max_entries)
        self.sweeps = self.restrictions = self.width = 0

    def solve(
        self, model: PairwiseModel, messages: Messages | None = None, max_sweeps: int | None = None, layout: MessageLayout | None = None
    ) -> tuple[np.ndarray, float, Reparametrisation]:
        """The best labels found, a lower bound, and the reparametrisation that shows it.

        Attempts to prove an answer alternate with sweeps while these raise the bound and the gap exceeds the tolerance.

        Args:
            messages: to begin with, such as those of a similar model.
            max_sweeps: a smaller limit than the usual one.
            layout: of the model's pairs, if it is known.
        """
        limit = self.max_sweeps if max_sweeps is None else min(max_sweeps, self.max_sweeps)
        passing = MessagePassing(model, messages, layout=layout)
        best, cost, sweeps, more = None, math.inf, 0, BUDGETS.attempt_sweeps
        for attempt in count(1):
            done = passing.run(more, progress=self.progress)
            sweeps += done
            last = done < more or sweeps >= limit
            if not last and passing.rise > self.tolerated(attempt) * abs(passing.bound()):
                more = min(more, limit - sweeps)
                continue  # the gap cannot be within the tolerance yet: more sweeps do more for it
            moved = normalised(passing, sweeps)
            found, bound = self.minimise(model, moved, attempt, last)
            best, cost = min(((best, cost), (found, model.energy(found))), key=itemgetter(1))
            gap = cost - bound
            if last or gap <= self.tolerated(attempt) * abs(cost):
                break
            more = min(more, limit - sweeps)
        self.sweeps += sweeps
        assert best is not None
        return best, min(bound, cost), moved

    def tolerated(self, attempt: int) -> float:
        """The relative gap at which nothing more is tried: each attempt takes as long as the first, and finds less."""
        return self.tolerance * min(attempt, BUDGETS.attempt_lenience)

    def minimise(self, model: PairwiseModel, moved: Reparametrisation, attempt: int = 1, last: bool = True) -> tuple[np.ndarray, float]:
        """The best labels under ever higher thresholds, and the lower bound that is proven by then.

        An answer within the tolerance uses no label of a reduced cost above it: thresholds begin far below. Once there is such an answer,
        the threshold that proves it optimal is tried at once, and nothing else.

        Args:
            attempt: the number of attempts, this one included.
            last: whether no others follow; before that no threshold exceeds a quarter of the tolerance, and one is enough where the answer
                is far from it.
        """
        rounding = BUDGETS.rounding * abs(moved.bound)
        threshold, too_large = max(self.tolerated(attempt) / 16 * abs(moved.bound), rounding), math.inf
        best = None
        for first, cheap in ((threshold, True), (threshold / 4, False)):
            with suppress(SearchLimitError):
                threshold, best = first, self._restricted_minimum(model, moved, first, cheap=cheap)
                break
            too_large = first
        if best is None:
            incumbent = [int(reduced.argmin()) for reduced in moved.reduced]
            threshold, best = rounding, self._restricted_minimum(model, moved, rounding, incumbent)
        cost = model.energy(best)
        while (gap := cost - moved.bound) > threshold:
            enough = self.tolerated(attempt) * abs(cost)
            good = gap <= enough
            if too_large <= threshold * (1.25 if last else 4) or (good and too_large < math.inf):
                break
            if not (last or good) and (threshold >= enough / 4 or (gap > 2 * enough and too_large == math.inf)):
                break  # more sweeps do more for it
            if good and gap + rounding < too_large:
                higher = gap + rounding
            elif too_large == math.inf:
                higher = min(max(4 * threshold, min(gap / 64, enough / 16 or gap)), gap + rounding)
            else:
                higher = max(too_large / 4, math.sqrt(threshold * too_large))
            self.progress("reduced-cost fixing", threshold / gap)
            try:
                found = self._restricted_minimum(model, moved, higher)
            except SearchLimitError:
                too_large = higher
                continue
            threshold = higher
            best, cost = min(((best, cost), (found, model.energy(found))), key=itemgetter(1))
        return best, min(cost, moved.bound + threshold - rounding)  # any labelling with an absent label costs more than that

    def _restricted_minimum(
        self, model: PairwiseModel, moved: Reparametrisation, threshold: float, incumbent: list[int] | None = None, cheap: bool = False
    ) -> np.ndarray:
        """The best labels of those whose reduced cost is at most the threshold, without dominated ones if there are too many.

        With an incumbent, variables of too many neighbours keep its labels.
        """
        kept = [np.flatnonzero(reduced <= max(threshold, reduced.min())) for reduced in moved.reduced]
        start = None if incumbent is None else [int(np.searchsorted(labels, label)) for labels, label in zip(kept, incumbent, strict=True)]
        restricted = _restricted(model, kept)
        try:
            answer = self.eliminate(restricted, start, cheap=cheap)
        except SearchLimitError:
            if cheap:
                raise
            kept = [labels[left] for labels, left in zip(kept, undominated(restricted), strict=True)]
            answer = self.eliminate(_restricted(model, kept))
        self.restrictions += 1
        self.width: int = max(self.width, answer.width)
        return np.array([labels[position] for labels, position in zip(kept, answer.labels, strict=True)])


def _restricted(model: PairwiseModel, kept: list[np.ndarray]) -> PairwiseModel:
    """The model of some labels of each variable; equal parts of equal tables stay one array."""
    sets: dict[bytes, np.ndarray] = {}
    kept = [sets.setdefault(labels.tobytes(), labels) for labels in kept]
    cut: dict[tuple[int, ...], np.ndarray] = {}  # by the identities of arrays that live as long as the call
    unary = [cut.setdefault((id(table), id(labels)), table[labels]) for table, labels in zip(model.unary, kept, strict=True)]
    pairs: dict[Pair, np.ndarray] = {}
    for (i, j), table in model.pairs.items():
        key = id(table), id(kept[i]), id(kept[j])
        if key not in cut:
            cut[key] = table[kept[i][:, None], kept[j]]
        pairs[i, j] = cut[key]
    return PairwiseModel(unary, pairs)
