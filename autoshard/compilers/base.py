"""The model of a compiler, as far as a planned program's time and memory depend on it: one class a target.

A plan says which collectives run and how every value is sharded. The rest is the compiler's: fusion, the values that it
stores, the order of kernels, collectives that run beside them, rematerialisation. `Compiler` is XLA as far as all targets share it, and the
assumption for one that has not been studied; a target overrides the methods in which it was seen to differ.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from autoshard.cluster import Device
from autoshard.compilers.all_reduce_combiner import is_formed
from autoshard.compilers.buffer_assignment import Buffers, Copy, buffers
from autoshard.compilers.fused_program import Fusion, Kernel
from autoshard.compilers.fusion import FusionRules
from autoshard.compilers.grouped import Grouped, dense
from autoshard.compilers.kernel_order import Orders, program_orders, shortest
from autoshard.compilers.op_patterns import Minor
from autoshard.compilers.traffic import Traffic, traffic_by_op
from autoshard.cost.reshard import Step
from autoshard.ir import Assignment, Graph, Layout, Op, Value

if TYPE_CHECKING:
    from autoshard.compilers.program_facts import ProgramFacts

Options = Mapping[str, bool | int | float | str]
Copies = Mapping[tuple[int, Layout], Copy]
"""Copies in other layouts, by value and layout."""
Partials = Mapping[int, Step]
"""Per op index the collective that combines its partial results."""


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The peak memory of a device once some kernels run twice, and those, in the order in which they are chosen."""

    peak_bytes: float
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True)
class Compiler:
    """The compiler of one device.

    Attributes:
        device: the device that it compiles for.
        overlap: whether collectives may run while the device computes.
        memory_limit_bytes: what a program may use of the device's memory.
        demotes_operands: whether float32 operands of products at default precision are sent as bfloat16.
        gathers_ahead: whether loops may gain where each trip gathers weights for the next one.
        kernel_by_kernel: whether each kernel's traffic is known, with the ends and buffers of its own.
        product_per_window: whether a convolution is one matrix product for each position of its window.
        wide_bytes: of the buffers through which kernels pass results that are narrower; 0 where there are none.
        unfused_bytes: an element, beyond those that it moves, that an op costs which is fused with nothing.
        reduces_in_place: whether an all_reduce in a loop writes where it reads.
        memory_goal: the share of a device's memory from which on it computes values again; 0 where it never does.
        fetches_early: whether it brings what is on hosts to the device as soon as there is room, long before it is used.
        contended_types: in which its scatters add to an element in a loop of compare-and-swap.
        lacks: per collective, an all_reduce by its operator, the element types for which it has none.
        drops_nan: the element types of which the largest or least of several devices' is a number, although one of them has NaN.
        fused_attention: JAX's fused attention kernel for it, by its name in `autoshard.rewrite.attention_kernels`; "" where there is none.
        bucket_limits: its options that limit the bytes of several collectives in one; none where it has no such option.
    """

    device: Device
    overlap: bool = True
    memory_limit_bytes: float = math.inf
    demotes_operands: ClassVar[bool] = False
    gathers_ahead: ClassVar[bool] = False
    kernel_by_kernel: ClassVar[bool] = False
    product_per_window: ClassVar[bool] = False
    wide_bytes: ClassVar[int] = 0
    unfused_bytes: ClassVar[int] = 0
    reduces_in_place: ClassVar[bool] = False
    memory_goal: ClassVar[float] = 0.0
    fetches_early: ClassVar[bool] = False
    contended_types: ClassVar[tuple[str, ...]] = ()
    lacks: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    fused_attention: ClassVar[str] = ""
    drops_nan: ClassVar[tuple[str, ...]] = ()
    bucket_limits: ClassVar[tuple[str, ...]] = ()

    # -- collectives --

    @property
    def asynchronous(self) -> tuple[str, ...]:
        """The kinds of collectives that run while the device computes."""
        return ()

    @property
    def carried(self) -> tuple[str, ...]:
        """The kinds of those that start with a matrix product, and are waited for where there is none."""
        return ()

    def scatters(self, value: Value, step: Step, mesh: tuple[int, ...]) -> bool:
        """Whether a reduce_scatter of a value is one, and not an all_reduce and slices of it.

        Args:
            step: the reduce_scatter.
            mesh: the sizes of the mesh's axes.
        """
        return is_formed(value, step, mesh)

    @property
    def gathers_tori(self) -> bool:
        """Whether one all_gather may be over all devices of a three-dimensional torus."""
        return True

    @property
    def windows(self) -> bool:
        """Whether products may gain by sending blocks round a ring of permutes."""
        return False

    @property
    def overlap_options(self) -> dict[str, bool | int | float | str]:
        """Options with which it overlaps more collectives with compute; none where none are known."""
        return {}

    # -- kernels --

    @property
    def fusion_rules(self) -> FusionRules:
        """How it fuses, and when it computes values again for each reader."""
        return FusionRules()

    @property
    def fast_memory_bytes(self) -> float:
        """Memory of the core's own that buffers may have."""
        return 0.0

    @property
    def kernel_memory_bytes(self) -> float:
        """Memory of the core's own that a user's kernel gets where it asks for none; 0 where that is not known."""
        return 0.0

    def orders(self, graph: Graph, fusion: Fusion) -> Orders:
        """The orders in which kernels may run."""
        found = program_orders(graph, fusion)
        return Orders(found, best := shortest(graph, found), best, frozenset())

    def traffic(self, graph: Graph, fusion: Fusion) -> tuple[Traffic, ...]:
        """Per op, the bytes that it moves to and from memory."""
        return traffic_by_op(graph, fusion)

    def grouped(self, op: Op, values: Sequence[Value]) -> Grouped:
        """What it makes of a grouped product."""
        return dense(op, values)

    def padding(self, shape: tuple[float, ...], minor: Minor | None) -> float:
        """How many times its size an array takes.

        Args:
            minor: the dimensions that products want innermost.
        """
        return 1.0

    # -- memory --

    def buffers(self, facts: ProgramFacts, assignment: Assignment, copies: Copies, partials: Partials) -> tuple[Buffers, ...]:
        """The buffers of a device in the order whose unsharded peak is least, and in other orders that the compiler may take."""
        return (buffers(facts, assignment, copies, partials),)

    def recomputed(self, facts: ProgramFacts, held: Buffers, alone: Callable[[Kernel], bool], memory_bytes: float) -> Recomputed | None:
        """The kernels that it runs again until the peak is within its goal; None where it does not get there.

        Args:
            alone: whether a kernel needs no other devices.
            memory_bytes: the memory of a device.
        """
        return None
