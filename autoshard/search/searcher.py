"""The interface of searchers: a frozen value with a `solve` method, and the facts about it that portfolios and mesh searches read."""

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
    """The answer of a search.

    Attributes:
        judgement: the assignment with the judge's figures of it.
        lower_bound_seconds: proven lower bound of the objective over all assignments of the mesh; 0.0: nothing is proven.
        stats: counts and seconds of the search, by name.
        notes: remarks for the user.
        least_seconds: the least objective found within the memory limit, where the answer has a greater one and a smaller makespan.
        finder: the name of the searcher whose answer it is, where a portfolio or a baseline's comparison chose it.
        others: other answers within the memory limit, on this mesh or on others, fastest first.
        hints: the warm start of the next search of the program: the given hints, improved.
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
    """An algorithm that finds an assignment of a problem.

    Laws, for every searcher and problem: the assignment is legal and honours the pins; its judged peak is within the memory limit, or
    `InfeasibleError` names the smallest peak found; the lower bound is at most the objective; equal problems with equal hints get equal
    answers; the problem stays as it was; the solution's hints are the given ones, but for those that the search improved.

    Attributes:
        name: as in the table of searchers.
        automatic: whether the answer must be at least as good as data parallelism, by the judge.
        differs_by_mesh: whether a baseline's answers differ between meshes of equally many devices, so that each mesh is worth a look.
        uses_exposed_shares: whether a second search is worthwhile that charges each kind of collective the exposed share of its seconds.
        includes_baselines: whether the baselines' answers are among the solution and its others.
        last_resort: what it runs where nothing else is found within the memory limit, which takes long; None: there is nothing. A search
            over several problems runs it once for all of them.
    """

    __slots__ = ()

    name: ClassVar[str]
    automatic: ClassVar[bool] = False
    differs_by_mesh: ClassVar[bool] = False
    uses_exposed_shares: ClassVar[bool] = False
    includes_baselines: ClassVar[bool] = False
    last_resort: ClassVar[Searcher | None] = None

    @abstractmethod
    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        """The best assignment that the algorithm finds."""

    def limited(self, seconds: float) -> Searcher:
        """The searcher with a time limit of its own; itself where its progress callback is called often enough to end it."""
        return self

    def for_other_forms(self, hints: Hints) -> Searcher:
        """The searcher for another form of a program of which one was searched, with the hints of that search."""
        return self

    def without_last_resort(self) -> Searcher:
        """The searcher without its last resort."""
        return self

    def solve_again(self, problem: Problem, progress: Progress, hints: Hints) -> Solution | None:
        """The answer of what `solve` left out because it takes long, called where nothing within the memory limit is found on any mesh.

        None: nothing was left out.
        """
        return None

    def solve_cut_mesh(self, problem: Problem, hints: Hints) -> Solution | None:
        """A quick answer on a mesh whose lower bound rules out a search, if its makespan may still be the least; None: there is none."""
        return None


class AdaptedSearcher(Searcher):
    """A searcher from any value with a ``solve(problem)`` method, which may take progress and hints as well.

    Attributes:
        searcher: the value.
    """

    __slots__ = ("automatic", "name", "searcher")

    def __init__(self, searcher: Any):
        self.searcher: Any = searcher
        self.name = str(getattr(searcher, "name", type(searcher).__name__))  # pyright: ignore[reportAttributeAccessIssue]
        self.automatic = bool(getattr(searcher, "automatic", False))  # pyright: ignore[reportAttributeAccessIssue]

    def solve(self, problem: Problem, progress: Progress = silent, hints: Hints = NO_HINTS) -> Solution:
        kinds = [one.kind for one in signature(self.searcher.solve).parameters.values()]
        positional = sum(kind in (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD) for kind in kinds)
        n_taken = 3 if Parameter.VAR_POSITIONAL in kinds else positional
        return self.searcher.solve(*(problem, progress, hints)[:n_taken])
