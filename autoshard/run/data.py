"""Batches as global arrays where a strategy wants them, made from what each process reads."""

from __future__ import annotations

import socket
import zlib
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from autoshard.data import (
    ENDED,
    FAILED,
    HAS,
    WRAPS,
    Ahead,
    Batched,
    Examples,
    Exchange,
    Source,
    State,
    Told,
    grain_kind,
    has_gaps,
    is_random_access,
    through_grain,
    tuned,
)
from autoshard.errors import AutoshardError, StrategyError
from autoshard.run.feeding import Matching

ENDS = ("wrap", "drop")


def data_iterator(matching: Matching, loader: Any, autotune: bool, at_end: str, prefetch: int) -> DataIterator:
    """The iterator over global batches, with options as for `Strategy.data`.

    Raises:
        AutoshardError: as `source_of`.
        StrategyError: an option is none.
    """
    if at_end not in ENDS:
        raise StrategyError(f"at_end is one of {ENDS}, got {at_end!r}. 'wrap' fills the last batch with the first rows.")
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise StrategyError(f"prefetch is a whole number of batches, 0 or more, got {prefetch!r}. 2 are usual.")
    wraps = at_end == "wrap"
    source = source_of(loader, matching, wraps, autotune, prefetch)
    return DataIterator(source, matching, Exchange(matching.devices), wraps, prefetch)


def source_of(loader: Any, matching: Matching, wraps: bool, autotune: bool, prefetch: int) -> Source:
    """What batches are read from: examples by position, where the loader has a length and its elements are examples.

    Raises:
        AutoshardError: Grain cannot tune the loader, or is not installed.
        StrategyError: there is nothing to read.
    """
    kind = grain_kind(loader)
    by_position = kind == "MapDataset" or (not kind and is_random_access(loader))
    if autotune and not by_position and kind != "IterDataset":
        raise AutoshardError(
            f"autotune=True picks worker processes, which read by position, and a {type(loader).__name__} is read in one place. Pass a "
            "grain.MapDataset or grain.IterDataset, or examples with __len__ and __getitem__, or leave autotune out."
        )
    through = tuned(_processes_here()) if autotune else through_grain(prefetch) if kind == "MapDataset" else None
    if by_position:
        if not len(loader):
            raise StrategyError("a loader has batches or examples, and this one is empty. Pass what has some.")
        example = loader[0]
        if example is None:
            raise has_gaps()
        if (fed := matching.example(example)) is not None:
            return Examples(loader, fed.shard, wraps, through)
        if not hasattr(loader, "__iter__"):
            matching.batch(example)  # says what is wrong with it
    elif not hasattr(loader, "__iter__"):
        raise StrategyError(
            f"a loader has examples by position, or batches one after the other; got {type(loader).__name__}, which has neither. Pass a "
            "dataset, a list or an iterable."
        )
    return Batched(through(loader) if autotune and through else loader)


def _processes_here() -> int:
    """How many of the program's processes share this machine."""
    if jax.process_count() == 1:
        return 1
    own = np.uint32(zlib.crc32(socket.gethostname().encode()))
    return int((np.asarray(multihost_utils.process_allgather(own)) == own).sum())


@dataclass(frozen=True, slots=True, eq=False)
class _Item:
    """A batch on the devices, or why there is none.

    Attributes:
        told: what the other processes are told of it.
        batch: as the step takes it; None where there is none.
        state: of the source after it.
        error: what the loader raised.
    """

    told: Told
    batch: Any = None
    state: State | None = None
    error: Exception | None = None


class DataIterator(Iterator[Any]):
    """Batches of global arrays, as `Strategy.data` returns them.

    A thread reads and places them ahead; it ends with the batches, with `close` or a ``with`` block, and when nobody holds the iterator.
    In several processes all take the next batch alike, as they call the step.
    """

    def __init__(self, source: Source, matching: Matching, exchange: Exchange, wraps: bool, prefetch: int):
        self._several = len(exchange.processes) > 1
        self._items = partial(_items, source, matching, wraps, self._several)
        self._exchange = exchange
        self._wraps = wraps
        self._prefetch = prefetch
        self._state: State = {"batches": 0}
        self._reading: Ahead[_Item] | Generator[_Item, None, None] | None = None
        self._next: tuple[_Item, Any] | None = None
        self._is_over = False

    def __next__(self) -> Any:
        if self._is_over:
            raise StopIteration
        try:
            item = self._agreed() if self._several else self._read()
            if item.error is not None:
                raise item.error
        except Exception:
            self.close()
            raise
        if item.told.status == ENDED:
            self.close()
            raise StopIteration
        self._state = item.state or self._state
        return item.batch

    def _read(self) -> _Item:
        if self._reading is None:
            items = partial(self._items, self._state)
            self._reading = Ahead(items, self._prefetch) if self._prefetch else items()
        return next(self._reading)

    def _sent(self) -> tuple[_Item, Any]:
        item = self._read()
        return item, self._exchange.send(item.told)

    def _agreed(self) -> _Item:
        """This process's next item, once all are known to have one; what comes after it is told to the others already."""
        item, sent = self._next or self._sent()
        self._next = None
        told = self._exchange.received(sent)
        if item.error is not None:
            return item
        _check_told(told, self._exchange.processes, self._wraps)
        statuses = {each.status for each in told}
        if HAS not in statuses or (ENDED in statuses and not self._wraps):
            return _Item(Told(ENDED))
        self._next = self._sent()
        return item

    def get_state(self) -> State:
        """Where the batches are that were taken so far, which JSON can hold; batches that are read ahead do not count."""
        return dict(self._state)

    def set_state(self, state: State) -> None:
        """Goes on after the batch after which the state was got, of the same data in the same order.

        A loader whose iterator has ``get_state`` and ``set_state``, as Grain's, is set so; examples are read from their position on; any
        other loader is read from its beginning, and the batches up to there are left out.

        Raises:
            StrategyError: this is no state that `get_state` returned.
        """
        self.close()
        self._state, self._is_over = _checked(state), False

    def close(self) -> None:
        """Ends reading ahead; there are no more batches."""
        reading, self._reading, self._next, self._is_over = self._reading, None, None, True
        if reading is not None:
            reading.close()

    def __enter__(self) -> DataIterator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _checked(state: Any) -> State:
    n = state.get("batches") if isinstance(state, Mapping) else None
    if isinstance(n, bool) or not isinstance(n, int) or n < 0:
        raise StrategyError(
            f"a state of batches is what their get_state() returned, a dict with 'batches'; got {state!r:.80}. Pass that one."
        )
    return dict(state)


# -- what processes tell each other ----------------------------------------------------------------------------------------


def _check_told(told: Sequence[Told], processes: Sequence[int], wraps: bool) -> None:
    """Raises `StrategyError` where processes cannot go on together."""
    first: dict[int, int] = {}
    for process, each in zip(processes, told, strict=True):
        first.setdefault(each.status, process)
    if FAILED in first:
        raise StrategyError(f"all processes read a batch before one steps, and process {first[FAILED]} failed to. Its output says why.")
    if wraps and HAS in first and ENDED in first:
        raise StrategyError(
            f"every process has as many batches, and process {first[ENDED]} has fewer than process {first[HAS]}. Give each an equal share "
            "of the rows, by num_shards and shard_id of strategy.data_shard(...), or pass at_end='drop'."
        )
    seen: dict[Any, tuple[int, int]] = {}
    for process, each in zip(processes, told, strict=True):
        if each.status != ENDED:
            for key, found in ((each.shard_id, each.rows_sum), ("whole", each.whole_sum)):
                other, before = seen.setdefault(key, (process, found))
                if found != before:
                    raise _differing(key, other, process)


def _differing(key: Any, process: int, other: int) -> StrategyError:
    if key == "whole":
        rule = "what every process reads whole is the same in all"
    else:
        rule = f"processes of one shard read the same rows, those of shard {key} here"
    return StrategyError(
        f"{rule}, and process {other} read others than process {process}. Read by num_shards and shard_id of strategy.data_shard(...), "
        "with the same seed and order in every process."
    )


# -- host batches, placed ahead ----------------------------------------------------------------------------------------------


def _items(source: Source, matching: Matching, wraps: bool, several: bool, state: State) -> Generator[_Item, None, None]:
    """Batches on the devices, and then that there are no more; in the thread that reads ahead."""
    try:
        yield from _placed(source, matching, wraps, several, state)
    except Exception as error:
        yield _Item(Told(FAILED), error=error)
    while True:
        yield _Item(Told(ENDED))


def _placed(source: Source, matching: Matching, wraps: bool, several: bool, state: State) -> Generator[_Item, None, None]:
    feeding: _Feeding | None = None
    with closing(source.read(state)) as reading:
        for tree, after in reading:
            feeding = feeding or _Feeding(matching, tree, state, wraps)
            if (item := feeding.item(tree, after)) is not None:
                yield item
    if wraps and (feeding is None or feeding.first is None) and (tree := source.first()) is not None:
        feeding = feeding or _Feeding(matching, tree, state, wraps)
        feeding.first = feeding.first or matching.again(feeding.fed, tree)
    if not state["batches"] and (feeding is None or not (wraps or feeding.n_placed)):
        fewer = "" if wraps else " or fewer rows than a batch, which at_end='drop' leaves out"
        raise StrategyError(
            f"a loader has batches, and this one has none{fewer}. Pass what has some; an iterator is read once, and then empty."
        )
    if wraps and feeding is not None:
        yield from feeding.wrapped(several)


class _Feeding:
    """The batches of a loader on their way to the devices.

    Attributes:
        fed: the arguments that they are.
        n_rows: how many rows each has but for the last: those of this process, or of the whole batch.
        n_placed: how many had as many.
        first: the first batch, where the last may need it.
        lacking: the last batch and the state after it, if it has fewer rows.
    """

    def __init__(self, matching: Matching, tree: Any, state: State, wraps: bool):
        """The batches of which one is given, read from where a state says.

        Raises:
            StrategyError: they are not as the step takes them, or others than the state's.
        """
        self.fed, leaves = matching.batch(tree)
        rows = self.fed.n_rows(leaves)
        size = state.get("batch_size", self.fed.batch_size)
        if size != self.fed.batch_size:
            raise StrategyError(
                f"data go on with batches as large as before, and this state is of batches of {size} rows, where the strategy's have "
                f"{self.fed.batch_size}. Search with batches of {size}, or begin the data anew."
            )
        self.n_rows = state.get("rows") or (rows if rows == self.fed.batch_size else self.fed.shard.n_rows)
        self.n_placed = 0
        self.first: list[Any] | None = None
        self.lacking: tuple[list[Any], State] | None = None
        self._matching = matching
        self._keeps = wraps and not state["batches"]

    def item(self, tree: Any, after: State) -> _Item | None:
        """A batch on the devices; None where it lacks rows.

        Raises:
            StrategyError: it has too many, or lacks rows and is not the last.
        """
        leaves = self._matching.again(self.fed, tree)
        rows, lacked = self.fed.n_rows(leaves), None if self.lacking is None else self.fed.n_rows(self.lacking[0])
        if rows > self.n_rows or lacked is not None:
            fed, name = self.fed, ", ".join(map(str, self.fed.argnums))
            raise StrategyError(
                f"batches before the last have the {fed.shard.n_rows} rows that this process reads of {fed.batch_size}, or all; got one of "
                f"{rows if lacked is None else lacked}. Batch by strategy.data_shard({name}).n_rows, with drop_remainder=True where "
                "workers batch on their own, or search for another batch size."
            )
        after["batch_size"] = self.fed.batch_size
        if "loader" in after:  # else examples by position, of which each process has its own rows
            after["rows"] = self.n_rows
        if rows < self.n_rows:
            self.lacking = leaves, after
            return None
        self.n_placed += 1
        if self._keeps:
            self.first, self._keeps = [x if np.isscalar(x) else np.array(x) for x in leaves], False
        return self._placed(HAS, leaves, after)

    def wrapped(self, several: bool) -> Generator[_Item, None, None]:
        """The last batch filled with the first rows; in several processes then the first one once more, for when others have another."""
        state = None
        if self.lacking is not None:
            leaves, state = self.lacking
            if self.first is None and state["batches"] > 1:
                raise StrategyError(
                    "at_end='wrap' fills the last batch with the first rows, and this iterator was set to a state and cannot be read from "
                    "its beginning. Pass the loader or dataset that makes it, or at_end='drop'."
                )
            yield self._placed(HAS, self.fed.filled(leaves, self.first, self.n_rows), state)
        if several and (self.first or self.lacking):
            leaves = self.first or self.lacking[0]  # pyright: ignore[reportOptionalSubscript]
            yield self._placed(WRAPS, self.fed.filled(leaves, None, self.n_rows), state)

    def _placed(self, status: int, leaves: list[Any], after: State | None) -> _Item:
        arrays, rows_sum, whole_sum = self.fed.placed(leaves)
        return _Item(Told(status, self.fed.shard.shard_id, rows_sum, whole_sum), self._matching.tree(self.fed, arrays), after)
