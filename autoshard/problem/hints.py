"""Hints: the warm start that one search of a program leaves for the next, on another mesh or under another memory limit."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from autoshard.cost.record import Cost
from autoshard.inference.model import Messages
from autoshard.problem.domains import Label


@dataclass(frozen=True, slots=True, eq=False)
class Hints:
    """Knowledge from earlier searches, which saves time: any hints leave answers legal and bounds valid.

    Attributes:
        messages: of message passing over the tables with all axes free, of the quotient problem where there is one.
        price: seconds a byte at which answers kept the memory limit; 0.0: it is not known to bind.
        above: labels of a fast answer beyond the limit; None: none is known.
        worth: the multiplier, in seconds a byte live at the peak of `above`, of the best Lagrangian dual bound.
        priced_messages: as `messages`, with bytes charged at `worth`.
        least: the least objective found on other meshes, in seconds; answers that are no better need no tight bound.
        near_tensor_parallel: whether the makespan of tensor parallelism was near the best one.
        far: of a portfolio's baselines those that were far from the best answer on another mesh, by their numbers: into how many parts the
            batch was split there, and their cost.
        start: labels of the whole problem at which a descent may start; None: there are none.
    """

    messages: Messages = field(default_factory=dict)
    price: float = 0.0
    above: tuple[Label, ...] | None = None
    worth: float = 0.0
    priced_messages: Messages = field(default_factory=dict)
    least: float = math.inf
    near_tensor_parallel: bool = False
    far: Mapping[int, tuple[int, Cost]] = field(default_factory=dict)
    start: tuple[Label, ...] | None = None


NO_HINTS = Hints()
