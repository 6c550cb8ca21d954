"""Lagrangian search under a memory limit: bytes alive at the peak get a price in seconds.

The price, a Lagrange multiplier, is raised until the judge finds the peak below the limit, then lowered as far as it stays there. That
reaches the convex part of the time x memory frontier; `autoshard.memory_limit.repair` reaches some points between, and
`autoshard.memory_limit.dual_bound` bounds it all from below.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from autoshard.budgets import BUDGETS
from autoshard.errors import InfeasibleError
from autoshard.judge.evaluate import Judgement
from autoshard.memory_limit.repair import Answer, Repair
from autoshard.problem import NO_HINTS, Hints, Label, MemoryTables, Problem
from autoshard.render import format_bytes

Priced = Callable[[Mapping[int, float]], Answer]
"""A search under prices: from seconds a byte on a device, by value, to the answer."""


@dataclass(frozen=True, slots=True)
class Fitted:
    """An answer within a memory limit.

    Attributes:
        judgement, labels: the answer.
        above: the fastest answer found beyond the limit, or the one just beyond it; None where the limit does not bind.
        price: seconds a byte at which an answer was within the limit; 0.0 where it does not bind.
    """

    judgement: Judgement
    labels: list[Label]
    above: Answer | None = None
    price: float = 0.0


def fastest_within(problem: Problem, search: Priced, steps: int, repairs: bool = True, hints: Hints = NO_HINTS) -> Answer:
    """The answer of `fitted` alone."""
    found = fitted(problem, search, steps, repairs=repairs, hints=hints)
    return found.judgement, found.labels


def fitted(
    problem: Problem,
    search: Priced,
    steps: int,
    starts: Callable[[Problem], Sequence[Answer]] = lambda _: (),
    repairs: bool = True,
    hints: Hints = NO_HINTS,
) -> Fitted:
    """The answer without prices where it is within the problem's memory limit, else the fastest found that is.

    Args:
        search: called without prices first.
        steps: the most prices that may be tried.
        starts: answers of small peaks, from which repair begins where no price leads to one within the limit.
        repairs: whether single decisions may be changed after the search; else prices alone lead to the answer.
        hints: their price, if there is one, is tried first.

    Raises:
        InfeasibleError: no answer was within the limit; names the smallest peak found.
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
    repair = Repair(problem, limit)
    fitting = starts(problem) if tried.best is None else [repair.mixed(tried.best, tried.above, tried.priced)]
    best = repair.made_to_fit([*fitting, *tried.beyond])
    if best[0].cost.peak_bytes > limit:
        raise nothing_fits(problem, "the smallest peak found", best[0].cost.peak_bytes)
    return Fitted(*best, tried.above, tried.price)


def least_peak(problem: Problem, found: Answer) -> float:
    """A lower bound of the bytes at an answer's moment of peak, over all strategies; 0.0 where tables would be too large to say."""
    judgement, labels = found
    problem, labels = problem.original, problem.invert(labels)
    if problem.table_entries(range(len(problem.mesh.axes)), BUDGETS.counted_entries) > BUDGETS.counted_entries:
        return 0.0
    memory, positions, peak = problem.cached(MemoryTables), problem.positions(labels), judgement.peak
    least = []
    for only, spare in ((None, peak.spare_bytes), ({*problem.graph.arguments, *problem.graph.results}, 0.0)):
        bytes_of, undecided = memory.least_bytes(peak, positions, only)  # arguments and results are never in fast memory
        least.append(undecided + sum(float(nbytes.min()) for nbytes in bytes_of.values()) - spare)
    return max(least)


def nothing_fits(problem: Problem, what: str, smallest: float, proven: bool = False) -> InfeasibleError:
    """The error of a search that found nothing within the problem's limit."""
    return InfeasibleError(
        f"a strategy must fit {format_bytes(problem.memory_limit_bytes or 0.0)} a device, and {what} on mesh {problem.mesh} is "
        f"{format_bytes(smallest)}. Use more devices, a smaller batch, rematerialisation, or a higher memory limit.",
        smallest,
        proven,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Tried:
    """The answers that prices led to.

    Attributes:
        best: the fastest answer found within the limit.
        above: the one just beyond it, or of the smallest peak.
        priced: the values that had a price.
        price: seconds a byte.
        beyond: all answers found beyond it, the one without prices first.
    """

    best: Answer | None
    above: Answer
    priced: set[int]
    price: float
    beyond: list[Answer]


def _by_prices(problem: Problem, search: Priced, free: Answer, steps: int, known: float) -> _Tried:
    """The answers under prices that rise until the limit is kept, then fall as far as it stays so; a known price (not 0.0) comes first."""
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
                break  # the very same answer at a higher price, where bytes decide alone: no price does better
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


def _even_price(found: Answer) -> float:
    """The price at which the bytes of an answer's peak cost as much as its seconds."""
    return found[0].cost.objective_seconds / found[0].cost.peak_bytes


def _shares(problem: Problem) -> dict[int, float]:
    """Per stored value the share of the program in which it is alive: the weight of its bytes until it is part of a peak.

    Without any weight, values of no peak so far would grow wherever that saves bytes of others.
    """
    lives = problem.facts.lifetimes
    shares = (lives.dies - lives.born) / max(lives.moments, 1)
    return dict(sorted(zip(lives.values, shares.tolist(), strict=True)))
