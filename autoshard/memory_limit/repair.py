"""Repair: answers changed in single decisions, or mixed from two, as far as the judge finds them within the memory limit and faster.

Prices reach the convex part of the time x memory frontier. Between its points repair finds more: the answers on both sides of the limit
differ in parts that share no table, such as layers, and as many of these as fit are taken from the faster one; then single decisions are
changed where that is faster and fits, or, where nothing fits yet, takes less memory. The number of assignments judged for it is bounded.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.compilers.buffers import Buffer
from autoshard.judge.evaluate import Judgement
from autoshard.problem import Label, Problem

Answer = tuple[Judgement, list[Label]]
"""An answer: its judgement, and its labels."""


class Repair:
    """Improvements of answers that the judge confirms.

    Attributes:
        most, left: how many assignments may be judged, in all and still.
    """

    def __init__(self, problem: Problem, limit: float):
        self.problem = problem
        self.limit = limit
        self.left = self.most = min(BUDGETS.judged_most, BUDGETS.judged_ops // len(problem.graph.walk()))

    def _judged(self, labels: list[Label]) -> Answer:
        self.left -= 1
        return self.problem.evaluate(self.problem.assignment(labels)), labels

    def _better(self, found: Answer, than: Answer) -> bool:
        """Whether an answer fits and is faster, or, where the other does not fit, has the smaller peak."""
        ours, theirs = (max(judgement.cost.peak_bytes, self.limit) for judgement, _ in (found, than))
        if ours != theirs:
            return ours < theirs
        return ours <= self.limit and found[0].cost.objective_seconds < than[0].cost.objective_seconds * (1 - BUDGETS.rounding)

    def mixed(self, below: Answer, above: Answer, priced: Iterable[Buffer]) -> Answer:
        """The answer within the limit, with as many parts of one above it as fit, most seconds a byte first."""
        parts = self._parts(below[1], above[1], priced)
        sums = list(accumulate((taken for _, taken in parts), initial=0.0))
        fits, too_many, best = 0, len(parts) + 1, below
        peaks = {0: below[0].cost.peak_bytes, too_many: max(above[0].cost.peak_bytes, self.limit)}
        sums.append(sums[-1])
        for _ in range(max(BUDGETS.judged_least, min(self.left, BUDGETS.judged_most))):
            if too_many - fits <= 1:
                break
            share = (self.limit - peaks[fits]) / max(peaks[too_many] - peaks[fits], 1.0)
            reached = bisect_right(sums, sums[fits] + share * (sums[too_many] - sums[fits])) - 1
            some = min(max(reached, fits + 1), too_many - 1)
            labels = list(below[1])
            for variable in (variable for part, _ in parts[:some] for variable in part):
                labels[variable] = above[1][variable]
            found = self._judged(labels)
            peaks[some] = found[0].cost.peak_bytes
            if peaks[some] <= self.limit:
                fits, best = some, found if self._better(found, best) else best
            else:
                too_many = some
        return best

    def _parts(self, below: list[Label], above: list[Label], priced: Iterable[Buffer]) -> list[tuple[list[int], float]]:
        """The variables in which two answers differ, as parts that share no table, with the bytes each takes; only those that gain time."""
        differ = {variable: variable for variable, (one, other) in enumerate(zip(below, above, strict=True)) if one != other}

        def first(variable: int) -> int:
            while differ[variable] != variable:
                differ[variable] = variable = differ[differ[variable]]
            return variable

        bytes_of = dict.fromkeys(priced, 1.0)
        ours, theirs, charged, refunded = (
            self.problem.tables((), labels, prices) for prices in (None, bytes_of) for labels in (below, above)
        )
        for i, j in ours.pairs:
            if i in differ and j in differ:
                differ[first(j)] = first(i)
        gains: dict[int, float] = dict.fromkeys(map(first, differ), 0.0)
        taken = dict(gains)
        for variable in differ:
            gain = float(ours.unary[variable][0] - theirs.unary[variable][0])
            gains[first(variable)] += gain
            taken[first(variable)] += float(refunded.unary[variable][0] - charged.unary[variable][0]) + gain
        for pair, table in ours.pairs.items():
            if (variable := pair[0] if pair[0] in differ else pair[1]) in differ:
                gain = float(table[0, 0] - theirs.pairs[pair][0, 0])
                gains[first(variable)] += gain
                taken[first(variable)] += float(refunded.pairs[pair][0, 0] - charged.pairs[pair][0, 0]) + gain
        parts: dict[int, list[int]] = {part: [] for part in gains}
        for variable in differ:
            parts[first(variable)].append(variable)
        order = sorted(gains, key=lambda part: -gains[part] / max(taken[part], 1.0))
        return [(parts[part], max(taken[part], 1.0)) for part in order if gains[part] > 0.0]

    def made_to_fit(self, several: Sequence[Answer]) -> Answer:
        """The best answer that changes lead to, from the fastest within the limit first, else from the smallest peak.

        Later ones are left out once an answer comes near the least objective of all, or where too little was saved.
        """
        order = sorted(several, key=lambda found: (max(found[0].cost.peak_bytes, self.limit), found[0].cost.objective_seconds))
        near = BUDGETS.near * min(judgement.cost.objective_seconds for judgement, _ in order)
        first = order[0][0].cost.peak_bytes
        best = self.changed(order[0], first)
        for found in order[1:]:
            fits = best[0].cost.peak_bytes <= self.limit
            if best[0].cost.objective_seconds <= near if fits else self._is_in_vain(first, best):
                break
            changed = self.changed(found, first)
            best = changed if self._better(changed, best) else best
        return best

    def _is_in_vain(self, first: float, found: Answer) -> bool:
        """Whether it is far from the limit after a part of all that may be judged, and saved less of the excess than that part."""
        judged, peak = self.most - self.left, found[0].cost.peak_bytes
        is_far = peak > BUDGETS.near * self.limit
        return is_far and judged >= BUDGETS.judged_part * self.most and (first - peak) * self.most < judged * (first - self.limit)

    def changed(self, found: Answer, first: float) -> Answer:
        """The answer after changes of single decisions, each time the most promising that the judge confirms.

        Args:
            first: the peak that is to be made smaller.
        """
        tried: set[tuple[int, Label]] = set()
        while self.left > 0:
            for variable, label in self._changes(found):
                if self._is_in_vain(first, found):
                    return found
                if self.left > 0 and (variable, label) not in tried:
                    tried.add((variable, label))
                    other = self._judged([*found[1][:variable], label, *found[1][variable + 1 :]])
                    if self._better(other, found):
                        found, tried = other, set()
                        break
            else:
                break
        return found

    def _changes(self, found: Answer) -> list[tuple[int, Label]]:
        """Other labels of single variables, on one axis each, best first: by time gained where the answer fits, else by bytes saved.

        Where it fits, those come last, and few of them, with which the values of its peak would be beyond the limit: mostly they are.
        """
        judgement, labels = found
        fits, room = judgement.cost.peak_bytes <= self.limit, self.limit - judgement.cost.peak_bytes + judgement.peak.spare_bytes
        bytes_of = dict.fromkeys(judgement.peak.charged, 1.0)
        changes: list[tuple[bool, float, int, int, int]] = []
        domains = []
        for axis in range(len(self.problem.mesh.axes)):
            tables = self.problem.tables((axis,), labels)
            charged = self.problem.tables((axis,), labels, bytes_of)
            domains.append(tables.labels)
            now = tables.incumbent
            costs, together = ([*each.unary] for each in (tables, charged))
            for each, sums in ((tables, costs), (charged, together)):
                for (i, j), table in each.pairs.items():
                    sums[i] = sums[i] + table[:, now[j]]
                    sums[j] = sums[j] + table[now[i]]
            for variable, cost in enumerate(costs):
                lost = cost - cost[now[variable]]
                taken = together[variable] - cost
                saved = taken[now[variable]] - taken
                ranks = lost if fits else np.where(saved > 0, lost, np.inf) / np.maximum(saved, 1.0)
                worth = np.flatnonzero(lost < -BUDGETS.rounding * abs(cost[now[variable]]) if fits else saved > 0)
                changes += [(bool(fits and -saved[k] > room), float(ranks[k]), variable, axis, int(k)) for k in worth]
        most = sum(not beyond for beyond, *_ in changes) + BUDGETS.judged_least
        return [(variable, domains[axis][variable][k]) for _, _, variable, axis, k in sorted(changes)[:most]]
