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
from autoshard.compilers.buffers import Buffer, CopiesOf
from autoshard.errors import InfeasibleError
from autoshard.judge.evaluate import Judgement
from autoshard.memory_limit.repair import Answer, Repair
from autoshard.problem import NO_HINTS, Hints, Label, MemoryTables, Problem
from autoshard.problem.problem import leading_variables
from autoshard.render import format_bytes

Priced = Callable[[Mapping[Buffer, float]], Answer]
"""A search under prices: from seconds a byte on a device, by what is stored, to the answer."""


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
    """The answer of `fitted` alone; of a large program after fewer prices (`Budgets.judged_ops`).

    Prices slow answers down: they are not tried where the answer without them is slower than one that is known to fit (`Hints.least`).

    Raises:
        InfeasibleError: no answer was within the limit, or none that is as fast as the known one.
    """
    free, limit = search({}), problem.memory_limit_bytes
    cost = free[0].cost
    if limit is not None and cost.peak_bytes > limit and cost.makespan_seconds > hints.least:
        raise nothing_fits(problem, "the peak of an answer that is slower than one that fits", cost.peak_bytes)
    steps = min(steps, max(BUDGETS.judged_least, BUDGETS.judged_ops // max(len(problem.graph.walk()), 1)))
    found = fitted(problem, lambda prices: search(prices) if prices else free, steps, repairs=repairs, hints=hints)
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
        starts: answers of small peaks, from which repair begins where no price leads to one within the limit and none is known elsewhere.
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
        cheapest, _ = search(dict.fromkeys(found[0].peak.charged, BUDGETS.price_dear * _even_price(found)))
        smallest = min(found[0].cost.peak_bytes, cheapest.cost.peak_bytes)
        raise nothing_fits(problem, f"none takes less than {format_bytes(least)}; the smallest peak of two answers", smallest, proven=True)
    tried = _by_prices(problem, search, found, steps, hints.price)
    if not repairs:
        if tried.best is None:
            smallest = min(judgement.cost.peak_bytes for judgement, _ in tried.beyond)
            raise nothing_fits(problem, "the smallest peak found", smallest)
        return Fitted(*tried.best, tried.above, tried.price)
    repair = Repair(problem, limit)
    fitting = [tried.best] if tried.best is not None else starts(problem) if hints.least == math.inf else []
    fitting = [repair.mixed(one, tried.above, tried.priced) if one[0].cost.peak_bytes <= limit else one for one in fitting]
    best = repair.made_to_fit([*fitting, *tried.beyond])
    if best[0].cost.peak_bytes > limit:
        raise nothing_fits(problem, "the smallest peak found", best[0].cost.peak_bytes)
    return Fitted(*best, tried.above, tried.price)


def least_peak(problem: Problem, found: Answer) -> float:
    """A lower bound of the bytes at an answer's moment of peak, over all strategies; 0.0 where labels are too many to say."""
    judgement, labels = found
    problem, labels = problem.original, problem.invert(labels)
    if problem.most_labels() > BUDGETS.counted_labels:
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
        f"{format_bytes(smallest)}. Use more devices, a smaller batch, or a higher memory limit.",
        smallest,
        proven,
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Tried:
    """The answers that prices led to.

    Attributes:
        best: the fastest answer found within the limit.
        above: the one just beyond it, or of the smallest peak.
        priced: what had a price.
        price: seconds a byte.
        beyond: all answers found beyond it, the one without prices first.
    """

    best: Answer | None
    above: Answer
    priced: list[Buffer]
    price: float
    beyond: list[Answer]


def _by_prices(problem: Problem, search: Priced, free: Answer, steps: int, known: float) -> _Tried:
    """The answers under prices that rise until the limit is kept, then close in on the one at which answers on both sides cost the same.

    A known price (not 0.0) comes first. One that raises the peak by what had no price is tried again, with that charged; where it still
    does, no higher one is tried, nor after prices that rose by `Budgets.price_factor` twice without a smaller peak. The steps end where no
    price between would find another answer, and where the answer within the limit is as fast as the one without prices.
    """
    limit = problem.memory_limit_bytes or 0.0
    above, best, before = free, None, free
    priced = dict.fromkeys(free[0].peak.charged)
    first = _even_price(free)
    price, factor = (known, BUDGETS.price_factor_known) if known else (first, BUDGETS.price_factor)
    shares = alive_shares(problem)
    too_low, enough, below, beyond = 0.0, None, None, [free]
    smallest, reached = free[0].cost.peak_bytes, price  # the smallest peak, and the least price that led to it
    again = False  # whether the last price is tried once more
    for _ in range(steps):
        weights = shares | dict.fromkeys(priced, 1.0)
        found = search({buffer: price * weight for buffer, weight in weights.items()})
        cost, same = found[0].cost, found[1] == before[1]
        news = [buffer for buffer in found[0].peak.charged if buffer not in priced]
        between = enough is not None and found[1] in (above[1], below[1] if below else None)
        if cost.peak_bytes <= limit:
            if best is None or cost.objective_seconds < best[0].cost.objective_seconds:
                best = found
            enough, below, again = price, found, False
            if cost.objective_seconds <= free[0].cost.objective_seconds * (1 + BUDGETS.tolerance):
                break
        else:
            if not same:
                beyond.append(found)
            rises = cost.peak_bytes > above[0].cost.peak_bytes
            if enough is None and rises and again:
                break  # the bytes of other moments decide by now
            again = bool(news) and rises and not again
            if again:  # it evades the price by buffers that had none
                priced |= dict.fromkeys(news)
                continue
            if enough is None and not news and same and price > BUDGETS.price_dear * first:
                break  # the very same answer at a higher price, where bytes decide alone: no price does better
            if cost.peak_bytes < smallest * (1 - BUDGETS.settled_gap):
                smallest, reached = cost.peak_bytes, price
            elif enough is None and price >= BUDGETS.price_factor**2 * reached:
                break
            if enough is not None or cost.peak_bytes < above[0].cost.peak_bytes:
                above = found
            between = between and not news  # what had no price so far may change the answer
            priced |= dict.fromkeys(news)
            too_low = price
        before = found
        if enough is not None and (between or enough - too_low < 0.2 * enough):
            break
        price = price * factor if below is None else _between(too_low, enough or price, above, below)
        factor = min(factor**2, BUDGETS.price_factor)
    return _Tried(best, above, [*priced], enough or too_low, beyond)


def _between(too_low: float, enough: float, above: Answer, below: Answer) -> float:
    """The next price between one that is too low (0.0: none is known) and one that is enough.

    The one at which the answers on both sides cost the same finds one between them, if any price does.
    """
    seconds, nbytes = (
        getattr(below[0].cost, of) - getattr(above[0].cost, of) for of in ("objective_seconds", "peak_bytes")
    )  # fmt: skip
    tie = -seconds / nbytes if nbytes else 0.0
    if too_low < tie < enough and tie > 0.0:
        return tie
    return math.sqrt(too_low * enough) if too_low else enough / BUDGETS.price_factor


def _even_price(found: Answer) -> float:
    """The price at which the bytes of an answer's peak cost as much as its seconds."""
    return found[0].cost.objective_seconds / found[0].cost.peak_bytes


def alive_shares(problem: Problem) -> dict[Buffer, float]:
    """The share of the program in which each buffer may be alive: values, partial results that ops may keep, copies that several read.

    That is the weight of its bytes until it is part of a peak.

    Without any weight, values of no peak so far would grow wherever that saves bytes of others.
    """
    lives, readers = problem.facts.lifetimes, problem.facts.readers
    whole = max(lives.moments, 1)
    shares = (lives.dies - lives.born) / whole
    rules = ((op, problem.rules[op]) for op in leading_variables(problem))
    sums = [op for op, rule in rules if rule is not None and any(factor.kind == "reduction" for factor in rule.factors)]
    last = max((lives.ends[op] for op in sums), default=0)
    partials = {~op: (last - lives.starts[op]) / whole for op in sums}
    copies = {
        CopiesOf(value): (max(lives.ends[op] for op in readers[value]) - min(lives.starts[op] for op in readers[value])) / whole
        for value in problem.decisions.copies
        if readers[value]
    }
    return partials | copies | dict(sorted(zip(lives.values, shares.tolist(), strict=True)))
