"""The worker: an actor that computes the gradients of its part of each step's batch."""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from autoshard.errors import AutoshardError
from autoshard.parameter_server.server import Program, Pushed
from autoshard.parameter_server.sparse import Cache, CacheUse, summed


class Worker:
    """One worker. All that it keeps from one step to the next is its caches, so Ray restarts it, and repeats its task, by itself."""

    def __init__(self, program: Program, index: int, servers: list[str]):
        self.program, self.index = program, index
        self.servers: list[Any] = [_actor(name) for name in servers] if program.tables else []
        self.gradients_fn = jax.jit(program.gradients_fn)
        self.caches = {name: Cache(table.cache_rows, table.width, program.max_staleness) for name, table in program.tables.items()}

    def process(self) -> int:
        """The id of the worker's process."""
        return os.getpid()

    def forget(self) -> None:
        """Empties the caches."""
        for cache in self.caches.values():
            cache.clear()

    def cache_use(self) -> dict[str, CacheUse]:
        """How each table's cache was used since this process started."""
        return {name: cache.use for name, cache in self.caches.items()}

    def gradients(self, step: int, updates: int | None, *pulled: Any) -> tuple[Any, ...]:
        """The loss of this worker's batch, and what it pushes to each server.

        Args:
            updates: those that servers have had when rows are read, or None for any number.
            pulled: the leaves of each server; what follows them is only waited for.
        """
        batch = self.program.batches(self.index, self.program.workers, step)
        ids = {name: self._ids(name, batch) for name in self.program.tables}
        rows = {name: self._rows(name, each, step, updates) for name, each in ids.items()}
        params = self._assembled(pulled)
        loss, found = self.gradients_fn(params, rows, batch) if rows else self.gradients_fn(params, batch)
        gradients, row_gradients = found if rows else (found, {})
        if np.shape(loss) != ():
            raise AutoshardError(f"gradients_fn returns a scalar loss first, and it has shape {np.shape(loss)}. Return its mean.")
        _check_like(gradients, self.program.params, "gradients")
        _check_like(row_gradients, rows, "gradients of rows")
        return float(loss), *self._pushed(gradients, ids, row_gradients)

    def _assembled(self, pulled: tuple[Any, ...]) -> Any:
        leaves = [np.empty(0)] * jax.tree.structure(self.program.params).num_leaves
        for part, values in zip(self.program.parts, pulled, strict=False):
            for position, value in zip(part.leaves, values, strict=True):
                leaves[position] = value
        return jax.tree.unflatten(jax.tree.structure(self.program.params), leaves)

    def _ids(self, name: str, batch: Any) -> np.ndarray:
        table, ids = self.program.tables[name], np.asarray(self.program.tables[name].ids(batch))
        if not np.issubdtype(ids.dtype, np.integer) or (ids.size and not (ids.min() >= 0 and ids.max() < table.rows)):
            raise AutoshardError(
                f"ids of table {name!r} are whole numbers from 0 to {table.rows - 1}; got {ids.dtype}"
                + (f" from {ids.min()} to {ids.max()}" if ids.size else "")
                + ". Correct the table's ids=, or its rows=."
            )
        return ids

    def _rows(self, name: str, ids: np.ndarray, step: int, updates: int | None) -> np.ndarray:
        """Rows ``(*ids.shape, width)``, from the cache where they are good."""
        import ray

        def pull(unique: np.ndarray, versions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            places = [np.flatnonzero(unique % len(self.servers) == i) for i in range(len(self.servers))]
            calls = [s.rows.remote(updates, name, unique[p], versions[p]) for s, p in zip(self.servers, places, strict=True)]
            answers = ray.get(calls)
            positions = np.concatenate([p[answer[0]] for p, answer in zip(places, answers, strict=True)])
            return positions, np.concatenate([answer[1] for answer in answers]), np.concatenate([answer[2] for answer in answers])

        unique, inverse = np.unique(ids, return_inverse=True)
        return self.caches[name].read(step, unique, pull)[inverse.reshape(ids.shape)]

    def _pushed(self, gradients: Any, ids: dict[str, np.ndarray], row_gradients: dict[str, Any]) -> list[Pushed]:
        leaves, parts = jax.tree.leaves(gradients), self.program.parts
        sums = {name: self._row_sums(name, each, np.asarray(row_gradients[name])) for name, each in ids.items()}
        pushed = []
        for server, part in enumerate(parts):
            own = {name: unique % len(parts) == server for name, (unique, _) in sums.items()}
            rows = {name: (unique[own[name]], total[own[name]]) for name, (unique, total) in sums.items()}
            pushed.append(Pushed([np.asarray(leaves[i]) for i in part.leaves], rows))
        return pushed

    def _row_sums(self, name: str, ids: np.ndarray, gradients: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Different ids and their gradients, without those that change nothing."""
        table = self.program.tables[name]
        unique, total = summed(ids.reshape(-1), gradients.reshape(ids.size, table.width))
        changing = np.any(total != 0, axis=1) | table.lazy
        return unique[changing], total[changing]


def _actor(name: str) -> Any:
    import ray

    return ray.get_actor(name)


def _check_like(got: Any, wanted: Any, what: str) -> None:
    """Raises AutoshardError where two trees differ in structure, shapes or types."""
    if jax.tree.structure(got) != jax.tree.structure(wanted):
        raise AutoshardError(
            f"the {what} that gradients_fn returns are structured as what they are for, {jax.tree.structure(wanted)}; got "
            f"{jax.tree.structure(got)}. Return (loss, gradients), as jax.value_and_grad does; with tables, that of argnums=(0, 1)."
        )
    for (path, a), b in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(wanted), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise AutoshardError(
                f"the {what} that gradients_fn returns have the shapes and types of what they are for; at {jax.tree_util.keystr(path)} "
                f"{b.dtype}{list(b.shape)} was wanted, and got {a.dtype}{list(a.shape)}. Return the gradients of the first arguments."
            )
