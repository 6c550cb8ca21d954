"""``autoshard search``, ``evaluate``, ``explain`` and ``compare`` on a program in the current folder."""

import fcntl
import io
import json
import os
import struct
import termios
import time
from pathlib import Path

import pytest

import autoshard
from autoshard import render
from autoshard.cli import terminal
from autoshard.strategy import from_json


def test_search_reports_and_saves(search, run, tmp_path):
    """A search prints a report and saves a strategy that loads, with the command that made it, and that explain shows again."""
    code, out, err = search("--donate", "0", "--save", "s.json")
    assert code == 0 and "saved to s.json" in err
    for words in ("step time", "peak memory", "Where the time goes", "state['params']['up']", "found by"):
        assert words in out
    record = autoshard.load(tmp_path / "s.json").record
    assert record.donate_argnums == (0,)
    assert record.provenance.command.startswith("autoshard search user_program:train_step --args user_program:example_args")
    of_program = run("explain", "s.json", "user_program:train_step", "--args", "user_program:example_args")
    assert of_program[:2] == (0, out)
    assert run("explain", "s.json")[:2] == (0, out) and "need its program" not in out


def test_explain_writes_a_page_and_a_trace(search, run, tmp_path):
    """Instead of text, where they are asked for; from the file they are those from the program, and a search writes the page itself."""
    assert search("--save", "s.json")[0] == 0
    program = "user_program:train_step", "--args", "user_program:example_args"
    code, out, err = run("explain", "s.json", *program, "--html", "r.html", "--trace", "t.json")
    assert code == 0 and not out.strip() and "saved to r.html" in err and "saved to t.json" in err
    assert (tmp_path / "r.html").read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    assert json.loads((tmp_path / "t.json").read_text(encoding="utf-8"))["traceEvents"]
    assert run("explain", "s.json", "--html", "again.html", "--trace", "u.json")[0] == 0 and (tmp_path / "u.json").exists()
    assert search("--html", "found.html")[0] == 0
    assert (tmp_path / "again.html").read_text(encoding="utf-8") == (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<!DOCTYPE html>" in (tmp_path / "found.html").read_text(encoding="utf-8")


def test_what_if_estimates_another_size_from_a_file(search, run):
    """Without the program: the figures of another batch, as JSON too; what needs a search is refused with what to do."""
    assert search("--mesh", "data=8", "--searcher", "data_parallel", "--save", "s.json")[0] == 0
    code, out, _ = run("what-if", "s.json", "--batch", "128", "--json")
    told = json.loads(out)
    assert code == 0 and told["after"]["flops"] == 2 * told["before"]["flops"]
    assert "Estimated from the file" in run("what-if", "s.json", "--cluster", "cpu:16")[1]
    for words in (("--mesh", "data=4"), ()):
        code, _, err = run("what-if", "s.json", *words)
        assert code == 2 and "MODULE:FUNCTION" in err


def test_explain_opens_the_page(search, run, monkeypatch):
    """With --open, in a temporary file unless --html names one."""
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    assert run("explain", "gpt_2_v5e_4x4_auto", "--open")[0] == 0
    (url,) = opened
    file = Path(url.removeprefix("file://"))
    assert file.read_text(encoding="utf-8").startswith("<!DOCTYPE html>")
    file.unlink()


def test_json_alone_is_on_stdout(search, run):
    """With --json stdout is the strategy file and nothing else, though the user's module prints; that of explain is the explanation."""
    code, out, err = search("--json", "--save", "s.json")
    assert code == 0 and "talks while it is imported" in err and "while it is traced" in err
    assert from_json(out).program.name == "train_step"
    explained = json.loads(run("explain", "s.json", "--json")[1])
    assert explained["program"] == "train_step" and len(explained["sentences"]) == 3


def test_what_a_jitted_program_donates_is_donated(search):
    """Without --donate a jitted function's own donation counts."""
    code, out, _ = search("--json", "--searcher", "data_parallel", program="donating_step")
    assert code == 0 and json.loads(out)["donate_argnums"] == [0]


def test_args_may_be_a_tuple_or_real_arrays(search):
    """A module's tuple serves as arguments, and so do real arrays."""
    assert search("--json", args="ARGS")[0] == 0
    code, out, _ = search("--json", args="other_args")
    assert code == 0 and json.loads(out)["arguments"][0]["shape"] == [64, 32]


def test_mesh_pins_and_searcher_are_obeyed(search):
    """The mesh is the one given, a pinned argument keeps its spec, and the searcher is the one named."""
    pins = ("--pin", "state*up*=None,model", "--pin", "batch['x']=(data+model),None")
    code, out, _ = search("--mesh", "data=4,model=2", *pins, "--searcher", "recursive_programming", "--json")
    assert code == 0
    found = json.loads(out)
    assert found["mesh"] == [["data", 4], ["model", 2]] and found["searcher"]["name"] == "recursive_programming"
    specs = {argument["path"]: argument["spec"] for argument in found["arguments"]}
    assert specs["state['params']['up']"] == [None, "model"] and specs["batch['x']"] == [["data", "model"], None]


def test_arguments_keep_their_shardings_and_the_batch_its_axes(search):
    """What a pin says comes first; axes that the mesh lacks are refused."""
    options = ("--pins-from", "arguments", "--batch-axes", "data", "--searcher", "recursive_programming", "--json")
    code, out, _ = search(*options, "--pin", "state*down*=replicated", args="placed_args")
    specs = {argument["path"]: argument["spec"] for argument in json.loads(out)["arguments"]}
    assert code == 0 and json.loads(out)["mesh"] == [["data", 2], ["model", 4]]
    assert specs["state['params']['up']"] == [None, "model"] and specs["state['params']['down']"] == [None, None]
    assert specs["batch['x']"][0] == specs["batch['y']"][0] == "data"
    code, _, err = search("--mesh", "data=8", "--batch-axes", "data,fsdp")
    assert code == 2 and "got 'fsdp', and the mesh has data=8" in err
    assert search("--batch-axes", "data,data")[0] == 2


def test_the_batch_is_what_is_named(search):
    """By path or position; what is no argument is refused."""
    options = ("--mesh", "data=8", "--searcher", "data_parallel", "--microbatches", "2", "--json")
    code, out, _ = search("--batch", "batch['x']", "--batch", "1", *options)
    found = json.loads(out)
    assert code == 0 and found["program"]["batch"] == ["batch['x']", "batch['y']"]
    code, _, err = search("--batch", "images", *options)
    assert code == 2 and "'images' is none of" in err


def test_evaluate_costs_the_given_sharding(run):
    """Evaluate keeps the given specs, replicates what is not mentioned, and costs it; compare puts it next to a search."""
    program = ("user_program:train_step", "--args", "user_program:example_args", "--cluster", "cpu:8")
    code, out, _ = run("evaluate", *program, "--mesh", "data=8", "--in-spec", "batch*=data", "--save", "given.json", "--json")
    assert code == 0
    specs = {argument["path"]: argument["spec"] for argument in json.loads(out)["arguments"]}
    assert specs == {
        "state['params']['down']": [None, None],
        "state['params']['up']": [None, None],
        "batch['x']": ["data", None],
        "batch['y']": ["data", None],
    }
    assert run("search", *program, "--mesh", "data=8", "--save", "found.json")[0] == 0
    code, out, _ = run("compare", "found.json", "given.json", "--json")
    told = json.loads(out)
    found, given = told["strategies"]
    assert told["difference"]["before"]["step_seconds"] == found["makespan_seconds"]
    assert code == 0 and 0 < found["makespan_seconds"] <= given["makespan_seconds"]
    code, out, _ = run("compare", "found.json", "given.json")
    assert code == 0 and "1.00 x" in out and "given" in out and ".json" not in out and "sharded otherwise" in out
    assert "By layer" in out and "Different programs" not in out  # the files keep what that needs
    assert run("compare", "found.json", "given.json", "--program", *program[:3])[:2] == (0, out)
    code, _, error = run("compare", "found.json", "--program", *program[:3])
    assert code == 2 and "Name two files" in error


@pytest.mark.parametrize(
    "options, pieces",
    [
        (("--mesh", "data=3"), ("8 devices", "product is 8")),
        (("--pin", "batches=data"), ("batches", "batch['x']")),
        (("--mesh", "data=8", "--pin", "state['params']['up']=model"), ("'model'", "data=8")),
        (("--memory-limit", "1kB"), ("smallest peak", "higher memory limit")),
        (("--searcher", "magic"), ("magic", "recursive_programming")),
        (("--donate", "7"), ("donate_argnums", "7")),
        (("--cluster", "tpu9:4"), ("tpu9", "cpu")),
    ],
)
def test_impossible_requests_say_what_to_do(search, options, pieces):
    """What cannot be had is one paragraph with names and numbers, exit code 2, and no traceback."""
    code, out, err = search(*options)
    message = err.strip().splitlines()[-1]
    assert code == 2 and not out and message.startswith("autoshard search: ") and "Traceback" not in err
    for piece in pieces:
        assert piece in message


@pytest.mark.parametrize(
    "names, pieces",
    [
        ({"program": "nothing"}, ("has no 'nothing'", "train_step")),
        ({"program": "ARGS"}, ("a program is a function", "tuple")),
        ({"args": "list_args"}, ("a tuple with one entry", "list")),
        ({"program": "example_args"}, ("must fit the program", "2")),
        ({"program": "raises_while_traced"}, ("no luck today", "user_program.py:41", "--debug")),
        ({"program": "branches_on_values"}, ("user_program.py:49", "lax.cond")),
        ({"args": "args_that_raise"}, ("ZeroDivisionError", "user_program.py:45", "--debug")),
    ],
)
def test_faults_of_the_program_name_its_line(search, names, pieces):
    """A fault in the user's program is one paragraph with the line it comes from, exit code 2, and no traceback."""
    code, out, err = search(**names)
    assert code == 2 and not out and "Traceback" not in err
    for piece in pieces:
        assert piece in err.strip().splitlines()[-1]


def test_debug_shows_the_traceback(search):
    """--debug shows where the error was raised, and the exit code stays."""
    code, _, err = search("--debug", program="raises_while_traced")
    assert code == 2 and "Traceback" in err and "no luck today" in err


@pytest.mark.parametrize(
    "program, piece", [("nowhere:step", "no module 'nowhere'"), ("user_program", "module:function"), ("user_program.py:f", "without .py")]
)
def test_programs_that_are_not_found(run, program, piece):
    """A misnamed program is explained."""
    code, _, err = run("search", program, "--cluster", "cpu:8")
    assert code == 2 and piece in err


@pytest.mark.parametrize("words", [("search", "--cluster"), ("evaluate", "--mesh", "data=8", "--cluster"), ("sweep", "--clusters")])
def test_what_is_no_cluster_is_told_before_a_program_is_loaded(run, words):
    """Which may take its time."""
    code, _, err = run(words[0], "nowhere:f", *words[1:], "h100:9x")
    assert code == 2 and "a cluster is" in err and "nowhere" not in err


def test_a_misspelt_name_has_a_suggestion(run):
    """Of a function, and of arguments, which may be a tuple."""
    for program, args, meant in (("train_stp", "user_program:ARGS", "train_step"), ("train_step", "user_program:ARG", "user_program:ARGS")):
        code, _, err = run("search", f"user_program:{program}", "--args", args, "--cluster", "cpu:8")
        assert code == 2 and f"Did you mean user_program:{meant.removeprefix('user_program:')}?" in err


def test_a_misspelt_axis_is_no_new_one(search):
    """A pin's axis that looks like a usual one is refused, unless the mesh has it."""
    code, _, err = search("--pin", "batch*=dta")
    assert code == 2 and "'dta' looks like 'data' misspelt" in err and "--mesh dta=" in err
    code, out, _ = search("--pin", "batch*=dta", "--mesh", "dta=8", "--json")
    assert code == 0 and json.loads(out)["mesh"] == [["dta", 8]]


def test_an_import_that_fails_inside_the_module_is_the_modules(run, tmp_path):
    """A module that is there but imports what is not says so, with its line; one that exits is explained."""
    (tmp_path / "broken_program.py").write_text("import does_not_exist\n")
    (tmp_path / "exiting_program.py").write_text("raise SystemExit(0)\n")
    (tmp_path / "unparsable_program.py").write_text("def f(:\n")
    for module, piece in (("broken", "does_not_exist"), ("exiting", "__main__"), ("unparsable", "unparsable_program.py:1")):
        code, _, err = run("search", f"{module}_program:f", "--cluster", "cpu:8")
        assert code == 2 and piece in err and "Traceback" not in err


def test_an_interrupt_leaves_nothing_behind(search, monkeypatch, tmp_path):
    """Ctrl-C during a search exits with 130, without a traceback and without a file."""

    def interrupted(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(autoshard, "search", interrupted)
    code, out, err = search("--save", "s.json")
    assert code == 130 and not out and "Traceback" not in err and not (tmp_path / "s.json").exists()


def test_a_fault_of_ours_says_so(search, monkeypatch):
    """An exception without a line of the user's is owned up to."""

    def faulty(*_, **__):
        raise KeyError("oops")

    monkeypatch.setattr(autoshard, "search", faulty)
    monkeypatch.setattr("autoshard.cli.commands.user_place", lambda _: None)
    code, _, err = search()
    assert code == 2 and "fault in autoshard" in err


def test_files_that_are_no_strategies(run, tmp_path):
    """A missing, a truncated and a hostile file are each explained."""
    (tmp_path / "cut.json").write_text('{"schema": 1, "na')
    (tmp_path / "deep.json").write_text("[" * 100_000)
    for name in ("missing.json", "cut.json", "deep.json"):
        code, out, err = run("explain", name)
        assert code == 2 and not out and name in err and "Traceback" not in err


def test_a_strategy_of_another_program_is_refused_when_run(search, tmp_path):
    """A saved strategy does not run another program."""
    import user_program

    assert search("--save", "s.json")[0] == 0
    with pytest.raises(autoshard.StrategyError):
        autoshard.load(tmp_path / "s.json").apply(user_program.train_step)(*user_program.other_args())


def test_progress_draws_only_for_a_terminal(capsys):
    """Progress is silent in a pipe, and where --json asks for quiet."""
    for quiet in (False, True):
        with terminal.progress(quiet) as callback:
            callback("working", 0.5)
    assert capsys.readouterr() == ("", "")


def test_a_frontier_is_a_line_for_each_strategy(search):
    """With --frontier the table, or a list of summaries, is printed, and the fastest saved."""
    code, out, _ = search("--frontier", "3", "--mesh", "data=8")
    assert code == 0 and "What memory buys" in out and 1 <= out.count("data=8") <= 3
    code, out, _ = search("--frontier", "3", "--mesh", "data=8", "--json", "--save", "fastest.json")
    found = json.loads(out)
    assert autoshard.load("fastest.json").cost.makespan_seconds == found[-1]["makespan_seconds"]


def test_a_time_limit_prints_and_saves_the_best_so_far(search):
    """What was met by then comes with its bound and a note; no time at all is refused."""
    code, out, _ = search("--time-limit", "0.000001", "--interruptible", "--searcher", "auto", "--json")
    assert code == 0 and any("ended early" in note for note in json.loads(out)["assumptions"])
    code, _, err = search("--time-limit", "0")
    assert code == 2 and "positive number of seconds" in err


@pytest.fixture
def impatient(monkeypatch):
    """Progress is drawn at once, and often."""
    monkeypatch.setattr(render, "DELAY_SECONDS", 0.0)
    monkeypatch.setattr(render, "FRAME_SECONDS", 0.01)
    monkeypatch.setattr(render, "LOG_SECONDS", 0.01)


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_drawn_for_whoever_watches(terminal, impatient, monkeypatch):
    """A terminal shows it on one line; a job's log gets a line for what takes long, once, and none over another."""
    stderr = io.StringIO()
    stderr.isatty = lambda: terminal
    monkeypatch.setattr("sys.stderr", stderr)
    with render.progress_line() as callback:
        callback("mesh data=8", 0.25)
        time.sleep(0.1)
    if terminal:
        assert "% in 0 s, about 0 s left: mesh data=8" in stderr.getvalue()
    else:
        assert stderr.getvalue() == "autoshard: mesh data=8\n"


def test_a_terminal_shows_no_more_than_a_line_of_it(impatient):
    """What is wider than the terminal is cut: a line broken into two could not be drawn over."""
    main, other = os.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    with os.fdopen(other, "w") as drawn, render.progress_line(drawn) as callback:
        callback("compiling for v5e:16x16, 1 of 3: dynamic_programming on mesh data=16 x model=16", 0.5)
        time.sleep(0.1)
    lines = os.read(main, 1 << 16).decode().split("\r")
    os.close(main)
    assert any("compiling" in line for line in lines) and max(map(len, lines)) == 79


def test_the_line_of_progress_is_drawn_and_wiped(impatient):
    """After a moment it says how far, how long still and at what; in the end nothing of it is left on the line."""
    drawn = io.StringIO()
    with render.progress_line(drawn) as callback:
        callback("mesh data=8", 0.25)
        deadline = time.monotonic() + 10
        while "left: mesh data=8" not in drawn.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
    assert " 25 % in 0 s, about " in drawn.getvalue()
    assert not drawn.getvalue().split("\r")[-2].strip() and drawn.getvalue().endswith("\r")


def test_a_search_is_confirmed_by_the_compiler_unless_told_otherwise(search):
    """``--confirm`` alone compiles; what confirmed it is in the JSON and in the report."""
    one = ("--searcher", "data_parallel", "--mesh", "data=8")
    code, out, _ = search(*one, "--confirm", "--json")
    found = json.loads(out)["confirmation"]
    assert code == 0 and (found["by"], found["name"]) == ("compiler", "XLA:CPU")
    assert [each["outcome"] for each in found["finalists"]] == ["taken"]
    code, out, _ = search(*one, "--confirm", "devices")
    assert code == 0 and "Confirmed by cpu" in out and "on cpu devices" in out


@pytest.mark.slow
def test_a_frontier_takes_the_options_of_a_search(search):
    """Recomputation among them; other words are refused."""
    code, out, _ = search("--frontier", "2", "--remat", "full", "--json")
    assert code == 0 and json.loads(out)
    assert search("--confirm", "friends")[0] == 2
