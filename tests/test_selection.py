"""What runs first, what is left out, and that it is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from selection import in_order, spread, subject

CONFIGURATION = """
[pytest]
addopts = -m "not slow" -p selection -p no:cacheprovider
markers =
    slow(minutes)
    sample(size)
"""
TESTS = {
    "test_it.py": """
import pytest

@pytest.mark.sample(3)
@pytest.mark.parametrize("n", [pytest.param(-1, marks=pytest.mark.slow), *range(9)])
def test_sampled(n):
    assert n != 8

@pytest.mark.slow(minutes=60)
def test_long():
    pass
""",
    "test_short.py": """
import pytest

@pytest.mark.slow
def test_seconds():
    pass
""",
}


@pytest.fixture
def run(tmp_path):
    """A function from options of pytest to the exit status and what it printed, on the tests above."""
    (tmp_path / "pytest.ini").write_text(CONFIGURATION)
    for name, text in TESTS.items():
        (tmp_path / name).write_text(text)

    def run(*options: str) -> tuple[int, str]:
        command = (sys.executable, "-m", "pytest", *options)
        done = subprocess.run(command, cwd=tmp_path, env={"PYTHONPATH": str(Path(__file__).parent)}, capture_output=True, text=True)
        return done.returncode, done.stdout

    return run


def test_a_sample_runs_always_and_the_rest_with_the_slow_tests(run):
    """Cases of one test, the first and the last of those that are not slow among them; together they are all."""
    _, quick = run("-v")
    _, slow = run("-v", "-m", "slow")
    assert [f"[{n}] PASSED" in quick for n in range(8)] == [n in (0, 4) for n in range(8)] and "[8] FAILED" in quick
    assert [f"[{n}] PASSED" in slow for n in range(-1, 9)] == [n not in (0, 4, 8) for n in range(-1, 9)]


@pytest.mark.parametrize("workers", ["0", "2"])
def test_what_is_not_started_is_counted_and_failures_count(run, workers):
    """A test that takes an hour is not started in the last minutes; where none is left none is, of any worker; a failure stays one."""
    status, said = run("-n", workers, "-m", "", "--minutes", "10")
    assert status == 1 and "1 failed, 10 passed" in said
    assert "1 tests were not started: they would not have ended within 10 minutes." in said
    _, said = run("-n", workers, "-m", "", "--minutes", "0")
    assert "12 tests were not started" in said


def test_what_changed_comes_first():
    """Tests of a changed file, then those of a changed folder and the others in turn, from one of them on and round."""
    files = [f"tests/{name}.py" for name in ("cost/test_a", "plan/test_b", "plan/test_c", "test_serving", "verify/test_d", "verify/test_d")]
    changed = ["autoshard/plan/confirm.py", "tests/plan/test_c.py", "docs/guide.md"]
    assert in_order(files, changed, start=4 + 3) == [2, 1, 5, 0, 3, 4]
    assert in_order(files, ["autoshard/plan/confirm.py"], start=0) == [1, 0, 2, 3, 4, 5]
    assert in_order(files, ["autoshard/plan/confirm.py"], start=1) == [2, 3, 1, 4, 5, 0]
    assert in_order(files, ["autoshard/serving.py"], start=0) == [3, 0, 1, 2, 4, 5]
    assert in_order(files, [], start=0) == [*range(6)] and in_order([], ["docs"], start=3) == []


@pytest.mark.parametrize(
    ("file", "about"),
    [
        ("autoshard/plan/confirm.py", "plan"),
        ("tests/plan/test_confirm.py", "plan"),
        ("autoshard/serving.py", "serving"),
        ("tests/test_serving.py", "serving"),
        ("benchmarks/search/run.py", "benchmarks"),
        ("tests/test_benchmarks.py", "benchmarks"),
        ("README.md", "README"),
    ],
)
def test_files_have_a_subject(file, about):
    """What is changed and what tests it have the same one."""
    assert subject(file) == about


def test_places_are_spread():
    """From the first to the last, as many as are asked for or as there are."""
    assert spread(3, 9) == {0, 4, 8} and spread(1, 9) == {0} and spread(5, 2) == {0, 1} and spread(4, 0) == set()
