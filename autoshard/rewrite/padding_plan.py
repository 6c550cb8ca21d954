"""The plan of a program with padded dimensions: which dimensions of which values, and what is overwritten before each operation.

Some dimensions are given. Those that belong to them are found by the sharding rules: an operation's dimensions that are one factor of its
rule are padded together, where the operation takes that, and so are a loop's carries and what flows into them, and a result and the
argument that it replaces.

Between values whose padding differs, as where an operation takes none, padding is cut off and added: every plan is right.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from autoshard.ir import Graph, Op, Rule
from autoshard.lower.control_flow import FLOWS
from autoshard.lower.plan import holder_values
from autoshard.primitives import is_matrix
from autoshard.rewrite.extents import Extent, Extents, divided, merged, padded_size
from autoshard.rewrite.padding_contents import UNKNOWN, Content, Contents, Masks, Reading, after, made
from autoshard.rewrite.padding_masks import masks
from autoshard.rewrite.padding_rules import takes

PASSES = 8  # until what is known of a loop's carries no longer changes; then nothing is


@dataclass(frozen=True, slots=True)
class Move:
    """How an operation runs with padding.

    Attributes:
        reads, makes: the extents in which it reads its operands, and makes its results.
        masks: what of the operands is overwritten before.
    """

    reads: tuple[Extents, ...]
    makes: tuple[Extents, ...]
    masks: Masks


@dataclass(frozen=True, slots=True, eq=False)
class Plan:
    """The padding of a program.

    Attributes:
        extents: of each value with padding.
        moves: per op index, of operations that run with padding.
        views: per value that shares a holder's extents, the holder's value.
    """

    graph: Graph
    extents: Mapping[int, Extents]
    moves: Mapping[int, Move]
    views: Mapping[int, int]

    def of(self, value: int) -> Extents:
        """The extents of a value."""
        found = self.extents.get(owner(self.views, value))
        return found if found is not None else ((),) * self.graph.values[value].rank

    def flows(self, op: Op) -> Any:
        """The extents of a control-flow op's operands, and of its bodies' inputs and outputs."""
        return FLOWS[op.primitive](op, self.of, _shifted)


def owner(views: Mapping[int, int], value: int) -> int:
    """The value whose extents a value has."""
    while value in views:
        value = views[value]
    return value


def _shifted(extents: Any, by: int) -> Any:
    """The extents of an array with more leading dimensions, or fewer; none is padded, since a loop goes along it."""
    return ((),) * by + extents if by >= 0 else extents[-by:]


def plan_padding(graph: Graph, rules: Sequence[Rule | None], given: Mapping[tuple[int, int], Extent]) -> Plan:
    """The plan in which the given dimensions, by value and position, have these extents; linear in the size of the program."""
    links = Links(graph, rules)
    plan = Plan(graph, links.spread(given), {}, links.views)
    return replace(plan, moves=_Reader(plan, rules).moves())


# -- which dimensions ----------------------------------------------------------------------------------------------------------


class Links:
    """What belongs to what in a program.

    Attributes:
        ops: per value the operations without bodies that read or make it.
        views: per value that shares a holder's extents, the holder's value.
    """

    def __init__(self, graph: Graph, rules: Sequence[Rule | None]):
        self.graph, self.rules = graph, rules
        self.views = views = holder_values(graph)
        self.fixed: set[int] = {*graph.constants, *graph.literals}
        self.ops: dict[int, list[Op]] = {}
        self.links: dict[int, list[tuple[int, int]]] = {}  # per value others with their number of further leading dimensions
        for op in graph.walk():
            if not op.bodies:
                for value in dict.fromkeys((*op.operands, *op.results)):
                    self.ops.setdefault(owner(views, value), []).append(op)
            for holder in op.holders:
                for flow in holder.sources:
                    self._link(holder.value, flow.value, flow.shift)
        for result, argument in graph.aliases:
            self._link(graph.results[result], graph.arguments[argument], 0)

    def _link(self, one: int, other: int, shift: int) -> None:
        one, other = owner(self.views, one), owner(self.views, other)
        self.links.setdefault(one, []).append((other, shift))
        self.links.setdefault(other, []).append((one, -shift))

    def spread(self, given: Mapping[tuple[int, int], Extent]) -> dict[int, Extents]:
        """The extents of all values that belong to the given dimensions; linear in these."""
        spread = _Spread(self)
        for (value, dim), of in given.items():
            spread.put(value, dim, of)
        return spread.run()


class _Spread:
    """Extents on their way through a program.

    Attributes:
        found: per value the extents of its dimensions.
    """

    def __init__(self, links: Links):
        self.links, self.graph, self.rules, self.views = links, links.graph, links.rules, links.views
        self.found: dict[int, list[Extent]] = {}
        self.waiting: deque[int] = deque()

    def put(self, value: int, dim: int, of: Extent) -> None:
        """Pads a dimension, unless it is padded as much already."""
        value = owner(self.views, value)
        whole = self.graph.values[value]
        if value in self.links.fixed or not of or whole.dtype.startswith("key"):
            return
        dims = self.found.setdefault(value, [()] * whole.rank)
        if padded_size(whole.shape[dim], of) > padded_size(whole.shape[dim], dims[dim]):
            dims[dim] = of
            self.waiting.append(value)

    def run(self) -> dict[int, Extents]:
        """Pads what belongs to what is padded."""
        while self.waiting:
            value = self.waiting.popleft()
            for other, shift in self.links.links.get(value, ()):
                for dim, of in enumerate(self.found[value]):
                    if 0 <= dim + shift < self.graph.values[other].rank:
                        self.put(other, dim + shift, of)
            for op in self.links.ops.get(value, ()):
                self._through(op)
        return {value: tuple(found) for value, found in self.found.items()}

    def _through(self, op: Op) -> None:
        rule = self.rules[op.index]
        if rule is None:
            return
        factors = padded_factors(self.graph, op, rule, lambda value: self.found.get(owner(self.views, value)))
        for value, dims in zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=True):
            for dim, of in enumerate(_of_factors(rule, dims, factors)):
                self.put(value, dim, of)


def padded_factors(graph: Graph, op: Op, rule: Rule, extents: Any) -> dict[int, Extent]:
    """The extents of an operation's factors that are padded in one of its operands or results, and which it takes so.

    Args:
        extents: of a value by its number; None where it has no padding.
    """
    found: dict[int, Extent] = {}
    for value, dims in zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=True):
        for of, factors in zip(extents(value) or (), dims, strict=False):
            parts = divided(of, [rule.factors[f].size for f in factors]) if of else None
            for factor, part in zip(factors, parts or (), strict=False):
                size = rule.factors[factor].size
                if part and padded_size(size, part) > padded_size(size, found.get(factor, ())) and takes(graph, op, rule, factor, part):
                    found[factor] = part
    return found


def _of_factors(rule: Rule, dims: Sequence[Sequence[int]], factors: Mapping[int, Extent]) -> Extents:
    """The extents of a tensor whose factors have these."""
    return tuple(merged([factors.get(f, ()) for f in each], [rule.factors[f].size for f in each]) for each in dims)


# -- what is overwritten -------------------------------------------------------------------------------------------------------


class _Reader:
    """Reads a program in order, and says of each operation with padding how it runs.

    Attributes:
        contents: what is in the padding of each value.
    """

    def __init__(self, plan: Plan, rules: Sequence[Rule | None]):
        self.plan, self.rules, self.graph = plan, rules, plan.graph
        self.contents: dict[int, Contents] = {}
        self.found: dict[int, Move] = {}
        written = dict(zip(self.graph.literals, self.graph.written, strict=False))
        self.written = {value: x for value, x in written.items() if np.ndim(x) == 0 and np.asarray(x).dtype.kind in "biuf"}

    def moves(self) -> dict[int, Move]:
        for op in self.graph.ops:
            self._op(op)
        self._share()
        return self.found

    def _share(self) -> None:
        """Has all products that read a value read it with the same zeros, so that it is stored once."""
        products = [op for op in self.graph.walk() if op.index in self.found and is_matrix(op.primitive)]
        zeros: dict[tuple[int, Extents], dict[tuple[int, Any], None]] = {}
        for op in products:
            move = self.found[op.index]
            for tensor, dim, value in move.masks:
                zeros.setdefault((op.operands[tensor], move.reads[tensor]), {})[dim, value] = None
        for op in products:
            move = self.found[op.index]
            both = enumerate(zip(op.operands, move.reads, strict=True))
            shared = tuple((k, dim, value) for k, read in both for dim, value in zeros.get(read, ()))
            self.found[op.index] = replace(move, masks=shared)

    def _content(self, value: int) -> Contents:
        value = owner(self.plan.views, value)
        return self.contents.get(value) or (UNKNOWN,) * self.graph.values[value].rank

    def _put(self, value: int, contents: Contents) -> None:
        if any(content != UNKNOWN for content in contents):
            self.contents[owner(self.plan.views, value)] = contents
        else:
            self.contents.pop(owner(self.plan.views, value), None)

    def _converted(self, value: int, want: Extents) -> Contents:
        """What is in a value's padding once it has these extents: new padding is of zeros."""
        return _converted(self._content(value), self.plan.of(value), want)

    def _op(self, op: Op) -> None:
        if op.bodies:
            self._with_bodies(op)
            return
        rule, plan = self.rules[op.index], self.plan
        around = (*op.operands, *op.results)
        if rule is None or op.mapped or not any(any(plan.of(value)) for value in around):
            return
        factors = padded_factors(self.graph, op, rule, plan.of)
        reads = tuple(_of_factors(rule, dims, factors) for dims in rule.operands)
        makes = tuple(_of_factors(rule, dims, factors) for dims in rule.results)
        contents = [self._converted(value, want) for value, want in zip(op.operands, reads, strict=True)]
        dtypes = [self.graph.values[value].dtype for value in op.operands]
        written = [self.written.get(value) for value in op.operands]
        reading = Reading(op, rule, reads, makes, contents, written, dtypes)
        found = masks(reading)
        self.found[op.index] = Move(reads, makes, found)
        masked = Reading(op, rule, reads, makes, after(contents, reads, found), written, dtypes)
        for value, have, content in zip(op.results, makes, made(masked, contents), strict=True):
            self._put(value, _converted(content, have, plan.of(value)))

    def _with_bodies(self, op: Op) -> None:
        """Reads the bodies of an op until what is known of its holders no longer changes."""
        entering: dict[int, Contents] = {}
        for k in range(PASSES + 1):
            for holder in op.holders:
                sources = [flow for flow in holder.sources if k or not flow.inside]
                known = [self._through(flow.value, flow.shift, holder.value) for flow in sources]
                if known:
                    joined = _joined(known)
                    self._put(holder.value, joined if k < PASSES else (UNKNOWN,) * len(joined))
            now = {holder.value: self._content(holder.value) for holder in op.holders}
            if k and now == entering:
                return
            entering = now
            for body in op.bodies:
                for inner in body.ops:
                    self._op(inner)

    def _through(self, value: int, shift: int, to: int) -> Contents:
        """What is in a value's padding once it has flowed into a holder."""
        contents, have = self._content(value), self.plan.of(value)
        if shift > 0:
            contents, have = contents[shift:], have[shift:]
        elif shift < 0:
            contents, have = (UNKNOWN,) * -shift + contents, ((),) * -shift + have
        return _converted(contents, have, self.plan.of(to))


def _converted(contents: Contents, have: Extents, want: Extents) -> Contents:
    changed = [dim for dim, (before, now) in enumerate(zip(have, want, strict=True)) if before != now]
    found = list(contents)
    for dim in changed:
        for other in range(len(found)):
            if other != dim and found[other].value is not None and found[other].value != 0:
                found[other] = Content(None, found[other].uniform)
        found[dim] = Content(0) if want[dim] else UNKNOWN
    return tuple(found)


def _joined(several: Sequence[Contents]) -> Contents:
    found = several[0]
    for other in several[1:]:
        found = tuple(one.joined(another) for one, another in zip(found, other, strict=True))
    return found
