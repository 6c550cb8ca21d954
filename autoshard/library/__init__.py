"""The strategy files shipped with autoshard, in a wheel and in a source checkout."""

from __future__ import annotations

import difflib
from pathlib import Path

from autoshard.errors import StrategyError
from autoshard.strategy import Record, load_record

__all__ = ["folder", "load", "names", "path"]

_PACKAGE = Path(__file__).resolve().parents[1]


def folder() -> Path:
    """The folder of the strategy files: inside the installed package, or next to it in a source checkout."""
    installed = _PACKAGE / "_strategies"
    return installed if installed.is_dir() else _PACKAGE.parent / "strategies"


def names() -> tuple[str, ...]:
    """The name of every strategy, sorted: its file's path in the folder without ``.json``."""
    return tuple(_files())


def path(name: str) -> Path:
    """The file of a strategy.

    Raises:
        StrategyError: there is none of that name; the message has the nearest names.
    """
    files = _files()
    if name not in files:
        near = difflib.get_close_matches(name, files, n=3, cutoff=0.4) or list(files)[:3]
        raise StrategyError(
            f"a strategy of the library has one of {len(files)} names, got {name!r}. "
            + (f"Near ones: {', '.join(near)}. `autoshard strategies` lists all." if near else "This installation has none.")
        )
    return files[name]


def load(name: str) -> Record:
    """The record of a strategy of the library.

    Raises:
        StrategyError: there is none of that name, or its file is damaged.
    """
    return load_record(path(name))


def _files() -> dict[str, Path]:
    root = folder()
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in sorted(root.rglob("*.json"))}
