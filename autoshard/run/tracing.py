"""A function that several searches share the trace of, rewritten or as it is."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

from autoshard.compilers import Compiler
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.ir.rewrites import Rewrite, variant
from autoshard.rewrite import rewritten
from autoshard.trace import Traced


class TracedOnce:
    """A function that is always searched with the same arguments, and is traced once for all of these searches.

    `search` takes it in place of the function, which is its ``__wrapped__``.

    Attributes:
        fn: the function; None of a part of one, whose trace is known.
        rewrites: what its program is rewritten by.
        known: its trace, rewritten, and the facts of that, from an earlier search; None: it is traced.
    """

    def __init__(self, fn: Callable[..., Any] | None, rewrites: tuple[Rewrite, ...] = (), known: tuple[Traced, ProgramFacts] | None = None):
        self.__wrapped__: Any = fn
        self.rewrites = rewrites
        self.known = known
        self._traces: dict[Hashable, Traced] = {}
        self._facts = [] if known is None else [known]

    def __call__(self, *args: Any) -> Any:
        return self.__wrapped__(*args)

    @property
    def alone(self) -> Callable[..., Any]:
        """The function without its traces, for other arguments, and in no form."""
        own = variant(self.rewrites)
        return TracedOnce(self.__wrapped__, own) if own else self.__wrapped__

    def rewritten(self, rewrites: tuple[Rewrite, ...]) -> TracedOnce:
        """The function whose program is rewritten, which shares the trace; itself where it is rewritten so already."""
        if rewrites == self.rewrites:
            return self
        other = TracedOnce(self.__wrapped__, rewrites)
        other._traces = self._traces
        return other

    def traced(self, options: Hashable, make: Callable[[], Traced]) -> Traced:
        """The trace with these options, rewritten, made if there is none yet."""
        if self.known is not None:
            return self.known[0]
        for n in range(len(self.rewrites) + 1):
            key = options, self.rewrites[:n]
            if key not in self._traces:
                self._traces[key] = rewritten(self._traces[options, self.rewrites[: n - 1]], self.rewrites[:n]) if n else make()
        return self._traces[options, self.rewrites]

    def facts(self, traced: Traced, compiler: Compiler, make: Callable[[], ProgramFacts]) -> ProgramFacts:
        """The facts of such a trace for a compiler, made if there are none yet."""
        for one, facts in self._facts:
            if one is traced and facts.compiler == compiler:
                return facts
        self._facts.append((traced, make()))
        return self._facts[-1][-1]
