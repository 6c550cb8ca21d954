"""The first call of a step on devices: what XLA says of its memory, and the search that follows where it does not fit."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax.core import Tracer

from autoshard.ask.strategy import Strategy
from autoshard.errors import InfeasibleError
from autoshard.plan.confirm import noted
from autoshard.plan.prepared import within_less
from autoshard.plan.request import Request
from autoshard.plan.searching import answered
from autoshard.progress import Progress
from autoshard.render import format_bytes
from autoshard.run.step import Step
from autoshard.verify import peak_bytes_of, refused_bytes

# Of the memory limit: what is predicted to need less is not asked for its memory before it runs; few compiled peaks are twice the predicted
# one (docs/predictions.md).
LOOKED_AT = 0.5
LESS = 0.8  # of what was predicted of a step that ran out of memory, where nobody says how much it needs
EXHAUSTED = "RESOURCE_EXHAUSTED"


@dataclass(frozen=True, slots=True)
class Refused:
    """A step that does not fit its devices: the bytes that it needs on one, and those that there are; None where nobody says."""

    needed_bytes: float | None = None
    available_bytes: float | None = None


def refusal(strategy: Strategy, step: Step, args: tuple[Any, ...]) -> Refused | None:
    """What the compiler says against a step before it runs; None where it fits, or is not near the limit.

    The call that follows takes what is compiled here from JAX's cache.
    """
    record = strategy.record
    limit = record.limit_bytes
    if record.pipeline is not None or record.cost.peak_bytes <= LOOKED_AT * limit:
        return None
    try:
        needed = peak_bytes_of(step.lower(*args).compile())
    except jax.errors.JaxRuntimeError as error:
        return exhausted(error)
    return None if needed is None or needed <= limit else Refused(needed, limit)


def exhausted(error: Exception) -> Refused | None:
    """What an error says of memory; None where it is of another kind."""
    return Refused(*(refused_bytes(str(error)) or ())) if EXHAUSTED in str(error) else None


def searched_again(
    fn: Callable[..., Any], args: tuple[Any, ...], request: Request, progress: Progress | bool, before: Strategy, refused: Refused
) -> Strategy | None:
    """The strategy within the memory that leaves the compiler what it took more than predicted, with a warning; None where there is none.

    Args:
        fn, args, request, progress: the search's.
        before: the strategy that was refused.
    """
    limit, peak = before.record.limit_bytes, before.cost.peak_bytes
    if refused.needed_bytes is None or refused.available_bytes is None:
        within, needs = peak * LESS, "more memory than there is"
    else:
        within = within_less(min(limit, refused.available_bytes), peak, refused.needed_bytes)
        needs = f"{format_bytes(refused.needed_bytes)} of {format_bytes(refused.available_bytes)}"
    why = f"XLA needs {needs} a device, where {format_bytes(peak)} were predicted"
    try:
        found = answered(fn, args, replace(request, memory_limit_bytes=within), progress)
    except InfeasibleError:
        return None
    warnings.warn(f"{before.record.program.name} is searched again, within {format_bytes(within)} of predicted peak: {why}.", stacklevel=5)
    return Strategy.of(noted(found, f"searched again on devices, within {format_bytes(within)} of predicted peak: {why}"))


def is_whole(args: Any) -> bool:
    """Whether no array of the arguments was used up."""
    return not any(isinstance(x, jax.Array) and not isinstance(x, Tracer) and x.is_deleted() for x in jax.tree.leaves(args))
