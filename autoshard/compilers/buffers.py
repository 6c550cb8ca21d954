"""Buffers of one device: their lives, and the moment at which most bytes are live."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from autoshard.compilers.kernel_order import Lifetimes


class CopiesOf(NamedTuple):
    """The copies of a value in other layouts."""

    value: int


Buffer = int | CopiesOf
"""What is stored, and pays a price on bytes: a value by its number, the partial result of an op as ``~op``, or copies of a value."""

Held = tuple[float, int, int]
"""Bytes of a device, the first moment in which they are live, and the first after that."""


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest number of bytes live at once on a device, and the buffers that it consists of.

    Attributes:
        nbytes: the sum of live buffers.
        moment: when it is, as in `Lifetimes`.
        alive: the values that are.
        held: the bytes of each.
        copies: the values that are alive in other layouts too, each with the bytes of such a copy.
        partials: the ops whose results are not scattered yet, each with the bytes of those.
        spare_bytes: by how much another assignment's short-lived values may exceed these, since fast memory has room for them.
    """

    nbytes: float
    moment: int
    alive: tuple[int, ...]
    held: tuple[float, ...]
    copies: tuple[tuple[int, float], ...]
    partials: tuple[tuple[int, float], ...]
    spare_bytes: float

    @property
    def charged(self) -> list[Buffer]:
        """What pays a price on bytes: values, those with copies included, partial results, and copies; each kind in order."""
        copied = sorted({value for value, _ in self.copies})
        return [*sorted({*self.alive, *copied, *(~op for op, _ in self.partials)}), *map(CopiesOf, copied)]


@dataclass(frozen=True, slots=True)
class Copy:
    """A value's copy in another layout: its bytes on a device, the ops that read it first and last, and whether it is rounded first."""

    nbytes: float
    first: int
    last: int
    rounded: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """The buffers of a device in one order of a program's kernels, and their lives.

    Attributes:
        times: the order, and the lives of the buffers of values in it; those come first.
        copies: the values that are alive in other layouts too; their copies come next.
        partials: the ops whose results are not scattered yet; those come then, and last buffers without a name.
        held, born, dies: per buffer its bytes, the first moment of its life and the first after it.
        usage: per moment the bytes of all that is alive.
    """

    times: Lifetimes
    copies: tuple[int, ...]
    partials: tuple[int, ...]
    held: np.ndarray
    born: np.ndarray
    dies: np.ndarray
    usage: np.ndarray

    def peak(self, spare_bytes: float, moment: int | None = None) -> Peak:
        """The fullest moment; or another one, by its number."""
        moment = int(self.usage.argmax()) if moment is None else moment
        n, m = len(self.times.values), len(self.times.values) + len(self.copies)
        numbers = (*self.times.values, *self.copies, *self.partials)
        alive = np.flatnonzero((self.born <= moment) & (self.dies > moment) & (self.held > 0))
        return Peak(
            nbytes=float(self.usage[moment]),
            moment=moment,
            alive=tuple(numbers[k] for k in alive if k < n),
            held=tuple(float(self.held[k]) for k in alive if k < n),
            copies=tuple((numbers[k], float(self.held[k])) for k in alive if n <= k < m),
            partials=tuple((numbers[k], float(self.held[k])) for k in alive if m <= k < len(numbers)),
            spare_bytes=spare_bytes,
        )
