"""Searching under a memory limit: bytes that are alive at the peak get a price in seconds.

A Lagrange multiplier: the price is raised until the judge finds the peak below the limit, then lowered as far as it stays there. It
reaches the convex part of the time x memory frontier. What lies between is reached by repair: the answers on both sides of the limit
differ in parts that do not touch, such as layers, and as many of these as fit are taken from the faster one; then single decisions are
changed where that is faster and fits, or where nothing fits yet and that holds less. How many assignments are judged for it is bounded.

*The dual bound.* What a device holds at one moment of the program is at most the limit. Whoever pays a price for it and gets the limit's
worth back pays no more than for the seconds alone, so the least sum under that price bounds all assignments within the limit (Everett
1963, "Generalized Lagrange multiplier method"). The best price is where the bounds of answers above and below the limit meet.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from autoshard.compilers.buffer_assignment import Peak
from autoshard.errors import InfeasibleError
from autoshard.judge.evaluate import Judgement
from autoshard.problem import BUDGETS, NO_HINTS, Folded, Hints, Holding, Label, Problem, Tables
from autoshard.render import format_bytes

Found = tuple[Judgement, list[Label]]

Priced = Callable[[Mapping[int, float]], Found]
"""Prices per value, in seconds a byte that a device holds of it, to what a search finds under them."""



@dataclass(frozen=True, slots=True)
class Fitted:
    """An answer within a memory limit.

    Attributes:
        judgement, labels: the answer.
        above: the fastest met that is not within the limit, or just is not; None where the limit does not bind.
        price: seconds a byte, at which the limit was kept; 0.0 where it does not bind.
    """

    judgement: Judgement
    labels: list[Label]
    above: Found | None = None
    price: float = 0.0


def fastest_within(problem: Problem, search: Priced, steps: int, repairs: bool = True, hints: Hints = NO_HINTS) -> Found:
    """As `fitted`, the answer alone."""
    found = fitted(problem, search, steps, repairs=repairs, hints=hints)
    return found.judgement, found.labels


def fitted(
    problem: Problem,
    search: Priced,
    steps: int,
    frugal: Callable[[Problem], Sequence[Found]] = lambda _: (),
    repairs: bool = True,
    hints: Hints = NO_HINTS,
) -> Fitted:
    """The answer without prices where it is within the problem's memory limit, else the fastest met that is.

    Args:
        search: what finds an answer under prices; asked for the one without prices first.
        steps: how many prices may be tried.
        frugal: answers that hold little; asked for where no price leads to one within the limit.
        repairs: whether single decisions may change that the search left as they are; else prices alone lead to the answer.
        hints: whose price, if there is one, is tried first.

    Raises:
        InfeasibleError: no answer was within the limit; names the smallest peak met.
    """
    found = search({})
    limit = problem.memory_limit_bytes
    if limit is None or found[0].cost.peak_bytes <= limit:
        return Fitted(*found)
    if (least := least_peak(problem, found)) > limit:
        cheapest, _ = search(dict.fromkeys(sorted(found[0].peak.alive), BUDGETS.price_dear * _even_price(found)))
        smallest = min(found[0].cost.peak_bytes, cheapest.cost.peak_bytes)
        raise nothing_fits(problem, f"none takes less than {format_bytes(least)}; the smallest peak of two answers", smallest, proven=True)
    tried = _by_prices(problem, search, found, steps, hints.price)
    if not repairs:
        if tried.best is None:
            smallest = min(judgement.cost.peak_bytes for judgement, _ in tried.beyond)
            raise nothing_fits(problem, "the smallest peak found", smallest)
        return Fitted(*tried.best, tried.above, tried.price)
    repair = _Repair(problem, limit)
    fitting = frugal(problem) if tried.best is None else [repair.mixed(tried.best, tried.above, tried.priced)]
    best = repair.made_to_fit([*fitting, *tried.beyond])
    if best[0].cost.peak_bytes > limit:
        raise nothing_fits(problem, "the smallest peak found", best[0].cost.peak_bytes)
    return Fitted(*best, tried.above, tried.price)


def least_peak(problem: Problem, found: Found) -> float:
    """Bytes that all strategies hold at least, at the moment in which an answer holds most; 0.0 where tables would be too large to say."""
    judgement, labels = found
    if isinstance(problem, Folded):
        problem, labels = problem.whole, problem.unfold(labels)
    if problem.table_entries(range(len(problem.mesh.axes)), BUDGETS.counted_entries) > BUDGETS.counted_entries:
        return 0.0
    holding, positions, peak = problem.remembered(Holding), problem.positions(labels), judgement.peak
    least = []
    for only, spare in ((None, peak.spare_bytes), ({*problem.graph.arguments, *problem.graph.results}, 0.0)):
        held, whole = holding.least_bytes(peak, positions, only)  # what is passed in or out never lies in fast memory
        least.append(whole + sum(float(nbytes.min()) for nbytes in held.values()) - spare)
    return max(least)


def nothing_fits(problem: Problem, what: str, smallest: float, proven: bool = False) -> InfeasibleError:
    """The refusal of a search that met nothing within the problem's limit; the smallest peak is named as what it is."""
    return InfeasibleError(
        f"a strategy must fit {format_bytes(problem.memory_limit_bytes or 0.0)} a device, and {what} on mesh {problem.mesh} is "
        f"{format_bytes(smallest)}. Use more devices, a smaller batch, rematerialisation, or a higher memory limit.",
        smallest,
        proven,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Tried:
    """What prices led to.

    Attributes:
        best: the fastest answer met within the limit.
        above: the one that just is not, or that holds least.
        priced: the values that had a price.
        price: seconds a byte.
        beyond: all answers met that are not within it, the one without prices first.
    """

    best: Found | None
    above: Found
    priced: set[int]
    price: float
    beyond: list[Found]


def _by_prices(problem: Problem, search: Priced, free: Found, steps: int, known: float) -> _Tried:
    """What prices lead to that rise until the limit is kept, then fall as far as it stays so; the known one, if not 0.0, is the first."""
    limit = problem.memory_limit_bytes or 0.0
    above, best, before = free, None, free[1]
    priced = set(free[0].peak.alive)
    first = _even_price(free)
    price, factor = (known, BUDGETS.price_factor_known) if known else (first, BUDGETS.price_factor)
    shares = _shares(problem)
    too_low, enough, beyond = 0.0, None, [free]
    for _ in range(steps):
        weights = shares | dict.fromkeys(sorted(priced), 1.0)
        judgement, labels = search({value: price * weight for value, weight in weights.items()})
        if judgement.cost.peak_bytes <= limit:
            if best is None or judgement.cost.objective_seconds < best[0].cost.objective_seconds:
                best = judgement, labels
            enough = price
        else:
            news = set(judgement.peak.alive) - priced
            if labels != before:
                beyond.append((judgement, labels))
            if enough is None and not news and labels == before and price > BUDGETS.price_dear * first:
                break  # the very same at a higher price, where bytes decide alone: nothing is to be had for more
            if enough is not None or judgement.cost.peak_bytes < above[0].cost.peak_bytes:
                above = judgement, labels
            priced |= news
            too_low = price
        before = labels
        price = price * factor if enough is None else math.sqrt(too_low * enough) if too_low else price / factor
        factor = min(factor**2, BUDGETS.price_factor)
        if enough is not None and enough - too_low < 0.2 * enough:
            break
    return _Tried(best, above, priced, enough or too_low, beyond)


def _even_price(found: Found) -> float:
    """Seconds a byte at which the bytes of an answer's peak cost as much as its seconds."""
    return found[0].cost.objective_seconds / found[0].cost.peak_bytes


def _shares(problem: Problem) -> dict[int, float]:
    """Per value that is held in memory for how much of the program it is: what its bytes weigh while no peak has been met that it is in.

    Without any weight a value that was not in the way yet would be made as large as whatever saves others' bytes.
    """
    lives = problem.profile.lifetimes
    shares = (lives.dies - lives.born) / max(lives.moments, 1)
    return dict(sorted(zip(lives.values, shares.tolist(), strict=True)))


class _Repair:
    """Changes of an answer that the judge approves of, as long as it may be asked."""

    def __init__(self, problem: Problem, limit: float):
        self.problem = problem
        self.limit = limit
        self.left = min(BUDGETS.judged_most, BUDGETS.judged_ops // len(problem.graph.walk()))

    def _judged(self, labels: list[Label]) -> Found:
        self.left -= 1
        return self.problem.evaluate(self.problem.assignment(labels)), labels

    def _better(self, found: Found, than: Found) -> bool:
        """Whether an answer fits and is faster; of those that do not fit the smaller one is better."""
        ours, theirs = (max(judgement.cost.peak_bytes, self.limit) for judgement, _ in (found, than))
        if ours != theirs:
            return ours < theirs
        return ours <= self.limit and found[0].cost.objective_seconds < than[0].cost.objective_seconds * (1 - BUDGETS.rounding)

    def mixed(self, below: Found, above: Found, priced: Iterable[int]) -> Found:
        """The answer within the limit with what it differs in from one above it, as much as fits, most seconds a byte first."""
        parts = self._parts(below[1], above[1], priced)
        sums = list(accumulate((held for _, held in parts), initial=0.0))
        fits, too_many, best = 0, len(parts) + 1, below
        peaks = {0: below[0].cost.peak_bytes, too_many: max(above[0].cost.peak_bytes, self.limit)}
        sums.append(sums[-1])
        for _ in range(max(BUDGETS.judged_mixtures, min(self.left, BUDGETS.judged_most))):
            if too_many - fits <= 1:
                break
            share = (self.limit - peaks[fits]) / max(peaks[too_many] - peaks[fits], 1.0)
            reached = bisect_right(sums, sums[fits] + share * (sums[too_many] - sums[fits])) - 1
            some = min(max(reached, fits + 1), too_many - 1)
            labels = list(below[1])
            for node in (node for part, _ in parts[:some] for node in part):
                labels[node] = above[1][node]
            found = self._judged(labels)
            peaks[some] = found[0].cost.peak_bytes
            if peaks[some] <= self.limit:
                fits, best = some, found if self._better(found, best) else best
            else:
                too_many = some
        return best

    def _parts(self, below: list[Label], above: list[Label], priced: Iterable[int]) -> list[tuple[list[int], float]]:
        """The nodes in which two answers differ, in parts that no table joins, with the bytes each takes; those that gain something."""
        differ = {node: node for node, (one, other) in enumerate(zip(below, above, strict=True)) if one != other}

        def first(node: int) -> int:
            while differ[node] != node:
                differ[node] = node = differ[differ[node]]
            return node

        bytes_of = dict.fromkeys(sorted(priced), 1.0)
        ours, theirs, charged, refunded = (
            self.problem.tables((), labels, prices) for prices in (None, bytes_of) for labels in (below, above)
        )
        for i, j in ours.pairs:
            if i in differ and j in differ:
                differ[first(j)] = first(i)
        gains: dict[int, float] = dict.fromkeys(map(first, differ), 0.0)
        held = dict(gains)
        for node in differ:
            gain = float(ours.unary[node][0] - theirs.unary[node][0])
            gains[first(node)] += gain
            held[first(node)] += float(refunded.unary[node][0] - charged.unary[node][0]) + gain
        for (i, j), table in ours.pairs.items():
            if (node := i if i in differ else j) in differ:
                gains[first(node)] += float(table[0, 0] - theirs.pairs[i, j][0, 0])
        parts: dict[int, list[int]] = {part: [] for part in gains}
        for node in differ:
            parts[first(node)].append(node)
        order = sorted(gains, key=lambda part: -gains[part] / max(held[part], 1.0))
        return [(parts[part], max(held[part], 1.0)) for part in order if gains[part] > 0.0]

    def made_to_fit(self, several: Sequence[Found]) -> Found:
        """The best that changes lead to from some answers, the fastest that is within the limit first, else whatever holds least.

        Not all are asked where one comes near the least objective of all.
        """
        order = sorted(several, key=lambda found: (max(found[0].cost.peak_bytes, self.limit), found[0].cost.objective_seconds))
        near = BUDGETS.near_objective * min(judgement.cost.objective_seconds for judgement, _ in order)
        best = self.changed(order[0])
        for found in order[1:]:
            if best[0].cost.peak_bytes <= self.limit and best[0].cost.objective_seconds <= near:
                break
            changed = self.changed(found)
            best = changed if self._better(changed, best) else best
        return best

    def changed(self, found: Found) -> Found:
        """The answer after single decisions have changed, each time the most promising that the judge approves of."""
        tried: set[tuple[int, Label]] = set()
        while self.left > 0:
            for node, label in self._changes(found):
                if self.left > 0 and (node, label) not in tried:
                    tried.add((node, label))
                    other = self._judged([*found[1][:node], label, *found[1][node + 1 :]])
                    if self._better(other, found):
                        found, tried = other, set()
                        break
            else:
                break
        return found

    def _changes(self, found: Found) -> list[tuple[int, Label]]:
        """Other labels of single nodes, on one mesh axis each: where the answer fits those that gain most; else those that save bytes."""
        judgement, labels = found
        fits = judgement.cost.peak_bytes <= self.limit
        bytes_of = dict.fromkeys(sorted(judgement.peak.alive), 1.0)
        changes: list[tuple[float, int, int, int]] = []
        offered = []
        for axis in range(len(self.problem.mesh.axes)):
            tables = self.problem.tables((axis,), labels)
            charged = self.problem.tables((axis,), labels, bytes_of)
            offered.append(tables.labels)
            now = tables.incumbent
            costs = list(tables.unary)
            for (i, j), table in tables.pairs.items():
                costs[i] = costs[i] + table[:, now[j]]
                costs[j] = costs[j] + table[now[i]]
            for node, cost in enumerate(costs):
                lost = cost - cost[now[node]]
                held = charged.unary[node] - tables.unary[node]
                saved = held[now[node]] - held
                ranks = lost if fits else np.where(saved > 0, lost, np.inf) / np.maximum(saved, 1.0)
                worth = np.flatnonzero(lost < -BUDGETS.rounding * abs(cost[now[node]]) if fits else saved > 0)
                changes += [(float(ranks[k]), node, axis, int(k)) for k in worth]
        return [(node, offered[axis][node][k]) for _, node, axis, k in sorted(changes)]


@dataclass(frozen=True, slots=True)
class Held:
    """What a device holds at one moment, at least, by the labels of tables with all axes free.

    Attributes:
        nodes, pairs: bytes by a node's label, and by the labels of two.
        limit: what the sum is of all labels within the memory limit, at most.
    """

    nodes: Mapping[int, np.ndarray]
    pairs: Mapping[tuple[int, int], np.ndarray]
    limit: float

    def tables(self, like: Tables) -> Tables:
        """The same as tables."""
        unary = tuple(self.nodes.get(node, np.zeros(len(options))) for node, options in enumerate(like.labels))
        return Tables(like.labels, unary, self.pairs, like.incumbent)


def held_at(problem: Problem, tables: Tables, labels: Sequence[Label], peak: Peak, limit: float) -> Held:
    """What any labels hold at the moment of the peak that these have there.

    Values that are alive then are so under all labels, and padding only adds to them. A copy is there as long as it lies as now, and so do
    its first and last reader read it. What fast memory could hold of it all under other labels is added to the limit.

    Args:
        labels: of every node.
        peak: what the judge says of them.
    """
    at = [options.index(label) for options, label in zip(tables.labels, labels, strict=True)]
    holding = problem.remembered(Holding)
    nodes, whole = holding.least_bytes(peak, at)
    pairs: dict[tuple[int, int], np.ndarray] = {}

    def add_pair(i: int, j: int, held: np.ndarray) -> None:
        key, table = ((i, j), held) if (i, j) in tables.pairs else ((j, i), held.T)
        pairs[key] = pairs.get(key, 0.0) + table

    for value, nbytes in peak.copies:
        found = holding.copied_alike(value, at, peak.moment)
        if found is None or not _is_share(nbytes, found.nbytes):
            continue
        nodes[found.copy] = nodes.get(found.copy, 0.0) - (len(found.reads) - 1) * nbytes * found.same
        for node, same in found.reads.items():
            add_pair(found.copy, node, nbytes * np.outer(found.same, same))
        add_pair(found.copy, found.home, -nbytes * np.outer(found.same, found.like_copy))  # where the value lies so, it is no copy
    return Held(nodes, pairs, limit + peak.spare_bytes - whole)


def priced(tables: Tables, held: Tables, price: float) -> Tables:
    """Tables with a price on what is held."""
    unary = tuple(cost + price * nbytes for cost, nbytes in zip(tables.unary, held.unary, strict=True))
    pairs = {pair: cost + price * held.pairs[pair] if pair in held.pairs else cost for pair, cost in tables.pairs.items()}
    return Tables(tables.labels, unary, pairs, tables.incumbent)


def _is_share(nbytes: float, whole: float) -> bool:
    """Whether a copy is of so many bytes, or of half of them, rounded to bfloat16."""
    return any(abs(nbytes - part) <= BUDGETS.rounding * part for part in (whole, whole / 2))
