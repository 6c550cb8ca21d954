"""The library on the command line: listed, shown, verified, refreshed, and started from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard import library
from autoshard.strategy import load_record, save_record

NAMES = ("step_cpu_8_auto", "step_cpu_8_data_parallel")


@pytest.fixture
def shelf(search, tmp_path, monkeypatch):
    """A library with a found and an expert strategy of the user's train step."""
    monkeypatch.setattr(library, "_PACKAGE", tmp_path / "autoshard")
    (tmp_path / "strategies").mkdir()
    for name in NAMES:
        searcher = name.removeprefix("step_cpu_8_")
        assert search("--mesh", "data=8", "--searcher", searcher, "--name", name, "--save", f"strategies/{name}.json")[0] == 0
    return tmp_path / "strategies"


def test_strategies_are_listed_against_experts(shelf, run):
    """Each with cluster, mesh, step time, peak and gap; the found one with its share of the expert's step time; filters choose."""
    _, text, _ = run("strategies", "list")
    assert all(name in text for name in NAMES) and "data=8" in text
    entries = {entry["strategy"]: entry for entry in json.loads(run("strategies", "list", "--json")[1])}
    assert entries[NAMES[1]]["against_expert"] == 1 >= entries[NAMES[0]]["against_expert"] > 0
    assert f"{entries[NAMES[0]]['against_expert']:.2f} x" in text
    assert NAMES[1] not in run("strategies", "list", "*auto")[1]
    assert json.loads(run("strategies", "list", "--cluster", "v5e*", "--json")[1]) == []
    assert run("strategies", "show", NAMES[0])[1] == run("strategies", NAMES[0])[1] == run("explain", NAMES[0])[1]


def test_what_is_not_reproduced_is_found_and_made_again(shelf, run):
    """`verify` names the figure and exits with 1; `refresh` searches that strategy again, whose file gets its bytes back, and no other."""
    assert run("strategies", "verify")[0] == 0
    path, other = (Path(shelf, f"{name}.json") for name in NAMES)
    kept, record, written = path.read_bytes(), load_record(path), other.stat().st_mtime_ns
    save_record(replace(record, cost=replace(record.cost, peak_bytes=1.0)), path)
    code, text, _ = run("strategies", "verify")
    assert code == 1 and f"{NAMES[0]}: peak_bytes was 1 and is " in text and f"{NAMES[1]}: reproduced" in text
    assert json.loads(run("strategies", "verify", NAMES[0], "--json")[1])[0]["reproduced"] is False
    assert run("strategies", "refresh")[0] == 0
    assert path.read_bytes() == kept and other.stat().st_mtime_ns == written
    assert run("strategies", "refresh", NAMES[1], "--all")[0] == 0
    assert other.stat().st_mtime_ns > written


def test_a_search_starts_from_a_strategy(shelf, search, run, tmp_path):
    """What is carried over is one of the candidates, on other devices too; several strategies are not started from one.
    Arguments that this program lacks are named."""
    (tmp_path / "other.py").write_text(
        "import jax.numpy as jnp\ndef step(batch): return jnp.tanh(batch['x'])\nargs = ({'x': jnp.ones((64, 32))},)\n"
    )
    code, out, err = run(
        *("search", "user_program:train_step", "--args", "user_program:example_args", "--cluster", "cpu:4", "--mesh", "data=4"),
        *("--like", NAMES[1], "--time-limit", "0.000001", "--json"),
    )
    assert code == 0 and "carried over" in out and "all its arguments are arguments here" in err
    code, _, err = run("search", "other:step", "--args", "other:args", "--cluster", "cpu:8", "--mesh", "data=8", "--like", NAMES[1])
    assert code == 0 and "of its 4 arguments 3 have no place here" in err and "state['params']['down']" in err
    code, _, err = search("--like", NAMES[0], "--frontier")
    assert code == 2 and "--like" in err
