"""Partial sums that are added up before they are combined: collectives of which compilers make fewer.

*Added.* A parameter that is used twice, as tied embeddings are, has two gradients, and all that happens to them is that they are added.
XLA combines their sum instead of each (``all-reduce-reassociate``, ``reduce-scatter-reassociate``: openxla/xla,
xla/hlo/transforms/collectives).

*Accumulated.* What a loop adds to a value that it only carries along, as a backward scan does with the gradient of a weight, is combined
once, after the loop (``while-loop-all-reduce-code-motion``, of the same folder), as wide as it is carried. What keeps the carried value
small stays inside: reduce_scatters, and all_reduces of which a slice is added, whose results are kept in another layout than they are made
in.

Both see through what only rearranges elements, additions not through all of it. They are of the pipelines of XLA:GPU (gpu_compiler.cc)
and XLA:TPU (compiled modules of libtpu 0.0.42), and not of XLA:CPU's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoshard.ir import Body, Graph, Holder, Op

LOOPS = ("scan", "while")

_SUMS = ("add", "add_any")
_FOLLOWERS = ("convert_element_type", "copy", "transpose")  # these carry their operand's layout
CARRIERS = (*_FOLLOWERS, "reshape", "squeeze")


@dataclass(frozen=True, slots=True)
class Addition:
    """An addition of two values that nothing else reads.

    Attributes:
        op: its index.
        sides: the ops that make the two; they may be additions themselves.
        between: the values on the way from those to it.
        widened: how many times a number of a side's bytes one of the sum has, or 1.
    """

    op: int
    sides: tuple[int, int]
    between: tuple[int, ...]
    widened: float


@dataclass(frozen=True, slots=True)
class PartialSums:
    """Where compilers may add partial sums before they combine them.

    Attributes:
        additions: in program order.
        accumulated: per op index, over how many trips of its innermost loop its result is added up unread; 1 where it is not.
        widened: per op index, how many times a number of such a result's bytes one of what the loop carries has, or 1.
        made_by: of such results, and what only carries them, the op.
    """

    additions: tuple[Addition, ...]
    accumulated: tuple[int, ...]
    widened: tuple[float, ...]
    made_by: Mapping[int, int]


def partial_sums(graph: Graph, readers: Sequence[Sequence[int]]) -> PartialSums:
    """What a program only adds up; linear in its size.

    Args:
        readers: per value, the op indices that read it.
    """
    ops = graph.walk()
    finder = _Finder(graph, readers)
    additions = {op.index: found for op in ops if op.primitive in _SUMS and (found := finder.addition(op))}
    accumulated, widened = [1] * len(ops), [1.0] * len(ops)
    for op in ops:
        if op.primitive in LOOPS:
            body = op.bodies[-1]
            carried = [holder for holder in op.holders if holder.value in body.inputs]
            added = [(maker, graph.values[holder.value].itemsize) for holder in carried for maker in finder.accumulated_in(holder, body)]
            while added:
                maker, itemsize = added.pop()
                accumulated[maker] = body.trips
                widened[maker] = max(1.0, itemsize / graph.values[ops[maker].results[0]].itemsize)
                added += [(side, itemsize) for side in additions[maker].sides] if maker in additions else []
    made_by = {value: op.index for op in ops if accumulated[op.index] > 1 for value in finder.carried(op.results[0])}
    return PartialSums(tuple(additions.values()), tuple(accumulated), tuple(widened), made_by)


def turned(product: Op, rank: int, made: int) -> tuple[int, ...]:
    """The order of a ``dot_general``'s dimensions in which its operands have changed places, by the first one's rank and its own."""
    (contracted, _), (batch, _) = product.params["dimension_numbers"]
    first = rank - len(contracted)  # the dimensions of the result that are the batch's and the first operand's
    return (*range(len(batch)), *range(first, made), *range(len(batch), first))


class _Finder:
    def __init__(self, graph: Graph, readers: Sequence[Sequence[int]]):
        self._readers = readers
        self._ops = graph.walk()
        self._values = graph.values
        self._makers = {value: op for op in self._ops for value in op.results}
        self._returned = frozenset(graph.results)

    def addition(self, op: Op) -> Addition | None:
        """An addition with both its sides, where each is made by an op for it alone."""
        sides, between = zip(*map(self._made, op.operands), strict=True)
        if None in sides or not all(map(self._adds_beside, between)):
            return None
        narrowest = min(self._values[values[-1]].itemsize for values in between)
        return Addition(op.index, sides, (*between[0], *between[1]), max(1.0, self._values[op.results[0]].itemsize / narrowest))

    def _adds_beside(self, between: tuple[int, ...]) -> bool:
        """Whether what is combined, and rearranged on this way, can be added as it is made.

        Not where it is rounded before (the sum would be rounded once), nor where it is transposed, but for a product that is plain or whose
        operands change places: the transpose becomes part of that before anything is partitioned (modules of libtpu 0.0.42).
        """
        maker, *rearranging = (self._makers[value] for value in reversed(between))
        values = self._values
        if any(values[op.results[0]].itemsize < values[op.operands[0]].itemsize for op in rearranging):
            return False
        transposes = [op for op in rearranging if op.primitive == "transpose"]
        if maker.primitive != "dot_general" or not transposes:
            return not transposes
        order = tuple(range(values[maker.results[0]].rank))
        for op in transposes:
            order = tuple(order[dim] for dim in op.params["permutation"]) if len(order) == len(op.params["permutation"]) else ()
        return not any(maker.params["dimension_numbers"][1]) or order == turned(maker, values[maker.operands[0]].rank, len(order))

    def accumulated_in(self, holder: Holder, body: Body) -> list[int]:
        """The ops whose results a loop does nothing with but add them to a value that it carries along."""
        kept = [flow.value for flow in holder.sources if flow.inside]
        if len(kept) != 1 or body.outputs.count(kept[0]) != 1:
            return []
        addition, _ = self._made(kept[0])
        if addition is None or self._ops[addition].primitive not in _SUMS or self._reader(holder.value) != addition:
            return []
        return [maker for maker, _ in map(self._made, self._ops[addition].operands) if maker is not None]

    def carried(self, value: int) -> list[int]:
        """A value of one reader, and what only carries it to where it is added."""
        found = [value]
        while (op := self._ops[self._readers[found[-1]][0]]).primitive in _FOLLOWERS:
            found.append(op.results[0])
        return found

    def _made(self, value: int) -> tuple[int | None, tuple[int, ...]]:
        """The op that computes a value for one reader, seen through what only rearranges it, and the values on the way."""
        between = []
        while len(self._readers[value]) == 1 and value not in self._returned:
            between.append(value)
            op = self._makers.get(value)
            if op is None or op.bodies:
                break
            if not self._rearranges(op):
                return op.index, tuple(between)
            value = op.operands[0]
        return None, ()

    def _reader(self, value: int) -> int | None:
        """The only reader of a value, seen through what only rearranges it."""
        while len(self._readers[value]) == 1:
            op = self._ops[self._readers[value][0]]
            if not self._rearranges(op):
                return op.index
            value = op.results[0]
        return None

    def _rearranges(self, op: Op) -> bool:
        """Whether an op changes no element of its first operand; a sum over dimensions of size one does not."""
        sums_nothing = op.primitive == "reduce_sum" and self._values[op.operands[0]].size == self._values[op.results[0]].size
        return op.primitive in CARRIERS or sums_nothing
