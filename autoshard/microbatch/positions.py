"""Arrays of positions along a dimension."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Positions:
    """An array whose elements are their positions along a dimension, divided by a number and rounded down, plus an offset."""

    dim: int
    offset: int
    each: int = 1

    def reshaped(self, before: Sequence[int], after: Sequence[int]) -> Positions | None:
        """Those in another shape: their dimension, or that and all smaller ones as one.

        >>> Positions(0, 0).reshaped((4, 2), (8,)), Positions(1, 0).reshaped((4, 2), (8,))
        (Positions(dim=0, offset=0, each=2), None)
        """
        outside = math.prod(before[: self.dim])
        for dim in range(len(after)):
            if math.prod(after[:dim]) != outside or after[dim] % before[self.dim] or after[dim] == 1:
                continue
            return Positions(dim, self.offset, self.each * (after[dim] // before[self.dim]))
        return None
