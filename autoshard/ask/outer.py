"""Functions that run on loosely coupled slices: searched for one slice at their first call, then each slice for itself with exchanges."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax

from autoshard.ask.searched_at_call import SearchedAtCall
from autoshard.ask.strategy import Strategy
from autoshard.errors import ShardingError, StrategyError
from autoshard.plan.outer import OuterPlan, checked, planned
from autoshard.plan.request import Request
from autoshard.progress import Progress
from autoshard.run.diloco import DiLoCo, OuterState
from autoshard.run.outer_step import OuterStep, is_copied
from autoshard.run.sharded import call_type
from autoshard.run.step import platform_options
from autoshard.trace import function_name, held

RUNNING = ("devices", "compiler_options", "bucket_bytes")
"""The options of `Strategy.apply` that it takes."""


class LooselyCoupled(SearchedAtCall):
    """A function that is searched for on one slice, and runs on all of them, each with a state of its own (`autoshard.run.diloco`).

    It is called as the function is written, with a batch for all slices. The argument with the parameters comes back as an `OuterState`,
    other state with a first dimension of slices, and so does everything else that the function returns.
    """

    def __init__(self, fn: Callable, request: Request, progress: Progress | bool, running: Mapping[str, Any], outer: DiLoCo | str):
        if wrong := [name for name, value in running.items() if value is not None and name not in RUNNING]:
            raise ShardingError(f"of the ways to run a step one with outer= takes {', '.join(RUNNING)}, got {wrong[0]}=. Leave it out.")
        super().__init__(fn, checked(request), progress, running)
        self._diloco = DiLoCo.of(outer)

    def search(self, *args: Any, **kwargs: Any) -> Strategy:
        """The strategy for arguments like these, arrays or abstract, with a batch for all slices; devices are not needed."""
        return self._planned(held(self._fn, self._ordered(args, kwargs))).strategy

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._called(lambda step, args: step(*args), args, kwargs)

    def start(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        """The arguments as they are before the first step: a copy of the state for each slice, such as to restore a checkpoint like it."""
        return self._called(lambda step, args: step.start(*args), args, kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> jax.stages.Lowered:
        """The lowered program for arguments like these, arrays or abstract, as `jax.jit(fn).lower` gives it."""
        return self._called(lambda step, _: step.lower(), args, kwargs)

    def _called(self, what: Callable[[OuterStep, tuple], Any], args: tuple, kwargs: Mapping[str, Any]) -> Any:
        args = held(self._fn, self._ordered(args, kwargs))
        found = self._planned(args)
        if found.step is None:
            devices, options = self._running.get("devices"), dict(self._running.get("compiler_options") or {})
            platform = (jax.devices() if devices is None else devices)[0].platform
            options = {**platform_options(platform, self._running.get("bucket_bytes")), **options}
            known = found.strategy.record, found.strategy._traced
            found.step = OuterStep(self._fn, found.outer.args, *known, found.outer.division, self._diloco, devices, options)
        return what(found.step, args)

    def _planned(self, args: tuple) -> _Found:
        given = self._as_written(args)
        key = call_type(given)
        if key not in self._found:
            outer = planned(self._fn, given, self._request, self._diloco, self._progress)
            self._found[key] = _Found(Strategy.of(outer.plan), outer)
        self._latest = self._found[key].strategy
        return self._found[key]

    def _as_written(self, args: tuple) -> tuple:
        """The arguments as the function is written for them: state without the dimension of slices.

        Raises:
            StrategyError: an outer state is not where it comes back.
        """
        if not any(isinstance(x, OuterState) for x in args):
            return args
        leaves, tree = jax.tree.flatten(tuple(x.inner if isinstance(x, OuterState) else x for x in args))
        for key, found in self._found.items():
            division, types = found.outer.division, jax.tree.leaves(found.outer.args)
            if len(types) == len(leaves) and isinstance(args[division.holder], OuterState):
                own = zip(leaves, types, division.has_copies, strict=True)
                given = tree.unflatten([kind if copies and is_copied(x, kind.shape, division.n) else x for x, kind, copies in own])
                if call_type(given) == key:
                    return given
        raise StrategyError(
            f"{function_name(self._fn)} goes on from a state that it or its .start returned, beside arguments of the same shapes, "
            "and this outer state is neither. Call .start(*args) with the state as the step is written for it, and restore one like it."
        )


@dataclass(slots=True, eq=False)
class _Found:
    """A strategy, what is planned of the slices, and the step that runs so once there was a call."""

    strategy: Strategy
    outer: OuterPlan
    step: OuterStep | None = None
