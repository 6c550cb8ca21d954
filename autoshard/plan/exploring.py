"""Which forms of a step are searched: numbers of microbatches, recomputations, and what is in the memory of hosts, where memory binds.

The fastest strategy of the step as it is, whatever it holds, is found first. Where it fits, nothing else can be faster. Where it does
not, each other form is estimated from it: the time of what runs again and of what each microbatch repeats, the bytes of what is not kept.
The form that promises to be fastest of those that may fit is searched next, again of whatever it holds, and so on, as long as one promises
to be faster than what was found; each answer corrects the estimates. At last the forms whose fastest strategies are faster, but hold too
much, are searched within the limit: that takes longest, and gains least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Generic, Protocol, TypeVar

from autoshard.errors import InfeasibleError, NothingFasterError, OutOfTime, SearchLimitError, TraceError
from autoshard.ir.remat import Remat
from autoshard.plan.refusals import AGAIN
from autoshard.render import format_bytes
from autoshard.search import Solution

TRIES = 4  # of forms beside the first, of whatever they hold
PRICED = 2  # of forms within the limit, where some strategy was found
MOST_TRIES = 8  # where none was
GAIN = 0.01  # of the time of what was found, that another form must promise


Found = TypeVar("Found")
Found_co = TypeVar("Found_co", covariant=True)


@dataclass(frozen=True, slots=True)
class Form:
    """One form of a step.

    Attributes:
        microbatches: in how many its gradients are computed.
        again: what its backward pass computes again; None: nothing.
        hosted: whether optimizer state is in the memory of hosts.
    """

    microbatches: int = 1
    again: Remat | None = None
    hosted: bool = False

    @property
    def kept(self) -> float:
        """The share of what the forward pass keeps that devices hold."""
        return 1.0 if self.again is None or not self.again.plain_bytes else self.again.kept_bytes / self.again.plain_bytes

    def holds_less(self, other: Form) -> bool:
        """Whether there is nothing of which it holds more than the other; more microbatches may hold more, being split otherwise."""
        return self.microbatches == other.microbatches and self.kept <= other.kept and self.hosted >= other.hosted


@dataclass(frozen=True, slots=True)
class Estimates:
    """Estimates of the time and the peak of forms, from a strategy of one of them.

    Attributes:
        seconds, peak_bytes: of that strategy.
        of: its form.
        fixed_bytes: the part of its peak that is arguments.
        least_fixed_bytes: that part, were all of them split over all devices.
        state_bytes: what a device holds of optimizer state that could be on a host.
        adding_seconds: of adding up gradients of one microbatch more.
        devices: how many share what is computed again.
        host_bytes_per_second: of a device's link to its host.
    """

    seconds: float
    peak_bytes: float
    of: Form
    fixed_bytes: float
    least_fixed_bytes: float
    state_bytes: float
    adding_seconds: float
    devices: float
    host_bytes_per_second: float

    def time(self, form: Form) -> float:
        """Seconds of a step in this form."""
        return self.seconds + self._more(form) - self._more(self.of)

    def peak(self, form: Form) -> float:
        """Bytes that a device holds in this form."""
        fixed = self.fixed_bytes - (self.state_bytes if form.hosted and not self.of.hosted else 0.0)
        moving = self.peak_bytes - self.fixed_bytes
        return fixed + moving * (form.kept / self.of.kept) * (self.of.microbatches / form.microbatches)

    def corrected(self, form: Form, seconds: float) -> Estimates:
        """The estimates with what a form takes, as far as that is due to one of what it does."""
        missed = seconds - self.time(form)
        if form.again is None and form.microbatches > 1:
            return replace(self, adding_seconds=max(0.0, self.adding_seconds + missed / (form.microbatches - 1)))
        if form.again is not None and form.again.seconds and form.microbatches == 1:
            return replace(self, devices=self.devices / max(0.1, 1 + missed * self.devices / form.again.seconds))
        return self

    def within(self, least: float) -> Estimates:
        """The estimates of strategies for which time does not count: arguments split over all devices, and what was the smallest peak."""
        fixed = min(self.fixed_bytes, self.least_fixed_bytes)
        return replace(self, fixed_bytes=fixed, peak_bytes=max(fixed, min(self.peak_bytes - self.fixed_bytes + fixed, least)))

    def _more(self, form: Form) -> float:
        hosted = self.state_bytes if form.hosted else 0.0
        again = 0.0
        if form.again is not None:
            again, hosted = form.again.seconds / self.devices, hosted + form.again.hosted_bytes / self.devices
        transfers = 2 * hosted / self.host_bytes_per_second if hosted else 0.0
        return (form.microbatches - 1) * self.adding_seconds + again + transfers


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
        is_timed: whether a search ends since its share of the time is over.
        free: by form what was found without a limit.
        found: by form what was found that fits.
        refused: by form the smallest peak of what was found where nothing fits.
        scales: by how much peaks are underestimated: in one microbatch, and in several.
        reason: why there are no microbatches, if there are none.
    """

    first: Form
    others: Callable[[], Sequence[Form]]
    search: Search[Found]
    solution: Callable[[Found], Solution]
    estimates: Callable[[Form, Found], Estimates]
    limit: float
    is_timed: bool = False
    free: dict[Form, Found] = field(default_factory=dict)
    found: dict[Form, Found] = field(default_factory=dict)
    refused: dict[Form, float] = field(default_factory=dict)
    scales: dict[bool, float] = field(default_factory=dict)
    reason: str = ""

    def best(self) -> Found:
        """The fastest that is found.

        Raises:
            InfeasibleError: nothing fits in any form; says which were tried.
        """
        free = self.search(self.first, False)
        is_early = bool(self.solution(free).stats.get("ended_early"))
        if self._fits(free):
            return self._improved(free) if is_early and self.is_timed else free
        self.free[self.first] = free
        forms, estimates = [form for form in self.others() if form != self.first], self.estimates(self.first, free)
        failure = None
        try:
            if not is_early:
                self._explore(forms, estimates)
            failure = self._within_the_limit()
            if not self.found:
                self._must(forms, estimates.within(self.refused.get(self.first, math.inf)))
        except OutOfTime:
            if not self.found:
                raise
        if not self.found:
            assert failure is not None, "where nothing is found, the first form is searched within the limit"
            raise failure if isinstance(failure, NothingFasterError) else self._refusal(failure)
        return min(self.found.values(), key=self._seconds)

    def _improved(self, found: Found) -> Found:
        """The better of what was found in a part of the time, and what is found in the rest of it."""
        try:
            return min(found, self.search(self.first, True), key=self._seconds)
        except (InfeasibleError, OutOfTime):
            return found

    def _fits(self, found: Found) -> bool:
        return self._peak(found) <= self.limit

    def _explore(self, forms: list[Form], estimates: Estimates) -> None:
        """Searches the forms that promise most, of whatever they hold."""
        for _ in range(TRIES):
            least = self._least() * (1 - GAIN)
            fit = [form for form in forms if self._estimate(form, estimates) <= self.limit and estimates.time(form) < least]
            same = [form for form in forms if form.microbatches == self.first.microbatches]
            if fit:
                form = min(fit, key=estimates.time)
            elif same and not self.found:  # none promises to fit: of what holds least a strategy may be nearly as fast within the limit
                form = min(same, key=estimates.peak)
                forms = [each for each in forms if each not in same or each == form]
            else:
                return
            forms.remove(form)
            try:
                found = self.free[form] = self.search(form, False)
            except NothingFasterError:
                continue
            except OutOfTime:
                return
            except (SearchLimitError, TraceError) as error:
                self._leave_out(form, error, forms)
                continue
            if self._fits(found):
                self.found[form] = found
            self._scale(form, self._peak(found) / estimates.peak(form))
            estimates = estimates.corrected(form, self._seconds(found))

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
        forms[:] = [each for each in forms if _is_simpler(each, form)]
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


def _is_simpler(form: Form, refused: Form) -> bool:
    """Whether a form may exist where another does not."""
    if refused.microbatches > 1 and form.microbatches > 1:
        return refused.again is not None and form.again is None
    return refused.again is None or form.again is None or refused.microbatches > 1


def forms_of(numbers: Sequence[int], remats: Sequence[Remat | None], hosted: Sequence[bool]) -> list[Form]:
    """All combinations, the first of each first."""
    return [Form(*each) for each in product(numbers, remats, hosted)]
