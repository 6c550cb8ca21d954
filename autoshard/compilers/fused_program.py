"""A fused program: which values it stores, and the kernels that compute them. `autoshard.compilers.fusion` makes it."""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.compilers.op_patterns import Minor


@dataclass(frozen=True, slots=True)
class Kernel:
    """One compiled kernel, or loop.

    Attributes:
        op: index of the op that ends it.
        reads, makes: the stored values that it reads and writes, by their roots.
        in_place: whether a result takes the place of an operand that dies here: loops, and updates of an operand.
        inner: a loop's body or a conditional's branches, each the kernels of one run, in program order.
        main: the op whose choice decides the layouts that it reads: the product whose epilogue ``op`` ends, else ``op`` itself.
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
        materialised: per value, whether it is in memory, stored or as a view of a stored one; expansions of constants never count.
        root: per value, the value whose memory it shares: a view's operand, a loop's carry, the stack that a trip's result goes to.
        narrow: per value, whether a TPU stores it as bfloat16, since no more is demanded: reductions are made along with it, in float32.
        last: per value whether only kernels that make the program's results read it, as gradients are read.
        casts: the float32 stacks of which loops' products read slices, rounded once before on a TPU: by value the first and last such loop.
        minor: per value the dimensions that convolutions or batched products want innermost; None where there are none.
        begun: the carries of outermost loops that begin with constants, as sums of gradients do.
        users: per value, the ops that read it, or a view of it.
        padded: the values that are stored because a product reads a pad of them.
        scattered: the scatters into zeros that XLA:GPU turns into scatters into the other summand, with the ops that add.
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
