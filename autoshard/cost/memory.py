"""Peak memory of one device: what is alive when, of the values that a fused program stores.

*Order.* Kernels run in program order, or in that of a list scheduler, whichever holds less: compilers try both and keep the better one.
A list scheduler makes what is small before what is large; others make it where it is needed.
*Buffers.* A value lives from the kernel that makes it to the last one that reads it, an argument throughout. A result that replaces a
donated argument takes its place; so does an elementwise result that of an operand that dies with it. What a loop carries or stacks lives
as long as the loop, its body's own values within. Copies in other layouts live from their first to their last reader. Partial gradients
wait for those that they are combined with. On a TPU arrays lie in tiles, and some in two orders of dimensions.
*Fast memory.* A TPU's compiler keeps short-lived values in the core's own memory as far as it goes: they are not in the device's.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from autoshard.cluster import Device
from autoshard.cost.arranged import for_lookups, for_products, for_scatters, for_sending, read_in, sliced_last
from autoshard.cost.combining import COMBINED_BYTES, is_formed, sent_with
from autoshard.cost.lifetimes import Lifetimes, usage
from autoshard.cost.patterns import MOST_OF
from autoshard.cost.profile import Profile
from autoshard.cost.reshard import Step
from autoshard.cost.tiles import tiles
from autoshard.ir import Assignment, Layout, shards

# The core's own memory that a program's buffers may have: the largest preallocated-temp of memory space 1 in XLA:TPU's buffer assignments
# (libtpu 0.0.42), which large programs nearly fill: 112.0 MiB on a v5e, 95.6 on a v6e (6 programs), 47.9 on a v5p (4 programs).
FAST_MEMORY_BYTES = {"v5e": 112 * 2**20, "v6e": 96 * 2**20, "v5p": 48 * 2**20}
# On GPUs before Hopper XLA's scheduler leaves products where they are: its analytical estimates of latency, with which it puts gradients of
# weights last, are not for those (a rematerialised transformer compiled for A100, H100 and B200 by jaxlib 0.10.2: 2.5, 3.6 and 3.4 GB).
IN_ORDER = frozenset({"a100", "a100-40g"})


@dataclass(frozen=True, slots=True)
class Peak:
    """The largest number of bytes alive at once on a device, and what it is made of.

    Attributes:
        nbytes: the sum of what is alive then.
        moment: when it is, as in `Lifetimes`.
        alive: the values that are.
        held: the bytes of each.
        copies: the values that are alive in other layouts too, each with the bytes of such a copy.
        partials: the ops whose results are not scattered yet, each with the bytes of those.
        spare_bytes: what another assignment's short-lived values may hold beyond these, since fast memory has room for them.
    """

    nbytes: float
    moment: int
    alive: tuple[int, ...]
    held: tuple[float, ...]
    copies: tuple[tuple[int, float], ...]
    partials: tuple[tuple[int, float], ...]
    spare_bytes: float


@dataclass(frozen=True, slots=True)
class Copy:
    """A value's copy in another layout: what a device holds of it, the ops that read it first and last, and whether it is rounded first."""

    nbytes: float
    first: int
    last: int
    rounded: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Buffers:
    """What a device holds in one order of a program's kernels, and when.

    Attributes:
        times: the order, and the lives of the buffers of values in it; those come first.
        copies: the values that are alive in other layouts too; their copies come next.
        partials: the ops whose results are not scattered yet; those come then, and last what has no name.
        held, born, dies: per buffer its bytes, the first moment of its life and the first after it.
        usage: per moment the bytes of all that is alive.
    """

    times: Lifetimes
    copies: tuple[int, ...]
    partials: tuple[int, ...]
    held: np.ndarray
    born: np.ndarray
    dies: np.ndarray
    usage: np.ndarray

    def peak(self, spare_bytes: float) -> Peak:
        """The fullest moment."""
        moment, n, m = int(self.usage.argmax()), len(self.times.values), len(self.times.values) + len(self.copies)
        numbers = (*self.times.values, *self.copies, *self.partials)
        alive = np.flatnonzero((self.born <= moment) & (self.dies > moment) & (self.held > 0))
        return Peak(
            nbytes=float(self.usage[moment]),
            moment=moment,
            alive=tuple(numbers[k] for k in alive if k < n),
            held=tuple(float(self.held[k]) for k in alive if k < n),
            copies=tuple((numbers[k], float(self.held[k])) for k in alive if n <= k < m),
            partials=tuple((numbers[k], float(self.held[k])) for k in alive if m <= k < len(numbers)),
            spare_bytes=spare_bytes,
        )


def peak_memory(
    profile: Profile,
    assignment: Assignment,
    copies: Mapping[tuple[int, Layout], Copy],
    partials: Mapping[int, Step],
    device: Device,
) -> Peak:
    """The peak of a program.

    Args:
        assignment: where each value lies.
        copies: by value number and layout.
        partials: per op index how its result is combined with other devices'.
    """
    first, *others = held_in_orders(profile, assignment, copies, partials, device)
    peak = first.peak(FAST_MEMORY_BYTES.get(device.name, 0) if device.kind == "tpu" else 0)
    return replace(peak, nbytes=max((peak.nbytes, *(float(other.usage.max()) for other in others))))


def held_in_orders(
    profile: Profile,
    assignment: Assignment,
    copies: Mapping[tuple[int, Layout], Copy],
    partials: Mapping[int, Step],
    device: Device,
) -> tuple[Buffers, ...]:
    """What a device holds in the order that holds least unsharded, and in the best of all where the compiler may hold more than that.

    Args:
        profile, assignment, copies, partials, device: as for `peak_memory`.
    """
    found = _buffers(profile, assignment, copies, partials, device, bool(copies))
    if device.kind == "gpu":
        # XLA:GPU's latency-hiding scheduler computes gradients while others are sent, and so after those of activations (jaxlib 0.10.2).
        sizes = assignment.mesh.sizes
        sent = (op for op, step in partials.items() if math.prod(sizes[axis] for axis in step.axes) > 1)
        if device.name in IN_ORDER or profile.last_products.isdisjoint(sent):
            return (found,)
        return found, _buffers(replace(profile, lifetimes=profile.overlapped), assignment, copies, partials, device, bool(copies))
    program, shifted, *listed = profile.orders
    tried = ((program, False), (shifted, not profile.recomputes), *((times, True) for times in listed))
    if device.kind != "tpu" or copies or (profile.lifetimes, False) in tried:
        return (found,)
    # Where collectives are synchronous: of 12 transformers whose layers are computed again the shifted order was 0 to 12 %
    # below the compiler, of 50 other programs the best of these at most 9 % (libtpu 0.0.42); bounds count on the first order alone.
    others = (_buffers(replace(profile, lifetimes=times), assignment, copies, partials, device, early) for times, early in tried)
    return found, min(others, key=lambda other: other.usage.max())


def _buffers(
    profile: Profile,
    assignment: Assignment,
    copies: Mapping[tuple[int, Layout], Copy],
    partials: Mapping[int, Step],
    device: Device,
    early: bool,
) -> Buffers:
    """What a device holds in the profile's order; ``early``: tables of short rows are copied as early as can be."""
    times, fusion, values, ops = profile.lifetimes, profile.fusion, profile.graph.values, profile.graph.walk()
    mesh, on_tpu = assignment.mesh.sizes, device.kind == "tpu"

    constant = _loop_constants(profile, assignment)

    def share(value: int) -> float:
        return constant[value] if value in constant else values[value].nbytes / shards(assignment.layout(value), mesh)

    sizes = [share(value) for value in times.values]
    if on_tpu:
        for k, (value, passed) in enumerate(zip(times.values, times.passed, strict=True)):
            padded = tiles(profile, assignment, value, passed)
            sizes[k] *= padded / (2 if fusion.narrow[value] else 1)
    more = [
        (copy.nbytes / (2 if on_tpu and (copy.rounded or fusion.rounds[value]) else 1), times.starts[copy.first], times.ends[copy.last])
        for (value, _), copy in copies.items()
    ]
    stored = _stored(profile, partials, share, mesh)
    more += [(partials[op].nbytes, times.starts[op], times.ends[last]) for op, last in stored.items()]
    born, dies = times.born, times.dies
    if on_tpu:
        born, dies = _beside_gradients(profile)
        if copies:  # (without any, everything that is sent is synchronous)
            born = _at_once(times, born, fusion.begun)
            dies = _one_later(times, dies, {op for op, step in partials.items() if step.nbytes > share(ops[op].results[0])})
            dies = _beside_gathers(profile, partials.keys(), {value for value, _ in copies}, dies)
            dies = _after_scatters(profile, partials.keys(), dies)
        copied = {value for value, _ in copies}
        more += for_products(profile, assignment, copied)
        more += for_lookups(profile, assignment, copied, early)
        more += for_scatters(profile, assignment, partials)
        more += for_sending(profile, assignment)
        more += _early(profile, partials, sizes, mesh)
        more += [
            (share(value) / 2, times.starts[first], times.ends[last])
            for value, (first, last) in fusion.casts.items()
            if value not in copied
        ]
    more += _scattered(profile, assignment, share)
    waits = list(sliced_last(profile, assignment)) if on_tpu else []
    more += [(nbytes, until - 2, until) for _, until, nbytes in waits]
    extra, firsts, lasts = zip(*more, strict=True) if more else ((), (), ())
    held = np.array([*sizes, *extra])
    born, dies = (np.concatenate([moments, np.array(others, np.int64)]) for moments, others in ((born, firsts), (dies, lasts)))

    def placed(born: np.ndarray, dies: np.ndarray) -> Buffers:
        kept = held.copy()
        if on_tpu:
            sent = (True,) * (len(copies) + len(stored))  # collectives read and write the device's own memory
            _keep_fast(kept, born, dies, (*times.passed, *sent), FAST_MEMORY_BYTES.get(device.name, 0))
        return Buffers(times, tuple(value for value, _ in copies), tuple(stored), kept, born, dies, usage(times.moments, kept, born, dies))

    if waits:
        whole = [(len(sizes) + k, value) for k, (value, layout) in enumerate(copies) if layout == assignment.layout(value)]
        found = placed(*_waiting(profile, waits, whole, born, dies))
        if found.usage.max() <= device.memory_bytes:
            return found
    return placed(born, dies)


def _loop_constants(profile: Profile, assignment: Assignment) -> dict[int, float]:
    """Per value that is made of constants and read by loops the bytes that a device holds of it.

    A loop that reads it as it lies makes it again in each trip (``while-loop-constant-sinking``, openxla/xla, xla/service; modules of
    libtpu 0.0.42 carry ``pred[1024,1024]`` for masks of 64 x 16 such). One that reads a slice is handed what it is a slice of.
    """
    graph, root, mesh = profile.graph, profile.fusion.root, assignment.mesh.sizes
    ops, found = graph.walk(), {}
    for op in ops:
        for holder in op.holders if op.bodies else ():
            value, whole = root[holder.value], assignment.layout(holder.value)
            if profile.free[value]:
                sliced = any(
                    layout != whole
                    for reader in profile.readers[holder.value]
                    for layout in read_in(profile, assignment, ops[reader], holder.value)
                )
                held = graph.values[value].nbytes / shards(whole, mesh) if sliced else 0.0
                found[value] = max(found.get(value, 0.0), held)
    return found


def _stored(profile: Profile, partials: Mapping[int, Step], share: Callable[[int], float], mesh: tuple[int, ...]) -> dict[int, int]:
    """Per op whose partial result is stored the op that it waits for until it is combined.

    Gradients wait for those that they are combined with: XLA puts each into the first collective that has room. What is all_reduced
    though only slices of it are wanted lies whole until the last of those is made. Others are combined at once, and stored if their
    readers do not find them in registers.
    """
    fusion, ops, values, ends = profile.fusion, profile.graph.walk(), profile.graph.values, profile.lifetimes.ends
    groups: list[tuple[float, list[int]]] = []
    found: dict[int, int] = {}
    whole: list[int] = []
    for op, step in sorted(partials.items()):
        value, nbytes = ops[op].results[0], step.nbytes
        if step.kind == "reduce_scatter" and not is_formed(values[value], step, mesh):
            whole.append(op)
        elif fusion.last[value]:
            k = next((k for k, (size, _) in enumerate(groups) if size + nbytes <= COMBINED_BYTES), len(groups))
            size, members = groups[k] if k < len(groups) else (0.0, [])
            groups[k:] = [(size + nbytes, [*members, op]), *groups[k + 1 :]]
        elif not fusion.stored[root := fusion.root[value]]:  # what is computed as it is read is not, once it is sent
            found[op] = max((op, *fusion.users[root]), key=ends.__getitem__)
        elif fusion.narrow[value] or nbytes > share(value):
            found[op] = op
    return found | {op: max(members, key=ends.__getitem__) for members in (whole, *(members for _, members in groups)) for op in members}


def _at_once(times: Lifetimes, born: np.ndarray, begun: frozenset[int]) -> np.ndarray:
    """When buffers are born if those of what loops begin with constants are taken as the program begins.

    They need nothing (``custom_call_target="AllocateBuffer"``), and XLA's latency-hiding scheduler puts that first: sums of gradients over
    time were alive from step 120 to 180 on in four recurrent networks whose backward loops began at 700 to 1,250 (libtpu 0.0.42).
    """
    return np.where([value in begun for value in times.values], 0, born)


def _beside_gradients(profile: Profile) -> tuple[np.ndarray, np.ndarray]:
    """When buffers are born and die if what a loss looks up is made along with a gradient as large that lies in memory, being padded.

    One kernel makes both of the logits, and the lookup, which nothing waits for, comes later (a loss over shifted labels, libtpu 0.0.42).
    """
    times, fusion, values = profile.lifetimes, profile.fusion, profile.graph.values
    born, dies = times.born.copy(), times.dies.copy()
    for op in profile.lookups:
        place = times.places.get(looked_up := fusion.root[op.operands[0]])
        for value in fusion.padded:
            maker = profile.makers[value]
            if place is not None and maker is not None and values[looked_up].size >= MOST_OF * values[value].size:
                born[place], dies[place] = min(born[place], times.starts[maker]), max(dies[place], times.ends[maker])
    return born, dies


def _one_later(times: Lifetimes, dies: np.ndarray, scattered: set[int]) -> np.ndarray:
    """When buffers die if each gradient that is scattered asynchronously is made one later than in the order of the kernels.

    XLA's latency-hiding scheduler puts products that nothing waits for beside the collectives of others; in the schedules of convolutional
    networks (libtpu 0.0.42) each was one behind, mostly.
    """
    dies = dies.copy()
    ends = {times.starts[op]: times.ends[op] for op in scattered}
    for start, after in pairwise(sorted(ends)):
        for buffer in times.reads.get(start, ()):
            dies[buffer] = max(dies[buffer], ends[after])
    return dies


def _beside_gathers(profile: Profile, partials: Set[int], gathered: Set[int], dies: np.ndarray) -> np.ndarray:
    """When buffers die if sums that nothing waits for are made beside the all_gathers of later products' operands.

    XLA's latency-hiding scheduler goes backward: beside each all_gather it puts one sum that only the last collective reads, and of those
    that could stand there the latest. So sums over the pixels of a U-Net's first layers on the way back wait for its middle, and so do the
    activations and gradients that they are made of (of 14 sums 12 stood where this has them; libtpu 0.0.42).
    """
    times, dies = profile.lifetimes, dies.copy()
    for sums, products in profile.unawaited:
        waiting = sorted({times.starts[op.index] for op in sums if op.index in partials})
        gathers = {times.starts[op.index]: op for op in products if not gathered.isdisjoint(op.operands)}
        for start in sorted(gathers, reverse=True):
            if place := bisect_right(waiting, start):
                end = times.ends[gathers[start].index]
                for buffer in times.reads.get(waiting.pop(place - 1), ()):
                    dies[buffer] = max(dies[buffer], end)
    return dies


def _after_scatters(profile: Profile, partials: Set[int], dies: np.ndarray) -> np.ndarray:
    """When buffers die if results are made of what is scattered when all of it is.

    XLA's latency-hiding scheduler goes backward, and leaves such kernels where they stand, behind all scatters: gradients of tables whose
    columns are split lay side by side, of 4 and of 6 tables, but where all_reduces alone were sent, one at a time (libtpu 0.0.42).
    """
    fusion, times, dies = profile.fusion, profile.lifetimes, dies.copy()
    scatters = [op for op in profile.added_to if op.index not in partials and fusion.last[op.results[0]]]
    for op in (op for op in scatters if fusion.root[op.results[0]] in times.places):
        place = times.places[fusion.root[op.results[0]]]
        dies[place] = max(dies[place], *(times.ends[other.index] for other in scatters))
    return dies


def _early(
    profile: Profile, partials: Mapping[int, Step], sizes: Sequence[float], mesh: tuple[int, ...]
) -> Iterator[tuple[float, int, int]]:
    """Bytes, birth and death of what the sums of scalars are made of, where they are sent with what is wanted earlier.

    A loss that nothing reads is computed last otherwise, when activations are gone. Of what is sent with it gradients are not waited for
    before the last of them is made, and nothing is before what reads it with something else could run.
    """
    times, first, graph = profile.lifetimes, profile.combined.first, profile.graph
    late: dict[int, dict[int, None]] = {}  # per moment the buffers of all that is due then: sums of one value are made of it together
    for loss in partials:
        if graph.values[graph.walk()[loss].results[0]].rank:
            continue
        others = sent_with(graph, profile.combined, partials, loss, mesh)
        readers = (reader for op in others for reader in profile.readers[graph.walk()[op].results[0]])
        wanted = [times.put_off.get(times.starts[reader], times.starts[reader]) for reader in readers]
        made = [times.starts[op] for op in others if first[op] != first[loss]]
        due = max(min(wanted, default=times.moments), max(made, default=0))
        if due < times.starts[loss]:
            late.setdefault(due, {}).update(dict.fromkeys(_made_after(profile, loss, due)))
    for due, buffers in late.items():
        held = usage(times.moments, np.array([sizes[k] for k in buffers]), times.born[list(buffers)], times.dies[list(buffers)])
        yield float(held.max()), due, due + 1


def _made_after(profile: Profile, op: int, moment: int) -> list[int]:
    """The buffers that an op needs and that are made after a moment, by their positions."""
    born, places, root, ops = profile.lifetimes.born, profile.lifetimes.places, profile.fusion.root, profile.graph.walk()
    late: dict[int, None] = {}
    reached, queue = {op}, [op]
    while queue:
        reader = ops[queue.pop()]
        for value in (*reader.operands, *(flow.value for holder in reader.holders for flow in holder.sources)):
            place, maker = places.get(root[value]), profile.makers[value]
            if place is not None and born[place] <= moment:
                continue
            if place is not None:
                late[place] = None
            if maker is not None and maker not in reached:
                reached.add(maker)
                queue.append(maker)
    return list(late)


def _scattered(profile: Profile, assignment: Assignment, share: Callable[[int], float]) -> Iterator[tuple[float, int, int]]:
    """Bytes, birth and death of what is scattered into zeros, beyond what those are added to: it lies apart if it is sharded otherwise.

    So of a loss that looks up logits of a sharded vocabulary: XLA:GPU scatters into ``f32[4,1024,32768]`` and takes the half of that then.
    """
    ops, fusion, times = profile.graph.walk(), profile.fusion, profile.lifetimes
    for scatter, op in fusion.scattered:
        (value,), (total,) = ops[scatter].results, ops[op].results
        place = times.places.get(fusion.root[total])
        if place is not None and set(read_in(profile, assignment, ops[op], value)) != {assignment.layout(value)}:
            yield max(share(value) - share(fusion.root[total]), 0.0), int(times.born[place]), int(times.dies[place])


def _waiting(
    profile: Profile, waits: Sequence[tuple[int, int, float]], whole: Sequence[tuple[int, int]], born: np.ndarray, dies: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """When buffers are born and die if some wait, and what is sliced lies whole from the first kernel on that computes its elements.

    Args:
        waits: buffers, until when each waits, and what is made of it then.
        whole: the buffers of what slices are read of, with its values.
    """
    born, dies = born.copy(), dies.copy()
    for place, moment, _ in waits:
        dies[place] = max(dies[place], moment)
    for place, value in whole:
        born[place] = min(born[place], _first_computed(profile, value))
    return born, dies


def _first_computed(profile: Profile, value: int) -> int:
    """The moment in which a kernel starts that computes a value's elements, or those that each of them is made of, before all others."""
    graph, fusion, times = profile.graph, profile.fusion, profile.lifetimes
    size, first, reached, queue = graph.values[value].size, times.moments, {value}, [value]
    while queue:
        found = queue.pop()
        maker = profile.makers[found]
        if maker is None or fusion.stored[fusion.root[found]] or graph.values[found].size < size:
            continue
        first = min(first, times.starts[maker])
        new = [operand for operand in graph.walk()[maker].operands if operand not in reached]
        reached.update(new)
        queue += new
    return first


def _keep_fast(sizes: np.ndarray, born: np.ndarray, dies: np.ndarray, passed: tuple[bool, ...], room: float) -> None:
    """Takes from the sizes what fits in fast memory, shortest lives first; not what is passed into the program or out of it."""
    used = np.zeros(int(dies.max(initial=0)) + 1)
    for k in np.argsort(dies - born, kind="stable"):
        if sizes[k] > room or (k < len(passed) and passed[k]):
            continue
        span = used[born[k] : dies[k]]
        if span.max(initial=0.0) + sizes[k] <= room:
            span += sizes[k]
            sizes[k] = 0.0
