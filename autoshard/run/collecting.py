"""Garbage collection put off while a large program is taken apart and put together."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

# Objects that are made before the garbage collector looks at them; 700 is Python's default. Ten times as many kept gigabytes of tables of
# meshes on which nothing fits.
COLLECTED = 500_000


@contextmanager
def rarely_collecting() -> Iterator[None]:
    """Lets garbage wait: graphs of tens of thousands of operations have few cycles, and looking for them takes a quarter of a search."""
    before = gc.get_threshold()
    if before[0]:  # else nothing is collected at all
        gc.set_threshold(max(before[0], COLLECTED), *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)
