"""The library on the command line: listed, shown, verified, refreshed, and started from."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import jax
import pytest
from rich.console import Console

from autoshard import library
from autoshard.cli.strategies import _table
from autoshard.render import print_report
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
    """Each with mesh, step time and peak; the found one with its share of the expert's step time; filters choose."""
    _, text, _ = run("strategies", "list")
    assert all(name in text for name in NAMES) and "data=8" in text
    entries = {entry["strategy"]: entry for entry in json.loads(run("strategies", "list", "--json")[1])}
    assert entries[NAMES[1]]["against_expert"] == 1 >= entries[NAMES[0]]["against_expert"] > 0
    assert f"{entries[NAMES[0]]['against_expert']:.2f} x" in text
    assert NAMES[1] not in run("strategies", "list", "*auto")[1]
    assert json.loads(run("strategies", "list", "--cluster", "v5e*", "--json")[1]) == []
    text = run("strategies", "show", NAMES[0])[1]
    assert text == run("strategies", NAMES[0])[1] and text.startswith(run("explain", NAMES[0])[1]) and "No compiler has confirmed" in text


@pytest.mark.slow
def test_names_are_whole_on_80_columns():
    """Each strategy that comes with autoshard has a line that begins with its name, as one types it, and no line is longer."""
    records, out = {name: library.load(name) for name in library.names()}, io.StringIO()
    print_report(_table(records), Console(file=out, width=80, highlight=False))
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    assert set(records) <= {line.split()[0] for line in lines if line} and max(map(len, lines)) <= 80


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
    assert run("strategies", "refresh", "--all", NAMES[1])[0] == 0
    assert other.stat().st_mtime_ns > written and path.read_bytes() == kept
    assert run("strategies", "refresh", "--all", NAMES[1], "--any")[0] == 2


@pytest.mark.slow
def test_what_a_compiler_makes_of_a_strategy_stays_with_its_plan(shelf, run):
    """`confirm` writes the compiled figures into the file, which `show` prints; a refresh keeps them for the same plan, and no other."""
    code, text, _ = run("strategies", "confirm", NAMES[1])
    path, record = Path(shelf, f"{NAMES[1]}.json"), library.load(NAMES[1])
    assert code == 0 and "100 % of sent by collectives" in text and "confirmed by XLA:CPU" in text
    taken = record.confirmation.taken
    assert (taken.flops, taken.collective_bytes) == (record.cost.flops, sum(each.bytes * each.count for each in record.cost.collectives))
    assert "Confirmed by XLA:CPU" in run("strategies", "show", NAMES[1])[1]
    written = path.read_bytes()
    assert run("strategies", "confirm", NAMES[1])[0] == 0  # nothing is compiled again
    save_record(replace(record, cost=replace(record.cost, makespan_seconds=1.0)), path)
    assert run("strategies", "refresh", NAMES[1])[0] == 0 and path.read_bytes() == written
    save_record(replace(record, cost=replace(record.cost, makespan_seconds=1.0), layouts={}), path)
    assert run("strategies", "refresh", NAMES[1])[0] == 0 and library.load(NAMES[1]) == replace(record, confirmation=None)


def test_a_strategy_whose_program_is_not_known_is_an_error(shelf, run):
    """Where the command in a file is no search, nothing says that it is reproduced, and it cannot be confirmed."""
    path = Path(shelf, f"{NAMES[0]}.json")
    record = load_record(path)
    save_record(replace(record, provenance=replace(record.provenance, command="autoshard demo")), path)
    for action in ("verify", "confirm"):
        code, text, _ = run("strategies", action, NAMES[0])
        assert code == 1 and "was made by 'autoshard demo'" in text


@pytest.mark.slow
def test_a_search_starts_from_a_strategy(shelf, search, run, tmp_path):
    """What is carried over is one of the candidates, on other devices and of a frontier too; arguments that are lacking are named."""
    (tmp_path / "other.py").write_text(
        "import jax.numpy as jnp\ndef step(batch): return jnp.tanh(batch['x'])\nargs = ({'x': jnp.ones((64, 32))},)\n"
    )
    code, out, err = run(
        *("search", "user_program:train_step", "--args", "user_program:example_args", "--cluster", "cpu:4", "--mesh", "data=4"),
        *("--like", NAMES[1], "--time-limit", "0.000001", "--json"),
    )
    assert code == 0 and "carried over" in out and "all its arguments are arguments here" in err
    code, _, err = run("search", "other:step", "--args", "other:args", "--cluster", "cpu:8", "--mesh", "data=8", "--like", NAMES[1])
    assert code == 0 and "3 of its 4 arguments have no place here" in err and "state['params']['down']" in err
    assert search("--like", NAMES[0], "--frontier")[0] == 0


@pytest.mark.skipif(jax.__version_info__[:2] != (0, 10), reason="other releases of JAX trace other equations than the file's")
def test_a_strategy_is_verified_in_any_folder(run):
    """The search that a file names would save into a folder that is not there: it is not run."""
    code, out, _ = run("strategies", "verify", "demo_lenet_auto")
    assert (code, out) == (0, "demo_lenet_auto: reproduced\n")


def test_a_name_that_is_no_strategys_is_refused_with_a_near_one(run):
    """The error tells of files and of the library's names."""
    code, _, error = run("compare", "demo_gpt_auto", "demo_gtp_auto")
    assert code == 2 and "'demo_gtp_auto' is neither. Near ones: demo_gpt_auto, " in error
