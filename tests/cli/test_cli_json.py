"""What ``--json`` prints is what its schemas say; every command line that tests run with it is held against them (`conftest.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from autoshard.cli import json_schemas
from autoshard.cli.commands import COMMANDS, parser

CLI = Path(json_schemas.__file__).parent
DOCS = CLI.parents[1] / "docs"


def test_schemas_and_their_page_are_made_from_the_types():
    """A field that is new, or goes, shows in the files: ``python -m autoshard.cli.json_schemas`` writes them."""
    found = json_schemas.schemas()
    assert {name: json.dumps(schema) for name, schema in found.items()} == {
        file.stem: json.dumps(json.loads(file.read_text(encoding="utf-8"))) for file in (CLI / "schemas").glob("*.json")
    }
    assert (DOCS / "reference" / "json.md").read_text(encoding="utf-8") == json_schemas.page(found)
    for schema in found.values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_command_with_json_has_a_schema():
    """Those without ``--json`` have none."""
    (commands,) = (action.choices for action in parser()._actions if action.choices and "search" in action.choices)
    assert len(commands) == len(COMMANDS)
    assert {name for name, each in commands.items() if "--json" in each.format_help()} == {*json_schemas.schemas()}


def test_a_schema_is_printed_without_other_options(run):
    """As ``--help`` is, where the command needs arguments."""
    code, out, _ = run("search", "--json-schema")
    assert code == 0 and json.loads(out)["$id"] == f"urn:autoshard:json:{json_schemas.VERSION}:search"


NAME = "gpt_2_v5e_4x4_auto"


@pytest.mark.parametrize("words", [("clusters",), ("strategies", "list", "gpt_2*"), ("compare", NAME), ("explain", NAME)])
def test_what_is_printed_fits_its_schema(run, words):
    """Each is validated by the fixture; the JSON is one value."""
    code, out, err = run(*words, "--json")
    assert code == 0, err
    json.loads(out)


def test_a_field_that_no_schema_has_is_seen(check_json):
    """The check of the tests allows no more than is described."""
    with pytest.raises(jsonschema.ValidationError):
        check_json("clusters", [{"name": "a", "example": "b", "source": "c", "more": 1}])
