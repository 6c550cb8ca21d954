"""The cost model of a mesh on a cluster: seconds of one op under a choice, of its exchange and its reduction, and of one reshard.

The searchers' tables and the judge both use this model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import numpy as np

from autoshard.budgets import BUDGETS
from autoshard.cluster import Cluster
from autoshard.compilers import compiler_of
from autoshard.compilers.bf16_demotion import NARROW_SHARE, is_demoted
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.compilers.traffic import Traffic, widened_bytes
from autoshard.cost.collectives import Communication, Groups
from autoshard.cost.compute import ROWS, Roofline, padding_met
from autoshard.cost.grouped_reshard import GroupedReshards
from autoshard.cost.halo_exchange import exchange_steps
from autoshard.cost.narrow_sums import Crossing, crossings
from autoshard.cost.own_collectives import own_collectives
from autoshard.cost.reshard import Reshards, Step, combined_bytes, path_seconds, reduction_steps
from autoshard.cost.windows import RESULT, Window
from autoshard.ir import (
    NOWHERE,
    Choice,
    Layout,
    Mesh,
    Op,
    Rule,
    Value,
    computed_layout,
    exchanges,
    is_transfer,
    local_shape,
    operand_layout,
    reductions,
    sent_tensors,
    shards,
    shards_of,
)
from autoshard.ir.kernel import Kernel
from autoshard.primitives import commutes_with_casts, is_collective, is_matrix, is_transform, is_view

# An all_to_all exchanges contiguous pieces: the operand is transposed before and the result after, each read and written (copies around
# all-to-all in modules that XLA:TPU compiled, libtpu 0.0.42). Of gathered bytes fewer than a tenth were copied.
# evidence: all_to_alls are copied
ALL_TO_ALL_PASSES = 4

# Of the core's own memory: XLA:TPU (libtpu 0.0.42) moves operands of products there while other kernels run, and leaves results there.
# Of operands of up to 32 MB in twelve modules compiled for v5e 88 % were there, of up to 64 MB 66 %, of up to 128 MB 46 %, of larger ones
# none. Kernels without a product took as long wherever their operands were. evidence: operands near products
NEAR_SHARE = 0.5


Sent = tuple[str, tuple[int, ...], Groups | None, int, float, np.ndarray, np.ndarray]
"""A collective of an op under some choices: kind, axes, groups, the trips that share it, bytes of a number of a sum that may be narrow or
0, their positions, and its bytes under each."""


@dataclass(frozen=True, slots=True)
class OpCost:
    """The cost of an op under a choice.

    Attributes:
        seconds: computing, once.
        flops: of products and Fourier transforms.
        operands: the layouts it reads its operands in.
        exchange: the collectives in which its shards send each other parts of operands.
        combinations: per result, the collectives that combine partial results.
        combines, is_nothing: whether there are any, and whether it takes no time at all.
    """

    seconds: float
    flops: float
    operands: tuple[Layout, ...]
    exchange: tuple[Step, ...]
    combinations: tuple[tuple[Step, ...], ...]
    combines: bool = field(init=False)
    is_nothing: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "combines", any(self.combinations))
        object.__setattr__(self, "is_nothing", not (self.seconds or self.exchange or self.combines))


class CostModel:
    """The costs of one mesh on one cluster.

    Attributes:
        cluster, mesh: those that are modelled.
        communication: seconds of a collective on mesh axes, or the share of them that is charged for its kind.
        narrow: the mesh axes along which sums cross levels in a narrow type, by name.
    """

    def __init__(self, cluster: Cluster, mesh: Mesh, shares: Mapping[str, float] | None = None):
        self.cluster = cluster
        self.mesh = mesh
        self.communication: Communication = Communication(cluster.links(mesh), shares or {})
        self.narrow: dict[str, Crossing] = crossings(self.communication.links, mesh.names)
        self._roofline = Roofline(cluster.device)
        self._byte_seconds = 1 / cluster.device.memory_rate
        gathers_tori = compiler_of(cluster).gathers_tori
        options = ALL_TO_ALL_PASSES * self._byte_seconds, gathers_tori
        self._reshards = Reshards(mesh, self.communication, *options)
        self._grouped = GroupedReshards(mesh, self.communication, self._reshards, *options)
        self._matrices: dict[tuple, np.ndarray] = {}
        self._op_costs: dict[tuple[ProgramFacts, int, Choice], OpCost] = {}
        self._paths: dict[tuple, tuple[Step, ...]] = {}
        self._reductions: dict[tuple, tuple[Step, ...]] = {}

    def tabulates(self, rank: int) -> bool:
        """Whether the reshards between all layouts of an array of this rank are few enough for a table."""
        return (rank + 1) ** len(self.mesh.axes) <= BUDGETS.reshard_layouts

    def reshard_matrix(self, shape: tuple[int, ...], itemsize: float, portable: bool) -> np.ndarray:
        """Seconds from each layout (row number) to each other (column number) of a tensor, the device's own work for it included.

        Args:
            portable: as in `ProgramFacts`; other values cost `storing_seconds` too.
        """
        key = shape, itemsize, portable
        if (found := self._matrices.get(key)) is None:
            found = self._reshards.matrix(shape, itemsize)
            if not portable:
                whole = Value(shape, "", itemsize).nbytes * self._byte_seconds
                parts = whole / shards_of(np.arange(len(found)), len(shape), self.mesh.sizes)
                found = found + _storing(found, parts[:, None], parts[None, :])
            self._matrices[key] = found
        return found

    def reshard_seconds(
        self, shape: tuple[int, ...], itemsize: float, portable: bool, sources: np.ndarray, targets: np.ndarray
    ) -> np.ndarray:
        """The same of some layouts alone, by their numbers, which broadcast."""
        if self.tabulates(len(shape)):
            return self.reshard_matrix(shape, itemsize, portable)[sources, targets]
        seconds = self._grouped.seconds(shape, itemsize, sources, targets)
        if portable:
            return seconds
        whole = Value(shape, "", itemsize).nbytes * self._byte_seconds
        return seconds + _storing(seconds, *(whole / shards_of(numbers, len(shape), self.mesh.sizes) for numbers in (sources, targets)))

    def storing_seconds(self, value: Value, source: Layout, target: Layout) -> float:
        """The seconds of writing and reading a value between fused ops, because it is read elsewhere or otherwise than where it is made.

        A sliced value is made whole and read in part: XLA:TPU fuses a slice into its reader, never into the kernel that makes its operand
        (exponentials and gradients of logits in modules that libtpu 0.0.42 compiled).
        """
        before, after = (value.nbytes * self._byte_seconds / shards(layout, self.mesh.sizes) for layout in (source, target))
        if any(step.kind != "slice" for step in self.reshard_path(value, source, target)):
            return 2 * after
        return before + after if before != after else 0.0

    def reshard_path(self, value: Value, source: Layout, target: Layout) -> tuple[Step, ...]:
        """The cheapest collectives that take a value from one layout to another."""
        if source == target:
            return ()
        key = value.shape, value.itemsize, source, target
        if (found := self._paths.get(key)) is None:
            found = self._paths[key] = (self._reshards if self.tabulates(value.rank) else self._grouped).path(*key)
        return found

    def reshard_paths(self, values: Sequence[Value]) -> Callable[[int, Layout, Layout], tuple[Step, ...]]:
        """`reshard_path` of a program's values by their numbers."""
        return lambda value, source, target: self.reshard_path(values[value], source, target)

    def op_cost(self, facts: ProgramFacts, op: Op, choice: Choice) -> OpCost:
        """The cost of an op; computed once for equal ops."""
        key = facts, facts.alike[op.index], choice
        if (found := self._op_costs.get(key)) is None:
            rule = facts.rules[op.index]
            whole = (-1,) * len(self.mesh.axes)
            found = self._op_costs[key] = OpCost(
                seconds=self.op_seconds(facts, op, choice),
                flops=self._matrix_flops(facts, op, choice),
                operands=tuple(whole if rule is None else operand_layout(rule, choice, position) for position in range(len(op.operands))),
                exchange=self.exchange_path(facts, op, choice),
                combinations=tuple(self.reduction_path(facts, op, choice, k) for k in range(len(op.results))),
            )
        return found

    def op_flops(self, facts: ProgramFacts, op: Op, choice: Choice) -> float:
        """The floating point operations a device executes, once."""
        flops, rule = facts.flops[op.index] / self._split(choice), facts.rules[op.index]
        if op.primitive != "conv_general_dilated" or rule is None:
            return flops
        split = {factor for factor, _ in choice}
        values = facts.graph.values
        met = padding_met(op, *(tuple(values[value] for value in some) for some in (op.operands, op.results)))
        return flops * math.prod(times for dim, times in met.items() if not split.isdisjoint(rule.operands[0][dim]))

    def _matrix_flops(self, facts: ProgramFacts, op: Op, choice: Choice) -> float:
        if op.kernel is not None:
            return op.kernel.matrix_flops / self._split(choice)
        return self.op_flops(facts, op, choice) if is_matrix(op.primitive) or is_transform(op.primitive) else 0.0

    def _split(self, choice: Choice) -> int:
        return math.prod(size for (factor, _), size in zip(choice, self.mesh.sizes, strict=True) if factor >= 0)

    def op_seconds(self, facts: ProgramFacts, op: Op, choice: Choice, block: tuple[int, int] = (-1, 1)) -> float:
        """The seconds a device computes for one execution of an op, communication excluded.

        Args:
            block: a factor, and into how many blocks a device splits that: one of them is computed (a windowed product's).
        """
        seconds = self.predicted_seconds(facts, op, choice, block)
        if not facts.corrections:
            return seconds
        return facts.corrections.corrected(op, facts.rules[op.index], facts.graph.values, choice, self.mesh.sizes, seconds)

    def predicted_seconds(self, facts: ProgramFacts, op: Op, choice: Choice, block: tuple[int, int] = (-1, 1)) -> float:
        """`op_seconds` before what is known of such kernels."""
        traffic = facts.traffic[op.index]
        if op.bodies or is_collective(op.primitive) or (is_view(op.primitive) and not traffic.starts):
            return 0.0
        if is_transfer(op):
            return self._host_seconds(facts, op) / self._split(choice)
        if op.kernel is not None:
            return self.kernel_seconds(op.kernel, self._split(choice))
        rule = facts.rules[op.index]
        values = facts.graph.values
        touched = dict.fromkeys(tensor for tensor, _ in (*traffic.tensors, *traffic.passes))
        nbytes = self._moved(facts, op, {tensor: self._parts(facts, op, choice, tensor, block) for tensor in touched})
        if traffic.filled and not self._sorts_rows(facts, op, choice):
            nbytes += sum(filled / self._parts(facts, op, choice, tensor, block) for tensor, filled in traffic.filled)
        flops = self.op_flops(facts, op, choice) / block[1]
        dtype = _dtype(op, values)
        if is_matrix(op.primitive) and rule is not None:
            least = 0.0 if op.index in facts.grouped else 1.0  # a group's sum is over a part of the rows
            batch, m, n, k = _matrix_sizes(rule, choice, self.mesh.sizes, flops, facts.compiler.product_per_window, block, least)
            seconds = self._roofline.dot_seconds(batch, m, n, k, dtype, nbytes, traffic.starts)
        else:
            seconds = self._roofline.seconds(False, flops, dtype, nbytes, traffic.starts)
        if traffic.by_rows:
            seconds += self._row_seconds(facts, op, choice)
        return float(seconds) + (self._seconds_before(facts, op, choice, traffic) if traffic.sent or traffic.before else 0.0)

    def kernel_seconds(self, kernel: Kernel, parts: int) -> float:
        """The seconds of one of the equal parts of a user's kernel; products, other arithmetic and memory traffic overlap."""
        padding = sum(share * self._roofline.padding(*sizes) for share, sizes in kernel.products) or 1.0
        flops = kernel.matrix_flops * padding / self.cluster.device.kernel_efficiency
        products = self._roofline.seconds(True, flops / parts, kernel.dtype, kernel.nbytes / parts)
        return float(max(products, self._roofline.seconds(False, kernel.vector_flops / parts, kernel.dtype, 0.0)))

    def window_step(self, value: Value, window: Window) -> Step:
        """One of the permutes of a windowed product."""
        step = window.step
        layout = step.target if window.operand == RESULT else step.source
        nbytes = value.nbytes / shards(layout, self.mesh.sizes) / window.halves
        seconds = float(self.communication.seconds("collective_permute", nbytes, step.axes))
        return Step("collective_permute", step.axes, layout, layout, nbytes, seconds)

    def window_seconds(self, facts: ProgramFacts, op: Op, choice: Choice, window: Window) -> float:
        """The seconds of one of a windowed product's kernels; where blocks are added up, of the kernel that adds one, too."""
        rule, blocks = facts.rules[op.index], window.blocks * window.halves
        assert rule is not None, "a window's product has a rule"
        made = facts.graph.values[op.results[0]]
        adds = window.operand == RESULT or not any(window.factor in dim for dim in rule.results[0])
        passed = widened_bytes(made.itemsize, facts.compiler.wide_bytes) + facts.compiler.unfused_bytes
        added = made.size / shards(window.made, self.mesh.sizes) / window.halves * (3 * made.itemsize + passed) if adds else 0.0
        return self.op_seconds(facts, op, choice, (window.factor, blocks)) + added * self._byte_seconds

    def unfused_seconds(self, facts: ProgramFacts, op: Op, choice: Choice, window: Window) -> float:
        """The seconds of kernels for the ops that a plain product's own kernel would have computed with its operands and its result.

        Each block's kernel would read the other operand so; the result is not there before the last block is.
        """
        rule = facts.rules[op.index]
        assert rule is not None, "a window's product has a rule"
        read = {value: operand_layout(rule, choice, k) for k, value in enumerate(op.operands) if k != window.operand}
        seconds = 0.0
        for value, layout in (read | {op.results[0]: window.made}).items():
            if not (facts.fusion.materialised[value] or facts.free[value]):
                tensor = facts.graph.values[value]
                moved = 2 * tensor.itemsize + widened_bytes(tensor.itemsize, facts.compiler.wide_bytes)
                seconds += moved * tensor.size / shards(layout, self.mesh.sizes) * self._byte_seconds
                seconds += self.cluster.device.kernel_overhead_seconds
        return seconds

    def _seconds_before(self, facts: ProgramFacts, op: Op, choice: Choice, traffic: Traffic) -> float:
        """The seconds of other kernels that make the op's operands ready, of those whose parts shards send because they do."""
        rule, moved = facts.rules[op.index], list(traffic.before)
        if traffic.sent and rule is not None:
            sent = sent_tensors(rule, choice, self.mesh.sizes)
            moved += ((tensor, nbytes) for tensor, nbytes in traffic.sent if tensor in sent)
        return self._byte_seconds * sum(nbytes / self._parts(facts, op, choice, tensor) for tensor, nbytes in moved)

    def _row_seconds(self, facts: ProgramFacts, op: Op, choice: Choice) -> float:
        """The seconds of copying tables to rows that are looked up, and back from rows that are added to.

        Where an update shares an array with the sum, what it updates is copied to rows and back instead; not if the sum is combined first.
        """
        nbytes, values = 0.0, facts.graph.values
        for tensor, itemsize, times in facts.traffic[op.index].by_rows:
            added, copies = 0.0, 1
            if tensor >= len(op.operands):
                rows = self._part(facts, op, choice, 2)[:-1]
                updated = facts.row_updates.get(op.index, ()) if rows == values[op.operands[2]].shape[:-1] else ()
                added, copies = (math.inf, 2 * len(updated)) if updated else (math.prod(rows), 1)
            whole = values[(*op.operands, *op.results)[tensor]].itemsize
            nbytes += times * copies * facts.compiler.row_bytes(self._part(facts, op, choice, tensor), whole, itemsize, added)
        return nbytes * self._byte_seconds

    def _sorts_rows(self, facts: ProgramFacts, op: Op, choice: Choice) -> bool:
        """Whether rows that an op adds to zeros are sorted before."""
        table, rows = (self._part(facts, op, choice, tensor) for tensor in (len(op.operands), 2))
        return facts.compiler.sorts_rows(table, facts.graph.values[op.results[0]].itemsize, math.prod(rows[:-1]))

    def _part(self, facts: ProgramFacts, op: Op, choice: Choice, tensor: int) -> tuple[float, ...]:
        """The shape of a device's part of an op's tensor, operands counted first."""
        value = facts.graph.values[(*op.operands, *op.results)[tensor]]
        return local_shape(value.shape, self._layout(facts, op, choice, tensor), self.mesh.sizes)

    def _moved(self, facts: ProgramFacts, op: Op, parts: Mapping[int, float]) -> float:
        """Bytes to and from a device's memory, by the number of parts of each tensor; products find small operands on the chip."""
        traffic = facts.traffic[op.index]
        passed = sum(moved / parts[tensor] for tensor, moved in traffic.passes)
        each = (moved / parts[tensor] for tensor, moved in traffic.tensors)
        near = NEAR_SHARE * facts.compiler.fast_memory_bytes if is_matrix(op.primitive) else 0.0
        return passed + sum(moved for moved in each if moved > near)

    def _parts(self, facts: ProgramFacts, op: Op, choice: Choice, tensor: int, block: tuple[int, int] = (-1, 1)) -> float:
        """Into how many parts an op's tensor is split, operands counted first; fewer by the padding of tiles."""
        rule, layout = facts.rules[op.index], self._layout(facts, op, choice, tensor)
        count = shards(layout, self.mesh.sizes)
        if rule is not None and any(block[0] in dim for dim in (*rule.operands, *rule.results)[tensor]):
            count *= block[1]
        value = (*op.operands, *op.results)[tensor]
        minor = facts.fusion.minor[value]
        if minor is None:
            return count
        return count / facts.compiler.padding(local_shape(facts.graph.values[value].shape, layout, self.mesh.sizes), minor)

    def _layout(self, facts: ProgramFacts, op: Op, choice: Choice, tensor: int) -> Layout:
        """The layout in which an op reads an operand, or makes a result before that is combined; operands count first."""
        rule, result = facts.rules[op.index], tensor - len(op.operands)
        if rule is None:
            return (-1,) * len(self.mesh.axes)
        return operand_layout(rule, choice, tensor) if result < 0 else computed_layout(rule, choice, result)

    def least_op_seconds(self, facts: ProgramFacts, op: Op) -> float:
        """The seconds of an op if all devices shared its work and its memory traffic evenly: no choice takes less.

        An op of a shard_map's body takes what it takes, its collectives included.
        """
        return facts.corrections.bounded(op, facts.rules[op.index], self._least_predicted_seconds(facts, op))

    def _least_predicted_seconds(self, facts: ProgramFacts, op: Op) -> float:
        if op.mapped and not op.bodies:
            choice = (NOWHERE,) * len(self.mesh.axes)
            return self.op_seconds(facts, op, choice) + path_seconds(self.exchange_path(facts, op, choice))
        n, traffic = self.mesh.size, facts.traffic[op.index]
        if op.bodies or (is_view(op.primitive) and not traffic.starts):
            return 0.0
        if is_transfer(op):
            return self._host_seconds(facts, op) / n
        if op.kernel is not None:
            return self.kernel_seconds(op.kernel, n)
        nbytes = self._moved(facts, op, dict.fromkeys(range(len(op.operands) + len(op.results)), n))
        matrix, flops, dtype = is_matrix(op.primitive), facts.flops[op.index] / n, _dtype(op, facts.graph.values)
        return float(self._roofline.seconds(matrix, flops, dtype, nbytes, traffic.starts))

    def _host_seconds(self, facts: ProgramFacts, op: Op) -> float:
        """The seconds of moving an op's operands whole between a device and its host; none on a device without a link that is known."""
        rate = self.cluster.device.host_bandwidth_bytes_per_second
        return sum(facts.graph.values[value].nbytes for value in op.operands) / rate if rate else 0.0

    def reduction_path(self, facts: ProgramFacts, op: Op, choice: Choice, result: int) -> tuple[Step, ...]:
        """The collectives that combine an op's partial results.

        A sum that a loop only adds to is all_reduced once for all its trips (`autoshard.analysis.partial_sums`).
        """
        rule = facts.rules[op.index]
        if rule is None or not (left := reductions(rule, choice)):
            return ()
        value = facts.graph.values[op.results[result]]
        key = value.shape, value.itemsize, computed_layout(rule, choice, result), left
        if (steps := self._reductions.get(key)) is None:
            steps = self._reductions[key] = reduction_steps(self.mesh, self.communication, *key)
        trips = facts.sums.accumulated[op.index]
        if trips == 1 or len(steps) != 1 or steps[0].kind != "all_reduce":
            return steps
        step, widened = steps[0], facts.sums.widened[op.index]
        if widened > 1:
            nbytes = step.nbytes * widened
            step = replace(step, seconds=self._seconds(step, nbytes), compiled_nbytes=nbytes)
        return (replace(step, seconds=step.seconds / trips, trips=trips),)

    def combined(self, facts: ProgramFacts, op: Op, choices: np.ndarray) -> list[Sent]:
        """The collectives of `reduction_path` of all results under many choices ``(n, n_axes, 2)``, of which none is kept."""
        rule, found = facts.rules[op.index], []
        assert rule is not None, "an op that reduces has a rule"
        trips, widened = facts.sums.accumulated[op.index], facts.sums.widened[op.index]
        for result, value in enumerate(op.results):
            for steps in combined_bytes(rule, choices, result, facts.graph.values[value], self.mesh.sizes):
                once = trips != 1 and len(steps) == 1 and steps[0][0] == "all_reduce"
                for kind, axes, rows, nbytes in steps:
                    itemsize = 0.0 if kind == "all_gather" else facts.graph.values[value].itemsize
                    found.append((kind, axes, None, trips if once else 1, itemsize, rows, nbytes * (max(widened, 1) if once else 1)))
        return found

    def recombining_seconds(self, facts: ProgramFacts, op: Op, choice: Choice) -> float:
        """How much longer one execution of an op takes if its partial results are combined in each trip of a loop, not once after it."""
        return sum(self.each_trip(step).seconds - step.seconds for step in self.reduction_path(facts, op, choice, 0))

    def each_trip(self, step: Step) -> Step:
        """A step that was combined after a loop as it is in each of its trips."""
        if not step.compiled_nbytes:
            return replace(step, seconds=step.seconds * step.trips, trips=1)
        return replace(step, seconds=self._seconds(step, step.nbytes), trips=1, compiled_nbytes=0.0)

    def _seconds(self, step: Step, nbytes: float) -> float:
        return float(self.communication.seconds(step.kind, nbytes, step.axes, step.groups, step.itemsize))

    def exchange_path(self, facts: ProgramFacts, op: Op, choice: Choice) -> tuple[Step, ...]:
        """The collectives in which an op's shards send each other parts of operands."""
        rule = facts.rules[op.index]
        if is_collective(op.primitive) and op.mapped:
            shares = {value: self._sent_share(facts, op, value) for value in op.results if facts.wanted[value]}
            return own_collectives(op, facts.graph.values, shares, self.mesh, self.communication)
        if rule is None or not exchanges(rule, choice, self.mesh.sizes):
            return ()
        tensors = [facts.graph.values[value] for value in (*op.operands, *op.results)]
        wanted = [*(True for _ in op.operands), *(facts.wanted[value] for value in op.results)]
        return exchange_steps(self.mesh, self.communication, rule, choice, tensors, wanted)

    def _sent_share(self, facts: ProgramFacts, op: Op, value: int) -> float:
        """The share of its bytes in which the compiler sends a result of one of the program's own collectives; sums are not rounded."""
        narrows = facts.compiler.demotes_operands and commutes_with_casts(op.primitive) and facts.graph.values[value].dtype == "float32"
        return NARROW_SHARE if narrows and is_demoted(facts.demands.on_values[value]) else 1.0

    def own_steps(self, facts: ProgramFacts, op: Op, choice: Choice) -> tuple[Step, ...]:
        """All collectives that are the op's own: its exchange, and the combination of its results."""
        exchange = self.exchange_path(facts, op, choice)
        combinations = [self.reduction_path(facts, op, choice, k) for k in range(len(op.results))]
        return tuple(chain(exchange, *combinations)) if exchange or len(combinations) > 1 else combinations[0]


def _dtype(op: Op, values: tuple[Value, ...]) -> str:
    """The dtype whose rate an op runs at: its first operand's, or its first result's."""
    return next((values[value].dtype for value in (*op.operands, *op.results)), "float32")


def _storing(seconds: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
    """The seconds of `CostModel.storing_seconds`, by those of reshards and of passing over the shards before and after."""
    return np.where(seconds > 0, 2 * after, np.where(before == after, 0.0, before + after))


def _matrix_sizes(
    rule: Rule, choice: Choice, sizes: tuple[int, ...], flops: float, windows_apart: bool, block: tuple[int, int], least: float
) -> tuple[float, float, float, float]:
    """The local matrix product of a contraction: batch, rows, columns, depth.

    A factor in both operands and the result is a batch, in the left operand and the result a row, in the right one a column, and
    one that is not in the result is depth. A convolution's window counts as depth and its output positions as rows, so the sizes are
    scaled to the op's flops.

    Args:
        windows_apart: whether a convolution is a product for each position of its kernel, as XLA:TPU's are but where their features
            are fewer than a tile's rows: 3 x 3 convolutions of 28 x 28 images to 128 features take the same for 8 features as for 64.
        block: as for `CostModel.op_seconds`.
        least: of the window.
    """
    local = [factor.size / (block[1] if number == block[0] else 1) for number, factor in enumerate(rule.factors)]
    for (factor, _), size in zip(choice, sizes, strict=True):
        if factor >= 0:
            local[factor] /= size
    left, right, made = ({f for dim in dims for f in dim} for dims in (rule.operands[0], rule.operands[1], rule.results[0]))
    batch = math.prod(local[f] for f in left & right & made)
    rows = math.prod(local[f] for f in (left & made) - right)
    columns = math.prod(local[f] for f in (right & made) - left)
    depth = math.prod(local[f] for f in (left & right) - made)
    places = math.prod(local[f] for f in made - left - right)
    if not batch * rows * columns * depth * places:
        return batch, rows * places, columns, depth
    window = max(flops / (2 * batch * rows * columns * depth * places), least)
    if windows_apart and window > places > 1:  # a kernel's gradient: its positions are the result's
        return batch * places, rows, columns, depth * window
    if windows_apart and depth >= ROWS:
        return batch * window, rows * places, columns, depth
    return batch, rows * places, columns, depth * window
