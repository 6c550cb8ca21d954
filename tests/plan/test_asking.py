"""Of a plan near the memory limit the compiler is asked, by default; a script stands in for its process."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
from programs import PROGRAMS
from schedules import schedule

import autoshard
from autoshard.plan.asking import MOST_ASKED
from autoshard.plan.kept_corrections import VARIABLE
from autoshard.verify import aot

CRASHES = "sys.exit(134)"


def compiles(peak):
    """A script that compiles a program of so many bytes."""
    found = {"hlo": schedule(0), "peak_bytes": peak, "needed_bytes": peak}
    return f"(folder / 'compiled.json').write_text({json.dumps(found)!r})"


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """A search with a compiler that runs some scripts, one after the other; what it finds, and how many ran."""
    monkeypatch.setenv("TPU_LIBRARY_PATH", "there")
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    run, started = aot.subprocess.Popen, []

    def search(*scripts, limit=250e3, program="mlp", **options):
        def popen(command, **how):
            code = "import pathlib, sys, time; folder = pathlib.Path(sys.argv[1])\n" + scripts[len(started)]
            started.append(run([sys.executable, "-c", code, command[-1]], **how))
            return started[-1]

        monkeypatch.setattr(aot.subprocess, "Popen", popen)
        fn, args = PROGRAMS[program]()
        options = {"cluster": "v5e:2x4", "mesh": {"data": 8}, "memory_limit_bytes": limit, **options}
        return autoshard.search(fn, *args, **options), len(started)

    return search


def near(asked):
    """A limit of which the plan takes nine tenths, and the plan."""
    found, n = asked(limit=1e9)
    assert n == 0 and found.confirmation is None, "far from the limit nobody is asked"
    return found.cost.peak_bytes / 0.9, found


def test_a_plan_near_the_limit_is_compiled_once(asked):
    """A line of notes says what it needs; the compiled figures are in the confirmation, and the plan is the same."""
    limit, plain = near(asked)
    found, n = asked(compiles(limit * 0.95), limit=limit)
    assert n == 1 and found.confirmation.peak_bytes == limit * 0.95
    assert found.cost == replace(plain.cost, peak_bytes=limit * 0.95) and found.record.choices == plain.record.choices
    (note,) = (note for note in found.notes if "was asked" in note)
    assert "90 % of the memory limit" in note and "it fits" in note


@pytest.mark.parametrize(("program", "error"), [("mlp", 1.25), ("convnet", 3.2)])
def test_a_plan_is_compiled_where_the_interval_of_its_peak_reaches_over_the_limit(asked, program, error):
    """Programs with convolutions are asked about from less memory on than others, and a note says why."""
    plain, _ = asked(limit=1e9, program=program)
    (above, n), (_, none) = (asked(compiles(1e3), limit=plain.cost.peak_bytes * error * times, program=program) for times in (0.97, 1.03))
    assert (n, none) == (1, 1)
    (note,) = (note for note in above.notes if "was asked" in note)
    assert ("up to 3.2 times" in note) == (error > 1.25)


@pytest.mark.slow
def test_a_plan_that_does_not_fit_is_searched_again(asked):
    """Within the limit times predicted through compiled peak, until one fits as compiled, whose figures are stated."""
    limit, plain = near(asked)
    found, n = asked(compiles(limit * 1.1), compiles(limit * 1.05), compiles(limit * 0.9), limit=limit)
    assert n == 3 and found.cost.peak_bytes == found.confirmation.peak_bytes == limit * 0.9
    assert found.record.choices != plain.record.choices
    assert sum("was asked" in note and "this one is within" in note for note in found.notes) == 2


@pytest.mark.slow
def test_a_last_plan_that_nobody_compiled_is_said_to_be_none_that_fits(asked):
    """After six that do not fit, each by a little."""
    limit, _ = near(asked)
    found, n = asked(*[compiles(limit * 1.01)] * MOST_ASKED, limit=limit)
    assert n == MOST_ASKED == 6 and found.confirmation is None
    assert any("none of 6 plans fits as compiled" in note and "was not compiled" in note for note in found.notes)


def test_where_nothing_needs_less_a_note_says_that_it_may_not_fit(asked):
    """The prediction is the answer, as it was without a compiler."""
    limit, plain = near(asked)
    found, n = asked(compiles(limit * 1000), limit=limit)
    assert n == 1 and found.cost == plain.cost and any("does not fit, and no other" in note for note in found.notes)


@pytest.mark.parametrize("script", [CRASHES, "time.sleep(600)"])
def test_a_compiler_that_fails_or_hangs_changes_nothing(asked, script):
    """The uncorrected answer stands, with a note."""
    limit, plain = near(asked)
    found, n = asked(script, limit=limit, **({"time_limit_seconds": 3} if "sleep" in script else {}))
    assert n == 1 and found.cost == plain.cost and any("the prediction stands" in note for note in found.notes)


def test_nobody_is_asked_who_is_not_to_be(asked, monkeypatch):
    """With confirm=False, for CPUs, and where the variable says so."""
    limit, _ = near(asked)
    assert asked(limit=limit, confirm=False)[1] == 0
    assert asked(limit=limit, cluster="cpu:8")[1] == 0
    monkeypatch.setenv(VARIABLE, "off")
    assert asked(limit=limit)[1] == 0
