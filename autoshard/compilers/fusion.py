"""Fusion: which values of a program a compiler stores in memory, and the kernels that compute them.

Between two values in memory everything is arithmetic in registers. What ends a fusion:

- *Anchors*: matrix products and convolutions, gathers, scatters, sorts, loops, interleaving. Their results are stored, and so are the
  operands of all but products, which compute their operands as they read them.
- *Pieces*: operands of a concatenation for a convolution are stored; the convolution reads it from its pieces.
- *Epilogues*: elementwise ops on a product's result, up to the first value with several readers, are part of the product's kernel, and that
  value is stored instead (a bias is added, a residual too; scores in float32 before a softmax). Where they only widen, the readers do so,
  and all that is computed wide of other products than scores. A result that one reduction alone reads is reduced in the product's kernel,
  and not stored.
- *Recomputation*: any other elementwise value is computed by each of its readers again where that moves less memory than storing it:
  where its sources have ``s`` times its bytes and ``r`` kernels read it, ``s * r < s + 1 + r``. So a softmax is computed again from its
  scores, and a normalised activation from the activation; a sum of three is stored, and so is bfloat16 made of float32 scores and their
  gradient.
- *Handed on*: a value that gathers read, too, is stored for those; its other readers compute it again where they read no more for it,
  however long it takes. So capped logits are stored for a lookup, and their softmax is computed from the logits. A product's kernel
  makes such a value along with what that is made of, and any kernel its reductions.
- *Work*: a value that several readers would compute is stored where computing it takes a core longer than writing and reading it takes
  the chip: the probabilities of float32 scores on v5p, whose memory is fast, but not on v5e.
- *Orders*: what is computed and looked up in two orders of dimensions is stored in both: logits whose rows and columns have losses.
- *Slices*: a value of which several slices are read, or one with strides, is stored; their readers compute no part of it.
- *Reductions* are stored: they are small.

Seen in the schedules that XLA:TPU (libtpu 0.0.42) makes of train steps. XLA:GPU (jaxlib 0.10.2, compiled for H100) differs in this:

- *Libraries*: products and convolutions are calls of cuBLAS and cuDNN: their operands and results are stored, without epilogue.
- *Gathers* are fused, and compute the elements that they take: a loss that looks up float32 logits reads those in bfloat16 that a product
  made.
- *Scatters* compute their updates, one-hot ones too, and write in place of their operand; where that is zeros, and another summand is added
  later, in place of that one: the gradient of logits is made in float32, the targets' share is scattered into it, and it is rounded then.

Linear in the program's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from autoshard.analysis.demanded_precision import REDUCTION, Demands, is_narrow
from autoshard.compilers.aliases import Aliases
from autoshard.compilers.epilogues import Epilogues
from autoshard.compilers.fused_program import Fusion, Kernel
from autoshard.compilers.fusion_rules import FusionRules, OpKinds
from autoshard.compilers.op_patterns import (
    is_call,
    minor,
    recomputes,
    reordered,
    sliced,
)
from autoshard.ir import Body, Graph, Op, Value
from autoshard.primitives import is_control_flow, is_reduction, is_scatter, primitive, updates

NARROW_WORK = 2 / 3  # of float32's cycles, in bfloat16; evidence: vector work in bfloat16
MOST = 6  # sources, or readers, that are told apart: more are as good as this many; evidence: values of several readers


def fuse(graph: Graph, free: Sequence[bool], demands: Demands, rules: FusionRules) -> Fusion:
    """The fused program.

    Args:
        free: per value, whether it is made of constants alone: it is computed where it is read.
        demands: the precision that is demanded of values.
        rules: the compiler's.
    """
    return _Fuser(graph, free, demands, rules).fusion()


class _Fuser:
    def __init__(self, graph: Graph, free: Sequence[bool], demands: Demands, rules: FusionRules):
        self.graph = graph
        self.values = graph.values
        self.free = free
        self.rules = rules
        self.ops = graph.walk()
        self.kinds = OpKinds(graph, free, rules)
        self.aliases = Aliases(graph, self.kinds)
        self._find = self.aliases.find
        self.readers = self.aliases.readers
        n = len(self.values)
        self.stored = [False] * n
        self.sources: list[tuple[int, ...]] = [()] * n
        self.computed: dict[int, Op] = {}  # the op of a value in registers
        self.handed: set[int] = set()  # what is stored for gathers alone
        self.minor = minor(graph)
        self.fused: dict[int, tuple[int, ...]] = {}
        self.sinks: list[frozenset[int]] = [frozenset()] * n
        spread = (op for op in self.ops if op.primitive == "broadcast_in_dim" and not self.values[op.operands[0]].rank)
        self.uniform = {op.results[0] for op in spread if free[op.operands[0]]}
        self.padded = tuple(self._find(value) for value in self.kinds.trims.values() if value >= 0)
        self.narrow = self._narrow(demands)
        self._store_boundaries()
        self._count_sinks()
        self.absorbed = Epilogues(graph, self.aliases, self.kinds, self.stored).absorbed

    def fusion(self) -> Fusion:
        for value in (*self.graph.arguments, *self.graph.constants):
            self.sources[value] = (value,)
        kernels = self._kernels(self.graph.ops)
        stored = tuple(self.stored[value] and self.values[value].size > 0 for value in range(len(self.values)))
        root = tuple(map(self._find, range(len(self.values))))
        users = tuple(tuple(reader.index for reader in self.readers[value]) for value in root)
        materialised = tuple(stored[end] and not self.free[value] for value, end in enumerate(root))
        return Fusion(
            stored=stored,
            materialised=materialised,
            root=root,
            narrow=self.narrow,
            last=self._last(),
            casts=self._casts(),
            minor=self.minor,
            begun=self.aliases.begun(self.free),
            users=users,
            padded=self.padded,
            scattered=tuple((scatter, op) for op, (_, scatter) in self.kinds.added_to.items()),
            kernels=kernels,
        )

    # -- what is stored ------------------------------------------------------------------------------------------------------

    def _last(self) -> tuple[bool, ...]:
        returned = self.aliases.returned
        makes_results = {op.index for op in self.graph.ops if any(self._find(value) in returned for value in op.results)}
        return tuple(bool(self.sinks[end]) and self.sinks[end] <= makes_results for end in map(self._find, range(len(self.values))))

    def _narrow(self, demands: Demands) -> tuple[bool, ...]:
        passed = {*self.graph.arguments, *self.graph.constants}  # into the program, as wide as they are
        return tuple(is_narrow(demand, others=REDUCTION) and value not in passed for value, demand in enumerate(demands.on_values))

    def _casts(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for op in self.ops:
            for holder in op.holders if is_control_flow(op.primitive) else ():
                for flow in holder.sources:
                    if not flow.inside and self.narrow[holder.value] and not self.narrow[flow.value] and self.values[flow.value].rank > 1:
                        root = self._find(flow.value)
                        found[root] = found.get(root, (op.index, 0))[0], op.index
        return found

    def _store_boundaries(self) -> None:
        handed: set[int] = set()
        for value in (*self.graph.arguments, *self.graph.results, *self.graph.constants):
            self._store(value)
        for op in self.ops:
            if recomputes(op):
                for value in op.operands:  # a rematerialised region reads them from memory
                    self._store(value)
            if op.bodies and not is_call(op):
                for holder in op.holders:
                    for value in (holder.value, *(flow.value for flow in holder.sources)):
                        self._store(value, even_free=True)
            elif self.kinds.stands_alone(op) and not self.kinds.is_one_hot(op):
                for value in () if op.index in self.kinds.in_place else op.results:
                    self._store(value)
                for value in self._stored_operands(op):
                    if op.primitive == "gather":
                        handed.add(self._find(value))
                    else:
                        self._store(value)
            elif is_reduction(op.primitive):
                for value in op.results:
                    self._store(value)
            elif op.primitive == "concatenate" and any(reader.primitive == "conv_general_dilated" for reader in self._read_by(op)):
                for value in op.operands:
                    self._store(value)
        for value in self.padded:
            self._store(value)
        for op, (position, _) in self.kinds.added_to.items():
            self._store(self.ops[op].operands[position])
        for value in sliced(self.graph, again=self.rules.repeats_sliced):
            self._store(value)
        for value in reordered(self.graph) if self.rules.stores_transposed else ():
            self._store(value)
        self.handed.update(value for value in handed if not self.stored[value])
        for value in handed:
            self._store(value)

    def _stored_operands(self, op: Op) -> tuple[int, ...]:
        """The operands of an op outside fusions that are stored before it runs."""
        if self.rules.fuses_scatters and is_scatter(op.primitive):
            return op.operands[:1]
        return () if self.rules.fuses_products and self.kinds.computes_operands(op) else op.operands

    def _read_by(self, op: Op) -> list[Op]:
        return self.readers[self._find(op.results[0])]

    def _store(self, value: int, even_free: bool = False) -> None:
        """Stores a value; one that is made of constants only where a loop reads it, and not the same number everywhere."""
        root = self._find(value)
        if self.values[root].rank and (not self.free[root] or (even_free and root not in self.uniform)):
            self.stored[root] = True

    def _count_sinks(self) -> None:
        """Per value the kernels that read it, through all that is fused into them."""
        for op in reversed(self.ops):
            for value in op.results:
                root = self._find(value)
                found: set[int] = set()
                for reader in self.readers[root]:
                    if len(found) >= MOST:
                        break
                    if is_reduction(reader.primitive):
                        continue  # computed along with the operand's other readers
                    if reader.bodies or self.kinds.stands_alone(reader):
                        found.add(reader.index)
                    for result in () if reader.bodies else reader.results:
                        end = self._find(result)
                        if self.stored[end] and not self.kinds.stands_alone(reader):
                            found.add(reader.index)
                        elif not self.stored[end]:
                            found |= self.sinks[end]
                self.sinks[root] = frozenset(sorted(found)[:MOST])

    # -- kernels -------------------------------------------------------------------------------------------------------------

    def _kernels(self, ops: Iterable[Op]) -> tuple[Kernel, ...]:
        kernels: list[Kernel] = []
        products: dict[int, int] = {}  # the product in whose kernel a value is made
        makers: dict[tuple[int, ...], int] = {}  # the number of the kernel that does
        through: dict[int, tuple[tuple[int, ...], ...]] = {}  # the stored values that an op reads for each of its operands
        for op in ops:
            if is_call(op):
                kernels.extend(self._kernels(op.bodies[0].ops))
            elif op.bodies:
                kernels.append(self._loop(op))
            elif not self.kinds.is_view(op):
                fuses = not self.kinds.stands_alone(op) or self.kinds.computes_operands(op) or self.kinds.is_one_hot(op)
                roots = tuple(map(self._find, op.operands))
                parts = tuple((self.fused.get(root) if fuses else None) or self.sources[root] for root in roots)
                reads = _merged(parts)
                own = op.index if self.kinds.is_product(op) else -1
                product = next((products[root] for root in roots if root in products), own) if own < 0 else own
                if product in (own, -1):
                    through[op.index] = parts
                made = []
                for value in op.results:
                    root = self._find(value)
                    long = False
                    if not self.stored[root] and not self.free[root]:
                        long = self._is_long(op, root)
                        self.stored[root] = long or self._keep(root, reads)
                    if self.stored[root]:
                        made.append(root)
                        self.sources[root] = (root,)
                        widened = op.primitive == "convert_element_type" and self.values[root].itemsize > self.values[roots[0]].itemsize
                        again = (widened and root not in self.padded and not long) or self._is_made_again(op, root, reads)
                        if again and reads and self.rules.widens_for_readers:
                            self.fused[root] = reads  # kernels that can compute it read its sources
                    else:
                        self.sources[root] = reads
                        self.computed[root] = op
                        if product >= 0 and self.absorbed[root]:
                            products[root] = product
                maker = makers.get(roots if op.index in self.kinds.apart else reads)
                if made and maker is not None and self._is_made_beside(op, roots, made):
                    kernels[maker] = replace(kernels[maker], makes=(*kernels[maker].makes, *made))  # a product's second result
                elif made:
                    handed = not self.handed.isdisjoint(made)
                    if product >= 0 or handed:
                        makers[tuple(made)] = len(kernels)
                    if handed:
                        makers.setdefault(reads, len(kernels))
                    main = product if product >= 0 else op.index
                    found = tuple(_position(read, through[main]) for read in reads)
                    kernels.append(Kernel(op.index, reads, tuple(dict.fromkeys(made)), updates(op.primitive), (), main, found))
        return tuple(kernels)

    def _is_made_beside(self, op: Op, roots: tuple[int, ...], made: Sequence[int]) -> bool:
        """Whether a kernel makes what an op makes of the same values: for lookups, in another width, or a reduction of what those read."""
        # evidence: maxima of what is looked up
        sums = is_reduction(op.primitive) and not self.handed.isdisjoint(roots)
        return sums or op.index in self.kinds.apart or op.primitive == "convert_element_type" or not self.fused.keys().isdisjoint(made)

    def _keep(self, value: int, reads: tuple[int, ...]) -> bool:
        """Whether storing a value moves no more memory than computing it for each of its readers."""
        if self.absorbed[value] or len(reads) < 2:
            return False
        size, itemsize = self.values[value].size, self.values[value].itemsize
        large = [self.values[source].itemsize / itemsize for source in reads if 2 * self.values[source].size > size]
        sources, readers = sum(large), len(self.sinks[value])
        many = self.rules.stores_values_of_many and len(large) >= MOST  # evidence: values of many sources
        return many or sources + 1 + readers <= sources * readers

    def _is_made_again(self, op: Op, value: int, reads: tuple[int, ...]) -> bool:
        """Whether a value that is stored for gathers is computed again by its other readers: they read no more for it then."""
        # evidence: values handed to gathers are computed again
        if value not in self.handed or self.absorbed[value] or not self.kinds.is_elementwise(op):
            return False
        made = self.values[value]
        return 0 < sum(self.values[one].nbytes for one in reads if 2 * self.values[one].size > made.size) <= made.nbytes

    def _is_long(self, op: Op, value: int) -> bool:
        """Whether to compute a value, which several kernels would, takes longer than to write and read it."""
        if self.absorbed[value] or len(self.sinks[value]) < 2 or self.rules.patience == math.inf:
            return False
        made, (reader, *others) = self.values[value], self.readers[value]
        if not others and reader.primitive == "convert_element_type" and self.values[reader.results[0]].itemsize < made.itemsize:
            return False  # if anything is kept it is that
        hidden = self.rules.hides * min(self._beside(sink, made) for sink in self.sinks[value])
        most = self.rules.patience * made.itemsize * max(hidden, 1.0)
        work, queue, met = 0.0, [op], {op.index}
        while queue and work < most:
            maker = queue.pop()
            work += self._work(maker)
            for operand in dict.fromkeys(map(self._find, maker.operands)):
                before = self.computed.get(operand)
                if before is not None and before.index not in met and 2 * self.values[operand].size > made.size:
                    met.add(before.index)
                    queue.append(before)
        return work >= most

    def _work(self, op: Op) -> float:
        """Vector operations that an op takes for each element it makes; division by a constant is multiplication."""
        name = "mul" if op.primitive == "div" and self.free[self._find(op.operands[1])] else op.primitive
        operations = self.rules.heavier.get(name) or primitive(name).vector_operations
        return operations * (NARROW_WORK if self.values[op.results[0]].itemsize < 4 else 1.0)

    def _beside(self, sink: int, made: Value) -> float:
        """The bytes that a kernel reads and writes beside a value, in multiples of that one's."""
        op = self.ops[sink]
        return max(sum(self.values[value].nbytes for value in (*op.operands, *op.results)) / max(made.nbytes, 1) - 1.0, 0.0)

    def _loop(self, op: Op) -> Kernel:
        reads, makes = [], []
        for holder in op.holders:
            root = self._find(holder.value)
            outer = [flow for flow in holder.sources if not flow.inside]
            for flow in outer:
                reads.append(self.sources[self._find(flow.value)])
            if any(flow.shift == 1 for flow in outer):
                self.stored[root] = False  # a slice is read from its stack
                self.sources[root] = _merged(self.sources[self._find(flow.value)] for flow in outer)
                continue
            for flow in holder.sources:
                if flow.inside:  # written where it is carried or stacked, and read from there
                    made = self._find(flow.value)
                    if not self._outside(op, made):
                        self.aliases.share(made, root)
            if not any(root == self._find(flow.value) for flow in outer):
                makes.append(root)
            self.sources[root] = (root,)
        inner = tuple(self._kernels(body.ops) for body in op.bodies)
        for result in op.results:
            root = self._find(result)
            self.sources[root] = (root,)
        return Kernel(op.index, _merged(reads), tuple(dict.fromkeys(makes)), True, inner, op.index)

    def _outside(self, op: Op, value: int) -> bool:
        """Whether a value exists before a loop: an argument, an input of its body, or something computed outside."""
        return value in _inputs(op.bodies) or self.sources[value] != ()


def _inputs(bodies: tuple[Body, ...]) -> set[int]:
    return {value for body in bodies for value in body.inputs}


def _merged(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(value for group in groups for value in group))


def _position(value: int, parts: tuple[tuple[int, ...], ...]) -> int:
    """The first part that has a value, or how many there are."""
    return next((position for position, part in enumerate(parts) if value in part), len(parts))
