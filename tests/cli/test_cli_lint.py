"""``autoshard lint`` and ``autoshard what-if`` on a program in the current folder."""

import json

import pytest

PROGRAM = ("user_program:train_step", "--args", "user_program:example_args")
SPLIT = ("--cluster", "cpu:8", "--mesh", "data=8", "--in-spec", "batch*=data")


@pytest.mark.parametrize(
    ("fail_on", "code"),
    [((), 0), (("--fail-on", "uneven-padding"), 0), (("--fail-on", "unsharded-parameter"), 1), (("--fail-on", "any"), 1)],
)
def test_the_exit_code_is_for_ci(run, fail_on, code):
    """It is 1 where a rule that is named finds something, and the findings are printed in any case."""
    found, out, _ = run("lint", *PROGRAM, *SPLIT, *fail_on)
    assert found == code and "unsharded-parameter" in out and "findings" in out


def test_findings_are_json(run):
    """With --json alone on stdout."""
    code, out, _ = run("lint", *PROGRAM, *SPLIT, "--json")
    assert code == 0 and {"rule", "where", "bytes", "seconds", "advice", "what", "causes_seconds"} == set(json.loads(out)["findings"][0])


def test_an_unknown_rule_is_bad_input(run):
    """It is refused with those that there are."""
    code, _, err = run("lint", *PROGRAM, *SPLIT, "--fail-on", "everything")
    assert code == 2 and "silent-resharding" in err


def test_a_what_if_compares_and_saves(search, run, tmp_path):
    """It prints the difference, and saves the other strategy; a tensor is explained by the end of its path."""
    assert search("--mesh", "data=8", "--searcher", "dynamic_programming", "--save", "s.json")[0] == 0
    code, out, _ = run("what-if", "s.json", *PROGRAM, "--cluster", "cpu:16", "--save", "other.json")
    assert code == 0 and "on 16 devices instead of 8" in " ".join(out.split()) and (tmp_path / "other.json").exists()
    found = json.loads(run("what-if", "s.json", *PROGRAM, "--batch", "64", "--json")[1])
    code, _, err = run("what-if", "s.json", "no_such_module:step", "--save", "none/other.json")
    assert code == 2 and "--save names a file in a folder that exists, got 'none/other.json'" in err
    assert found["after"]["n_devices"] == 8
    code, out, _ = run("explain", "s.json", *PROGRAM, "--tensor", "params/up")
    assert code == 0 and "Why" in out and "at best" in out
