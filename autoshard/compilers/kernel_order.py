"""When the values of a fused program are alive: the order of its kernels, and the life of each buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from heapq import heappop, heappush

import numpy as np

from autoshard.analysis.values import usage
from autoshard.compilers.fused_program import Fusion, Kernel
from autoshard.ir import Graph
from autoshard.primitives import is_matrix, is_scatter


@dataclass(frozen=True, slots=True, eq=False)
class Lifetimes:
    """When buffers are alive; no assignment changes that.

    Attributes:
        values: per buffer the root value that it holds.
        born, dies: per buffer the first moment of its life, and the first after it; two moments a kernel: it reads, it writes.
        passed: per buffer whether it is an argument, a constant or a result.
        moments: how many there are.
        starts, ends: per op index the moment in which its kernel starts to read, and the one after that has written; one past
            the last for the program's results.
        reads: per moment in which a kernel starts, the buffers that it reads, by their positions.
        places: per value that has a buffer its position.
        put_off: per moment in which a kernel starts, the latest in which it could: its readers wait for other kernels until then.
    """

    values: tuple[int, ...]
    born: np.ndarray
    dies: np.ndarray
    passed: tuple[bool, ...]
    moments: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]
    reads: dict[int, tuple[int, ...]]
    places: dict[int, int]
    put_off: dict[int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Orders:
    """The orders in which a compiler may run a program's kernels, each with the lifetimes of buffers in it.

    Attributes:
        tried: those among which it takes the one of the lowest peak.
        best: of those the one that does, unsharded.
        overlapped: the order if products that no other product waits for come last, while others' results are sent; `best` where the
            compiler leaves them in place.
        last_products: the op indices of those.
    """

    tried: tuple[Lifetimes, ...]
    best: Lifetimes
    overlapped: Lifetimes
    last_products: frozenset[int]


def program_orders(graph: Graph, fusion: Fusion) -> tuple[Lifetimes, ...]:
    """The lifetimes of a fused program's buffers in program order, that order shifted, and a list scheduler's; O(n log n).

    The last one of programs without loops only: a loop would have to count with the buffers of its body.
    """
    kept = frozenset(fusion.root[value] for value in (*graph.arguments, *graph.constants, *graph.results))

    def nbytes(value: int) -> float:
        return 0.0 if value in kept else _on_device(graph, value)

    def arranged(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        inner = (replace(k, inner=tuple(map(arranged, k.inner))) if k.inner else k for k in kernels)
        return shifted(tuple(inner), nbytes, kept)

    found = [fusion.kernels, arranged(fusion.kernels)]
    if not any(kernel.inner for kernel in fusion.kernels):
        found.append(listed(fusion.kernels, nbytes, kept))
    return tuple(_lifetimes(graph, fusion, kernels) for kernels in found)


def _on_device(graph: Graph, value: int) -> float:
    """The bytes of a whole value in the device's memory."""
    return 0.0 if graph.values[value].on_host else graph.values[value].nbytes


def gradients_last(graph: Graph, fusion: Fusion) -> tuple[Lifetimes, frozenset[int]]:
    """The lifetimes of a fused program's buffers if products that no other product or loop waits for, as gradients of weights, come last.

    Kernels that depend on them come after them: norms of gradients, updates. So do those in loops' bodies. And the products, by their ops.
    """
    ops, last = graph.walk(), set[int]()

    def arranged(kernels: tuple[Kernel, ...]) -> tuple[Kernel, ...]:
        is_product = [is_matrix(ops[kernel.main].primitive) and not kernel.inner for kernel in kernels]
        awaited, wanted = [False] * len(kernels), set[int]()  # values that a product or a loop waits for
        for k in reversed(range(len(kernels))):
            awaited[k] = not wanted.isdisjoint(kernels[k].makes)
            if awaited[k] or is_product[k] or kernels[k].inner:
                wanted.update(kernels[k].reads)
        groups: tuple[list[Kernel], ...] = ([], [], [])
        late: set[int] = set()
        for kernel, product, waits in zip(kernels, is_product, awaited, strict=True):
            place = 0 if waits or kernel.inner else 1 if product else 2 if not late.isdisjoint(kernel.reads) else 0
            groups[place].append(replace(kernel, inner=tuple(map(arranged, kernel.inner))) if kernel.inner else kernel)
            if place:
                late.update(kernel.makes)
            if place == 1:
                last.add(kernel.main)
        return tuple(kernel for group in groups for kernel in group)

    return _lifetimes(graph, fusion, arranged(fusion.kernels)), frozenset(last)


def filled_at_once(graph: Graph, fusion: Fusion, times: Lifetimes) -> Lifetimes:
    """The lifetimes if all zeros of one shape and dtype are made at once: carries and stacks of outermost loops, operands of scatters.

    XLA:GPU fills them by one kernel for each shape and dtype (three recurrent layers' 42 stacks, a graph
    network's 8 sums over edges, jaxlib 0.10.2).
    """
    born, ops, in_place = times.born.copy(), graph.walk(), {scatter for scatter, _ in fusion.scattered}
    alike: dict[tuple, list[int]] = {}
    for kernel in fusion.kernels:
        op = ops[kernel.main]
        fills = is_scatter(op.primitive) and op.index not in in_place and not fusion.stored[fusion.root[op.operands[0]]]
        for value in kernel.makes if kernel.inner or fills else ():
            if value in times.places:
                alike.setdefault((graph.values[value].shape, graph.values[value].dtype), []).append(times.places[value])
    for places in alike.values():
        born[places] = born[places].min()
    return replace(times, born=born)


def shortest(graph: Graph, found: Iterable[Lifetimes]) -> Lifetimes:
    """The lifetimes of the lowest peak, by unsharded sizes."""

    def peak(times: Lifetimes) -> float:
        sizes = np.array([_on_device(graph, value) for value in times.values])
        return usage(times.moments, sizes, times.born, times.dies).max()

    return min(found, key=peak)


def _lifetimes(graph: Graph, fusion: Fusion, kernels: tuple[Kernel, ...]) -> Lifetimes:
    born: dict[int, int] = {}
    dies: dict[int, int] = {}
    starts = [-1] * (len(graph.walk()) + 1)
    ends = [-1] * (len(graph.walk()) + 1)
    fixed = dict.fromkeys(fusion.root[value] for value in (*graph.arguments, *graph.constants))
    replaces = {fusion.root[graph.results[result]] for result, argument in graph.aliases if argument in graph.donated}
    replaces -= _stacked_beside(graph, fusion)
    reads: dict[int, tuple[int, ...]] = {}
    moment = 0

    def run(kernels: tuple[Kernel, ...]) -> None:
        nonlocal moment
        for kernel in kernels:
            start = moment
            starts[kernel.op], ends[kernel.op] = start, start + 2
            moment += 2
            reads[start] = kernel.reads
            for value in kernel.reads:
                dies[value] = max(dies.get(value, 0), start + (1 if kernel.in_place else 2))
            for value in kernel.makes:
                born.setdefault(value, start + kernel.in_place)
            for body in kernel.inner:
                run(body)
            if kernel.inner:
                for inner in _reads(kernel.inner):
                    if inner in fixed or born.get(inner, start) < start or inner in kernel.makes:
                        dies[inner] = moment
                for value in kernel.makes:
                    dies[value] = moment
                ends[kernel.op] = moment

    run(kernels)
    returned = {fusion.root[value] for value in graph.results}
    dies.update(dict.fromkeys(returned, moment))
    starts[-1], ends[-1] = moment, moment + 2
    for op in reversed(graph.walk()):  # fused ops run with the kernels that they are part of
        if starts[op.index] < 0:
            users = [user for value in op.results for user in fusion.users[value]]
            starts[op.index] = min((starts[user] for user in users), default=moment)
            ends[op.index] = max((ends[user] for user in users), default=moment + 2)
    values = tuple(value for value in (*fixed, *(v for v in born if v not in fixed and v not in replaces)) if fusion.stored[value])
    places = {value: k for k, value in enumerate(values)}
    return Lifetimes(
        values=values,
        born=np.array([0 if value in fixed else born[value] for value in values], dtype=np.int64),
        dies=np.array([moment if value in fixed else max(dies.get(value, 0), born[value] + 2) for value in values], dtype=np.int64),
        passed=tuple(value in fixed or value in returned for value in values),
        moments=moment + 2,
        starts=tuple(starts),
        ends=tuple(ends),
        reads={start: tuple(places[value] for value in found if value in places) for start, found in reads.items()},
        places=places,
        put_off=_put_off(kernels, starts, ends),
    )


def _stacked_beside(graph: Graph, fusion: Fusion) -> set[int]:
    """The results that a loop stacks while it reads slices of the donated arguments that they replace: these have buffers of their own.

    Both are accessed trip by trip, and XLA lets only a carry take the place of an argument: a scan over layers with
    slices of a donated cache holds the cache twice.
    """
    # evidence: stacks beside donated slices
    replaced = {graph.results[result]: graph.arguments[argument] for result, argument in graph.aliases if argument in graph.donated}
    found = set()
    for op in (op for op in graph.ops if op.bodies):
        sliced = {fusion.root[flow.value] for holder in op.holders for flow in holder.sources if flow.shift > 0}
        found |= {fusion.root[value] for value in op.results if value in replaced and fusion.root[replaced[value]] in sliced}
    return found


def _put_off(kernels: tuple[Kernel, ...], starts: list[int], ends: list[int]) -> dict[int, int]:
    """Per moment in which a kernel outside of loops starts, the latest in which it delays no other kernel by itself; O(n).

    A kernel waits for the last value that it reads. One whose readers wait for other values, themselves or through their own readers, may
    run as late as those. Kernels that only make the program's results delay none; where all readers do, a kernel is not put off.
    """
    ready: dict[int, int] = {value: ends[kernel.op] for kernel in kernels for value in kernel.makes}
    readers: dict[int, list[Kernel]] = {}
    for kernel in kernels:
        for value in kernel.reads:
            readers.setdefault(value, []).append(kernel)
    until: dict[int, int | None] = {}
    for kernel in reversed(kernels):
        found: list[int] = []
        for reader in {reader.op: reader for value in kernel.makes for reader in readers.get(value, ())}.values():
            others = max((ready.get(value, 0) for value in reader.reads if value not in kernel.makes), default=0)
            waits = others if others > ends[kernel.op] else until.get(reader.op)
            if waits is not None:
                found.append(waits)
        until[kernel.op] = min(found, default=None)
    return {starts[kernel.op]: max(starts[kernel.op], until[kernel.op] or 0) for kernel in kernels}


def _reads(bodies: Iterable[tuple[Kernel, ...]]) -> Iterable[int]:
    for body in bodies:
        for kernel in body:
            yield from kernel.reads
            yield from _reads(kernel.inner)


def shifted(kernels: tuple[Kernel, ...], nbytes: Callable[[int], float], kept: frozenset[int]) -> tuple[Kernel, ...]:
    """The kernels in program order, but for those that free memory elsewhere: just before their first reader, or just after their operands.

    Kernels that only a result depends on move to the end, an optimizer's update to its gradient. O(n log n).

    Args:
        nbytes: per stored value its size.
        kept: values that are alive throughout.
    """
    made_by = {value: k for k, kernel in enumerate(kernels) for value in kernel.makes}
    readers: dict[int, list[int]] = {}
    for k, kernel in enumerate(kernels):
        for value in kernel.reads:
            readers.setdefault(value, []).append(k)
    places = [float(k) for k in range(len(kernels))]
    aside = 0.5 / max(len(kernels), 1) ** 2  # so little that all kernels beside another one are still in order before the next

    def made(k: int) -> float:
        return sum(nbytes(value) for value in kernels[k].makes)

    for k in reversed(range(len(kernels))):
        if kernels[k].inner:
            continue
        first = min((places[reader] for value in kernels[k].makes for reader in readers.get(value, ())), default=float(len(kernels)))
        lasts = {v: max((places[other] for other in readers[v] if other != k), default=0.0) for v in kernels[k].reads if v not in kept}
        after = max(lasts.values(), default=first) + (k + 1) * aside
        for place in (first - (len(kernels) - k) * aside, after):  # before its readers, or after all others that read its operands
            held = sum(nbytes(value) for value, last in lasts.items() if last < place - 0.5)
            if places[k] < place < first and held < made(k):
                places[k] = place
                break
    for k in sorted(range(len(kernels)), key=lambda k: places[k]):
        last = max((places[made_by[value]] for value in kernels[k].reads if value in made_by), default=None)
        freed = sum(nbytes(v) for v in kernels[k].reads if v not in kept and max(places[other] for other in readers[v]) <= places[k])
        if last is not None and 0 < freed >= made(k) and not kernels[k].inner and last < places[k]:
            places[k] = last + (k + 1) * aside
    return tuple(kernels[k] for k in sorted(range(len(kernels)), key=lambda k: places[k]))


def listed(kernels: tuple[Kernel, ...], nbytes: Callable[[int], float], kept: frozenset[int]) -> tuple[Kernel, ...]:
    """The kernels in the order of a list scheduler: of those that are ready, the one that frees most, less its results.

    As XLA's does (``ListMemoryScheduler`` in hlo_memory_scheduler.cc); ties go by program order. O(n log n).

    Args:
        nbytes: per stored value its size.
        kept: values that are alive throughout.
    """
    made_by = {value: k for k, kernel in enumerate(kernels) for value in kernel.makes}
    missing = [sum(value in made_by for value in kernel.reads) for kernel in kernels]
    readers: dict[int, list[int]] = {}
    for k, kernel in enumerate(kernels):
        for value in kernel.reads:
            readers.setdefault(value, []).append(k)
    left = {value: len(found) for value, found in readers.items()}

    def gain(k: int) -> float:
        freed = sum(nbytes(value) for value in kernels[k].reads if left[value] == 1 and value not in kept)
        return freed - sum(nbytes(value) for value in kernels[k].makes)

    best: dict[int, float] = {}
    queue: list[tuple[float, int]] = []

    def offer(k: int) -> None:
        best[k] = gain(k)
        heappush(queue, (-best[k], k))

    for k in range(len(kernels)):
        if not missing[k]:
            offer(k)
    done = [False] * len(kernels)
    order = []
    while queue:
        value, k = heappop(queue)
        if done[k] or -value != best[k]:
            continue
        done[k] = True
        order.append(kernels[k])
        for made in kernels[k].makes:
            for reader in readers.get(made, ()):
                missing[reader] -= 1
                if not missing[reader]:
                    offer(reader)
        for source in kernels[k].reads:
            left[source] -= 1
            if left[source] == 1:
                for reader in readers[source]:
                    if not done[reader] and not missing[reader]:
                        offer(reader)
    return tuple(order)
