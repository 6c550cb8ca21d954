"""The command line, run in this process."""

import json
import shutil
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import jsonschema
import pytest

from autoshard.cli import json_schemas, main

SCHEMAS = Path(json_schemas.__file__).with_name("schemas")


def strict(schema):
    """The schema, allowing no fields but those that it describes."""
    if isinstance(schema, dict):
        if "title" in schema:  # a strategy's file, of which the schema has the main parts
            return schema
        closed = {"additionalProperties": False} if "required" in schema and "properties" in schema else {}
        return {key: strict(value) for key, value in schema.items()} | closed
    return [strict(each) for each in schema] if isinstance(schema, list) else schema


def _check(command, value):
    value = json.loads(value) if isinstance(value, str) else json.loads(json.dumps(value))
    schema = json.loads((SCHEMAS / f"{command}.json").read_text(encoding="utf-8"))
    jsonschema.validate(value, strict({key: part for key, part in schema.items() if key != "title"}))


@pytest.fixture
def check_json():
    """A function that holds what a command prints against its schema."""
    return _check


@pytest.fixture(autouse=True)
def _every_json_fits_its_schema(monkeypatch):
    """What commands print as JSON is held against their schemas."""
    for file in SCHEMAS.glob("*.json"):
        module = import_module(f"autoshard.cli.{file.stem.replace('-', '_')}")
        for home in {module, import_module("autoshard.cli.found")} if file.stem == "search" else {module}:
            if show := getattr(home, "show_json", None):
                monkeypatch.setattr(home, "show_json", partial(_checked, file.stem, show))


def _checked(command, show, value):
    _check(command, value)
    show(value)


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
