"""Steps in several passes over their microbatches are pipelines one after the other."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import autoshard
from autoshard.microbatch import passes_of
from autoshard.pipeline.micro_ops import is_backward
from autoshard.pipeline.passes import homes_of
from autoshard.pipeline.stages import stages_of
from autoshard.report.data import to_data
from autoshard.trace import trace
from tests.microbatch.test_several import EXPERTS, WEIGHTS, WIDE, X, Y, adversarial, balanced, sharpness_aware, symmetric

SEVERAL = [
    (sharpness_aware, (WEIGHTS, X, Y)),
    (symmetric, (WEIGHTS, *WIDE)),
    (balanced, (EXPERTS, X, Y)),
    (adversarial, ((WEIGHTS, jax.tree.map(lambda w: 0.7 * w, WEIGHTS)), X, Y)),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("step", "args"), SEVERAL)
def test_results_are_those_of_the_step(step, args, tmp_path):
    """Also from a file; and the explanation and the report draw each pass."""
    options = {"cluster": "cpu:8", "stages": 2, "microbatches": 4, "mesh": {"data": 4}, "schedule": "1f1b", "donate_argnums": ()}
    strategy = autoshard.search(step, *args, **options)
    strategy.save(tmp_path / "found.json")
    found = autoshard.load(tmp_path / "found.json")
    assert found.record.pipeline == strategy.record.pipeline and len(strategy.record.pipeline.passes) == 2
    assert all(f"Pipeline, pass {number} of 2" in str(strategy.explain()) for number in (1, 2))
    drawn = to_data(strategy.report().content)["schedule"]
    assert [len(each["stages"]) for each in (drawn, *drawn["earlier"])] == [2, 2]
    check_all_passes(strategy)
    run, expected = found.apply(step), jax.tree.leaves(jax.jit(step)(*args))
    for one, other in zip(expected, jax.tree.leaves(run(*args)), strict=True):
        assert np.abs(one - other).max() <= 1e-5 * np.abs(one).max()
    assert len(run.executed) == sum(len(order) for own in found.record.pipeline.passes for order in _orders(own))


def test_a_pass_without_gradients_is_all_forward():
    """The statistics of routers, which all layers before the last one are computed for: each stage has some of their products."""
    first, _ = passes_of(trace(balanced, EXPERTS, X, Y), 4)
    staged = stages_of(first.traced, 4, 4)
    assert not any(is_backward(staged.micro)) and set(staged.cut.stages) >= {0, 1, 2, 3}


def check_all_passes(strategy):
    """The strategies of stages are of all passes, and a trace has the tasks of all, one pass after the other."""
    assert strategy.stages == strategy.passes[0] + strategy.passes[1] and [len(own) for own in strategy.passes] == [2, 2]
    assert all(stage._judged is not None for stage in strategy.stages)
    assert strategy.stages[0].record.program.fingerprint == strategy.record.pipeline.earlier[0].stages[0].record.program.fingerprint
    shares = sum(group.compute_seconds for group in strategy.explain().data.layers)
    assert shares == pytest.approx(strategy.cost.compute_seconds, rel=0.02)
    tasks = [event for event in strategy.report().trace["traceEvents"] if event["ph"] == "X" and event["args"].get("of")]
    first, second = ([event for event in tasks if event["args"]["of"] == f"pass {n} of 2" and event["cat"] in "FB"] for n in (1, 2))
    assert len(first) == len(second) == 2 * 2 * 4
    assert max(event["ts"] + event["dur"] for event in first) <= min(event["ts"] for event in second) + 1e-6
    assert max(event["ts"] + event["dur"] for event in second) <= strategy.cost.makespan_seconds * 1e6 * (1 + 1e-6)


def _orders(pipeline):
    """The tasks of each stage."""
    return [word[:: 1 if pipeline.chunks == 1 else 2] for word in pipeline.orders]


def test_arguments_are_where_the_last_pass_that_needs_them_has_them():
    """The labels of a first network are where its pass reads them, all else where the step returns it."""

    def step(both, x, y):
        (actor, critic), _, value, _ = adversarial(both, x, y)
        return (actor, critic), value

    passes = passes_of(trace(step, *SEVERAL[-1][1]), 4)
    homes = dict(zip(passes[-1].traced.graph.argument_paths, homes_of(passes), strict=False))
    labels = passes[0].traced.graph.argument_paths.index("y")
    assert homes.pop("y") == (0, labels) and {number for number, _ in homes.values()} == {1}
