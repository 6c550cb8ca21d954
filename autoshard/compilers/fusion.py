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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from autoshard.analysis.demanded_precision import REDUCTION, Demands, is_narrow
from autoshard.analysis.vector_products import is_outer_product
from autoshard.compilers.fused_program import Fusion, Kernel
from autoshard.compilers.grouped import is_grouped
from autoshard.compilers.op_patterns import (
    added_to,
    are_together,
    is_call,
    is_one_hot,
    looked_up_in_two_orders,
    minor,
    recomputes,
    reordered,
    sliced,
    stands_alone,
    stays_narrow,
    trims,
)
from autoshard.ir import Body, Graph, Op, Value
from autoshard.primitives import is_control_flow, is_matrix, is_reduction, is_scatter, is_view, primitive, updates

NARROW_WORK = 2 / 3  # of float32's cycles, in bfloat16; evidence: vector work in bfloat16
LONGEST = 64  # ops of an epilogue that are looked at: the compiler sets no limit; evidence: long epilogues
MOST = 6  # sources, or readers, that are told apart: more are as good as this many; evidence: values of several readers


@dataclass(frozen=True, slots=True)
class FusionRules:
    """How one compiler fuses.

    Attributes:
        patience: vector operations on an element, for each of its bytes, from which a value is kept that several kernels would compute.
        heavier: vector operations an element, by primitive, where the compiler weighs them otherwise than the table of primitives.
        hides: a kernel's memory traffic beside the value hides work: this times as much work as traffic.
        fuses_products: whether products compute their operands as they read them, and have epilogues, and outer ones are fused as
            multiplications are; else they are calls of libraries.
        fuses_gathers: whether gathers, strided slices and pads between elements are fused with the ops around them.
        fuses_scatters: whether scatters compute their updates, and add to the summand that their result would be added to.
        expands_one_hots: whether scatters of one number a row become comparisons of positions.
        widens_for_readers: whether the readers of a stored value that only widens another one, or that gathers read, too, read what it is
            made of instead.
        repeats_sliced: whether values of which several slices are read are computed for each, but for slices of slices.
        stores_values_of_many: whether values that are computed from `MOST` large ones or more are stored.
        stores_transposed: whether values are stored that a kernel reads next to products in another order of dimensions.
    """

    patience: float = math.inf
    heavier: Mapping[str, float] = field(default_factory=dict)
    hides: float = 0.0
    fuses_products: bool = True
    fuses_gathers: bool = False
    fuses_scatters: bool = False
    expands_one_hots: bool = True
    widens_for_readers: bool = True
    repeats_sliced: bool = False
    stores_values_of_many: bool = False
    stores_transposed: bool = False


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
        n = len(self.values)
        self.root = list(range(n))
        self.stored = [False] * n
        self.absorbed = [False] * n
        self.readers: list[list[Op]] = [[] for _ in range(n)]
        self.sources: list[tuple[int, ...]] = [()] * n
        self.computed: dict[int, Op] = {}  # the op of a value in registers
        self.handed: set[int] = set()  # what is stored for gathers alone
        self.minor = minor(graph)
        self.fused: dict[int, tuple[int, ...]] = {}
        self.sinks: list[frozenset[int]] = [frozenset()] * n
        spread = (op for op in self.ops if op.primitive == "broadcast_in_dim" and not self.values[op.operands[0]].rank)
        self.uniform = {op.results[0] for op in spread if free[op.operands[0]]}
        self.apart = frozenset() if rules.fuses_gathers else looked_up_in_two_orders(graph)
        self.trims = trims(graph) if rules.fuses_products else {}
        self.outer = {op.index for op in self.ops if is_outer_product(graph, op)} if rules.fuses_products else set[int]()
        self.added_to = added_to(graph, free) if rules.fuses_scatters else {}
        self.in_place = {scatter for _, scatter in self.added_to.values()}
        self._alias()
        self.returned = {self._find(value) for value in graph.results}
        self.padded = tuple(self._find(value) for value in self.trims.values() if value >= 0)
        self.narrow = self._narrow(demands)
        self._store_boundaries()
        self._count_sinks()
        if rules.fuses_products:
            self._find_epilogues()

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
            begun=self._begun(),
            users=users,
            padded=self.padded,
            scattered=tuple((scatter, op) for op, (_, scatter) in self.added_to.items()),
            kernels=kernels,
        )

    # -- shared memory, and readers ------------------------------------------------------------------------------------------

    def _find(self, value: int) -> int:
        while self.root[value] != value:
            value = self.root[value]
        return value

    def _alias(self) -> None:
        root = self.root
        for op in self.ops:
            if self._is_view(op):
                shared, _ = self.added_to.get(op.index, (0, 0))
                root[op.results[0]] = self._find(op.operands[shared])
            for holder in op.holders:
                first = next((flow for flow in holder.sources if not flow.inside and not flow.shift), None)
                alone = len(holder.sources) == 1 and (not holder.views or op.primitive == "cond") and holder.value not in op.results
                if first is not None and alone:
                    root[holder.value] = self._find(first.value)  # read in each trip of a loop, or by a call
                for view in holder.views:
                    root[view] = holder.value
            if op.primitive == "cond":
                self._alias_results(op)
        for op in self.ops:
            reads = [*op.operands, *(flow.value for holder in op.holders for flow in holder.sources)]
            for value in dict.fromkeys(self._find(value) for value in reads):
                if not is_call(op) and not self._is_view(op):
                    self.readers[value].append(op)

    def _alias_results(self, cond: Op) -> None:
        """Results that are one value in every branch are that; others are written where branches make them."""
        inside = {value for body in cond.bodies for op in body.ops for value in op.results}
        known: dict[tuple[int, ...], int] = {}
        for holder in cond.holders:
            if holder.value in cond.results:
                made = tuple(self._find(flow.value) for flow in holder.sources)
                self.root[holder.value] = made[0] if len({*made}) == 1 else known.setdefault(made, holder.value)
                if self.root[holder.value] == holder.value:
                    for value in inside.intersection(made):
                        self.root[value] = holder.value

    def _last(self) -> tuple[bool, ...]:
        makes_results = {op.index for op in self.graph.ops if any(self._find(value) in self.returned for value in op.results)}
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

    def _begun(self) -> frozenset[int]:
        loops = (op for op in self.ops if is_control_flow(op.primitive) and op.trips == 1)
        flows = ((holder.value, flow) for loop in loops for holder in loop.holders for flow in holder.sources)
        return frozenset(self._find(value) for value, flow in flows if not flow.inside and not flow.shift and self.free[flow.value])

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
            elif self._stands_alone(op) and not self._is_one_hot(op):
                for value in () if op.index in self.in_place else op.results:
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
        for op, (position, _) in self.added_to.items():
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
        return () if self.rules.fuses_products and _computes_operands(op) else op.operands

    def _read_by(self, op: Op) -> list[Op]:
        return self.readers[self._find(op.results[0])]

    def _is_view(self, op: Op) -> bool:
        if op.index in self.trims or op.index in self.added_to:
            return True
        if op.index in self.apart:
            return False
        return is_view(op.primitive) and not op.bodies and len(op.results) == 1 and bool(op.operands)

    def _stands_alone(self, op: Op) -> bool:
        if op.index in self.outer:
            return False
        return stands_alone(op) and not (self.rules.fuses_gathers and op.primitive in ("gather", "slice", "pad"))

    def _is_product(self, op: Op) -> bool:
        return is_matrix(op.primitive) and op.index not in self.outer

    def _is_one_hot(self, op: Op) -> bool:
        return self.rules.expands_one_hots and is_one_hot(op, self.values)

    def _is_elementwise(self, op: Op) -> bool:
        return not (op.bodies or self._stands_alone(op) or is_reduction(op.primitive)) and len(op.results) == 1

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
                    if reader.bodies or self._stands_alone(reader):
                        found.add(reader.index)
                    for result in () if reader.bodies else reader.results:
                        end = self._find(result)
                        if self.stored[end] and not self._stands_alone(reader):
                            found.add(reader.index)
                        elif not self.stored[end]:
                            found |= self.sinks[end]
                self.sinks[root] = frozenset(sorted(found)[:MOST])

    # -- epilogues -----------------------------------------------------------------------------------------------------------

    def _find_epilogues(self) -> None:
        for op in self.ops:
            if _computes_operands(op) and op.index not in self.outer:
                self._epilogue(op)

    def _epilogue(self, op: Op) -> None:
        """Stores the last value of a product's epilogue instead of its result."""
        start = self._find(op.results[0])
        if self.values[start].size == 0 or not self.stored[start] or start in self.returned:
            return
        narrow = stays_narrow(op, self.values)
        unread = {start: len(self.readers[start])}
        queue = [reader.index for reader in self.readers[start]]
        heapify(queue)
        queued, inside, found, covered = set(queue), [start], start, 1
        while queue and len(queued) < LONGEST:
            reader = self.ops[heappop(queue)]
            if not self._is_elementwise(reader):
                break
            made = self._find(reader.results[0])
            if self.values[made].size != self.values[start].size or self.absorbed[made]:
                break
            for value in dict.fromkeys(map(self._find, reader.operands)):
                if value in unread:
                    unread[value] -= 1
                    if not unread[value]:
                        del unread[value]
            unread[made] = len(self.readers[made])
            inside.append(made)
            for other in self.readers[made]:
                if other.index not in queued:
                    queued.add(other.index)
                    heappush(queue, other.index)
            wider = self.values[made].itemsize > self.values[start].itemsize
            widens = wider and (reader.primitive == "convert_element_type" or narrow)
            if len(unread) == 1 and not widens:
                found, covered = made, len(inside)
                if self.stored[made]:
                    break
        only = self.readers[found]
        if self._is_reduced_only(found):
            for value in inside:  # as far as it was followed
                self.stored[value], self.absorbed[value] = False, True
            return
        if found == start or (len(only) == 1 and self._is_product(only[0]) and not self.stored[found]):
            return  # the one product that reads it does the work itself
        for value in inside[:covered]:
            self.stored[value] = value == found
            self.absorbed[value] = True

    def _is_reduced_only(self, value: int) -> bool:
        """Whether reductions alone read a value, widened perhaps: then the product's kernel reduces it, as to minima and their places."""
        shape = self.values[value].shape
        while len(only := self.readers[value]) == 1 and only[0].primitive == "convert_element_type":
            value = self._find(only[0].results[0])
        return are_together(only) and all(
            self.values[one.operands[0]].shape == shape and self.values[one.results[0]].rank > 0 for one in only
        )

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
            elif not self._is_view(op):
                fuses = not self._stands_alone(op) or _computes_operands(op) or self._is_one_hot(op)
                roots = tuple(map(self._find, op.operands))
                parts = tuple((self.fused.get(root) if fuses else None) or self.sources[root] for root in roots)
                reads = _merged(parts)
                own = op.index if self._is_product(op) else -1
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
                maker = makers.get(roots if op.index in self.apart else reads)
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
        return sums or op.index in self.apart or op.primitive == "convert_element_type" or not self.fused.keys().isdisjoint(made)

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
        if value not in self.handed or self.absorbed[value] or not self._is_elementwise(op):
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
                        self.root[made] = root
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


def _computes_operands(op: Op) -> bool:
    """Whether an op is a product whose kernel may compute what it reads, and what is made of its result: not of groups.

    evidence: operands of grouped products
    """
    return is_matrix(op.primitive) and not is_grouped(op)


def _merged(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(value for group in groups for value in group))


def _position(value: int, parts: tuple[tuple[int, ...], ...]) -> int:
    """The first part that has a value, or how many there are."""
    return next((position for position, part in enumerate(parts) if value in part), len(parts))
