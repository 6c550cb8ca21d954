"""Labels that no best labelling needs: whatever uses one costs no less with another of the same node.

Label ``a`` is dominated by ``b`` if ``u_a - u_b`` plus, for every neighbour, the least of ``p_ax - p_bx`` over its labels ``x`` is not
negative: then ``b`` takes the place of ``a`` anywhere, for nothing (Goldstein 1994, "Efficient rotamer elimination applied to protein
side-chains and related spin glasses"). Dominance is transitive, so nodes may be looked at one by one or all at once. Equal nodes are
looked at once.

Complexity: pairs x labels ** 3, of those whose tables differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.problem.budgets import BUDGETS
from autoshard.search.elimination import Pairs

_End = tuple[int, np.ndarray, int]  # a neighbour, the table by a node's labels and its, and what equal ends are known by


def undominated(unary: Sequence[np.ndarray], pairs: Pairs) -> list[np.ndarray]:
    """Per node the labels to keep, at least one each: the least cost over them is that over all, and of equally good ones the first stays.

    >>> undominated([np.array([0.0, 1.0, 0.0]), np.zeros(2)], {(0, 1): np.array([[0.0, 2.0], [0.0, 2.0], [2.0, 0.0]])})
    [array([0, 2]), array([0, 1])]
    """
    around: list[list[_End]] = [[] for _ in unary]
    for (i, j), table in pairs.items():
        around[i].append((j, table, id(table)))
        around[j].append((i, table.T, -id(table)))
    every: dict[int, np.ndarray] = {}
    kept = [every.setdefault(len(costs), np.arange(len(costs))) for costs in unary]
    for _ in range(BUDGETS.dominance_rounds):
        before, kept = kept, _round(unary, around, kept)
        if all(ours is theirs for ours, theirs in zip(kept, before, strict=True)):
            break
    return kept


def _round(unary: Sequence[np.ndarray], around: Sequence[Sequence[_End]], kept: list[np.ndarray]) -> list[np.ndarray]:
    """What is left of the labels that are kept."""
    met: dict[tuple, np.ndarray] = {}
    sets = {labels.tobytes(): labels for labels in kept}
    found = []
    for node, labels in enumerate(kept):
        key = (id(unary[node]), id(labels), *((number, id(kept[j])) for j, _, number in around[node]))
        if (left := met.get(key)) is None:
            costs = unary[node][labels]
            dominates = _dominates(costs, [table[labels[:, None], kept[j]] for j, table, _ in around[node]])
            left = labels if dominates is None else labels[~dominates.any(axis=0)]
            left = met[key] = labels if len(left) == len(labels) else sets.setdefault(left.tobytes(), left)
        found.append(left)
    return found


def _dominates(costs: np.ndarray, towards: Sequence[np.ndarray]) -> np.ndarray | None:
    """``(n, n)``, whether the first label dominates the second, of two that dominate each other the earlier one; None where it is dear."""
    n = len(costs)
    if n < 2 or n * n * max((table.shape[1] for table in towards), default=0) > BUDGETS.dominance_entries:
        return None
    less = costs - costs[:, None]  # by what the second label costs more
    for table in towards:
        less = less + (table[None, :, :] - table[:, None, :]).min(axis=2)
    dominates = less >= 0.0
    return dominates & ~(dominates.T & (np.arange(n)[:, None] >= np.arange(n)))
