"""JAX's own examples of its primitives are searched, lowered and equal to the unsharded run."""

from __future__ import annotations

import sys

import harnesses
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harnesses import CASES, Outcome, check, difference, each, groups, sample, sweep


def told(outcomes: list[Outcome]) -> list[str]:
    return [f"{outcome.name}: {outcome.status}, {outcome.message}" for outcome in outcomes if outcome.failed]


def test_every_case_is_known():
    """The yardstick has the size that is spoken of, and the sample touches all of it."""
    size = len(CASES), len(groups())
    assert size[0] > 5_400 and size[1] >= 132
    assert size == {(0, 10): (5594, 132), (0, 12): (5468, 132)}.get(jax.__version_info__[:2], size)
    assert sum(len(sample(group)) for group in groups()) >= 400


@pytest.mark.sample(8)
@pytest.mark.parametrize("group", groups())
def test_a_sample_of_the_group_is_equal(group):
    """Searched or sharded at random, the cases compute what the plain function does."""
    assert told(check(sample(group))) == []


def test_cases_are_really_sharded():
    """By the search or at random, where an operation can be: nearly all of the elementwise ones."""
    outcomes = check(sample("add") + sample("mul") + sample("neg"))
    assert sum("random" in outcome.sharded for outcome in outcomes) > len(outcomes) / 2


ALL = [pytest.param(group, marks=pytest.mark.slow(minutes=len(names) / 50)) for group, names in groups().items()]


@pytest.mark.parametrize("group", ALL)
def test_all_cases_of_the_group_are_equal(group):
    """Every case JAX can run is equal, whatever it is sharded by, and none ends the process."""
    outcomes = [outcome for batch in sweep(groups()[group], n_random=2) for outcome in batch]
    assert {outcome.name for outcome in outcomes} == set(groups()[group])
    assert told(outcomes) == []


# --- the check itself ---------------------------------------------------------------------------------------------------


def test_a_wrong_result_is_found(monkeypatch):
    """A lowering that computes something else is told, of the form that did."""
    monkeypatch.setattr(harnesses, "_lowered", lambda *_: lambda x: [x + 1])
    (outcome,) = check(["neg_shape_float32_20_20_"])
    assert outcome.status == "compare" and outcome.message.startswith("random: result 0 differs in 400 of 400 elements")


def test_a_failure_is_that_of_its_case_alone(monkeypatch):
    """Of programs that are compiled together only the one that fails is told so."""

    def lowered(traced, *_):
        def fails(x):
            raise ValueError("no such lowering")

        return fails if traced.graph.values[0].dtype == "int32" else lambda x: [-x]

    monkeypatch.setattr(harnesses, "_lowered", lowered)
    names = [f"neg_shape_{dtype}_20_20_" for dtype in ("float32", "int32", "int8")]
    assert [outcome.status for outcome in check(names)] == ["equal", "run", "equal"]


@pytest.mark.skipif("cholesky_shape_float16_1_1_" not in CASES, reason="this release of JAX lists no case that it refuses")
def test_what_jax_cannot_run_is_told_apart():
    """A case whose plain function JAX refuses is no failure, and says why."""
    (outcome,) = check(["cholesky_shape_float16_1_1_"])
    assert outcome.status == "unsupported" and not outcome.failed and "float16" in outcome.message


def test_whatever_is_refused_is_told_apart(monkeypatch):
    """So in releases of JAX whose examples are all of what it can run."""

    def refused(*_):
        raise NotImplementedError("no kernel for float16")

    monkeypatch.setattr(harnesses, "_plain", refused)
    (outcome,) = check(["neg_shape_float16_20_20_"])
    assert outcome.status == "unsupported" and not outcome.failed and "float16" in outcome.message


FAINT_HEARTED = """
import json, os, sys
for line in sys.stdin:
    names = json.loads(line)
    if any("abs" in name for name in names):
        print("F0101 Check failed: no abs", file=sys.stderr, flush=True)
        os._exit(134)
    print(json.dumps([{"name": name, "status": "equal", "sharded": ["search"]} for name in names]), flush=True)
"""


def test_a_worker_that_ends_names_its_case(monkeypatch):
    """The case in which the process ends is a crash and says why, the others of its batch are checked all the same."""
    monkeypatch.setattr(harnesses, "WORKER", (sys.executable, "-c", FAINT_HEARTED))
    names = ["abs_shape_int8_20_20_", "neg_shape_int8_20_20_", "sign_shape_int8_20_20_"]
    outcomes = {outcome.name: outcome for batch in sweep(names, processes=1) for outcome in batch}
    assert [outcomes[name].status for name in names] == ["crash", "equal", "equal"]
    assert "Check failed: no abs" in outcomes[names[0]].message and outcomes[names[1]].sharded == ("search",)


@pytest.mark.parametrize(
    ("got", "wanted", "words"),
    [
        ([1, 2], [1, 3], "differs in 1 of 2"),
        ([1.0, np.nan], [1.0, np.nan], ""),
        ([1.0, np.inf], [1.0, -np.inf], "differs"),
        ([1.0, 1e-6], [1.0, 0.0], ""),
        ([1.0, 1e-4], [1.0, 0.0], "differs"),
        ([1.0], [1], "float32"),
        ([[1.0]], [1.0], "instead of"),
    ],
)
def test_results_are_compared_by_dtype(got, wanted, words):
    """Bits for integers; for floats what a sum in another order may differ by."""
    found = difference([np.asarray(jnp.asarray(got))], [np.asarray(jnp.asarray(wanted))])
    assert words in found and bool(found) == bool(words)


def test_keys_are_compared_by_their_data():
    """A typed key is the words it is made of."""
    (a,), (b,) = ([harnesses._numbers(jax.random.key(seed))] for seed in (0, 1))
    assert difference([a], [a]) == "" != difference([a], [b])


def test_items_that_fail_are_found_by_halving():
    """Whatever stands beside it, an item gets its own result or its own error."""

    def run(items):
        if 3 in items:
            raise ValueError("three")
        return [10 * item for item in items]

    found = each(run, [1, 2, 3, 4, 5])
    assert found[:2] + found[3:] == [10, 20, 40, 50] and str(found[2]) == "three"
