"""A fused program: which values it stores, and the kernels that compute them. `autoshard.compilers.fusion` makes it."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.compilers.op_patterns import Minor


@dataclass(frozen=True, slots=True)
class Kernel:
    """What one compiled kernel, or loop, reads and makes.

    Attributes:
        op: index of the op that ends it.
        reads, makes: stored values, by their roots.
        in_place: whether a result takes the place of an operand that dies here: loops, and what updates its operand.
        inner: a loop's body or a conditional's branches, each the kernels of one run, in program order.
        main: the op that decides what its devices read: the product whose epilogue ``op`` ends, else ``op`` itself.
        through: for each of ``reads``, the operand of ``main`` it is read for; the number of operands where it is for the epilogue.
    """

    op: int
    reads: tuple[int, ...]
    makes: tuple[int, ...]
    in_place: bool
    inner: tuple[tuple[Kernel, ...], ...] = ()
    main: int = -1
    through: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Fusion:
    """A fused program.

    Attributes:
        stored: per value, whether it is written to memory.
        materialised: per value, whether it lies in memory, as its own or as a view of what does; what is made of constants never counts.
        root: per value, the value whose memory it shares: a view's operand, what a loop carries, the stack that a trip's result goes to.
        narrow: per value, whether only bfloat16 of it is demanded, and so kept on a TPU: reductions are made along with it, in float32.
        last: per value whether nothing but kernels that make the program's results read it, as gradients are.
        casts: what a loop's products read of float32 stacks, rounded once before it on a TPU: the first and last loop that do, by value.
        minor: per value the dimensions that convolutions or batched products want innermost; None where there are none.
        begun: what loops outside of others carry that begins with constants, as sums of gradients do.
        users: per value, the ops that read it, or a view of it.
        padded: the values that lie in memory because a product reads a pad of them.
        scattered: the scatters into zeros that XLA:GPU makes scatters into what those are added to, with the ops that add.
        kernels: the program's kernels, in program order.
    """

    stored: tuple[bool, ...]
    materialised: tuple[bool, ...]
    root: tuple[int, ...]
    narrow: tuple[bool, ...]
    last: tuple[bool, ...]
    casts: dict[int, tuple[int, int]]
    minor: tuple[Minor | None, ...]
    begun: frozenset[int]
    users: tuple[tuple[int, ...], ...]
    padded: tuple[int, ...]
    scattered: tuple[tuple[int, int], ...]
    kernels: tuple[Kernel, ...]
