"""Dead-end elimination: labels that no minimum needs, since another label of the same variable is never worse.

Label ``a`` is dominated by ``b`` if ``u_a - u_b`` plus, for every neighbour, the least of ``p_ax - p_bx`` over its labels ``x`` is not
negative: then ``b`` can replace ``a`` in any labelling at no cost (Goldstein 1994, "Efficient rotamer elimination applied to protein
side-chains and related spin glasses"). Dominance is transitive, so variables may be examined one by one or all at once. Equal ones are
examined once.

Complexity: pairs x labels ** 3, of those whose tables differ.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.inference.model import PairwiseModel

_End = tuple[int, np.ndarray, int]  # a neighbour, the table by a variable's labels and its, and a number that equal ends share


def undominated(model: PairwiseModel) -> list[np.ndarray]:
    """Per variable the labels to keep, at least one each: the minimum over them is that over all, and of equally good ones the first stays.

    >>> undominated(PairwiseModel([np.array([0.0, 1.0, 0.0]), np.zeros(2)], {(0, 1): np.array([[0.0, 2.0], [0.0, 2.0], [2.0, 0.0]])}))
    [array([0, 2]), array([0, 1])]
    """
    around: list[list[_End]] = [[] for _ in model.unary]
    for (i, j), table in model.pairs.items():
        around[i].append((j, table, id(table)))
        around[j].append((i, table.T, -id(table)))
    every: dict[int, np.ndarray] = {}
    kept = [every.setdefault(len(costs), np.arange(len(costs))) for costs in model.unary]
    for _ in range(BUDGETS.dominance_rounds):
        before, kept = kept, _round(model.unary, around, kept)
        if all(ours is theirs for ours, theirs in zip(kept, before, strict=True)):
            break
    return kept


def _round(unary: Sequence[np.ndarray], around: Sequence[Sequence[_End]], kept: list[np.ndarray]) -> list[np.ndarray]:
    """The kept labels that are not dominated."""
    known: dict[tuple, np.ndarray] = {}  # by the identities of arrays that live as long as the call
    sets = {labels.tobytes(): labels for labels in kept}
    found = []
    for variable, labels in enumerate(kept):
        key = (id(unary[variable]), id(labels), *((number, id(kept[j])) for j, _, number in around[variable]))
        if (left := known.get(key)) is None:
            costs = unary[variable][labels]
            dominates = _dominates(costs, [table[labels[:, None], kept[j]] for j, table, _ in around[variable]])
            left = labels if dominates is None else labels[~dominates.any(axis=0)]
            left = known[key] = labels if len(left) == len(labels) else sets.setdefault(left.tobytes(), left)
        found.append(left)
    return found


def _dominates(costs: np.ndarray, towards: Sequence[np.ndarray]) -> np.ndarray | None:
    """``(n, n)``, whether the first label dominates the second, of two that dominate each other the earlier one; None where it is dear.

    Args:
        costs: ``(n,)``, of the labels.
        towards: per neighbour the pair's table ``(n, n_neighbour)``.
    """
    n = len(costs)
    if n < 2 or n * n * max((table.shape[1] for table in towards), default=0) > BUDGETS.table_entries:
        return None
    less = costs - costs[:, None]  # [first, second]: the second's cost less the first's
    for table in towards:
        less = less + (table[None, :, :] - table[:, None, :]).min(axis=2)
    dominates = less >= 0.0
    return dominates & ~(dominates.T & (np.arange(n)[:, None] >= np.arange(n)))
