"""Which values of a program lie in memory once a compiler has fused it, and the kernels that make them.

Between two values in memory everything is arithmetic in registers. What ends a fusion:

- *Anchors*: matrix products and convolutions, gathers, scatters, sorts, loops, interleaving. Their results lie in memory, and so do the
  operands of all but products, which compute what they read.
- *Pieces*: what is put together for a convolution lies in memory; the convolution puts it together as it reads it.
- *Epilogues*: what is done to a product's every element before anything else reads it is done by the product's own kernel; the value
  where its readers part lies in memory instead (a bias is added, a residual too; scores in float32 before a softmax). Where all that
  is done is to widen it, its readers do.
- *Recomputation*: any other elementwise value is computed by each of its readers again where that moves less memory than keeping it:
  of ``s`` times its bytes and ``r`` reading kernels, ``s * r < s + 1 + r``. So a softmax is computed again from its scores, and a
  normalised activation from the activation; a sum of three is kept, and bfloat16 made of float32 scores and their gradient.
- *Work*: whatever several readers would compute is kept, once computing it takes a core longer than writing and reading it takes the
  chip: the probabilities of float32 scores on v5p, whose memory is fast, but not on v5e.
- *Reductions* lie in memory: they are small.

Seen in the schedules that XLA:TPU (libtpu 0.0.42) makes of train steps. XLA:GPU (jaxlib 0.10.2, compiled for H100) differs in this:

- *Libraries*: products and convolutions are calls of cuBLAS and cuDNN: what they read and make lies in memory as it is, without epilogue.
- *Gathers* are fused, and compute what they take: a loss that looks up float32 logits reads those in bfloat16 that a product made.
- *Scatters* stand alone, one-hot ones too, and write where their operand lies; where they add to zeros, what is added to those comes first:
  the gradient of logits is made in float32, the targets' share is scattered into it, and it is rounded then.

Linear in the program's size.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from autoshard.cost.compute import is_matrix
from autoshard.ir import Body, Graph, Op, Value

VIEWS = frozenset(
    {"reshape", "squeeze", "expand_dims", "transpose", "sharding_constraint", "optimization_barrier", "copy", "copy_p", "reshard"}
)
REDUCTIONS = frozenset({
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax", "argmin", "reduce",
})  # fmt: skip
# Ops that stand outside fusions: their operands and results are in memory.
STANDALONE = frozenset({
    "dot_general", "conv_general_dilated", "gather", "scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min", "scatter_max",
    "sort", "top_k", "approx_top_k", "fft", "cholesky", "triangular_solve", "qr", "eigh", "eig", "svd", "lu", "householder_product",
    "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min",
    "select_and_scatter", "select_and_scatter_add", "select_and_gather_add", "dynamic_update_slice", "ragged_dot_general", "ragged_dot",
    "scan", "while", "cond", "remat2", "checkpoint", "shard_map", "pallas_call", "custom_partitioning", "ffi_call", "tridiagonal_solve",
})  # fmt: skip
LOOPS = frozenset({"scan", "while", "cond"})
# Vector operations an element. That of a product and a sum is from the cycles that XLA:TPU (libtpu 0.0.42) gives long chains of them; the
# others agree with which chains of them, between a product's scores and the next product, it keeps in memory: on v5p one division, two
# logistics, six exponentials or so do not, a division and a sum, one x * logistic(x) and one error function do; a softmax in float32 does,
# but not on v4, v5e or v6e, whose limits are further off; an error function does on all; and random bits make the difference on v6e.
WORK = {
    "mul": 1.5, "square": 1.5, "integer_pow": 3.0, "div": 10.0, "exp": 2.0, "log": 2.0, "log1p": 3.0, "expm1": 3.0, "tanh": 1.0,
    "logistic": 9.0, "erf": 50.0, "erfc": 50.0, "erf_inv": 50.0, "pow": 5.0, "sin": 20.0, "cos": 20.0, "tan": 20.0, "rsqrt": 2.0,
    "sqrt": 2.0, "cbrt": 5.0, "rem": 10.0, "threefry2x32": 6.0, "random_bits": 6.0,
}  # fmt: skip
# As XLA:GPU (jaxlib 0.10.2, compiled for H100) weighs them, of what a product and another kernel read, in bfloat16 and float32: hyperbolic
# tangents, sines, cosines and powers are kept, logarithms of 1 + x in bfloat16 alone; exponentials, logistics, error functions, roots and
# quotients are computed again, as are chains of 32 products and sums, and no longer from 36 (bfloat16) or 44 (float32) on.
LIBRARY_WORK = WORK | dict.fromkeys(("tanh", "sin", "cos", "tan", "pow"), 150.0) | {"log1p": 80.0}
LEAST_WORK = 0.7
HIDES = 1.75  # what a kernel moves beside the value hides work: where it moves as much, limits are 1.5 to 2.3 times as far off
NARROW_WORK = 2 / 3  # in bfloat16: 0.69 of float32's cycles
LONGEST = 64  # ops of an epilogue that are looked at: gelu's derivative is 15
MOST_OF = 15 / 16  # of a product's elements, at least: then leaving out the rest, or padding it, is the product's own affair
MOST = 6  # sources, or readers, that are told apart; more than this many are as good as this many


Minor = tuple[tuple[int, ...], tuple[int, ...]]
"""The dimensions of an image's batch, and of its features."""


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
        minor: per value the dimensions that convolutions want innermost, of the batch and of features; None where there are none.
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


def fuse(graph: Graph, free: Sequence[bool], patience: float = math.inf, calls_libraries: bool = False) -> Fusion:
    """The fused program.

    Args:
        free: per value, whether it is made of constants alone: it is computed where it is read.
        patience: operations on an element, for each of its bytes, from which a value is kept that several kernels would compute.
        calls_libraries: whether products are calls of libraries, as on GPUs.
    """
    return _Fuser(graph, free, patience, calls_libraries).fusion()


def recomputes(op: Op) -> bool:
    """Whether an op is what a rematerialised region becomes: its body run again, or the barrier before that."""
    return op.primitive == "optimization_barrier" or (is_call(op) and bool(op.params.get("differentiated", False)))


def stands_alone(op: Op) -> bool:
    """Whether an op stands outside fusions.

    So do strided slices of the two innermost dimensions, which tiles are of, and pads between elements: ``slice.1`` and ``pad.1`` between
    two fusions each in single kernels compiled by libtpu 0.0.42; a slice of rows of images is fused.
    """
    if op.primitive == "slice":
        return any(stride > 1 for stride in (op.params.get("strides") or ())[-2:])
    if op.primitive == "pad":
        return any(interior for *_, interior in op.params["padding_config"])
    return op.primitive in STANDALONE


def is_call(op: Op) -> bool:
    """Whether an op's body runs in its place, its results being the body's own: compilers see through it."""
    return len(op.bodies) == 1 and op.primitive not in LOOPS and op.results == op.bodies[0].outputs


def _added_to(graph: Graph, free: Sequence[bool]) -> dict[int, tuple[int, int]]:
    """Per op that adds what was scattered into zeros: which summand that is not, if nothing else reads this one, and the scatter's index.

    XLA:GPU scatters into that summand instead.
    """
    ops = graph.walk()
    readers = Counter(value for op in ops for value in dict.fromkeys(op.operands))
    scattered = {op.results[0]: op.index for op in ops if op.primitive == "scatter-add" and free[op.operands[0]]}
    found = {}
    for op in ops:
        for position in (0, 1) if op.primitive in ("add", "add_any") else ():
            other, sparse = op.operands[position], op.operands[1 - position]
            if sparse in scattered and readers[other] == readers[sparse] == 1:
                found[op.index] = position, scattered[sparse]
    return found


def _reordered(graph: Graph) -> set[int]:
    """What is computed of a product's result that lies in another order of dimensions than the other products' that a kernel reads with it.

    Either order of a product's free dimensions is as good, but not those of one operand among each other: scores of queries that share keys
    lie as ``[keys, (queries, groups)]``, and the gradient of their softmax as ``[(groups, queries), keys]``. XLA:GPU moves that, widened.
    """
    ops, values = graph.walk(), graph.values
    found: set[int] = set()
    lies: dict[int, tuple[frozenset[tuple[int, ...]], int, int]] = {}  # groups of dimensions, the product, and what it was widened to
    for op in ops:
        if op.primitive == "dot_general":
            (left, right), (batch, _) = op.params["dimension_numbers"]
            n, shape = values[op.operands[0]].rank - len(left), values[op.results[0]].shape
            groups = (range(len(batch), n), range(n, len(shape)))
            if len(batch) and len(right):
                lies[op.results[0]] = frozenset(tuple(dim for dim in group if shape[dim] > 1) for group in groups), op.index, -1
        elif op.primitive == "transpose" and op.operands[0] in lies:
            groups, product, wide = lies[op.operands[0]]
            place = {dim: position for position, dim in enumerate(op.params["permutation"])}
            lies[op.results[0]] = frozenset(tuple(place[dim] for dim in group) for group in groups), product, wide
        elif len(op.results) == 1 and not op.bodies and not stands_alone(op):
            (result,) = op.results
            of = sorted((lies[v] for v in op.operands if v in lies and values[v].shape == values[result].shape), key=lambda one: one[1])
            if of:
                groups, product, wide = of[0]
                found.update(other[2] for other in of[1:] if other[0] != groups and other[2] >= 0)
                lies[result] = groups, product, result if wide < 0 and op.primitive == "convert_element_type" else wide
    return found


def _trims(graph: Graph) -> dict[int, int]:
    """The ops that leave out the ends of what a product makes, or pad what it reads by as little, with what is stored for it, or -1.

    XLA:TPU makes such a product without the ends at once, and reads no pad: what is padded lies in memory, rounded as the product reads it
    (logits and their gradient in a loss over shifted labels, libtpu 0.0.42).
    """
    ops, values = graph.walk(), graph.values
    readers: dict[int, list[Op]] = {}
    for op in ops:
        for value in dict.fromkeys(op.operands):
            readers.setdefault(value, []).append(op)
    found: dict[int, int] = {}
    made: set[int] = set()  # by products, or converted since
    for op in ops:
        if op.primitive == "dot_general" or (op.primitive == "convert_element_type" and op.operands[0] in made):
            made.update(value for value in op.results if len(readers.get(value, ())) == 1)
        elif op.primitive == "slice" and op.operands[0] in made and set(op.params.get("strides") or (1,)) == {1}:
            if values[op.results[0]].size >= MOST_OF * values[op.operands[0]].size:
                found[op.index] = -1
        elif op.primitive == "pad" and values[op.operands[0]].size >= MOST_OF * values[op.results[0]].size:
            after, value = readers.get(op.results[0], []), op.results[0]
            while len(after) == 1 and after[0].primitive == "convert_element_type":
                (value,) = after[0].results
                after = readers.get(value, [])
            if after and all(reader.primitive == "dot_general" for reader in after) and not stands_alone(op):
                found[op.index] = value
    return found


class _Fuser:
    def __init__(self, graph: Graph, free: Sequence[bool], patience: float, calls_libraries: bool):
        self.graph = graph
        self.values = graph.values
        self.free = free
        self.patience = patience
        self.calls_libraries = calls_libraries
        self.work, self.hides = (LIBRARY_WORK, 0.0) if calls_libraries else (WORK, HIDES)
        self.ops = graph.walk()
        n = len(self.values)
        self.root = list(range(n))
        self.stored = [False] * n
        self.absorbed = [False] * n
        self.readers: list[list[Op]] = [[] for _ in range(n)]
        self.sources: list[tuple[int, ...]] = [()] * n
        self.computed: dict[int, Op] = {}  # what makes a value that lies in registers
        self.minor = _minor(graph)
        self.fused: dict[int, tuple[int, ...]] = {}
        self.sinks: list[frozenset[int]] = [frozenset()] * n
        spread = (op for op in self.ops if op.primitive == "broadcast_in_dim" and not self.values[op.operands[0]].rank)
        self.uniform = {op.results[0] for op in spread if free[op.operands[0]]}
        self.trims = {} if calls_libraries else _trims(graph)
        self.added_to = _added_to(graph, free) if calls_libraries else {}
        self.in_place = {scatter for _, scatter in self.added_to.values()}
        self._alias()
        self.returned = {self._find(value) for value in graph.results}
        self.padded = tuple(self._find(value) for value in self.trims.values() if value >= 0)
        self.narrow = _narrow(graph, self.root)
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
            for holder in op.holders if op.primitive in LOOPS else ():
                for flow in holder.sources:
                    if not flow.inside and self.narrow[holder.value] and not self.narrow[flow.value] and self.values[flow.value].rank > 1:
                        root = self._find(flow.value)
                        found[root] = found.get(root, (op.index, 0))[0], op.index
        return found

    def _rounds(self) -> tuple[bool, ...]:
        """Per value whether it is float32 and a product reads it at default precision, by itself or through a loop."""
        found = [False] * len(self.values)
        for op in reversed(self.ops):
            if is_matrix(op.primitive) and _default_precision(op):
                for value in op.operands:
                    found[value] = found[self._find(value)] = self.values[value].dtype == "float32"
            elif op.primitive in VIEWS and op.operands:
                found[op.operands[0]] = found[op.operands[0]] or found[op.results[0]]
            for holder in op.holders:
                for flow in holder.sources:
                    found[flow.value] = found[flow.value] or found[holder.value]
        return tuple(found)

    def _begun(self) -> frozenset[int]:
        loops = (op for op in self.ops if op.primitive in LOOPS and op.trips == 1)
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
                for value in op.operands if self.calls_libraries or not is_matrix(op.primitive) else ():
                    self._store(value)
            elif op.primitive in REDUCTIONS:
                for value in op.results:
                    self._store(value)
            elif op.primitive == "concatenate" and any(reader.primitive == "conv_general_dilated" for reader in self._read_by(op)):
                for value in op.operands:
                    self._store(value)
        for value in self.padded:
            self._store(value)
        for op, (position, _) in self.added_to.items():
            self._store(self.ops[op].operands[position])
        for value in _reordered(self.graph) if self.calls_libraries else ():
            self._store(value)

    def _read_by(self, op: Op) -> list[Op]:
        return self.readers[self._find(op.results[0])]

    def _is_view(self, op: Op) -> bool:
        if op.index in self.trims or op.index in self.added_to:
            return True
        return op.primitive in VIEWS and not op.bodies and len(op.results) == 1 and bool(op.operands)

    def _stands_alone(self, op: Op) -> bool:
        if self.calls_libraries and op.primitive in ("gather", "slice", "pad"):
            return False
        return stands_alone(op)

    def _is_one_hot(self, op: Op) -> bool:
        return not self.calls_libraries and _is_one_hot(op, self.values)

    def _is_elementwise(self, op: Op) -> bool:
        return not (op.bodies or self._stands_alone(op) or op.primitive in REDUCTIONS) and len(op.results) == 1

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
                    if reader.primitive in REDUCTIONS:
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
        grouped = _is_grouped(op, self.values)
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
        if found == start or (len(only) == 1 and is_matrix(only[0].primitive) and not self.stored[found]):
            return  # the one product that reads it does the work itself
        for value in inside[:covered]:
            self.stored[value] = value == found
            self.absorbed[value] = True

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
                        widened = op.primitive == "convert_element_type" and not self.calls_libraries
                        if widened and reads and root not in self.padded and not long:
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
        return sources + 1 + readers <= sources * readers or len(large) >= MOST

    def _is_long(self, op: Op, value: int) -> bool:
        """Whether to compute a value, which several kernels would, takes longer than to write and read it."""
        if self.absorbed[value] or len(self.sinks[value]) < 2 or self.patience == math.inf:
            return False
        made, (reader, *others) = self.values[value], self.readers[value]
        if not others and reader.primitive == "convert_element_type" and self.values[reader.results[0]].itemsize < made.itemsize:
            return False  # if anything is kept it is that
        most = self.patience * made.itemsize * max(self.hides * min(self._beside(sink, made) for sink in self.sinks[value]), 1.0)
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
        primitive = "mul" if op.primitive == "div" and self.free[self._find(op.operands[1])] else op.primitive
        return self.work.get(primitive, LEAST_WORK) * (NARROW_WORK if self.values[op.results[0]].itemsize < 4 else 1.0)

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
    return op.primitive == "dynamic_update_slice" or op.primitive.startswith("scatter")


def _is_one_hot(op: Op, values: Sequence) -> bool:
    """Whether a scatter puts one number a row, by an index of its own: compilers compare positions instead, in registers."""
    numbers = op.params.get("dimension_numbers")
    if not op.primitive.startswith("scatter") or numbers is None:
        return False
    batch = tuple(getattr(numbers, "operand_batching_dims", ()))
    rows, indexed = values[op.operands[0]].rank, values[op.operands[1]].rank - 1 > len(batch)
    return not numbers.update_window_dims and len(batch) + len(numbers.inserted_window_dims) == rows and bool(batch) and indexed


def _narrow(graph: Graph, root: Sequence[int]) -> list[bool]:
    """Per value, whether only matrix products of float32 at default precision, or conversions to bfloat16, read it."""
    values = graph.values
    wide = [False] * len(values)
    read = [False] * len(values)
    for value in (*graph.arguments, *graph.results, *graph.constants):
        wide[value] = True
    links: list[tuple[Sequence[int], Sequence[int]]] = []
    for op in graph.walk():
        if op.bodies:
            for holder in op.holders:
                for flow in holder.sources:
                    links.append(((holder.value, *holder.views), (flow.value,)))
                    if flow.inside and not flow.shift:
                        wide[holder.value] = True
            continue
        for value in op.operands:
            read[value] = True
        if is_matrix(op.primitive) and _default_precision(op):
            continue
        if op.primitive in REDUCTIONS:
            continue  # computed with what makes its operand
        if op.primitive in VIEWS or op.primitive in ("slice", "dynamic_slice", "split", "rev", "name"):
            links.append((op.results, op.operands[:1]))
        elif op.primitive == "concatenate":
            links.append((op.results, op.operands))
        elif op.primitive == "convert_element_type" and values[op.results[0]].dtype == "bfloat16":
            continue
        else:
            for value in op.operands:
                wide[value] = True
    changed = True
    while changed:  # as often as loops stand in each other, and once more
        changed = False
        for results, operands in reversed(links):
            if any(wide[value] for value in results):
                for value in operands:
                    changed = changed or not wide[value]
                    wide[value] = True
    return [values[value].dtype == "float32" and not wide[value] for value in range(len(values))]


def _is_grouped(op: Op, values: Sequence[Value]) -> bool:
    """Whether a batched product's operand has several free dimensions: it is not kept wider than it is made then, its readers widen it.

    So scores of queries that share keys are kept as ``bf16[8,4,4,1024,1024]``, and those of attention without groups in float32
    (libtpu 0.0.42, with masks and without).
    """
    if op.primitive != "dot_general":
        return False
    contracted, batch = op.params["dimension_numbers"]
    return len(batch[0]) > 0 and any(values[v].rank - len(c) - len(b) > 1 for v, c, b in zip(op.operands, contracted, batch, strict=True))


def _default_precision(op: Op) -> bool:
    precision = op.params.get("precision")
    each = precision if isinstance(precision, tuple) else (precision,)
    return all(one is None or str(getattr(one, "name", one)) == "DEFAULT" for one in each)


def _minor(graph: Graph) -> tuple[Minor | None, ...]:
    """Per value the dimensions that tiles have in a program with convolutions.

    What convolutions read and make, and its like, has batch and features innermost. A reshape that splits features, as group norms do, is a
    view of that: XLA makes the sums of groups of those of features (libtpu 0.0.42, 1 to 64 images of 64 to 512 features).
    """
    found: list[Minor | None] = [None] * len(graph.values)
    shape = [value.shape for value in graph.values]
    for op in graph.walk():
        if op.primitive == "conv_general_dilated":
            numbers = op.params["dimension_numbers"]
            tensors = (*op.operands[:2], op.results[0])
            for value, spec in zip(tensors, (numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec), strict=True):
                found[value] = (spec[0],), (spec[1],)
    if any(found):
        _spread(graph.walk(), shape, found)
        for op in graph.walk():
            if op.primitive == "reshape":
                for value, other in ((op.operands[0], op.results[0]), (op.results[0], op.operands[0])):
                    if found[value] == ((0,), (len(shape[value]) - 1,)):
                        found[other] = found[other] or _split(shape[value], shape[other])
        _spread(graph.walk(), shape, found)
    return tuple(found)


def _split(image: tuple[int, ...], other: tuple[int, ...]) -> Minor | None:
    """The batch and the features of what an image is reshaped to, if it still has them, in groups.

    >>> _split((8, 32, 32, 64), (8, 1024, 4, 16)), _split((8, 32, 32, 64), (8, 32, 2048))
    (((0,), (2, 3)), None)
    """
    first = next((dim for dim in range(1, len(other)) if math.prod(other[dim:]) == image[-1]), None)
    return ((0,), tuple(range(first, len(other)))) if first is not None and other[0] == image[0] else None


def _spread(ops: Sequence[Op], shape: Sequence[tuple[int, ...]], found: list[Minor | None]) -> None:
    for some in (ops, reversed(ops)):
        for op in some:
            if op.bodies or op.primitive in ("dot_general", "conv_general_dilated", "transpose", "reshape"):
                continue
            tensors = [value for value in (*op.operands, *op.results) if len(shape[value]) == len(shape[op.results[0]])]
            pair = next((found[value] for value in tensors if found[value]), None)
            for value in tensors:
                found[value] = found[value] or pair
