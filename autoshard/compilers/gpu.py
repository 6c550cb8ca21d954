"""XLA:GPU."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from autoshard.compilers.base import Compiler, Copies, Partials
from autoshard.compilers.buffer_assignment import buffers
from autoshard.compilers.buffers import Buffers
from autoshard.compilers.fused_program import Fusion
from autoshard.compilers.fusion_rules import FusionRules
from autoshard.compilers.kernel_order import Orders, filled_at_once, gradients_last, program_orders, shortest
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.compilers.traffic import Traffic, traffic_by_op
from autoshard.cost.reshard import Step
from autoshard.ir import Assignment, Graph, Op, Value
from autoshard.ir.collective import KINDS
from autoshard.primitives import is_loop, is_matrix, is_view

# Vector operations an element, where XLA:GPU (jaxlib 0.10.2, compiled for H100) weighs them otherwise. Of what a product and another kernel
# read, in bfloat16 and float32, hyperbolic tangents, sines, cosines and powers are kept, logarithms of 1 + x in bfloat16 alone;
# exponentials, logistics, tangents, error functions, roots and quotients are computed again, as are chains of 32 products and sums, and no
# longer from 36 (bfloat16) or 44 (float32) on. evidence: functions of libraries
LIBRARY_OPERATIONS = dict.fromkeys(("tanh", "sin", "cos", "pow"), 150.0) | {"log1p": 80.0}
# On GPUs before Hopper XLA's scheduler leaves products where they are: its analytical estimates of latency, with which it puts gradients of
# weights last, are not for those (a rematerialised transformer compiled for A100, H100 and B200 by jaxlib 0.10.2: 2.5, 3.6 and 3.4 GB).
# evidence: products stay in order
IN_ORDER = frozenset({"a100", "a100-40g"})

# As far as memory allows: what is computed later leaves more alive, until that takes so much of what arguments and results leave a program.
# evidence: products wait within memory
SCHEDULED_SHARE = 0.95

# Each kind is combined up to so many bytes of its results. evidence: buckets of collectives on GPUs
BUCKET_LIMITS = tuple(f"xla_gpu_{kind}_combine_threshold_bytes" for kind in ("all_reduce", "all_gather", "reduce_scatter"))


_OF_NO_GPU = ("float8_e3m4", "float8_e4m3")
# NCCL has few of the 8-bit floats. evidence: types that GPUs send
LACKS = {
    **dict.fromkeys(("all_gather", "all_to_all"), _OF_NO_GPU),
    **dict.fromkeys(("sum", "max", "min", "reduce_scatter"), (*_OF_NO_GPU, "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")),
}


@dataclass(frozen=True, slots=True)
class XlaGpu(Compiler):
    """XLA:GPU, as jaxlib 0.10.2 has it.

    It exposes the first gather of a loop's trip, and hides it behind products where it is carried.
    """

    fused_attention: ClassVar[str] = "cuDNN's attention"
    gathers_ahead: ClassVar[bool] = True
    reduces_in_place: ClassVar[bool] = True
    fetches_early: ClassVar[bool] = True
    contended_types: ClassVar[tuple[str, ...]] = ("bfloat16", "float16")
    lacks: ClassVar[Mapping[str, tuple[str, ...]]] = LACKS
    drops_nan: ClassVar[tuple[str, ...]] = ("float32", "float64")  # fmax (nccl/src/device/reduce_kernel.h); it has no 16-bit integers
    bucket_limits: ClassVar[tuple[str, ...]] = BUCKET_LIMITS

    @property
    def asynchronous(self) -> tuple[str, ...]:
        """All of them (xla/service/gpu, "async_collective_creator")."""
        return KINDS if self.overlap else ()

    @property
    def fusion_rules(self) -> FusionRules:
        """Values are kept that take as long to compute as writing them does.

        On A100, H100 and B200 from 17 to 22, 22 to 26 and 5 to 16 operations a byte on, by this from 10, 20 and 9 on.
        """
        patience = self.device.vector_flops_per_second / self.device.memory_bandwidth_bytes_per_second
        return FusionRules(
            patience,
            heavier=LIBRARY_OPERATIONS,
            fuses_products=False,
            fuses_gathers=True,
            fuses_scatters=True,
            expands_one_hots=False,
            widens_for_readers=False,
            repeats_sliced=True,
            stores_values_of_many=True,
            stores_transposed=True,
        )

    def scatters(self, value: Value, step: Step, mesh: tuple[int, ...]) -> bool:
        return True  # evidence: parts of any size are scattered

    def traffic(self, graph: Graph, fusion: Fusion) -> tuple[Traffic, ...]:
        """With what loops move besides.

        Stacks are filled with zeros. Libraries take whole arrays: slices of stacks are copied for products, and products into stacks.
        """
        ops, found = graph.walk(), list(traffic_by_op(graph, fusion))
        makers = {value: op for op in ops for value in op.results}

        def origin(value: int) -> int:
            """The value that a view is of."""
            while (op := makers.get(value)) is not None and is_view(op.primitive):
                value = op.operands[0]
            return value

        def moved(op: Op, tensor: int, value: int, times: float) -> None:
            more = tensor, times * graph.values[value].nbytes  # evidence: stacks on GPUs
            found[op.index] = replace(found[op.index], passes=(*found[op.index].passes, more))

        flows = [(each.value, flow) for loop in ops if is_loop(loop.primitive) for each in loop.holders for flow in each.sources]
        for held, flow in flows:
            if flow.inside and flow.shift < 0 and (maker := makers.get(made := origin(flow.value))) is not None:
                place = len(maker.operands) + maker.results.index(made)
                moved(maker, place, flow.value, 3.0 if is_matrix(maker.primitive) else 1.0)
            if not flow.inside and flow.shift > 0:
                products = (ops[reader] for reader in fusion.users[held] if is_matrix(ops[reader].primitive))
                places = ((op, k) for op in products for k, operand in enumerate(op.operands) if origin(operand) == held)
                if (place := next(places, None)) is not None:  # else what converts the slice reads it from the stack
                    moved(*place, held, 2.0)
        return tuple(found)

    def orders(self, graph: Graph, fusion: Fusion) -> Orders:
        """With an order in which gradients are computed while others are sent, and so after those of activations."""
        found = tuple(filled_at_once(graph, fusion, times) for times in program_orders(graph, fusion))
        overlapped, last_products = gradients_last(graph, fusion)
        return Orders(found, shortest(graph, found), filled_at_once(graph, fusion, overlapped), last_products)

    def buffers(self, facts: ProgramFacts, assignment: Assignment, copies: Copies, partials: Partials) -> tuple[Buffers, ...]:
        found = buffers(facts, assignment, copies, partials)
        sizes = assignment.mesh.sizes
        sent = (op for op, step in partials.items() if math.prod(sizes[axis] for axis in step.axes) > 1)
        if self.device.name in IN_ORDER or facts.orders.last_products.isdisjoint(sent):
            return (found,)
        late = buffers(facts.in_order(facts.orders.overlapped), assignment, copies, partials)
        passed = float(found.held[: len(found.times.passed)][list(found.times.passed)].sum())
        most = passed + SCHEDULED_SHARE * max(self.memory_limit_bytes - passed, 0.0)
        return found, replace(late, usage=np.minimum(late.usage, max(most, float(found.usage.max()))))
