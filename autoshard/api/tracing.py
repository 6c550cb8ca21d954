"""A function that several searches share the trace of."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from autoshard.trace import Traced


class TracedOnce:
    """A function that is always searched with the same arguments, and is traced once for all of these searches.

    `search` takes it in place of the function, which is its ``__wrapped__``.
    """

    def __init__(self, fn: Callable):
        self.__wrapped__ = fn
        self._traces: dict[Hashable, Traced] = {}

    def __call__(self, *args: Any) -> Any:
        return self.__wrapped__(*args)

    def traced(self, options: Hashable, make: Callable[[], Traced]) -> Traced:
        """The trace with these options, made if there is none yet."""
        if options not in self._traces:
            self._traces[options] = make()
        return self._traces[options]
