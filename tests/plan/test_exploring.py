"""The exploration of a step's forms, on made-up costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from autoshard.errors import InfeasibleError, NothingFasterError, TraceError
from autoshard.ir.remat import Kept, Remat
from autoshard.plan.exploring import Exploration
from autoshard.plan.forms import Estimates, Form, forms_of

NOTHING = Kept(0, (), ())
HALF, FULL = (Remat("fit", (), NOTHING, (), kept, 100.0, seconds) for kept, seconds in ((50.0, 8.0), (10.0, 24.0)))


@dataclass
class Costs:
    """Made-up searches: a step of 10 s that holds 100 bytes, 20 of them arguments."""

    each_microbatch: float = 1.0
    within: float = 1.5  # times the free time, within a limit
    least: float = 0.5  # times the free peak, that a strategy may hold
    asked: list[tuple[Form, bool]] = field(default_factory=list)
    refuses: int = 10**9  # numbers of microbatches from this on

    def free(self, form: Form) -> tuple[float, float]:
        again = 0.0 if form.again is None else form.again.seconds / 8
        return 10.0 + again + (form.microbatches - 1) * self.each_microbatch, 20.0 + 80.0 * form.kept / form.microbatches

    def explored(self, limit: float) -> tuple[float, float]:
        def search(form: Form, limited: bool) -> tuple[float, float]:
            self.asked.append((form, limited))
            if form.microbatches >= self.refuses:
                raise TraceError("there are no microbatches.")
            seconds, peak = self.free(form)
            if not limited or peak <= limit:
                return seconds, peak
            if peak * self.least > limit:
                raise InfeasibleError("nothing fits.", peak * self.least)
            return seconds * self.within, limit

        return self.exploration(limit, search).best()

    def exploration(self, limit: float, search) -> Exploration:
        def estimates(form: Form, found: tuple[float, float]) -> Estimates:
            return Estimates(*found, form, 20.0, 20.0, 10.0, 0.1, 8, 1.0)

        def solution(found: tuple[float, float]):
            cost = SimpleNamespace(makespan_seconds=found[0], peak_bytes=found[1])
            return SimpleNamespace(stats={}, judgement=SimpleNamespace(cost=cost))

        forms = forms_of((1, 2, 4), (None, HALF, FULL), [False])
        return Exploration(forms[0], lambda: forms, search, solution, estimates, limit)


def test_what_fits_is_searched_once():
    """No other form of a step is faster than the step as it is."""
    costs = Costs()
    assert costs.explored(100.0) == (10.0, 100.0) and costs.asked == [(Form(), False)]


@pytest.mark.parametrize("each_microbatch", [0.05, 0.5, 1.5, 6.0])
@pytest.mark.parametrize("limit", [95.0, 61.0, 45.0, 33.0, 25.0])
def test_the_best_of_all_products_is_found(each_microbatch, limit):
    """Whatever microbatches take, against what is estimated: with few searches, of which those within the limit come last."""
    costs = Costs(each_microbatch)
    every = [costs.free(form) for form in forms_of((1, 2, 4), (None, HALF, FULL), [False])]
    best = min(seconds for seconds, peak in every if peak <= limit)
    assert costs.explored(limit)[0] <= best * 1.01
    assert len(costs.asked) <= 8 and [limited for _, limited in costs.asked] == sorted(limited for _, limited in costs.asked)


def test_a_step_without_microbatches_is_computed_again():
    """A form that there is not leaves out those like it."""
    costs = Costs(0.05, refuses=2)
    assert costs.explored(61.0) == costs.free(Form(again=HALF))
    assert sum(form.microbatches > 1 for form, _ in costs.asked) <= 2


def test_within_the_limit_the_step_as_it_is_may_be_fastest():
    """A little less memory costs little time: that is found, and other forms are not taken."""
    assert Costs(5.0, within=1.02).explored(95.0) == (10.2, 95.0)


def test_nothing_that_is_faster_than_what_is_known():
    """Where every form is cut by what was found for another program, the answer is that one."""

    def search(form: Form, limited: bool) -> tuple[float, float]:
        if limited:
            raise NothingFasterError("use that one.")
        return 10.0, 100.0

    with pytest.raises(NothingFasterError, match="use that one"):
        Costs().exploration(50.0, search).best()


def test_a_refusal_says_what_was_tried():
    """Microbatches by their numbers, and recomputation."""
    with pytest.raises(InfeasibleError, match=r"in microbatches, of which .*4 were tried: .*computes again what it reads: the smallest"):
        Costs().explored(5.0)
