"""What a strategy leaves whole, and why, and what its compiler may do otherwise, in words."""

from __future__ import annotations

from collections import Counter, defaultdict

from autoshard.compilers import Compiler
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.ir import Assignment, Graph, Mesh, Op, operand_layout
from autoshard.ir.layout import shards
from autoshard.lower import abstract_mesh, obstacle
from autoshard.primitives import is_matrix, is_self_partitioned
from autoshard.recompute import checkpoints
from autoshard.render import format_bytes, format_count, format_percent
from autoshard.trace import Traced

TOP = 3  # places in the program that are named
MUCH = 0.1  # of all work: an axis that repeats no more of it may be worth what it shards
WORTH = 0.01  # of all products' work, or of the step's time: what is less is not worth a note
CONTENDED = 256  # additions to one element, from which on an H200 takes milliseconds for a scatter in half precision


def without_rules(facts: ProgramFacts) -> list[str]:
    """What stays replicated for want of a rule, and what stays as its author partitioned it."""
    values = facts.graph.values
    without = Counter(
        op.primitive
        for op in facts.graph.walk()
        if facts.rules[op.index] is None and not op.bodies and any(values[value].rank for value in op.operands)
    )

    def note(name: str, n: int) -> str:
        if is_self_partitioned(name):
            costed = "are costed as if they read their operands whole, what they compute and exchange inside left out"
            return f"{name} partitions itself: {n} of them run as written, and {costed}"
        return f"{name} has no sharding rule: {n} of them read their operands whole"

    return [note(name, n) for name, n in sorted(without.items())]


def lowered_otherwise(graph: Graph, mesh: Mesh) -> list[str]:
    """Why a program is not lowered manually, where it is not, and what is done instead."""
    reason = obstacle(graph, abstract_mesh(mesh))
    return [] if reason is None else [reason]


def fetched_early(traced: Traced, compiler: Compiler) -> list[str]:
    """What the compiler may undo of optimizer state in the memory of hosts."""
    if not traced.offload or not compiler.fetches_early:
        return []
    return [
        "optimizer state is in the memory of hosts between steps, and XLA:GPU may bring it to the device where a step begins, as far as "
        "there is room: the peak may be as without offload, so ask the compiler with autoshard verify, or confirm='compiler'"
    ]


def contended(facts: ProgramFacts, assignment: Assignment) -> list[str]:
    """The scatters that add many numbers to each element in a type of which the device has no fast atomic addition.

    On an H200 (JAX 0.11.2) 262,144 rows of 16 numbers added to 32 rows at random took 9.9 ms in bfloat16, 64 ms in float16 and 0.6 ms in
    float32; in the gradient of a T5's relative position biases, where two rows get most, 1.9 s in bfloat16.
    """
    if not facts.compiler.contended_types:
        return []
    values, sizes = facts.graph.values, assignment.mesh.sizes
    found = []
    for op in facts.graph.walk():
        rule = facts.rules[op.index]
        if op.primitive != "scatter-add" or rule is None or (dtype := values[op.results[0]].dtype) not in facts.compiler.contended_types:
            continue
        choice = assignment.choice(op.index)
        total, added = (values[op.operands[n]].size / shards(operand_layout(rule, choice, n), sizes) for n in (0, 2))
        if added >= CONTENDED * total:
            found.append(
                f"{op.primitive} at {op.origin} adds {format_count(added / total)} numbers to each element in {dtype}, which GPUs do one "
                "after another: milliseconds to seconds that are not in the prediction; look up in float32, and cast what was looked up"
            )
    return list(dict.fromkeys(found))


def _crowded(facts: ProgramFacts) -> list[str]:
    """The kernels whose programs hold more of the core's own memory than they get, which the compiler refuses when it generates code."""
    found = []
    for op in facts.graph.walk():
        limit = op.kernel and (op.kernel.near_limit_bytes or facts.compiler.kernel_memory_bytes)
        if op.kernel and limit and op.kernel.near_bytes > limit and not op.kernel.interpreted:
            found.append(
                f"the kernel at {op.origin} holds {format_bytes(op.kernel.near_bytes)} in the core's own memory, blocks that change twice "
                f"and scratch memory once, and gets {format_bytes(limit)}: the compiler will refuse it; use smaller blocks, or ask for "
                "more with pltpu.CompilerParams(vmem_limit_bytes=...)"
            )
    return list(dict.fromkeys(found))


def own_checkpoints(traced: Traced, remat: str | None) -> list[str]:
    """What was left as it is where values to keep were to be chosen: the step's own checkpoints, by the lines that have them.

    Args:
        traced: the step before it is rewritten.
        remat: the option.
    """
    lines = list(dict.fromkeys(str(op.origin) for op in checkpoints(traced))) if remat in ("auto", "full") else []
    if not lines:
        return []
    shown = " and ".join(lines[:TOP]) + (f" and {len(lines) - TOP} lines more" if len(lines) > TOP else "")
    return [
        f"remat={remat!r} leaves the step's own jax.checkpoint at {shown} as it is: what that keeps is kept, what it computes again is "
        "computed again, and only what is outside of it was chosen; remat='replace' takes it out and chooses anew"
    ]


def _used(assignment: Assignment) -> set[int]:
    """The mesh axes that shard anything."""
    used = {axis for layout in assignment.layouts.values() for axis, dim in enumerate(layout) if dim >= 0}
    return used | {axis for choice in assignment.choices.values() for axis, (factor, _) in enumerate(choice) if factor >= 0}


def _idle(graph: Graph, assignment: Assignment) -> list[str]:
    """Which mesh axes shard nothing, and why, where no dimension of the arguments divides by them."""
    used = _used(assignment)
    sizes = sorted({size for value in graph.arguments for size in graph.values[value].shape if size > 1}, reverse=True)
    found = []
    for axis, (name, n) in enumerate(assignment.mesh.axes):
        if axis in used:
            continue
        fewer = assignment.mesh.size // n
        why = f"its devices repeat each other's work, and {fewer} device{'s' if fewer > 1 else ''} would be as fast"
        if sizes and all(size % n for size in sizes):
            shown = ", ".join(map(str, sizes[:6])) + (", ..." if len(sizes) > 6 else "")
            why = f"no dimension of the arguments ({shown}) divides by {n}"
        found.append(f"mesh axis {name} of size {n} shards nothing: {why}")
    return found


def whole(facts: ProgramFacts, assignment: Assignment) -> list[str]:
    """The mesh axes that shard nothing, those that repeat much of the work, products and kernels whose work some axis repeats, and why.

    And kernels that the compiler will refuse, whose blocks are too large.
    """
    return [
        *_idle(facts.graph, assignment),
        *_repeating(facts, assignment),
        *_repeated(facts, assignment),
        *_whole_kernels(facts, assignment),
        *_crowded(facts),
    ]


def _repeating(facts: ProgramFacts, assignment: Assignment) -> list[str]:
    """The mesh axes whose devices repeat each other's work in more than a tenth of all products; without products, of all operations."""
    ops = [op for op in facts.graph.walk() if not (op.bodies or op.mapped)]
    products = [op for op in ops if _multiplies(op)]
    what = "products" if products else "operations"
    work = {op: op.trips * facts.flops[op.index] for op in products or ops}
    total, found = sum(work.values()), []
    for axis, (name, n) in enumerate(assignment.mesh.axes):
        share = sum(flops for op, flops in work.items() if assignment.choice(op.index)[axis][0] < 0) / (total or 1.0)
        if axis in _used(assignment) and share > MUCH:
            found.append(f"the {n} devices of mesh axis {name} all compute the same in {format_percent(share)} of the work of all {what}")
    return found


def _multiplies(op: Op) -> bool:
    """Whether an operation is a matrix product, or a kernel with such products."""
    return is_matrix(op.primitive) or (op.kernel is not None and op.kernel.matrix_flops > 0)


def _whole_kernels(facts: ProgramFacts, assignment: Assignment) -> list[str]:
    """The kernels that every device computes whole, though they are much of the work, and why their grids are not split."""
    ops = [op for op in facts.graph.walk() if op.kernel is not None and op.kernel.whole and not op.mapped]
    total = sum(op.trips * facts.flops[op.index] for op in facts.graph.walk() if _multiplies(op) or op.kernel is not None) if ops else 0.0
    found: defaultdict[tuple[str, str], float] = defaultdict(float)
    for op in ops:
        choice, reasons = assignment.choice(op.index), op.kernel.whole if op.kernel else ()
        if not any(factor >= 0 and n > 1 for (factor, _), n in zip(choice, assignment.mesh.sizes, strict=True)):
            found[f"the kernel at {op.origin} runs whole on every device", "; ".join(reasons)] += op.trips * facts.flops[op.index]
    shares = {words: format_percent(work / total) for words, work in found.items() if work >= WORTH * total > 0}
    advice = "autoshard.kernel_rule says what may be split all the same"
    return [f"{where} ({share} of the work): {why}; {advice}" for (where, why), share in shares.items()]


def _repeated(facts: ProgramFacts, assignment: Assignment) -> list[str]:
    """By mesh axis the largest products that it does not split, where no size of theirs divides by it."""
    products = [op for op in facts.graph.walk() if is_matrix(op.primitive) and not op.mapped]
    total, found = sum(op.trips * facts.flops[op.index] for op in products), []
    for axis, (name, n) in enumerate(assignment.mesh.axes):
        flops: defaultdict[tuple[str, tuple[int, ...]], float] = defaultdict(float)
        for op in products:
            rule = facts.rules[op.index]
            sizes = () if rule is None or assignment.choice(op.index)[axis][0] >= 0 else {factor.size for factor in rule.factors}
            uneven = tuple(sorted(size for size in sizes if size > 1 and size % n))
            if uneven and len(uneven) == len([size for size in sizes if size > 1]):  # else it is a choice
                flops[f"{op.primitive} at {op.origin}", uneven] += op.trips * facts.flops[op.index]
        for where, uneven in sorted((place for place in flops if flops[place] >= WORTH * total), key=lambda place: -flops[place])[:TOP]:
            sizes = f"{' and '.join(map(str, uneven))} {'do' if len(uneven) > 1 else 'does'} not divide by {n}"
            share = format_percent(flops[where, uneven] / total)
            found.append(f"mesh axis {name} of size {n} does not split {where}, {share} of the work of all products: {sizes}")
    return found
