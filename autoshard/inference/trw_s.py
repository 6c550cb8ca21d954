"""Sequential tree-reweighted message passing (TRW-S): a lower bound of a pairwise model's minimum.

Kolmogorov 2015, "A new look at reweighted message passing", IEEE TPAMI 37(5), on pairwise models the TRW-S of Kolmogorov 2006: variables in
order collect the minima of their pairs and hand on equal shares of their costs to the pairs ahead; then the same backward. The bound is the
sum of all tables' minima, and never falls. `autoshard.inference.message_layout` has the order.

Tables stay as they are, and equal layers share theirs: the costs moved into a pair are stored beside it, a vector for each of its ends.

*Extrapolation.* Sweeps go on in much the same direction while the bound creeps up. Then every second one starts from further on in the
direction of those before it, and is undone where the bound is not higher for it. Moving costs never changes the energy, so this is safe,
and it takes half of the sweeps again.

Complexity: sweeps x entries of the pair tables, of their distinct rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.inference.message_layout import Batch, LevelStep, MessageLayout
from autoshard.inference.model import Messages, Pair, PairwiseModel
from autoshard.progress import Progress, silent


class MessagePassing:
    """Message passing over one model.

    Attributes:
        model: the tables, as they are given.
        swept: whether the minima of all pairs have been collected.
        rise: of the bound, over the last `Budgets.extrapolation_sweeps` sweeps.
    """

    def __init__(
        self,
        model: PairwiseModel,
        messages: Messages | None = None,
        classes: Sequence[int] | None = None,
        layout: MessageLayout | None = None,
    ):
        """Begins from given messages, or from none.

        Args:
            messages: those into tables of another shape are left out.
            classes: per variable the number of its class, such as that of the same operation in equal layers.
            layout: of the model's pairs, if it is known.
        """
        self._layout = layout = MessageLayout(model.sizes, model.pairs, classes) if layout is None else layout
        self.model = model
        self.swept = False
        self.rise = math.inf
        self._reach = 2.0
        self._given = np.concatenate([np.zeros(0), *(model.unary[i] for i in layout.variables)])
        self._taken = np.zeros(len(layout.label))
        self._most = np.zeros(len(layout.groups))  # the largest message of any label of a row; a sweep renews it where it is read
        if messages:
            taken = list(chain.from_iterable(_fitting(messages.get(pair), table) for pair, table in model.pairs.items()))
            self._taken[layout.places] = -np.concatenate([np.zeros(0), *taken])
        self._forward = [_views(step, self._given, self._taken, self._most) for step in layout.forward]
        self._backward = [_views(step, self._given, self._taken, self._most) for step in layout.backward]

    def run(self, max_sweeps: int, enough: float = math.inf, progress: Progress = silent, give_up: bool = False) -> int:
        """Sweeps until the bound is enough or hardly rises; returns their number.

        Args:
            give_up: whether to stop where the remaining sweeps, if each raised the bound as the last ones did, would not be enough.
        """
        bound = self.bound()
        since, below, creeps = self._taken.copy(), bound, False
        for sweep in range(max_sweeps):
            if bound >= enough:
                return sweep
            if creeps and (sweep + 1) % BUDGETS.extrapolation_sweeps == 0:
                bound = self._extrapolate(since, bound)
            else:
                self.sweep()
                old, bound = bound, self.bound()
                if bound - old <= BUDGETS.passing_tolerance * abs(bound):
                    return sweep + 1
                creeps = bound - old <= BUDGETS.extrapolation_rise * abs(bound)
            if (sweep + 1) % BUDGETS.extrapolation_sweeps == 0:
                self.rise, since, below = bound - below, self._taken.copy(), bound
                if give_up and bound + self.rise / BUDGETS.extrapolation_sweeps * (max_sweeps - sweep - 1) < enough:
                    return sweep + 1
            progress("lower bound", (sweep + 1) / max_sweeps)
        return max_sweeps

    def _extrapolate(self, since: np.ndarray, bound: float) -> float:
        """A sweep from further on in the direction of the last ones, undone unless the bound is higher for it; returns the bound."""
        before = self._taken.copy()
        self._taken += self._reach * (before - since)
        self.sweep()
        if (found := self.bound()) > bound:
            self._reach *= 1.5
            return found
        self._reach = max(self._reach / 3, 0.5)
        self._taken[:] = before
        return bound

    def sweep(self) -> None:
        """One sweep, forward then backward: level by level, variables collect from the pairs behind and hand on shares to those ahead."""
        for step in chain(self._forward, self._backward):
            self._collect(step)
            (_, _, _, _, _, label, shares, _, goes, groups, _), _, _, given, block, go, most = step
            if len(go):
                costs = np.bincount(label, block, len(given))
                costs += given
                costs *= shares
                go -= costs.take(goes)
                np.maximum.reduceat(go, groups, 0, None, most)
        self.swept: bool = True

    def _collect(self, step: _Views) -> None:
        """Messages from the pairs on one side: the minima of their tables less the other ends' messages."""
        for (table, theirs, starts, axis, _, _), own in step.batches:
            np.minimum.reduceat(table - self._most.take(theirs), starts, axis, None, own)
        self._most.take(step.of.rows, 0, step.come, "clip")

    @property
    def messages(self) -> dict[Pair, tuple[np.ndarray, np.ndarray]]:
        """The costs moved into each pair."""
        moved = -self._taken[self._layout.places]
        sizes = self._layout.sizes.tolist()
        return {
            (i, j): (moved[first : first + sizes[i]], moved[last : last + sizes[j]])
            for (i, j), (first, last) in zip(self.model.pairs, self._layout.offsets, strict=True)
        }

    def bound(self) -> float:
        """The sum of all minima; those of pairs are zero after a sweep, whose backward half ends with collecting them."""
        pairs = 0.0 if self.swept else _minima(self._left(self._forward), self._layout.blocks).sum()
        return float(_minima(self._costs(), self._layout.firsts).sum() + pairs)

    def unary(self) -> list[np.ndarray]:
        """The unary tables with all messages, each less its minimum."""
        return self._by_variable(self._above_minimum())

    def reduced(self) -> list[np.ndarray]:
        """Reduced costs: per variable and label, the least amount by which any labelling with it exceeds the bound."""
        found = self._above_minimum()
        for steps in (self._forward, self._backward):
            left = self._left(steps)
            left -= np.repeat(_minima(left, self._layout.blocks), self._layout.lengths)
            found += np.bincount(self._layout.label, left, len(found))
        return self._by_variable(found)

    def _costs(self) -> np.ndarray:
        """The unary tables with all messages, one after the other."""
        return self._given + np.bincount(self._layout.label, self._taken, len(self._given))

    def _above_minimum(self) -> np.ndarray:
        """The same, each less its minimum."""
        costs = self._costs()
        return costs - np.repeat(_minima(costs, self._layout.firsts), self._layout.sizes[self._layout.variables])

    def _by_variable(self, costs: np.ndarray) -> list[np.ndarray]:
        starts, stops = self._layout.starts.tolist(), (self._layout.starts + self._layout.sizes).tolist()
        return [costs[start:stop] for start, stop in zip(starts, stops, strict=True)]

    def _left(self, steps: list[_Views]) -> np.ndarray:
        """The minima of the pairs that variables collect from, by their labels; zero elsewhere."""
        before = self._taken.copy()
        if len(self._layout.groups):
            np.maximum.reduceat(self._taken, self._layout.groups, 0, None, self._most)
        for step in steps:
            self._collect(step)
        left = self._taken - before
        self._taken[:] = before
        return left


class _Views(NamedTuple):
    """The array views that a step reads and writes; named as in `LevelStep` and `Batch`."""

    of: LevelStep
    batches: list[tuple[Batch, np.ndarray]]
    come: np.ndarray
    given: np.ndarray
    block: np.ndarray
    go: np.ndarray
    most: np.ndarray


def _views(step: LevelStep, given: np.ndarray, taken: np.ndarray, most: np.ndarray) -> _Views:
    """A step's views of unary costs, of messages, and of each row's largest message."""
    batches = [(batch, most[batch.own].reshape(batch.shape)) for batch in step.batches]
    return _Views(step, batches, taken[step.come], given[step.given], taken[step.block], taken[step.go], most[step.most])


def _fitting(moved: tuple[np.ndarray, np.ndarray] | None, table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The costs moved into a pair, if its table has their shape; else zeros."""
    n_first, n_last = table.shape
    if moved is not None and len(moved[0]) == n_first and len(moved[1]) == n_last:
        return moved
    return np.zeros(n_first), np.zeros(n_last)


def _minima(values: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """The minima of the values from each start to the next."""
    return np.minimum.reduceat(values, starts) if len(starts) else np.zeros(0)
