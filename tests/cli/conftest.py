"""The command line, run in this process."""

import shutil
import sys
from pathlib import Path

import pytest

from autoshard.cli import main


@pytest.fixture
def run(monkeypatch, tmp_path, capsys):
    """A function that runs a command line in a folder with the user's module, and returns ``(exit code, stdout, stderr)``."""
    shutil.copy(Path(__file__).with_name("user_program.py"), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "user_program", raising=False)

    def call(*argv):
        code = main([str(argument) for argument in argv])
        out, err = capsys.readouterr()
        return code, out, err

    yield call
    sys.modules.pop("user_program", None)


@pytest.fixture
def search(run):
    """`run` of ``autoshard search`` on the user's train step, with more options."""

    def call(*more, program="train_step", args="example_args"):
        return run("search", f"user_program:{program}", "--args", f"user_program:{args}", "--cluster", "cpu:8", *more)

    return call
