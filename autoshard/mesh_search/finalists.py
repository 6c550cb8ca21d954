"""Finalists: the few best distinct answers of a search, among which compilers or devices decide.

Two answers are distinct if their meshes differ in their axes, or if they differ in two digits of a prediction: the step time, the peak
memory, or the bytes sent by each kind of collective over each set of mesh axes. Smaller differences, such as the placement of
the mesh or the sharding of small arguments, hardly change the compiled program.

Finalists are the fastest distinct answers, the last place kept for the fastest baseline if none of the others is one: compilers are
tuned for such programs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from autoshard.errors import AutoshardError, InfeasibleError
from autoshard.search.baselines import DataParallel, FullySharded
from autoshard.search.searcher import Solution
from autoshard.search.tensor_parallel import TensorParallel

BASELINES = (DataParallel(), FullySharded(stage=1), FullySharded(stage=2), FullySharded(stage=3), TensorParallel())
_NAMES = frozenset(baseline.name for baseline in BASELINES)


def finalists(solutions: Iterable[Solution], most: int) -> tuple[Solution, ...]:
    """At most so many distinct solutions, fastest first, equally fast ones in the given order.

    The finalists of finalists and further solutions are the finalists of all.
    """
    distinct: dict[tuple[Any, ...], Solution] = {}
    for solution in sorted(solutions, key=lambda one: one.judgement.cost.makespan_seconds):
        distinct.setdefault(_identity(solution), solution)
    ranked = tuple(distinct.values())
    first, rest = ranked[:most], ranked[most:]
    if most > 1 and not any(map(is_baseline, first)):
        last = next(filter(is_baseline, rest), None)
        first = first if last is None else (*first[:-1], last)
    return first


def is_baseline(solution: Solution) -> bool:
    """Whether a solution is a baseline's."""
    return solution.finder in _NAMES


def _identity(solution: Solution) -> tuple:
    """The facts in which distinct solutions differ."""
    cost = solution.judgement.cost
    sent = defaultdict[tuple, float](float)
    for one in cost.collectives:
        sent[one.kind, one.mesh_axes] += one.bytes * one.count
    unit = _two_digits(sum(sent.values()))
    rounded = tuple(sorted((key, units) for key, n_bytes in sent.items() if (units := round(n_bytes / unit))))
    predicted = tuple((each := _two_digits(figure), round(figure / each)) for figure in (cost.makespan_seconds, cost.peak_bytes))
    return solution.assignment.mesh.axes, predicted, unit, rounded


def _two_digits(figure: float) -> float:
    """The unit in which a figure has two digits."""
    return 10.0 ** (math.floor(math.log10(figure)) - 1) if figure > 0 else 1.0


def worse(old: AutoshardError | None, new: AutoshardError) -> AutoshardError:
    """The error to report when no mesh has a solution: of memory errors that with the smallest peak."""
    if isinstance(old, InfeasibleError) and isinstance(new, InfeasibleError):
        return min(old, new, key=lambda error: error.smallest_peak_bytes or float("inf"))
    return old if isinstance(old, InfeasibleError) else new
