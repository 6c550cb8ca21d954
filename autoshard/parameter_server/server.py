"""The server: an actor that holds a part of the parameters with the optimizer's state, and its rows of the tables."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from autoshard.errors import AutoshardError
from autoshard.parameter_server.checkpoints import read, server_file, write
from autoshard.parameter_server.partition import Part, part_optimizer
from autoshard.parameter_server.sparse import Table, TableShard

if TYPE_CHECKING:
    import optax  # loaded only for programs that use it


@dataclass(frozen=True)
class Program:
    """What is trained, and how: sent to every server and worker once.

    Attributes:
        params: the parameters' shapes and types.
        init: a function that makes the parameters, or None where servers are given theirs.
        parts: what each server holds.
        max_staleness: steps for which a worker reads a row from its cache without asking whether it has changed.
    """

    gradients_fn: Callable[..., Any]
    params: Any
    init: Callable[[], Any] | None
    optimizer: optax.GradientTransformation
    batches: Callable[[int, int, int], Any]
    tables: Mapping[str, Table]
    parts: tuple[Part, ...]
    workers: int
    max_staleness: int


@dataclass(frozen=True, slots=True)
class Pushed:
    """What a worker pushes to one server: gradients of its leaves, and by table ids with the gradients of their rows."""

    leaves: list[np.ndarray]
    rows: dict[str, tuple[np.ndarray, np.ndarray]]


class ServerLost(Exception):
    """A server has not the state that the scheduler left in it: it was restarted."""


class Server:
    """One server; methods are called by the scheduler, and `rows` by workers."""

    def __init__(self, program: Program, index: int):
        self.program, self.index = program, index
        self.updates: int | None = None  # none until `start`
        self.part: Part = program.parts[index]
        self.init_state, self.update = part_optimizer(program.optimizer, program.params, self.part)

    def process(self) -> int:
        """The id of the server's process."""
        return os.getpid()

    def start(self, checkpoint: Path | None, updates: int, given: list[np.ndarray] | None) -> None:
        """Takes the state of a checkpoint after so many updates, or the initial one, of the given leaves or of those that it makes."""
        self.leaves = self._made() if given is None else [jax.numpy.asarray(leaf) for leaf in given]
        self.state = self.init_state(self.leaves)
        self.tables = {name: TableShard(table, self.index, len(self.program.parts)) for name, table in self.program.tables.items()}
        if checkpoint is not None:
            self._load(server_file(checkpoint, self.index))
        self.updates = updates

    def _made(self) -> list[jax.Array]:
        make = self.program.init
        assert make is not None
        return jax.jit(lambda: [jax.tree.leaves(make())[i] for i in self.part.leaves])()  # nothing of other servers is computed

    def pull(self, updates: int) -> list[np.ndarray]:
        """The server's leaves after so many updates."""
        self._check(updates)
        return [np.asarray(leaf) for leaf in self.leaves]

    def push(self, updates: int, *pushed: Pushed) -> None:
        """One update, from the state after so many, by the mean of what workers pushed."""
        self._check(updates)
        self.updates = updates + 1
        for name, shard in self.tables.items():
            shard.push(self.updates, [each.rows[name] for each in pushed])
        if self.leaves:
            self.leaves, self.state = self.update(self.leaves, self.state, [each.leaves for each in pushed])

    def rows(self, updates: int | None, table: str, ids: np.ndarray, versions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Rows that are not of the given versions, after so many updates, or any number."""
        self._check(updates)
        return self.tables[table].changed(ids, versions)

    def save(self, checkpoint: Path, updates: int) -> None:
        """Writes the state after so many updates to this server's file in a checkpoint."""
        self._check(updates)
        write(server_file(checkpoint, self.index), {name: np.asarray(array) for name, array in self._arrays().items()})

    def _check(self, updates: int | None) -> None:
        if self.updates is None or updates not in (None, self.updates):
            raise ServerLost(f"server {self.index} is after {self.updates} updates, not {updates}")

    def _arrays(self) -> dict[str, Any]:
        """All that changes in training, by the names in files."""
        paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(self.program.params)]
        found = {f"parameter{paths[i]}": leaf for i, leaf in zip(self.part.leaves, self.leaves, strict=True)}
        found |= {f"state/{i}": leaf for i, leaf in zip(self.part.state, self.state, strict=True)}
        for name, shard in self.tables.items():
            found |= {f"table/{name}": shard.rows, f"versions/{name}": shard.versions}
            found |= {f"table_state/{name}/{i}": leaf for i, leaf in enumerate(shard.state)}
        return found

    def _load(self, path: Path) -> None:
        wanted, saved = self._arrays(), read(path)
        got = {name: array.view(wanted[name].dtype) if _is_extended(array) and name in wanted else array for name, array in saved.items()}
        differs = sorted(
            name for name in {*wanted, *got} if name not in wanted or name not in got or _form(wanted[name]) != _form(got[name])
        )
        if differs:
            raise AutoshardError(
                f"a checkpoint continues the training that wrote it, with the same parameters, optimizer, tables and number of servers, "
                f"and {str(path)!r} differs in {', '.join(map(repr, differs[:3]))}. Pass what it was written with, or another folder."
            )
        self.leaves: Any = [jax.numpy.asarray(got[name]) for name in wanted if name.startswith("parameter")]
        self.state = [jax.numpy.asarray(got[name]) for name in wanted if name.startswith("state/")]
        for name, shard in self.tables.items():
            shard.rows, shard.versions = got[f"table/{name}"], got[f"versions/{name}"]
            shard.state = [got[f"table_state/{name}/{i}"] for i in range(len(shard.state))]


def _is_extended(array: np.ndarray) -> bool:
    """Whether .npz lost the type: bfloat16 and its like are saved as bytes."""
    return array.dtype.kind == "V"


def _form(array: Any) -> tuple[tuple[int, ...], np.dtype]:
    return tuple(array.shape), np.dtype(array.dtype)
