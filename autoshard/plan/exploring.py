"""Which forms of a step are searched: numbers of microbatches, recomputations, and what is in the memory of hosts.

The fastest strategy of the step as it is, whatever it holds, is found first. Each other form is estimated from it: the time of what runs
again and of what each microbatch repeats, the bytes of what is not kept. The form that promises to be fastest of those that may fit is
searched next, again of whatever it holds, and so on, as long as one promises to be faster than what was found; each answer corrects the
estimates. So nothing else is searched where the step as it is fits. Two things are faster than estimates promise, so that one form more is
searched for each: what a loop keeps is copied, and may take less time to compute again; and smaller arrays may be in fast memory, so that
the next larger number of microbatches is tried where several are best. At last the forms whose fastest strategies are faster, but hold too
much, are searched within the limit: that takes longest, and gains least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from autoshard.errors import InfeasibleError, NothingFasterError, OutOfTime, SearchLimitError, TraceError
from autoshard.plan.forms import Estimates, Form
from autoshard.plan.refusals import AGAIN
from autoshard.render import format_bytes
from autoshard.search import Solution
from autoshard.strategy import Tried

TRIES = 4  # of forms beside the first, of whatever they hold
PRICED = 2  # of forms within the limit, where some strategy was found
MOST_TRIES = 8  # where none was
GAIN = 0.01  # of the time of what was found, that another form must promise


Found = TypeVar("Found")
Found_co = TypeVar("Found_co", covariant=True)


class Search(Protocol[Found_co]):
    """The search of a form, within the memory limit or of whatever it holds.

    It raises `InfeasibleError` where nothing fits, `NothingFasterError` where nothing is faster than what was found before, and
    `TraceError` and `SearchLimitError` where there is no such form.
    """

    def __call__(self, form: Form, limited: bool, /) -> Found_co: ...


@dataclass(slots=True)
class Exploration(Generic[Found]):
    """The search of the forms of one step.

    Attributes:
        first: the form in which nothing is done that memory does not ask for.
        others: makes the other forms.
        search: searches one.
        solution: of what a search finds.
        estimates: from what a search of a form finds.
        limit: bytes that a device may hold.
        always: makes the forms that are searched whatever they promise, of whether the first form fits.
        is_again_needed: whether nothing is computed again where the first form fits.
        is_timed: whether a search ends since its share of the time is over.
        free: by form what was found without a limit.
        found: by form what was found that fits.
        refused: by form the smallest peak of what was found where nothing fits.
        scales: by how much peaks are underestimated: in one microbatch, and in several.
        reason: why there are no microbatches, if there are none.
        estimated: by form its step time and peak as they were estimated when it was searched; at last, those of forms that were not, too.
        why: by form why nothing is known of it, for another reason than its estimate.
    """

    first: Form
    others: Callable[[], Sequence[Form]]
    search: Search[Found]
    solution: Callable[[Found], Solution]
    estimates: Callable[[Form, Found], Estimates]
    limit: float
    always: Callable[[bool], Sequence[Form]] = lambda fits: ()
    is_again_needed: bool = False
    is_timed: bool = False
    free: dict[Form, Found] = field(default_factory=dict)
    found: dict[Form, Found] = field(default_factory=dict)
    refused: dict[Form, float] = field(default_factory=dict)
    scales: dict[bool, float] = field(default_factory=dict)
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
            if is_early or not always:
                return self._improved(free) if is_early and self.is_timed else free
            self.found[self.first] = free
        self.free[self.first] = free
        forms, estimates = [form for form in self.others() if form != self.first], self.estimates(self.first, free)
        failure = None
        try:
            if not is_early:
                self._explore(forms, estimates, always)
            failure = self._within_the_limit()
            if not self.found:
                self._must(forms, estimates.within(self.refused.get(self.first, math.inf)))
        except OutOfTime:
            if not self.found:
                raise
        if not self.found:
            assert failure is not None, "where nothing is found, the first form is searched within the limit"
            raise failure if isinstance(failure, NothingFasterError) else self._refusal(failure)
        return self._fastest()

    def _fastest(self) -> Found:
        """The fastest that was found."""
        forms = [*self.found]
        if self.is_again_needed and self.first in self.found:
            forms = [form for form in forms if form.again == self.first.again]
        return self.found[min(forms, key=lambda form: self._seconds(self.found[form]))]

    def _improved(self, found: Found) -> Found:
        """The better of what was found in a part of the time, and what is found in the rest of it."""
        try:
            return min(found, self.search(self.first, True), key=self._seconds)
        except (InfeasibleError, OutOfTime):
            return found

    def _fits(self, found: Found) -> bool:
        return self._peak(found) <= self.limit

    def _explore(self, forms: list[Form], estimates: Estimates, always: Sequence[Form]) -> None:
        """Searches the forms that are always searched and those that promise most, of whatever they hold."""
        every, always = [self.first, *forms], [form for form in always if form in forms]
        for _ in range(TRIES + len(always)):
            wanted = [form for form in always if form in forms]
            form = wanted[0] if wanted else self._next(forms, estimates, every)
            if form is None:
                return
            forms.remove(form)
            self._note([form], estimates)
            try:
                found = self.free[form] = self.search(form, False)
            except NothingFasterError:
                self.why[form] = "slower"
                continue
            except OutOfTime:
                self.why[form] = "not searched: no time was left"
                return
            except (SearchLimitError, TraceError) as error:
                self._leave_out(form, error, forms)
                continue
            if self._fits(found):
                self.found[form] = found
            self._scale(form, self._peak(found) / estimates.peak(form))
            estimates = estimates.corrected(form, self._seconds(found))
            self._note(forms, estimates)

    def _next(self, forms: list[Form], estimates: Estimates, every: Sequence[Form]) -> Form | None:
        """The form that is worth a search most; None: no one is.

        Args:
            forms: those that are left, of which some are taken out that are not worth one.
            every: those that there are.
        """
        fit = [form for form in forms if self._estimate(form, estimates) <= self.limit]
        if faster := [form for form in fit if estimates.time(form) < self._least() * (1 - GAIN)]:
            return min(faster, key=estimates.time)
        if self.found:
            best = min(self.found, key=lambda form: self._seconds(self.found[form]))
            if best.microbatches == self.first.microbatches:
                return None
            alike = [form for form in every if (form.again, form.hosted) == (best.again, best.hosted)]
            more = min((form for form in alike if form.microbatches > best.microbatches), key=lambda form: form.microbatches, default=None)
            return more if more in fit else None
        same = [form for form in forms if form.microbatches == self.first.microbatches]
        if not same:
            return None
        form = min(same, key=estimates.peak)  # none promises to fit: of what holds least a strategy may be nearly as fast within the limit
        forms[:] = [each for each in forms if each not in same or each == form]
        return form

    def _note(self, forms: Iterable[Form], estimates: Estimates) -> None:
        self.estimated.update((form, (estimates.time(form), self._estimate(form, estimates))) for form in forms)

    def _within_the_limit(self) -> InfeasibleError | None:
        """Searches what would be faster within the limit: that which is nearest to it first. The error of the first form, if it has one."""
        failure = None
        faster = sorted((form for form in self.free if form not in self.found), key=lambda form: self._peak(self.free[form]))
        for form in faster[:PRICED] if self.found else faster:
            if self._seconds(self.free[form]) < self._least() * (1 - GAIN):
                error = self._priced(form)
                failure = error if form == self.first else failure
        return failure

    def _priced(self, form: Form) -> InfeasibleError | None:
        try:
            self.found[form] = self.search(form, True)
        except InfeasibleError as error:
            if not isinstance(error, NothingFasterError):
                self.refused[form] = error.smallest_peak_bytes or math.inf
            return error
        return None

    def _must(self, forms: Sequence[Form], estimates: Estimates) -> None:
        """Searches forms within the limit until something fits: first what promises to, then what holds least."""
        left = list(forms)
        for _ in range(MOST_TRIES):
            left = [form for form in left if not any(other.holds_less(form) for other in self.refused)]
            if not left:
                return
            fit = [form for form in left if self._estimate(form, estimates) <= self.limit]
            form = min(fit, key=estimates.time) if fit else min(left, key=lambda form: self._estimate(form, estimates))
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
                self._scale(form, peak / estimates.peak(form))

    def _estimate(self, form: Form, estimates: Estimates) -> float:
        return estimates.peak(form) * self.scales.get(form.microbatches > 1, 1.0)

    def _scale(self, form: Form, missed: float) -> None:
        several = form.microbatches > 1
        self.scales[several] = max(self.scales.get(several, 1.0), missed)

    def _leave_out(self, form: Form, error: Exception, forms: list[Form]) -> None:
        """Leaves the forms out that there cannot be since there is no such form, which an error says."""
        self.why |= dict.fromkeys((form, *(each for each in forms if not each.is_simpler(form))), "there is no such form")
        forms[:] = [each for each in forms if each.is_simpler(form)]
        if form.microbatches > 1 and form.again == self.first.again and isinstance(error, TraceError):
            self.reason = str(error)

    def _least(self) -> float:
        return min(map(self._seconds, self.found.values()), default=math.inf)

    def _peak(self, found: Found) -> float:
        return self.solution(found).judgement.cost.peak_bytes

    def _seconds(self, found: Found) -> float:
        return self.solution(found).judgement.cost.makespan_seconds

    def _refusal(self, error: InfeasibleError) -> InfeasibleError:
        """The refusal of the first form, with what else was tried."""
        text, smallest = str(error), error.smallest_peak_bytes or math.inf
        text += f" Nor could it run in microbatches: {self.reason}" if self.reason else ""
        numbers = sorted({form.microbatches for form in self.refused} - {self.first.microbatches})
        some = ", ".join(map(str, numbers))
        tried = {
            f"in microbatches, of which {some} were tried": lambda form: form.microbatches > self.first.microbatches,
            AGAIN: lambda form: form.again != self.first.again,
            "with kept activations in the memory of hosts": lambda form: form.again is not None and form.again.hosted_bytes > 0,
            "with optimizer state in the memory of hosts": lambda form: form.hosted > self.first.hosted,
        }
        for words, is_other in tried.items():
            if forms := [form for form in self.refused if is_other(form)]:
                least = min(self.refused[form] for form in forms)
                smallest = min(smallest, least)
                text += f" Nor does it fit {words}: the smallest peak is {format_bytes(least)}."
        return InfeasibleError(text, None if smallest == math.inf else smallest, error.proven)

    def trail(self, best: Form) -> tuple[Tried, ...]:
        """The forms that were compared, fastest first; () if it was the first alone.

        Args:
            best: the one that is taken.
        """
        if not self.estimated:
            return ()
        told = [self._told(form, form == best) for form in dict.fromkeys((self.first, *self.estimated))]
        return tuple(sorted(told, key=lambda each: (each.seconds or math.inf, each.estimated_seconds or math.inf)))

    def _told(self, form: Form, is_best: bool) -> Tried:
        found, estimate = self.found.get(form, self.free.get(form)), self.estimated.get(form, (None, None))
        figures = (None, self.refused.get(form)) if found is None else (self._seconds(found), self._peak(found))
        return Tried(str(form), "taken" if is_best else self._outcome(form), *estimate, *figures)

    def _outcome(self, form: Form) -> str:
        if form in self.found:
            return "slower"
        if form in self.free or form in self.refused:
            return "does not fit"
        if form in self.why:
            return self.why[form]
        seconds, nbytes = self.estimated[form]
        if nbytes > self.limit:
            return "not searched: estimated not to fit"
        return "not searched: estimated to be slower" if seconds >= self._least() * (1 - GAIN) else "not searched: others promised more"

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
        n = sum(form in self.found or form in self.free or form in self.refused for form in forms)
        return f"compared {what}, {n} of {len(forms)} forms by a search: {best} is fastest within {format_bytes(self.limit)}"
