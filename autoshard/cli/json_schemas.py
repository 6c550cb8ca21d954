"""JSON Schemas of what commands print with ``--json``, made from the types that are printed.

``python -m autoshard.cli.json_schemas`` writes the files of ``autoshard/cli/schemas``, which are shipped, and ``docs/reference/json.md``.
Names and meanings of one `VERSION` stay: fields may come to it, and none goes or changes.
"""

from __future__ import annotations

import json
import re
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from inspect import cleandoc
from itertools import groupby
from pathlib import Path
from typing import Any

from autoshard.cli.json_outputs import Either, Printed, outputs

VERSION = 1
ATTRIBUTES = re.compile(r"^Attributes:\n((?:[ ]+.*\n?)+)", re.MULTILINE)
PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
    Any: {},
}


class Schemas:
    """JSON Schemas of types; classes are defined once, under ``$defs``."""

    def __init__(self):
        self.defs: dict[str, Any] = {}

    def of(self, kind: Any) -> dict[str, Any]:
        """The schema of a type."""
        if isinstance(kind, Mapping):
            return dict(kind)
        if isinstance(kind, Either):
            return {"anyOf": [self.of(each) for each in kind.kinds]}
        if isinstance(kind, Printed):
            return self._printed(kind)
        if kind in PLAIN:
            return dict(PLAIN[kind])
        if isinstance(kind, type) and (is_dataclass(kind) or typing.is_typeddict(kind)):
            if kind.__name__ not in self.defs:
                self.defs[kind.__name__] = {}  # a class may have fields of its own
                self.defs[kind.__name__] = self._object(kind)
            return {"$ref": f"#/$defs/{kind.__name__}"}
        return self._generic(kind)

    def _generic(self, kind: Any) -> dict[str, Any]:
        origin, inner = typing.get_origin(kind), typing.get_args(kind)
        if origin in (types.UnionType, typing.Union):
            return {"anyOf": [self.of(each) for each in inner]}
        if origin is tuple and inner[-1] is not Ellipsis:
            return {"type": "array", "prefixItems": [self.of(each) for each in inner], "items": False, "minItems": len(inner)}
        if isinstance(origin, type) and issubclass(origin, Mapping):
            return {"type": "object", "additionalProperties": self.of(inner[1])}
        if isinstance(origin, type) and issubclass(origin, Sequence):
            return {"type": "array", "items": self.of(inner[0])}
        raise TypeError(f"what is printed has JSON's types, got {kind!r}. Give its schema in `outputs`.")

    def _printed(self, kind: Printed) -> dict[str, Any]:
        if kind.of is not None:
            return {"type": "array", "items": self.of(kind.of)}
        if kind.base is not None:
            return self._object(kind.base, kind.more, kind.without)
        return {"type": "object", "required": [*kind.more], "properties": {name: self.of(each) for name, each in kind.more.items()}}

    def _object(self, kind: Any, more: Mapping[str, Any] = {}, without: Sequence[str] = ()) -> dict[str, Any]:
        hints = {**typing.get_type_hints(kind, include_extras=True), **more}
        own = [each.name for each in fields(kind)] if is_dataclass(kind) else list(hints)
        names = [name for name in dict.fromkeys((*own, *more)) if name not in without]
        required = names if is_dataclass(kind) else sorted(kind.__required_keys__, key=names.index)
        told = meanings(kind)
        properties = {name: self.of(hints[name]) | ({"description": told[name]} if name in told else {}) for name in names}
        summary = cleandoc(kind.__doc__ or "").split("\n\n")[0].replace("\n", " ")
        return {"type": "object", "description": summary, "required": required, "properties": properties}


def meanings(kind: Any) -> dict[str, str]:
    """By field what the class's docstring says of it.

    >>> from autoshard.cli.json_outputs import Calibrated
    >>> meanings(Calibrated)["errors"]
    'by section the median error of the fit: 0.1 where a prediction is 10 % too long or too short.'
    """
    match = ATTRIBUTES.search(cleandoc(kind.__doc__ or ""))
    found: dict[str, str] = {}
    entries: list[str] = []
    for line in match[1].splitlines() if match else ():
        if line.startswith("     ") and entries:
            entries[-1] += f" {line.strip()}"
        elif line.strip():
            entries.append(line.strip())
    for entry in entries:
        for part in re.split(r";\s(?=\w+(?:, \w+)*: )", entry):
            names, _, told = part.partition(": ")
            found |= dict.fromkeys((name.strip() for name in names.split(",")), told)
    return found


def schemas() -> dict[str, dict[str, Any]]:
    """By command the schema of what it prints."""
    found = {}
    for command, kind in outputs().items():
        made = Schemas()
        body = made.of(kind)
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": f"urn:autoshard:json:{VERSION}:{command}"}
        found[command] = {**head, "title": f"autoshard {command} --json", **body} | ({"$defs": made.defs} if made.defs else {})
    return found


PAGE = """# JSON

On this page you find every field of what commands print with `--json`.

`--json` prints one JSON value on standard output wherever a person would read a report; progress and errors go to standard error,
and the exit code is the same. `autoshard COMMAND --json-schema` prints the [JSON Schema](https://json-schema.org) of what a command
prints, which is also in `autoshard/cli/schemas/COMMAND.json` of the package. Schemas have version {version} (`$id`:
`urn:autoshard:json:{version}:COMMAND`): fields may come to it, and none goes or changes its meaning. Seconds, bytes and FLOPs are of
one step on one device. [`autoshard mcp`](../agents.md) offers the same to agents.

This page is written by `python -m autoshard.cli.json_schemas` from the types that are printed.
"""


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """The page of the documentation."""
    parts, defs = [PAGE.format(version=VERSION)], {}
    for command, schema in found.items():
        defs |= schema.get("$defs", {})
        parts.append(f"## autoshard {command}\n\n{_told(schema)}")
    parts += [f"## {name}\n\n{_told(schema)}" for name, schema in sorted(defs.items())]
    return "\n".join(parts)


def _told(schema: Mapping[str, Any]) -> str:
    """A schema as a sentence and a table of fields."""
    text = f"{_one_line(schema['description'])}\n\n" if "description" in schema else ""
    if "properties" not in schema:
        return f"{text}{_kind(schema)[0].upper()}{_kind(schema)[1:]}.\n"
    rows = []
    for told, group in groupby(schema["properties"].items(), lambda item: item[1].get("description") or item[0]):
        several = dict(group)
        names, kinds = ", ".join(f"`{name}`" for name in several), ", ".join(dict.fromkeys(map(_kind, several.values())))
        rows.append(f"| {names} | {kinds} | {_one_line(told) if told not in several else ''} |")
    return text + "\n".join(["| field | type | |", "|---|---|---|", *rows, ""])


def _one_line(text: str) -> str:
    return text.replace("|", "\\|").replace("``", "`")


def _kind(schema: Mapping[str, Any]) -> str:
    """A schema's type in a few words."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "anyOf" in schema:
        return " or ".join(_kind(each) for each in schema["anyOf"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema['items'])}" if schema.get("items") else "list"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), Mapping):
        return f"object of {_kind(schema['additionalProperties'])}"
    if "title" in schema:
        return f"[{schema['title'].lower()}](#autoshard-evaluate)"
    if schema.get("type") == "object" and "properties" in schema:
        return f"object with {', '.join(f'`{name}`' for name in schema['properties'])}"
    return str(schema.get("type", f"{schema['const']}" if "const" in schema else "any"))


def main() -> None:
    """Writes the schemas and the page."""
    package = Path(__file__).resolve().parents[1]
    found = schemas()
    for command, schema in found.items():
        (package / "cli" / "schemas" / f"{command}.json").write_text(f"{json.dumps(schema, indent=1)}\n", encoding="utf-8")
    (package.parent / "docs" / "reference" / "json.md").write_text(page(found), encoding="utf-8")


if __name__ == "__main__":
    main()
