"""What a section of the benchmark found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from autoshard.render import Part


@dataclass(frozen=True, slots=True)
class Target:
    """A number to reach: what it is of, how it reads, the number found, and whether that is enough.

    >>> Target("median error", "<= 8 %", 5.25, 5.25 <= 8).row
    ('median error', '<= 8 %', '5.25', 'reached')
    """

    what: str
    wanted: str
    found: float
    reached: bool

    @property
    def row(self) -> tuple[str, str, str, str]:
        return self.what, self.wanted, f"{self.found:.4g}", "reached" if self.reached else "NOT reached"


@dataclass(frozen=True, slots=True)
class Findings:
    """One section's answer.

    Attributes:
        title: the question, in a few words.
        parts: tables and paragraphs, as `autoshard.render` has them.
        targets: the numbers that were to be reached.
        numbers: everything that was measured, as plain JSON values.
    """

    title: str
    parts: tuple[Part, ...]
    targets: tuple[Target, ...] = ()
    numbers: Mapping[str, Any] = field(default_factory=dict)


def quantile(values: Sequence[float], share: float) -> float:
    """The least value that so large a share of the values does not exceed; nan of none.

    >>> quantile([5, 1, 4, 2, 3], 0.8)
    4
    """
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else math.nan


def spearman(xs: Sequence[float], ys: Sequence[float]) -> float:
    """Spearman's rank correlation, ties sharing their mean rank; nan of fewer than two values, or equal ones.

    >>> round(spearman([1, 2, 3, 4], [10, 20, 40, 30]), 6)
    0.8
    """
    if len(set(xs)) < 2 or len(set(ys)) < 2:
        return math.nan
    return float(np.asarray(spearmanr(xs, ys))[0])
