"""What functions that are searched for at their first call have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from autoshard.ask.strategy import Strategy
from autoshard.errors import StrategyError
from autoshard.run.step import Sharded
from autoshard.trace import function_name


class SearchedAtCall(Sharded):
    """A function that is searched for at its first call, and then runs sharded."""

    _fn: Callable[..., Any]
    _latest: Strategy | None

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
