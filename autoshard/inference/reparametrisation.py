"""Reparametrisations: models of the same energies whose separate minima add up to a lower bound.

Energies do not change when a vector over the labels of ``i`` is added to ``unary[i]`` and subtracted from a ``pairs[i, j]``. The minima of
all tables, added up, bound the energy from below, and moving costs well raises that bound (`autoshard.inference.trw_s`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autoshard.inference.model import Messages, Pair, Pairs, PairwiseModel
from autoshard.inference.trw_s import MessagePassing
from autoshard.progress import Progress, silent


@dataclass(frozen=True, eq=False)
class Reparametrisation:
    """The same energies, as a constant and tables that are nowhere negative.

    Attributes:
        bound: the constant: no labelling has a smaller energy.
        unary: ``(n_i,) float64`` each, at least 0.
        given: the pair tables as they were given.
        messages: the costs moved into them.
        reduced: reduced costs ``(n_i,) float64``: every labelling in which the variable has this label costs at least ``bound`` plus this.
        sweeps: the number of sweeps of message passing.
    """

    bound: float
    unary: tuple[np.ndarray, ...]
    given: Pairs
    messages: Messages
    reduced: tuple[np.ndarray, ...]
    sweeps: int

    @cached_property
    def pairs(self) -> dict[Pair, np.ndarray]:
        """``(n_i, n_j) float64`` each, at least 0."""
        moved = {pair: _moved(table, *self.messages[pair]) for pair, table in self.given.items()}
        return {pair: table - table.min() for pair, table in moved.items()}


def reparametrise(model: PairwiseModel, *, max_sweeps: int = 40, progress: Progress = silent) -> Reparametrisation:
    """The model after message passing, which stops where a sweep raises it by next to nothing."""
    passing = MessagePassing(model)
    sweeps = passing.run(max_sweeps, progress=progress)
    return normalised(passing, sweeps)


def normalised(passing: MessagePassing, sweeps: int) -> Reparametrisation:
    """The present reparametrisation of message passing, after so many sweeps."""
    model, reduced = passing.model, tuple(passing.reduced())
    return Reparametrisation(passing.bound(), tuple(passing.unary()), model.pairs, passing.messages, reduced, sweeps)


def _moved(table: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
    """A pair's table with its messages."""
    return table + first[:, None] + last
