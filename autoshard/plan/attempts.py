"""The attempts of one search: numbers of microbatches and recomputations, each searched on all meshes, and last what takes longest.

A searcher's last resort is not run in each attempt: where none finds anything within the memory limit, it is run once, on the attempts and
meshes that came nearest to the limit.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import ProgramFacts, program_facts
from autoshard.cost.record import Cost
from autoshard.errors import InfeasibleError, OutOfTime
from autoshard.ir import Mesh
from autoshard.ir.remat import Remat
from autoshard.mesh_search.anytime import Timed, timed
from autoshard.microbatch import divisors
from autoshard.options import OPTIONS
from autoshard.plan.exploring import Exploration
from autoshard.plan.forms import Estimates, Form, forms_of
from autoshard.plan.microbatching import AUTO, Microbatches
from autoshard.plan.notes import own_checkpoints
from autoshard.plan.offloading import check_offload
from autoshard.plan.plan import Plan
from autoshard.plan.prepared import RESERVE, Prepared, noted_if_barely, searched_on_meshes, within
from autoshard.plan.refusals import with_untried
from autoshard.problem import Hints, Problem
from autoshard.progress import Progress
from autoshard.recompute import Options, optimizer_state, without_checkpoints
from autoshard.render import format_bytes
from autoshard.rewrite import divisible
from autoshard.rules import rules_of
from autoshard.search import Searcher, Solution
from autoshard.search.integer_programming import LastResort
from autoshard.strategy import Tried
from autoshard.trace import Traced

Found = tuple[Prepared, Solution, Problem]
"""What an attempt found: the program and its meshes, the solution, and the problem of its mesh."""

Whole = tuple[Traced, ProgramFacts]
"""A step as it was traced, and its facts."""

PASSES = 3  # over gradients, that adding up those of one more microbatch takes: two reads and a write


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
    start: Plan | None
    reserves: bool
    progress: Progress
    ends: tuple[type[BaseException], ...]
    seconds: float | None
    n_finalists: int
    whole: Whole | None = None
    warm: Hints | None = None
    is_hurried: bool = field(default=False, init=False)  # whether a search found nothing in its share of the time
    mesh_of_first: Mesh | None = field(default=None, init=False)  # on which the step as it is is fastest; other forms are compared on it
    forms: dict[Form, tuple[Prepared, dict[Mesh, Problem]]] = field(default_factory=dict, init=False)  # each with its problems by mesh
    least: float = field(default=math.inf, init=False)  # objective found so far, in seconds; no attempt need find slower ones
    explorations: list[Exploration[Found]] = field(default_factory=list, init=False)

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
        best = self._form_of(prepared)
        notes = [*filter(None, (each.sentence(best) for each in self.explorations)), *own_checkpoints(self.asked.traced, self.remat)]
        others = tuple(replace(other, notes=(*other.notes, *notes)) for other in solution.others)
        return prepared, replace(solution, notes=(*solution.notes, *notes), others=others), problem

    def trail(self, prepared: Prepared) -> tuple[Tried, ...]:
        """The forms that were compared, of which one is taken."""
        best = self._form_of(prepared)
        return tuple(dict.fromkeys(chain(*(each.trail(best) for each in self.explorations))))

    def _form_of(self, prepared: Prepared) -> Form:
        return next(form for form, (own, _) in self.forms.items() if own.facts is prepared.facts)

    def _best(self) -> Found:
        try:
            return self._found()
        except InfeasibleError as error:
            if (last := self._by_last_resort()) is not None:
                return last
            if self.is_hurried and not error.proven:
                raise OutOfTime(self._too_short()) from None
            raise self._advised(error) from None
        except OutOfTime:
            raise OutOfTime(self._too_short()) from None

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
        n = self.first
        full = [each[-1] for each in self._options if each] if self.remat == "full" else [None]
        first = Form(n, next(iter(full), None), hosted[0])
        if not self._has_forms:
            return self._searched(first, True)

        def forms() -> list[Form]:
            numbers = [n, *divisors(divisible(self.asked.traced))] if self.microbatches in OPTIONS["microbatches"].words else [n]
            some = full if self.remat in (None, "full", "replace") else [None, *chain(*self._options)]
            return list(dict.fromkeys(forms_of(numbers, some, hosted)))

        how = {"search": self._searched, "solution": lambda each: each[1], "estimates": self._estimates}
        how |= {"limit": self._limit, "is_timed": self.seconds is not None, "is_again_needed": self.remat == "fit"}

        def explored(first: Form, forms: Callable[[], list[Form]]) -> Exploration[Found]:
            def always(fits: bool) -> list[Form]:
                more = AUTO if self.microbatches == "auto" else ()
                again = [] if fits and self.remat == "fit" else self._half_of_loops
                return [replace(first, microbatches=each) for each in more] + [replace(first, again=each) for each in again]

            return Exploration(first, forms, **how, always=always)

        self.explorations = [explored(first, forms)]
        if self.remat == "replace" and (anew := list(chain(*self._options))):
            self.explorations.append(explored(replace(first, again=anew[0]), lambda: forms_of([n], anew, hosted)))
        found, refused = list[Found](), list[InfeasibleError]()
        for way in self.explorations:
            try:
                found.append(way.best())
            except InfeasibleError as error:
                refused.append(error)
        if not found:
            raise min(refused, key=lambda error: error.smallest_peak_bytes or math.inf)
        return min(found, key=_seconds)

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
        peak, device, arguments = solution.judgement.peak, prepared.cluster.device, prepared.traced.graph.arguments
        held = dict(zip(peak.alive, peak.held, strict=True))
        replaced = {argument for _, argument in prepared.traced.graph.aliases} - {*self._state}
        gradients = sum(held.get(arguments[position], 0.0) for position in replaced)
        return Estimates(
            seconds=solution.judgement.cost.makespan_seconds,
            peak_bytes=peak.nbytes,
            of=form,
            fixed_bytes=sum(held.get(value, 0.0) for value in arguments),
            least_fixed_bytes=self._argument_bytes(),
            state_bytes=sum(held.get(arguments[position], 0.0) for position in self._state),
            adding_seconds=PASSES * gradients / device.memory_rate + _gathering_seconds(solution.judgement.cost),
            devices=problem.mesh.size,
            host_bytes_per_second=device.host_bandwidth_bytes_per_second,
        )

    def _argument_bytes(self) -> float:
        """The bytes of the arguments on a device, were each split over all."""
        graph, mesh = self.asked.traced.graph, self.asked.meshes[0]
        held = (graph.values[value] for value in graph.arguments if not graph.values[value].on_host)
        return sum(value.nbytes for value in held) / mesh.size

    @cached_property
    def _options(self) -> list[list[Remat]]:
        """The recomputations that there are, of the option's kind: with all that is kept on devices, and with some on hosts, as asked."""
        device = self.asked.cluster.device
        prepared = self.asked if self.first == 1 or self.whole is not None else self.ask(1, None, None, False)
        traced, facts = self.whole or (prepared.traced, prepared.facts)
        if self.remat == "replace":
            opened = without_checkpoints(traced)
            if opened is traced:
                return []
            traced, facts = opened, program_facts(opened.graph, rules_of(opened.graph), compiler_of(self.asked.cluster))
            facts = facts.corrected(self.asked.facts.corrections)
        kinds = {"activations": (True,), "auto": (False, True)}.get(self.offload or "", (False,))
        options = [Options(traced, facts, device, hosts) for hosts in kinds]
        found = [each.replaced if self.remat == "replace" else each.all for each in options]
        return [[replace(remat, mode=self.remat or "") for remat in each] for each in found]

    @cached_property
    def _half_of_loops(self) -> list[Remat]:
        """The recomputation that keeps about half of what loops keep; [] where there are no loops, or it is not asked for."""
        traced = self.asked.traced
        if self.remat not in ("fit", "auto") or traced.stages > 1 or not any(op.primitive == "scan" for op in traced.graph.walk()):
            return []
        loops = [each for each in chain(*self._options) if each.loops and not each.hosted_bytes]
        half = sum(each.kept_bytes + each.plain_bytes for each in loops[-1:]) / 2
        return sorted(loops, key=lambda each: abs(each.kept_bytes - half))[:1]

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

    def _share(self, left: float | None, limited: bool) -> float | None:
        """The seconds that one search may take of those that are left: what may not fit a third, and half where others follow."""
        return None if left is None else left / 3 if not limited else left / 2 if self._has_forms else left

    @property
    def _patience(self) -> float:
        """The share of its time after which a search that finds nothing ends: half of it where others may find something."""
        return 0.5 if self._has_forms else 1.0

    def _left(self) -> float | None:
        """The seconds that are left."""
        return None if self.seconds is None else max(0.0, self.seconds - (time.perf_counter() - self.started))

    def _searched(self, form: Form, limited: bool) -> Found:
        """What is found in a form, without the last resort.

        Args:
            limited: whether within the memory limit, or of whatever it holds.
        """
        seconds = self._left()
        if form != Form(self.first) and seconds is not None and seconds <= self.asked.seconds["trace_seconds"]:
            self.is_hurried = True
            raise OutOfTime(self._too_short())
        prepared, made = self._form(form)
        quick = self.searcher.without_last_resort()
        progress = timed(self.progress, self._share(seconds, limited), patience=self._patience)

        def refused(problem: Problem, error: InfeasibleError) -> None:
            self.last.refuse(problem.within(prepared.limit), error)

        how = {"refused": refused, "warm": self.warm, "made": made, "least": self.least}
        if self.mesh_of_first is not None and (not limited or self.least < math.inf):
            prepared = replace(prepared, meshes=(self.mesh_of_first,), most_axes=0)
        searched = partial(searched_on_meshes, prepared, quick, progress, self.ends, self.n_finalists, self.start, **how)
        if not limited:
            solution, problem = searched(math.inf)
            self.mesh_of_first = self.mesh_of_first or problem.mesh
            return self._free(prepared, solution, problem)
        try:
            solution, problem = within(prepared, searched, self.reserves, self.mesh)
        except InfeasibleError:
            self.is_hurried |= isinstance(progress, Timed) and progress.has_no_patience
            raise
        self.least = min(self.least, solution.judgement.cost.objective_seconds)
        return prepared, solution, problem

    def _form(self, form: Form) -> tuple[Prepared, dict[Mesh, Problem]]:
        """The program in a form, and its problems so far."""
        if form not in self.forms:
            is_first = form == Form(self.first)
            own = self.asked if is_first else self.ask(form.microbatches, form.again, self._whole, form.hosted)
            self.forms[form] = own, {}
        return self.forms[form]

    def _free(self, prepared: Prepared, solution: Solution, problem: Problem) -> Found:
        """What was found without a memory limit, of which what is beyond it is left out."""
        others = tuple(other for other in solution.others if other.judgement.cost.peak_bytes <= self._limit)
        if solution.judgement.cost.peak_bytes <= self._limit:
            self.least = min(self.least, solution.judgement.cost.objective_seconds)
        return prepared, replace(solution, others=others), problem.within(self._limit)

    def _by_last_resort(self) -> Found | None:
        """What the searcher's last resort finds, nearest to the limit first; None: nothing, or there is no time left."""
        if (found := self.last.found(self.progress, self._left())) is None:
            return None
        solution, problem = found
        prepared = next(one for one, _ in self.forms.values() if one.facts is problem.facts)
        return prepared, noted_if_barely(solution, prepared.limit) if self.reserves else solution, problem

    def _advised(self, error: InfeasibleError) -> InfeasibleError:
        """The refusal with what was not tried."""
        untried = [*(["microbatches='fit'"] if self.microbatches in (None, 1) else []), *(["remat='fit'"] if self.remat is None else [])]
        if self.offload is None and self.asked.cluster.device.host_bandwidth_bytes_per_second and self._state:
            untried.append("offload='auto'")
        if self.asked.traced.stages == 1:
            untried.append("pipelines (stages=2)")
        return with_untried(error, untried)


def _seconds(found: Found) -> float:
    """The predicted step time."""
    return found[1].judgement.cost.makespan_seconds


def _gathering_seconds(cost: Cost) -> float:
    """The seconds of gathers, of weights for instance, which each microbatch repeats."""
    sent = [(each.bytes * each.count, each.kind == "all_gather") for each in cost.collectives]
    total = sum(n for n, _ in sent)
    return cost.communication_seconds * sum(n for n, is_gather in sent if is_gather) / total if total else 0.0
