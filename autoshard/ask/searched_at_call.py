"""What functions that are searched for at their first call have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from autoshard.ask.strategy import Strategy
from autoshard.errors import StrategyError
from autoshard.plan.request import Request
from autoshard.progress import Progress
from autoshard.run.sharded import Positional, Sharded, several
from autoshard.trace import function_name


class SearchedAtCall(Sharded):
    """A function that is searched for at its first call, and then runs sharded."""

    def __init__(self, fn: Callable[..., Any], request: Request, progress: Progress | bool, running: Mapping[str, Any]):
        """``running`` has the options of `Strategy.apply`."""
        functools.update_wrapper(self, fn, updated=())  # pyright: ignore[reportArgumentType] subclasses are called
        self._fn, self._ordered = fn, Positional(fn)
        self._request, self._progress, self._running = request, progress, running
        self.donate_argnums: tuple[int, ...] = several(request.donate_argnums)
        self._found: dict[Any, Any] = {}  # by the type of a call what was found for it
        self._latest: Strategy | None = None

    @property
    def strategy(self) -> Strategy:
        """The strategy of the latest search; on loosely coupled slices that of one, with the costs of exchanges per step in the mean.

        Raises:
            StrategyError: nothing has been searched yet.
        """
        if self._latest is None:
            raise StrategyError(
                f"{function_name(self._fn)} has a strategy once it was called, or after its .search(*args). Call one of them."
            )
        return self._latest
