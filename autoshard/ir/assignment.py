"""Assignments: a choice for every operation of a program and a layout for every value, which is all that a search decides."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from autoshard.ir.graph import Graph
from autoshard.ir.layout import Layout, Mesh, axes_of_product
from autoshard.ir.rule import Rule
from autoshard.primitives import is_rearrangement

Choice = tuple[tuple[int, int], ...]
"""Per mesh axis, ``(factor, scatter)``: the factor that the axis splits, or -1; and for a reduction factor the result
dimension that a reduce_scatter splits, or -1 for an all_reduce."""

NOWHERE: tuple[int, int] = (-1, -1)
"""A mesh axis that splits none of an op's factors."""


@dataclass(frozen=True, slots=True, eq=False)
class Assignment:
    """The layouts and choices of a program on a mesh.

    Attributes:
        mesh: the logical mesh.
        choices: per op index its choice; absent for control flow and for replicated ops.
        layouts: per value number the layout in which it is stored; absent where it is replicated or left to the lowering.
        copies: per value number a second layout, resharded from the first once and shared by readers.
        ahead: per value number the layout to which a scan gathers it one trip ahead (`autoshard.cost.prefetch`).
        windows: per op index of a windowed product the operand whose blocks circulate, or -1 for its result (`autoshard.cost.windows`).
    """

    mesh: Mesh
    choices: Mapping[int, Choice]
    layouts: Mapping[int, Layout]
    copies: Mapping[int, Layout] = field(default_factory=dict)
    ahead: Mapping[int, Layout] = field(default_factory=dict)
    windows: Mapping[int, int] = field(default_factory=dict)

    def layout(self, value: int) -> Layout:
        """The layout in which a value is stored."""
        found = self.layouts.get(value)
        return (-1,) * len(self.mesh.axes) if found is None else found

    def choice(self, op: int) -> Choice:
        """The choice of an op."""
        found = self.choices.get(op)
        return (NOWHERE,) * len(self.mesh.axes) if found is None else found


def served_from(own: Layout, copy: Layout | None, target: Layout, seconds: Callable[[Layout, Layout], float]) -> Layout:
    """The layout from which a reader's operand is resharded: the value's own, or its copy's where that is cheaper.

    Args:
        own: the layout in which the value is stored.
        copy: the layout of its copy, if it has one.
        target: the layout in which the reader needs it.
        seconds: the cost of a reshard from one layout to another.
    """
    if copy is None or target in (own, copy):
        return own
    return own if seconds(own, target) <= seconds(copy, target) else copy


def operand_layout(rule: Rule, choice: Choice, operand: int) -> Layout:
    """The layout in which an op with this choice reads its operand."""
    return _layout(rule.operands[operand], choice)


def computed_layout(rule: Rule, choice: Choice, result: int) -> Layout:
    """The layout of an op's result as computed, before partial results are combined."""
    return _layout(rule.results[result], choice)


def result_layout(rule: Rule, choice: Choice, result: int) -> Layout:
    """The layout of an op's result after partial results are combined, scattered axes included."""
    layout = list(_layout(rule.results[result], choice))
    for axis, (_, scatter) in enumerate(choice):
        if scatter >= 0:
            layout[axis] = scatter
    return tuple(layout)


def result_layouts(graph: Graph, assignment: Assignment) -> tuple[Layout, ...]:
    """The layout of each result of the program; new state takes the layout of the argument that it replaces."""
    layouts = [assignment.layout(value) for value in graph.results]
    for result, argument in graph.aliases:
        layouts[result] = assignment.layout(graph.arguments[argument])
    return tuple(layouts)


def reductions(rule: Rule, choice: Choice) -> tuple[tuple[int, str, int], ...]:
    """The axes whose partial results must be combined: ``(axis, operator, scatter dimension or -1)``."""
    found = []
    for axis, (factor, scatter) in enumerate(choice):
        if factor >= 0 and rule.factors[factor].kind == "reduction":
            found.append((axis, rule.factors[factor].operator or "sum", scatter))
    return tuple(found)


def exchanges(rule: Rule, choice: Choice, sizes: tuple[int, ...]) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """The split factors whose shards exchange data, in order, each with the mesh axes that split it."""
    found: dict[int, tuple[int, ...]] = {}
    for axis, (factor, _) in enumerate(choice):
        if factor >= 0 and rule.factors[factor].sends and sizes[axis] > 1:
            found[factor] = (*found.get(factor, ()), axis)
    return tuple(sorted(found.items()))


def sent_tensors(rule: Rule, choice: Choice, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """The tensors of which shards exchange parts, numbered operands first."""
    return tuple(dict.fromkeys(send.tensor for factor, _ in exchanges(rule, choice, sizes) for send in rule.factors[factor].sends))


def _layout(dims: tuple[tuple[int, ...], ...], choice: Choice) -> Layout:
    layout = [-1] * len(choice)
    for axis, (factor, _) in enumerate(choice):
        if factor >= 0:
            for dim, factors in enumerate(dims):
                if factor in factors:
                    layout[axis] = dim
    return tuple(layout)


def view_of(primitive: str, rule: Rule | None, layout: Layout, sizes: tuple[int, ...]) -> Layout | None:
    """The operand layout from which a rearranging operation makes a result of this layout; None where there is none.

    With it, a weight and its transpose are gathered once.
    """
    choice = None if not is_rearrangement(primitive) or rule is None else choice_for(rule, 0, layout, sizes)
    return None if rule is None or choice is None else operand_layout(rule, choice, 0)


def choice_for(rule: Rule, result: int, layout: Layout, sizes: tuple[int, ...]) -> Choice | None:
    """The choice that computes a result in a layout without communication; None where there is none."""
    left = {factor: entry.size for factor, entry in enumerate(rule.factors)}
    choice = []
    for dim, size in zip(layout, sizes, strict=True):
        factor = next((f for f in rule.results[result][dim] if left[f] > 1), -1) if dim >= 0 else -1
        if dim >= 0 and (factor < 0 or left[factor] % size):
            return None
        if factor >= 0:
            left[factor] //= size
        choice.append((factor, -1))
    found = tuple(choice)
    sends = reductions(rule, found) or exchanges(rule, found, sizes)
    return None if sends or not legal(rule, found, sizes) or result_layout(rule, found, result) != layout else found


def given_choice(rule: Rule, sizes: tuple[int, ...]) -> Choice:
    """The choice of an op that the program fixes; an op on a mesh that has other axes than the program's splits nothing.

    Args:
        rule: with ``given`` axes.
        sizes: of the mesh axes.
    """
    choice = [NOWHERE] * len(sizes)
    for axes, (_, factor) in zip(axes_of_product([size for size, _ in rule.given], sizes) or (), rule.given, strict=False):
        for axis in axes if factor >= 0 else ():
            choice[axis] = factor, -1
    return tuple(choice)


def legal(rule: Rule, choice: Choice, sizes: tuple[int, ...]) -> bool:
    """Whether the choice divides every factor and keeps every dimension's axes in mesh and factor order.

    In a dimension of several factors a minor one is sharded only where its majors are fully sharded, and the axes of
    the major ones come first in the mesh; otherwise data would have to be permuted. Halos reach into the neighbouring
    shards, never beyond them. Only sums are scattered.
    """
    return bool(legal_choices(rule, (choice,), sizes))


def legal_choices(rule: Rule, choices: Iterable[Choice], sizes: tuple[int, ...]) -> list[Choice]:
    """The choices that are `legal`."""
    tried = list(choices)
    array = np.array(tried, np.int64).reshape(len(tried), len(sizes), 2)
    return [choice for choice, kept in zip(tried, are_legal(rule, array, sizes), strict=True) if kept]


def are_legal(rule: Rule, choices: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Which of some choices ``(n, n_axes, 2)`` are `legal`, as ``(n,)``."""
    split = choices[:, :, :1] == np.arange(len(rule.factors))  # by choice, axis and factor
    parts = np.where(split, np.array(sizes, np.int64)[:, None], 1).prod(axis=1)  # by choice and factor
    kept = np.ones(len(choices), bool)
    if not sizes:
        return kept
    for factor in range(len(rule.factors)):
        kept &= ~split[:, :, factor].any(axis=1) | _divides(rule, factor, parts[:, factor])
    for dim in (dim for tensor in (*rule.operands, *rule.results) for dim in tensor if len(dim) > 1):
        kept &= _in_order(rule, dim, split, parts)
    if (choices[:, :, 1] >= 0).any():
        kept &= _scatters_legal(rule, choices, sizes)
    return kept


def _divides(rule: Rule, factor: int, parts: np.ndarray) -> np.ndarray:
    """Whether a factor can be split into these numbers of equal shards, each with as many elements as it sends."""
    entry, tensors = rule.factors[factor], (*rule.operands, *rule.results)
    fits = (entry.size % parts == 0) & entry.shardable
    for send in entry.sends:
        for dim in tensors[send.tensor]:
            if factor in dim:
                fits &= send.count * parts <= math.prod(rule.factors[f].size for f in dim)
    return fits


def _in_order(rule: Rule, dim: tuple[int, ...], split: np.ndarray, parts: np.ndarray) -> np.ndarray:
    """Whether a dimension's split factors have fully sharded majors, whose axes come first."""
    n_axes = split.shape[1]
    kept, full, last = np.ones(len(split), bool), np.ones(len(split), bool), np.full(len(split), -1)
    for factor in dim:
        is_split = split[:, :, factor].any(axis=1)
        kept &= ~is_split | (full & (split[:, :, factor].argmax(axis=1) > last))
        last = np.where(is_split, n_axes - 1 - split[:, ::-1, factor].argmax(axis=1), last)
        full &= parts[:, factor] == rule.factors[factor].size
    return kept


def _scatters_legal(rule: Rule, choices: np.ndarray, sizes: tuple[int, ...]) -> np.ndarray:
    """Whether sums alone are scattered, to dimensions that divide, after all axes that split these."""
    scatters = choices[:, :, 1]
    if len(rule.results) != 1:
        return np.all(scatters < 0, axis=1)
    dims = rule.results[0]
    sums = np.array([factor.operator == "sum" for factor in rule.factors] + [False])  # the last entry is for no factor
    kept = np.all((scatters < 0) | (sums[choices[:, :, 0]] & (scatters < len(dims))), axis=1)
    dim_of = np.full(len(rule.factors) + 1, -1)
    for dim, factors in enumerate(dims):
        dim_of[list(factors)] = dim
    before = dim_of[choices[:, :, 0]]
    for axis in range(len(sizes)):
        later = before[:, axis + 1 :] == scatters[:, axis, None]
        kept &= (scatters[:, axis] < 0) | ~later.any(axis=1)
    for dim, factors in enumerate(dims):
        count = np.where((before == dim) | (scatters == dim), np.array(sizes, np.int64), 1).prod(axis=1)
        count *= np.where((before == dim) & (scatters == dim), np.array(sizes, np.int64), 1).prod(axis=1)
        kept &= math.prod(rule.factors[factor].size for factor in factors) % count == 0
    return kept
