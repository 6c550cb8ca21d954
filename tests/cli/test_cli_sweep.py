"""``autoshard sweep`` on a program in the current folder."""

import json

SWEEP = ("sweep", "user_program:train_step", "--args", "user_program:args_of", "--clusters", "cpu:2,cpu:4", "--batch", "64,128")


def test_a_sweep_prints_a_row_for_each_point_and_saves_strategies(run, tmp_path):
    """A table with the Pareto front marked; a file for each strategy."""
    code, out, _ = run(*SWEEP, "--donate", "0", "--searcher", "data_parallel", "--save", "kept", "--price", "cpu=0.5", "--total", "1e6")
    assert code == 0 and out.count("cpu:") == 4 and "*" in out and "days in all" in out and "cost" in out
    assert len([*(tmp_path / "kept").glob("cpu*.json")]) == 4


def test_json_alone_is_on_stdout(run):
    """The points as JSON."""
    code, out, err = run(*SWEEP, "--searcher", "data_parallel", "--json", "--tokens-per-example", "8")
    assert code == 0, err
    assert code == 0 and [point["items"] for point in json.loads(out)["points"]] == [512, 512, 1024, 1024]


def test_arguments_have_to_be_a_function_of_the_batch(run):
    """What takes no batch size is refused with what to write; so is a price that is none."""
    code, _, err = run(*SWEEP[:3], "user_program:example_args", *SWEEP[4:])
    assert code == 2 and "a function of the batch size" in err
    code, _, err = run(*SWEEP, "--price", "cpu=free")
    assert code == 2 and "a price of a device-hour reads" in err
