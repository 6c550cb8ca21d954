"""The demo: real data, equal losses, and exit codes that say when they are not."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import numpy as np
import pytest

from autoshard.cli import main
from autoshard.cli.terminal import progress
from autoshard.demo import gpt, lenet, run
from autoshard.demo.programs import PROGRAMS, named
from autoshard.errors import AutoshardError
from autoshard.render import to_html, to_text


@pytest.fixture(scope="module")
def outcome():
    """A short run of the smaller demo."""
    with progress() as callback:
        return run.train(named("lenet")[0], 3, callback)


def test_sharded_training_is_the_single_device_training(outcome):
    """The losses on 8 devices are those on one, fall, and the compiled module holds exactly the predicted collectives."""
    assert outcome.agrees and outcome.difference <= 1e-5
    assert outcome.sharded.losses[-1] < outcome.sharded.losses[0]
    assert outcome.collectives and all(row.agrees for row in outcome.collectives)


def test_what_was_found_is_never_predicted_slower_than_the_baselines(outcome):
    """Of the strategies shown, the one found has the least predicted step time."""
    seconds = {name: strategy.cost.makespan_seconds for name, strategy in outcome.strategies.items()}
    assert list(seconds) == ["auto", "data_parallel", "fully_sharded"]
    assert seconds["auto"] == min(seconds.values())


def test_the_report_shows_the_whole_story(outcome):
    """Text and HTML have the three strategies, the sharding, both loss curves, the collectives and the verdict."""
    report = run.report(outcome)
    for shown in (to_text(report), to_html(report)):
        for words in ("fully_sharded", "model.dense1.kernel", f"{outcome.reference.losses[-1]:.6f}", "all_reduce", "agree", "a step on 8"):
            assert words in shown
    assert json.loads(json.dumps(run.summary(outcome), allow_nan=False))["agrees"] is True


@pytest.mark.sample(1)
@pytest.mark.parametrize("wrong", [1.01, float("nan")])
def test_losses_that_differ_fail_the_demo(outcome, monkeypatch, capsys, wrong):
    """A loss that is off, or is no number, makes the command exit with 1 and say so."""
    losses = (*outcome.sharded.losses[:-1], outcome.sharded.losses[-1] * wrong)
    monkeypatch.setattr(run, "train", lambda *_: replace(outcome, sharded=replace(outcome.sharded, losses=losses)))
    assert main(["demo", "--only", "lenet"]) == 1
    out, err = capsys.readouterr()
    assert "DISAGREE" in out and "lenet" in err
    assert main(["demo", "--only", "lenet", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[0]["agrees"] is False


@pytest.mark.slow
def test_a_fresh_process_gets_its_virtual_devices():
    """Without any flags in the environment the command runs on 8 virtual devices and prints JSON alone."""
    command = [sys.executable, "-m", "autoshard.cli", "demo", "--only", "lenet", "--steps", "2", "--json"]
    environment = {"PATH": "", "HOME": "/", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    found = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert found.returncode == 0, found.stderr
    (lenet_found,) = json.loads(found.stdout)
    assert lenet_found["agrees"] and lenet_found["strategies"]["data_parallel"]["mesh"] == {"data": 8}


def test_an_unknown_program_is_refused():
    """A demo that does not exist is refused with the names of those that do."""
    with pytest.raises(AutoshardError, match="gpt, lenet"):
        named("bert")


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
def test_data_is_real_equal_every_time_and_of_the_announced_shape(program):
    """Batches have the example's shapes and dtypes, come out equal twice, and differ from step to step."""
    first, again = list(program.batches(2)), list(program.batches(2))
    for batch in first:
        assert [(x.shape, x.dtype) for x in batch] == [(x.shape, x.dtype) for x in program.arguments()[2:]]
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True))
    assert not np.array_equal(first[0][0], first[1][0])


def test_the_text_is_english_and_each_target_follows_its_token():
    """The corpus is Python's documentation, and targets are the tokens shifted by one."""
    text = gpt.corpus()
    assert len(text) > 100_000 and b"The following" in text
    tokens, targets = next(iter(gpt.batches(1)))
    assert np.array_equal(tokens[:, 1:], targets[:, :-1]) and tokens.max() < gpt.VOCABULARY


def test_digits_are_drawn_apart():
    """Each digit's dots are 7 x 5, no two are alike, and images of one digit differ."""
    assert len({*lenet.DOTS}) == lenet.CLASSES and all([len(row) for row in dots.split()] == [5] * 7 for dots in lenet.DOTS)
    generator = np.random.default_rng(0)
    one, other = (lenet.drawn(8, generator) for _ in range(2))
    assert one.min() >= 0 and one.max() <= 1 and not np.array_equal(one, other)


def test_the_demo_says_what_to_try_next(outcome, monkeypatch, capsys):
    """Commands that run as they stand, after the reports."""
    monkeypatch.setattr(run, "train", lambda *_: outcome)
    assert main(["demo", "--only", "lenet"]) == 0
    assert "autoshard search autoshard.demo.gpt:train_step" in capsys.readouterr().out
