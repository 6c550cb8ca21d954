"""Which forms of a step are searched: numbers of microbatches, recomputations, and what is in the memory of hosts.

The fastest strategy of the step as it is, whatever it holds, is found first. Each other form is estimated from it: the time of what runs
again and of what each microbatch repeats, the bytes of what is not kept. The form that promises to be fastest of those that may fit is
searched next, again of whatever it holds, and so on, as long as one promises to be faster than what was found; each answer corrects the
estimates. So nothing else is searched where the step as it is fits. Two things are faster than estimates promise, so that one form more is
searched for each: what a loop keeps is copied, and may take less time to compute again, so that half of that is kept as long as this is
faster; and smaller arrays may be in fast memory, so that the next larger number of microbatches is tried where several are best. Where
nothing fits, what keeps least is searched. At last the forms whose fastest strategies are faster, but hold too much, are searched within
the limit: that takes longest, and gains least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from autoshard.budgets import BUDGETS
from autoshard.errors import InfeasibleError, NothingFasterError, OutOfTime, SearchLimitError, TraceError
from autoshard.mesh_search.equality import EQUAL, Figures, simplest_first
from autoshard.plan.forms import Estimates, Form
from autoshard.plan.incumbent import Incumbent
from autoshard.plan.refusals import refused_in_all
from autoshard.render import format_bytes, format_seconds
from autoshard.search import Solution
from autoshard.strategy import Tried

TRIES = 4  # of forms beside the first, of whatever they hold
PRICED = 2  # of forms within the limit, where some strategy was found and not every form that may be faster is searched
MOST_TRIES = 8  # where none was
MOST_TOLD = 12  # of forms that were not searched, in what is recorded
LEFT = "not searched"
NOTHING_FASTER = "no form of this variant promises to be faster than what was found of another. Use that one."

Found = TypeVar("Found")


@dataclass(slots=True)
class Exploration(Generic[Found]):
    """The search of the forms of one step.

    Attributes:
        first: the form in which nothing is done that memory does not ask for.
        others: makes the other forms.
        search: searches one, within the memory limit or of whatever it holds. It raises `InfeasibleError` where nothing fits,
            `NothingFasterError` where nothing is faster than what is known, `TraceError` or `SearchLimitError` where there is no such form.
        solution: of what a search finds.
        estimates: from what a search of a form finds.
        limit: bytes that a device may hold.
        pair_error: the share by which predicted ratios of two plans' times are off.
        always: makes the forms that are searched first whatever they promise, of whether the first form fits.
        also: those that are searched after what promises most, so that nothing is slower than without them.
        is_again_needed: whether nothing is computed again where the first form fits.
        is_timed: whether a search ends since its share of the time is over.
        is_thorough: whether every form that may be faster, by however little, is searched within the limit, whatever it takes.
        incumbent: what was found of all variants, which has to be beaten.
        free: by form what was found without a limit.
        found: by form what was found that fits.
        refused: by form the smallest peak of what was found where nothing fits.
        reason: why there are no microbatches, if there are none.
        estimated: by form its step time and peak as they were estimated when it was searched; at last, those of forms that were not, too.
        why: by form why nothing is known of it, for another reason than its estimate.
    """

    first: Form
    others: Callable[[], Sequence[Form]]
    search: Callable[[Form, bool], Found]
    solution: Callable[[Found], Solution]
    estimates: Callable[[Form, Found], Estimates]
    limit: float
    always: Callable[[bool], Sequence[Form]] = lambda fits: ()
    also: Sequence[Form] = ()
    is_again_needed: bool = False
    is_timed: bool = False
    is_thorough: bool = False
    pair_error: float = 0.0
    incumbent: Incumbent = field(default_factory=Incumbent)
    free: dict[Form, Found] = field(default_factory=dict)
    found: dict[Form, Found] = field(default_factory=dict)
    refused: dict[Form, float] = field(default_factory=dict)
    reason: str = ""
    estimated: dict[Form, tuple[float, float]] = field(default_factory=dict)
    why: dict[Form, str] = field(default_factory=dict)

    def best(self) -> Found:
        """The fastest that is found.

        Raises:
            InfeasibleError: nothing fits in any form; says which were tried.
        """
        free = self.search(self.first, False)
        is_early = bool(self.solution(free).stats.get("ended_early"))
        always = self.always(self._fits(free))
        if self._fits(free):
            self.found[self.first] = self.free[self.first] = free
            if is_early or not (always or self.also):
                return self._improved(free) if is_early and self.is_timed else free
        else:
            self._check_worth(free, bool(always or self.also))
        self.free[self.first] = free
        forms, estimates = [form for form in self.others() if form != self.first], self.estimates(self.first, free)
        failure = None
        try:
            if not is_early:
                promising = [*forms]
                estimates = self._explore(promising, estimates, always, TRIES)
                also = [*self.also, *([] if self.found or self.incumbent.is_known else self._leanest(forms))]
                estimates = self._explore([form for form in forms if self._is_left(form)], estimates, also, 0)
                forms = [form for form in promising if self._is_left(form)]
            failure = self._within_the_limit()
            if not self.found and not self.incumbent.is_known:
                estimates = estimates.within(self.refused.get(self.first, math.inf))
                for form, peak in self.refused.items():
                    estimates = estimates.with_peak(form, peak) if form != self.first and math.isfinite(peak) else estimates
                self._must(forms, estimates)
        except OutOfTime:
            if not self.found:
                raise
        if not self.found:
            if failure is None:
                raise NothingFasterError(NOTHING_FASTER)
            raise failure if isinstance(failure, NothingFasterError) else refused_in_all(failure, self.first, self.refused, self.reason)
        return self._fastest()

    def _fastest(self) -> Found:
        """The fastest that was found; of equal ones the simplest form."""
        forms = [*self.found]
        if self.is_again_needed and self.first in self.found:
            forms = [form for form in forms if form.again == self.first.again]
        return self.found[simplest_first(forms, self.pair_error, self._figures, self.incumbent.makespan_seconds)[0]]

    def _figures(self, form: Form) -> Figures:
        cost = self.solution(self.found[form]).judgement.cost
        return cost, (form.microbatches, form.again is not None, form.hosted)

    def _improved(self, found: Found) -> Found:
        """The better of what was found in a part of the time, and what is found in the rest of it."""
        try:
            return min(found, self.search(self.first, True), key=self._seconds)
        except (InfeasibleError, OutOfTime):
            return found

    def _check_worth(self, free: Found, more: bool) -> None:
        """Raises `NothingFasterError` where no form of what was found, whatever it holds, promises to beat another variant's.

        Args:
            more: whether other forms are searched whatever they promise.
        """
        seconds, peak = self._seconds(free), self._peak(free)
        is_explored = not self.is_thorough and self.incumbent.is_explored(seconds, peak, BUDGETS.least_gain)
        if is_explored or (not more and not self._is_worth(seconds, self.incumbent.makespan_seconds)):
            raise NothingFasterError(NOTHING_FASTER)
        self.incumbent.variants.append((seconds, peak))

    def _is_left(self, form: Form) -> bool:
        return form not in self.free and form not in self.why

    def _fits(self, found: Found) -> bool:
        return self._peak(found) <= self.limit

    def _explore(self, forms: list[Form], estimates: Estimates, always: Sequence[Form], tries: int) -> Estimates:
        """Searches the forms that are always searched and some that promise most, of whatever they hold; the estimates since."""
        every, always = [self.first, *forms], [form for form in always if form in forms]
        for _ in range(tries + len(always)):
            wanted = [form for form in always if form in forms] or self._alone(forms, estimates)
            form = wanted[0] if wanted else self._next(forms, estimates, every)
            if form is None:
                break
            forms.remove(form)
            self._note([form], estimates)
            try:
                found = self.free[form] = self.search(form, False)
            except NothingFasterError:
                self.why[form] = "slower"
                continue
            except OutOfTime:
                self.why[form] = f"{LEFT}: no time was left"
                break
            except (SearchLimitError, TraceError) as error:
                self._leave_out(form, error, forms)
                continue
            if self._fits(found):
                self.found[form] = found
            estimates = estimates.with_peak(form, self._peak(found)).corrected(form, self._seconds(found))
            self._note(forms, estimates)
        return estimates

    def _alone(self, forms: Sequence[Form], estimates: Estimates) -> list[Form]:
        """The fewest microbatches that may fit without anything else, where none were searched.

        Of forms in which things are combined it is not known which of them takes longer than estimated.
        """
        if any(form.is_divided(self.first) for form in (*self.free, *self.why)):
            return []
        alone = [form for form in forms if form.is_divided(self.first) and estimates.peak(form) <= self.limit]
        return [min(alone, key=lambda form: form.microbatches)] if alone else []

    def _next(self, forms: list[Form], estimates: Estimates, every: Sequence[Form]) -> Form | None:
        """The form that is worth a search most; None: no one is.

        Args:
            forms: those that are left, of which some are taken out that are not worth one.
            every: those that there are.
        """
        fit = [form for form in forms if estimates.peak(form) <= self.limit]
        if faster := [form for form in fit if self._is_worth(estimates.time(form), self._least())]:
            return min(faster, key=estimates.time)
        if self.found:
            best = min(self.found, key=lambda form: self._seconds(self.found[form]))
            if best.microbatches == self.first.microbatches:
                return self._keeping_less(best, fit)
            alike = [form for form in every if (form.again, form.hosted) == (best.again, best.hosted)]
            more = min((form for form in alike if form.microbatches > best.microbatches), key=lambda form: form.microbatches, default=None)
            return more if more in fit else None
        leanest = self._leanest(forms)
        forms[:] = [form for form in forms if form.microbatches != self.first.microbatches or form in leanest]
        return next(iter(leanest), None)

    def _keeping_less(self, best: Form, forms: Sequence[Form]) -> Form | None:
        """Where recomputation saves time, the form that keeps about half of what the best does, unless one that keeps less was searched."""
        if best == self.first or self._seconds(self.found[best]) >= self._seconds(self.free[self.first]):
            return None
        alike = [form for form in (*forms, *self.free) if (form.microbatches, form.hosted) == (best.microbatches, best.hosted)]
        less = [form for form in alike if form.kept < best.kept]
        is_new = less and not any(form in self.free for form in less)
        return min(less, key=lambda form: abs(form.kept - best.kept / 2)) if is_new else None

    def _leanest(self, forms: Sequence[Form]) -> list[Form]:
        """The form in the first number of microbatches that holds least, of which a strategy may be nearly as fast within the limit."""
        same = [form for form in forms if form.microbatches == self.first.microbatches]
        return [min(same, key=lambda form: (form.kept, not form.hosted))] if same else []

    def _note(self, forms: Iterable[Form], estimates: Estimates) -> None:
        self.estimated.update((form, (estimates.time(form), estimates.peak(form))) for form in forms)

    def _within_the_limit(self) -> InfeasibleError | None:
        """Searches what would be faster within the limit, that first which has least to save for what it may gain.

        Where something was found, that is one form, and another if its share of bytes to save is no larger than that of time to gain. What
        is searched before anything was found is for having something that fits: it holds least, and may be far from the fastest.

        Returns:
            the error of the first form, if it has one.
        """
        failure, tried, compared = None, 0, 0
        left = {form: self.free[form] for form in self.free if form not in self.found}
        while faster := [form for form, found in left.items() if self._is_worth(self._seconds(found), self._least())]:
            form = min(faster, key=lambda form: (self._effort(left[form]), self._peak(left[form])))
            if self.found and not self.is_thorough and (compared >= PRICED or (tried and self._effort(left[form]) > 1)):
                break
            del left[form]
            tried, compared = tried + 1, compared + bool(self.found)
            error = self._priced(form)
            failure = error if form == self.first else failure
        return failure

    def _effort(self, free: Found) -> float:
        """The share of bytes that an answer has to save to fit, for each of the time by which it is faster than what fits."""
        return (self._peak(free) / self.limit - 1) / (self._least() / self._seconds(free) - 1)

    def _priced(self, form: Form) -> InfeasibleError | None:
        try:
            self.found[form] = self.search(form, True)
        except InfeasibleError as error:
            if not isinstance(error, NothingFasterError):
                self.refused[form] = error.smallest_peak_bytes or math.inf
            return error
        return None

    def _must(self, forms: Sequence[Form], estimates: Estimates) -> None:
        """Searches forms within the limit until something fits: first what promises to, then the fastest of what holds about the least."""
        left = list(forms)
        for _ in range(MOST_TRIES):
            left = [form for form in left if not any(other.holds_less(form) for other in self.refused)]
            if not left:
                return
            most = max(self.limit, min(map(estimates.peak, left)) * (1 + BUDGETS.least_gain))
            form = min((form for form in left if estimates.peak(form) <= most), key=estimates.time)
            left.remove(form)
            self._note([form, *left], estimates)
            try:
                self._priced(form)
            except OutOfTime:
                raise
            except (SearchLimitError, TraceError) as error:
                self._leave_out(form, error, left)
                continue
            if self.found:
                return
            if math.isfinite(peak := self.refused.get(form, math.inf)):
                estimates = estimates.with_peak(form, peak)

    def _leave_out(self, form: Form, error: Exception, forms: list[Form]) -> None:
        """Leaves the forms out that there cannot be since there is no such form, which an error says."""
        self.why |= dict.fromkeys((form, *(each for each in forms if not each.is_simpler(form))), "there is no such form")
        forms[:] = [each for each in forms if each.is_simpler(form)]
        if form.microbatches > 1 and form.again == self.first.again and isinstance(error, TraceError):
            self.reason = str(error)

    def _is_worth(self, seconds: float, least: float) -> bool:
        """Whether a search is that promises so many seconds, where others take ``least``."""
        return seconds < (least if self.is_thorough else least * (1 - BUDGETS.least_gain))

    def _least(self) -> float:
        return min([self.incumbent.makespan_seconds, *map(self._seconds, self.found.values())])

    def _peak(self, found: Found) -> float:
        return self.solution(found).judgement.cost.peak_bytes

    def _seconds(self, found: Found) -> float:
        return self.solution(found).judgement.cost.makespan_seconds

    def merged(self, others: Iterable[Exploration[Found]]) -> Exploration[Found]:
        """This exploration with what others found, of each form the fastest."""
        together = replace(self, free={}, found={}, refused={}, estimated={}, why={})
        for each in (self, *others):
            for ours, theirs in ((together.free, each.free), (together.found, each.found)):
                ours |= {form: one for form, one in theirs.items() if form not in ours or self._seconds(one) < self._seconds(ours[form])}
            together.refused |= each.refused
            together.estimated |= each.estimated
            together.why |= each.why
        return together

    def trail(self, best: Form) -> tuple[Tried, ...]:
        """The forms that were compared, fastest first, of those that were not searched the most promising; () if it was the first alone.

        Args:
            best: the one that is taken.
        """
        if not self.estimated:
            return ()
        told = [self._told(form, best) for form in dict.fromkeys((self.first, *self.estimated))]
        told.sort(key=lambda each: (each.seconds or math.inf, each.estimated_seconds or math.inf))
        left = [each for each in told if each.outcome.startswith(LEFT)]
        return tuple(each for each in told if each not in left[MOST_TOLD:])

    def _told(self, form: Form, best: Form) -> Tried:
        found, estimate = self.found.get(form, self.free.get(form)), self.estimated.get(form, (None, None))
        figures = (None, self.refused.get(form)) if found is None else (self._seconds(found), self._peak(found))
        return Tried(str(form), "taken" if form == best else self._outcome(form, best), *estimate, *figures)

    def _outcome(self, form: Form, best: Form) -> str:
        if form in self.found:
            return EQUAL if best in self.found and self._seconds(self.found[form]) < self._seconds(self.found[best]) else "slower"
        if form in self.free or form in self.refused:
            return "does not fit"
        if form in self.why:
            return self.why[form]
        seconds, nbytes = self.estimated[form]
        if nbytes > self.limit:
            return f"{LEFT}: estimated not to fit"
        return f"{LEFT}: others promised more" if self._is_worth(seconds, self._least()) else f"{LEFT}: estimated to be slower"

    def sentence(self, best: Form) -> str:
        """What was compared, and which one won, in one sentence; empty if it was the first form alone."""
        forms = dict.fromkeys((self.first, *self.estimated))
        if len(forms) == 1:
            return ""
        numbers = sorted({form.microbatches for form in forms})
        what = f"{numbers[0]} to {numbers[-1]} microbatches" if len(numbers) > 1 else str(Form(numbers[0]))
        ways = {form.again is None for form in forms}
        what += "" if ways == {True} else " with and without recomputation" if len(ways) > 1 else " with recomputation"
        on_hosts = any(form.hosted or (form.again is not None and form.again.hosted_bytes) for form in forms)
        what += ", with and without arrays on hosts" if on_hosts else ""
        is_equal = best in self.found and any(self._outcome(form, best) == EQUAL for form in self.found if form != best)
        how = "the simplest of those equal to the fastest within the model's error," if is_equal else "fastest"
        n = sum(form in self.found or form in self.free or form in self.refused for form in forms)
        text = f"compared {what}, {n} of {len(forms)} forms by a search: {best} is {how} within {format_bytes(self.limit)}"
        return f"{text}{self._others(best)}"

    def _others(self, best: Form) -> str:
        """What comes next, and what is faster and does not fit, in words."""
        after = min((form for form in self.found if form != best), key=lambda form: self._seconds(self.found[form]), default=None)
        least = min(self.free, key=lambda form: self._seconds(self.free[form]), default=None)
        text = "" if after is None else f", before {after} with {format_seconds(self._seconds(self.found[after]))}"
        if least is None or least in self.found or best not in self.found:
            return text
        free = self.free[least]
        return f"{text}; {least}, which holds {format_bytes(self._peak(free))}, would take {format_seconds(self._seconds(free))}"
