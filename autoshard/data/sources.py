"""Where a process's batches come from: loaders of batches, and examples that are read by their positions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any, Protocol

import jax
import numpy as np

from autoshard.data.shard import DataShard
from autoshard.errors import AutoshardError

# Of a machine's memory, how much Grain's workers of all its processes may fill; the rest is for the program and the file cache.
MEMORY_SHARE = 0.25
MOST_BUFFERED = 16  # batches that each of Grain's workers may hold
SAMPLES = 5  # Grain's default: so many batches are read to measure their size

State = dict[str, Any]
"""Where reading is, as plain values: how many batches were read, and what the loader's own iterator says of it."""

Batches = Generator[tuple[Any, State], None, None]
"""Host batches, each with the state after it."""


class Source(Protocol):
    """What batches of a process are read from."""

    def read(self, state: State | None) -> Batches:
        """Batches from where a state says, or from the beginning."""
        ...

    def first(self) -> Any:
        """The first batch, read once more; None where that cannot be."""
        ...


def is_random_access(loader: Any) -> bool:
    """Whether elements are found by position; a mapping's are by key."""
    return hasattr(loader, "__len__") and hasattr(loader, "__getitem__") and not hasattr(loader, "keys")


def grain_kind(loader: Any) -> str:
    """``MapDataset``, ``IterDataset`` or ``DataLoader`` of Grain, else empty; whoever has one has loaded Grain."""
    grain = sys.modules.get("grain")
    kinds = ("MapDataset", "IterDataset", "DataLoader") if grain is not None else ()
    return next((kind for kind in kinds if isinstance(loader, getattr(grain, kind, ()))), "")


# -- batches as a loader yields them --------------------------------------------------------------------------------------


class Batched:
    """Batches as they come from an iterable, or an iterator."""

    def __init__(self, loader: Iterable[Any]):
        self._loader = loader
        self._iterator = iter(loader)
        self._is_used = False
        self._first: Any = None  # of those that a state leaves out

    def read(self, state: State | None) -> Batches:
        """Batches from where the state says.

        Raises:
            AutoshardError: they were read before, and cannot be read again.
        """
        if self._is_used and self._iterator is self._loader and not hasattr(self._iterator, "set_state"):
            raise AutoshardError(
                "an iterator is read once, and this one was read already. Pass what makes it, a loader or a dataset, or set the state "
                "before the first batch is taken."
            )
        iterator = iter(self._loader) if self._is_used else self._iterator
        self._is_used = True
        return self._read(iterator, state or {"batches": 0})

    def _read(self, iterator: Iterator[Any], state: State) -> Batches:
        n = state["batches"]
        try:
            if state.get("loader") is not None:
                _set_state(iterator, state["loader"])
            else:
                for number, batch in zip(range(n), iterator, strict=False):
                    self._first = self._first if number else jax.tree.map(np.array, batch)
            for batch in iterator:
                n += 1
                yield batch, {"batches": n, "loader": _state_of(iterator)}
        finally:
            self._close(iterator)

    def first(self) -> Any:
        """The first batch, read once more; None where that cannot be."""
        if self._first is None and self._iterator is not self._loader:
            again = iter(self._loader)
            try:
                self._first = next(again, None)
            finally:
                self._close(again)
        return self._first

    def _close(self, iterator: Any) -> None:
        """Ends what an iterator that was made here has running, as Grain's has processes."""
        if iterator is not self._loader and hasattr(iterator, "close"):
            iterator.close()


def _state_of(iterator: Any) -> Any:
    """What an iterator says of where it is; None of one that says nothing. Grain's DataLoader says it in bytes, which JSON has not."""
    state = iterator.get_state() if hasattr(iterator, "get_state") and hasattr(iterator, "set_state") else None
    return state.decode() if isinstance(state, bytes) else state


def _set_state(iterator: Any, state: Any) -> None:
    if not hasattr(iterator, "set_state"):
        raise AutoshardError(
            f"this state is of a loader whose iterator has get_state and set_state, and {type(iterator).__name__} has neither. Pass the "
            "kind of loader that the state is from."
        )
    iterator.set_state(state.encode() if isinstance(iterator.get_state(), bytes) else state)


# -- examples by position -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Examples(Sequence[Any]):
    """The batches of one process, of examples that are read by position: row r of batch i is example ``i * batch_size + r``.

    Attributes:
        examples: anything with a length whose elements are examples.
        shard: the rows of each batch that are read.
        wraps: whether a last batch that lacks rows has them from the beginning; else it is left out.
        through: None, or what makes an iterable of a sequence of batches, such as Grain's workers.
    """

    examples: Any
    shard: DataShard
    wraps: bool
    through: Callable[[Sequence[Any]], Iterable[Any]] | None = field(default=None, compare=False)

    def __len__(self) -> int:
        whole, rest = divmod(len(self.examples), self.shard.batch_size)
        return whole + bool(rest and self.wraps)

    def __getitem__(self, number: int) -> Any:
        if not 0 <= number < len(self):
            raise IndexError(number)
        start, n = number * self.shard.batch_size, len(self.examples)
        return stacked([self.examples[(start + row) % n] for row in self.shard.rows])

    def first(self) -> Any:
        """None: all processes have as many batches."""

    def read(self, state: State | None) -> Batches:
        """Batches from where the state says."""
        start = (state or {"batches": 0})["batches"]
        if self.through is None:
            for number in range(start, len(self)):
                yield self[number], {"batches": number + 1}
            return
        iterator = iter(self.through(_From(replace(self, through=None), start))) if start < len(self) else iter(())
        try:
            for number, batch in enumerate(iterator, start):
                yield batch, {"batches": number + 1}
        finally:
            if hasattr(iterator, "close"):
                iterator.close()  # pyright: ignore[reportAttributeAccessIssue]


@dataclass(frozen=True)
class _From(Sequence[Any]):
    """The batches from one on."""

    batches: Examples
    start: int

    def __len__(self) -> int:
        return len(self.batches) - self.start

    def __getitem__(self, number: int) -> Any:
        return self.batches[self.start + number]


def stacked(examples: Sequence[Any]) -> Any:
    """The batch of examples, which are pytrees of arrays or numbers.

    >>> stacked([{"x": [1, 2], "y": 0}, {"x": [3, 4], "y": 1}])
    {'x': [array([1, 3]), array([2, 4])], 'y': array([0, 1])}
    """
    if any(example is None for example in examples):
        raise has_gaps()
    leaves, trees = zip(*map(jax.tree.flatten, examples), strict=True)
    return trees[0].unflatten([np.stack([np.asarray(x) for x in column]) for column in zip(*leaves, strict=True)])


def has_gaps() -> AutoshardError:
    """That positions are not those of examples."""
    return AutoshardError(
        "examples are read by position, and some are None, as in a filtered Grain dataset, whose positions have gaps. Pass batches, as in "
        "dataset[shard.shard_id :: shard.num_shards].filter(...).to_iter_dataset().batch(shard.n_rows)."
    )


# -- Grain --------------------------------------------------------------------------------------------------------------------


def through_grain(n_ahead: int) -> Callable[[Sequence[Any]], Iterable[Any]]:
    """Batches made by as many threads of Grain's as are held ahead."""

    def read(batches: Sequence[Any]) -> Iterable[Any]:
        grain = _grain()
        options = grain.ReadOptions(num_threads=max(n_ahead, 1), prefetch_buffer_size=max(n_ahead, 1))
        return grain.MapDataset.source(batches).to_iter_dataset(options)

    return read


def tuned(n_processes_here: int) -> Callable[[Any], Iterable[Any]]:
    """Batches made by the worker processes, and held in the buffers, that Grain picks for their size and the machine's memory.

    Args:
        n_processes_here: processes of the program on this machine, which share it.
    """
    grain = _grain()
    from absl import flags

    def read(batches: Any) -> Iterable[Any]:
        is_iterable = grain_kind(batches) == "IterDataset"
        source = batches if is_iterable else grain.MapDataset.source(batches)
        plain = source if is_iterable else source.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=1))
        workers = max((os.cpu_count() or 1) // n_processes_here, 1)
        memory_mb = int(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") * MEMORY_SHARE / n_processes_here / 2**20)
        if not flags.FLAGS.is_parsed():  # Grain 0.2.18's workers read one, absl program or not: google/grain#1355
            flags.FLAGS.mark_as_parsed()
        found = grain.experimental.pick_performance_config(
            plain, ram_budget_mb=memory_mb // workers, max_workers=workers, max_buffer_size=MOST_BUFFERED, samples_to_check=SAMPLES
        )
        options = grain.ReadOptions(num_threads=1, prefetch_buffer_size=max(found.read_options.prefetch_buffer_size, 1))
        return (plain if is_iterable else source.to_iter_dataset(options)).mp_prefetch(found.multiprocessing_options)

    return read


def _grain() -> Any:
    with suppress(ImportError):
        if find_spec("grain") is not None:
            import grain

            return grain
    raise AutoshardError(
        "autotune=True has Grain pick the workers and buffers that read data, and Grain is not installed. Install it with "
        "pip install 'autoshard[data]', or leave autotune out."
    )
