"""Items that a thread reads ahead."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any, Generic, TypeVar

T = TypeVar("T")

LEAVING_SECONDS = 2.0  # how long a thread that is to end is waited for, which may be reading


class Ahead(Iterator[T], Generic[T]):
    """The items of a generator, so many ahead; the thread that reads them ends with the items, by `close`, or when nobody holds this.

    What the generator raises is raised where its item would be. It is opened, read and closed in the thread.
    """

    def __init__(self, items: Callable[[], Generator[T, None, None]], n_ahead: int):
        self._found: queue.SimpleQueue[tuple[T | None, BaseException | None]] = queue.SimpleQueue()
        self._room = threading.Semaphore(n_ahead)
        self._ended = threading.Event()
        thread = threading.Thread(target=_read, args=(items, self._found, self._room, self._ended), daemon=True, name="autoshard-data")
        self.close = weakref.finalize(self, _leave, thread, self._room, self._ended)
        thread.start()

    def __next__(self) -> T:
        if not self.close.alive:
            raise StopIteration
        item, error = self._found.get()
        self._room.release()
        if error is not None:
            self.close()
            raise error
        return item  # pyright: ignore[reportReturnType]


def _read(items: Callable[[], Generator[Any, None, None]], found: queue.SimpleQueue, room: threading.Semaphore, ended: threading.Event):
    """The thread: it holds nothing that holds whoever takes the items."""
    reading = None
    try:
        reading = items()
        while room.acquire() and not ended.is_set():
            found.put((next(reading), None))
    except BaseException as error:
        found.put((None, error))
    finally:
        if reading is not None:
            reading.close()


def _leave(thread: threading.Thread, room: threading.Semaphore, ended: threading.Event) -> None:
    ended.set()
    room.release()
    if thread is not threading.current_thread():
        thread.join(LEAVING_SECONDS)
