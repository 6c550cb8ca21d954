"""The best that was found so far of all forms and variants of a program."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autoshard.cost.record import Cost


@dataclass(slots=True)
class Incumbent:
    """What was found so far, which what is still searched has to beat.

    Attributes:
        objective_seconds: the least objective of what fits.
        makespan_seconds: the least step time of what fits.
        hiding: the most that an objective was met to be of its step time, of what fits or not: what is hidden behind compute is in it.
        variants: the step time and the peak of the fastest strategy of each variant that was explored, whatever it holds.
    """

    objective_seconds: float = math.inf
    makespan_seconds: float = math.inf
    hiding: float = 1.0
    variants: list[tuple[float, float]] = field(default_factory=list)

    @property
    def is_known(self) -> bool:
        """Whether anything fits."""
        return self.objective_seconds < math.inf

    @property
    def bound_seconds(self) -> float:
        """The objective from which on a search is cut: forms that hide more behind compute are faster than their objectives are."""
        return max(self.objective_seconds, self.makespan_seconds * self.hiding)

    def see(self, cost: Cost) -> None:
        """Takes the cost of something that may not fit."""
        self.hiding = max(self.hiding, cost.objective_seconds / cost.makespan_seconds) if cost.makespan_seconds else self.hiding

    def add(self, cost: Cost) -> None:
        """Takes the cost of something that fits."""
        self.see(cost)
        self.objective_seconds = min(self.objective_seconds, cost.objective_seconds)
        self.makespan_seconds = min(self.makespan_seconds, cost.makespan_seconds)

    def is_explored(self, seconds: float, nbytes: float, gain: float) -> bool:
        """Whether a variant that was explored is as fast as another and holds as little, to within a share: its forms are, too."""
        alike = ((one <= seconds * (1 + gain) and held <= nbytes * (1 + gain)) for one, held in self.variants)
        return self.is_known and any(alike)
