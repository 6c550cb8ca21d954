"""Nodes of one or two neighbours taken out of tables, and put back: the same minimum, over fewer nodes.

What a node costs at least, by the labels of its neighbours, is a table of these: of one a unary table, of two a pair (a step of bucket
elimination, Dechter 1999, "Bucket elimination: a unifying framework for reasoning"). So the minimum stays what it is, and message passing
over what is left has less to do and bounds it better, since nothing is relaxed within what went. A node stays where that would make more
entries than it saves. Equal layers have the very same tables: what is done to one is remembered, not repeated, and they share what comes
of it.

Complexity: nodes x labels ** 3, of those whose tables differ.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from autoshard.problem import BUDGETS, Problem, Tables


@dataclass(frozen=True, slots=True, eq=False)
class Contracted:
    """Tables without some nodes, and the way back.

    Attributes:
        tables: nodes keep their numbers; those that went have one label, ``()``, and no pairs.
        gone: those, in the order in which they went, each with its neighbours by then and its best label by theirs.
    """

    tables: Tables
    gone: tuple[tuple[int, tuple[int, ...], np.ndarray], ...]

    def labels(self, found: np.ndarray) -> np.ndarray:
        """The labels of all nodes, of the same cost, by those of the nodes that are left."""
        labels = found.tolist()
        for node, around, best in reversed(self.gone):
            labels[node] = best.item(*(labels[other] for other in around))
        return np.array(labels, dtype=np.int64)


def contracted(tables: Tables) -> Contracted:
    """The tables without nodes that one or two others decide."""
    contraction = _Contraction(tables)
    contraction.run()
    options, incumbent = list(tables.labels), tables.incumbent.copy()
    for node, _, _ in contraction.gone:
        options[node], incumbent[node] = ((),), 0
    left = Tables(tuple(options), tuple(contraction.unary), contraction.pairs, incumbent)
    return Contracted(left, tuple(contraction.gone))


def contracted_whole(problem: Problem) -> Contracted:
    """All axes' tables of a problem, which remembers it."""
    return contracted(problem.whole_tables())


class _Contraction:
    """The nodes that are left, and who stands next to whom."""

    def __init__(self, tables: Tables):
        self.unary = list(tables.unary)
        self.pairs = {(i, j) if i < j else (j, i): table if i < j else table.T for (i, j), table in tables.pairs.items()}
        self.near: list[set[int]] = [set() for _ in self.unary]
        for i, j in self.pairs:
            self.near[i].add(j)
            self.near[j].add(i)
        self.gone: list[tuple[int, tuple[int, ...], np.ndarray]] = []
        self._met: dict[tuple, tuple[np.ndarray, np.ndarray, tuple]] = {}

    def run(self) -> None:
        """Takes nodes out until none is left that should be."""
        waiting = deque(range(len(self.unary)))
        queued = [True] * len(self.unary)
        while waiting:
            node = waiting.popleft()
            queued[node] = False
            if len(self.near[node]) <= 2 and self._smaller_without(node):
                for other in self._take(node):
                    if not queued[other]:
                        waiting.append(other)
                        queued[other] = True

    def _smaller_without(self, node: int) -> bool:
        """Whether tables have no more entries without the node."""
        if len(self.near[node]) < 2:
            return bool(self.near[node]) or len(self.unary[node]) > 1
        first, last = sorted(self.near[node])
        own, one, other = (len(self.unary[at]) for at in (node, first, last))
        return own * one * other <= BUDGETS.contracted_entries and ((first, last) in self.pairs or one * other <= own * (one + other))

    def _take(self, node: int) -> tuple[int, ...]:
        """Takes the node out; gives its neighbours."""
        around = tuple(sorted(self.near[node]))
        own = self.unary[node]
        beside = [self.pairs.pop((min(node, other), max(node, other))) for other in around]
        before = self.pairs.get(around, None) if len(around) == 2 else self.unary[around[0]] if around else None
        inputs = (own, *beside, before)
        key = (*map(id, inputs), *(node < other for other in around))
        if (found := self._met.get(key)) is None:
            towards = [table if node < other else table.T for table, other in zip(beside, around, strict=True)]  # (node, other)
            found = self._met[key] = (*_joined(own, towards, before), inputs)  # held, so that their identities are not given away
        least, best, _ = found
        self.gone.append((node, around, best))
        for other in around:
            self.near[other].remove(node)
        self.near[node].clear()
        self.unary[node] = np.zeros(1) if around else least
        if len(around) == 2:
            self.pairs[around] = least
            self.near[around[0]].add(around[1])
            self.near[around[1]].add(around[0])
        elif around:
            self.unary[around[0]] = least
        return around


def _joined(own: np.ndarray, towards: list[np.ndarray], before: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """What a node costs at least by its neighbours' labels, beside what these had before, and its best labels."""
    if len(towards) == 2:
        first, last = towards
        total = (own[:, None] + first).T[:, None, :] + last.T  # (first's labels, last's, own)
    else:
        total = sum((table.T for table in towards), own)
    least, best = total.min(axis=-1, keepdims=not towards), total.argmin(axis=-1)
    return least if before is None else least + before, np.asarray(best)
