"""The command line as a whole: help, usage errors, lists, option texts."""

import argparse
import doctest
import importlib
import io
import json
import os
import shlex
import subprocess
import sys
from fnmatch import fnmatch

import pytest

from autoshard.cli import options
from autoshard.cli.commands import COMMANDS, parser
from autoshard.cluster import Cluster

NAMES = (
    *("search", "evaluate", "explain", "what-if", "lint", "verify", "pins", "compare", "reshard", "sweep"),
    *("calibrate", "clusters", "strategies", "launch", "mcp", "demo"),
)


def test_help_lists_every_command(run):
    """The help names each command; without a command the same text goes to stderr with exit code 2."""
    code, out, _ = run("--help")
    assert code == 0 and all(name in out for name in NAMES) and len(COMMANDS) == len(NAMES)
    code, out, err = run()
    assert code == 2 and not out and all(name in err for name in NAMES)


def test_the_package_is_the_command():
    """``python -m autoshard`` is the same as ``autoshard``."""
    done = subprocess.run([sys.executable, "-m", "autoshard", "clusters", "--help"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "autoshard clusters" in done.stdout


@pytest.mark.parametrize("name", NAMES)
def test_every_command_shows_an_example_that_parses(run, name):
    """The help of a command has an example, and its options are the command's own."""
    code, out, _ = run(name, "--help")
    example = out.split("example:\n")[1].strip()
    assert code == 0 and example.startswith(f"autoshard {name}")
    parser().parse_args(shlex.split(example)[1:])


@pytest.mark.parametrize(
    "argv",
    [
        ("serch",),
        ("search",),
        ("search", "a:b", "--cluster", "cpu:8", "--mesh", "data"),
        ("demo", "--steps", "0"),
        ("explain", "--jso", "x"),
    ],
)
def test_bad_usage_exits_with_2(run, argv):
    """A misspelt command, a missing option and a malformed value exit with 2 and say what is wrong."""
    code, out, err = run(*argv)
    assert code == 2 and not out and "error:" in err


def test_what_a_command_does_not_take_comes_with_its_own_usage(run):
    """Not with the list of all commands: it shows what the option is called there, and how several values are written."""
    code, _, err = run("evaluate", "train:step", "--cluster", "cpu:8", "--mesh", "data=8", "--pin", "x=data")
    assert code == 2 and "usage: autoshard evaluate" in err and "--in-spec" in err and "unrecognized arguments: --pin x=data" in err


def test_clusters_lists_what_parses(run):
    """Every example that clusters prints is a cluster."""
    code, out, _ = run("clusters", "--json")
    entries = json.loads(out)
    assert code == 0 and len(entries) >= 10
    for entry in entries:
        assert Cluster.parse(entry["example"]).device.name == entry["name"]
    text = run("clusters")[1]
    assert all(entry["example"] in text for entry in entries)


def test_strategies_lists_and_shows_the_library(run):
    """The library's strategies are listed, shown by name, and explained by name; a wrong name is refused."""
    code, out, _ = run("strategies", "list", "demo_*", "--json")
    names = [entry["strategy"] for entry in json.loads(out)]
    assert code == 0 and "demo_lenet_data_parallel" in names
    assert run("strategies", "demo_lenet_data_parallel")[1].startswith(run("explain", "demo_lenet_data_parallel")[1])
    text = run("strategies", "list", "demo_*")[1]
    assert len(names) == 6 and all(name in text for name in names)
    code, _, err = run("strategies", "demo_lenet_dat")
    assert code == 2 and "demo_lenet_data_parallel" in err


def test_help_loads_no_demo():
    """Parsing a command line loads neither Flax nor the demo."""
    loaded = "[m for m in ('flax', 'sklearn', 'autoshard.demo') if m in sys.modules]"
    script = f"import sys; from autoshard.cli import main; main(['--help']); print({loaded})"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.strip().endswith("[]")


@pytest.mark.parametrize(
    "read, bad",
    [
        (options.mesh, ("data", "data=", "data=0", "data=2,data=4", "data=x", "")),
        (options.spec, ("data,", "1", "(data", "data+,None", "None+data")),
        (options.path_spec, ("data", "=data", "x=1")),
        (options.size, ("12 apples", "-1GB", "GB", "0")),
        (options.numbers, ("a", "0,", "-1")),
        (options.positive, ("0", "-3", "x", "1.5")),
    ],
)
def test_malformed_values_are_refused(read, bad):
    """Each text form refuses what is not of its kind, saying what it expects."""
    for text in bad:
        with pytest.raises(argparse.ArgumentTypeError, match="got"):
            read(text)


def test_examples_of_the_text_forms():
    """The examples in the options' docstrings hold."""
    assert doctest.testmod(options).failed == 0


@pytest.mark.skipif(sys.platform != "linux", reason="accelerators are files on Linux")
@pytest.mark.parametrize("accelerators, platforms", [((), "cpu"), (("/dev/nvidia0",), None), (("/dev/vfio/0",), None)])
def test_no_tpu_is_looked_for_where_there_is_no_accelerator(run, monkeypatch, accelerators, platforms):
    """An installed libtpu would report at length that there is none; with a device of any kind JAX decides."""
    main_module = importlib.import_module("autoshard.cli.commands")
    monkeypatch.delenv("JAX_PLATFORMS")
    monkeypatch.setattr(main_module, "glob", lambda pattern: [name for name in accelerators if fnmatch(name, pattern)])
    monkeypatch.setattr(main_module, "find_spec", lambda name: name == "libtpu")
    run("clusters", "--json")
    assert os.environ.get("JAX_PLATFORMS") == platforms


@pytest.mark.slow
def test_help_is_markup_that_the_site_reads():
    """The page of the commands is made of their help as reStructuredText, where a lone star would begin an emphasis."""
    core = pytest.importorskip("docutils.core", reason="the site is built where its tools are: pip install '.[docs]'")

    def texts(found):
        yield from filter(None, (found.description, *(action.help for action in found._actions)))
        for action in found._actions:
            if isinstance(action, argparse._SubParsersAction):
                for command in action.choices.values():
                    yield from texts(command)

    complaints = io.StringIO()
    for text in texts(parser()):
        core.publish_doctree(text.replace("%%", "%"), settings_overrides={"warning_stream": complaints})
    assert complaints.getvalue() == ""
