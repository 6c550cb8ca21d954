"""Axis splitting: a mesh whose axes are split into prime factors, and its labels merged back onto a mesh of few axes.

On prime axes a search considers every way to use part of an axis, one small axis at a time. Of many devices factors are products of a few
primes, so that there are at most `Budgets.split_axes` of them: a search takes no longer on more devices. Labels found are merged back:
neighbouring axes are joined, two at a time where equal labels on both cost least, until few enough are left. So a program gets a third axis
where its tensors want one: heads over four devices where there are four heads, and another dimension over eight.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from autoshard.budgets import BUDGETS
from autoshard.ir import Mesh
from autoshard.judge.approximate_reshard import ManyAxesModel
from autoshard.problem import Label, Problem
from autoshard.reductions import symmetry


@dataclass(frozen=True, slots=True, eq=False)
class AxisSplit:
    """A problem on the prime factors of another one's mesh axes.

    Attributes:
        problem: on the mesh of split axes; reshards over so many axes cost an estimate.
        parents: per split axis the axis that it is a factor of.
    """

    problem: Problem
    parents: tuple[int, ...]

    def project(self, labels: Sequence[Label]) -> list[Label]:
        """The labels on the split axes that mean the same as some on the given mesh."""
        return [tuple(label[parent] for parent in self.parents) for label in labels]

    def invert(self, labels: Sequence[Label], names: Sequence[str]) -> tuple[Mesh, list[Label]] | None:
        """The mesh of merged axes on which labels cost least, and these labels there.

        Args:
            names: of the axes of that mesh, which has so many at most.

        Returns:
            None where axes cannot be merged to so few.
        """
        small = symmetry.apply(self.problem) or self.problem
        found = small.project(labels)
        merged = [way for start in (found, _sorted(small, found)) if (way := _merged(small, start, len(names))) is not None]
        if not merged:
            return None
        _, groups, found = min(merged, key=lambda way: way[0])
        mesh = _mesh_of_groups(self.problem.mesh, groups, names)
        return mesh, [tuple(label[group[0]] for group in groups) for label in small.invert(found)]


def apply(problem: Problem) -> AxisSplit | None:
    """The problem on the prime factors of its mesh's axes; None where all axes are prime."""
    mesh, parents = _split(problem)
    if len(parents) <= len(problem.mesh.axes):
        return None
    pins = {value: tuple(pin[parent] for parent in parents) for value, pin in problem.pins.items()}
    return AxisSplit(Problem(problem.facts, ManyAxesModel(problem.model.cluster, mesh), pins, like=problem), tuple(parents))


def _split(problem: Problem) -> tuple[Mesh, list[int]]:
    """The problem's mesh with every axis split into prime factors, those of slower links first; and per factor its axis."""
    mesh = problem.mesh
    order = list(range(len(problem.model.cluster.dimensions)) if mesh.placement is None else mesh.placement.dims)
    links = problem.model.communication.links
    spans = [sorted(link.spans, key=lambda span: (order.index(span.dim), -span.stride)) for link in links]
    factors = iter(_factors([span.extent for some in spans for span in some]))
    axes: list[tuple[str, int]] = []
    parents: list[int] = []
    for parent, name in enumerate(mesh.names):
        own = [factor for _ in spans[parent] for factor in next(factors)]
        axes.extend((f"{name}.{number}", factor) for number, factor in enumerate(own))
        parents.extend(parent for _ in own)
    placed = mesh.placement
    if placed is not None:
        dealt = tuple(axis for parent in placed.axes for axis in range(len(axes)) if parents[axis] == parent)
        placed = replace(placed, axes=dealt)
    return Mesh(tuple(axes), placed), parents


def n_factors(sizes: Sequence[int]) -> int:
    """The number of axes that axes of these sizes are split into; nearly so where an axis has several links."""
    return sum(map(len, _factors(sizes)))


def _factors(sizes: Sequence[int]) -> list[list[int]]:
    """The factors of each size: primes, or where these are too many, the smallest neighbours joined.

    >>> _factors([12, 2]), [len(some) for some in _factors([2**9, 2**7])]
    ([[3, 2, 2], [2]], [4, 4])
    """
    found = list(map(_primes, sizes))
    while sum(map(len, found)) > BUDGETS.split_axes and any(len(some) > 1 for some in found):
        pairs = ((some[k] * some[k + 1], -len(some), number, k) for number, some in enumerate(found) for k in range(len(some) - 1))
        product, _, number, k = min(pairs)
        found[number][k : k + 2] = [product]
    return found


def _primes(n: int) -> list[int]:
    """The prime factors of a number, largest first.

    >>> _primes(12)
    [3, 2, 2]
    """
    found, prime = [], 2
    while n > 1:
        while n % prime == 0:
            found.append(prime)
            n //= prime
        prime += 1
    return found[::-1]


def _merged(problem: Problem, labels: list[Label], most_axes: int) -> tuple[float, list[list[int]], list[Label]] | None:
    """Labels that are equal on all axes of a group, their cost, and the groups, as few as there may be, each of neighbouring axes."""
    groups = [[axis] for axis in range(len(problem.mesh.axes))]
    order, cost = _link_order(problem.mesh), problem.cost_of(labels)
    while len(groups) > most_axes:
        options = []
        for left, (one, other) in enumerate(pairwise(groups)):
            if order.index(one[-1]) + 1 == order.index(other[0]):  # neighbours on the links as well
                for kept, lost in ((one, other), (other, one)):
                    equal = _equal_on(problem, labels, kept, lost)
                    options.append((problem.cost_of(equal), left, equal))
        if not options:
            return None
        cost, left, labels = min(options, key=lambda option: option[:2])
        groups[left : left + 2] = [groups[left] + groups[left + 1]]
    return cost, groups, labels


def _sorted(problem: Problem, labels: Sequence[Label]) -> list[Label]:
    """The labels with axes of equal sizes permuted, so that neighbours split the same dimensions; unchanged where that is not legal."""
    sizes = problem.mesh.sizes
    order, left = [0], list(range(1, len(sizes)))
    for size in sizes[1:]:
        alike = {axis: sum(label[axis] == label[order[-1]] for label in labels) for axis in left if sizes[axis] == size}
        order.append(max(alike, key=lambda axis: (alike[axis], -axis)))
        left.remove(order[-1])
    exchanged = [tuple(label[axis] for axis in order) for label in labels]
    return [new if problem.allows(variable, new) else old for variable, (new, old) in enumerate(zip(exchanged, labels, strict=True))]


def _link_order(mesh: Mesh) -> tuple[int, ...]:
    """The mesh's axes in the order in which they are placed on links, the slowest first."""
    return tuple(range(len(mesh.axes))) if mesh.placement is None else mesh.placement.axes


def _mesh_of_groups(mesh: Mesh, groups: Sequence[Sequence[int]], names: Sequence[str]) -> Mesh:
    """The mesh whose axes are groups of another one's axes."""
    placed, dealt = mesh.placement, _link_order(mesh)
    if placed is not None:
        order = sorted(range(len(groups)), key=lambda number: dealt.index(groups[number][0]))
        placed = replace(placed, axes=tuple(order))
    return Mesh(tuple((name, math.prod(mesh.sizes[axis] for axis in group)) for name, group in zip(names, groups, strict=False)), placed)


def _equal_on(problem: Problem, labels: Sequence[Label], kept: Sequence[int], lost: Sequence[int]) -> list[Label]:
    """Labels equal on all axes of both groups: as on the kept ones, or where that is not legal as on the lost ones, or replicated."""
    found, nowhere = [], problem.start()
    for variable, label in enumerate(labels):
        for part in (label[kept[0]], label[lost[0]], nowhere[variable][0]):
            same = tuple(part if axis in kept or axis in lost else old for axis, old in enumerate(label))
            if problem.allows(variable, same):
                break
        found.append(same)
    return found
