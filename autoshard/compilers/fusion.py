"""Which values of a program lie in memory once a compiler has fused it, and the kernels that make them.

Between two values in memory everything is arithmetic in registers. What ends a fusion:

- *Anchors*: matrix products and convolutions, gathers, scatters, sorts, loops, interleaving. Their results lie in memory, and so do the
  operands of all but products, which compute what they read.
- *Pieces*: what is put together for a convolution lies in memory; the convolution puts it together as it reads it.
- *Epilogues*: what is done to a product's every element before anything else reads it is done by the product's own kernel; the value
  where its readers part lies in memory instead (a bias is added, a residual too; scores in float32 before a softmax). Where all that
  is done is to widen it, its readers do. What a reduction alone reads is reduced there, and lies nowhere.
- *Recomputation*: any other elementwise value is computed by each of its readers again where that moves less memory than keeping it:
  of ``s`` times its bytes and ``r`` reading kernels, ``s * r < s + 1 + r``. So a softmax is computed again from its scores, and a
  normalised activation from the activation; a sum of three is kept, and bfloat16 made of float32 scores and their gradient.
- *Work*: whatever several readers would compute is kept, once computing it takes a core longer than writing and reading it takes the
  chip: the probabilities of float32 scores on v5p, whose memory is fast, but not on v5e.
- *Slices*: a value of which several slices are read, or one with strides, lies in memory; what reads them computes no part of it.
- *Reductions* lie in memory: they are small.

Seen in the schedules that XLA:TPU (libtpu 0.0.42) makes of train steps. XLA:GPU (jaxlib 0.10.2, compiled for H100) differs in this:

- *Libraries*: products and convolutions are calls of cuBLAS and cuDNN: what they read and make lies in memory as it is, without epilogue.
- *Gathers* are fused, and compute what they take: a loss that looks up float32 logits reads those in bfloat16 that a product made.
- *Scatters* compute what they add, one-hot ones too, and write where their operand lies; where they add to zeros, what is added to
  those comes first: the gradient of logits is made in float32, the targets' share is scattered into it, and it is rounded then.

Linear in the program's size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush

from autoshard.compilers.op_patterns import (
    Minor,
    added_to,
    default_precision,
    is_call,
    is_grouped,
    is_one_hot,
    minor,
    narrow,
    recomputes,
    reordered,
    sliced,
    stands_alone,
    trims,
)
from autoshard.ir import Body, Graph, Op, Value
from autoshard.primitives import is_control_flow, is_matrix, is_reduction, is_scatter, is_view, primitive, updates

NARROW_WORK = 2 / 3  # of float32's cycles, in bfloat16; evidence: vector work in bfloat16
LONGEST = 64  # ops of an epilogue that are looked at: the compiler sets no limit; evidence: long epilogues
MOST = 6  # sources, or readers, that are told apart: more are as good as this many; evidence: values of several readers


@dataclass(frozen=True, slots=True)
class FusionRules:
    """What differs from compiler to compiler.

    Attributes:
        patience: vector operations on an element, for each of its bytes, from which a value is kept that several kernels would compute.
        calls_libraries: whether products and convolutions are calls of libraries, whose operands and results lie in memory.
        heavier: vector operations an element, by primitive, where it weighs them otherwise than the table of primitives.
        hides: what a kernel moves beside the value hides work: this times as much is hidden as is moved.
    """

    patience: float = math.inf
    calls_libraries: bool = False
    heavier: Mapping[str, float] = field(default_factory=dict)
    hides: float = 0.0


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
        narrow: per value, whether all that read it are matrix products: a TPU keeps it in bfloat16, as its matrix unit reads it.
        last: per value whether nothing but kernels that make the program's results read it, as gradients are.
        casts: what a loop's products read of float32 stacks, rounded once before it on a TPU: the first and last loop that do, by value.
        rounds: per value whether some product reads it, and so a copy for it is of bfloat16 on a TPU.
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
    rounds: tuple[bool, ...]
    minor: tuple[Minor | None, ...]
    begun: frozenset[int]
    users: tuple[tuple[int, ...], ...]
    padded: tuple[int, ...]
    scattered: tuple[tuple[int, int], ...]
    kernels: tuple[Kernel, ...]


def fuse(graph: Graph, free: Sequence[bool], rules: FusionRules) -> Fusion:
    """The fused program.

    Args:
        free: per value, whether it is made of constants alone: it is computed where it is read.
        rules: the compiler's.
    """
    return _Fuser(graph, free, rules).fusion()


class _Fuser:
    def __init__(self, graph: Graph, free: Sequence[bool], rules: FusionRules):
        self.graph = graph
        self.values = graph.values
        self.free = free
        self.rules = rules
        self.calls_libraries = calls_libraries = rules.calls_libraries
        self.ops = graph.walk()
        n = len(self.values)
        self.root = list(range(n))
        self.stored = [False] * n
        self.absorbed = [False] * n
        self.readers: list[list[Op]] = [[] for _ in range(n)]
        self.sources: list[tuple[int, ...]] = [()] * n
        self.computed: dict[int, Op] = {}  # what makes a value that lies in registers
        self.minor = minor(graph)
        self.fused: dict[int, tuple[int, ...]] = {}
        self.sinks: list[frozenset[int]] = [frozenset()] * n
        spread = (op for op in self.ops if op.primitive == "broadcast_in_dim" and not self.values[op.operands[0]].rank)
        self.uniform = {op.results[0] for op in spread if free[op.operands[0]]}
        self.trims = {} if calls_libraries else trims(graph)
        self.added_to = added_to(graph, free) if calls_libraries else {}
        self.in_place = {scatter for _, scatter in self.added_to.values()}
        self._alias()
        self.returned = {self._find(value) for value in graph.results}
        self.padded = tuple(self._find(value) for value in self.trims.values() if value >= 0)
        self.narrow = narrow(graph, self.root)
        self._store_boundaries()
        self._count_sinks()
        if not calls_libraries:
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
            narrow=tuple(self.narrow),
            last=self._last(),
            casts=self._casts(),
            rounds=self._rounds(),
            minor=self.minor,
            begun=self._begun(),
            users=users,
            padded=self.padded,
            scattered=tuple((scatter, op) for op, (_, scatter) in self.added_to.items()),
            kernels=kernels,
        )

    # -- who shares memory with whom, who reads what ------------------------------------------------------------------------

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
                alone = len(holder.sources) == 1 and not holder.views and holder.value not in op.results
                if first is not None and alone and op.primitive != "cond":
                    root[holder.value] = self._find(first.value)  # what a call or a loop reads in each trip
                for view in holder.views:
                    root[view] = holder.value
        for op in self.ops:
            reads = [*op.operands, *(flow.value for holder in op.holders for flow in holder.sources)]
            for value in dict.fromkeys(self._find(value) for value in reads):
                if not is_call(op) and not self._is_view(op):
                    self.readers[value].append(op)

    def _last(self) -> tuple[bool, ...]:
        makes_results = {op.index for op in self.graph.ops if any(self._find(value) in self.returned for value in op.results)}
        return tuple(bool(self.sinks[end]) and self.sinks[end] <= makes_results for end in map(self._find, range(len(self.values))))

    def _casts(self) -> dict[int, tuple[int, int]]:
        found: dict[int, tuple[int, int]] = {}
        for op in self.ops:
            for holder in op.holders if is_control_flow(op.primitive) else ():
                for flow in holder.sources:
                    if not flow.inside and self.narrow[holder.value] and not self.narrow[flow.value] and self.values[flow.value].rank > 1:
                        root = self._find(flow.value)
                        found[root] = found.get(root, (op.index, 0))[0], op.index
        return found

    def _rounds(self) -> tuple[bool, ...]:
        """Per value whether it is float32 and a product reads it at default precision, by itself or through a loop."""
        found = [False] * len(self.values)
        for op in reversed(self.ops):
            if is_matrix(op.primitive) and default_precision(op):
                for value in op.operands:
                    found[value] = found[self._find(value)] = self.values[value].dtype == "float32"
            elif is_view(op.primitive) and op.operands:
                found[op.operands[0]] = found[op.operands[0]] or found[op.results[0]]
            for holder in op.holders:
                for flow in holder.sources:
                    found[flow.value] = found[flow.value] or found[holder.value]
        return tuple(found)

    def _begun(self) -> frozenset[int]:
        loops = (op for op in self.ops if is_control_flow(op.primitive) and op.trips == 1)
        flows = ((holder.value, flow) for loop in loops for holder in loop.holders for flow in holder.sources)
        return frozenset(self._find(value) for value, flow in flows if not flow.inside and not flow.shift and self.free[flow.value])

    def _store_boundaries(self) -> None:
        for value in (*self.graph.arguments, *self.graph.results, *self.graph.constants):
            self._store(value)
        for op in self.ops:
            if recomputes(op):
                for value in op.operands:  # what a rematerialised region reads is kept for it
                    self._store(value)
            if op.bodies and not is_call(op):
                for holder in op.holders:
                    for value in (holder.value, *(flow.value for flow in holder.sources)):
                        self._store(value, even_free=True)
            elif self._stands_alone(op) and not self._is_one_hot(op):
                for value in () if op.index in self.in_place else op.results:
                    self._store(value)
                scatters = self.calls_libraries and is_scatter(op.primitive)  # which computes what it adds
                for value in op.operands[:1] if scatters else op.operands if self.calls_libraries or not is_matrix(op.primitive) else ():
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
        for value in (*sliced(self.graph, again=self.calls_libraries), *(reordered(self.graph) if self.calls_libraries else ())):
            self._store(value)

    def _read_by(self, op: Op) -> list[Op]:
        return self.readers[self._find(op.results[0])]

    def _is_view(self, op: Op) -> bool:
        if op.index in self.trims or op.index in self.added_to:
            return True
        return is_view(op.primitive) and not op.bodies and len(op.results) == 1 and bool(op.operands)

    def _stands_alone(self, op: Op) -> bool:
        if self.calls_libraries and op.primitive in ("gather", "slice", "pad"):
            return False
        return stands_alone(op)

    def _is_one_hot(self, op: Op) -> bool:
        return not self.calls_libraries and is_one_hot(op, self.values)

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
                        continue  # computed along with what else reads its operand
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
            if is_matrix(op.primitive):
                self._epilogue(op)

    def _epilogue(self, op: Op) -> None:
        """Moves what a product stores on to where its readers part."""
        start = self._find(op.results[0])
        if self.values[start].size == 0 or not self.stored[start] or start in self.returned:
            return
        grouped = is_grouped(op, self.values)
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
            widens = wider and (reader.primitive == "convert_element_type" or grouped)
            if len(unread) == 1 and not widens:
                found, covered = made, len(inside)
                if self.stored[made]:
                    break
        only = self.readers[found]
        if self._is_reduced_only(found):
            for value in inside:  # as far as it was followed
                self.stored[value], self.absorbed[value] = False, True
            return
        if found == start or (len(only) == 1 and is_matrix(only[0].primitive) and not self.stored[found]):
            return  # the one product that reads it does the work itself
        for value in inside[:covered]:
            self.stored[value] = value == found
            self.absorbed[value] = True

    def _is_reduced_only(self, value: int) -> bool:
        """Whether one reduction alone reads a value, widened perhaps: it reduces what a product makes as it is made."""
        shape = self.values[value].shape
        while len(only := self.readers[value]) == 1 and only[0].primitive == "convert_element_type":
            value = self._find(only[0].results[0])
        reduces = len(only) == 1 and is_reduction(only[0].primitive)
        return reduces and self.values[only[0].operands[0]].shape == shape and self.values[only[0].results[0]].rank > 0

    # -- kernels -------------------------------------------------------------------------------------------------------------

    def _kernels(self, ops: Iterable[Op]) -> tuple[Kernel, ...]:
        kernels: list[Kernel] = []
        products: dict[int, int] = {}  # the product in whose kernel a value is made
        makers: dict[tuple[int, ...], int] = {}  # the number of the kernel that does
        through: dict[int, tuple[tuple[int, ...], ...]] = {}  # what an op reads for each of its operands
        for op in ops:
            if is_call(op):
                kernels.extend(self._kernels(op.bodies[0].ops))
            elif op.bodies:
                kernels.append(self._loop(op))
            elif not self._is_view(op):
                fuses = not self._stands_alone(op) or is_matrix(op.primitive) or self._is_one_hot(op)
                roots = tuple(map(self._find, op.operands))
                parts = tuple((self.fused.get(root) if fuses else None) or self.sources[root] for root in roots)
                reads = _merged(parts)
                own = op.index if is_matrix(op.primitive) else -1
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
                        if widened and not self.calls_libraries and reads and root not in self.padded and not long:
                            self.fused[root] = reads  # who can compute it reads what it is made of
                    else:
                        self.sources[root] = reads
                        self.computed[root] = op
                        if product >= 0 and self.absorbed[root]:
                            products[root] = product
                if made and op.primitive == "convert_element_type" and (maker := makers.get(reads)) is not None:
                    kernels[maker] = replace(kernels[maker], makes=(*kernels[maker].makes, *made))  # a product's second result
                elif made:
                    if product >= 0:
                        makers[tuple(made)] = len(kernels)
                    main = product if product >= 0 else op.index
                    found = tuple(_position(read, through[main]) for read in reads)
                    kernels.append(Kernel(op.index, reads, tuple(dict.fromkeys(made)), _updates(op), (), main, found))
        return tuple(kernels)

    def _keep(self, value: int, reads: tuple[int, ...]) -> bool:
        """Whether keeping a value moves no more memory than computing it for each of its readers."""
        if self.absorbed[value] or len(reads) < 2:
            return False
        size, itemsize = self.values[value].size, self.values[value].itemsize
        large = [self.values[source].itemsize / itemsize for source in reads if 2 * self.values[source].size > size]
        sources, readers = sum(large), len(self.sinks[value])
        many = self.calls_libraries and len(large) >= MOST  # evidence: values of many sources
        return many or sources + 1 + readers <= sources * readers

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
        """Vector operations that an op takes for each element it makes; what divides by a constant multiplies."""
        name = "mul" if op.primitive == "div" and self.free[self._find(op.operands[1])] else op.primitive
        operations = self.rules.heavier.get(name) or primitive(name).vector_operations
        return operations * (NARROW_WORK if self.values[op.results[0]].itemsize < 4 else 1.0)

    def _beside(self, sink: int, made: Value) -> float:
        """What a kernel reads and makes beside a value, in that one's bytes: work is hidden behind it."""
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


def _merged(groups: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(dict.fromkeys(value for group in groups for value in group))


def _position(value: int, parts: tuple[tuple[int, ...], ...]) -> int:
    """The first part that has a value, or how many there are."""
    return next((position for position, part in enumerate(parts) if value in part), len(parts))


def _updates(op: Op) -> bool:
    """Whether an op writes into its first operand."""
    return updates(op.primitive)
