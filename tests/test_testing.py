"""The assertions for users' tests hold where they should, and say what is otherwise."""

import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import autoshard
from autoshard.errors import StrategyError
from autoshard.testing import UPDATE, assert_collectives, assert_matches_golden


def loss(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"]) ** 2)


STEP = jax.grad(loss)
ARGS = jax.eval_shape(lambda: ({"up": jnp.ones((64, 128)), "down": jnp.ones((128, 64))}, jnp.ones((256, 64))))
OPTIONS = {"cluster": "cpu:8", "mesh": {"data": 8}}
SPLIT = {**OPTIONS, "in_specs": {"x": P("data")}}


@pytest.mark.parametrize("expected", [{"all_reduce": 2}, {("all_reduce", "data"): 2}, {("all_reduce", "data"): 2, "all_gather": 0}])
@pytest.mark.parametrize("target", [None, "shardy"])
def test_expected_collectives_pass(expected, target):
    """By kind, and by kind and axes; planned ones, and those of the program as it is lowered."""
    assert_collectives(STEP, *ARGS, expected=expected, target=target, **SPLIT)


@pytest.mark.parametrize(
    ("expected", "words"),
    [
        ({}, "all_reduce over data: expected none, got 2"),
        ({"all_reduce": 1}, "all_reduce: expected 1, got 2"),
        ({"all_reduce": 2, ("all_gather", "data"): 1}, "all_gather over data: expected 1, got 0"),
    ],
)
def test_others_fail_with_their_lines(expected, words):
    """The message has what was expected, what there is, and the source lines."""
    with pytest.raises(AssertionError, match=words) as raised:
        assert_collectives(STEP, *ARGS, expected=expected, **SPLIT)
    assert "test_testing.py:" in str(raised.value)


def test_a_misspelt_collective_is_refused():
    """Else it would be expected and never there."""
    with pytest.raises(StrategyError, match="all_reduce"):
        assert_collectives(STEP, *ARGS, expected={"allreduce": 2}, **SPLIT)


def test_a_strategy_may_be_given():
    """Then its collectives count."""
    whole = autoshard.evaluate(STEP, *ARGS, **OPTIONS, in_specs={"x": P()})
    assert_collectives(STEP, *ARGS, expected={}, strategy=whole)


@pytest.mark.sample(1)
@pytest.mark.parametrize("target", [None, "cpu"])
def test_collectives_of_all_stages_of_a_pipeline_count(target):
    """Those that are planned, and those of the stages' programs; a number that is off by one fails."""

    def step(params, x):
        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss)(params, x))

    options = {"cluster": "cpu:4", "mesh": {"data": 2}, "stages": 2, "microbatches": 2, "searcher": "data_parallel"}
    strategy = autoshard.search(step, *ARGS, **options)
    planned = [each for stage in strategy.stages for each in stage.cost.collectives]
    n = sum(each.count for each in planned)
    assert n > max(sum(each.count for each in stage.cost.collectives) for stage in strategy.stages)
    assert {each.kind for each in planned} == {"all_reduce"}
    assert_collectives(step, *ARGS, expected={"all_reduce": n}, strategy=strategy, target=target)
    with pytest.raises(AssertionError, match=f"expected {n + 1}, got {n}"):
        assert_collectives(step, *ARGS, expected={"all_reduce": n + 1}, strategy=strategy, target=target)


def test_golden_files_are_written_on_request_and_compared(tmp_path, monkeypatch):
    """A missing file and another sharding fail, with what differs; with the variable set the file is written."""
    split = autoshard.evaluate(STEP, *ARGS, **SPLIT)
    whole = autoshard.evaluate(STEP, *ARGS, **OPTIONS, in_specs={"x": P()})
    file = tmp_path / "goldens" / "step.json"
    with pytest.raises(AssertionError, match=UPDATE):
        assert_matches_golden(split, file)
    monkeypatch.setenv(UPDATE, "1")
    assert_matches_golden(split, file)
    monkeypatch.delenv(UPDATE)
    assert_matches_golden(split, file)
    with pytest.raises(AssertionError, match="all_reduce over data"):
        assert_matches_golden(whole, file)


@pytest.mark.slow
def test_golden_files_are_written_by_an_option_of_pytest(tmp_path):
    """`--update-goldens` writes them in that run alone: without it they are compared, before and after."""
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["autoshard.testing"]\n')
    file = tmp_path / "test_golden.py"
    program = "from strategy_records import EXAMPLE\nimport autoshard\nfrom autoshard.testing import assert_matches_golden\n\n\n"
    file.write_text(f'{program}def test_it():\n    assert_matches_golden(autoshard.Strategy(EXAMPLE), "{tmp_path}/goldens/it.json")\n')
    runs = f"[int(pytest.main(['-q', '-p', 'no:cacheprovider', '{file}', *more])) for more in ([], ['--update-goldens'], [])]"
    code = f"import pytest; import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); print({runs})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, check=True)
    assert done.stdout.splitlines()[-1] == "[1, 0, 0]" and "--update-goldens" in done.stdout
