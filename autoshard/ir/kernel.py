"""Work of a kernel that a user wrote: what the whole call computes and moves, whatever the devices it is split over."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.ir.rule import Rule


@dataclass(frozen=True, slots=True)
class Kernel:
    """The work of one call of a kernel, over its whole grid.

    Attributes:
        matrix_flops: floating point operations of matrix products.
        vector_flops: those of everything else.
        dtype: that of the products' operands, at whose rate they run; of what it reads, without products.
        nbytes: bytes to and from a device's memory: those of each block, as often as it is loaded or stored.
        interpreted: whether it becomes operations of the program around it, which compilers see.
        rule: how it can be split, where that was read with the results that nobody reads.
        whole: why what cannot be split cannot be, in words.
        unread: the numbers of the results that nobody reads, which may hold anything.
        near_bytes, near_limit_bytes: memory of a core's own that a program holds, and how much of it the kernel asks for, or 0.
        guessed: what of the work is not known, and how it counts, in words.
        products: which parts of the matrix products' operations are of products of these sizes: rows, columns, what is contracted; () where
            that is not known.
    """

    matrix_flops: float
    vector_flops: float
    dtype: str
    nbytes: float
    interpreted: bool = False
    rule: Rule | None = None
    whole: tuple[str, ...] = ()
    unread: tuple[int, ...] = ()
    guessed: tuple[str, ...] = ()
    products: tuple[tuple[float, tuple[int, int, int]], ...] = ()
    near_bytes: float = 0.0
    near_limit_bytes: float = 0.0

    @property
    def flops(self) -> float:
        return self.matrix_flops + self.vector_flops
