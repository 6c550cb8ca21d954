"""What a search leaves for the next question about its program: the facts, the tables and a warm start."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.compilers.program_facts import ProgramFacts
from autoshard.problem import NO_HINTS, Hints, Problem


@dataclass(frozen=True, slots=True, eq=False)
class Searched:
    """What was computed for a strategy and serves other searches of its program; none of it is saved.

    Attributes:
        facts: of the program.
        problem: that of the strategy's mesh, with the tables that are made by now; None where nothing was searched.
        hints: of its search.
    """

    facts: ProgramFacts
    problem: Problem | None = None
    hints: Hints = NO_HINTS
