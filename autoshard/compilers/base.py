"""The model of a compiler, as far as a planned program's time and memory depend on it: one class a target.

A plan says which collectives run and how every value is sharded. The rest is the compiler's: fusion, the values that it
stores, the order of kernels, collectives that run beside them, rematerialisation. `Compiler` is XLA as far as all targets share it, and the
assumption for one that has not been studied; a target overrides the methods in which it was seen to differ.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autoshard.analysis.demanded_precision import Demands
from autoshard.analysis.partial_sums import PartialSums
from autoshard.cluster import Device
from autoshard.cluster.device import LANES
from autoshard.compilers.all_reduce_combiner import Sums, is_formed
from autoshard.compilers.buffers import Buffers, Copy
from autoshard.compilers.corrections import NO_CORRECTIONS, Corrections
from autoshard.compilers.fused_program import Fusion, Kernel
from autoshard.compilers.fusion_rules import FusionRules
from autoshard.compilers.grouped import Grouped, dense
from autoshard.compilers.kernel_order import Lifetimes, Orders, program_orders, shortest
from autoshard.compilers.op_patterns import Minor
from autoshard.compilers.traffic import Traffic, traffic_by_op
from autoshard.cost.reshard import Step
from autoshard.ir import Assignment, Graph, Layout, Op, Rule, Value
from autoshard.ir.naming import Names

Copies = Mapping[tuple[int, Layout], Copy]
"""Copies in other layouts, by value and layout."""
Partials = Mapping[int, Step]
"""Per op index the collective that combines its partial results."""

# How many times the predicted peak compilers were seen to need: of most programs, and of those with a convolution, sums of rows that fill
# no tiles, or a Fourier transform (docs/predictions.md: known errors, and the strategies of the library).
PEAK_ERROR = 1.25
CONVOLUTIONS, SHORT_ROWS, TRANSFORMS = 3.2, 2.0, 1.4


@dataclass(frozen=True, slots=True)
class Recomputed:
    """The peak memory of a device once some kernels run twice, and those, in the order in which they are chosen."""

    peak_bytes: float
    kernels: tuple[Kernel, ...]


@dataclass(frozen=True, slots=True)
class Compiler(ABC):
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
        hangs_ahead: whether its runtime may wait forever where many programs of several devices are started ahead.
        memory_goal: the share of a device's memory from which on it computes values again; 0 where it never does.
        fetches_early: whether it brings what is on hosts to the device as soon as there is room, long before it is used.
        contended_types: in which its scatters add to an element in a loop of compare-and-swap.
        lacks: per collective, an all_reduce by its operator, the element types for which it has none.
        drops_nan: the element types of which the largest or least of several devices' is a number, although one of them has NaN.
        fused_attention: JAX's fused attention kernel for it, by its name in `autoshard.rewrite.attention_kernels`; "" where there is none.
        deepest_update: of how many rows it computes new state in the kernel of a gradient's product without making that slower.
        stack_lanes: of the tiles that stacks between loops are to fill (`autoshard.analysis.stacks`); 0 where arrays have none.
        bucket_limits: its options that limit the bytes of several collectives in one; none where it has no such option.
        options: with which every sharded step is compiled.
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
    hangs_ahead: ClassVar[bool] = False
    memory_goal: ClassVar[float] = 0.0
    fetches_early: ClassVar[bool] = False
    contended_types: ClassVar[tuple[str, ...]] = ()
    lacks: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    fused_attention: ClassVar[str] = ""
    drops_nan: ClassVar[tuple[str, ...]] = ()
    deepest_update: ClassVar[float] = math.inf
    stack_lanes: ClassVar[int] = 0
    bucket_limits: ClassVar[tuple[str, ...]] = ()
    options: ClassVar[Mapping[str, str]] = {}

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

    def sorts_rows(self, shape: tuple[float, ...], itemsize: float, added: float) -> bool:
        """Whether it sorts rows that are added to zeros, and writes each of the table once.

        Args:
            shape, itemsize: of a device's part of the table, and of a number.
            added: how many rows a device adds to it.
        """
        return False

    def row_bytes(self, shape: tuple[float, ...], itemsize: float, copied_itemsize: float, added: float) -> float:
        """The bytes that copying a table costs between its own order and rows that are stored one by one; 0 where it is not copied.

        Args:
            shape: of a device's part.
            itemsize, copied_itemsize: of a number in the table, and in the copy, which may be rounded.
            added: how many rows a device adds to it; 0 where they are looked up.
        """
        return 0.0

    # -- memory --

    def peak_error(self, graph: Graph) -> float:
        """How many times the predicted peak of programs of its kind this compiler was seen to need, at most."""

        def error(op: Op) -> float:
            if op.primitive == "scatter-add":
                added = graph.values[op.operands[2]]
                is_short = op.params["dimension_numbers"].update_window_dims and added.shape[-1] < LANES
                return SHORT_ROWS if is_short else PEAK_ERROR
            return {"conv_general_dilated": CONVOLUTIONS, "fft": TRANSFORMS}.get(op.primitive, PEAK_ERROR)

        return max(map(error, graph.walk()), default=PEAK_ERROR)

    @abstractmethod
    def buffers(self, facts: ProgramFacts, assignment: Assignment, copies: Copies, partials: Partials) -> tuple[Buffers, ...]:
        """The buffers of a device in the order whose unsharded peak is least, and in other orders that the compiler may take."""

    def recomputed(self, facts: ProgramFacts, held: Buffers, alone: Callable[[Kernel], bool], memory_bytes: float) -> Recomputed | None:
        """The kernels that it runs again until the peak is within its goal; None where it does not get there.

        Args:
            alone: whether a kernel needs no other devices.
            memory_bytes: the memory of a device.
        """
        return None


@dataclass(frozen=True, slots=True, eq=False)
class ProgramFacts:
    """Facts of a program that no assignment changes.

    Attributes:
        graph, rules: the program.
        compiler: whose fusions, orders and traffic these are.
        names: what its values are called.
        flops: per op index, the floating point operations of one execution, unsharded.
        free: per value, whether it is made of constants alone (the partitioner recomputes those wherever they are read).
        fusion: which values are stored, and the kernels that make them.
        orders: the lives of their buffers, in each of the orders that the compiler may take.
        recomputes: whether something is computed again between barriers (``jax.checkpoint``).
        traffic: per op index, the bytes that it moves to and from memory.
        readers: per value, the op indices that read it (control flow reads the values that it hands to its bodies).
        unawaited: per body that has any, the reductions that no product or loop waits for, itself or through others; and its products.
        gradients: the products that no other product or loop waits for, as gradients of weights.
        makers: per value, the index of the op that makes it; None where none does.
        wanted: per value, whether an op reads it or the program returns it.
        portable: per value, whether reading it in another layout stores nothing more: it is stored anyway, or computed from smaller values
            wherever it is read.
        settled: per value, whether its layout does not matter: it is free, or a scalar.
        idle: per op index, whether it has a rule and all its results are free, so that it does not run.
        alike: per op index, a number that ops share whose costs are equal under every choice.
        sums: the partial sums that are only added up.
        demands: the precision that is demanded of values.
        single_rows: the values that are exchanged in float32 beside gathered ones that are not sent, with those.
        combined: the sums, in the order in which they are combined.
        table_lookups, lookups: the gathers of arguments' elements, and of those of computed values in memory.
        looped_weights: the arguments of three dimensions or more that products in loops read as they are handed in, each with the loops.
        added_to: the scatters that add to values in memory.
        row_updates: of those, where a scatter shares an array with what it updates, the arguments that it does.
        sliced_alone: the arrays in memory whose slices only loops without products read or stack.
        stacked: the stacks in memory that loops with products make, each with one of its slices.
        stacks_between_loops: the stacks that scans make and only scans read, by slices.
        sending: the ops whose shards may send each other parts of their operands.
        rings: the ops whose shards may send arrays round.
        sorts: the sorts.
        transforms: the Fourier transforms.
        grouped: per op index, what the compiler makes of grouped products.
        corrections: of predicted kernels, by what the compiler made of such kernels before.
    """

    graph: Graph
    rules: tuple[Rule | None, ...]
    compiler: Compiler
    names: Names
    flops: tuple[float, ...]
    free: tuple[bool, ...]
    fusion: Fusion
    orders: Orders
    recomputes: bool
    traffic: tuple[Traffic, ...]
    readers: tuple[tuple[int, ...], ...]
    unawaited: tuple[tuple[tuple[Op, ...], tuple[Op, ...]], ...]
    gradients: frozenset[int]
    makers: tuple[int | None, ...]
    wanted: tuple[bool, ...]
    portable: tuple[bool, ...]
    settled: tuple[bool, ...]
    idle: tuple[bool, ...]
    alike: tuple[int, ...]
    sums: PartialSums
    demands: Demands
    single_rows: dict[int, frozenset[int]]
    combined: Sums
    table_lookups: tuple[Op, ...]
    lookups: tuple[Op, ...]
    looped_weights: dict[int, tuple[int, ...]]
    added_to: tuple[Op, ...]
    row_updates: dict[int, tuple[int, ...]]
    sliced_alone: frozenset[int]
    stacked: dict[int, int]
    stacks_between_loops: frozenset[int]
    sending: tuple[Op, ...]
    rings: tuple[Op, ...]
    sorts: tuple[Op, ...]
    transforms: tuple[Op, ...]
    grouped: dict[int, Grouped]
    corrections: Corrections = NO_CORRECTIONS

    @property
    def materialised(self) -> tuple[bool, ...]:
        """Per value, whether it is in memory, stored or as a view of a stored one."""
        return self.fusion.materialised

    @property
    def lifetimes(self) -> Lifetimes:
        """The lives of buffers in the order of kernels whose unsharded peak is lowest."""
        return self.orders.best

    def in_order(self, times: Lifetimes) -> ProgramFacts:
        """The same program with its kernels in another order."""
        return replace(self, orders=replace(self.orders, best=times))

    def corrected(self, corrections: Corrections) -> ProgramFacts:
        """The same program with other corrections."""
        return self if corrections is self.corrections else replace(self, corrections=corrections)
