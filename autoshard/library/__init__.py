"""The strategy files shipped with autoshard, in a wheel and in a source checkout."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from autoshard.errors import StrategyError
from autoshard.ir.naming import near_words
from autoshard.strategy import Record, load_record

EXPERTS = ("data_parallel", "fully_sharded", "tensor_parallel", "manual")

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
        raise StrategyError(f"a strategy of the library has one of {len(files)} names, got {name!r}. {near(name)}")
    return files[name]


def near(name: str) -> str:
    """A sentence with the names that look most like one that is not in the library."""
    files = _files()
    return f"{near_words(name, files)} `autoshard strategies` lists all." if files else "This installation has none."


def load(name: str) -> Record:
    """The record of a strategy of the library.

    Raises:
        StrategyError: there is none of that name, or its file is damaged.
    """
    return load_record(path(name))


def _files() -> dict[str, Path]:
    root = folder()
    return {file.relative_to(root).with_suffix("").as_posix(): file for file in sorted(root.rglob("*.json"))}


def group(record: Record) -> str:
    """The strategy's name without its searcher: found and expert strategies of a model on a cluster have it in common."""
    return record.name.removesuffix(f"_{record.searcher.name}")


def against_expert(records: Mapping[str, Record]) -> dict[str, float | None]:
    """Per name the step time in multiples of the fastest expert strategy of the same model and cluster; None where there is none.

    Expert strategies are those of `EXPERTS`, which shard as people do by hand.
    """
    fastest: dict[str, float] = {}
    for record in records.values():
        if record.searcher.name in EXPERTS:
            seconds = record.cost.makespan_seconds
            fastest[group(record)] = min(seconds, fastest.get(group(record), seconds))
    best = {name: fastest.get(group(record)) for name, record in records.items()}
    return {name: records[name].cost.makespan_seconds / expert if expert else None for name, expert in best.items()}
