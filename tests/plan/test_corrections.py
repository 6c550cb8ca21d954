"""What a compiler makes of a plan's kernels corrects the tables: exact on what was compiled, a bound still a bound."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from programs import PROGRAMS

import autoshard
from autoshard.judge.evaluate import evaluate
from autoshard.judge.model import CostModel
from autoshard.plan.corrections import differences, learned, seconds_by_op
from autoshard.plan.prepared import prepare
from autoshard.plan.request import Request
from autoshard.search import searcher_of
from autoshard.verify import Clock, CompiledKernel

CLOCK = 1e9


def scanned():
    """A loop of products and its gradient."""

    def step(w, x):
        def loss(w):
            return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0] ** 2)

        return w - 0.1 * jax.grad(loss)(w)

    return step, (jax.ShapeDtypeStruct((3, 256, 256), jnp.float32), jax.ShapeDtypeStruct((512, 256), jnp.float32))


def judged_of(make):
    fn, args = make()
    return autoshard.search(fn, *args, cluster="v5e:2x4", mesh={"data": 8}, remat=None, microbatches=None)._judged


def kernels_of(judged, times):
    """A kernel for each operation, of so many times its predicted seconds."""
    seconds = seconds_by_op(judged.facts, judged.model, judged.record.assignment)
    ops = judged.facts.graph.walk()
    return [
        CompiledKernel(f"k{op}", op, (op,), False, ops[op].trips, round(times * taken * CLOCK / ops[op].trips), 0.0)
        for op, taken in seconds.items()
        if op >= 0 and not ops[op].bodies
    ]


@pytest.mark.parametrize("make", [PROGRAMS["mlp"], scanned])
@pytest.mark.parametrize("times", [3.0, 0.25])
def test_corrected_tables_are_exact_on_what_was_compiled(make, times):
    """The compute of the compiled plan is the compiled one, in loops too; bounds stay bounds, and nothing is corrected twice."""
    judged = judged_of(make)
    facts, assignment = judged.facts, judged.record.assignment
    corrections = learned(facts, judged.model, assignment, kernels_of(judged, times), Clock(CLOCK))
    corrected, model = facts.corrected(corrections), CostModel(judged.model.cluster, judged.model.mesh)
    before, after = (evaluate(each, model, assignment).cost.compute_seconds for each in (facts, corrected))
    assert after == pytest.approx(times * before, rel=0.02)
    for op in facts.graph.walk():
        if not op.bodies:
            assert model.least_op_seconds(corrected, op) <= model.op_seconds(corrected, op, assignment.choice(op.index)) * (1 + 1e-9)
    again = learned(corrected, model, assignment, kernels_of(judged, times), Clock(CLOCK))
    assert again.seconds == pytest.approx(corrections.seconds), "what is corrected already is not corrected twice"


def test_what_a_kernel_computes_besides_is_expected_of_it():
    """A fused operation that leads no kernel counts with the first that computes it, and what no kernel computes takes nothing."""
    judged = judged_of(PROGRAMS["mlp"])
    kernels = kernels_of(judged, 1.0)
    first, second, third, *rest = sorted(kernels, key=lambda kernel: kernel.leader)
    fused = CompiledKernel("fused", first.leader, (first.leader, second.leader), False, 1, first.cycles, 0.0)
    found = differences(judged.facts, judged.model, judged.record.assignment, [fused, *rest], Clock(CLOCK))
    by_op = {each.op.index: each for each in found}
    assert by_op[first.leader].predicted_seconds == pytest.approx((first.cycles + second.cycles) / CLOCK, abs=2 / CLOCK)
    assert by_op[third.leader].compiled_seconds == 0.0 and second.leader not in by_op


def test_a_search_avoids_kernels_that_are_slow_as_compiled():
    """A plan whose products take a hundred times what was predicted is not the answer of the next search."""
    fn, args = PROGRAMS["mlp"]()
    options = {"cluster": "v5e:2x4", "mesh": {"data": 8}, "remat": None, "microbatches": None}
    found = autoshard.search(fn, *args, **options)
    judged = found._judged
    slow = learned(judged.facts, judged.model, found.record.assignment, kernels_of(judged, 1000.0), Clock(CLOCK))
    prepared = prepare(fn, args, Request.of(cluster="v5e:2x4", mesh={"data": 8}), corrections=slow)
    problem = prepared.problem(prepared.meshes[0], None, ())
    again = searcher_of("dynamic_programming").solve(problem, lambda *_: None)
    assert again.assignment.choices != found.record.assignment.choices
    assert again.judgement.cost.makespan_seconds < evaluate(prepared.facts, problem.model, found.record.assignment).cost.makespan_seconds


@pytest.mark.parametrize("times", [3.0, 0.25])
def test_what_is_not_compiled_again_generalises(times):
    """A search that nobody confirms takes kernels in other shapes to be as slow as those that are known; others keep their prediction."""
    judged = judged_of(PROGRAMS["mlp"])
    facts, assignment, model = judged.facts, judged.record.assignment, CostModel(judged.model.cluster, judged.model.mesh)
    exact = learned(facts, judged.model, assignment, kernels_of(judged, times), Clock(CLOCK))
    general = replace(exact, generalises=True)
    op = next(op for op in facts.graph.walk() if op.primitive == "dot_general")
    other = ((0, -1),)
    assert assignment.choice(op.index) != other
    predicted = model.predicted_seconds(facts, op, other)
    ratio = model.op_seconds(facts.corrected(general), op, other) / predicted
    assert model.op_seconds(facts.corrected(exact), op, other) == predicted and ratio == pytest.approx(times, rel=0.05)
    assert model.least_op_seconds(facts.corrected(general), op) <= model.op_seconds(facts.corrected(general), op, other)
