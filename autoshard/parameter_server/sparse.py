"""Tables whose rows are spread over the servers by id, and the cache in which a worker has the rows that it read last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from autoshard.errors import AutoshardError
from autoshard.parameter_server.partition import added

if TYPE_CHECKING:
    import optax  # loaded only for programs that use it

CHUNK = 1 << 16  # rows that are made at a time


@dataclass(frozen=True)
class Table:
    """A table of rows that workers read by id and never hold whole; server ``i`` of ``n`` holds the rows with ``id % n == i``.

    The optimizer is applied to each row by itself, in the steps that read the row. With SGD or Adagrad that is what training of the
    whole table gives. Optimizers that also change rows, or their state, without a gradient (momentum, Adam, weight decay, schedules) then
    count the steps of each row alone, known as lazy Adam for one, and are taken with ``lazy=True`` only.

    Attributes:
        rows: how many, with ids from 0.
        width: elements of a row, float32.
        init: ids ``(n,)`` to rows ``(n, width)``, the same whenever it is called.
        ids: a batch to the ids that it reads, integers of any shape.
        optimizer: of each row.
        cache_rows: how many rows a worker keeps from one step to the next.
        lazy: see above.

    Raises:
        AutoshardError: the optimizer needs ``lazy=True``.

    >>> import optax
    >>> Table(10, 2, lambda ids: np.zeros((len(ids), 2)), lambda batch: batch, optax.adam(1e-3), cache_rows=5)
    Traceback (most recent call last):
    ...
    autoshard.errors.AutoshardError: a row of a table changes only in steps that read it, and this optimizer changes rows,...
    """

    rows: int
    width: int
    init: Callable[[np.ndarray], Any]
    ids: Callable[[Any], Any]
    optimizer: optax.GradientTransformation
    cache_rows: int
    lazy: bool = False

    def __post_init__(self) -> None:
        if min(self.rows, self.width, self.cache_rows) < 1:
            raise AutoshardError(
                f"a table has rows, width and cache_rows of at least 1; got {self.rows}, {self.width} and {self.cache_rows}. Pass others."
            )
        if not self.lazy and self._moves_without_gradient():
            raise AutoshardError(
                "a row of a table changes only in steps that read it, and this optimizer changes rows, or its state, without a gradient. "
                "Use one that does not, such as optax.sgd(1e-2) or optax.adagrad(1e-2), or pass lazy=True: then each row has its own count "
                "of steps."
            )

    def _moves_without_gradient(self) -> bool:
        row = np.linspace(0.5, 1.5, self.width, dtype=np.float32)
        state = self.optimizer.init(row)
        for gradient in (row, -0.3 * row):
            _, state = self.optimizer.update(gradient, state, row)
        updates, after = self.optimizer.update(np.zeros_like(row), state, row)
        same = jax.tree.map(np.array_equal, jax.tree.leaves(state), jax.tree.leaves(after))
        return bool(np.any(np.asarray(updates))) or not all(same)


class TableShard:
    """The rows of a table that one server holds, each with the optimizer's state and the number of the update that changed it last."""

    def __init__(self, table: Table, server: int, servers: int):
        self.table, self.server, self.servers = table, server, servers
        ids = np.arange(server, table.rows, servers)
        self.rows = np.empty((len(ids), table.width), np.float32)
        for start in range(0, len(ids), CHUNK):
            self.rows[start : start + CHUNK] = table.init(ids[start : start + CHUNK])
        first = jax.eval_shape(table.optimizer.init, jax.ShapeDtypeStruct((table.width,), np.float32))
        self._structure = jax.tree.structure(first)
        self.state = [np.empty((len(ids), *x.shape), x.dtype) for x in jax.tree.leaves(first)]
        init = jax.jit(jax.vmap(lambda row: jax.tree.leaves(table.optimizer.init(row))))
        for start in range(0, len(ids), CHUNK):
            for whole, part in zip(self.state, init(self.rows[start : start + CHUNK]), strict=True):
                whole[start : start + CHUNK] = part
        self.versions = np.zeros(len(ids), np.int64)

    def changed(self, ids: np.ndarray, versions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Of some ids those, by position, whose version is not the given one: ``(positions, versions, rows)``."""
        own = ids // self.servers
        positions = np.flatnonzero(self.versions[own] != versions)
        return positions, self.versions[own[positions]], self.rows[own[positions]]

    def push(self, update: int, pushed: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Updates the rows of which workers pushed gradients, as ``(ids, rows)`` of each worker, by the mean over workers."""
        ids, gradients = summed(np.concatenate([each[0] for each in pushed]), np.concatenate([each[1] for each in pushed]))
        if not len(ids):
            return
        own = ids // self.servers
        padded = np.pad(own, (0, (1 << (len(own) - 1).bit_length()) - len(own)))  # few shapes, since each one is compiled
        gradients = np.pad(gradients / np.float32(len(pushed)), ((0, len(padded) - len(own)), (0, 0)))
        rows, state = self._update(self.rows[padded], [each[padded] for each in self.state], gradients)
        self.rows[own] = np.asarray(rows)[: len(own)]
        for whole, part in zip(self.state, state, strict=True):
            whole[own] = np.asarray(part)[: len(own)]
        self.versions[own] = update

    @cached_property
    def _update(self) -> Callable:
        def one(row: jax.Array, state: list[jax.Array], gradient: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
            updates, after = self.table.optimizer.update(gradient, self._structure.unflatten(state), row)
            return added(row, updates), jax.tree.leaves(after)

        return jax.jit(jax.vmap(one))


def summed(ids: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each id once, in order, with the sum of its rows.

    >>> summed(np.array([3, 1, 3]), np.array([[1.0], [2.0], [3.0]]))
    (array([1, 3]), array([[2.],
           [4.]]))
    """
    unique, inverse = np.unique(ids, return_inverse=True)
    sums = np.zeros((len(unique), *rows.shape[1:]), rows.dtype)
    np.add.at(sums, inverse, rows)
    return unique, sums


@dataclass(frozen=True, slots=True)
class CacheUse:
    """How often a row that a step reads was in the cache and still good (a hit) or had to be sent (a miss), the rows that were evicted to
    make room, and the most rows that were in the cache after a step."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    most_rows: int = 0


class Cached(NamedTuple):
    """A row, the version that it is of, and the step in which its server last said so."""

    row: np.ndarray
    version: int
    step: int


class Cache:
    """The rows that a worker read last, at most ``capacity`` from one step to the next; the least recently read are evicted.

    A row is good for ``max_age`` steps; after that its server is asked whether it has changed.
    """

    def __init__(self, capacity: int, width: int, max_age: int):
        self.capacity, self.width, self.max_age, self.use = capacity, width, max_age, CacheUse()
        self._rows: OrderedDict[int, Cached] = OrderedDict()  # by id, the least recently read first

    def read(
        self, step: int, ids: np.ndarray, pull: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray, np.ndarray]]
    ) -> np.ndarray:
        """Rows ``(n, width)`` of different ids.

        Args:
            pull: ids and the versions that the cache has, -1 for none, to ``(positions, versions, rows)`` of those that have changed.
        """
        keys = ids.tolist()
        found = {key: self._rows[key] for key in keys if key in self._rows}
        asked = [key for key in keys if key not in found or step - found[key].step > self.max_age]
        misses = 0
        if asked:
            known = np.array([found[key].version if key in found else -1 for key in asked], np.int64)
            positions, versions, rows = pull(np.array(asked, np.int64), known)
            found |= {key: found[key]._replace(step=step) for key in asked if key in found}
            for position, version, row in zip(positions.tolist(), versions.tolist(), rows, strict=True):
                found[asked[position]] = Cached(row.copy(), version, step)
            misses = len(positions)
        evicted = self._keep({key: found[key] for key in keys})
        use = self.use
        self.use: CacheUse = CacheUse(
            use.hits + len(keys) - misses, use.misses + misses, use.evictions + evicted, max(use.most_rows, len(self._rows))
        )
        return np.stack([found[key].row for key in keys]) if keys else np.empty((0, self.width), np.float32)

    def _keep(self, entries: dict[int, Cached]) -> int:
        """Keeps entries as those read last; how many others, or of them, there is no room for."""
        for key, entry in entries.items():
            self._rows[key] = entry
            self._rows.move_to_end(key)
        evicted = max(0, len(self._rows) - self.capacity)
        for _ in range(evicted):
            self._rows.popitem(last=False)
        return evicted

    def clear(self) -> None:
        """Forgets all rows: after servers went back to a checkpoint, a version may be that of another row."""
        self._rows.clear()
