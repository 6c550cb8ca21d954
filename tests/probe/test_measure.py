"""Measuring, with a clock that the tests set: how long runs are made, what is taken off, what counts."""

import pytest

from autoshard.probe import measure as module
from autoshard.probe.measure import LEAST_TRIPS, MOST_TRIPS, Effort, measure


class Machine:
    """A machine whose runs take ``start + trips * single`` seconds, more while it is disturbed."""

    def __init__(self, start: float, disturbed_rounds: int = 0, factor: float = 10.0):
        self.now, self.start, self.disturbed, self.factor, self.trips = 0.0, start, disturbed_rounds, factor, []

    def loop(self, single: float):
        def compiled(trips: int):
            self.trips.append(trips)
            calls = iter(range(10**6))

            def run():
                slow = self.factor if next(calls) < self.disturbed else 1.0
                self.now += slow * (self.start + trips * single)

            return run

        return compiled


@pytest.fixture
def machine(monkeypatch):
    """Makes a machine the clock."""

    def make(*args, **options):
        made = Machine(*args, **options)
        monkeypatch.setattr(module.time, "perf_counter", lambda: made.now)
        return made

    return make


def measured(machine, singles, guesses, rounds=5):
    effort = Effort(run_seconds=0.01, total_seconds=0.0, least_rounds=rounds)
    return measure([machine.loop(single) for single in singles], guesses, machine.start, effort, lambda fraction: None)[0]


def test_what_starting_costs_is_taken_off(machine):
    """A start a hundred times as long as a trip does not show."""
    assert measured(machine(1e-3), [1e-5, 2e-3], [1e-5, 2e-3]) == pytest.approx([1e-5, 2e-3])


def test_a_disturbed_round_does_not_count(machine):
    """Of the rounds the fastest counts: runs that took ten times as long leave no trace."""
    assert measured(machine(1e-4, disturbed_rounds=5), [1e-5, 1e-4], [1e-5, 1e-4]) == pytest.approx([1e-5, 1e-4])


@pytest.mark.parametrize(("disturbed", "expected"), [(0, 1.0), (100, 1.0), (5, 10.0)])
def test_disturbance_is_told(machine, disturbed, expected):
    """Where most but not all rounds are slow the typical run is that much longer than the fastest; even slowness cannot be told."""
    made = machine(0.0, disturbed_rounds=disturbed)
    effort = Effort(run_seconds=0.01, total_seconds=0.0, least_rounds=4)
    assert measure([made.loop(1e-5)] * 3, [1e-5] * 3, 0.0, effort, lambda fraction: None)[1] == pytest.approx(expected)


@pytest.mark.parametrize("wrong", [1e-3, 1.0, 1e3])
def test_a_wrong_guess_is_put_right(machine, wrong):
    """However wrong the guess of a trip's seconds, runs end up about as long as they should be, and what is found does not change."""
    made = machine(1e-4)
    assert measured(made, [1e-5], [1e-5 * wrong]) == pytest.approx([1e-5])
    assert 0.005 <= made.trips[-1] * 1e-5 <= 0.05


def test_the_number_of_trips_is_bounded(machine):
    """A trip of an hour runs a few times, one of a nanosecond not without end."""
    made = machine(0.0)
    measured(made, [3600.0, 1e-12], [3600.0, 1e-12], rounds=1)
    assert min(made.trips) == LEAST_TRIPS and max(made.trips) == MOST_TRIPS


def test_rounds_end_when_the_time_is_up(machine):
    """No round starts after the total, and at least the least number of rounds runs."""
    made = machine(0.0)
    spent = []
    for total in (0.0, 1.0):
        before = made.now
        measure([made.loop(1e-4)], [1e-4], 0.0, Effort(0.01, total, least_rounds=2, most_rounds=1000), lambda fraction: None)
        spent.append(made.now - before)
    assert spent[0] < 0.1 and 1.0 <= spent[1] < 1.1


def test_what_is_settled_decides_how_often(machine):
    """Several processes run as many trips and rounds as one of them says, whatever they measured themselves."""
    made = machine(0.0)
    times = iter([1e-3] * 4)
    effort = Effort(run_seconds=0.016, total_seconds=1.0, least_rounds=0)

    def settled(seconds: float) -> float:
        return next(times, 2.0)

    runs: list[float] = []
    measure([made.loop(1e-5)], [1e-5], 0.0, effort, runs.append, settled)
    assert made.trips[-1] == 16
    assert len(list(times)) == 0 and made.trips[0] > 1000
