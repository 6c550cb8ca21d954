"""Which arguments may hold examples: the batch of a step, apart from the state that it updates.

A step that returns something of its batch's shape, such as a reconstruction, looks as if it replaced the batch. State and batch differ in
how a result depends on the argument that it may replace:

- The result depends on single *rows*: row ``i`` on row ``i`` of the argument alone, and of what else may hold examples. So it is with
  examples, and with what belongs to each, such as the state of simulated environments. It is not with weights: the new ones depend on the
  old ones all together, by the loss.
- The argument is *updated*: the result is computed of it element by element, as optimizers add to weights and decay moments. What depends
  on rows all together and is no update, such as the result of layers with batch normalisation, is of examples where its rows are theirs.
- The result does not depend on the argument: that it has its shape is a coincidence.

An argument is state as a whole if one of its leaves is, and so is one that is donated.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

from autoshard.ir import Factor, Flow, Graph, Op, Rule
from autoshard.primitives import is_scatter
from autoshard.rules import rule_of

DIMS = (0, 1)  # those along which a batch is looked for
TIME_MAJOR = 3  # dimensions at least of what is of examples along dimension 1, since columns of weights may not depend on each other
LEAVES = 16  # of an argument, the largest, that decide what it is
PASSES = 4  # through a loop's body, until what a trip hands to the next no longer changes

Positions = tuple[frozenset[int], frozenset[int]]
"""Positions of arguments, for dimension 0 and for dimension 1."""


def examples(graph: Graph, rules: Callable[[], Sequence[Rule | None]], roots: Sequence[Hashable]) -> Positions:
    """The arguments that may hold examples along dimension 0, and along dimension 1.

    Where there are none, those of state whose rows do not depend on each other, such as environments that a step carries along. Linear in
    the size of the program.

    Args:
        rules: gives those of all ops; not called where donation says it all.
        roots: per position of a leaf what it is a leaf of, such as the number of the argument.
    """
    replaced = {argument: result for result, argument in graph.aliases}
    donated = {roots[position] for position in graph.donated}
    values = [graph.values[value] for value in graph.arguments]
    found = [{k for k, value in enumerate(values) if k not in replaced and value.rank > dim} for dim in DIMS]
    members: dict[Hashable, list[int]] = {}
    for k in sorted(replaced, key=lambda k: -values[k].size):
        if roots[k] not in donated:
            members.setdefault(roots[k], []).append(k)
    several = {root for root, leaves in members.items() if len(leaves) > 1}
    kinds = _kinds(graph, rules, replaced, [k for leaves in members.values() for k in leaves[:LEAVES]], roots, several)
    for dim in DIMS:
        own = {k for k, each in kinds.items() if each[dim]}
        alike = {(roots[k], values[k].shape[dim]) for k in own}
        more = (k for leaves in members.values() for k in leaves[LEAVES:] if values[k].rank > dim)
        found[dim] |= own | {k for k in more if (roots[k], values[k].shape[dim]) in alike}
    if all(_is_key(graph, k) for each in found for k in each):
        leaves = [k for k in sorted(replaced, key=lambda k: -values[k].size)[: 4 * LEAVES] if values[k].rank]
        kinds = _kinds(graph, rules, replaced, leaves, range(len(roots)), {*range(len(roots))})
        for dim in DIMS:
            found[dim] |= {k for k, each in kinds.items() if each[dim]}
    return frozenset(found[0]), frozenset(found[1])


def _is_key(graph: Graph, position: int) -> bool:
    """Whether an argument is the bits of a random key alone."""
    value = graph.arguments[position]
    readers = [op.primitive for op in graph.ops if value in op.operands]
    return graph.values[value].dtype == "uint32" and bool(readers) and all(name == "random_wrap" for name in readers)


def _kinds(
    graph: Graph,
    rules: Callable[[], Sequence[Rule | None]],
    replaced: Mapping[int, int],
    leaves: Sequence[int],
    roots: Sequence[Hashable],
    several: Set[Hashable],
) -> dict[int, tuple[bool, bool]]:
    """Per leaf whether it may hold examples along dimension 0, and along dimension 1; neither of all leaves of an argument that is state.

    Args:
        leaves: the positions that are asked for.
        several: the roots whose leaves are matched by their place in a tree.
    """
    if not leaves:
        return {}
    flow = _Dependences(graph, rules(), [(k, dim) for k in leaves for dim in DIMS], roots)
    flow.run()
    state: set[Hashable] = set()
    open_ = list(leaves)
    found: dict[int, tuple[bool, bool]] = {}
    while open_:
        results = {k: graph.results[replaced[k]] for k in open_}
        found = {k: (each[0], each[1]) for k in open_ if (each := [flow.is_of_examples(k, dim, results[k], state) for dim in DIMS])}
        new = {roots[k] for k, each in found.items() if graph.values[graph.arguments[k]].rank and not any(each)}
        for root in {roots[k] for k in open_} & several:
            own = [k for k in open_ if roots[k] == root]
            if all(flow.is_apart(k, results[k]) for k in own):
                new.add(root)  # its place in the tree is all there is to tell
        if not new:
            break
        state |= new
        open_ = [k for k in open_ if roots[k] not in state]
    return {k: each for k, each in found.items() if k in open_}


@dataclass(slots=True)
class _Fact:
    """What is known of a value, as sets of bits: a bit of each seed, an argument and its dimension, or of each root and dimension.

    Attributes:
        rows: per dimension the seeds whose rows it has along it.
        mixed: the seeds on which it depends otherwise.
        joined: per dimension the arguments' dimensions that it comes of.
        kept: the seeds that it is computed of element by element.
    """

    rows: list[int]
    joined: list[int]
    mixed: int = 0
    kept: int = 0

    def state(self) -> tuple:
        return (*self.rows, *self.joined, self.mixed, self.kept)

    def settle(self) -> None:
        """Counts seeds whose rows are along two dimensions as mixed."""
        seen = self.mixed
        for dim, rows in enumerate(self.rows):
            self.mixed |= rows & seen
            seen |= rows
            self.rows[dim] = rows
        self.rows = [rows & ~self.mixed for rows in self.rows]


@dataclass(slots=True)
class _Dependences:
    """The dependences of a program's values on its arguments, found in one pass in program order."""

    graph: Graph
    rules: Sequence[Rule | None]
    seeds: Sequence[tuple[int, int]]
    roots: Sequence[Hashable]
    facts: dict[int, _Fact] = field(default_factory=dict)
    numbers: dict[Hashable, int] = field(default_factory=dict)
    of_size: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = self.graph.values
        for root in self.roots:
            self.numbers.setdefault(root, len(self.numbers))
        for k, value in enumerate(self.graph.arguments):
            dims = [1 << (3 * self.numbers[self.roots[k]] + min(dim, 2)) for dim in range(values[value].rank)]
            self.facts[value] = _Fact([0] * values[value].rank, dims)
        for bit, (k, dim) in enumerate(self.seeds):
            value = self.graph.arguments[k]
            fact, shape = self.facts[value], values[value].shape
            fact.kept |= 1 << bit
            if dim < len(shape):
                fact.rows[dim] |= 1 << bit
                self.of_size[shape[dim]] = self.of_size.get(shape[dim], 0) | 1 << bit

    def run(self) -> None:
        for op in self.graph.ops:
            self._op(op)

    def is_of_examples(self, k: int, dim: int, result: int, state: Set[Hashable]) -> bool:
        """Whether the result that may replace an argument leaves open that it holds examples along a dimension.

        Args:
            state: the roots that hold none.
        """
        fact = self._fact(result)
        if dim >= len(fact.rows):
            return False
        if self.is_apart(k, result):
            return True
        if dim and len(fact.rows) < TIME_MAJOR:
            return False
        bit, own = 1 << self.seeds.index((k, dim)), 1 << (3 * self.numbers[self.roots[k]] + dim)
        beside = fact.joined[dim]
        allowed = sum(1 << (3 * number + dim) for other, number in self.numbers.items() if other not in state)
        if not beside & own or beside & ~allowed:
            return False
        return bool(fact.rows[dim] & bit) or not fact.kept & bit

    def is_apart(self, k: int, result: int) -> bool:
        """Whether a result does not depend on an argument at all."""
        fact, bits = self._fact(result), sum(1 << bit for bit, (at, _) in enumerate(self.seeds) if at == k)
        return not any((fact.mixed | fact.kept | each) & bits for each in (0, *fact.rows))

    # -- facts ---------------------------------------------------------------------------------------------------------------

    def _fact(self, value: int) -> _Fact:
        rank = self.graph.values[value].rank
        return self.facts.get(value) or _Fact([0] * rank, [0] * rank)

    def _op(self, op: Op) -> None:
        if op.bodies:
            self._with_bodies(op)
            return
        rule = self._rule(op)
        reads = [self._fact(value) for value in op.operands]
        for number, value in enumerate(op.results):
            rank = self.graph.values[value].rank
            made = _Fact([0] * rank, [0] * rank)
            for place, read in enumerate(reads):
                if rule is None:
                    made.mixed |= read.mixed
                    for rows in read.rows:
                        made.mixed |= rows
                else:
                    self._through(op, rule, place, number, read, made)
            made.settle()
            self.facts[value] = made

    def _rule(self, op: Op) -> Rule | None:
        """The rule of an op; in a user's `shard_map` that on one device's arrays, which are of whole examples."""
        if not op.mapped:
            return self.rules[op.index]
        operands, results = (tuple(self.graph.values[value] for value in side) for side in (op.operands, op.results))
        if op.primitive in ("shard_map", "pvary"):  # takes arrays apart, or puts them together
            dims = tuple((dim,) for dim in range(operands[0].rank))
            return Rule(tuple(map(Factor, operands[0].shape)), (dims,), (dims,))
        return rule_of(op.primitive, op.params, operands, results)

    def _through(self, op: Op, rule: Rule, place: int, number: int, read: _Fact, made: _Fact) -> None:
        """Adds what a result has by one operand."""
        dims, results = rule.operands[place], rule.results[number]
        at = {factors[0]: dim for dim, factors in enumerate(results) if factors}
        made.mixed |= read.mixed
        for dim, factors in enumerate(dims):
            rows, joined = read.rows[dim], read.joined[dim]
            to = at.get(factors[0]) if factors else None
            factor = rule.factors[factors[0]] if factors else None
            if factor is None or to is None:
                made.mixed |= rows
                continue
            is_free = factor.kind == "pass_through" and not factor.sends
            passes = rows & (-1 if op.mapped else self.of_size.get(factor.size, 0)) if is_free else 0
            made.rows[to] |= passes
            made.mixed |= rows & ~passes
            made.joined[to] |= joined if factor.kind == "pass_through" else 0
        same = [self.graph.values[value].shape for value in (op.operands[place], op.results[number])]
        in_place = place == 0 and (is_scatter(op.primitive) or op.primitive == "dynamic_update_slice")
        if same[0] == same[1] and (in_place or dims == results):
            made.kept |= read.kept

    def _with_bodies(self, op: Op) -> None:
        before: list[tuple[Any, ...]] = []
        for _ in range(PASSES):
            for holder in op.holders:
                self._hold(holder.value, holder.sources, holder.views)
            for body in op.bodies:
                for inner in body.ops:
                    self._op(inner)
            for holder in op.holders:
                self._hold(holder.value, holder.sources, holder.views)
            after = [self._fact(holder.value).state() for holder in op.holders]
            if after == before:
                break
            before = after

    def _hold(self, value: int, sources: Iterable[Flow], views: Iterable[int]) -> None:
        fact = self._fact(value)
        for flow in sources:
            read, shift = self._fact(flow.value), flow.shift
            fact.mixed |= read.mixed
            fact.kept |= read.kept if not shift else 0
            for dim, (rows, joined) in enumerate(zip(read.rows, read.joined, strict=True)):
                if 0 <= dim - shift < len(fact.rows):
                    fact.rows[dim - shift] |= rows
                    fact.joined[dim - shift] |= joined
                else:
                    fact.mixed |= rows
        fact.settle()
        self.facts[value] = fact
        for view in views:
            self.facts[view] = _Fact([*fact.rows], [*fact.joined], fact.mixed, fact.kept)
