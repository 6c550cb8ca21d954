"""Strategy files: canonical, readable JSON, written atomically, and fully checked when read.

The same record always gives the same bytes. Arguments, results, collectives with their source lines and reasons, and finalists
are written one per line; the long numbered lists fill lines.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from autoshard.errors import StrategyError
from autoshard.reader import MAX_DEPTH, parse
from autoshard.strategy.folding import fold, unfold
from autoshard.strategy.record import Record
from autoshard.strategy.schema import decode, encode

MAX_BYTES = 64 * 2**20
"""A strategy of a 96-layer transformer takes about 3 MB; JSON takes up to 20 times its size while it is read."""

WIDTH = 140
FILLED = ("choices", "layouts", "copies", "ahead", "windows", "cut", "argument_stages", "result_stages")
ONE_A_LINE = ("arguments", "results", "finalists", "report")
ONE_A_LINE_COMPACT = ("origins", "reasons", "collectives")


def to_json(record: Record) -> str:
    """The canonical JSON text of a record; `from_json` is the inverse.

    Raises:
        StrategyError: the record cannot be written so that it comes back equal.
    """
    try:
        text = f"{_format('', fold(encode(record)), 0)}\n"
    except RecursionError:
        raise StrategyError(f"strategy {record.name!r} cannot be saved: its values nest more than {MAX_DEPTH} deep.") from None
    except (TypeError, ValueError) as error:  # nan, inf, objects
        raise StrategyError(f"strategy {record.name!r} cannot be saved: it has a value that JSON does not have ({error}).") from None
    try:
        back = from_json(text)
    except StrategyError as error:
        raise StrategyError(f"strategy {record.name!r} cannot be saved, since reading it would fail {error}.") from None
    if back != record:
        raise StrategyError(
            f"strategy {record.name!r} cannot be saved: reading it would not give an equal one. Use tuples, ints and floats only."
        )
    return text


def from_json(text: str) -> Record:
    """The record of a strategy's JSON text, fully checked.

    Raises:
        StrategyError: the text is no strategy; the message has the position, what was expected and what was got.
    """
    return decode(unfold(parse(text)))


def save_record(record: Record, path: str | os.PathLike[str]) -> None:
    """Writes the record's canonical JSON, atomically.

    Raises:
        StrategyError: the record cannot be written, or the file cannot.
    """
    target = Path(path)
    data = to_json(record).encode()
    if len(data) > MAX_BYTES:
        raise StrategyError(
            f"a strategy file has at most {MAX_BYTES} bytes, and {record.name!r} would take {len(data)}. Split the program."
        )
    try:
        _write(target, data)
    except (OSError, ValueError) as error:
        raise StrategyError(
            f"strategy file '{target}' cannot be written: {_reason(error)}. Choose a path in a folder that exists."
        ) from None


def load_record(path: str | os.PathLike[str]) -> Record:
    """The record in a strategy file.

    Raises:
        StrategyError: there is no such file, it is no strategy, or a damaged one.
    """
    source = Path(path)
    try:
        if not source.is_file():
            raise StrategyError(f"a strategy is read from a file, and '{source}' is none. Give the path of a file that a search saved.")
        with source.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise StrategyError(
            f"strategy file '{source}' cannot be read: {_reason(error)}. Give the path of a file that a search saved."
        ) from None
    if len(data) > MAX_BYTES:
        raise StrategyError(
            f"a strategy file has at most {MAX_BYTES} bytes, and '{source}' has more. Search again and save the strategy anew."
        )
    try:
        return from_json(data.decode())
    except UnicodeDecodeError as error:
        raise StrategyError(_damaged(source, f"at byte {error.start}: expected UTF-8 text, got {data[error.start]:#04x}")) from None
    except StrategyError as error:
        raise StrategyError(_damaged(source, str(error))) from None


def _damaged(source: Path, what: str) -> str:
    return f"strategy file '{source}' cannot be used: {what}. Restore the file, or search again and save the strategy anew."


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


def _write(target: Path, data: bytes) -> None:
    """Writes a temporary file next to the target, then renames it to the target."""
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(name, 0o666 & ~umask)  # temporary files are readable by their owner only
        os.replace(name, target)
    except BaseException:
        os.unlink(name)
        raise


def _format(name: str, value: Any, indent: int) -> str:
    """The member `name` as text, on one line where it fits, else with its members on separate lines."""
    flat = json.dumps(value, allow_nan=False)
    if not isinstance(value, dict | list) or not value:
        return flat
    if indent and name not in (*FILLED, *ONE_A_LINE, *ONE_A_LINE_COMPACT) and indent + len(name) + len(flat) < WIDTH:
        return flat
    if isinstance(value, dict):
        members = [f"{json.dumps(key)}: {_format(key, child, indent + 1)}" for key, child in value.items()]
    elif name in FILLED:
        members = _filled(list(map(_compact, value)), WIDTH - indent - 1)
    elif name in ONE_A_LINE_COMPACT:
        members = list(map(_compact, value))
    elif name in ONE_A_LINE:
        members = [json.dumps(child) for child in value]
    else:
        members = [_format("", child, indent + 1) for child in value]
    opening, closing = "{}" if isinstance(value, dict) else "[]"
    pad = " " * (indent + 1)
    return f"{opening}\n{pad}" + f",\n{pad}".join(members) + f"\n{pad[1:]}{closing}"


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), allow_nan=False)


def _filled(items: list[str], width: int) -> list[str]:
    """Comma-separated items, filled into lines of the given width."""
    lines: list[str] = []
    for item in items:
        if lines and len(lines[-1]) + len(item) + 3 <= width:
            lines[-1] += f", {item}"
        else:
            lines.append(item)
    return lines
