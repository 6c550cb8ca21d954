"""Buffers of a TPU's memory as XLA:TPU assigns them: in tiles, some in two orders of dimensions, short-lived ones in the core's memory."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from itertools import pairwise

import numpy as np

from autoshard.analysis.demanded_precision import is_narrow
from autoshard.compilers.all_reduce_combiner import sent_together
from autoshard.compilers.buffer_assignment import Draft, of_rings, scattered_apart, shares, stored_partials
from autoshard.compilers.buffers import Buffers, Copy, Held
from autoshard.compilers.kernel_order import Lifetimes, usage
from autoshard.compilers.op_patterns import MOST_OF
from autoshard.compilers.program_facts import ProgramFacts
from autoshard.compilers.tpu.layout_copies import (
    for_lookups,
    for_products,
    for_scatters,
    for_sending,
    for_transforms,
    for_updates,
    sliced_last,
)
from autoshard.compilers.tpu.sorts import of_sorts
from autoshard.compilers.tpu.tiling import tiles, tiles_of_copy
from autoshard.cost.reshard import Step
from autoshard.ir import Assignment, Layout
from autoshard.primitives import is_matrix


def tiled_buffers(
    facts: ProgramFacts,
    assignment: Assignment,
    copies: Mapping[tuple[int, Layout], Copy],
    partials: Mapping[int, Step],
    fast_memory_bytes: float,
    early: bool,
) -> Buffers:
    """The buffers of a device in the best order.

    Args:
        assignment, copies, partials: as for `buffers`.
        fast_memory_bytes: of the core's own memory.
        early: whether tables of short rows are copied as early as can be.
    """
    times, fusion, ops = facts.lifetimes, facts.fusion, facts.graph.walk()
    mesh, share = assignment.mesh.sizes, shares(facts, assignment)
    copied = {value for value, _ in copies}
    sizes = [
        share(value) * (tiles(facts, assignment, value, passed) / (2 if fusion.narrow[value] else 1))
        for value, passed in zip(times.values, times.passed, strict=True)
    ]
    demands = facts.demands.on_values
    beside = _gathered_beside_sums(facts, partials)
    whole = {made: copy.nbytes * tiles_of_copy(facts, assignment, *made) for made, copy in copies.items()}
    more = [
        (whole[made] / (2 if copy.rounded or is_narrow(demands[made[0]]) else 1), times.starts[copy.first], beside(made[0], copy.last))
        for made, copy in copies.items()
    ]
    stored = stored_partials(facts, partials, share, mesh)
    more += [(partials[op].nbytes, times.starts[op], times.ends[last]) for op, last in stored.items()]
    unread, sorted_apart = of_sorts(facts, assignment, fast_memory_bytes)
    circling, added = of_rings(facts, assignment)
    more += [*unread, *circling, *added, *sorted_apart]
    more += for_products(facts, assignment, copied)
    more += for_lookups(facts, assignment, copied, early)
    more += for_scatters(facts, assignment, partials)
    more += for_updates(facts, assignment, partials)
    more += for_sending(facts, assignment)
    more += for_transforms(facts, assignment)
    more += _early(facts, partials, sizes, mesh)
    casts = ((value, lives) for value, lives in fusion.casts.items() if value not in copied)
    more += [(share(value) / 2, times.starts[first], times.ends[last]) for value, (first, last) in casts]
    more += scattered_apart(facts, assignment, share)
    waits = list(sliced_last(facts, assignment))
    more += [(nbytes, until - 2, until) for _, until, nbytes in waits]
    born, dies = _beside_gradients(facts)
    if copies:  # (without any, everything that is sent is synchronous)
        born = _at_once(times, born, fusion.begun)
        dies = _one_later(times, dies, {op for op, step in partials.items() if step.nbytes > share(ops[op].results[0])})
        dies = _beside_gathers(facts, partials.keys(), copied, dies)
        dies = _after_scatters(facts, partials.keys(), dies)
    draft = Draft(facts, tuple(value for value, _ in copies), tuple(stored), sizes, more)
    # collectives read and write the device's own memory, but for stacks (`tiles_of_copy`)
    sent = (*(value not in facts.stacked for value, _ in copies), *(True,) * (len(stored) + len(unread) + len(circling)))

    def placed(born: np.ndarray, dies: np.ndarray) -> Buffers:
        kept = draft.held()
        _keep_fast(kept, born, dies, (*times.passed, *sent), fast_memory_bytes)
        return draft.placed(kept, born, dies)

    born, dies = draft.lives(born, dies)
    if waits:
        whole = [(len(sizes) + k, value) for k, (value, layout) in enumerate(copies) if layout == assignment.layout(value)]
        found = placed(*_waiting(facts, waits, whole, born, dies))
        if found.usage.max() <= facts.compiler.device.memory_bytes:
            return found
    return placed(born, dies)


def _gathered_beside_sums(facts: ProgramFacts, partials: Mapping[int, Step]) -> Callable[[int, int], int]:
    """When a copy dies that is read last by an op: not before sums are made of what that product reads, too.

    Of an operand's gradient and of its weight's, which are products of the same gradient, XLA's latency-hiding scheduler may put the
    second first, since it is sent and nothing else waits for it: the gathered weight is held beside the sum of its own gradient. Where
    gathers are waited for, as on v5p, the first comes first.
    """
    # evidence: gathered weights beside their gradients
    ends, root, ops = facts.lifetimes.ends, facts.fusion.root, facts.graph.walk()
    made: dict[int, list[int]] = {}  # per value the moments at which sums of it end
    sums = facts.gradients & partials.keys() if "all_gather" in facts.compiler.asynchronous else ()
    for op in (ops[index] for index in sums):
        for value in op.operands:
            made.setdefault(root[value], []).append(ends[op.index])

    def dies(value: int, last: int) -> int:
        read = ops[last].operands if 0 <= last < len(ops) and is_matrix(ops[last].primitive) else ()
        return max((ends[last], *(end for other in read if root[other] != root[value] for end in made.get(root[other], ()))))

    return dies


def _at_once(times: Lifetimes, born: np.ndarray, begun: frozenset[int]) -> np.ndarray:
    """When buffers are born if carries that begin with constants are allocated as the program begins.

    They need nothing (``custom_call_target="AllocateBuffer"``), and XLA's latency-hiding scheduler puts that first: sums of gradients over
    time were alive from step 120 to 180 on in four recurrent networks whose backward loops began at 700 to 1,250 (libtpu 0.0.42).
    """
    return np.where([value in begun for value in times.values], 0, born)


def _beside_gradients(facts: ProgramFacts) -> tuple[np.ndarray, np.ndarray]:
    """When buffers are born and die if the values that a loss looks up are made along with a gradient as large that is stored to be padded.

    One kernel makes both from the logits, and the lookup, which no kernel waits for, comes later (a loss over shifted labels,
    libtpu 0.0.42).
    """
    times, fusion, values = facts.lifetimes, facts.fusion, facts.graph.values
    born, dies = times.born.copy(), times.dies.copy()
    for op in facts.lookups:
        place = times.places.get(looked_up := fusion.root[op.operands[0]])
        for value in fusion.padded:
            maker = facts.makers[value]
            if place is not None and maker is not None and values[looked_up].size >= MOST_OF * values[value].size:
                born[place], dies[place] = min(born[place], times.starts[maker]), max(dies[place], times.ends[maker])
    return born, dies


def _one_later(times: Lifetimes, dies: np.ndarray, scattered: set[int]) -> np.ndarray:
    """When buffers die if each gradient that is scattered asynchronously is made one later than in the order of the kernels.

    XLA's latency-hiding scheduler puts products that no kernel waits for beside the collectives of others; in the schedules of
    convolutional networks (libtpu 0.0.42) each was one behind, mostly.
    """
    dies = dies.copy()
    ends = {times.starts[op]: times.ends[op] for op in scattered}
    for start, after in pairwise(sorted(ends)):
        for buffer in times.reads.get(start, ()):
            dies[buffer] = max(dies[buffer], ends[after])
    return dies


def _beside_gathers(facts: ProgramFacts, partials: Set[int], gathered: Set[int], dies: np.ndarray) -> np.ndarray:
    """When buffers die if sums that no kernel waits for are made beside the all_gathers of later products' operands.

    XLA's latency-hiding scheduler goes backward: beside each all_gather it puts one sum that only the last collective reads, and of those
    that could be there the latest. So sums over the pixels of a U-Net's first layers on the way back wait for its middle, and so do the
    activations and gradients that they are made of (of 14 sums 12 stood where this has them; libtpu 0.0.42).
    """
    times, dies = facts.lifetimes, dies.copy()
    for sums, products in facts.unawaited:
        waiting = sorted({times.starts[op.index] for op in sums if op.index in partials})
        gathers = {times.starts[op.index]: op for op in products if not gathered.isdisjoint(op.operands)}
        for start in sorted(gathers, reverse=True):
            if place := bisect_right(waiting, start):
                end = times.ends[gathers[start].index]
                for buffer in times.reads.get(waiting.pop(place - 1), ()):
                    dies[buffer] = max(dies[buffer], end)
    return dies


def _after_scatters(facts: ProgramFacts, partials: Set[int], dies: np.ndarray) -> np.ndarray:
    """When buffers die if results of scatters are made once all scatters have run.

    XLA's latency-hiding scheduler goes backward, and leaves such kernels where they are, behind all scatters: gradients of tables whose
    columns are split were live at once, of 4 and of 6 tables, but where all_reduces alone were sent, one at a time (libtpu 0.0.42).
    """
    fusion, times, dies = facts.fusion, facts.lifetimes, dies.copy()
    scatters = [op for op in facts.added_to if op.index not in partials and fusion.last[op.results[0]]]
    for op in (op for op in scatters if fusion.root[op.results[0]] in times.places):
        place = times.places[fusion.root[op.results[0]]]
        dies[place] = max(dies[place], *(times.ends[other.index] for other in scatters))
    return dies


def _early(facts: ProgramFacts, partials: Mapping[int, Step], sizes: Sequence[float], mesh: tuple[int, ...]) -> Iterator[Held]:
    """Bytes, birth and death of the operands of sums to scalars that are sent with sums that are read earlier.

    A loss that no op reads is computed last otherwise, when activations are gone. Of the sums that are sent with it gradients are needed
    when the last of them is made, others when their readers' other operands are there.
    """
    times, first, graph = facts.lifetimes, facts.combined.first, facts.graph
    late: dict[int, dict[int, None]] = {}  # per moment the buffers of all that is due then: sums of one value are made of it together
    for group in sent_together(graph, facts.combined, partials, mesh):
        scalars = [op for op in group if not graph.values[graph.walk()[op].results[0]].rank]
        if len(group) == 1 or not scalars:
            continue
        wanted = sorted((_wanted(facts, op), op) for op in group)
        made = sorted(((times.starts[op], first[op]) for op in group), reverse=True)
        for loss in scalars:
            due = max(
                next(moment for moment, op in wanted if op != loss),
                next((start for start, result in made if result != first[loss]), 0),
            )
            if due < times.starts[loss]:
                late.setdefault(due, {}).update(dict.fromkeys(_made_after(facts, loss, due)))
    for due, buffers in late.items():
        held = usage(times.moments, np.array([sizes[k] for k in buffers]), times.born[list(buffers)], times.dies[list(buffers)])
        yield float(held.max()), due, due + 1


def _wanted(facts: ProgramFacts, op: int) -> int:
    """The moment at which the first reader of a sum runs; the end of the program where none does."""
    times = facts.lifetimes
    starts = (times.starts[reader] for reader in facts.readers[facts.graph.walk()[op].results[0]])
    return min((times.put_off.get(start, start) for start in starts), default=times.moments)


def _made_after(facts: ProgramFacts, op: int, moment: int) -> list[int]:
    """The buffers that an op needs and that are made after a moment, by their positions."""
    born, places, root, ops = facts.lifetimes.born, facts.lifetimes.places, facts.fusion.root, facts.graph.walk()
    late: dict[int, None] = {}
    reached, queue = {op}, [op]
    while queue:
        reader = ops[queue.pop()]
        for value in (*reader.operands, *(flow.value for holder in reader.holders for flow in holder.sources)):
            place, maker = places.get(root[value]), facts.makers[value]
            if place is not None and born[place] <= moment:
                continue
            if place is not None:
                late[place] = None
            if maker is not None and maker not in reached:
                reached.add(maker)
                queue.append(maker)
    return list(late)


def _waiting(
    facts: ProgramFacts, waits: Sequence[tuple[int, int, float]], whole: Sequence[tuple[int, int]], born: np.ndarray, dies: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """When buffers are born and die if some wait, and sliced values are stored whole from the first kernel on that computes their elements.

    Args:
        waits: buffers, until when each waits, and the bytes of the slice that is made then.
        whole: the buffers of values of which slices are read, with those values.
    """
    born, dies = born.copy(), dies.copy()
    for place, moment, _ in waits:
        dies[place] = max(dies[place], moment)
    for place, value in whole:
        born[place] = min(born[place], _first_computed(facts, value))
    return born, dies


def _first_computed(facts: ProgramFacts, value: int) -> int:
    """The moment in which a kernel starts that computes a value's elements, or those that each of them is made of, before all others."""
    graph, fusion, times = facts.graph, facts.fusion, facts.lifetimes
    size, first, reached, queue = graph.values[value].size, times.moments, {value}, [value]
    while queue:
        found = queue.pop()
        maker = facts.makers[found]
        if maker is None or fusion.stored[fusion.root[found]] or graph.values[found].size < size:
            continue
        first = min(first, times.starts[maker])
        new = [operand for operand in graph.walk()[maker].operands if operand not in reached]
        reached.update(new)
        queue += new
    return first


def _keep_fast(sizes: np.ndarray, born: np.ndarray, dies: np.ndarray, passed: tuple[bool, ...], room: float) -> None:
    """Sets the sizes of buffers that fit in fast memory to 0, shortest lives first; not of arguments and results of the program."""
    used = np.zeros(int(dies.max(initial=0)) + 1)
    for k in np.argsort(dies - born, kind="stable"):
        if sizes[k] > room or (k < len(passed) and passed[k]):
            continue
        span = used[born[k] : dies[k]]
        if span.max(initial=0.0) + sizes[k] <= room:
            span += sizes[k]
            sizes[k] = 0.0
