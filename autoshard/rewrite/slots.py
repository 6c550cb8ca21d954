"""Slots of experts: where each of the rows that are sorted by expert is packed, round by round.

Rows of an expert are beside each other; in a round each expert has ``capacity`` slots. Round ``r`` has the rows of each expert from its
``r * capacity``-th on. Rows behind those of the last expert belong to none: once all experts have had theirs, their slots are filled with
these in order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax.numpy as jnp
from jax import lax

SUITS = 128  # rows that matrix units, lanes and blocks of kernels divide by
LEAST = 8  # of these a sublane has
SPARE = 32  # one more of so many slots may be added to suit


def capacity_of(rows: int, experts: int, balance: float) -> int:
    """How many slots each expert has where the fullest has ``balance`` times the mean of the rows.

    >>> capacity_of(16384, 16, 1.25), capacity_of(100, 8, 1.0), capacity_of(4, 2, 1.0)
    (1280, 16, 4)
    """
    needed = min(rows, max(1, -int(-balance * rows // experts)))
    unit = LEAST
    while unit < SUITS and 2 * unit * SPARE <= needed:
        unit *= 2
    return min(rows, -(-needed // unit) * unit)


@dataclass(frozen=True)
class Slots:
    """The slots of one round.

    Attributes:
        sizes: ``(experts,)``: how many rows each expert has.
        rows: of all experts, and of none.
        capacity: slots of an expert.
        round: its number, an array; None: the first, in which no slot has a row of no expert.
    """

    sizes: Any
    rows: int
    capacity: int
    round: Any = None

    def __post_init__(self) -> None:
        wide = jnp.promote_types(jnp.int32, self.sizes.dtype)  # of narrow and unsigned sizes, too, differences are counted
        object.__setattr__(self, "sizes", self.sizes.astype(wide if jnp.issubdtype(self.sizes.dtype, jnp.signedinteger) else jnp.int32))

    def known(self, index: Any, slot: Any) -> Slots:
        """The same slots, of which these are computed already."""
        vars(self).update(index=index, slot=slot)
        return self

    @property
    def experts(self) -> int:
        return self.sizes.shape[0]

    @cached_property
    def _ends(self) -> Any:
        return jnp.minimum(jnp.cumsum(self.sizes), self.rows)

    @cached_property
    def _starts(self) -> Any:
        return jnp.concatenate([jnp.zeros(1, self.sizes.dtype), self._ends[:-1]])

    @cached_property
    def _rounds(self) -> Any:
        """The rounds in which experts have rows: one at least."""
        return jnp.maximum(-(-jnp.max(self._ends - self._starts) // self.capacity), 1)

    @cached_property
    def rounds(self) -> Any:
        """The number of all rounds."""
        return self._rounds + -(-(self.rows - self._ends[-1]) // (self.experts * self.capacity))

    @cached_property
    def is_over(self) -> Any:
        """Whether the round has the rows of no expert."""
        return self.round >= self._rounds

    @cached_property
    def index(self) -> Any:
        """``(experts, capacity)``: the row in each slot, and ``rows`` where there is none."""
        place = lax.broadcasted_iota(self.sizes.dtype, (self.experts, self.capacity), 1)
        if self.round is not None:
            place = place + self.round * self.capacity
        starts, ends = self._starts[:, None], self._ends[:, None]
        found = jnp.where(starts + place < ends, starts + place, self.rows)
        if self.round is None:
            return found
        number = lax.broadcasted_iota(self.sizes.dtype, (self.experts, 1), 0) * self.capacity + place
        rest = self._ends[-1] + number - self._rounds * self.capacity + (self.round - self._rounds) * (self.experts - 1) * self.capacity
        return jnp.where(self.is_over, jnp.minimum(rest, self.rows), found)

    @cached_property
    def filled(self) -> Any:
        """``(experts, capacity)``: whether there is a row in a slot."""
        return self.index < self.rows

    @cached_property
    def slot(self) -> Any:
        """``(rows,)``: the slot of each row, ``experts * capacity`` where it has none in this round."""
        row = jnp.arange(self.rows, dtype=self.sizes.dtype)
        behind = row[:, None] >= self._ends[None]
        expert = jnp.sum(behind.astype(row.dtype), 1)
        first = jnp.max(jnp.where(behind, self._ends[None], 0), 1)
        place, everything = row - first, self.experts * self.capacity
        mine = expert < self.experts
        before = jnp.asarray(0, row.dtype) if self.round is None else self.round * self.capacity
        inside = mine & (place >= before) & (place < before + self.capacity)
        found = jnp.where(inside, expert * self.capacity + place - before, everything)
        if self.round is None:
            return found
        rest = place - (self.round - self._rounds) * everything
        over = self.is_over & ~mine & (rest >= 0) & (rest < everything)
        return jnp.where(self.is_over, jnp.where(over, rest, everything), found)
