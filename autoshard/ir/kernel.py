"""Work of a kernel that a user wrote: what the whole call computes and moves, whatever the devices it is split over."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Kernel:
    """The work of one call of a kernel, over its whole grid.

    Attributes:
        matrix_flops: floating point operations of matrix products.
        vector_flops: those of everything else.
        dtype: that of the products' operands, at whose rate they run; of what it reads, without products.
        nbytes: bytes to and from a device's memory: those of each block, as often as it is loaded or stored.
        interpreted: whether it becomes operations of the program around it, which compilers see.
    """

    matrix_flops: float
    vector_flops: float
    dtype: str
    nbytes: float
    interpreted: bool = False

    @property
    def flops(self) -> float:
        return self.matrix_flops + self.vector_flops
