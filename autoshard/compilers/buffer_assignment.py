"""Peak memory of one device by the liveness of the values that a fused program stores.

*Order.* Kernels run in program order, or in that of a list scheduler, whichever peak is lower: compilers try both.
A list scheduler computes small values before large ones; others compute each where it is needed.
*Buffers.* A value is live from the kernel that makes it to the last one that reads it, an argument throughout. A result that replaces a
donated argument takes its place; so does an elementwise result that of an operand that dies with it. A loop's carries and stacks are live
as long as the loop, its body's own values within. Copies in other layouts are live from their first to their last reader, partial gradients
until they are combined with others.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from autoshard.compilers.all_reduce_combiner import COMBINED_BYTES
from autoshard.compilers.base import ProgramFacts
from autoshard.compilers.buffers import Buffers, Copy, Held, Peak
from autoshard.compilers.kernel_order import usage
from autoshard.cost.reshard import Step
from autoshard.ir import Assignment, Layout, Op, computed_layout, exchanges, operand_layout, shards


@dataclass(frozen=True, slots=True)
class Draft:
    """Buffers before it is known which of them are in a device's memory.

    Attributes:
        facts: of the program.
        copies: the values with copies in other layouts.
        partials: the ops whose partial results are stored.
        sizes: bytes of a device's part of each value that has a buffer, in the order of `Lifetimes.values`.
        more: bytes, birth and death of the buffers after those: copies, partial results, and then those without a name.
    """

    facts: ProgramFacts
    copies: tuple[int, ...]
    partials: tuple[int, ...]
    sizes: list[float]
    more: list[Held]

    def held(self) -> np.ndarray:
        """The bytes of each buffer."""
        return np.array([*self.sizes, *(nbytes for nbytes, _, _ in self.more)])

    def lives(self, born: np.ndarray, dies: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Birth and death of each, from those of values."""
        firsts, lasts = (np.array([one[k] for one in self.more], np.int64) for k in (1, 2))
        return np.concatenate([born, firsts]), np.concatenate([dies, lasts])

    def placed(self, held: np.ndarray, born: np.ndarray, dies: np.ndarray) -> Buffers:
        """The buffers."""
        times = self.facts.lifetimes
        return Buffers(times, self.copies, self.partials, held, born, dies, usage(times.moments, held, born, dies))


def peak_memory(
    facts: ProgramFacts, assignment: Assignment, copies: Mapping[tuple[int, Layout], Copy], partials: Mapping[int, Step]
) -> Peak:
    """The peak of a program; arguments are those of `buffers`."""
    first, *others = facts.compiler.buffers(facts, assignment, copies, partials)
    peak = first.peak(facts.compiler.fast_memory_bytes)
    return replace(peak, nbytes=max((peak.nbytes, *(float(other.usage.max()) for other in others))))


def peaks_above(
    facts: ProgramFacts,
    assignment: Assignment,
    copies: Mapping[tuple[int, Layout], Copy],
    partials: Mapping[int, Step],
    limit: float,
    most: int,
) -> list[Peak]:
    """The fullest moments of those stretches of a program in which more bytes are live than a limit, fullest first; one where none is.

    Args:
        facts, assignment, copies, partials: as for `buffers`.
        limit: bytes on a device.
        most: how many there may be.
    """
    first, *_ = facts.compiler.buffers(facts, assignment, copies, partials)
    above = np.flatnonzero(first.usage > limit)
    stretches = np.split(above, np.flatnonzero(np.diff(above) > 1) + 1)
    moments = [int(each[first.usage[each].argmax()]) for each in stretches if len(each)] or [int(first.usage.argmax())]
    fullest = sorted(moments, key=lambda moment: -first.usage[moment])[:most]
    return [first.peak(facts.compiler.fast_memory_bytes, moment) for moment in fullest]


def buffers(
    facts: ProgramFacts, assignment: Assignment, copies: Mapping[tuple[int, Layout], Copy], partials: Mapping[int, Step]
) -> Buffers:
    """The buffers of a device in the best order.

    Args:
        assignment: where each value is.
        copies: by value number and layout.
        partials: per op index how its result is combined with other devices'.
    """
    times, share = facts.lifetimes, shares(facts, assignment)
    moved = [(copy.nbytes, times.starts[copy.first], times.ends[copy.last]) for copy in copies.values()]
    stored = stored_partials(facts, partials, share, assignment.mesh.sizes)
    moved += [(partials[op].nbytes, times.starts[op], times.ends[last]) for op, last in stored.items()]
    moved += scattered_apart(facts, assignment, share)
    moved += _expanded_rows(facts, assignment)
    moved += chain(*of_rings(facts, assignment))
    draft = Draft(facts, tuple(value for value, _ in copies), tuple(stored), [share(value) for value in times.values], moved)
    return draft.placed(draft.held(), *draft.lives(times.born, times.dies))


def shares(facts: ProgramFacts, assignment: Assignment) -> Callable[[int], float]:
    """The bytes of a device's part of a value in its own memory, by the value's number."""
    constant, values, mesh = _loop_constants(facts, assignment), facts.graph.values, assignment.mesh.sizes

    def share(value: int) -> float:
        if values[value].on_host:
            return 0.0
        return constant[value] if value in constant else values[value].nbytes / shards(assignment.layout(value), mesh)

    return share


def read_in(facts: ProgramFacts, assignment: Assignment, op: Op, value: int) -> list[Layout]:
    """The layouts in which an op reads a value; none of one with bodies, and of one without a rule the whole."""
    rule, choice = facts.rules[op.index], assignment.choice(op.index)
    whole = (-1,) * len(choice)
    return [
        operand_layout(rule, choice, k) if rule else whole for k, operand in enumerate(op.operands) if operand == value and not op.bodies
    ]


def _loop_constants(facts: ProgramFacts, assignment: Assignment) -> dict[int, float]:
    """Per value that is made of constants and read by loops the bytes of a device's part.

    A loop that reads it in its own layout computes it again in each trip (``while-loop-constant-sinking``, openxla/xla, xla/service;
    modules of libtpu 0.0.42 carry ``pred[1024,1024]`` for masks of 64 x 16 such). One that reads a slice is handed the whole.
    """
    graph, root, mesh = facts.graph, facts.fusion.root, assignment.mesh.sizes
    ops, found = graph.walk(), {}
    for op in ops:
        for holder in op.holders if op.bodies else ():
            value, whole = root[holder.value], assignment.layout(holder.value)
            if facts.free[value]:
                sliced = any(
                    layout != whole
                    for reader in facts.readers[holder.value]
                    for layout in read_in(facts, assignment, ops[reader], holder.value)
                )
                held = graph.values[value].nbytes / shards(whole, mesh) if sliced else 0.0
                found[value] = max(found.get(value, 0.0), held)
    return found


def stored_partials(
    facts: ProgramFacts, partials: Mapping[int, Step], share: Callable[[int], float], mesh: tuple[int, ...]
) -> dict[int, int]:
    """Per op whose partial result is stored the last op before it is combined.

    Gradients are stored until those that they are combined with are there: XLA puts each into the first collective that has room. A result
    that is all_reduced though only slices of it are read is stored whole until the last of those is made. Others are combined at once, and
    stored if their readers are other kernels.
    """
    fusion, ops, values, ends = facts.fusion, facts.graph.walk(), facts.graph.values, facts.lifetimes.ends
    groups: list[tuple[float, list[int]]] = []
    found: dict[int, int] = {}
    whole: list[int] = []
    for op, step in sorted(partials.items()):
        value, nbytes = ops[op].results[0], step.nbytes
        if step.kind == "reduce_scatter" and not facts.compiler.scatters(values[value], step, mesh):
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


def scattered_apart(facts: ProgramFacts, assignment: Assignment, share: Callable[[int], float]) -> Iterator[Held]:
    """Bytes, birth and death of scatters into zeros, beyond the sums that they are added to: stored apart where sharded otherwise.

    So of a loss that looks up logits of a sharded vocabulary: XLA:GPU scatters into ``f32[4,1024,32768]`` and takes the half of that then.
    """
    ops, fusion, times = facts.graph.walk(), facts.fusion, facts.lifetimes
    for scatter, op in fusion.scattered:
        (value,), (total,) = ops[scatter].results, ops[op].results
        place = times.places.get(fusion.root[total])
        if place is not None and set(read_in(facts, assignment, ops[op], value)) != {assignment.layout(value)}:
            yield max(share(value) - share(fusion.root[total]), 0.0), int(times.born[place]), int(times.dies[place])


def of_rings(facts: ProgramFacts, assignment: Assignment) -> tuple[list[Held], list[Held]]:
    """The buffers of ops whose shards send arrays round (`autoshard.lower.ring`): those that are sent, and others.

    There are two of each array that goes round, one to compute with and one on its way; a copy of each operand whose halves change places;
    and two in float32 of each result that stays, before and after those of a block are added.
    """
    sent, others, sizes = list[Held](), list[Held](), assignment.mesh.sizes
    for op in facts.rings:
        rule, choice = facts.rules[op.index], assignment.choice(op.index)
        assert rule is not None, "shards send arrays round as it says"
        sends = [send for factor, _ in exchanges(rule, choice, sizes) for send in rule.factors[factor].sends]
        if not sends:
            continue
        n, lives = len(op.operands), (facts.lifetimes.starts[op.index], facts.lifetimes.ends[op.index])
        layouts = [operand_layout(rule, choice, k) for k in range(n)]
        layouts += [computed_layout(rule, choice, k) for k in range(len(op.results))]
        values = [facts.graph.values[value] for value in (*op.operands, *op.results)]
        nbytes = [value.nbytes / shards(layout, sizes) for value, layout in zip(values, layouts, strict=True)]
        round_ = {send.tensor for send in sends if send.kind == "ring"}
        moved = {send.tensor for send in sends if send.kind == "zigzag"}
        sent += [(2 * nbytes[k], *lives) for k in sorted(round_)]
        others += [(nbytes[k], *lives) for k in sorted(moved) if k < n]
        single = np.dtype("float32").itemsize
        others += 2 * [(nbytes[k] * single / values[k].itemsize, *lives) for k in range(n, len(values)) if k not in round_]
    return sent, others


def _expanded_rows(facts: ProgramFacts, assignment: Assignment) -> Iterator[Held]:
    """Bytes, birth and death of rows that are stored once for each group, from the first product that reads them to the last.

    Products that add up rows read them by group, all others by row: where several products read the same rows, these are stored in one of
    these orders, and once more for each product that reads them in the other one.
    """
    times, ops = facts.lifetimes, facts.graph.walk()
    found: dict[tuple[int, int], list[tuple[Op, float]]] = defaultdict(list)
    for index, grouped in facts.grouped.items():
        op, share = ops[index], _shares(facts, assignment, ops[index])
        for position in grouped.expanded:
            found[op.operands[position], op.operands[2]].append((op, grouped.groups * share(position)))
        if grouped.transposed:
            yield share(1), times.starts[index], times.ends[index]
    for readers in found.values():
        first, last = readers[0][0], readers[-1][0]
        yield max(nbytes for _, nbytes in readers), times.starts[first.index], times.ends[last.index]
        for op, nbytes in readers if len(readers) > 1 else ():
            if len(facts.grouped[op.index].expanded) == 1:
                yield nbytes, times.starts[op.index], times.ends[op.index]


def _shares(facts: ProgramFacts, assignment: Assignment, op: Op) -> Callable[[int], float]:
    """The bytes of a device's part of an operand, as the op reads it."""
    rule, choice, sizes = facts.rules[op.index], assignment.choice(op.index), assignment.mesh.sizes

    def share(position: int) -> float:
        nbytes = facts.graph.values[op.operands[position]].nbytes
        return nbytes if rule is None else nbytes / shards(operand_layout(rule, choice, position), sizes)

    return share
