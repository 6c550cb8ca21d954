"""What every searcher is: a frozen value with one method to call, and what others have to know of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import Parameter, signature
from typing import Any, ClassVar

from autoshard.ir import Assignment
from autoshard.judge.evaluate import Judgement
from autoshard.problem import NO_HINTS, Hints, Problem
from autoshard.progress import Progress, silent


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """What a searcher found.

    Attributes:
        judgement: the layouts and choices, and what the judge says of them.
        lower_bound_seconds: proven lower bound of the objective over all assignments of the mesh; 0.0 where nothing is proven.
        stats: what the search took: counts and seconds by name.
        notes: what the user should know of it, in words.
        least_seconds: the least objective met of what fits the memory limit, where the answer is another since its makespan is less.
        finder: the name of the searcher whose answer it is, where that is not the one that was asked.
        others: what else was found on the way and fits the memory limit, on this mesh or on others, fastest first.
        hints: what the next search of the program may begin with: what this one was given, and what it found out.
    """

    judgement: Judgement
    lower_bound_seconds: float = 0.0
    stats: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    least_seconds: float = float("inf")
    finder: str = ""
    others: tuple[Solution, ...] = ()
    hints: Hints = NO_HINTS

    @property
    def assignment(self) -> Assignment:
        return self.judgement.assignment


class Searcher(ABC):
    """An algorithm that assigns a problem.

    Laws, for every searcher and problem: the assignment is legal and honours the pins; its judged peak is within the memory limit, or
    `InfeasibleError` names the smallest peak found; the lower bound is at most the objective; equal problems with equal hints get equal
    answers; the problem stays as it was, and the solution's hints hold what the given ones held where nothing better was found out.

    Attributes:
        name: as in the table of searchers.
        automatic: whether the answer must be at least as good as data parallel, by the judge.
        differs_by_mesh: whether a baseline's answers differ from one mesh of as many devices to the next, so that each is worth a look.
        uses_exposed_shares: whether it is worth asking again with each collective charged the share of its seconds that nothing hides.
        includes_baselines: whether the baselines' answers are among its solution and the others.
    """

    __slots__ = ()

    name: ClassVar[str]
    automatic: ClassVar[bool] = False
    differs_by_mesh: ClassVar[bool] = False
    uses_exposed_shares: ClassVar[bool] = False
    includes_baselines: ClassVar[bool] = False

    @abstractmethod
    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The assignment that is found."""

    def limited(self, seconds: float) -> Searcher:
        """The searcher with so many seconds at most; itself where its progress callback is called often enough to end it."""
        return self

    def solve_cut_mesh(self, problem: Problem, hints: Hints) -> Solution | None:
        """What is worth a look on a mesh where bounds say that no objective is worth a search; nothing unless hints speak for it."""
        return None


class AdaptedSearcher(Searcher):
    """A value of the user's own with a ``solve(problem)`` method, which may take progress and hints as well.

    Attributes:
        searcher: the value.
    """

    __slots__ = ("automatic", "name", "searcher")

    def __init__(self, searcher: Any):
        self.searcher = searcher
        self.name = str(getattr(searcher, "name", type(searcher).__name__))  # pyright: ignore[reportAttributeAccessIssue]
        self.automatic = bool(getattr(searcher, "automatic", False))  # pyright: ignore[reportAttributeAccessIssue]

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        kinds = [one.kind for one in signature(self.searcher.solve).parameters.values()]
        positional = sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
        n_taken = 3 if Parameter.VAR_POSITIONAL in kinds else positional
        return self.searcher.solve(*(problem, progress, hints)[:n_taken])
