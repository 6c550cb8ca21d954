"""Partial sums that are added up before they are combined, so that one collective is enough for several.

*Added.* A parameter that is used twice, as tied embeddings are, has two gradients that are only added: their sum is combined instead of
each, by an all_reduce or a reduce_scatter.

*Accumulated.* Partial sums that a scan adds to a value that it only carries, as a backward scan does with the gradient of a weight, are
added up partial, and all_reduced once, after the loop, as wide as they are carried. A reduce_scatter stays inside the loop: a device then
has to carry its own part alone. So are partial sums that a loop inside that one stacks up, as a backward scan over layers does with their
gradients in a loop over microbatches: one all_reduce then combines those of all layers.

Both reach through ops that only rearrange, scale, mask or widen elements, where their results are read in no other layout than they are
made in.
XLA does the like where it sees fit (``all-reduce-reassociate``, ``reduce-scatter-reassociate``, ``while-loop-all-reduce-code-motion``:
openxla/xla, xla/hlo/transforms/collectives), but not with what `autoshard.lower.manual` combines: a barrier stands behind each combination.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from autoshard.cost.reshard import Combination, combinations
from autoshard.ir import Assignment, Graph, Holder, Op, Rule, computed_layout, operand_layout, reductions, result_layout, shift_layout
from autoshard.ir.scan import num_carry
from autoshard.primitives import is_addition, linear


@dataclass(frozen=True, slots=True)
class Addition:
    """An addition of two values that nothing else reads.

    Attributes:
        op: its index.
        sides: the ops that make the two; they may be additions themselves.
        between: per side the values on the way from the addition to that op.
    """

    op: int
    sides: tuple[int, int]
    between: tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Accumulation:
    """An addition to a value that a scan only carries along.

    Attributes:
        holder: the value that is carried.
        side: the op that makes the summand.
        between: the values on the way from the addition to that op.
        carrying: those from the carried value to the addition, and from there to the next trip.
        widened: how many times the side's bytes the carried value has: its numbers may be wider, and there may be one for each trip of a
            loop inside.
    """

    holder: int
    side: int
    between: tuple[int, ...]
    carrying: tuple[int, ...]
    widened: float


@dataclass(frozen=True, slots=True)
class PartialSums:
    """Where partial sums may be added before they are combined.

    Attributes:
        additions: in program order.
        accumulations: innermost loops' too.
        accumulated: per op index, how often it runs while its result is only added up, if the layouts on the way are its own; else 1.
            Searches divide the cost of its combination by that.
        over: the same, whatever is on the way.
        widened: per op index, how many times such a result's bytes the loop's carry has, or 1.
        made_by: per such result, and per value that it only passes through, the op that makes it.
        ways: the values on the way to additions, and those that are carried.
        makers: per such value the op that makes it; a loop's carry has none.
        stacked: per such value that a loop stacks up, what the loop's body makes of it in a trip.
    """

    additions: tuple[Addition, ...]
    accumulations: tuple[Accumulation, ...]
    accumulated: tuple[int, ...]
    over: tuple[int, ...]
    widened: tuple[float, ...]
    made_by: Mapping[int, int]
    ways: frozenset[int]
    makers: Mapping[int, int]
    stacked: Mapping[int, int]


def partial_sums(graph: Graph, readers: Sequence[Sequence[int]]) -> PartialSums:
    """The partial sums that a program only adds up; linear in its size.

    Args:
        readers: per value, the op indices that read it.
    """
    ops = graph.walk()
    finder = _Finder(graph, readers)
    sums = [op for op in ops if is_addition(op.primitive)]
    additions = {op.index: found for op in sums if (found := finder.addition(op))}
    accumulations = []
    accumulated, over, widened = [1] * len(ops), [1] * len(ops), [1.0] * len(ops)
    for op in ops:
        if op.primitive == "scan" and op.bodies[0].trips > 1:
            body = op.bodies[0]
            found = [one for holder in op.holders if holder.value in body.inputs and (one := finder.accumulation(op, holder))]
            accumulations += found
            added = [(one.side, one.widened, finder.follows(one.between)) for one in found]
            while added:
                maker, wider, follows = added.pop()
                over[maker], widened[maker] = ops[maker].trips // op.trips, wider
                accumulated[maker] = over[maker] if follows else 1
                if (inner := additions.get(maker)) is not None:
                    ways = zip(inner.sides, inner.between, strict=True)
                    added += [(side, wider, follows and finder.follows(way)) for side, way in ways]
    made_by = {value: op.index for op in ops if accumulated[op.index] > 1 for value in finder.carried(op.results[0])}
    ways = {v for one in additions.values() for way in one.between for v in way}
    ways |= {v for one in accumulations for v in (*one.between, *one.carrying)}
    makers = {value: op.index for op in ops if not op.bodies for value in op.results if value in ways}
    stacked = {value: inner for op in ops for value in op.results if value in ways and (inner := finder.stacked(op, value)) is not None}
    per_op = tuple(accumulated), tuple(over), tuple(widened)
    return PartialSums(tuple(additions.values()), tuple(accumulations), *per_op, made_by, frozenset(ways), makers, stacked)


# -- which of them an assignment adds first ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Late:
    """The partial sums of a program that an assignment adds before it combines them.

    Attributes:
        values: those that stay partial.
        additions: the indices of the additions both of whose sides do.
        loops: per value that a scan carries partial, the mesh axes over which it is combined after the loop.
        once: the ops whose partial sums those are.
    """

    values: frozenset[int]
    additions: frozenset[int]
    loops: Mapping[int, tuple[int, ...]]
    once: frozenset[int]


def late_sums(graph: Graph, rules: Sequence[Rule | None], assignment: Assignment, sums: PartialSums) -> Late:
    """The values that stay partial until they are added up: one collective combines each, and none is read in another layout on its way."""
    return _Late(graph, rules, assignment, sums).found()


def carried_move(move: Combination, op: Op, layout: tuple[int, ...]) -> Combination:
    """The move that combines an op's result, of the one that combines its operand; ``layout`` is the result's."""
    kind, operator, axes, before, after = move
    if op.primitive == "transpose":
        where = {dim: new for new, dim in enumerate(op.params["permutation"])} | {-1: -1}
        return kind, operator, axes, tuple(where[dim] for dim in before), tuple(where[dim] for dim in after)
    return move if kind != "all_reduce" else (kind, operator, axes, layout, layout)


class _Late:
    def __init__(self, graph: Graph, rules: Sequence[Rule | None], assignment: Assignment, sums: PartialSums):
        self.rules, self.assignment, self.sums = rules, assignment, sums
        self.ops = graph.walk()
        self.pending: dict[int, Combination] = {}  # per addition the move that combines it

    def found(self) -> Late:
        values: set[int] = set()
        loops: dict[int, tuple[int, ...]] = {}
        sides: dict[int, tuple[int, int]] = {}
        once: set[int] = set()
        for one in self.sums.additions:
            moves = [self._move(side, way) for side, way in zip(one.sides, one.between, strict=True)]
            if moves[0] is not None and moves[0] == moves[1] and self._as_it_is(self.ops[one.op]):
                values.update(*one.between)
                self.pending[one.op], sides[one.op] = moves[0], one.sides
        for one in self.sums.accumulations:
            move = self._move(one.side, one.between)
            ways = [self.ops[self.sums.makers[value]] for value in one.carrying if value in self.sums.makers]
            if move is not None and move[0] == "all_reduce" and all(map(self._as_it_is, ways)):
                values.update(one.between, one.carrying)
                loops[one.holder] = move[2]
                made = [one.side]
                while made:
                    once.add(op := made.pop())
                    made += sides.get(op, ())
        return Late(frozenset(values), frozenset(self.pending), loops, frozenset(once))

    def _move(self, side: int, way: tuple[int, ...]) -> Combination | None:
        """The one move that combines an op's result at the end of the way, where an addition reads it; None where there is no such one."""
        move = self.pending.get(side) or self._combined(self.ops[side])
        layout = self.assignment.layout
        for value in reversed(way[:-1]):
            if (inner := self.sums.stacked.get(value)) is not None:
                if move is None or move[0] != "all_reduce" or shift_layout(layout(value), -1) != layout(inner):
                    return None
                move = (*move[:3], layout(value), layout(value))
                continue
            op = self.ops[self.sums.makers[value]]
            of_parts = linear(op.primitive) == "carries"  # the other operand of a scaling is split as the sum will be
            if move is None or not self._as_it_is(op) or not (of_parts or move[0] == "all_reduce"):
                return None
            move = carried_move(move, op, layout(value))
        return move

    def _combined(self, op: Op) -> Combination | None:
        rule, choice = self.rules[op.index], self.assignment.choice(op.index)
        if rule is None or len(op.results) != 1 or result_layout(rule, choice, 0) != self.assignment.layout(op.results[0]):
            return None
        sizes = self.assignment.mesh.sizes
        partial = [each for each in reductions(rule, choice) if sizes[each[0]] > 1]
        moves = tuple(combinations(computed_layout(rule, choice, 0), partial))
        return moves[0] if len(moves) == 1 and moves[0][1] == "sum" else None

    def _as_it_is(self, op: Op) -> bool:
        """Whether an op reads and makes summands in their own layouts."""
        rule, choice, layout = self.rules[op.index], self.assignment.choice(op.index), self.assignment.layout
        if rule is None or reductions(rule, choice):
            return False
        read = all(operand_layout(rule, choice, k) == layout(value) for k, value in enumerate(op.operands) if value in self.sums.ways)
        return read and result_layout(rule, choice, 0) == layout(op.results[0])


class _Finder:
    def __init__(self, graph: Graph, readers: Sequence[Sequence[int]]):
        self._readers = readers
        self._ops = graph.walk()
        self._values = graph.values
        self._makers = {value: op for op in self._ops for value in op.results}
        self._returned = frozenset(graph.results)
        self._zeros = graph.zeros
        self._trips = {value: op.trips for op in self._ops for value in op.results}
        self._trips |= {value: op.trips * body.trips for op in self._ops for body in op.bodies for value in body.inputs}

    def addition(self, op: Op) -> Addition | None:
        """An addition with both its sides, where each is made by an op for it alone."""
        (one, first), (other, second) = map(self.made, op.operands)
        made = op.results[0]
        if one is None or other is None or not (self._keeps((made, *first), False) and self._keeps((made, *second), False)):
            return None
        return Addition(op.index, (one, other), (first, second))

    def _keeps(self, way: tuple[int, ...], widened: bool) -> bool:
        """Whether a way's values, the last one first, have as many elements in all trips, which are widened at most, if they may be.

        Parts would be rounded each, not once their sum; and one number that is added to many elements would become many partial sums.
        """
        values = [self._values[value] for value in reversed(way)]
        widths = [value.itemsize for value in values]
        keep = all(after >= before if widened else after == before for before, after in pairwise(widths))
        return keep and len({self._values[value].size * self._trips[value] for value in way}) == 1

    def accumulation(self, loop: Op, holder: Holder) -> Accumulation | None:
        """The partial sum that a loop only adds to a carry; None where there is none."""
        body = loop.bodies[0]
        kept = [flow.value for flow in holder.sources if flow.inside]
        if len(kept) != 1 or body.outputs.count(kept[0]) != 1 or not set(holder.views) <= set(loop.results):
            return None
        addition, after = self.made(kept[0])
        entering, reader = self._onwards(holder.value)
        if addition is None or not is_addition(self._ops[addition].primitive) or reader != addition:
            return None
        added = [value for value in self._ops[addition].operands if value != entering[-1]]
        side, way = self.made(added[0], opens=True) if len(added) == 1 else (None, ())
        if side is None or not self._keeps((*after, *way), True) or not self._keeps((*after, *reversed(entering)), True):
            return None
        widened = self._values[holder.value].nbytes / self._values[self._ops[side].results[0]].nbytes
        return Accumulation(holder.value, side, way, (*entering, *after), widened)

    def follows(self, way: tuple[int, ...]) -> bool:
        """Whether all values on a way have the layout of the first."""
        return all(self._makers[value].bodies or self._is_elementwise(self._makers[value]) for value in way[:-1])

    def carried(self, value: int) -> list[int]:
        """A value of one reader, and the values that it passes through until it is added."""
        found = [value]
        while True:
            op = self._ops[self._readers[found[-1]][0]]
            if op.primitive == "scan" and found[-1] in op.bodies[0].outputs:
                found.append(op.results[op.bodies[0].outputs.index(found[-1])])
            elif self._carried(op) == found[-1] and self._is_elementwise(op):
                found.append(op.results[0])
            else:
                return found

    def made(self, value: int, opens: bool = False) -> tuple[int | None, tuple[int, ...]]:
        """The op that computes a value for one reader, seen through ops that pass partial sums on, and the values on the way.

        Args:
            opens: whether it may be in the body of a loop that stacks up what it makes.
        """
        between = []
        while len(self._readers[value]) == 1 and value not in self._returned:
            between.append(value)
            op = self._makers.get(value)
            if op is None:
                break
            through = (self.stacked(op, value) if opens else None) if op.bodies else self._carried(op)
            if through is None:
                return (None, ()) if op.bodies else (op.index, tuple(between))
            value = through
        return None, ()

    def stacked(self, op: Op, value: int) -> int | None:
        """The value of a loop's body of whose trips a result is the stack; None where it is none."""
        if op.primitive != "scan" or value in op.results[: num_carry(op.params)]:
            return None
        outputs = op.bodies[0].outputs
        inner = outputs[op.results.index(value)]
        return inner if outputs.count(inner) == 1 else None

    def _onwards(self, value: int) -> tuple[list[int], int | None]:
        """A value and those that it passes through, with the only reader of the last."""
        way = [value]
        while len(self._readers[way[-1]]) == 1:
            op = self._ops[self._readers[way[-1]][0]]
            if op.bodies or self._carried(op) != way[-1]:
                return way, op.index
            way.append(op.results[0])
        return way, None

    def _carried(self, op: Op) -> int | None:
        """The operand that an op makes its result of element by element, if partial sums of it make partial sums of the result."""
        if self._rounds(op):
            return None
        if op.primitive == "select_n":  # a mask, where all other elements are zeros
            kept = [value for value in op.operands[1:] if value not in self._zeros]
            return kept[0] if len(kept) == 1 else None
        if linear(op.primitive) == "scales":
            first, second = op.operands
            scaled = [(first, second), (second, first)] if op.primitive == "mul" else [(first, second)]
            found = [value for value, by in scaled if value != by and self._is_number(by)]
            return next((value for value in found if not self._is_number(value) or value in self._makers), None)
        sums_nothing = op.primitive == "reduce_sum" and self._values[op.operands[0]].size == self._values[op.results[0]].size
        return op.operands[0] if linear(op.primitive) in ("carries", "regroups") or sums_nothing else None

    def _rounds(self, op: Op) -> bool:
        """Whether an op rounds to whole numbers: those of parts would add up to another sum."""
        whole = [self._values[value].dtype.lstrip("u").startswith("int") for value in (op.operands[:1] + op.results[:1])]
        return (op.primitive == "convert_element_type" and whole == [False, True]) or (op.primitive == "div" and any(whole))

    def _is_elementwise(self, op: Op) -> bool:
        """Whether an op that passes partial sums on has the layout of its operand."""
        return linear(op.primitive) in ("carries", "scales") or op.primitive == "select_n"

    def _is_number(self, value: int) -> bool:
        """Whether all elements of a value are one number."""
        maker = self._makers.get(value)
        spread = maker is not None and maker.primitive == "broadcast_in_dim" and not self._values[maker.operands[0]].rank
        return spread or not self._values[value].rank
