"""XLA:TPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from autoshard.cluster.catalogue import KERNEL_MEMORY_BYTES
from autoshard.cluster.device import LANES
from autoshard.compilers.base import Compiler, Copies, Partials, Recomputed
from autoshard.compilers.buffers import Buffers
from autoshard.compilers.fused_program import Fusion, Kernel
from autoshard.compilers.fusion_rules import FusionRules
from autoshard.compilers.grouped import Grouped, dense, in_blocks, is_plain, rows_of
from autoshard.compilers.op_patterns import Minor
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.compilers.tpu.buffers import tiled_buffers
from autoshard.compilers.tpu.kernel_traffic import UNFUSED_BYTES, WIDE_BYTES, traffic_by_kernel
from autoshard.compilers.tpu.rematerialisation import GOAL, recomputed
from autoshard.compilers.tpu.tables import are_added_to_by_rows, are_looked_up_by_rows, are_sorted, row_bytes
from autoshard.compilers.tpu.tiling import padding
from autoshard.compilers.traffic import Traffic
from autoshard.ir import Assignment, Graph, Op, Value

# Collectives that start before, and end after, other work. XLA:TPU (libtpu 0.0.42): permutes have a start and an end; all_gathers run
# within fusions (AsyncCollectiveStart) on v5e, and on v4, v5p and v6e do not (a fully sharded transformer compiled for slices of each, of 4
# to 64 chips); all_reduces, reduce_scatters and all_to_alls nowhere do. evidence: all_gathers beside compute
ASYNCHRONOUS = {"v5e": ("all_gather", "collective_permute")}
ELSEWHERE_ASYNCHRONOUS = ("collective_permute",)  # evidence: permutes beside compute
# Those of them whose data the kernels of matrix products move on: they start with one. Of 101 fusions that all_gathers passed through in
# modules compiled for v5e (two transformers and a perceptron) all but four had a product at their top level.
# evidence: products carry all_gathers
CARRIED = {"v5e": ("all_gather",)}

# An all_gather over all chips of a slice of whole cubes is compiled to an all_reduce of zeros into which each chip writes its shard. That
# sends twice as much, and the whole operand, which is float32 even where the result is rounded, is stored beside the result. Over one or
# two of the dimensions, on slices of less than a cube, and on v4, all_gathers stay (libtpu 0.0.42). evidence: all_gathers over tori
REDUCES_TORI = ("v5p",)

# Options with which collectives run beside compute that are waited for otherwise. XLA:TPU for v5e (libtpu 0.0.42): gradients are
# reduce_scattered within fusions; without the larger limit of scoped memory programs are refused. A fully sharded GPT of 12 scanned layers
# was scheduled in 84.9 ms for 88.0, a scanned MLP in 9.9 for 10.8. evidence: scatters beside compute
OVERLAP_OPTIONS: dict[str, dict[str, bool | int | float | str]] = {
    "v5e": {
        "xla_enable_async_reduce_scatter_fusion": True,
        "xla_jf_crs_combiner_threshold_in_bytes": 0,
        "xla_tpu_ars_combiner_threshold_in_bytes": 0,
        "xla_tpu_decompose_every_reduce_scatters_hlos": True,
        "xla_tpu_enable_async_collective_fusion_fuse_reduce_scatter": True,
        "xla_tpu_scoped_vmem_limit_kib": 32768,
    }
}

# All_reduces are combined up to so many bytes; reduce_scatters never are. evidence: buckets of gradients
BUCKET_LIMITS = ("xla_jf_crs_combiner_threshold_in_bytes",)

# Complex numbers are pairs, and 64-bit ones halves, of which it adds up some. What makes them of others is `autoshard.lower.element_types`.
# evidence: types that TPUs combine
LACKS = {
    "reduce_scatter": ("complex64", "complex128", "float64"),
    **dict.fromkeys(("max", "min"), ("int64", "uint64", "float64")),
}

# The core's own memory that a program's buffers may have: the largest preallocated-temp of memory space 1 in XLA:TPU's buffer assignments
# (libtpu 0.0.42), which large programs nearly fill: 112.0 MiB on a v5e, 95.6 on a v6e (6 programs), 47.9 on a v5p (4 programs).
# evidence: fast memory
FAST_MEMORY_BYTES = {"v5e": 112 * 2**20, "v6e": 96 * 2**20, "v5p": 48 * 2**20}

# Grouped products are one kernel that skips blocks of rows in which a group has none, mostly of 128 to 256 rows, half as many as a group
# has; on v5p a kernel of Mosaic that visits blocks of up to 128 rows, where 8 divides the rows; else, and on v4, products of all groups
# with all rows. Rows are masked as they are read, and nothing is stored. Per device whether blocks are skipped, and their least and most
# rows.
# evidence: blocks of grouped products
GROUPED_BLOCKS = {"v5e": (True, 128, 256), "v6e": (True, 128, 256), "v5p": (False, 8, 128)}

# If no collective combines a gradient, the kernel of its product computes the new state, too: blocks of the state take the core's memory
# from those of the operands, which are then read, or computed, more often. Of twice as many rows as this that takes up to 1.9 times as long
# as two kernels, and seldom less; of as many it depends on the sizes (0.8 to 1.7). evidence: updates by deep products
DEEPEST_UPDATE = 8192

# What a kernel moves beside the value hides work: where it moves as much, limits are 1.5 to 2.3 times as far off.
# evidence: memory traffic hides work
HIDES = 1.75


@dataclass(frozen=True, slots=True)
class XlaTpu(Compiler):
    """XLA:TPU, as libtpu 0.0.42 has it.

    Loops gain nothing by gathering a trip ahead: it gathers asynchronously then, but copies the weights in every trip (61 us for 8 MiB
    on v5e, whose gather takes 87) and computes slower beside it: the schedule of a scanned MLP took 11.3 to 11.8 ms for 10.8.
    """

    fused_attention: ClassVar[str] = "splash attention"
    demotes_operands: ClassVar[bool] = True
    kernel_by_kernel: ClassVar[bool] = True
    product_per_window: ClassVar[bool] = True
    wide_bytes: ClassVar[int] = WIDE_BYTES
    unfused_bytes: ClassVar[int] = UNFUSED_BYTES
    memory_goal: ClassVar[float] = GOAL
    lacks: ClassVar[Mapping[str, tuple[str, ...]]] = LACKS
    deepest_update: ClassVar[float] = DEEPEST_UPDATE
    stack_lanes: ClassVar[int] = LANES
    bucket_limits: ClassVar[tuple[str, ...]] = BUCKET_LIMITS

    @property
    def asynchronous(self) -> tuple[str, ...]:
        return ASYNCHRONOUS.get(self.device.name, ELSEWHERE_ASYNCHRONOUS) if self.overlap else ()

    @property
    def carried(self) -> tuple[str, ...]:
        return CARRIED.get(self.device.name, ()) if self.overlap else ()

    @property
    def gathers_tori(self) -> bool:
        return self.device.name not in REDUCES_TORI

    @property
    def windows(self) -> bool:
        """An all_gather with its product of 8192 x 2048 x 8192 over 4 chips of v5e is scheduled in 0.92 ms, and the ring in 0.72."""
        return self.overlap

    @property
    def overlap_options(self) -> dict[str, bool | int | float | str]:
        return dict(OVERLAP_OPTIONS.get(self.device.name, {}))

    @property
    def fusion_rules(self) -> FusionRules:
        """Values are stored that take a core longer to compute than the chip to write and read.

        Chains of products and sums that make bfloat16 are computed again up to 24 to 26 operations on v5e, 9 on v5p, 13 on v4 and 15 on
        v6e, and kept from 35, 12, 18 and 18 on: by this they are kept from 30, 10, 14 and 17 on.
        """
        device = self.device
        patience = 2 * LANES * device.clock_hertz / device.memory_bandwidth_bytes_per_second if device.clock_hertz else math.inf
        return FusionRules(patience, hides=HIDES)

    @property
    def fast_memory_bytes(self) -> float:
        return FAST_MEMORY_BYTES.get(self.device.name, 0.0)

    @property
    def kernel_memory_bytes(self) -> float:
        return KERNEL_MEMORY_BYTES.get(self.device.name, 0.0)

    def traffic(self, graph: Graph, fusion: Fusion) -> tuple[Traffic, ...]:
        return traffic_by_kernel(graph, fusion)

    def grouped(self, op: Op, values: Sequence[Value]) -> Grouped:
        skips, least, most = GROUPED_BLOCKS.get(self.device.name, (False, 0, 0))
        rows, groups = rows_of(op, values), values[op.operands[2]].shape[-1]
        if skips:
            return in_blocks(op, values, min(max(rows / groups / 2, least), most), skips)
        if least and is_plain(op, values) and rows % least == 0:
            return in_blocks(op, values, math.gcd(rows, most), skips)
        return replace(dense(op, values), expanded=(), transposed=False)

    def padding(self, shape: tuple[float, ...], minor: Minor | None) -> float:
        return padding(shape, minor)

    def sorts_rows(self, shape: tuple[float, ...], itemsize: float, added: float) -> bool:
        return are_sorted(shape, itemsize, added)

    def row_bytes(self, shape: tuple[float, ...], itemsize: float, copied_itemsize: float, added: float) -> float:
        adds = are_added_to_by_rows(shape, itemsize, added, self.device.memory_bytes)
        copied = adds if added else are_looked_up_by_rows(shape, itemsize)
        return row_bytes(shape, copied_itemsize, added, self.fast_memory_bytes) if copied else 0.0

    def buffers(self, facts: ProgramFacts, assignment: Assignment, copies: Copies, partials: Partials) -> tuple[Buffers, ...]:
        """Where collectives are synchronous, the compiler may take more orders.

        Of 12 transformers whose layers are computed again the shifted order was 0 to 12 % below the compiler, of 50 other programs the best
        of these at most 9 %; bounds count on the first order alone.
        """

        def of(facts: ProgramFacts, early: bool) -> Buffers:
            return tiled_buffers(facts, assignment, copies, partials, self.fast_memory_bytes, early)

        found = of(facts, bool(copies))
        program, shifted, *listed = facts.orders.tried
        tried = ((program, False), (shifted, not facts.recomputes), *((times, True) for times in listed))
        if copies or (facts.lifetimes, False) in tried:
            return (found,)
        others = (of(facts.in_order(times), early) for times, early in tried)
        return found, min(others, key=lambda other: other.usage.max())

    def recomputed(self, facts: ProgramFacts, held: Buffers, alone: Callable[[Kernel], bool], memory_bytes: float) -> Recomputed | None:
        return recomputed(facts, held, alone, memory_bytes)
