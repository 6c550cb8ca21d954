"""``autoshard verify`` on a saved strategy of a program in the current folder."""

import json
import re

import pytest


@pytest.mark.parametrize("target", ["shardy", "cpu"])
def test_verify_reports_what_was_found(search, run, target):
    """The report says that the collectives are the predicted ones; JSON has every row; the exit code is 0."""
    assert search("--save", "s.json", "--searcher", "data_parallel")[0] == 0
    command = ("verify", "user_program:train_step", "--args", "user_program:example_args", "--strategy", "s.json", "--target", target)
    code, out, _ = run(*command)
    assert code == 0 and re.search(r"\n(As|Collectives as) predicted(, memory not)?: collectives the predicted ones, exactly", out)
    assert "all_reduce" in out
    code, out, _ = run(*command, "--json")
    assert code == 0 and json.loads(out)["exact"] is True


def test_a_difference_is_an_exit_code(search, run, tmp_path):
    """A strategy file whose prediction misses a collective exits 1."""
    assert search("--save", "s.json", "--searcher", "data_parallel")[0] == 0
    text = json.loads((tmp_path / "s.json").read_text())
    text["cost"]["collectives"] = text["cost"]["collectives"][:-1]  # lines say what they change of earlier ones
    (tmp_path / "s.json").write_text(json.dumps(text))
    code, out, _ = run("verify", "user_program:train_step", "--args", "user_program:example_args", "--strategy", "s.json")
    assert code == 1 and "\nNot as predicted: collectives " in out and "differs" in out


def test_another_program_is_refused(search, run):
    """A strategy of one program is not held against another."""
    assert search("--save", "s.json")[0] == 0
    code, _, err = run("verify", "user_program:train_step", "--args", "user_program:other_args", "--strategy", "s.json")
    assert code == 2 and "fits the program it was found for" in err
