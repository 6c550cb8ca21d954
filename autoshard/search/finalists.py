"""The few best distinct answers of a search, from which something better than a prediction is to choose.

Two answers are distinct if their meshes differ in their axes, if arguments are sharded otherwise, or if other bytes are sent, in two digits
of all that is sent: of two that differ in the placement of the mesh alone, or in choices that send the same, a compiler makes the same.

Finalists are the fastest distinct answers, the last place kept for the fastest baseline if none of the others is one: programs like it are
those that compilers are tuned for.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from autoshard.search.baselines import DataParallel, FullySharded
from autoshard.search.searcher import Solution
from autoshard.search.tensor_parallel import TensorParallel

BASELINES = (DataParallel(), FullySharded(stage=1), FullySharded(stage=2), FullySharded(stage=3), TensorParallel())
_NAMES = frozenset(baseline.name for baseline in BASELINES)


def finalists(solutions: Iterable[Solution], arguments: Iterable[int], most: int) -> tuple[Solution, ...]:
    """At most so many distinct solutions, fastest first; what is equally fast stays in its order.

    Finalists of finalists and of more solutions are finalists of all.

    Args:
        arguments: value numbers of the program's arguments.
    """
    arguments = tuple(arguments)
    distinct: dict[tuple, Solution] = {}
    for solution in sorted(solutions, key=lambda one: one.judgement.cost.makespan_seconds):
        distinct.setdefault(_identity(solution, arguments), solution)
    ranked = tuple(distinct.values())
    first, rest = ranked[:most], ranked[most:]
    if most > 1 and not any(map(is_baseline, first)):
        last = next(filter(is_baseline, rest), None)
        first = first if last is None else (*first[:-1], last)
    return first


def is_baseline(solution: Solution) -> bool:
    """Whether it is what people write by hand."""
    return solution.finder in _NAMES


def _identity(solution: Solution, arguments: tuple[int, ...]) -> tuple:
    """What distinct solutions differ in."""
    sent = defaultdict[tuple, float](float)
    for one in solution.judgement.cost.collectives:
        sent[one.kind, one.mesh_axes] += one.bytes * one.count
    total = sum(sent.values())
    unit = 10.0 ** (math.floor(math.log10(total)) - 1) if total > 0 else 1.0  # all that is sent has two digits
    rounded = tuple(sorted((key, units) for key, n_bytes in sent.items() if (units := round(n_bytes / unit))))
    assignment = solution.assignment
    return assignment.mesh.axes, tuple(assignment.layout(value) for value in arguments), unit, rounded
