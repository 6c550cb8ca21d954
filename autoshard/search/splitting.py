"""From the best mesh of few axes to a better one: recursive programming over the prime factors of its axes.

Model. Every axis is split into axes of prime size, on the wires that the axis has. From the labels that the answer has on the axes they
come from, each of these is freed, slowest links first, given all others, and solved exactly for the whole program; then sweeps, to a
fixpoint (`autoshard.search.recursive_programming`). That costs tables of one small axis at a time, near-linear in operations and in the
number of prime factors, however many meshes there are. What it finds is not an answer but a promise: if it gains what is worth a search,
neighbours are merged back, two at a time where it costs least, until few are left, which make the mesh to be searched.

A program so gets a third axis where its tensors want one: heads over four devices where there are four, and what is left over eight.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

from autoshard.ir import Mesh
from autoshard.judge.approximate_reshard import ManyAxesModel
from autoshard.problem import BUDGETS, Hints, Label, Problem, folded
from autoshard.search.meshes import NAMES
from autoshard.search.recursive_programming import Descent, RecursiveProgramming, labels_cost
from autoshard.search.searcher import Progress, silent
from autoshard.search.shells import Shells


def finer(
    problem: Problem,
    labels: Sequence[Label] | None,
    most_axes: int,
    least_gain: float,
    placed: Callable[[Mesh], Sequence[Problem]],
    progress: Progress = silent,
) -> tuple[Problem, Hints] | None:
    """A problem of more axes on which recursive programming finds what is faster than an answer, and hints to begin there; or None.

    Args:
        labels: the answer, on the problem's mesh; None: recursive programming's, whatever it holds.
        most_axes: how many axes there may be.
        least_gain: of the objective, that is worth a search.
        placed: the problems of a mesh in its placements.
    """
    if labels is None:
        labels, _ = _settled(problem, problem.start(), progress)
    if (found := _finer_mesh(problem, labels, most_axes, least_gain, progress)) is None:
        return None
    mesh, start = found
    best, least = None, labels_cost(problem, labels) * (1 - least_gain)
    for other in placed(mesh):
        settled, cost = _settled(other, start, progress)
        if cost <= least:
            best, least = (other, Hints(start=tuple(settled))), cost
    return best


def _finer_mesh(
    problem: Problem, labels: Sequence[Label], most_axes: int, least_gain: float, progress: Progress
) -> tuple[Mesh, list[Label]] | None:
    """The mesh that promises as much, and labels on it to begin from."""
    mesh, parents = _split(problem)
    if len(parents) <= len(problem.mesh.axes):
        return None
    pins = {value: tuple(pin[parent] for parent in parents) for value, pin in problem.pins.items()}
    fine = Problem(problem.profile, ManyAxesModel(problem.model.cluster, mesh), pins, like=problem)
    start = [tuple(label[parent] for parent in parents) for label in labels]
    found, cost = _settled(fine, start, progress)
    if cost > labels_cost(fine, start) * (1 - least_gain):
        return None
    return _merged(fine, found, most_axes)


def _settled(problem: Problem, labels: Sequence[Label], progress: Progress) -> tuple[list[Label], float]:
    """Labels that no single axis can improve, equal layers alike, and their cost."""
    small = folded(problem) or problem
    shells = Shells(BUDGETS.finer_entries, BUDGETS.table_sweeps, BUDGETS.axis_tolerance, progress)
    descent = Descent(RecursiveProgramming(max_sweeps=BUDGETS.finer_sweeps), small, progress, shells)
    found = descent.settle(small.fold(labels), {})
    return small.unfold(found), labels_cost(small, found)


def _split(problem: Problem) -> tuple[Mesh, list[int]]:
    """The problem's mesh with every axis split into prime ones, those of the slower links first; and per axis the one it comes from."""
    mesh = problem.mesh
    order = list(range(len(problem.model.cluster.dimensions)) if mesh.placement is None else mesh.placement.dims)
    axes: list[tuple[str, int]] = []
    parents: list[int] = []
    for parent, name in enumerate(mesh.names):
        spans = sorted(problem.model.communication.links[parent].spans, key=lambda span: (order.index(span.dim), -span.stride))
        factors = [factor for span in spans for factor in _primes(span.extent)]
        axes.extend((f"{name}.{number}", factor) for number, factor in enumerate(factors))
        parents.extend(parent for _ in factors)
    placed = mesh.placement
    if placed is not None:
        dealt = tuple(axis for parent in placed.axes for axis in range(len(axes)) if parents[axis] == parent)
        placed = replace(placed, axes=dealt)
    return Mesh(tuple(axes), placed), parents


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


def _merged(problem: Problem, labels: Sequence[Label], most_axes: int) -> tuple[Mesh, list[Label]] | None:
    """The mesh of groups of neighbours, joined where labels that are alike in both cost least, and these; None where none can be."""
    small = folded(problem) or problem
    found = small.fold(labels)
    ways = [way for begun in (found, _sorted(small, found)) if (way := _joined(small, begun, most_axes)) is not None]
    if not ways:
        return None
    _, groups, found = min(ways, key=lambda way: way[0])
    found = small.unfold(found)
    return _of_groups(problem.mesh, groups), [tuple(label[group[0]] for group in groups) for label in found]


def _joined(problem: Problem, labels: list[Label], most_axes: int) -> tuple[float, list[list[int]], list[Label]] | None:
    """Groups of neighbouring axes, as few as there may be; labels that are alike in each, and their cost."""
    groups = [[axis] for axis in range(len(problem.mesh.axes))]
    dealt, cost = _dealt(problem.mesh), labels_cost(problem, labels)
    while len(groups) > most_axes:
        options = []
        for left, (one, other) in enumerate(pairwise(groups)):
            if dealt.index(one[-1]) + 1 == dealt.index(other[0]):  # neighbours on the wires as well
                for kept, lost in ((one, other), (other, one)):
                    alike = _alike(problem, labels, kept, lost)
                    options.append((labels_cost(problem, alike), left, alike))
        if not options:
            return None
        cost, left, labels = min(options, key=lambda option: option[:2])
        groups[left : left + 2] = [groups[left] + groups[left + 1]]
    return cost, groups, labels


def _sorted(problem: Problem, labels: Sequence[Label]) -> list[Label]:
    """The labels with what axes of equal sizes do exchanged, so that neighbours do the same; where that is not legal, as they are."""
    sizes = problem.mesh.sizes
    order, left = [0], list(range(1, len(sizes)))
    for size in sizes[1:]:
        alike = {axis: sum(label[axis] == label[order[-1]] for label in labels) for axis in left if sizes[axis] == size}
        order.append(max(alike, key=lambda axis: (alike[axis], -axis)))
        left.remove(order[-1])
    exchanged = [tuple(label[axis] for axis in order) for label in labels]
    return [new if problem.offered(node, new) else old for node, (new, old) in enumerate(zip(exchanged, labels, strict=True))]


def _dealt(mesh: Mesh) -> tuple[int, ...]:
    """The mesh's axes as they are laid over the wires, the slowest first."""
    return tuple(range(len(mesh.axes))) if mesh.placement is None else mesh.placement.axes


def _of_groups(mesh: Mesh, groups: Sequence[Sequence[int]]) -> Mesh:
    """The mesh of groups of another one's axes."""
    placed, dealt = mesh.placement, _dealt(mesh)
    if placed is not None:
        order = sorted(range(len(groups)), key=lambda number: dealt.index(groups[number][0]))
        placed = replace(placed, axes=tuple(order))
    return Mesh(tuple((name, math.prod(mesh.sizes[axis] for axis in group)) for name, group in zip(NAMES, groups, strict=False)), placed)


def _alike(problem: Problem, labels: Sequence[Label], kept: Sequence[int], lost: Sequence[int]) -> list[Label]:
    """The labels with the same on all of some axes as on the kept ones; where that is not legal, as on the lost ones, or nothing."""
    found, nowhere = [], problem.start()
    for node, label in enumerate(labels):
        for part in (label[kept[0]], label[lost[0]], nowhere[node][0]):
            same = tuple(part if axis in kept or axis in lost else old for axis, old in enumerate(label))
            if problem.offered(node, same):
                break
        found.append(same)
    return found
