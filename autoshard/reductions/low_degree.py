"""Low-degree elimination: variables of one or two neighbours eliminated, for the same minimum over fewer variables.

The least cost of a variable by the labels of its neighbours is a table over these: a unary table of one, a pair table of two (a step of
bucket elimination, Dechter 1999, "Bucket elimination: a unifying framework for reasoning"). So the minimum is unchanged, and message
passing over the remaining variables has less to do and a tighter bound, since the eliminated part is not relaxed. A variable
stays where its elimination would make more entries than it saves. Equal layers have the very same tables: those are computed once, and
the results are shared as well.

Complexity: variables x labels ** 3, of those whose tables differ.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.inference.message_layout import MessageLayout
from autoshard.inference.model import Messages, PairwiseModel
from autoshard.inference.trw_s import MessagePassing
from autoshard.problem import Problem


@dataclass(frozen=True, slots=True, eq=False)
class Eliminated:
    """One eliminated variable.

    Attributes:
        variable: its number.
        around: its neighbours by then.
        best: its best label, by theirs.
    """

    variable: int
    around: tuple[int, ...]
    best: np.ndarray


@dataclass(frozen=True, slots=True, eq=False)
class LowDegree:
    """A model without its variables of low degree, and the way back.

    Attributes:
        model: variables keep their numbers; eliminated ones have a single label, and no pairs.
        eliminated: in order.
    """

    model: PairwiseModel
    eliminated: tuple[Eliminated, ...]

    def invert(self, labels: np.ndarray) -> np.ndarray:
        """Labels of the whole model of the same energy, from labels of the reduced one."""
        found = labels.tolist()
        for one in reversed(self.eliminated):
            found[one.variable] = one.best.item(*(found[other] for other in one.around))
        return np.array(found, dtype=np.int64)


def apply(model: PairwiseModel) -> LowDegree:
    """The model without variables of one or two neighbours."""
    elimination = _Elimination(model)
    elimination.run()
    return LowDegree(PairwiseModel(tuple(elimination.unary), elimination.pairs), tuple(elimination.eliminated))


def apply_whole(problem: Problem) -> LowDegree:
    """The reduction of a problem's tables with all mesh axes free; `Problem.cached` keeps it."""
    return apply(problem.whole_tables())


def message_layout(problem: Problem) -> MessageLayout:
    """The message layout of the reduced tables; `Problem.cached` keeps it."""
    model = problem.cached(apply_whole).model
    return MessageLayout(model.sizes, model.pairs)


def message_passing(problem: Problem, messages: Messages | None = None) -> MessagePassing:
    """Message passing over a problem's reduced tables."""
    return MessagePassing(problem.cached(apply_whole).model, messages, layout=problem.cached(message_layout))


class _Elimination:
    """The remaining variables and their neighbours."""

    def __init__(self, model: PairwiseModel):
        self.unary = list(model.unary)
        self.pairs = {(i, j) if i < j else (j, i): table if i < j else table.T for (i, j), table in model.pairs.items()}
        self.neighbours: list[set[int]] = [set() for _ in self.unary]
        for i, j in self.pairs:
            self.neighbours[i].add(j)
            self.neighbours[j].add(i)
        self.eliminated: list[Eliminated] = []
        self._known: dict[tuple, tuple[np.ndarray, np.ndarray, tuple]] = {}  # by the identities of the tables, which it keeps alive

    def run(self) -> None:
        """Eliminates variables until no other should be."""
        waiting = deque(range(len(self.unary)))
        queued = [True] * len(self.unary)
        while waiting:
            variable = waiting.popleft()
            queued[variable] = False
            if len(self.neighbours[variable]) <= 2 and self._smaller_without(variable):
                for other in self._eliminate(variable):
                    if not queued[other]:
                        waiting.append(other)
                        queued[other] = True

    def _smaller_without(self, variable: int) -> bool:
        """Whether tables have no more entries without the variable."""
        if len(self.neighbours[variable]) < 2:
            return bool(self.neighbours[variable]) or len(self.unary[variable]) > 1
        first, last = sorted(self.neighbours[variable])
        own, one, other = (len(self.unary[at]) for at in (variable, first, last))
        return own * one * other <= BUDGETS.low_degree_entries and ((first, last) in self.pairs or one * other <= own * (one + other))

    def _eliminate(self, variable: int) -> tuple[int, ...]:
        """Eliminates the variable; returns its neighbours."""
        around = tuple(sorted(self.neighbours[variable]))
        own = self.unary[variable]
        beside = [self.pairs.pop((min(variable, other), max(variable, other))) for other in around]
        before = self.pairs.get(around, None) if len(around) == 2 else self.unary[around[0]] if around else None
        inputs = (own, *beside, before)
        key = (*map(id, inputs), *(variable < other for other in around))
        if (found := self._known.get(key)) is None:
            towards = [table if variable < other else table.T for table, other in zip(beside, around, strict=True)]
            found = self._known[key] = (*_minimised(own, towards, before), inputs)
        least, best, _ = found
        self.eliminated.append(Eliminated(variable, around, best))
        for other in around:
            self.neighbours[other].remove(variable)
        self.neighbours[variable].clear()
        self.unary[variable] = np.zeros(1) if around else least
        if len(around) == 2:
            self.pairs[around] = least
            self.neighbours[around[0]].add(around[1])
            self.neighbours[around[1]].add(around[0])
        elif around:
            self.unary[around[0]] = least
        return around


def _minimised(own: np.ndarray, towards: list[np.ndarray], before: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The least cost of a variable by its neighbours' labels, added to their present table, and its best labels.

    Args:
        own: its unary table ``(n,)``.
        towards: per neighbour the pair's table ``(n, n_neighbour)``.
        before: the table over the neighbours, if there is one.
    """
    if len(towards) == 2:
        first, last = towards
        total = (own[:, None] + first).T[:, None, :] + last.T  # (first's labels, last's, own)
    else:
        total = sum((table.T for table in towards), own)
    least, best = total.min(axis=-1, keepdims=not towards), total.argmin(axis=-1)
    return least if before is None else least + before, np.asarray(best)
