"""plan='full': the fastest of all, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autoshard
from autoshard.ask.strategy import Strategy
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.program_facts import program_facts
from autoshard.ir import Mesh
from autoshard.ir.rewrites import Recompute
from autoshard.pipeline.layering import Layering
from autoshard.pipeline.plan_search import Planning, search_plans
from autoshard.pipeline.plans import FILL, Bounds, Candidate, Estimate, Plans
from autoshard.pipeline.plans import Asked as Wanted
from autoshard.plan import prepared
from autoshard.plan.full_plan import CORE_SECONDS, Searches, _pipelines
from autoshard.plan.full_plan import fullest as all_found
from autoshard.plan.full_search import problems_on
from autoshard.plan.incumbent import Incumbent
from autoshard.plan.prepared import traced_of
from autoshard.plan.request import Request
from autoshard.plan.stage_searches import Call, in_stages
from autoshard.plan.user_pins import Asked, UserPins
from autoshard.progress import silent
from autoshard.recompute import Options
from autoshard.rewrite import applied
from autoshard.rules import rules_of
from autoshard.run.tracing import TracedOnce
from autoshard.search import DynamicProgramming
from benchmarks import models


def small(n_layers=4, batch=8):
    return models.gpt(n_layers, 32, 4, 64, batch=batch, length=16, dtype=jnp.float32)


@pytest.fixture(scope="module")
def found():
    """A step without stages, and one with."""
    fn, args = small(2)
    quickly = {"cluster": "cpu:4", "searcher": "data_parallel", "remat": None}
    forms = {"microbatches": None}, {"stages": 2, "microbatches": 4, "schedule": "1f1b"}
    return [autoshard.search(fn, *args, **quickly, **form) for form in forms]


CLUSTER = Cluster.parse("cpu:4")
ERROR = CLUSTER.device.pair_error
NO_BOUNDS = (Bounds(0.0, 0.0),) * 3
ALONE_IN_TWO = [Candidate(2, 4)]


def fullest(*arguments):
    """The fastest of all."""
    return all_found(*arguments)[0]


def refused(*_):
    raise autoshard.InfeasibleError("none fits")


def estimate(n_stages, seconds, schedule="1f1b"):
    """Of a plan that promises so many seconds."""
    layering = Layering((1,) * n_stages, (0,) * n_stages, seconds, (1.0,) * n_stages)
    mesh, alike = Mesh((("data", max(4 // n_stages, 1)),)), ((None,) * n_stages, seconds, (False,) * n_stages)
    return Estimate(Candidate(n_stages, 4), schedule, mesh, layering, (), *alike)


def test_the_answer_is_the_fastest(found):
    """A pipeline where nothing else fits, the step without stages where that is faster."""
    plain, pipeline = found
    alone = fullest(Searches(refused, lambda *_: None, lambda *_: [pipeline], lambda: ALONE_IN_TWO), ERROR, None, silent)
    assert alone.record.pipeline is not None
    both = fullest(Searches(lambda *_: [plain], lambda *_: None, lambda *_: [pipeline], lambda: ALONE_IN_TWO), ERROR, None, silent)
    assert both.cost.makespan_seconds == min(plain.cost.makespan_seconds, pipeline.cost.makespan_seconds)
    assert "no stages in 1 microbatch " in both.notes[-1]
    assert "2 stages in 4 microbatches" in both.notes[-1]
    with pytest.raises(autoshard.InfeasibleError, match="none fits"):
        fullest(Searches(refused, lambda *_: None, refused, lambda: ALONE_IN_TWO), ERROR, None, silent)


def test_only_what_may_be_fastest_is_searched(found):
    """No pipelines that promise more than the step without stages takes; each number once."""
    plain, pipeline = found
    asked = []

    def staged(like, core_seconds, seconds):
        asked.append((like.candidate.n_stages, like.candidate.n_microbatches, like.schedule))
        return [pipeline]

    far = Plans((estimate(2, 1e-9, "zero_bubble"), estimate(2, 2e-9), estimate(4, 3e-9), estimate(1, 4e-9)), NO_BOUNDS, 3)
    fullest(Searches(refused, lambda *_: far, staged), ERROR, None, silent)
    assert asked == [(2, 4, "zero_bubble"), (4, 4, "1f1b")]
    asked.clear()
    near = Plans((estimate(1, 0.9e9), estimate(2, 1e9)), NO_BOUNDS, 2)
    assert fullest(Searches(lambda *_: [plain], lambda *_: near, staged), ERROR, None, silent).record.pipeline is None
    assert asked == []


def test_what_stages_alone_would_search_is_searched(found):
    """In each number of microbatches, unless bounds or estimates say that it is slower than what was found."""
    plain, pipeline = found
    asked, seconds = [], plain.cost.makespan_seconds

    def staged(like, *_):
        asked.append(like)
        return [pipeline]

    alone = [Candidate(n, k) for n in (2, 4, 8) for k in (4, 8)]
    bounds = (Bounds(0.5 * seconds, 0.0, 2), Bounds(seconds, 0.0, 4), Bounds(0.0, 0.0, 8))
    ranked = estimate(2, 1.05 * seconds), estimate(8, 1.2 * seconds)
    for known, slower in (((), set()), (ranked, {Candidate(8, 4)})):
        asked.clear()
        fullest(Searches(lambda *_: [plain], lambda *_, r=known: Plans(r, bounds, 1), staged, lambda: alone), ERROR, None, silent)
        assert asked == [each for each in alone if each.n_stages != 4 and each not in slower]


def test_the_step_without_stages_is_searched_first(found):
    """However far from pipelines it is estimated, so that no answer is slower than its own; pipelines are compared with what it takes."""
    plain, _ = found
    asked = []

    def compare(progress, until, cpu_seconds, below):
        asked.append(below)
        return Plans((estimate(2, 1e-9), estimate(1, 1e9)), NO_BOUNDS, 2)

    best = fullest(Searches(lambda *_: [plain], compare, refused), ERROR, None, silent)
    assert best.cost == plain.cost and asked == [plain.cost.makespan_seconds]


def test_what_other_variants_have_found_has_to_be_beaten(found):
    """No pipeline is compared or searched that promises no more, and other variants have to beat what is found of this one."""
    plain, pipeline = found
    asked, known = [], Incumbent(makespan_seconds=pipeline.cost.makespan_seconds / 4)

    def compare(progress, until, cpu_seconds, below):
        asked.append(below)
        return Plans((estimate(2, below),), NO_BOUNDS, 1)

    with pytest.raises(autoshard.InfeasibleError, match="none fits"):
        all_found(Searches(refused, compare, lambda *_: asked.append("staged")), ERROR, None, silent, (), known)
    assert asked == [known.makespan_seconds]
    all_found(Searches(lambda *_: [plain], lambda *_: None, refused), ERROR, None, silent, (), known := Incumbent())
    assert known.makespan_seconds == plain.cost.makespan_seconds


def test_the_forms_of_a_full_search_are_in_its_trail(found):
    """What was found, fastest first, then what is left of pipelines, by their estimates."""
    plain, pipeline = found
    plans = Plans((estimate(2, 1e-9), estimate(4, 1e9)), NO_BOUNDS, 2)
    best = fullest(Searches(lambda *_: [plain], lambda *_: plans, lambda *_: [pipeline]), ERROR, None, silent)
    trail = best.record.trail
    assert [each.outcome for each in trail] == ["taken", "slower", "not searched: others are estimated to be faster"]
    assert {each.form for each in trail[:2]} == {"1 microbatch", "2 stages, 4 microbatches"}
    assert (trail[2].form, trail[2].estimated_seconds) == ("4 stages, 4 microbatches", 1e9)


def test_a_pipeline_whose_seconds_are_over_is_no_interrupt(found, monkeypatch):
    """The search of each has its own seconds of one core; one that ends early before those was interrupted, and ends all."""
    plain, pipeline = found
    early = Strategy(replace(pipeline.record, stats={"ended_early": 1}), pipeline._traced, passes=pipeline.passes)
    for computing, expected in ((CORE_SECONDS, [None, None]), (0.0, [None])):
        clock = iter([0.0, 0.0, 0.0, computing, 0.0, 0.0, 0.0])
        monkeypatch.setattr("autoshard.plan.full_plan.thread_seconds", clock.__next__)
        given = []

        def staged(like, core_seconds, seconds, given=given):
            given.append(seconds)
            return [early]

        plans = Plans((estimate(2, 1e-9), estimate(4, 1e-9)), NO_BOUNDS, 2)
        fullest(Searches(lambda *_: [plain], lambda *_, plans=plans: plans, staged), ERROR, None, silent)
        assert given == expected


def test_the_gap_is_a_share_of_the_answer(found):
    """A bound of half the answer's seconds leaves half of them, as a strategy's own gap says it."""
    plain, pipeline = found
    bounded = Plans((), (Bounds(0.0, plain.cost.objective_seconds / 2),), 0)
    searches = Searches(lambda *_: [plain], lambda *_: bounded, lambda *_: [pipeline])
    assert "(gap 50 %)" in fullest(searches, ERROR, None, silent).notes[-1]


def test_a_search_that_is_interrupted_has_its_best_answer(found):
    """The strategy that was found by then; the interrupt itself where there was none."""
    plain, _ = found

    def interrupted(*_):
        raise KeyboardInterrupt

    searches = Searches(lambda *_: [plain], lambda *_: None, interrupted, lambda: ALONE_IN_TWO)
    best = fullest(searches, ERROR, None, silent, (KeyboardInterrupt,))
    assert best.cost == plain.cost
    first = fullest(Searches(lambda *_: [plain], interrupted, None), ERROR, None, silent, (KeyboardInterrupt,))
    assert first.cost == plain.cost
    with pytest.raises(KeyboardInterrupt):
        fullest(Searches(lambda *_: [plain], lambda *_: None, interrupted, lambda: ALONE_IN_TWO), ERROR, None, silent)


def test_an_interrupt_is_for_the_searches_that_are_left_too(found):
    """After Ctrl-C in the comparison of plans, or in the search without stages, there is no other search."""
    plain, pipeline = found
    early = Strategy(replace(plain.record, stats={"ended_early": 1}), plain._traced)
    near = [estimate(1, 1e9), estimate(2, 0.0)]
    for whole, ended in ((plain, True), (early, False)):
        plans, given = Plans(tuple(near), NO_BOUNDS, 2, ended), []

        def timed(strategy, seconds, given=given):
            given.append(seconds)
            return [strategy]

        searches = Searches(lambda s: timed(whole, s), lambda *_: plans, lambda like, core, s: timed(pipeline, s))  # noqa: B023
        fullest(searches, ERROR, None, silent, (KeyboardInterrupt,))
        assert given == [None]


def test_pipelines_are_searched_by_their_fastest_schedules():
    """However slow others of the same numbers of stages and microbatches are."""
    two, four = Candidate(2, 8), Candidate(4, 8)
    pairs = [(two, "1f1b"), (Candidate(1, 8), "1f1b"), (four, "1f1b"), (four, "gpipe"), (two, "gpipe")]
    found = _pipelines(SimpleNamespace(ranked=[SimpleNamespace(candidate=candidate, schedule=name) for candidate, name in pairs]))
    assert [(each.candidate, each.schedule) for each in found] == [(two, "1f1b"), (four, "1f1b")]


@pytest.mark.slow(minutes=5)
def test_a_planned_pipeline_computes_again_what_its_plan_says():
    """Where plain stages do not fit: its step time is the plan's within some per cent, its peak within the limit, its loss equal."""
    fn, args = models.gpt(8, 128, 4, 256, batch=32, length=512, dtype=jnp.float32)
    known = traced_of(fn, args, 0, (), CLUSTER)
    options = Options(known[0], known[1], CLUSTER.device)
    every = options.all

    def recomputing(program):
        facts = program_facts(program.graph, rules_of(program.graph), compiler_of(CLUSTER))
        return applied(Recompute(Options(program, facts, CLUSTER.device).all[-1]), program)

    def plan(limit):
        asked = Wanted(limit, stages=[2], microbatches=8, recomputing=[recomputing])
        return search_plans(known[0], CLUSTER, partial(problems_on, UserPins(Asked(), known[0].graph), None), asked).ranked[0]

    free = plan(1e15)
    limit = 0.6 * max(free.layering.peak_bytes)
    found = plan(limit)
    assert set(free.again) == {None} and 0 in found.again
    own = {"mesh": dict(found.mesh.axes), "memory_limit_bytes": limit, "microbatches": 8, "schedule": "1f1b"}
    request = Request(cluster=CLUSTER, searcher=DynamicProgramming(), donate_argnums=0, **own)
    call = Call(fn, args, request, silent, options.by_part([(share, None if again is None else every[-1]) for share, again in found.parts]))
    strategy = Strategy.of(in_stages(call, 2, known)[0])
    assert strategy.record.program.remat is not None
    assert strategy.cost.makespan_seconds == pytest.approx(found.makespan_seconds, rel=0.1)
    assert strategy.cost.peak_bytes <= limit
    state, *batch = jax.tree.map(lambda x: jnp.full(x.shape, 0.01 if jnp.issubdtype(x.dtype, jnp.floating) else 1, x.dtype), args)
    expected = float(jax.jit(lambda *args: fn(*args)[1])(state, *batch))  # without its gradients, which take gigabytes
    _, loss = strategy.apply(fn, devices=jax.devices()[:4])(state, *batch)  # the state is donated
    np.testing.assert_allclose(loss, expected, rtol=1e-5)


def tower(batch, width):
    """A step of six equal products."""

    def step(params, x):
        def loss(params):
            h = x
            for w in params:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    return step, ([jax.ShapeDtypeStruct((width, width), jnp.float32)] * 6, jax.ShapeDtypeStruct((batch, width), jnp.float32))


@pytest.mark.parametrize(
    ("program", "schedules", "most"),
    [
        (tower(16, 64), ("1f1b", "zero_bubble"), 8),
        pytest.param(tower(16, 64), tuple(FILL), 16, marks=pytest.mark.slow),
        pytest.param(tower(4096, 2048), tuple(FILL), 64, marks=pytest.mark.slow),
        pytest.param(models.gpt(4, 64, 4, 128, batch=16, length=32), tuple(FILL), 16, marks=pytest.mark.slow),
    ],
)
def test_no_plan_is_below_its_bounds(program, schedules, most):
    """Those of all stages, microbatches and schedules are searched as wholes: the bounds of computing and of objectives hold for each."""
    (fn, args), cluster = program, Cluster.parse("v5e:2x2")  # whose communication is hidden in part
    traced = traced_of(fn, args, 0, (), cluster)[0]
    planning = Planning.of(traced, cluster, partial(problems_on, UserPins(Asked(), traced.graph), None), Wanted(math.inf, schedules))
    planning.run()
    compared = 0
    for candidate in (each for each in planning.known if each.n_microbatches <= most):
        bounds = planning.bounds(candidate)
        for name in planning.estimator.schedules(candidate):
            staged = {} if candidate.n_stages == 1 else {"stages": candidate.n_stages, "schedule": name}
            options = staged | {"microbatches": candidate.n_microbatches, "donate_argnums": 0, "cluster": cluster}
            cost = autoshard.search(fn, *args, **options).cost
            assert cost.makespan_seconds >= bounds.computing_seconds * (1 - 1e-9), (candidate, name)
            assert cost.objective_seconds >= bounds.objective_seconds * (1 - 1e-9), (candidate, name)
            compared += 1
    assert compared >= 5


@pytest.mark.slow(minutes=2)
def test_a_full_search_runs():
    """It is no slower than the step without stages, and computes the same loss."""
    fn, args = small()
    plain = autoshard.search(fn, *args, cluster="cpu:4")
    full = autoshard.search(fn, *args, cluster="cpu:4", plan="full")
    assert full.cost.makespan_seconds <= plain.cost.makespan_seconds * (1 + 1e-9)
    assert full.notes[-1].startswith("plan='full' compared")
    state, *batch = jax.tree.map(lambda x: jnp.full(x.shape, 0.01 if jnp.issubdtype(x.dtype, jnp.floating) else 1, x.dtype), args)
    _, loss = full.apply(fn, devices=jax.devices()[:4])(state, *batch)
    np.testing.assert_allclose(loss, fn(state, *batch)[1], rtol=1e-5)


def scanned(layers, batch, width):
    """A step of equal layers in a scan."""

    def step(params, x):
        def loss(params):
            return jnp.mean(jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w["up"]) @ w["down"], None), x, params)[0] ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    up, down = (jax.ShapeDtypeStruct((layers, *shape), jnp.float32) for shape in ((width, 4 * width), (4 * width, width)))
    return step, ({"up": up, "down": down}, jax.ShapeDtypeStruct((batch, width), jnp.float32))


ALONE = ({}, {"microbatches": "auto"}, {"microbatches": 2}, {"remat": "auto"}, {"remat": "full"}, {"stages": 2}, {"stages": 4})
FIVE = {
    "tower": lambda: tower(64, 64),
    "wide tower": lambda: tower(2048, 512),
    "scanned": lambda: scanned(4, 512, 128),
    "gpt": small,
    "gpt of a large batch": lambda: small(2, 32),
}


@pytest.mark.slow(minutes=5)
@pytest.mark.parametrize("name", FIVE)
@pytest.mark.parametrize("share", [2.0, 0.7])
def test_a_full_plan_is_no_slower_than_any_option_alone(name, share):
    """Where memory does not bind, and where it does: its candidates are those of every option."""
    fn, args = FIVE[name]()
    asked = {"cluster": "cpu:4", "donate_argnums": 0, "confirm": False}
    asked["memory_limit_bytes"] = share * autoshard.search(fn, *args, **asked).cost.peak_bytes
    full = autoshard.search(fn, *args, plan="full", **asked)
    for alone in ALONE:
        try:
            found = autoshard.search(fn, *args, **asked, **alone)
        except autoshard.AutoshardError:
            continue
        assert full.cost.makespan_seconds <= found.cost.makespan_seconds * (1 + 1e-6), (alone, found.cost, full.notes[-1])


def test_layers_with_a_shard_map_are_searched_as_they_are():
    """What runs on shards is not taken apart into layers: the answer is that without stages."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])

    @partial(jax.shard_map, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P("data"))
    def mixed(x, w):
        return jnp.tanh(x @ w)

    def step(weights, x):
        def loss(weights):
            found = x
            for w in weights:
                found = found + mixed(found, w)
            return jnp.mean(found**2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, jax.grad(loss)(weights))

    args = [jnp.ones((8, 8))] * 6, jnp.ones((16, 8))
    plain, full = (autoshard.search(step, *args, cluster="cpu:4", **options) for options in ({}, {"plan": "full"}))
    assert full.cost == plain.cost
    assert full.notes[-1].startswith("plan='full' compared no stages")


def test_a_full_search_traces_once(monkeypatch):
    """Its searches share the trace, and the facts of it, whatever mesh they are told."""
    made = []
    monkeypatch.setattr(prepared, "program_facts", lambda *program: made.append(program) or program_facts(*program))

    def step(w, x):
        return jnp.tanh(x @ w)

    w, x = jnp.ones((8, 8)), jnp.ones((16, 8))
    found = autoshard.search(step, w, x, cluster="cpu:2", plan="full", microbatches=None)
    assert len(made) == 1
    assert found._call[0] is step
    once, (first, second) = TracedOnce(step), [(), ("data", "model")]
    known = traced_of(once, (w, x), (), first, CLUSTER)
    again = traced_of(once, (w, x), (), second, CLUSTER)
    assert known[0] is again[0]
    assert known[1] is again[1]
    assert traced_of(once, (w, x), (), (), Cluster.parse("v5e:2x2"))[1] is not known[1]


def test_what_is_refused():
    """Another plan, and a number of stages beside one that is searched; a schedule without a pipeline would say nothing."""
    for given, words in (({"plan": "best"}, "'sharding' or 'full', got 'best'"), ({"plan": "full", "stages": 2}, "got stages=2")):
        with pytest.raises(autoshard.ShardingError, match=words):
            Request.of(**given)
    with pytest.raises(autoshard.ShardingError, match="got schedule='gpipe' without one"):
        Request.of(schedule="gpipe")
    assert Request.of(schedule="gpipe", plan="full").is_pipeline


@pytest.mark.slow
def test_a_decorated_step_has_a_full_plan():
    """`parallelize` takes the plan as `search` does, and refuses a misspelt one at once."""
    with pytest.raises(autoshard.ShardingError, match="'sharding' or 'full'"):
        autoshard.parallelize(lambda x: x, plan="best")
    fn, args = small(2)
    found = autoshard.parallelize(fn, cluster="cpu:2", plan="full", progress=False).search(*args)
    assert found.notes[-1].startswith("plan='full' compared")
