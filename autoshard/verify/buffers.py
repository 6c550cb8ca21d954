"""Memory of a compiled program, from XLA's dumped buffer assignment (``--xla_dump_to``).

XLA assigns every value an offset in an allocation and a live range of schedule steps. Arguments, results and constants have allocations of
their own; temporaries share one, whose size includes fragmentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

_ALLOCATION = re.compile(r"allocation \d+: size (\d+),?(.*):$")
_VALUE = re.compile(r" value: <\d+ (\S+)(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\)")
_LIVE = re.compile(r"^    (\S+?)(\{[\d,]*\}):(\d+)-(\d+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Buffers:
    """The main memory of a program on one device.

    Attributes:
        peak_bytes: peak live bytes: ``memory_analysis().peak_memory_in_bytes``, up to a few kilobytes of constants.
        allocated_bytes: bytes allocated, fragmentation included, without the program's code.
        alive: the values of the program that are alive at the peak, by the names of their instructions, with the bytes of each.
    """

    peak_bytes: float
    allocated_bytes: float
    alive: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class _Slot:
    """A value's place in the temporaries' allocation, and its first and last live step."""

    name: str
    offset: int
    size: int
    first: int
    last: int


def read_buffers(assignment: str, live_ranges: str) -> Buffers:
    """The main memory of a program.

    Args:
        assignment: the text of ``*-buffer-assignment.txt``.
        live_ranges: the text of ``*-live-range.txt``.
    """
    fixed, temporary = 0, 0
    kept: list[tuple[str, float]] = []
    slots: list[_Slot] = []
    live = {name + index: (int(first), int(last)) for name, index, first, last in _LIVE.findall(live_ranges)}
    for size, attributes, values in _allocations(assignment):
        if "color" in attributes or "thread-local" in attributes:
            continue  # on-chip memories, and the scalars of reductions' bodies
        if "preallocated-temp" in attributes:
            temporary += size
            slots += [_Slot(name, offset, n, *live[name]) for name, n, offset in values if n]
        else:
            fixed += size
            kept += [(name, float(size)) for name, _, _ in values[:1]]
    most, moment = _peak(slots)
    alive = {(slot.offset, slot.size): slot for slot in slots if slot.first <= moment <= slot.last}.values()
    named = [(name.partition("{")[0], nbytes) for name, nbytes in (*kept, *((slot.name, float(slot.size)) for slot in alive))]
    return Buffers(fixed + most, fixed + temporary, tuple(sorted(named, key=lambda each: -each[1])))


def _allocations(assignment: str) -> Iterator[tuple[int, str, list[tuple[str, int, int]]]]:
    """Per allocation its size, its attributes, and name, size and offset of each value in it."""
    size, attributes, values = 0, "", []
    for line in assignment.splitlines():
        if value := _VALUE.match(line):
            name = value[1] if value[1].endswith("}") else value[1] + "{}"
            values.append((name, int(value[2]), int(value[3])))
        elif allocation := _ALLOCATION.match(line):
            if size:
                yield size, attributes, values
            size, attributes, values = int(allocation[1]), allocation[2], []
    if size:
        yield size, attributes, values


def _peak(slots: list[_Slot]) -> tuple[float, int]:
    """The most bytes in use at any step, and that step; values that share bytes, as a loop's carry with its initial value, count once."""
    if not slots:
        return 0.0, 0
    edges = np.unique([edge for slot in slots for edge in (slot.offset, slot.offset + slot.size)])
    lengths, users = np.diff(edges), np.zeros(len(edges) - 1, int)
    events = sorted([(slot.last + 1, -1, slot) for slot in slots] + [(slot.first, 1, slot) for slot in slots], key=lambda event: event[:2])
    used = most = moment = 0
    for when, change, slot in events:
        first, last = np.searchsorted(edges, (slot.offset, slot.offset + slot.size))
        users[first:last] += change
        turned = users[first:last] == (1 if change > 0 else 0)  # from free to used, or back
        used += change * int(lengths[first:last][turned].sum())
        if used > most:
            most, moment = used, when
    return float(most), moment
