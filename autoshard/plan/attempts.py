"""The attempts of one search: numbers of microbatches and recomputations, each searched on all meshes, and last what takes longest.

A searcher's last resort is not run in each attempt: where none finds anything within the memory limit, it is run once, on the attempts and
meshes that came nearest to the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from autoshard.budgets import BUDGETS
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.errors import InfeasibleError, NothingFasterError, OutOfTime, SearchLimitError, ShardingError, TraceError
from autoshard.ir import Mesh
from autoshard.ir.remat import Remat
from autoshard.mesh_search.anytime import Timed, timed
from autoshard.microbatch import divisors
from autoshard.options import OPTIONS
from autoshard.plan.answers import Answers, Ways
from autoshard.plan.estimating import estimates_of
from autoshard.plan.exploring import Exploration
from autoshard.plan.forms import PLAIN, Estimates, Form, forms_of
from autoshard.plan.incumbent import Incumbent
from autoshard.plan.microbatching import AUTO, Microbatches
from autoshard.plan.notes import own_checkpoints
from autoshard.plan.offloading import check_offload
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import RESERVE, Prepared, noted_if_barely, searched_on_meshes, within
from autoshard.plan.recomputing import half_of_loops, recomputations
from autoshard.plan.refusals import too_short, with_untried
from autoshard.problem import Hints, Problem
from autoshard.progress import Progress
from autoshard.recompute import optimizer_state
from autoshard.render import format_bytes
from autoshard.rewrite import divisible
from autoshard.search import Searcher, Solution
from autoshard.search.integer_programming import LastResort
from autoshard.strategy import Tried
from autoshard.trace import Traced

Found = tuple[Prepared, Solution, Problem]
"""What an attempt found: the program and its meshes, the solution, and the problem of its mesh."""

Whole = tuple[Traced, ProgramFacts]
"""A step as it was traced, and its facts."""


@dataclass(eq=False)
class Attempts:
    """The attempts of one search.

    Attributes:
        ask: from a form, and the step as it was traced, to what is searched.
        searcher, microbatches, remat, offload, mesh, start: as in `autoshard.search`.
        reserves: whether a part of the limit is left free, if anything fits that.
        progress: a callback.
        ends: the exceptions that end a search early.
        seconds: how long to search, from the making of this on; None: without a limit.
        n_finalists: how many distinct solutions are wanted.
        whole: the step as it was traced, and its facts, where `ask` rewrites it beyond that; None: `ask` gives it in one microbatch.
        warm: as for `searched_on_meshes`.
        is_full: whether what is found is no slower than what each number of microbatches and each recomputation finds by itself.
        incumbent: what other variants have found.
    """

    ask: Callable[[Form, Traced | None], Prepared]
    searcher: Searcher
    microbatches: Microbatches
    remat: str | None
    offload: str | None
    mesh: Any
    start: Plan | None
    reserves: bool
    progress: Progress
    ends: tuple[type[BaseException], ...]
    seconds: float | None
    n_finalists: int
    whole: Whole | None = None
    warm: Hints | None = None
    is_full: bool = False
    incumbent: Incumbent = field(default_factory=Incumbent)
    is_hurried: bool = field(default=False, init=False)  # whether a search found nothing in its share of the time
    first_found: dict[Form, tuple[Mesh, Hints]] = field(default_factory=dict, init=False)  # by first form its fastest mesh, and its hints
    forms: dict[Form, tuple[Prepared, dict[Mesh, Problem]]] = field(default_factory=dict, init=False)  # each with its problems by mesh
    explorations: list[Exploration[Found]] = field(default_factory=list, init=False)
    answers: Answers[Found] = field(default_factory=Answers, init=False)

    def __post_init__(self) -> None:
        self.first: int = self.microbatches if isinstance(self.microbatches, int) else 1
        self.asked: Prepared = self.ask(Form(self.first), None if self.whole is None else self.whole[0])
        check_offload(self.offload, self.asked.cluster, self.asked.traced)
        self.last: LastResort = LastResort(self.searcher.last_resort)
        self.started: float = time.perf_counter()

    def found(self) -> Found:
        """The best that is found, with a note on what was left as it is.

        Raises:
            InfeasibleError: nothing fits the memory limit; says what was not tried.
        """
        prepared, solution, problem = self._best()
        best = self._form_of(prepared)
        notes = [*filter(None, (each.sentence(best) for each in self._told)), *own_checkpoints(self.asked.traced, self.remat)]
        others = tuple(replace(other, notes=(*other.notes, *notes)) for other in solution.others)
        return prepared, replace(solution, notes=(*solution.notes, *notes), others=others), problem

    def trail(self, prepared: Prepared) -> tuple[Tried, ...]:
        """The forms that were compared, of which one is taken."""
        return tuple(dict.fromkeys(chain(*(each.trail(self._form_of(prepared)) for each in self._told))))

    @property
    def _told(self) -> list[Exploration[Found]]:
        """The explorations that are told, those of a full plan as one."""
        return [self.explorations[0].merged(self.explorations[1:])] if self.is_full and self.explorations else self.explorations

    def _form_of(self, prepared: Prepared) -> Form:
        return next(form for form, (own, _) in self.forms.items() if own.facts is prepared.facts)

    def _best(self) -> Found:
        try:
            return self._found()
        except InfeasibleError as error:
            if (last := self._by_last_resort()) is not None:
                return last
            if self.is_hurried and not error.proven:
                return self._at_the_end()
            raise self._advised(error) from None
        except OutOfTime:
            return self._at_the_end()

    def _at_the_end(self) -> Found:
        """What a baseline finds where the time is over and nothing was found: in the fastest form that is estimated to fit, or the leanest.

        Raises:
            OutOfTime: none fits.
        """
        forms: list[Form] = []
        for each in self.explorations:
            if each.first in each.free:
                others, least = [*each.others()], each.refused.get(each.first, math.inf)
                estimates = self._estimates(each.first, each.free[each.first]).within(least)  # state split over all devices
                fit = [form for form in others if estimates.peak(form) <= self._limit]
                forms += [*([min(fit, key=estimates.time)] if fit else []), min(others, key=estimates.peak)]
        for form in dict.fromkeys(forms):
            with suppress(InfeasibleError, ShardingError, SearchLimitError, TraceError):
                return self._searched(form, True, is_last=True)
        raise too_short(self.seconds) from None

    def _found(self) -> Found:
        """The best that is found in any form that was asked for, without the last resort."""
        hosted = (self.offload == "optimizer", *([True] if self.offload == "auto" and self._state else []))
        if not hosted[-1] and (alone := self._argument_bytes()) > self.asked.limit:
            try:
                return self._searched(Form(self.first), True)
            except InfeasibleError as error:
                text = f"{error} The arguments alone, split over all devices, take {format_bytes(alone)}, whatever else is tried."
                raise InfeasibleError(text, error.smallest_peak_bytes, error.proven) from None
        return self._explored(hosted)

    def _explored(self, hosted: Sequence[bool]) -> Found:
        """The best of the forms that were asked for."""
        full = [each[-1] for each in self._options if each] if self.remat == "full" else [None]
        first = Form(self.first, next(iter(full), None), hosted[0])
        if not self._has_forms:
            return self._searched(first, True)
        found, failures = list[Found](), list[InfeasibleError]()
        for way in self._explorations(first, full, hosted):
            self.explorations.append(way)
            try:
                found.append(way.best())
            except InfeasibleError as error:
                failures.append(error)
            except (OutOfTime, SearchLimitError, TraceError, ShardingError):
                if not found:
                    raise
            if self.is_full and self.seconds is None and found and found[-1][1].stats.get("ended_early"):
                break
        if not found:
            raise min(failures, key=lambda error: error.smallest_peak_bytes or math.inf)
        return min(found, key=_seconds)

    def _explorations(self, first: Form, full: Sequence[Remat | None], hosted: Sequence[bool]) -> Iterator[Exploration[Found]]:
        """What is explored, one after the other: forms from the first one on, with other checkpoints, or from what options fix alone."""
        how = {"solution": lambda each: each[1], "estimates": self._estimates, "limit": self._limit, "is_timed": self.seconds is not None}
        how |= {"pair_error": self.asked.cluster.device.pair_error, "incumbent": self.incumbent}

        def forms() -> list[Form]:
            more = divisors(divisible(self.asked.traced)) if self.microbatches in OPTIONS["microbatches"].words else ()
            some = full if self.remat in (None, "full", "replace") else [None, *chain(*self._options)]
            return list(dict.fromkeys(forms_of([self.first, *more], some, hosted)))

        def explored(first: Form, forms: Callable[[], list[Form]], start: Form, remat: str | None, **more: Any) -> Exploration[Found]:
            def always(fits: bool) -> list[Form]:
                return [replace(first, again=each) for each in ([] if fits and remat == "fit" else self._half_of_loops)]

            search = partial(self._searched, start=start)
            return Exploration(first, forms, search, **how, always=always, is_again_needed=remat == "fit", **more)

        start = Form(self.first)
        few = [replace(first, microbatches=each) for each in (AUTO if self.microbatches == "auto" else ())]
        most = [replace(first, again=each[-1]) for each in (self._options if self.remat == "auto" else ()) if each]
        if self.is_full:
            yield explored(first, forms, start, "fit")
        yield explored(first, forms, start, self.remat, also=[*few, *most], is_thorough=self.is_full)
        if self.remat == "replace" and (anew := list(chain(*self._options))):
            yield explored(replace(first, again=anew[0]), lambda: forms_of([self.first], anew, hosted), start, self.remat)
        for own in [*few, *most] if self.is_full else ():
            alike = [each for each in forms() if own in (replace(each, again=own.again), replace(each, microbatches=own.microbatches))]
            if own in alike:
                yield explored(own, lambda alike=alike: alike, own, "auto", is_thorough=True)

    @property
    def _limit(self) -> float:
        """Bytes that a device may hold, without the reserve."""
        return self.asked.limit * (1 - RESERVE) if self.reserves else self.asked.limit

    @property
    def _has_forms(self) -> bool:
        """Whether there may be several forms of the step to choose from."""
        return self.microbatches in ("fit", "auto") or self.remat in ("fit", "auto", "replace") or self.offload == "auto"

    @cached_property
    def _state(self) -> tuple[int, ...]:
        """The arguments that are optimizer state."""
        return optimizer_state(self.asked.traced)

    def _estimates(self, form: Form, found: Found) -> Estimates:
        """Estimates of other forms from what was found in one."""
        prepared, solution, problem = found
        return estimates_of(form, prepared, solution.judgement, problem.mesh.size, self._state, self._argument_bytes())

    def _argument_bytes(self) -> float:
        """The bytes of the arguments on a device, were each split over all."""
        graph, mesh = self.asked.traced.graph, self.asked.meshes[0]
        held = (graph.values[value] for value in graph.arguments if not graph.values[value].on_host)
        return sum(value.nbytes for value in held) / mesh.size

    @cached_property
    def _options(self) -> list[list[Remat]]:
        """The recomputations that there are, of the option's kind: with all that is kept on devices, and with some on hosts, as asked."""
        prepared = self.asked if self.first == 1 or self.whole is not None else self.ask(PLAIN, None)
        traced, facts = self.whole or (prepared.traced, prepared.facts)
        kinds = {"activations": (True,), "auto": (False, True)}.get(self.offload or "", (False,))
        found = [recomputations(traced, facts, self.asked.cluster, self.remat, hosts) for hosts in kinds]
        return [[replace(remat, mode=self.remat or "") for remat in each] for each in found]

    @cached_property
    def _half_of_loops(self) -> list[Remat]:
        """The recomputation that keeps about half of what loops keep; [] where there are no loops, or it is not asked for."""
        is_asked = self.remat in ("fit", "auto") and self.asked.traced.stages == 1
        return half_of_loops(self.asked.traced, chain(*self._options)) if is_asked else []

    @property
    def _whole(self) -> Traced | None:
        """The step as it was traced, if that is known."""
        if self.whole is not None:
            return self.whole[0]
        return self.asked.traced if self.first == 1 else None

    def _share(self, left: float | None, limited: bool) -> float | None:
        """The seconds that one search may take of those that are left: what may not fit a third, and half where others follow."""
        return None if left is None else left / 3 if not limited else left / 2 if self._has_forms else left

    @property
    def _least(self) -> float:
        """The objective from which on a search is cut; of a full plan those go on that gain little, too."""
        return self.incumbent.bound_seconds / ((1 - BUDGETS.least_gain) if self.is_full else 1)

    def _left(self) -> float | None:
        """The seconds that are left."""
        return None if self.seconds is None else max(0.0, self.seconds - (time.perf_counter() - self.started))

    def _searched(self, form: Form, limited: bool, is_last: bool = False, start: Form | None = None) -> Found:
        """What is found in a form, without the last resort; what was asked before is answered as it was.

        Args:
            limited: whether within the memory limit, or of whatever it holds.
            is_last: whether it is searched though the time is over.
            start: the form that is searched on all meshes, of which the best serves others; None: the first.
        """
        start = start or Form(self.first)
        ways = self._ways(start, form, limited)
        if not self.is_full or is_last:
            return self._answer(start, form, limited, ways, is_last)
        try:
            return self.answers.once(form, limited, ways, lambda: self._answer(start, form, limited, ways))
        except NothingFasterError:
            if form != start or limited or (found := self.answers.elsewhere(form)) is None:
                raise
            self.first_found.setdefault(start, (found[2].mesh, found[1].hints))  # its other forms may be faster there
            return found

    def _answer(self, start: Form, form: Form, limited: bool, ways: Ways, is_last: bool = False) -> Found:
        seconds = self._left()
        if not is_last and form != Form(self.first) and seconds is not None and seconds <= self.asked.seconds["trace_seconds"]:
            self.is_hurried = True
            raise too_short(self.seconds)
        own, made = self._form(form)
        patience = 0.5 if self._has_forms else 1.0  # a search that finds nothing ends after half its time where others may find something
        progress, failure = timed(self.progress, self._share(seconds, limited), patience=patience), None

        def refused(problem: Problem, error: InfeasibleError) -> None:
            self.last.refuse(problem.within(own.limit), error)

        how = {"refused": refused, "warm": self.warm, "made": made, "least": self._least}
        for searcher, mesh in ways:
            prepared = self._everywhere(start, own) if mesh is None else replace(own, meshes=(mesh,), most_axes=0)
            searched = partial(searched_on_meshes, prepared, searcher, progress, self.ends, self.n_finalists, self.start, **how)
            if not limited:
                return self._free(start, prepared, *searched(math.inf))
            try:
                solution, problem = within(prepared, searched, self.reserves, self.mesh)
            except InfeasibleError as error:
                self.is_hurried |= isinstance(progress, Timed) and progress.has_no_patience
                failure = error
                continue
            self._keep(solution)
            return prepared, solution, problem
        assert failure is not None
        raise failure

    def _ways(self, start: Form, form: Form, limited: bool) -> Ways:
        """The searchers and the meshes with which a form is searched.

        To compare other forms the best mesh of the first one is enough; where nothing fits there they are searched on all.
        """
        everything = self.searcher.without_last_resort(), None
        if start not in self.first_found:
            return (everything,)
        mesh, hints = self.first_found[start]
        if form == start:
            is_here = not limited or (self.incumbent.is_known and start == Form(self.first))
            return ((everything[0], mesh) if is_here else everything,)
        one = everything[0].for_other_forms(hints), mesh
        return (one,) if self.incumbent.is_known or not limited else (one, everything)

    def _everywhere(self, start: Form, prepared: Prepared) -> Prepared:
        """A form on all meshes, and on that to which the search of the first form of all led, whose descent is not done once more."""
        first = Form(self.first)
        if start == first or first not in self.first_found:
            return prepared
        mesh, _ = self.first_found[first]
        return replace(prepared, meshes=tuple(dict.fromkeys((*prepared.meshes, mesh))), most_axes=0)

    def _form(self, form: Form) -> tuple[Prepared, dict[Mesh, Problem]]:
        """The program in a form, and its problems so far."""
        if form not in self.forms:
            is_first = form == Form(self.first)
            own = self.asked if is_first else self.ask(form, self._whole)
            self.forms[form] = own, {}
        return self.forms[form]

    def _free(self, start: Form, prepared: Prepared, solution: Solution, problem: Problem) -> Found:
        """What was found without a memory limit, of which what is beyond it is left out."""
        self.first_found.setdefault(start, (problem.mesh, solution.hints))
        others = tuple(other for other in solution.others if other.judgement.cost.peak_bytes <= self._limit)
        solution = replace(solution, others=others)
        self.incumbent.see(solution.judgement.cost)
        if solution.judgement.cost.peak_bytes <= self._limit:
            self._keep(solution)
        return prepared, solution, problem.within(self._limit)

    def _keep(self, solution: Solution) -> None:
        """Remembers what fits: a simpler plan may come before a faster one."""
        for each in (solution, *solution.others):
            self.incumbent.add(each.judgement.cost)

    def _by_last_resort(self) -> Found | None:
        """What the searcher's last resort finds, nearest to the limit first; None: nothing, or there is no time left."""
        if (found := self.last.found(self.progress, self._left())) is None:
            return None
        solution, problem = found
        prepared = next(one for one, _ in self.forms.values() if one.facts is problem.facts)
        return prepared, noted_if_barely(solution, prepared.limit) if self.reserves else solution, problem

    def _advised(self, error: InfeasibleError) -> InfeasibleError:
        """The refusal with what was not tried."""
        may_offload = self.offload is None and self.asked.cluster.device.host_bandwidth_bytes_per_second and self._state
        others = {
            "microbatches='fit'": self.microbatches in (None, 1),
            "remat='fit'": self.remat is None,
            "offload='auto'": may_offload,
            "pipelines (stages=2)": self.asked.traced.stages == 1,
        }
        return with_untried(error, [words for words, is_untried in others.items() if is_untried])


def _seconds(found: Found) -> float:
    """The predicted step time."""
    return found[1].judgement.cost.makespan_seconds
