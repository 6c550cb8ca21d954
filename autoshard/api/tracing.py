"""A function that several searches share the trace of."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from autoshard.compilers import Compiler
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.trace import Traced


class TracedOnce:
    """A function that is always searched with the same arguments, and is traced once for all of these searches.

    `search` takes it in place of the function, which is its ``__wrapped__``.
    """

    def __init__(self, fn: Callable):
        self.__wrapped__ = fn
        self._traces: dict[Hashable, Traced] = {}
        self._facts: list[tuple[Traced, Compiler, ProgramFacts]] = []

    def __call__(self, *args: Any) -> Any:
        return self.__wrapped__(*args)

    def traced(self, options: Hashable, make: Callable[[], Traced]) -> Traced:
        """The trace with these options, made if there is none yet."""
        if options not in self._traces:
            self._traces[options] = make()
        return self._traces[options]

    def facts(self, traced: Traced, compiler: Compiler, make: Callable[[], ProgramFacts]) -> ProgramFacts:
        """The facts of such a trace for a compiler, made if there are none yet."""
        for one, other, facts in self._facts:
            if one is traced and other == compiler:
                return facts
        self._facts.append((traced, compiler, make()))
        return self._facts[-1][-1]
