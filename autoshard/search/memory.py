"""Searching under a memory limit: bytes that are alive at the peak get a price in seconds.

A Lagrange multiplier: the price is raised until the judge finds the peak below the limit, then lowered as far as it stays there. It
reaches the convex part of the time x memory frontier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from autoshard.cost.evaluate import Judgement
from autoshard.errors import InfeasibleError
from autoshard.problem import Label, Problem
from autoshard.render import format_bytes

Priced = Callable[[Mapping[int, float]], tuple[Judgement, list[Label]]]
"""Prices per value, in seconds a byte that a device holds of it, to what a search finds under them."""


def fastest_within(problem: Problem, search: Priced, steps: int) -> tuple[Judgement, list[Label]]:
    """The answer without prices where it is within the problem's memory limit, else the fastest met that is.

    Args:
        search: what finds an answer under prices; asked for the one without prices first.
        steps: how many prices may be tried.

    Raises:
        InfeasibleError: no answer was within the limit; names the smallest peak met.
    """
    judgement, labels = search({})
    limit = problem.memory_limit_bytes
    if limit is None or judgement.cost.peak_bytes <= limit:
        return judgement, labels
    smallest = judgement.cost.peak_bytes
    priced = set(judgement.peak.alive)
    price = judgement.cost.objective_seconds / judgement.cost.peak_bytes
    too_low, enough, best = 0.0, None, None
    for _ in range(steps):
        found, labels = search(dict.fromkeys(sorted(priced), price))
        smallest = min(smallest, found.cost.peak_bytes)
        if found.cost.peak_bytes <= limit:
            if best is None or found.cost.objective_seconds < best[0].cost.objective_seconds:
                best = (found, labels)
            enough = price
        else:
            priced |= set(found.peak.alive)
            too_low = price
        price = price * 4 if enough is None else (too_low + enough) / 2
        if enough is not None and enough - too_low < 0.2 * enough:
            break
    if best is None:
        raise InfeasibleError(
            f"a strategy must fit {format_bytes(limit)} a device, and the smallest peak found on mesh {problem.mesh} is "
            f"{format_bytes(smallest)}. Use more devices, a smaller batch, rematerialisation, or a higher memory_limit_bytes.",
            smallest,
        )
    return best
