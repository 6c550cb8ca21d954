"""What a program's ops cost before anybody shards it: work, memory traffic after fusion, and lifetimes.

Compilers fuse elementwise chains into the op that reads or produces them, so most values of a jaxpr never exist in
memory. A value is *materialised* when it crosses such a boundary: an argument or result, the result of an op that
is no part of a fusion (a matrix product, a gather, a loop), an operand of one, or a value that several ops read.
Views (reshapes, transposes that fold into matrix products) share their operand's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from autoshard.cost.compute import op_flops
from autoshard.ir import Graph, Op, Rule

VIEWS = frozenset({"reshape", "squeeze", "expand_dims", "transpose", "sharding_constraint", "optimization_barrier", "copy", "copy_p"})
CHEAP = frozenset({"broadcast_in_dim", "convert_element_type", "iota", "pad", "slice", "select_n", "rev"}) | VIEWS
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
FREE_SOURCES = frozenset({"iota"})
# Computed once even of constants, and their results moved: Shardy recomputes only elementwise ops, broadcasts, reshapes, slices.
# (And no transposes; but those of masks are worth more as they are, fused into their readers by XLA.)
ONCE = STANDALONE | REDUCTIONS | {"concatenate", "pad", "rev", "dynamic_slice"}


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """Facts of a program that no assignment changes.

    Attributes:
        graph, rules: the program.
        flops: per op index, the floating point operations of one execution, unsharded.
        free: per value, whether it is made of constants alone (the partitioner recomputes those wherever they are read).
        materialised: per value, whether it occupies memory.
        root: per value, the value whose memory it shares.
        readers: per value, the op indices that read it (control flow reads what it hands to its bodies).
        wanted: per value, whether an op reads it or the program returns it.
    """

    graph: Graph
    rules: tuple[Rule | None, ...]
    flops: tuple[float, ...]
    free: tuple[bool, ...]
    materialised: tuple[bool, ...]
    root: tuple[int, ...]
    readers: tuple[tuple[int, ...], ...]
    wanted: tuple[bool, ...]


def profile(graph: Graph, rules: tuple[Rule | None, ...]) -> Profile:
    """The profile of a program; linear in its size."""
    values = graph.values
    ops = graph.walk()
    readers: list[list[int]] = [[] for _ in values]
    producer: list[int] = [-1] * len(values)
    for op in ops:
        for value in dict.fromkeys((*op.operands, *(flow.value for holder in op.holders for flow in holder.sources))):
            readers[value].append(op.index)
        for result in op.results:
            if producer[result] < 0 or not op.bodies:
                producer[result] = op.index
    returned = frozenset(graph.results)
    free = _free_values(graph)
    root = list(range(len(values)))
    in_memory = [False] * len(values)
    for value in (*graph.arguments, *graph.results, *graph.constants):
        in_memory[value] = True
    for op in ops:
        for holder in op.holders:
            for value in (holder.value, *holder.views, *(flow.value for flow in holder.sources)):
                in_memory[value] = True
        for body in op.bodies:
            for value in body.outputs:
                in_memory[value] = True
        if op.bodies:
            continue
        if op.primitive in VIEWS and len(op.results) == 1 and op.operands:
            root[op.results[0]] = root[op.operands[0]]
            continue
        stands_alone = op.primitive in STANDALONE
        for result in op.results:
            several = len(readers[result]) > 1 and op.primitive not in CHEAP
            if stands_alone or op.primitive in REDUCTIONS or several:
                in_memory[result] = True
        if stands_alone:
            for operand in op.operands:
                in_memory[root[operand]] = True
    for value in range(len(values)):
        in_memory[value] = in_memory[value] and not free[value] and values[value].size > 0
        if in_memory[value]:
            in_memory[root[value]] = True
    return Profile(
        graph=graph,
        rules=rules,
        flops=tuple(op_flops(op, rules[op.index], values) for op in ops),
        free=tuple(free),
        materialised=tuple(in_memory),
        root=tuple(root),
        readers=tuple(map(tuple, readers)),
        wanted=tuple(bool(found) or value in returned for value, found in enumerate(readers)),
    )


def _free_values(graph: Graph) -> list[bool]:
    """Per value whether it is an expansion of constants: literals, iota, and what the partitioner computes again from those."""
    free = [False] * len(graph.values)
    for literal in graph.literals:
        free[literal] = True
    for op in graph.walk():
        if op.bodies or op.primitive in ONCE or op.primitive.startswith("random") or not op.results:
            continue
        if op.primitive in FREE_SOURCES or (op.operands and all(free[value] for value in op.operands)):
            for result in op.results:
                free[result] = True
    return free


def is_view(op: Op) -> bool:
    """Whether the op's result shares its operand's memory."""
    return op.primitive in VIEWS and not op.bodies
