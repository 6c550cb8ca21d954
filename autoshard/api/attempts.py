"""The attempts of one search: numbers of microbatches and recomputations, each searched on all meshes, and last what takes longest.

A searcher's last resort is not run in each attempt: where none finds anything within the memory limit, it is run once, on the attempts and
meshes that came nearest to the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from typing import Any

from autoshard.api.microbatching import Microbatches, best
from autoshard.api.notes import own_checkpoints
from autoshard.api.offloading import Hosted, best_offload, check_offload, kinds_of
from autoshard.api.prepared import Prepared, noted_if_barely, searched_on_meshes, within
from autoshard.api.recomputing import AGAIN, best_remat, least_remat
from autoshard.api.refusals import or_refused, with_untried
from autoshard.api.strategy import Strategy
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import ProgramFacts, program_facts
from autoshard.errors import InfeasibleError, NothingFasterError, OutOfTime, SearchLimitError
from autoshard.ir.remat import Remat
from autoshard.mesh_search.anytime import Timed, timed
from autoshard.microbatch import divisors
from autoshard.problem import Hints, Problem
from autoshard.progress import Progress
from autoshard.recompute import Options, optimizer_state, without_checkpoints
from autoshard.render import format_bytes
from autoshard.rewrite import divisible
from autoshard.rules import rules_of
from autoshard.search import Searcher, Solution
from autoshard.search.integer_programming import LastResort
from autoshard.trace import Traced

Found = tuple[Prepared, Solution, Problem]
"""What an attempt found: the program and its meshes, the solution, and the problem of its mesh."""

Whole = tuple[Traced, ProgramFacts]
"""A step as it was traced, and its facts."""


@dataclass(eq=False)
class Attempts:
    """The attempts of one search.

    Attributes:
        ask: from a number of microbatches, a recomputation, the step as traced without either, and whether optimizer state is in the
            memory of hosts, to what is searched.
        searcher, microbatches, remat, offload, mesh, start: as in `autoshard.search`.
        reserves: whether a part of the limit is left free, if anything fits that.
        progress: a callback.
        ends: the exceptions that end a search early.
        seconds: how long to search, from the making of this on; None: without a limit.
        n_finalists: how many distinct solutions are wanted.
        whole: the step as it was traced, and its facts, where `ask` rewrites it beyond that; None: `ask` gives it in one microbatch.
        warm: as for `searched_on_meshes`.
    """

    ask: Callable[[int, Remat | None, Traced | None, bool], Prepared]
    searcher: Searcher
    microbatches: Microbatches
    remat: str | None
    offload: str | None
    mesh: Any
    start: Strategy | None
    reserves: bool
    progress: Progress
    ends: tuple[type[BaseException], ...]
    seconds: float | None
    n_finalists: int
    whole: Whole | None = None
    warm: Hints | None = None
    prepared: dict[int, Prepared] = field(default_factory=dict, init=False)  # by the identities of their facts
    is_hurried: bool = field(default=False, init=False)  # whether a search found nothing in its share of the time
    least: float = field(default=math.inf, init=False)  # objective found so far, in seconds; no attempt need find slower ones

    def __post_init__(self):
        self.first = self.microbatches if isinstance(self.microbatches, int) else 1
        self.asked = self.ask(self.first, None, None if self.whole is None else self.whole[0], False)
        check_offload(self.offload, self.asked.cluster, self.asked.traced)
        self.last = LastResort(self.searcher.last_resort)
        self.started = time.perf_counter()

    def found(self) -> Found:
        """The best that is found, with a note on what was left as it is.

        Raises:
            InfeasibleError: nothing fits the memory limit; says what was not tried.
        """
        prepared, solution, problem = self._best()
        notes = own_checkpoints(self.asked.traced, self.remat)
        others = tuple(replace(other, notes=(*other.notes, *notes)) for other in solution.others)
        return prepared, replace(solution, notes=(*solution.notes, *notes), others=others), problem

    def _best(self) -> Found:
        try:
            return best_offload(self._found, self.offload, lambda: kinds_of(self.asked.traced, self.remat))
        except InfeasibleError as error:
            if (last := self._by_last_resort()) is not None:
                return last
            if self.is_hurried and not error.proven:
                raise OutOfTime(self._too_short()) from None
            raise self._advised(error) from None

    def _found(self, hosted: Hosted) -> Found:
        """The best that is found with some kinds of values on hosts, without the last resort."""
        if "optimizer" not in hosted and (alone := self._argument_bytes()) > self.asked.limit:
            try:
                return self._searched(False, self.first, None)
            except InfeasibleError as error:
                text = f"{error} The arguments alone, split over all devices, take {format_bytes(alone)}, whatever else is tried."
                raise InfeasibleError(text, error.smallest_peak_bytes, error.proven) from None
        fixed = 0.0 if "optimizer" in hosted else self._argument_bytes()
        parts = partial(divisors, divisible(self.asked.traced))
        numbers = partial(best, microbatches=self.microbatches, limit=self.asked.limit, numbers=parts, fixed_bytes=fixed)
        searched, options = partial(self._searched, "optimizer" in hosted), self._options["activations" in hosted]
        try:
            return numbers(lambda n: best_remat(partial(searched, n), self.remat, options))
        except InfeasibleError as error:
            if self.remat != "fit":
                raise
            return or_refused(error, lambda: numbers(lambda n: least_remat(partial(searched, n), options)), AGAIN)

    def _argument_bytes(self) -> float:
        """The bytes of the arguments on a device, were each split over all."""
        graph, mesh = self.asked.traced.graph, self.asked.meshes[0]
        held = (graph.values[value] for value in graph.arguments if not graph.values[value].on_host)
        return sum(value.nbytes for value in held) / mesh.size

    @cached_property
    def _options(self) -> tuple[Callable[[], Sequence[Remat]], Callable[[], Sequence[Remat]]]:
        """The recomputations that there are: all on devices, and with what may be on hosts."""

        @cache
        def options(hosts: bool) -> Sequence[Remat]:
            device = self.asked.cluster.device
            prepared = self.asked if self.first == 1 or self.whole is not None else self.ask(1, None, None, False)
            traced, facts = self.whole or (prepared.traced, prepared.facts)
            if self.remat != "replace":
                return Options(traced, facts, device, hosts).all
            opened = without_checkpoints(traced)
            if opened is traced:
                return ()
            facts = program_facts(opened.graph, rules_of(opened.graph), compiler_of(self.asked.cluster))
            return Options(opened, facts, device, hosts).replaced

        return partial(options, False), partial(options, True)

    @property
    def _whole(self) -> Traced | None:
        """The step as it was traced, if that is known."""
        if self.whole is not None:
            return self.whole[0]
        return self.asked.traced if self.first == 1 else None

    def _too_short(self) -> str:
        return (
            f"the search was given {self.seconds:g} s, in which it found no strategy within the memory limit, and not all numbers of "
            "microbatches and recomputations could be searched. Use a longer time_limit_seconds, or a number of microbatches."
        )

    def _share(self, left: float | None) -> float | None:
        """The seconds that one search may take: half of what is left where others follow whatever it finds."""
        follow = "auto" in (self.microbatches, self.remat, self.offload) or self.remat == "replace"
        return left / 2 if left is not None and follow else left

    @property
    def _patience(self) -> float:
        """The share of its time after which a search that finds nothing ends: half of it where others may find something."""
        return 1.0 if self.microbatches != "fit" and self.remat in (None, "full") and self.offload != "auto" else 0.5

    def _left(self) -> float | None:
        """The seconds that are left."""
        return None if self.seconds is None else max(0.0, self.seconds - (time.perf_counter() - self.started))

    def _searched(self, on_host: bool, n: int, again: Remat | None) -> Found:
        """What is found in so many microbatches with a recomputation, without the last resort."""
        is_first = n == self.first and again is None and not on_host
        again = None if again is None else replace(again, mode=self.remat or "")
        if not is_first and (left := self._left()) is not None and left <= self.asked.seconds["trace_seconds"]:
            self.is_hurried = True
            raise OutOfTime(self._too_short())
        prepared = self.asked if is_first else self.ask(n, again, self._whole, on_host)
        quick = self.searcher.without_last_resort()
        progress = timed(self.progress, self._share(self.seconds if is_first else self._left()), patience=self._patience)

        def refused(problem: Problem, error: InfeasibleError) -> None:
            self.prepared[id(prepared.facts)] = prepared
            self.last.refuse(problem.within(prepared.limit), error)

        how = {"refused": refused, "warm": self.warm, "least": self.least, "made": {}}
        searched = partial(searched_on_meshes, prepared, quick, progress, self.ends, self.n_finalists, self.start, **how)
        try:
            solution, problem = within(prepared, searched, self.reserves, self.mesh)
        except InfeasibleError as error:
            if is_first and isinstance(error, NothingFasterError) and error.proven:  # nor is anything in parts, or computed again
                raise SearchLimitError(str(error)) from None
            self.is_hurried |= isinstance(progress, Timed) and progress.has_no_patience
            raise
        self.least = min(self.least, solution.judgement.cost.objective_seconds)
        return prepared, solution, problem

    def _by_last_resort(self) -> Found | None:
        """What the searcher's last resort finds, nearest to the limit first; None: nothing, or there is no time left."""
        if (found := self.last.found(self.progress, self._left())) is None:
            return None
        solution, problem = found
        prepared = self.prepared[id(problem.facts)]
        return prepared, noted_if_barely(solution, prepared.limit) if self.reserves else solution, problem

    def _advised(self, error: InfeasibleError) -> InfeasibleError:
        """The refusal with what was not tried."""
        untried = [*(["microbatches='fit'"] if self.microbatches in (None, 1) else []), *(["remat='fit'"] if self.remat is None else [])]
        if self.offload is None and self.asked.cluster.device.host_bandwidth_bytes_per_second and optimizer_state(self.asked.traced):
            untried.append("offload='auto'")
        if self.asked.traced.stages == 1:
            untried.append("pipelines (stages=2)")
        return with_untried(error, untried)
