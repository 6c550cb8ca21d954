"""Forms of one step, with equal results, and estimates of their step times and peaks from a strategy of one of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from autoshard.ir.remat import Remat
from autoshard.render import format_bytes, format_percent

LEAST_KEPT = 0.01  # of activations: a form that keeps less of them holds other values


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

    def __str__(self) -> str:
        words = ["1 microbatch" if self.microbatches == 1 else f"{self.microbatches} microbatches"]
        if self.again is not None:
            words.append(f"{format_percent(self.kept)} of activations kept")
            words += [f"{format_bytes(self.again.hosted_bytes)} of them on hosts"] if self.again.hosted_bytes else []
        words += ["optimizer state on hosts"] if self.hosted else []
        return ", ".join(words)

    @property
    def kept(self) -> float:
        """The share of what the forward pass keeps that devices hold."""
        return 1.0 if self.again is None or not self.again.plain_bytes else self.again.kept_bytes / self.again.plain_bytes

    def unlike(self, other: Form) -> float:
        """How far another form is from this one: in factors of two of microbatches and of what is kept; one microbatch from several."""
        apart = math.log2(self.microbatches / other.microbatches), math.log2(max(self.kept, LEAST_KEPT) / max(other.kept, LEAST_KEPT))
        return sum(map(abs, apart)) + ((self.microbatches > 1) != (other.microbatches > 1))

    def is_divided(self, first: Form) -> bool:
        """Whether it is another form in more microbatches, and otherwise the same."""
        return self.microbatches > first.microbatches and (self.again, self.hosted) == (first.again, first.hosted)

    def holds_less(self, other: Form) -> bool:
        """Whether there is nothing of which it holds more than the other; more microbatches may hold more, being split otherwise."""
        return self.microbatches == other.microbatches and self.kept <= other.kept and self.hosted >= other.hosted

    def is_simpler(self, refused: Form) -> bool:
        """Whether it may exist where another does not."""
        if refused.microbatches > 1 and self.microbatches > 1:
            return refused.again is not None and self.again is None
        return refused.again is None or self.again is None or refused.microbatches > 1


PLAIN = Form()  # a step as it is written


def forms_of(numbers: Sequence[int], remats: Sequence[Remat | None], hosted: Sequence[bool]) -> list[Form]:
    """All combinations, the first of each first."""
    return [Form(*each) for each in product(numbers, remats, hosted)]


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
        again: of recomputations that were found their seconds on one device, ascending, and what they add beyond what is estimated.
        unstored_seconds: by which a step is faster that keeps nothing: what is not stored is not copied, into stacks of loops for instance.
        peaks: of other forms, as they were found.
        activations: the share of activations in what is held beside arguments.
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
    again: tuple[tuple[float, float], ...] = ((0.0, 0.0),)
    unstored_seconds: float = 0.0
    peaks: tuple[tuple[Form, float], ...] = ()
    activations: float = 1.0

    def time(self, form: Form) -> float:
        """Seconds of a step in this form."""
        return self.seconds + self._more(form) - self._more(self.of)

    def peak(self, form: Form) -> float:
        """Bytes that a device holds in this form: as much as in that most like it, whose peak is known, but for what is not fixed."""
        like, peak = self._like(form)
        return self._fixed(form) + (peak - self._fixed(like)) * self._share(form) / self._share(like)

    def _like(self, form: Form) -> tuple[Form, float]:
        return min(((self.of, self.peak_bytes), *self.peaks), key=lambda known: form.unlike(known[0]))

    def _share(self, form: Form) -> float:
        """The share of what is held beside arguments in one microbatch without recomputation that this form holds."""
        return max(1.0 - self.activations * (1.0 - form.kept), LEAST_KEPT) / form.microbatches

    def _fixed(self, form: Form) -> float:
        return self.fixed_bytes + self.state_bytes * (self.of.hosted - form.hosted)

    def with_peak(self, form: Form, nbytes: float) -> Estimates:
        """The estimates with what a form holds; of as many microbatches in several forms, with what of that is activations."""
        like, known = self._like(form)
        activations, ratio = self.activations, (nbytes - self._fixed(form)) / max(known - self._fixed(like), 1.0)
        if like.microbatches == form.microbatches and (less := (1 - form.kept) - ratio * (1 - like.kept)):
            activations = min(max((1 - ratio) / less, 0.0), 1.0)
        return replace(self, activations=activations, peaks=(*(known for known in self.peaks if known[0] != form), (form, nbytes)))

    def corrected(self, form: Form, seconds: float) -> Estimates:
        """The estimates with what a form takes; of several things that it does, microbatches are what was estimated worst, unless known."""
        missed = seconds - self.time(form)
        is_known = any(known.is_divided(self.of) for known, _ in self.peaks)
        if form.is_divided(self.of) or (form.microbatches > self.of.microbatches and not is_known):
            return replace(self, adding_seconds=max(0.0, self.adding_seconds + missed / (form.microbatches - self.of.microbatches)))
        if form.again is not None and form.again.seconds and not form.again.hosted_bytes:
            alone = form.microbatches == self.of.microbatches
            if alone and missed < 0 and form.kept < 1 and len(self.again) == 1:
                return replace(self, unstored_seconds=-missed / (1 - form.kept), again=(*self.again, (form.again.seconds, 0.0)))
            added = self._again(form) + missed
            if not alone:
                added = max(added, 0.0)  # what is below is of the microbatches, and no other number of them is so much faster
            beyond = added - self._computed(form)
            return replace(self, again=tuple(sorted({**dict(self.again), form.again.seconds: beyond}.items())))
        return self

    def within(self, least: float) -> Estimates:
        """The estimates of strategies for which time does not count: arguments split over all devices, and what was the smallest peak."""
        fixed = min(self.fixed_bytes, self.least_fixed_bytes)
        less = self.fixed_bytes - fixed
        peaks = tuple((form, peak - less) for form, peak in self.peaks)
        return replace(self, fixed_bytes=fixed, peak_bytes=max(fixed, min(self.peak_bytes - less, least)), peaks=peaks)

    def _more(self, form: Form) -> float:
        hosted = self.state_bytes if form.hosted else 0.0
        again = 0.0
        if form.again is not None:
            again, hosted = self._again(form), hosted + form.again.hosted_bytes / self.devices
        transfers = 2 * hosted / self.host_bytes_per_second if hosted else 0.0
        return (form.microbatches - 1) * self.adding_seconds + again + transfers

    def _again(self, form: Form) -> float:
        """What a form's recomputation adds: what is computed, and what others add beyond that as a line between them has it."""
        seconds, beyond = zip(*self.again, strict=True)
        return self._computed(form) + float(np.interp(_seconds(form), seconds, beyond))

    def _computed(self, form: Form) -> float:
        return _seconds(form) / self.devices - self.unstored_seconds * (1 - form.kept)


def _seconds(form: Form) -> float:
    """The seconds of what a form computes again, on one device."""
    return 0.0 if form.again is None else form.again.seconds
