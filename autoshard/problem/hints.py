"""Hints: what one search found out that helps the next, of the same program on another mesh or under another memory limit."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autoshard.inference.model import Messages
from autoshard.problem.domains import Label


@dataclass(frozen=True, slots=True, eq=False)
class Hints:
    """What is known before a search. No answer depends on hints for being legal, nor a bound for being one: they save time.

    Attributes:
        messages: what message passing moved between the tables of all axes, of the folded problem where there is one.
        price: seconds a byte at which answers kept the memory limit; 0.0: it does not bind, as far as is known.
        above: labels of a fast answer beyond the limit; None where there is none.
        worth: seconds a byte of what is alive at that one's peak, in the best bound found of answers within the limit.
        priced_messages: as `messages`, under that price.
        least: the least objective met on other meshes; what is no better is of little interest.
        near_tensor_parallel: whether tensor parallelism came near the best answer.
        start: labels, of the whole problem, from where a descent may begin; None where there are none.
    """

    messages: Messages = field(default_factory=dict)
    price: float = 0.0
    above: tuple[Label, ...] | None = None
    worth: float = 0.0
    priced_messages: Messages = field(default_factory=dict)
    least: float = math.inf
    near_tensor_parallel: bool = False
    start: tuple[Label, ...] | None = None


NO_HINTS = Hints()
