"""Records of a cluster from plain values, as files have them, each field checked against its annotation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any

from autoshard.cluster.device import Device
from autoshard.cluster.interconnect import Interconnect, Protocol
from autoshard.cluster.level import Level
from autoshard.errors import ClusterError


def merged_fields(base: dict[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """The base with the values of another one: tables, and tables in lists of them, merged."""
    merged = dict(base)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(base.get(key), dict)
        merged[key] = merged_fields(base[key], value) if both else value
    if isinstance(levels := over.get("levels"), list) and all(isinstance(level, Mapping) for level in levels):
        known = [*base.get("levels", []), *({} for _ in levels)]
        merged["levels"] = [merged_fields(one, level) for one, level in zip(known, levels, strict=False)]
    return merged


def record(cls: type[Any], data: Any, what: str) -> Any:
    """A record from its dict, each field checked against its annotation.

    Raises:
        ClusterError: a field is missing, unknown or of the wrong type.
    """
    if not isinstance(data, Mapping):
        raise ClusterError(f"{what} is a table of fields, got {data!r}.")
    wanted = {f.name: str(f.type) for f in fields(cls)}
    needed = {f.name for f in fields(cls) if f.default is MISSING}  # older files lack newer fields, which have defaults
    if not needed <= set(data) <= set(wanted):
        missing, unknown = sorted(needed - set(data)), sorted(map(str, set(data) - set(wanted)))
        raise ClusterError(f"{what} has the fields {', '.join(wanted)}; missing: {missing}, unknown: {unknown}. Add or remove those.")
    return cls(**{name: _field(kind, data[name], f"{name} of {what}") for name, kind in wanted.items() if name in data})


def _protocol(row: Any, what: str) -> Protocol:
    """A protocol from the list of its fields."""
    names = [f.name for f in fields(Protocol)]
    if not isinstance(row, (list, tuple)) or len(row) != len(names):
        raise ClusterError(f"each entry of {what} is a list of {', '.join(names)}, got {row!r}.")
    return record(Protocol, dict(zip(names, row, strict=True)), f"an entry of {what}")


def _field(kind: str, value: Any, what: str) -> Any:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < 2**63  # false of nan as well
    match kind:
        case "Device":
            return record(Device, value, "the device")
        case "Interconnect":
            return record(Interconnect, value, "the interconnect")
        case "str" if isinstance(value, str):
            return value
        case "bool" if isinstance(value, bool):
            return value
        case "float" if number:
            return float(value)
        case "int" if number and int(value) == value:
            return int(value)
        case "tuple[int, ...]" if isinstance(value, (list, tuple)) and value:
            return tuple(_field("int", size, what) for size in value)
        case "tuple[Level, ...]" if isinstance(value, (list, tuple)):
            return tuple(record(Level, each, f"a level of {what}") for each in value)
        case "tuple[Protocol, ...]" if isinstance(value, (list, tuple)):
            return tuple(_protocol(row, what) for row in value)
        case "tuple[tuple[str, float], ...]" if isinstance(value, Mapping):
            return tuple((str(name), _field("float", rate, what)) for name, rate in value.items())
    wanted = {"str": "text", "bool": "true or false", "float": "a number", "int": "a whole number", "tuple[int, ...]": "a list of sizes"}
    wanted |= {"tuple[Protocol, ...]": "a list of protocols", "tuple[Level, ...]": "a list of levels"}
    raise ClusterError(f"{what} is {wanted.get(kind, 'a table of numbers')}, got {value!r}.")
