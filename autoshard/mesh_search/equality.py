"""Plans that predictions do not tell apart, and the simplest of them.

What a chip's predictions are off by in common, as products that reach less of the peak than is known, is the same for all plans of a
program and cancels between them. What does not cancel is how far predicted ratios of published runs' times are off
(`autoshard.cluster.device.Device.pair_error`, from ``python -m benchmarks.published``): plans nearer than that are equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import TypeVar

from autoshard.cost.record import Cost
from autoshard.ir import Mesh
from autoshard.render import format_percent, format_seconds
from autoshard.search.searcher import Solution

PEAK_ERROR = 0.1  # of a peak: few compiled ones are further from the predicted (docs/predictions.md); a plan that holds more is not equal
EQUAL = "equal within the model's error, and less simple"
"""What becomes of a plan that is predicted to be faster than the one that is taken."""

T = TypeVar("T")
Figures = tuple[Cost, tuple[int, ...]]
"""A plan's cost, and its complexity, the simplest least."""


def complexity(mesh: Mesh, cost: Cost, *form: int) -> tuple[int, ...]:
    """How complex a plan is: by its form, such as its number of stages, then by axes, then by collectives, to within a factor of two."""
    return (*form, sum(size > 1 for size in mesh.sizes), int(sum(each.count for each in cost.collectives)).bit_length())


def simplest_first(found: Iterable[T], error: float, figures: Callable[[T], Figures], known: float = math.inf) -> list[T]:
    """Plans fastest first, but before all the simplest of those that are equal to the fastest and hold no more memory.

    Args:
        error: the share by which predicted ratios of two plans' times are off; 0.0: not known, and the fastest is first.
        known: the step time of a plan that is not among them and may be faster, in seconds: what is slower than equal to that is not
            taken for being simple, so that choices one after the other do not add up.
    """
    ranked = sorted(found, key=lambda each: figures(each)[0].makespan_seconds)
    if not error or not ranked:
        return ranked
    least, _ = figures(ranked[0])
    most = min(least.makespan_seconds, known) * (1 + error)

    def is_equal(each: T) -> bool:
        cost, _ = figures(each)
        return cost.makespan_seconds <= most and cost.peak_bytes <= least.peak_bytes * (1 + PEAK_ERROR)

    first = min(filter(is_equal, ranked), key=lambda each: figures(each)[1], default=ranked[0])
    return [first, *(each for each in ranked if each is not first)]


def are_equal(one: Cost, other: Cost, error: float) -> bool:
    """Whether predictions do not tell which of two plans is faster."""
    fast, slow = sorted((one.makespan_seconds, other.makespan_seconds))
    return slow <= fast * (1 + error)


def note_of_equal(what: str, cost: Cost, error: float) -> str:
    """The note of a plan that is taken since it is simpler than an equal one, which is told in words with its cost."""
    return (
        f"equal within the model's error ({format_percent(error)} between two plans of a program): {what} is predicted to take "
        f"{format_seconds(cost.makespan_seconds)}, and this plan is simpler"
    )


def figures_of(solution: Solution) -> Figures:
    """The cost and the complexity of a solution, of plans that differ in their mesh and their shardings alone."""
    cost = solution.judgement.cost
    return cost, complexity(solution.assignment.mesh, cost)
