"""Searches under a memory limit that binds, on random small programs: nothing above it, the true optimum, honest gaps."""

from __future__ import annotations

import random
import sys
from contextlib import suppress
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from problems import eager_cluster, problem_of
from programs import abstract, gpt
from small_graphs import random_small

import autoshard
from autoshard.budgets import BUDGETS
from autoshard.cluster import Cluster
from autoshard.errors import InfeasibleError, SearchLimitError
from autoshard.memory_limit.lagrangian import fitted, least_peak
from autoshard.memory_limit.repair import Repair
from autoshard.mesh_search.bounds import message_bound
from autoshard.problem import Problem
from autoshard.search import (
    Auto,
    BruteForce,
    DataParallel,
    DynamicProgramming,
    FullySharded,
    IntegerProgramming,
    RecursiveProgramming,
    TensorParallel,
    dynamic_programming,
)
from autoshard.search.integer_model import memory_rows
from autoshard.search.low_memory_starts import low_memory_starts

MESHES = ({"data": 4}, {"data": 2, "model": 2})
MOST_ASSIGNMENTS = 50_000
EVALUATE = Problem.evaluate


def limited(seed, limit: float | None = None):
    """The problem of a random program; every fifth on a device whose fast memory holds what is short-lived."""
    fn, args = random_small(seed)
    cluster = eager_cluster("v5e:2x2" if seed % 5 == 0 else "cpu:4")
    return problem_of(fn, *args, mesh=MESHES[seed % 2], cluster=cluster, memory_limit_bytes=limit)


def binding_limit(seed):
    """A limit between the smallest peak found and that of the fastest assignment; None where these are one, or there are too many."""
    try:
        free = BruteForce(MOST_ASSIGNMENTS).solve(limited(seed)).judgement.cost
    except SearchLimitError:
        return None
    with pytest.raises(InfeasibleError) as refused, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[least_peak.__module__], "least_peak", lambda *_: 0.0)  # or it would be refused before prices are tried
        RecursiveProgramming().solve(limited(seed, 1.0))
    least = refused.value.smallest_peak_bytes or 0.0
    limit = least + random.Random(seed).choice([0.0, 0.1, 0.3, 0.5, 0.7, 0.9]) * (free.peak_bytes - least)
    return limit if limit < free.peak_bytes else None


def check(seeds):
    """The number of seeds whose limit binds; on each the searchers are compared to brute force, dynamic programming to recursive.

    Near the least peak of any assignment, few are left, and no single change leads from one to another: there recursive programming
    may be far from the optimum, on one program of five.
    """
    bound = far = 0
    for seed in seeds:
        if (limit := binding_limit(seed)) is None:
            continue
        bound += 1
        exact = BruteForce(MOST_ASSIGNMENTS).solve(limited(seed, limit)).judgement.cost.objective_seconds
        searchers = IntegerProgramming(time_limit_seconds=600.0), DynamicProgramming(), RecursiveProgramming()  # half a minute on two cores
        found = {s.name: s.solve(limited(seed, limit)) for s in searchers}
        objectives = {name: solution.judgement.cost.objective_seconds for name, solution in found.items()}
        for name, solution in found.items():
            assert solution.judgement.cost.peak_bytes <= limit, (seed, name)
            assert solution.lower_bound_seconds <= exact * (1 + 1e-9), (seed, name)
        assert objectives["integer_programming"] == pytest.approx(exact, rel=1e-9), seed
        assert objectives["dynamic_programming"] <= objectives["recursive_programming"], seed
        far += objectives["recursive_programming"] > 1.5 * exact
    assert far <= bound / 5
    return bound


def test_the_limit_is_a_true_constraint():
    """Integer programming is brute force under limits that bind; the other searchers keep them, and bounds are bounds."""
    assert check(range(0, 30)) >= 4


@pytest.mark.slow(minutes=20)
def test_the_limit_is_a_true_constraint_on_many():
    """The same on more than fifty random programs."""
    assert check(range(60, 500)) >= 50


def fits(seeds):
    """The number of programs searched at limits from the least peak of any assignment on; each time something is found."""
    n = 0
    for seed in seeds:
        try:
            with pytest.raises(InfeasibleError) as refused:
                BruteForce(MOST_ASSIGNMENTS // 10).solve(limited(seed, 1.0))  # which judges them all
        except SearchLimitError:
            continue
        least = refused.value.smallest_peak_bytes or 0.0
        for times in (1.0, 1.02, 2.0):
            problem = limited(seed, times * least)
            assert Auto().solve(problem).judgement.cost.peak_bytes <= times * least, (seed, times)
        n += 1
    return n


@pytest.mark.slow
def test_nothing_that_fits_is_refused():
    """At the least peak of any assignment, and somewhat above it, `auto` finds an answer to every random program."""
    assert fits((*range(0, 20), 37, 44, 65)) >= 8


@pytest.mark.slow(minutes=20)
def test_nothing_that_fits_is_refused_of_many():
    """The same of some hundred programs."""
    assert fits(range(20, 400)) >= 100


def residual(layers, width, batch):
    """A train step of residual layers."""

    def loss(weights, x):
        for weight in weights:
            x = x + jnp.tanh(x @ weight)
        return (x**2).mean()

    def step(weights, x):
        value, grads = jax.value_and_grad(loss)(weights, x)
        return [weight - 0.1 * grad for weight, grad in zip(weights, grads, strict=True)], value

    return step, ([abstract((width, width))] * layers, abstract((batch, width)))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("times", "numbers"), [(0.6, {1, 8}), (0.45, {2, 8}), (0.3, {8})])
def test_nothing_that_fits_in_microbatches_is_refused(times, numbers):
    """Where integer programming finds room in some number of microbatches, a search that chooses the number does, too.

    The limits are shares of the peak without one: in one microbatch nothing fits the last two, by proof, and in two nothing the last.
    """
    fn, args = residual(2, 8, 64)
    ask = partial(autoshard.search, fn, *args, cluster="cpu:2", mesh={"data": 2}, donate_argnums=0)
    limit = times * ask(memory_limit_bytes=1e12, microbatches=None, remat=None).cost.peak_bytes
    room = set()
    for number in (1, 2, 8) if times < 0.5 else (1, 8):
        with suppress(InfeasibleError):
            found = ask(memory_limit_bytes=limit, searcher=IntegerProgramming(), microbatches=number, remat=None)
            assert found.cost.peak_bytes <= limit
            room.add(number)
    assert room == numbers
    assert ask(memory_limit_bytes=limit, microbatches="fit").cost.peak_bytes <= limit


@pytest.mark.slow
def test_equal_problems_have_equal_answers_where_only_integer_programming_fits():
    """Its limits are of work: with no time left it still returns what it found, and the second search the same."""
    searcher = Auto(members=(DataParallel(),))
    found = []
    with pytest.raises(InfeasibleError) as refused:
        BruteForce(MOST_ASSIGNMENTS).solve(limited(64, 1.0))
    for _ in range(2):
        solution = searcher.solve(limited(64, refused.value.smallest_peak_bytes))
        assert solution.finder == "integer_programming"
        found.append((solution.assignment.choices, solution.assignment.layouts, solution.assignment.copies))
    assert found[0] == found[1]
    assert searcher.last_resort.time_limit_seconds is None


def test_an_infeasible_limit_is_refused_at_once(monkeypatch):
    """Where the values at the peak take more than the limit in any layouts, at most one more answer is judged.

    After one searcher's proof no other one runs.
    """
    refused = 0
    for seed in range(12):
        with pytest.raises(InfeasibleError) as error:
            RecursiveProgramming().solve(limited(seed, 1.0))
        smallest = error.value.smallest_peak_bytes
        free = RecursiveProgramming().solve(limited(seed))
        least = least_peak(limited(seed), (free.judgement, limited(seed).labels(free.assignment)))
        for limit in (limit for limit in (0.9 * smallest, 0.5 * smallest) if limit < least):
            for searcher in (RecursiveProgramming(), DynamicProgramming(), Auto()):
                problem, calls = limited(seed, limit), []
                monkeypatch.setattr(Problem, "evaluate", lambda *args, judged=EVALUATE, calls=calls: calls.append(args) or judged(*args))
                with pytest.raises(InfeasibleError, match="none takes less than"):
                    searcher.solve(problem)
                monkeypatch.undo()
                assert len(calls) <= 2
                refused += 1
            with suppress(SearchLimitError), pytest.raises(InfeasibleError):
                BruteForce(MOST_ASSIGNMENTS // 10).solve(limited(seed, limit))  # which judges them all
    assert refused >= 10


def test_repair_finds_what_prices_alone_do_not(monkeypatch):
    """On these programs the price of bytes leaves a slower answer or none at all."""
    monkeypatch.setattr(sys.modules[RecursiveProgramming.__module__], "low_memory_starts", lambda _: [])
    limits = {seed: binding_limit(seed) for seed in (64, 200, 260)}

    def objectives():
        found = []
        for seed, limit in limits.items():
            try:
                found.append(RecursiveProgramming().solve(limited(seed, limit)).judgement.cost.objective_seconds)
            except InfeasibleError:
                found.append(float("inf"))
        return found

    repaired = objectives()
    monkeypatch.setattr(Repair, "mixed", lambda self, below, above, priced: below)
    monkeypatch.setattr(Repair, "changed", lambda self, found, first: found)
    by_prices = objectives()
    assert all(ours < theirs for ours, theirs in zip(repaired, by_prices, strict=True))


def test_a_program_too_large_to_be_repaired_keeps_its_smallest_peak(monkeypatch):
    """Where not one assignment may be judged, the answer of the smallest peak is what repair returns."""
    fn, args = gpt()
    problem = problem_of(fn, *args, mesh=MESHES[1], cluster=eager_cluster("v5e:2x2"))
    answers = low_memory_starts(problem)
    monkeypatch.setattr(sys.modules[Repair.__module__], "BUDGETS", replace(BUDGETS, judged_ops=1))
    kept = Repair(problem, 1.0).made_to_fit(answers)
    assert kept is min(answers, key=lambda answer: answer[0].cost.peak_bytes)


@pytest.mark.slow
def test_where_no_price_fits_low_memory_answers_are_the_start():
    """A search that ignores prices, and whose answer no change makes fit, returns a baseline's answer; without starts it refuses."""
    fn, args = gpt()
    free = problem_of(fn, *args, mesh=MESHES[1], cluster=eager_cluster("v5e:2x2"))
    whole = free.start()
    found = free.evaluate(free.assignment(whole)), whole
    peaks = [judgement.cost.peak_bytes for judgement, _ in low_memory_starts(free)]
    assert peaks == [searcher.solve(free).judgement.cost.peak_bytes for searcher in (FullySharded(stage=3), TensorParallel())]
    assert all(free.evaluate(free.assignment(labels)).cost == judgement.cost for judgement, labels in low_memory_starts(free))
    limited = problem_of(fn, *args, mesh=MESHES[1], cluster=eager_cluster("v5e:2x2"), memory_limit_bytes=min(peaks))
    assert fitted(limited, lambda _: found, 4, low_memory_starts).judgement.cost.peak_bytes <= min(peaks) < found[0].cost.peak_bytes / 1.5
    with pytest.raises(InfeasibleError):
        fitted(limited, lambda _: found, 4)


@pytest.mark.slow
def test_a_looser_limit_gives_no_slower_answer():
    """Changes may lead further from another answer under prices than from the best of them: all are starts, under every limit."""
    optimizer = optax.adamw(1e-3)

    def step(params, state, x, y):
        def loss(p):
            return ((jax.nn.relu(x @ p["up"] + p["b1"]) @ p["down"] + p["b2"] - y) ** 2).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    params = {name: abstract(shape) for name, shape in {"up": (512, 2048), "b1": (2048,), "down": (2048, 512), "b2": (512,)}.items()}
    args = params, jax.eval_shape(optimizer.init, params), abstract((1024, 512)), abstract((1024, 512))

    def under(limit, searcher):
        options = {"cluster": "v5e:2x4", "mesh": {"data": 8}, "donate_argnums": (0, 1)}
        return autoshard.search(step, *args, searcher=searcher, memory_limit_bytes=limit, **options).cost

    for searcher in ("recursive_programming", "dynamic_programming"):
        free = under(None, searcher)
        seconds = [under(share * free.peak_bytes, searcher).objective_seconds for share in (0.9, 0.93, 0.96, 0.99)]
        assert seconds == sorted(seconds, reverse=True) and free.objective_seconds < seconds[-1]


def large(limit=None, mesh=None):
    """Six layers, of which not all can keep their gathered weights for the backward pass within 31 GB."""
    fn, args = gpt(n_layers=6, d_model=8192, heads=64, ffn=32768, vocab=32768, batch=512, seq=2048, remat=True)
    return problem_of(fn, *args, mesh=mesh or {"data": 64}, cluster=Cluster.parse("v5p:4x4x4"), memory_limit_bytes=limit)


@pytest.mark.slow
def test_layers_are_mixed_and_the_dual_bound_is_tight(monkeypatch):
    """Where some layers fit and all do not, some have the faster layouts, and the dual bound leaves a fifth of the gap at most."""
    limit = 31e9
    free, found = large(), large(limit)
    fastest, within = (DynamicProgramming().solve(problem) for problem in (free, found))
    cost, bound = within.judgement.cost, within.lower_bound_seconds
    assert fastest.judgement.cost.peak_bytes > limit >= cost.peak_bytes > 0.95 * limit
    assert bound > cost.objective_seconds - 0.2 * (cost.objective_seconds - fastest.lower_bound_seconds)
    monkeypatch.setattr(dynamic_programming, "BUDGETS", replace(BUDGETS, dual_steps=0))
    assert DynamicProgramming().solve(large(limit)).lower_bound_seconds < bound
    monkeypatch.setattr(Repair, "mixed", lambda self, below, above, priced: below)
    assert DynamicProgramming().solve(large(limit)).judgement.cost.objective_seconds > cost.objective_seconds


@pytest.mark.slow
def test_other_meshes_have_the_dual_bound():
    """The multiplier found on one mesh bounds another: a mesh that cannot be better is cut."""
    limit = 31e9
    one, other = large(limit), large(limit, {"data": 16, "model": 4})
    found = DynamicProgramming().solve(one)
    alone, _ = message_bound(other, 12)
    bound, hints = message_bound(other, 12, hints=found.hints)
    assert alone < bound <= DynamicProgramming().solve(other, hints=hints).judgement.cost.objective_seconds
    assert bound > found.judgement.cost.objective_seconds * 0.99


def test_partial_sums_kept_for_others_are_in_no_row():
    """A partial sum is kept for those it is combined with, but not under other labels: rows exclude no assignment that fits."""
    limit = 5058.0
    problem = limited(414, limit)
    fits = problem.labels(BruteForce(MOST_ASSIGNMENTS).solve(problem).assignment)
    refused = [(1,), (1,), (1,), (1,), ((2, 0),), ((2, 1),), ((1, -1),)]
    judgement = problem.evaluate(problem.assignment(refused))
    assert judgement.cost.peak_bytes > limit and len(judgement.peak.partials) == 3
    tables = problem.whole_tables()
    at, there = ([options.index(label) for options, label in zip(tables.labels, labels, strict=True)] for labels in (refused, fits))
    for row in memory_rows(problem, [len(options) for options in tables.labels], np.array(at), judgement.peak, limit):
        assert row.used(there) <= row.limit < row.used(at)
