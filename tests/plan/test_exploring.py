"""The exploration of a step's forms, on made-up costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from autoshard.errors import InfeasibleError, NothingFasterError, TraceError
from autoshard.ir.remat import Kept, Remat
from autoshard.plan.exploring import Exploration
from autoshard.plan.forms import Estimates, Form, forms_of
from autoshard.plan.incumbent import Incumbent

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


def test_the_next_larger_number_of_microbatches_is_searched_too():
    """Smaller arrays may be in fast memory, which no estimate says: where several microbatches are best, twice as many are tried."""
    costs = Costs(1.0)
    slow, costs.free = costs.free, lambda form: (10.5, slow(form)[1]) if form == Form(4) else slow(form)
    assert costs.explored(61.0)[0] == 10.5


def test_half_of_what_loops_keep_is_computed_again_even_where_all_fits():
    """What takes less time is found; but nothing is computed again where that is for what does not fit otherwise."""
    costs = Costs()
    for is_again_needed, expected in ((False, 9.5), (True, 10.0)):
        exploration = costs.exploration(100.0, lambda form, _: (9.5, 60.0) if form == Form(again=HALF) else costs.free(form))
        exploration.always, exploration.is_again_needed = lambda fits: [Form(again=HALF)] if fits else [], is_again_needed
        assert exploration.best()[0] == expected
        trail = exploration.trail(Form(again=HALF))
        assert (trail[0].outcome, trail[0].seconds, trail[0].peak_bytes) == ("taken", 9.5, 60.0)


def test_less_is_kept_as_long_as_that_is_faster():
    """Where a recomputation is faster than the step as it is, one that keeps less is searched, though it is estimated to be slower."""
    for full, expected in ((9.0, 9.0), (9.6, 9.5)):
        costs, quick = Costs(), {Form(again=HALF): (9.5, 60.0), Form(again=FULL): (full, 28.0)}
        exploration = costs.exploration(61.0, lambda form, _, quick=quick, costs=costs: quick.get(form, costs.free(form)))
        exploration.always = lambda fits: [Form(again=HALF)]
        assert exploration.best()[0] == expected and Form(again=FULL) in exploration.free


def test_estimates_go_through_what_was_found():
    """What is found beyond them holds for others; of several microbatches what is missed is due to these.

    A recomputation that is faster than what it computes saves time by what it does not keep, and one that keeps less saves more.
    """
    plain = Estimates(10.0, 100.0, Form(), 20.0, 20.0, 10.0, 0.1, 8, 1.0)
    for found, full in ((12.0, 14.0), (6.0, 4.0)):
        estimates = plain.corrected(Form(again=HALF), found)
        assert [estimates.time(Form(again=each)) for each in (None, HALF, FULL)] == [10.0, found, full]
    assert estimates.corrected(Form(3, HALF), 16.0).time(Form(2)) == 15.0


def test_what_many_microbatches_take_less_than_estimated_is_not_due_to_recomputation():
    """Its addition is nothing at least, so that no other form is promised to be faster than the step as it is."""
    estimates = Estimates(10.0, 100.0, Form(), 20.0, 20.0, 10.0, 0.1, 8, 1.0).corrected(Form(4), 40.0).with_peak(Form(4), 50.0)
    corrected = estimates.corrected(Form(512, HALF), 162.0)
    assert corrected.time(Form(again=HALF)) == 10.0 and corrected.time(Form(2, HALF)) == 20.0


def test_the_trail_says_what_became_of_each_form():
    """What was searched with its figures, and of the others what was estimated and why that was enough; in one sentence, too."""
    costs = Costs(0.5)

    def search(form: Form, limited: bool) -> tuple[float, float]:
        if limited:
            raise InfeasibleError("nothing fits.", 90.0)
        return costs.free(form)

    exploration = costs.exploration(61.0, search)
    assert (exploration.trail(Form()), exploration.sentence(Form())) == ((), "")
    assert exploration.best() == (10.5, 60.0)
    trail = {each.form: each for each in exploration.trail(Form(2))}
    assert next(iter(trail)) == "1 microbatch" and trail["1 microbatch"].outcome == "does not fit"
    assert (trail["2 microbatches"].outcome, trail["2 microbatches"].estimated_seconds) == ("taken", 10.1)
    assert trail["4 microbatches"].outcome == "slower" and trail["4 microbatches"].seconds == 11.5
    left = trail["1 microbatch, 50 % of activations kept"]
    assert (left.outcome, left.seconds, left.estimated_seconds) == ("not searched: estimated to be slower", None, 11.0)
    assert exploration.sentence(Form(2)) == (
        "compared 1 to 4 microbatches with and without recomputation, 3 of 9 forms by a search: 2 microbatches is fastest within 61 B, "
        "before 4 microbatches with 11.5 s; 1 microbatch, which holds 100 B, would take 10.0 s"
    )


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


def test_a_peak_is_estimated_by_the_form_most_like_it():
    """Whether it was over- or underestimated: numbers of microbatches by others, and one by itself."""
    estimates = Estimates(10.0, 100.0, Form(), 20.0, 20.0, 10.0, 0.1, 8, 1.0).with_peak(Form(4), 30.0)
    assert [estimates.peak(form) for form in (Form(), Form(again=HALF))] == [100.0, 60.0]
    assert [estimates.peak(form) for form in (Form(2), Form(4), Form(4, HALF))] == [40.0, 30.0, 25.0]
    assert estimates.with_peak(Form(4), 40.0).peak(Form(4, hosted=True)) == 30.0
    half = estimates.with_peak(Form(again=HALF), 80.0)  # half of what is held beside arguments are activations
    assert [half.peak(form) for form in (Form(again=HALF), Form(again=FULL), Form(4, HALF))] == pytest.approx([80.0, 64.0, 27.5])


def test_microbatches_are_searched_without_anything_else_first():
    """Of two microbatches with recomputation nobody knows which of them takes longer than estimated."""
    costs, little = Costs(0.2), Remat("fit", (), NOTHING, (), 50.0, 100.0, 0.8)

    def search(form: Form, limited: bool) -> tuple[float, float]:
        if limited:
            raise InfeasibleError("nothing fits.", 90.0)
        return (14.0, 40.0) if form == Form(2, little) else costs.free(form)

    exploration = costs.exploration(45.0, search)
    exploration.others = lambda: forms_of((1, 2, 4), (None, little), [False])
    assert exploration.best() == (10.6, 40.0)
    assert exploration.free.keys() == {Form(), Form(4), Form(2, little)}


def test_where_nothing_promises_to_fit_the_fastest_of_what_holds_least_is_searched():
    """Beyond some number of microbatches nothing is left to hold less of."""
    costs = Costs()

    def search(form: Form, limited: bool) -> tuple[float, float]:
        if limited and form.microbatches == 1:
            raise InfeasibleError("nothing fits.", 100.0)
        return (costs.free(form)[0], 19.0) if limited else costs.free(form)

    exploration = costs.exploration(19.5, search)
    exploration.others = lambda: forms_of([2**k for k in range(17)], [None], [False])
    exploration.best()
    assert list(exploration.found) == [Form(512)]
    left = [each for each in exploration.trail(Form(512)) if each.outcome.startswith("not searched")]
    assert len(left) == 12 and left[0].form == "2 microbatches"


def test_what_is_found_first_within_the_limit_is_not_the_last():
    """Two more are searched that promise more, and hold more where bytes have no price."""
    limited = []
    free = {1: (10.0, 180.0), 4: (16.0, 174.0), 64: (40.0, 66.0), 128: (160.0, 65.0)}

    def search(form: Form, is_limited: bool) -> tuple[float, float]:
        seconds, peak = free[form.microbatches]
        limited.extend([form.microbatches] * is_limited)
        return (seconds, 59.0) if is_limited else (seconds, peak)

    exploration = Costs().exploration(60.0, search)
    exploration.others = lambda: forms_of((*free,), [None], [False])
    assert exploration.best() == (10.0, 59.0) and limited == [128, 64, 1]


@pytest.mark.parametrize("is_thorough", [False, True])
def test_what_is_far_from_the_limit_is_not_searched_within_it(is_thorough):
    """Where something is found: that is which has least to save for what it gains, and no other that has more; in a full plan all are."""
    costs, little = Costs(0.5), Remat("fit", (), NOTHING, (), 50.0, 100.0, 0.8)
    limited = []

    def search(form: Form, is_limited: bool) -> tuple[float, float]:
        if is_limited:
            limited.append(form)
            raise InfeasibleError("nothing fits.", 90.0)
        return (10.2, 62.0) if form == Form(again=little) else costs.free(form)

    exploration = costs.exploration(61.0, search)
    exploration.others = lambda: forms_of((1, 2), (None, little), [False])
    exploration.is_thorough = is_thorough
    assert exploration.best() == (10.5, 60.0) and limited == [Form(again=little), *([Form()] if is_thorough else [])]


def test_a_variant_is_left_where_no_form_of_it_can_be_faster():
    """One that is slower than what another variant has found, or as fast as one that was explored and holds as much."""
    limit = 61.0
    for seconds, variants, n in ((9.9, [], 1), (10.4, [(10.0, 100.0)], 1), (10.4, [(9.0, 200.0)], 3), (10.4, [], 3)):
        costs = Costs(0.5)

        def search(form: Form, limited: bool, costs=costs) -> tuple[float, float]:
            costs.asked.append((form, limited))
            return costs.free(form) if not limited else (11.0, limit)

        exploration = costs.exploration(limit, search)
        exploration.incumbent = Incumbent(seconds, seconds, variants=[*variants])
        if n == 1:
            with pytest.raises(NothingFasterError, match="of another"):
                exploration.best()
        else:
            exploration.best()
            assert exploration.incumbent.variants == [*variants, (10.0, 100.0)]
        assert (len(costs.asked) == 1) == (n == 1)


def test_what_hides_its_communication_is_not_cut_by_its_objective():
    """A form without communication has its step time for an objective; one that hides a tenth may be faster with a greater objective."""
    incumbent = Incumbent()
    assert incumbent.bound_seconds == float("inf")
    incumbent.see(SimpleNamespace(makespan_seconds=10.0, objective_seconds=11.0))
    assert not incumbent.is_known
    incumbent.add(SimpleNamespace(makespan_seconds=20.0, objective_seconds=20.0))
    assert incumbent.bound_seconds == pytest.approx(22.0)


def test_explorations_are_told_as_one():
    """Of each form the fastest, whichever found it."""
    one, other = (Costs().exploration(50.0, lambda *_: None) for _ in range(2))
    one.found, other.found, other.estimated = {Form(): (2.0, 1.0)}, {Form(): (3.0, 1.0), Form(2): (1.0, 1.0)}, {Form(2): (1.5, 1.0)}
    merged = one.merged([other])
    assert merged.found == {Form(): (2.0, 1.0), Form(2): (1.0, 1.0)}
    assert [(each.form, each.seconds) for each in merged.trail(Form(2))] == [("2 microbatches", 1.0), ("1 microbatch", 2.0)]


def test_where_nothing_fits_what_holds_least_is_searched_too():
    """Microbatches may hold more than they promise, as where they cannot be split as far: what saves most in one is then not left."""
    costs = Costs(0.01)

    def search(form: Form, limited: bool) -> tuple[float, float]:
        costs.asked.append((form, limited))
        seconds, peak = costs.free(form)
        peak = 90.0 if form.microbatches > 1 else peak
        if limited and peak > 30.0:
            raise InfeasibleError("nothing fits.", peak)
        return (seconds, 26.0) if limited else (seconds, peak)

    exploration = costs.exploration(27.0, search)
    exploration.others = lambda: forms_of([2**k for k in range(6)], (None, HALF, FULL), [False])
    assert exploration.best() == (13.0, 26.0) and (Form(again=FULL), False) in costs.asked
