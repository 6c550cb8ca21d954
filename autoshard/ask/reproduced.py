"""Whether a saved strategy's figures are what its program costs today."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from autoshard.cost.record import Cost
from autoshard.plan.plan import Plan

TOLERANCE = 1e-9  # relative, of sums of a few thousand figures


def differences(strategy: Plan, fn: Callable[..., Any], *args: Any) -> list[str]:
    """What of a strategy's predicted cost is another one today, in words; empty where everything is reproduced.

    Args:
        strategy: from a file.
        fn, args: its program; arrays may be `jax.ShapeDtypeStruct`.

    Raises:
        StrategyError: the program is another one, or the strategy does not fit it.
    """
    judged = strategy.with_program(fn, *args)._judged
    if judged is None:
        return []
    then, now = strategy.record.cost, judged.judgement.cost
    figures = [field.name for field in fields(Cost) if isinstance(getattr(then, field.name), float)]
    found = [
        f"{name} was {getattr(then, name):.12g} and is {getattr(now, name):.12g}"
        for name in figures
        if not math.isclose(getattr(then, name), getattr(now, name), rel_tol=TOLERANCE)
    ]
    if [(each.kind, each.bytes, each.count) for each in then.collectives] != [
        (each.kind, each.bytes, each.count) for each in now.collectives
    ]:
        found.append(f"there were {len(then.collectives)} collectives and are {len(now.collectives)}, or others")
    return found
