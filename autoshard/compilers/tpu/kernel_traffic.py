"""Memory traffic of XLA:TPU's kernels: each kernel's bytes are counted once, at the op whose choice decides how they are split.

Kernels as its schedules count them (libtpu 0.0.42, v5e, 36 kernels and 51 products and convolutions
compiled one by one, and a residual network's 204):

- A kernel reads each operand once, however many fused ops need it, and every other kernel that computes with it reads it again: the
  statistics of a batch norm and of its gradient are a pass over the activations each.
- A kernel works on float32. Where its result is narrower, or a sum, it passes through a buffer of float32 and costs as much as float32
  that is moved: a kernel that reads and writes bfloat16 takes 2.5 times its bytes' time, one of float32 just its bytes'.
  Products pay it for their results alone.
- A stack that a loop writes from the last trip to the first, as of gradients, is filled with zeros before it, by an op that is fused with
  nothing and so works in windows of 128 tiles, each of which costs a kernel's start (64 Mi bfloat16: 1,748,544 cycles); a product's result
  is copied there by a kernel of its own. A stack written the other way round is not filled, and products write into it; but equal zeros
  are one value to a compiler, and where some stack is filled, all of its shape are, as those of an LSTM over embeddings.
- Zeros that a scatter adds to, as to the gradient of an embedding, are filled in likewise (32,768 x 1024 bfloat16: 0.49 ms).
- A convolution whose kernel is larger than its image, as the gradient of a transposed one by its kernel is, exchanges the two: the
  larger is reversed by an op that is fused with nothing (32 x 128 x 128 x 64 bfloat16: 2,021,472 cycles, features padded to 128).
- In programs with convolutions kernels move the padding of tiles, too.
- New state is computed by a kernel without products: its gradient is written, and read with the old state. Where no collective combines
  the gradient, the product's kernel would compute it; that is as fast for few rows, and for many it is kept apart (`deepest_update`).
- An operand of which shards send each other parts is computed by a kernel of its own, and not by the product that reads it: activations
  that convolutions with sharded pixels read, and their gradients (a U-Net's 17 such kernels, 8 to 10 bytes an element of bfloat16).
- A kernel takes along other ops on its operands and results, if all their operands were there when it began: the moments of an optimizer,
  one sum of a product's result, or several of one dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from autoshard.compilers.fused_program import Fusion, Kernel
from autoshard.compilers.op_patterns import MOST_OF, stands_alone
from autoshard.compilers.tpu.tables import adds_rows, tables_by_rows
from autoshard.compilers.traffic import Traffic, traffic_by_op, widened_bytes
from autoshard.ir import Graph, Op
from autoshard.primitives import is_matrix, is_reduction, is_scatter

WIDE_BYTES = 4  # of the numbers that kernels compute with; evidence: kernels compute in float32
# What the starts of an unfused op's windows cost, as bytes an element: 1,800 cycles for 128 tiles of 1,024 elements.
# evidence: kernels that are fused with nothing
UNFUSED_BYTES = 6
PRODUCT_STARTS = 2  # kernels' starts that the smallest product takes; evidence: the smallest product


def traffic_by_kernel(graph: Graph, fusion: Fusion) -> tuple[Traffic, ...]:
    """Per op the traffic of the kernels whose main op it is."""
    return _Kernels(graph, fusion).traffic()


@dataclass(slots=True)
class _Group:
    """The work of one compiled kernel.

    Attributes:
        at: its place in the program.
        touched: the values that it reads and makes.
        size: how many elements it computes.
        product: whether it is a product's.
        sums: results of its reductions, and their dtypes.
    """

    at: int
    touched: set[int]
    size: int
    product: bool
    sums: set[int] = field(default_factory=set)
    dtypes: set[str] = field(default_factory=set)


class _Kernels:
    def __init__(self, graph: Graph, fusion: Fusion):
        self.graph = graph
        self.fusion = fusion
        self.ops = graph.walk()
        self.moved: list[list[tuple[int, float]]] = [[] for _ in self.ops]
        self.passes: list[list[tuple[int, float]]] = [[] for _ in self.ops]
        self.starts = [0] * len(self.ops)
        self.replaced = {graph.arguments[argument] for _, argument in graph.aliases}
        self.reduced = {value for op in self.ops if is_reduction(op.primitive) for value in op.results}
        self.made_at: dict[int, int] = {}
        self.made_by: dict[int, Op] = {}  # the main op of the kernel that makes a value
        self.stacked: list[tuple[Op, int, Op]] = []  # the op that makes a stack's slices, their value, and the loop
        self.count = 0

    def traffic(self) -> tuple[Traffic, ...]:
        by_op = traffic_by_op(self.graph, self.fusion)
        self._run(self.fusion.kernels)
        self._fill()
        alone = [stands_alone(op) and not is_matrix(op.primitive) for op in self.ops]
        found = (
            Traffic(tuple(moved), _summed(passes), starts, before=self._reversed(op))
            for op, moved, passes, starts in zip(self.ops, self.moved, self.passes, self.starts, strict=True)
        )
        rows = tables_by_rows(self.graph, self.fusion)
        apart = (self._apart(op, plain, rows.get(op.index, ())) for op, plain in zip(self.ops, by_op, strict=True))
        return tuple(plain if one else own for plain, own, one in zip(apart, found, alone, strict=True))

    def _apart(self, op: Op, plain: Traffic, rows: tuple[tuple[int, float, float], ...]) -> Traffic:
        """The traffic of an op that is fused with nothing."""
        zeros = self._zeros(op)
        if op.primitive == "scatter-add" and adds_rows(self.graph, op):
            return replace(plain, filled=zeros, by_rows=rows)
        return replace(plain, passes=zeros, by_rows=rows)

    def _zeros(self, op: Op) -> tuple[tuple[int, float], ...]:
        """The bytes of filling an array with zeros that a scatter adds to."""
        if not is_scatter(op.primitive) or self.fusion.materialised[op.operands[0]] or not self.fusion.materialised[op.results[0]]:
            return ()
        return ((len(op.operands), self._filled(op.results[0])),)

    def _run(self, kernels: tuple[Kernel, ...]) -> None:
        groups: dict[int, _Group] = {}  # by what they touched last
        for kernel in kernels:
            self.count += 1
            for inner in kernel.inner:
                self._run(inner)
            main = self.ops[kernel.main]
            if main.primitive == "scan":
                self._stack(main)
            group = None
            if not kernel.inner and (not stands_alone(main) or is_matrix(main.primitive)):
                group = self._place(kernel, main, groups)
            for value in kernel.makes:
                self.made_at[value] = group.at if group else self.count
            if group:
                groups.update(dict.fromkeys((*kernel.reads, *kernel.makes), group))

    def _place(self, kernel: Kernel, main: Op, groups: dict[int, _Group]) -> _Group:
        """Charges a kernel's traffic to its main op; gives the group it is in, one of those there are if that takes it along."""
        values = self.graph.values
        product, sums = is_matrix(main.primitive), is_reduction(main.primitive)
        size = values[main.operands[0] if sums else main.results[0]].size
        if sums and size >= MOST_OF * (whole := values[self.fusion.root[main.operands[0]]].size):
            size = whole  # of a product that is made without its ends
        near = [groups[value] for value in kernel.reads if value in groups and 2 * values[value].size > size]
        group = next((one for one in near if not product and self._takes(one, kernel, size, sums)), None)
        moved, passes = self.moved[main.index], self.passes[main.index]
        after = len(main.operands)
        epilogue = (value for value, position in zip(kernel.reads, kernel.through, strict=True) if position == after)
        state = [value for value in epilogue if value in self.replaced and values[value].size == size]
        if product and state:
            self._update(self.ops[kernel.op], main, state)
        for value, position in zip(kernel.reads, kernel.through, strict=True):
            if (group is None or value not in group.touched) and not (product and value in state):
                part = self._part(value, main, position)
                (passes if part < values[value].size * self._itemsize(value) else moved).append((position, part))
        moved.extend((len(main.operands), self._part(value, main, len(main.operands))) for value in kernel.makes)
        if group is None:
            self.starts[main.index] = PRODUCT_STARTS if product else 1
            group = _Group(self.count, set(), size, product)
            if sums or all(self._itemsize(value) < WIDE_BYTES for value in kernel.makes):
                passes.append((0 if sums else len(main.operands), WIDE_BYTES * size))
        self.made_by.update(dict.fromkeys(kernel.makes, main))
        group.touched.update(kernel.reads, kernel.makes)
        if reduced := [value for value in kernel.makes if value in self.reduced]:
            group.sums.update(reduced)
            group.dtypes.add(values[reduced[0]].dtype)
        return group

    def _update(self, update: Op, product: Op, state: list[int]) -> None:
        """Charges the kernel that updates state by a product's gradient: it reads both, and writes as much state.

        At the update's own op: where the gradient is scattered, less of it is updated than was made.
        """
        result = len(update.operands)
        gradient = self.graph.values[product.results[0]].size * (self._itemsize(product.results[0]) + WIDE_BYTES)
        self.passes[update.index].append((result, gradient + sum(2 * self._part(value, update, result) for value in state)))
        self.starts[update.index] += 1

    def _stack(self, loop: Op) -> None:
        """Notes a loop's stacks, by the ops that make the slices."""
        for flow in (flow for holder in loop.holders for flow in holder.sources if flow.inside and flow.shift < 0):
            main = self.made_by.get(self.fusion.root[flow.value])
            if main is not None:
                self.stacked.append((main, flow.value, loop))

    def _fill(self) -> None:
        """Charges the bytes of filling stacks to the ops that make their slices, a slice at a time."""

        def zeros(slices: int, loop: Op) -> tuple[int, tuple[int, ...], str]:
            return loop.params["length"], self.graph.values[slices].shape, self.graph.values[slices].dtype

        backward = {zeros(slices, loop) for _, slices, loop in self.stacked if loop.params["reverse"]}
        for main, slices, loop in self.stacked:
            if zeros(slices, loop) not in backward:
                continue
            value, itemsize, filled = self.graph.values[slices], self._itemsize(slices), self._filled(slices)
            self.passes[main.index].append((len(main.operands), filled))
            if loop.params["reverse"] and is_matrix(main.primitive):
                self.passes[main.index].append((len(main.operands), filled + (itemsize - UNFUSED_BYTES) * value.size))
                self.starts[main.index] += 1

    def _reversed(self, op: Op) -> tuple[tuple[int, float], ...]:
        """The bytes of reversing the kernel of a convolution that is exchanged with its image."""
        if op.primitive != "conv_general_dilated":
            return ()
        numbers, (image, kernel) = op.params["dimension_numbers"], (self.graph.values[value].shape for value in op.operands)
        pixels, window = (math.prod(shape[d] for d in spec[2:]) for shape, spec in ((image, numbers.lhs_spec), (kernel, numbers.rhs_spec)))
        dilated = any(dilation > 1 for dilation in op.params["lhs_dilation"])
        return ((1, self._copied(op.operands[1])),) if dilated and pixels < window else ()

    def _filled(self, value: int) -> float:
        """The bytes that filling a value with zeros costs, by an op that is fused with nothing."""
        return self._copied(value) - self._itemsize(value) * self.graph.values[value].size

    def _copied(self, value: int) -> float:
        """The bytes that a copy that is fused with nothing costs."""
        itemsize = self._itemsize(value)
        return (2 * itemsize + widened_bytes(itemsize, WIDE_BYTES) + UNFUSED_BYTES) * self.graph.values[value].size

    def _takes(self, group: _Group, kernel: Kernel, size: int, sums: bool) -> bool:
        """Whether a kernel's work is done by a group that was there before."""
        if group.size != size or (group.product and not sums) or not group.sums.isdisjoint(kernel.reads):
            return False
        if sums and group.dtypes and (group.product or group.dtypes != {self.graph.values[kernel.makes[0]].dtype}):
            return False
        return all(value in group.touched or self.made_at.get(value, 0) < group.at for value in kernel.reads)

    def _part(self, value: int, main: Op, tensor: int) -> float:
        """The bytes of a value that an op moves for one of its tensors: all, or a slice of a stack."""
        values = self.graph.values
        return min(values[value].size, values[(*main.operands, main.results[0])[tensor]].size) * self._itemsize(value)

    def _itemsize(self, value: int) -> float:
        return min(self.graph.values[value].itemsize, 2) if self.fusion.narrow[value] else self.graph.values[value].itemsize


def _summed(pairs: Sequence[tuple[int, float]]) -> tuple[tuple[int, float], ...]:
    """One pair a tensor."""
    sums: dict[int, float] = {}
    for tensor, nbytes in pairs:
        sums[tensor] = sums.get(tensor, 0.0) + nbytes
    return tuple(sums.items())
