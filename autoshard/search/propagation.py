"""Propagation of given layouts through a program, without costs: each op splits the factors on which its operands are sharded.

Layouts go forward in program order; where operands disagree about an axis the larger one decides, and partial sums are reduced at once.
That is a plain sharding-propagation pass from annotated arguments, and the hand-written baselines use it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from typing import Any

from autoshard.ir import (
    NOWHERE,
    Assignment,
    Choice,
    Dims,
    Holder,
    Layout,
    Op,
    Rule,
    choice_for,
    divides,
    given_choice,
    legal,
    operand_layout,
    reductions,
    result_layout,
    shards,
    shift_layout,
)
from autoshard.primitives import is_loop, primitive
from autoshard.problem import Pin, Problem


@dataclass(slots=True)
class Propagation:
    """The layouts and choices of a propagation; they change as it proceeds.

    Attributes:
        problem: the program and its mesh.
        layouts: per value; absent values are replicated.
        choices: per op.
        frozen: ops whose choices may not change any more.
        kept: per holder that keeps its layout, whatever flows into it, the layout.
        sums: the holders of what loops only add up; they take the layout in which the sums are read after the loop.
        along: per replicated result of a concatenation or a slice along a sharded dimension, which the op cannot split, the layout of its
            operand; readers take the result in that layout, which is a local slice.
        chosen: the choices by op signature and operand layouts.
    """

    problem: Problem
    layouts: dict[int, Layout] = field(default_factory=dict)
    choices: dict[int, Choice] = field(default_factory=dict)
    frozen: set[int] = field(default_factory=set)
    kept: dict[int, Layout] = field(default_factory=dict)
    sums: set[int] = field(default_factory=set)
    along: dict[int, Layout] = field(default_factory=dict)
    chosen: dict[tuple[Any, ...], Choice] = field(default_factory=dict)

    def found(self) -> dict[str, Any]:
        """All but the problem: what the problem keeps does not refer to it, so that it is freed with its tables once nobody uses it."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name != "problem"}

    def copy(self) -> Propagation:
        """A copy that changes independently; only the choices of equal ops are shared."""
        copies = {name: getattr(self, name).copy() for name in ("layouts", "choices", "frozen", "kept", "sums", "along")}
        return replace(self, **copies)

    def assignment(self) -> Assignment:
        return Assignment(self.problem.mesh, dict(self.choices), dict(self.layouts))

    def seed(self, layouts: Mapping[int, Layout]) -> None:
        """Sets the layouts from which others follow."""
        self.layouts.update(layouts)

    def layout(self, value: int) -> Layout:
        return self.layouts.get(value, (-1,) * len(self.problem.mesh.axes))

    def forward(self) -> None:
        """Propagates layouts from operands to results over the whole program, and to the constants that loops read."""
        self._forward(self.problem.graph.ops)
        self._place_constants()

    def _forward(self, ops: Iterable[Op]) -> None:
        for op in ops:
            if op.bodies:
                self._control_flow(op)
                continue
            rule = self.problem.rules[op.index]
            if rule is None:
                continue
            if op.index not in self.frozen:
                self.choices[op.index] = self._choose(op, rule)
            self.settle(op, rule)

    def settle(self, op: Op, rule: Rule) -> None:
        """Sets the layouts of an op's results by its choice."""
        choice = self.choices[op.index]
        for k, value in enumerate(op.results):
            self.layouts[value] = result_layout(rule, choice, k)
        if primitive(op.primitive).kind in ("concatenation", "slice") and op.operands:
            self._split_along(op)

    def _split_along(self, op: Op) -> None:
        """Lets readers split the result of a concatenation or slice like its operand, such as two batches that are made one."""
        operand, value = op.operands[0], op.results[0]
        before, after, shape = self.split(operand), self.layout(value), self.problem.graph.values[value].shape
        if len(shape) != self.problem.graph.values[operand].rank:
            return
        layout = tuple(new if new >= 0 else old for old, new in zip(before, after, strict=True))
        if layout != after and divides(layout, shape, self.problem.mesh.sizes):
            self.along[value] = layout
        else:
            self.along.pop(value, None)

    def split(self, value: int) -> Layout:
        """The layout in which readers use a value."""
        return self.along.get(value) or self.layout(value)

    def _choose(self, op: Op, rule: Rule) -> Choice:
        """The choice that splits, per axis, the factor on which most operand bytes are sharded, as far as that is legal."""
        graph, facts = self.problem.graph, self.problem.facts
        pin = self.problem.pins.get(op.results[0]) if op.results else None
        if pin is not None:
            return _pinned_choice(rule, pin)
        if rule.given:
            return given_choice(rule, self.problem.mesh.sizes)
        key = facts.alike[op.index], *(None if facts.free[value] else self.split(value) for value in op.operands)
        if (choice := self.chosen.get(key)) is not None:
            return choice

        def voted(axis: int) -> list[int]:
            votes: dict[int, float] = {}
            for position, value in enumerate(op.operands):
                dim = self.split(value)[axis]
                factor = -1 if facts.free[value] else _major_factor(rule, rule.operands[position], dim)
                if factor >= 0:
                    votes[factor] = votes.get(factor, 0.0) + graph.values[value].nbytes
            return sorted(votes, key=lambda f: (-votes[f], f))

        choice = self.chosen[key] = _first_legal(rule, self.problem.mesh.sizes, voted)
        return choice

    def _control_flow(self, op: Op) -> None:
        """Sets holders to the layouts of the values that flow in; a carry that comes out sharded is sharded from the start."""
        inputs = {value for body in op.bodies for value in body.inputs}
        for holder in op.holders:
            if holder.value in inputs and holder.sources and not holder.sources[0].inside:
                self._place(holder, self.kept.get(holder.value) or self._flowed(holder, holder.sources[0]))
        for _ in range(3):
            for body in op.bodies:
                self._forward(body.ops)
            changed = False
            for holder in op.holders:
                for flow in holder.sources:
                    if holder.value in inputs and not flow.inside:
                        continue
                    layout = self._flowed(holder, flow)
                    if self._less_sharded(self.layout(holder.value), layout) and self._fits(holder.value, layout):
                        self._place(holder, layout)
                        changed = changed or holder.value in inputs
            if not changed:
                break

    def _place_constants(self) -> None:
        """Sets arrays of constants that a loop reads to the layout in which all its readers use them: that needs no communication."""
        graph, facts = self.problem.graph, self.problem.facts
        for holder in (holder for holder in graph.loop_constants() if facts.free[holder.sources[0].value]):
            wanted: set[Layout | None] = set()
            for value in (holder.value, *holder.views):
                wanted |= self._read_in(value)
            (layout, *others) = wanted or {None}
            if layout is not None and not others:
                self._place(holder, layout)

    def _place(self, holder, layout: Layout) -> None:
        if self.problem.graph.values[holder.value].rank and self._fits(holder.value, layout):
            for value in (holder.value, *holder.views):
                self.layouts[value] = layout

    def _fits(self, value: int, layout: Layout) -> bool:
        return all(dim < self.problem.graph.values[value].rank for dim in layout)

    def _flowed(self, holder, flow) -> Layout:
        """The layout in which a flow reaches its holder; a scanned dimension cannot stay sharded."""
        layout = self.layout(flow.value)
        if not flow.shift:
            return layout
        return shift_layout(layout, -flow.shift) or tuple(dim - flow.shift if dim >= flow.shift else -1 for dim in layout)

    def _less_sharded(self, old: Layout, new: Layout) -> bool:
        return sum(dim >= 0 for dim in old) < sum(dim >= 0 for dim in new)

    def backward(self) -> None:
        """Shards each unsharded op whose sharded readers all use one layout of its result in that layout, so that it is sliced early.

        That reaches ops on scalars, too, such as random bits, which have no sharded operand. Constants have the layouts of their readers.
        """
        self._backward(self.problem.graph.ops, self._wanted())

    def _backward(self, ops: Sequence[Op], wanted: dict[int, dict[Layout, None]]) -> None:
        free = self.problem.facts.free
        for op in reversed(ops):
            if op.bodies:
                self._stack(op, wanted)
                branches = () if is_loop(op.primitive) else op.holders
                self._hold((holder for holder in op.holders if holder.value in self.sums), wanted)
                self._hold((holder for holder in branches if holder.value in op.results), wanted)
                for body in reversed(op.bodies):
                    self._backward(body.ops, wanted)
                self._hold((holder for holder in branches if holder.value not in op.results), wanted)
                self._hold((holder for holder in op.holders if not branches and self._read_alike(holder)), wanted)
            rule = self.problem.rules[op.index]
            if rule is None or rule.given or op.index in self.frozen or len(op.results) != 1 or op.bodies or free[op.results[0]]:
                continue
            if any(factor.kind != "pass_through" for factor in rule.factors) or any(f >= 0 for f, _ in self.choices.get(op.index, ())):
                continue
            layouts = wanted.get(op.results[0])
            if not layouts or len(layouts) != 1:
                continue
            (layout,) = layouts
            where = dict(enumerate(rule.results[0]))
            if any(dim >= 0 and len(where[dim]) != 1 for dim in layout):
                continue
            choice = tuple((where[dim][0], -1) if dim >= 0 else NOWHERE for dim in layout)
            if legal(rule, choice, self.problem.mesh.sizes):
                self.choices[op.index] = choice
                self.settle(op, rule)
                for position, value in enumerate(op.operands):
                    wanted.setdefault(value, {})[operand_layout(rule, choice, position)] = None

    def _stack(self, op: Op, wanted: dict[int, dict[Layout, None]]) -> None:
        """Shards what a loop stacks in the one layout that its readers use; each trip then makes its slice in it."""
        for holder in op.holders:
            layouts = wanted.get(holder.value, {})
            if holder.value not in op.results or len(layouts) != 1 or any(dim >= 0 for dim in self.layout(holder.value)):
                continue
            (layout,) = layouts
            slices = [(flow.value, shift_layout(layout, flow.shift)) for flow in holder.sources if flow.inside and flow.shift]
            if len(slices) == len(holder.sources) and all(each is not None for _, each in slices):
                self._place(holder, layout)
                for value, each in slices:
                    wanted.setdefault(value, {})[each or layout] = None

    def _hold(self, holders: Iterable[Holder], wanted: dict[int, dict[Layout, None]]) -> None:
        """Shards holders in the one layout that readers of their views use, and so what flows into them."""
        for holder in holders:
            layouts = {layout for value in (holder.value, *holder.views) for layout in wanted.get(value, {})}
            if len(layouts) != 1 or any(dim >= 0 for dim in self.layout(holder.value)):
                continue
            (layout,) = layouts
            self.kept[holder.value] = layout
            self._place(holder, layout)
            for flow in holder.sources:
                wanted.setdefault(flow.value, {})[layout] = None

    def scatter(self) -> None:
        """Scatters partial sums whose sharded readers all use one layout onto it, instead of reducing them whole."""
        wanted = self._wanted()
        for op in self.problem.graph.walk():
            rule = self.problem.rules[op.index]
            choice = self.choices.get(op.index)
            if rule is None or choice is None or not reductions(rule, choice):
                continue
            layouts = wanted.get(op.results[0], {})
            if len(layouts) != 1:
                continue
            (layout,) = layouts
            self.choices[op.index] = _scattered(rule, choice, layout, self.problem.mesh.sizes)
            self.settle(op, rule)

    def gather_before_casts(self) -> None:
        """Moves gathers after a cast to more bytes before it: quantised weights are sent quantised."""
        graph, sizes = self.problem.graph, self.problem.mesh.sizes
        for op in reversed(graph.walk()):
            rule = self.problem.rules[op.index]
            if op.primitive != "convert_element_type" or rule is None or op.index in self.frozen or op.results[0] in graph.results:
                continue
            (narrow,), (wide,) = op.operands, op.results
            read = self._read_in(wide)
            if graph.values[narrow].itemsize >= graph.values[wide].itemsize or len(read) != 1:
                continue
            (layout,) = read
            choice = None if layout is None or layout == self.layout(wide) else choice_for(rule, 0, layout, sizes)
            if choice is not None and layout is not None and shards(layout, sizes) < shards(self.layout(wide), sizes):
                self.choices[op.index] = choice
                self.settle(op, rule)

    def _read_alike(self, holder: Holder) -> bool:
        """Whether all trips of a loop read a constant in one layout, such as a mask, which is then made in it."""
        constant = len(holder.sources) == 1 and not (holder.sources[0].inside or holder.sources[0].shift)
        return constant and len(read := self._read_in(holder.value)) == 1 and None not in read

    def _read_in(self, value: int) -> set[Layout | None]:
        """The layouts in which ops read a value; None stands for a reader without a choice."""
        ops, found = self.problem.graph.walk(), set[Layout | None]()
        for reader in self.problem.facts.readers[value]:
            rule, choice = self.problem.rules[reader], self.choices.get(reader)
            positions = (k for k, operand in enumerate(ops[reader].operands) if operand == value)
            found.update(operand_layout(rule, choice, k) if rule and choice else None for k in positions)
            found.update([None] if ops[reader].bodies else ())
        return found

    def _wanted(self) -> dict[int, dict[Layout, None]]:
        """Per value the sharded layouts in which its readers use it; an argument reads the result that it aliases."""
        graph = self.problem.graph
        wanted: dict[int, dict[Layout, None]] = {}
        for op in graph.walk():
            rule, choice = self.problem.rules[op.index], self.choices.get(op.index)
            if rule is None or choice is None or all(factor < 0 for factor, _ in choice):
                continue
            for position, value in enumerate(op.operands):
                layout = operand_layout(rule, choice, position)
                if any(dim >= 0 for dim in layout):
                    wanted.setdefault(value, {})[layout] = None
        for result, argument in graph.aliases:
            layout = self.layout(graph.arguments[argument])
            if any(dim >= 0 for dim in layout):
                wanted.setdefault(graph.results[result], {})[layout] = None
        return wanted


def _pinned_choice(rule: Rule, pin: Pin) -> Choice:
    """The choice whose result has the pinned layout; axes that the pin leaves open shard nothing."""
    dims = [min(allowed) for allowed in pin]
    return tuple((rule.results[0][dim][0], -1) if dim >= 0 and rule.results[0][dim] else NOWHERE for dim in dims)


def follow_layouts(
    problem: Problem, layouts: Mapping[int, Layout], sides: Mapping[int, tuple[Sequence[Layout], Sequence[Layout]]] | None = None
) -> Assignment:
    """The assignment whose ops split the factors that given layouts shard, those of results first.

    Args:
        layouts: per value, such as another propagation's; arguments keep theirs exactly.
        sides: per op, where known, the layouts of its operands and of its results while it runs.
    """
    run = Propagation(problem)
    run.seed(layouts)
    for op in problem.graph.walk():
        for holder in op.holders:
            layout = _storable(problem, holder, run.layout(holder.value))
            run.seed(dict.fromkeys((holder.value, *holder.views), layout))
        rule = problem.rules[op.index]
        if rule is not None:
            side = (sides or {}).get(op.index)
            ranked = partial(_factors_on, run, op, rule) if side is None else partial(_factors_in, rule, *side)
            choice = given_choice(rule, problem.mesh.sizes) if rule.given else _first_legal(rule, problem.mesh.sizes, ranked)
            if side is not None:
                choice = _scattered(rule, choice, run.layout(op.results[0]), problem.mesh.sizes)
            run.choices[op.index] = choice
            run.settle(op, rule)
    return run.assignment()


def _scattered(rule: Rule, choice: Choice, layout: Layout, sizes: tuple[int, ...]) -> Choice:
    """The choice with its partial sums scattered onto the layout of their value, where that is legal."""
    option = list(choice)
    for axis, operator, _ in reductions(rule, choice):
        if operator == "sum" and layout[axis] >= 0:
            option[axis] = (choice[axis][0], layout[axis])
    return tuple(option) if legal(rule, tuple(option), sizes) else choice


def _storable(problem: Problem, holder: Holder, layout: Layout) -> Layout:
    """The part of a layout that a holder can have: it divides the value, and stacked dimensions are not sharded."""
    stacked = max((-flow.shift for flow in holder.sources), default=0)
    legal_part = (-1,) * len(layout)
    for axis, dim in enumerate(layout):
        option = (*legal_part[:axis], dim, *legal_part[axis + 1 :])
        if dim >= stacked and divides(option, problem.graph.values[holder.value].shape, problem.mesh.sizes):
            legal_part = option
    return legal_part


def _factors_on(run: Propagation, op: Op, rule: Rule, axis: int) -> list[int]:
    """The factors that the axis shards in the op's results, then those in its operands, larger operands first."""
    values, facts = run.problem.graph.values, run.problem.facts
    tensors = [(rule.results[k], value) for k, value in enumerate(op.results)]
    operands = [(rule.operands[j], value) for j, value in enumerate(op.operands) if not facts.free[value]]
    found: dict[int, None] = {}
    for dims, value in (*tensors, *sorted(operands, key=lambda entry: -values[entry[1]].nbytes)):
        factor = _major_factor(rule, dims, run.layout(value)[axis])
        if factor >= 0:
            found[factor] = None
    return list(found)


def _factors_in(rule: Rule, operands: Sequence[Layout], results: Sequence[Layout], axis: int) -> list[int]:
    """The factors that the axis shards in these layouts, the results' first."""
    tensors = (*zip(rule.results, results, strict=True), *zip(rule.operands, operands, strict=True))
    factors = (_major_factor(rule, dims, layout[axis]) for dims, layout in tensors)
    return [factor for factor in dict.fromkeys(factors) if factor >= 0]


def _major_factor(rule: Rule, dims: Dims, dim: int) -> int:
    """The factor that an axis on this dimension splits: the first that can be split; -1 for none."""
    factors = dims[dim] if dim >= 0 else ()
    return next((factor for factor in factors if rule.factors[factor].shardable and rule.factors[factor].size > 1), -1)


def _first_legal(rule: Rule, sizes: tuple[int, ...], ranked: Callable[[int], Iterable[int]]) -> Choice:
    """The choice that gives each mesh axis in turn the first of its ranked factors that is legal with those before."""
    choice: Choice = (NOWHERE,) * len(sizes)
    for axis in range(len(sizes)):
        options = ((*choice[:axis], (factor, -1), *choice[axis + 1 :]) for factor in ranked(axis))
        choice = next((option for option in options if legal(rule, option, sizes)), choice)
    return choice
