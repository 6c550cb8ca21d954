"""``autoshard pins`` on a saved strategy of a program in the current folder."""

import json

PROGRAM = ("user_program:train_step", "--args", "user_program:example_args")


def test_pins_prints_what_was_verified(search, run):
    """The text says that it was verified, names the function, and stands alone on stdout; the exit code is 0."""
    assert search("--save", "s.json", "--searcher", "data_parallel")[0] == 0
    code, out, _ = run("pins", *PROGRAM, "--strategy", "s.json")
    assert code == 0
    assert out.startswith("# train_step on mesh") and "Verified" in out and "jax.jit(train_step" in out
    compile(out, "pins", "exec")


def test_json_has_the_lines_and_the_text(search, run):
    """With --json every line comes with its place and spec."""
    assert search("--save", "s.json", "--searcher", "fully_sharded", "--mesh", "data=8")[0] == 0
    code, out, _ = run("pins", *PROGRAM, "--strategy", "s.json", "--seconds", "20", "--json")
    found = json.loads(out)
    assert code == 0 and found["exact"] and found["minimal"]
    assert {pin["origin"]["file"] for pin in found["constraints"]} == {"user_program.py"} and "jax.jit" in found["python"]


def test_another_program_is_refused(search, run):
    """A strategy of one program has no pins for another."""
    assert search("--save", "s.json")[0] == 0
    code, _, err = run("pins", "user_program:train_step", "--args", "user_program:other_args", "--strategy", "s.json")
    assert code == 2 and "fits the program it was found for" in err
